"""Images of sequences, for the tests of saving and loading: which rows some sequences of a model
have and share, numbered as a file numbers them, and the bytes of that. Written from the format, not
from the C code.
"""
import struct

import kv_model as kv


def image_of(model, ids):
    """The sequences `ids` in this order, in the form that the model loads, but with numbers in the
    order of the first visit: {"seqs": {id: (positions, states, clean)}, "groups": {group: (rows,
    {id: (base, numbers)})}}."""
    image = {"seqs": {}, "groups": {}}
    for s in ids:
        q = model.seqs[s]
        image["seqs"][s] = q.pos[:], q.state[:], q.clean
    for g in model.attention:
        numbers, parts = {}, {}
        for s in ids:
            q = model.seqs[s]
            parts[s] = q.base[g], [numbers.setdefault(c, len(numbers)) for c in q.cells[g]]
        image["groups"][g] = [model.mem[g][c] for c in numbers], parts
    return image


def renamed(image, into):
    """The image with other ids, in order."""
    ids = dict(zip(image["seqs"], into, strict=True))
    return {"seqs": {ids[s]: v for s, v in image["seqs"].items()},
            "groups": {g: (rows, {ids[s]: v for s, v in parts.items()})
                       for g, (rows, parts) in image["groups"].items()}}


def runs_of(values):
    """[(index, value)] where a value does not follow from the one before."""
    return [(i, v) for i, v in enumerate(values) if i == 0 or v != values[i - 1] + 1]


def spans_of(numbers):
    return [(first, n) for _, first, n in kv.spans_of(range(len(numbers)), numbers)]


def encode(image, groups):
    """The sections, as hexadecimal digits."""
    words = [[len(image["seqs"]), len(groups)]]
    for s, (pos, _, clean) in image["seqs"].items():
        runs = runs_of(pos)
        words[0] += [s, len(pos), clean, len(runs), *(x for run in runs for x in run)]
    for g, (rows, parts) in image["groups"].items():
        words.append([groups[g].w or 0, len(rows)])
        for base, numbers in parts.values():
            spans = spans_of(numbers)
            words[-1] += [base, len(spans), *(x for span in spans for x in span)]
    return [struct.pack(f"<{len(w)}I", *w).hex() for w in words]


def kept_numbers(image, g, bases):
    """Row numbers that are there once the sequences have these bases."""
    _, parts = image["groups"][g]
    return sorted({n for s, (base, numbers) in parts.items()
                   for n in numbers[bases[s] - base:]})
