"""minfer session diff: the first thing in which two session files differ.

From the outside in: the header, kinds, sequences, where their rows are, the rows, the host state. A
step may rely on all before it being equal. Last come the bytes of every section, so that equal is
equal byte for byte.
"""

import json
import os
from bisect import bisect_right
from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import NamedTuple

import numpy as np

import minfer
from minfer.tools.render import one_line, printable
from minfer.tools.session import opened

CHUNK_BYTES = 1 << 20  # compared at a time
HEADER = ("version", "kv_format", "flags", "device", "n_layer", "n_ctx", "n_embd", "n_head_kv",
          "head_dim", "row_bytes", "fingerprint")  # fmt: skip


class Pair(NamedTuple):
    """A thing that both files have, or may have: None is what one of them lacks."""

    field: str
    a: int | str | None
    b: int | str | None


Pairs = Iterator[Pair]


def main(args) -> int:
    """Runs the subcommand; returns the exit status."""
    with opened(args.file) as a, opened(args.other) as b:
        found = first_difference(a, b)
    if args.json:
        print(json.dumps({"equal": not found, **(found._asdict() if found else {})}))
    elif found:
        values = zip((found.a, found.b), (args.file, args.other))
        each = (f"{_shown(value)} in {printable(path)}" for value, path in values)
        print(f"{printable(found.field)}: {', '.join(each)}")
    else:
        print("equal")
    return 1 if found else 0


def first_difference(a: minfer.SessionFile, b: minfer.SessionFile) -> Pair | None:
    """None if the files are equal byte for byte."""
    steps = (_header, _kinds, _seqs, _spans, _rows, _host, _sections)
    pairs = chain.from_iterable(step(a, b) for step in steps)
    return next((pair for pair in pairs if pair.a != pair.b), None)


def _header(a: minfer.SessionFile, b: minfer.SessionFile) -> Pairs:
    for name in HEADER:
        yield Pair(name, getattr(a.info, name), getattr(b.info, name))


def _kinds(a: minfer.SessionFile, b: minfer.SessionFile) -> Pairs:
    for layer in range(a.info.n_layer):
        yield Pair(f"layer {layer}, kind", *(f.groups[f.layer_group(layer)].kind for f in (a, b)))


def _seqs(a: minfer.SessionFile, b: minfer.SessionFile) -> Pairs:
    yield Pair("sequences", len(a.seqs), len(b.seqs))
    for i, (x, y) in enumerate(zip(a.seqs, b.seqs)):
        yield Pair(f"number of the sequence in place {i}", x.seq, y.seq)
        for name in ("len", "clean", "next_pos"):
            yield Pair(f"sequence {x.seq}, {name}", getattr(x, name), getattr(y, name))
        yield from _positions(a, b, i)


def _positions(a: minfer.SessionFile, b: minfer.SessionFile, i: int) -> Pairs:
    """Of the rows that both still have in some group."""
    for group in range(len(a.groups)):
        starts_a, starts_b = _starts(a, i, group), _starts(b, i, group)
        first = max(starts_a[0][0], starts_b[0][0]) if starts_a and starts_b else a.seqs[i].len
        for row in sorted({max(row, first) for row, _ in starts_a + starts_b}):
            if row < a.seqs[i].len:
                field = f"sequence {a.seqs[i].seq}, position of row {row}"
                yield Pair(field, _position(starts_a, row), _position(starts_b, row))


def _starts(file: minfer.SessionFile, i: int, group: int) -> list[tuple[int, int]]:
    """(row, position) where each span starts; rows are counted from the sequence's first."""
    spans, starts = file.spans(i, group), []
    row = file.seqs[i].len - sum(span.len for span in spans)
    for span in spans:
        starts.append((row, span.pos))
        row += span.len
    return starts


def _position(starts: list[tuple[int, int]], row: int) -> int:
    first, pos = starts[bisect_right(starts, row, key=lambda start: start[0]) - 1]
    return pos + row - first


