"""What a session says when it goes on: the same code for the process that saved it, and, run as a
script, for a new one that loads it.

As a script it reads JSON from stdin: the model's path, the options of its engine, and jobs; each
job is a session file and what to do with it. It prints a list of what came of each.
"""

import json
import sys
from hashlib import blake2b
from itertools import combinations

import minfer

N_NEXT, N_SAMPLED = 64, 16  # tokens given, tokens sampled after them


def digest(*arrays):
    """Of all bits of some arrays."""
    hashed = blake2b(digest_size=16)
    for array in arrays:
        hashed.update(array.tobytes())
    return hashed.hexdigest()


def look(engine, seqs):
    """All that can be seen of some sequences but where their rows lie, and what is in them."""
    kv = engine.kv
    kv.check()
    out = []
    for seq in seqs:
        spans = [kv.spans(seq, g) for g in range(engine.n_groups)]
        positions = [[p for s in group for p in range(s.pos, s.pos + s.len)] for group in spans]
        out.append([kv.len(seq), kv.next_pos(seq), kv.max_trim(seq), positions])
    for g in range(engine.n_groups):
        cells = [
            {s.cell + i for s in kv.spans(seq, g) for i in range(s.len)} for seq in seqs
        ]
        out.append([len(set().union(*cells))] + [len(a & b) for a, b in combinations(cells, 2)])
    return out


def follow(engine, seqs, step, n_texts=4096):
    """The logits of N_NEXT tokens of each sequence, appended in batches of `step`, and what is
    sampled after those, of so many sequences: a list that JSON can hold."""
    rows = {seq: [] for seq in seqs}
    for at in range(0, N_NEXT, step):
        chunks = [
            minfer.Chunk(seq, [(7 * (at + i) + 31 * k) % 250 + 3 for i in range(step)], "all")
            for k, seq in enumerate(seqs)
        ]
        for seq, logits in zip(seqs, engine.forward_batch(chunks), strict=True):
            rows[seq].append(logits)
    logits = [digest(*rows[seq]) for seq in seqs]
    texts = []
    for k, seq in enumerate(seqs[:n_texts]):
        answer = engine.generate([40 + k], max_tokens=N_SAMPLED, temperature=0.8, seed=7, seq=seq)
        texts.append(["".join(answer), *answer.ids])
    return [logits, texts]


def undo(engine, seqs, most):
    """Takes back as many rows of each sequence as it can, at most so many: how many, and what it
    says then."""
    out = []
    for seq in seqs:
        n = min(engine.kv.max_trim(seq), most)
        engine.kv.trim(seq, n)
        if engine.kv.len(seq):
            out.append([n, digest(engine.forward_cached([9], seq))])
    return out


def run(job, engine):
    for seq in range(engine.n_seq):
        engine.kv.free(seq)
    state = engine.kv_load(job["path"], job["into"])
    seqs = job["seqs"]
    out = {"host": state.decode(), "look": look(engine, seqs)}
    out["next"] = follow(engine, seqs, job["step"], job["texts"])
    if job["undo"]:
        engine.kv_load(job["path"], job["into"])
        out["undo"] = undo(engine, seqs, job["undo"])
    return out


if __name__ == "__main__":
    wanted = json.load(sys.stdin)
    with minfer.load(wanted["model"], **wanted["options"]) as resumed:
        print(json.dumps([run(job, resumed) for job in wanted["jobs"]]))