def _spans(a: minfer.SessionFile, b: minfer.SessionFile) -> Pairs:
    for group in range(len(a.groups)):
        for i, seq in enumerate(a.seqs):
            spans = zip_longest(a.spans(i, group), b.spans(i, group))
            for k, (x, y) in enumerate(spans):
                yield Pair(f"group {group}, sequence {seq.seq}, span {k}", _span(x), _span(y))


def _span(span: minfer.Span | None) -> str | None:
    if not span:
        return None
    return f"{span.len} from position {span.pos} in rows from {span.cell}"


def _rows(a: minfer.SessionFile, b: minfer.SessionFile) -> Pairs:
    n = a.info.row_bytes
    for layer in range(a.info.n_layer):
        for name in ("K", "V"):
            x, y = a.data(name, layer), b.data(name, layer)
            at = _first_unequal(x, y)
            if at is not None:
                row, byte = divmod(at, n)
                where = _reader(a, a.layer_group(layer), row)
                field = f"layer {layer}, {name}, row {row} ({where}): byte {byte} of {n}"
                yield Pair(field, f"{x[at]:#04x}", f"{y[at]:#04x}")


def _reader(file: minfer.SessionFile, group: int, row: int) -> str:
    """The first sequence that reads a row of a group, and the row's position."""
    return next(
        f"sequence {seq.seq}, position {span.pos + row - span.cell}"
        for i, seq in enumerate(file.seqs)
        for span in file.spans(i, group)
        if span.cell <= row < span.cell + span.len
    )


def _first_unequal(x: memoryview, y: memoryview) -> int | None:
    """The first byte at which two differ, as far as both go."""
    x, y = np.asarray(x), np.asarray(y)
    n = min(len(x), len(y))
    for start in range(0, n, CHUNK_BYTES):
        end = min(start + CHUNK_BYTES, n)
        unequal = x[start:end] != y[start:end]
        if unequal.any():
            return start + int(unequal.argmax())
    return None


def _host(a: minfer.SessionFile, b: minfer.SessionFile) -> Pairs:
    """By keys, if both are JSON objects."""
    try:
        x, y = (json.loads(file.host_state, parse_constant=str) for file in (a, b))
        if isinstance(x, dict) and isinstance(y, dict) and x != y:
            yield _deepest(x, y)
    except (ValueError, RecursionError):
        pass  # opaque: compared as a section


def _deepest(x, y) -> Pair:
    """The first difference of two JSON values that do differ; `...` is none at all."""
    path = "host state"
    while True:
        if isinstance(x, dict) and isinstance(y, dict):
            key = next(k for k in chain(x, y) if x.get(k, ...) != y.get(k, ...))
            path, x, y = f"{path}, {one_line(key)}", x.get(key, ...), y.get(key, ...)
        elif isinstance(x, list) and isinstance(y, list):
            both = enumerate(zip_longest(x, y, fillvalue=...))
            at, (x, y) = next((i, pair) for i, pair in both if pair[0] != pair[1])
            path = f"{path}[{at}]"
        else:
            break
    if isinstance(x, str) and isinstance(y, str):
        at = len(os.path.commonprefix([x, y]))
        path, x, y = f"{path}, from character {at}", x[at:], y[at:]
    return Pair(path, *(None if value is ... else one_line(json.dumps(value)) for value in (x, y)))


def _sections(a: minfer.SessionFile, b: minfer.SessionFile) -> Pairs:
    for section in a.sections:
        name, index = section.name, section.index
        x, y = a.data(name, index), b.data(name, index)
        field = "host state" if name == "HOST" else f"section {name} {index}"
        at = _first_unequal(x, y)
        if at is not None:
            yield Pair(f"{field}, byte {at}", f"{x[at]:#04x}", f"{y[at]:#04x}")
        yield Pair(f"{field}, bytes", len(x), len(y))


def _shown(value: int | str | None) -> str:
    if value is None:
        return "nothing"
    return f"{value:,}" if isinstance(value, int) else printable(value)
