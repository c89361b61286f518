"""The C cell store against its specification (kv_model.py): the same random calls, good and bad, to
both. After each call the statuses are equal, and so are lengths, positions, max_trim, live rows,
cells used, shared and reserved, stale rows, and the CONTENT of every live row: a mirror of C's
arenas is kept here, in which rows are stored, moved and roped exactly as C's answers say. Dumps are
the bytes that follow from the model alone; loads bring images of earlier states and other stores.

Where rows lie is C's own affair; spans, statistics, windows and promises are checked against the
cells C itself reports. A refused call must leave all of its state as it was.

The C side is the program kv_drive, built by meson into tests/; MINFER_BUILD_DIR names the build
folder. MINFER_KV_SEEDS=n walks n seeds. A failure names its seed and the calls that led to it.
"""
import bisect
import collections
import copy
import functools
import json
import os
import random
import subprocess
from pathlib import Path

import pytest

import kv_image
import kv_model as kv
from kv_walk import STATUS, Walk, random_moves

MODES = ["causal", "range", "runs"]
MAX_SPANS = 64                          # KV_MAP_MAX_SPANS
SEEDS = int(os.environ.get("MINFER_KV_SEEDS", "120"))


def find_driver():
    root = Path(__file__).resolve().parent.parent
    named = os.environ.get("MINFER_BUILD_DIR")
    folders = [Path(named)] if named else sorted(root.glob("build*"))
    for folder in folders:
        if (folder / "tests" / "kv_drive").is_file():
            return folder / "tests" / "kv_drive"
    raise FileNotFoundError(f"tests/kv_drive is in none of {[str(f) for f in folders]}: build with "
                            "meson, or name the build folder in MINFER_BUILD_DIR")


# ---- the C store -------------------------------------------------------------------------------

class Driver:
    def __init__(self):
        self.process = subprocess.Popen([find_driver()], stdin=subprocess.PIPE, text=True,
                                        stdout=subprocess.PIPE)

    def ask(self, *calls):
        """Lines of JSON. Several calls at once spare the change of process."""
        lines = [" ".join(map(str, words)) for words in calls]
        self.process.stdin.write("\n".join(lines) + "\n")
        self.process.stdin.flush()
        answers = [self.process.stdout.readline() for _ in lines]
        for line, answer in zip(lines, answers):
            assert answer, f"kv_drive died at {line}"
        return answers

    def call(self, *calls):
        """[(status, what else there is)]"""
        out = [(status, rest) for status, *rest in map(json.loads, self.ask(*calls))]
        for words, (status, rest) in zip(calls, out):
            assert not status or rest[0].strip(), f"{words}: {status} without a line"
        return out

    def close(self):
        self.process.stdin.close()
        assert self.process.wait(20) == 0, "kv_drive failed at its end"


def cells_of(spans):
    return [c + i for _, c, n in spans for i in range(n)]


class CStore(Driver):
    """kv_drive, and `mem`: what its rows hold if the device does as it is told. Cell n_cells of a
    group is the spare row that moves may go through."""

    def __init__(self, model):
        super().__init__()
        words = [f"{g.kind} {size}" + (f" {g.w}" if g.w else "")
                 for g, size in zip(model.groups, model.size)]
        self.size = model.size
        self.mem = [[None] * (n + 1) for n in model.size]
        self.change("new", int(model.rope), model.n_seq, model.n_batch, *words)

    def change(self, *words):
        """Makes a call and reads the state after it."""
        answer, self.text = self.ask(words, ["state"])
        status, *rest = json.loads(answer)
        assert not status or rest[0].strip(), f"{words}: {status} without a line"
        self.read_state()
        return status, rest

    def read_state(self):
        check, *rest = json.loads(self.text)
        assert check == 0, f"kv_cache_check: {rest}"
        self.stats, seqs = rest
        self.rows = [[*s[:4], s[6]] for s in seqs]      # len, next_pos, max_trim, positions, clean
        self.spans = [[[tuple(x) for x in g] for g in s[4]] for s in seqs]
        self.held = [[[c + i for c, n in g for i in range(n)] for g in s[5]] for s in seqs]
        self.cells = [[cells_of(g) for g in s] for s in self.spans]

    def work(self, moves, roped, delta):
        for src, dst, n, g in moves:
            size = self.size[g]
            assert n > 0 and 0 <= min(src, dst) and max(src, dst) + n <= size + 1, "a wild move"
            self.mem[g][dst:dst + n] = self.mem[g][src:src + n]
        for g, cell, n in roped:
            for c in range(cell, cell + n):
                assert c < self.size[g] and self.mem[g][c], f"re-rope of cell {c}, without a row"
                self.mem[g][c] = self.mem[g][c]._replace(ropes=self.mem[g][c].ropes + (delta,))

    def forget(self):
        """Freed cells lose their rows, so that a read of one shows."""
        for g, mem in enumerate(self.mem):
            live = {c for s in self.cells for c in s[g]}
            self.mem[g] = [m if c in live else None for c, m in enumerate(mem)]


def check_state(c, model):
    """All that must be equal, and all that must fit together in what C says of its own cells."""
    for s, q in enumerate(model.seqs):
        want = [len(q.pos), kv.next_pos(q.pos), model.max_trim(s), q.pos, q.clean]
        assert c.rows[s] == want, f"sequence {s}: len, next_pos, max_trim, positions, clean " \
                                  f"{c.rows[s]}, not {want}"
        for g in model.attention:
            pos, cells = q.pos[q.base[g]:], c.cells[s][g]
            assert [p + i for p, _, n in c.spans[s][g] for i in range(n)] == pos, \
                f"live rows of sequence {s} in group {g}: {c.spans[s][g]}, not {pos}"
            assert c.spans[s][g] == kv.spans_of(pos, cells), f"spans of {s}, {g} are not maximal"
            assert [c.mem[g][x] for x in cells] == [model.mem[g][x] for x in q.cells[g]], \
                f"rows of sequence {s} in group {g}"
            assert len(c.held[s][g]) == len(q.reserved[g]), f"reserved by {s} in {g}"
    for g in model.attention:
        counts = collections.Counter(x for s in c.cells for x in s[g])
        held = [x for s in c.held for x in s[g]]
        assert len(set(held)) == len(held) and counts.keys().isdisjoint(held), "held cells"
        free = [x for x in range(c.size[g]) if x not in counts and x not in set(held)]
        runs = [n for _, _, n in kv.spans_of(free, free)]
        want = [c.size[g] - model._free(g), sum(r > 1 for r in model.refs[g]),
                sum(len(q.reserved[g]) for q in model.seqs),
                sum(model._stale(s, g) for s in range(model.n_seq)), len(runs), max(runs + [0])]
        assert c.stats[g][:6] == want, f"statistics of group {g}"
        assert c.size[g] - len(free) == want[0] and sum(n > 1 for n in counts.values()) == want[1]


def c_view(c, model):
    """The model with C's cells: what it says of windows is true of C's."""
    view = copy.copy(model)
    view.seqs = []
    for q, cells in zip(model.seqs, c.cells):
        view.seqs.append(copy.copy(q))
        view.seqs[-1].cells = cells
    return view


def check_windows(c, model, items, seen):
    """Each mode forced, and the cheapest of all: true ones tell every query exactly the cells of
    the rows it sees, others are refused."""
    view = c_view(c, model)
    words = [x for item in items for x in item]
    for g in model.attention:
        w, true = model.groups[g].w, []
        for mode in MODES:
            try:
                view.window(g, items, mode)
                true.append(mode)
            except kv.KvError:
                pass
        sets = (1, 2, 4, 7, 6)
        answers = c.call(*(["window", g, bits, *words] for bits in sets))
        for bits, (status, rest) in zip(sets, answers):
            asked = [m for i, m in enumerate(MODES) if bits >> i & 1]
            want = next((m for m in asked if m in true), None)
            seen["window " + "/".join(asked), status] += 1
            assert status == (0 if want else 16), f"group {g}, modes {asked}; true are {true}"
            if want:
                assert MODES[rest[0]] == want, f"group {g}: {rest}, not {want}"
                check_reads(view, g, items, want, rest[1], w)


def check_reads(view, g, items, mode, data, w):
    queries = [(s, p) for s, n in items for p in view.seqs[s].pos[-n:]]
    if mode == "range":
        data = dict(zip(queries, data, strict=True))
    elif mode == "runs":
        data = {s: spans for (s, _), spans in zip(items, data, strict=True)}
        assert all(len(spans) <= MAX_SPANS for spans in data.values())
    for s, p in queries:
        q = view.seqs[s]
        i, j = kv.first_seen(q.pos, w, p), bisect.bisect_right(q.pos, p)
        rows = list(zip(q.pos[i:j], q.cells[g][i - q.base[g]:j - q.base[g]]))
        assert kv.resolve(mode, data, s, p, w) == rows, f"group {g}, query {p} of {s} as {mode}"


# ---- the comparison ----------------------------------------------------------------------------

def compare(walk, c, seen):
    """One call to both."""
    model = walk.model
    name, args, want = walk.step()
    if name == "window":
        items = walk.queries()
        if items:
            check_windows(c, model, items, seen)
        return
    text, stats = c.text, c.stats
    status, rest = c.change(name, *args)
    assert status == want, f"status {status} {rest}, not {want}"
    seen[name, status] += 1
    if status or name in ("can", "cells", "dump"):
        assert c.text == text, "a call that changes nothing changed something"
        if name == "cells" and not status:
            g, s, first, n = args
            at = first - model.seqs[s].base[g]
            assert rest[0] == c.cells[s][g][at:at + n], "cells of a store"
        elif name == "dump" and not status:
            check_dump(c, walk, rest)
        return
    if name == "load":
        load_rows(c, walk, rest, seen)
    elif rest:                                            # the calls that give work
        c.work(*rest)
        for g in model.attention:
            moved = [m for m in rest[0] if m[3] == g]
            kind = "full" if model.groups[g].w is None else "sliding"
            seen[f"{name} moves, {kind}", 0] += bool(moved)
            seen[f"{name} regrouped", 0] += any(m[1] > m[0] for m in moved)
            seen[f"{name} through the spare row", 0] += any(m[1] == c.size[g] for m in moved)
            if name not in ("rm", "shift"):             # cached cells are stale: holders must see
                assert bool(moved) == (c.stats[g][7] != stats[g][7]), "generation"
            assert (c.stats[g][6] - stats[g][6]) in (0, name == "append" and bool(moved)), \
                "compactions"
    c.forget()
    items = list(zip(args[::2], args[1::2])) if name == "append" else []
    for s, n in items:
        for g in model.attention:
            q = model.seqs[s]
            for c_cell, cell in zip(c.cells[s][g][-n:], q.cells[g][-n:]):
                c.mem[g][c_cell] = model.mem[g][cell]
    check_state(c, model)
    check_promise(c, model, name, args)
    if name == "load":
        check_saved_again(c, walk)
    if items:
        check_windows(c, model, items, seen)
    for g in model.attention:
        seen["lost rows", 0] += any(q.base[g] for q in model.seqs)
        seen["shared rows", 0] += any(r > 1 for r in model.refs[g])


def check_dump(c, walk, rest):
    """The bytes that follow from the model alone; and the rows lie where C says."""
    n = len(c.size) + 1
    assert rest[:n] == kv_image.encode(walk.image, walk.model.groups), "the bytes of an image"
    for g, (rows, _) in walk.image["groups"].items():
        found = {row + i: cell + i for row, cell, k in rest[n + g] for i in range(k)}
        assert list(found) == list(range(len(rows))), "every row once, in the order of the numbers"
        assert [c.mem[g][cell] for cell in found.values()] == rows, "rows of an image"


def load_rows(c, walk, rest, seen):
    """The device copies each row that was kept to the cell that C gave it."""
    for g, (rows, parts) in walk.image["groups"].items():
        found = {row + i: cell + i for row, cell, k in rest[g] for i in range(k)}
        bases = {s: walk.model.seqs[s].base[g] for s in parts}
        kept = kv_image.kept_numbers(walk.image, g, bases)
        assert list(found) == kept, f"rows {list(found)} of group {g} are loaded, not {kept}"
        for number, cell in found.items():
            c.mem[g][cell] = rows[number]
        shared = sum(len(numbers) for _, numbers in parts.values()) > len(rows)
        others = any(q.pos for s, q in enumerate(walk.model.seqs) if s not in parts)
        seen["load of shared rows", 0] += shared
        seen["load beside others", 0] += others and bool(rows)
        seen["lean load", 0] += len(kept) < len(rows)
        seen["lean load of shared rows", 0] += shared and len(kept) < len(rows)
        seen["load in pieces", 0] += len(rest[g]) > len(parts)


def check_saved_again(c, walk):
    """What was loaded is saved as the same bytes, but for the rows that were left out."""
    model, image, ids = walk.model, walk.image, list(walk.image["seqs"])
    again = kv_image.encode(kv_image.image_of(model, ids), model.groups)
    [(status, rest)] = c.call(["dump", *ids])
    assert not status and rest[:len(again)] == again, "the bytes of what was loaded"
    if all(model.seqs[s].base[g] == base for g, (_, parts) in image["groups"].items()
           for s, (base, _) in parts.items()):
        assert again == kv_image.encode(image, model.groups), "save(load(x)) is not x"


def check_promise(c, model, name, args):
    """What calls promise of C's own cells."""
    view = c_view(c, model)
    for g in model.attention:
        full = model.groups[g].kind == "full"
        if name == "defrag":
            need = args[0] if full else min(args[0], model.n_batch)
            assert c.stats[g][5] >= need, f"group {g} has no run of {need} cells"
            assert args[0] or c.stats[g][4] <= 1, f"group {g} has holes"
            assert all(len(view._read_spans(s, g, 0)) <= MAX_SPANS
                       for s in range(model.n_seq)), f"a read of group {g} is left in too many runs"
        elif name == "append":
            assert all(len(view._read_spans(s, g, n)) <= MAX_SPANS
                       for s, n in zip(args[::2], args[1::2])), \
                f"the batch reads group {g} in too many runs"
        elif name == "defrag_reserve" and full:
            held = c.held[args[0]][g]
            runs = kv.spans_of(held, held)
            assert [n for _, _, n in runs] == [args[1]] * (args[1] > 0), f"reserved: {runs}"


@functools.lru_cache(maxsize=None)
def walked(seed):
    """Walks a seed; how often each (call, status) was met."""
    walk, seen = Walk(seed), collections.Counter()
    c = CStore(walk.model)
    try:
        for _ in range(walk.steps):
            compare(walk, c, seen)
        c.close()
    except (AssertionError, BrokenPipeError) as error:
        raise AssertionError(f"{error}\nseed {seed}, {walk.story()}") from None
    finally:
        c.process.kill()
        c.process.wait()
    return seen


@pytest.mark.parametrize("seed", range(SEEDS))
def test_same_calls_same_answers(seed):
    walked(seed)


def test_the_walk_reaches_every_answer():
    """Random calls prove nothing about a refusal that they never meet."""
    seen = sum((walked(seed) for seed in range(120)), collections.Counter())
    answers = {
        "append": [0, 1, 9, 11], "can": [0, 1, 9, 11], "trim": [0, 1, 10], "free": [0, 1],
        "share": [0, 1, 10, 15], "rm": [0, 1, 4, 9, 10], "shift": [0, 1, 4, 9, 10, 11, 13, 14],
        "reserve": [0, 1, 9], "defrag_reserve": [0, 1, 9], "defrag": [0, 9], "cells": [0, 1, 19],
        "window causal": [0, 16], "window range": [0, 16], "window runs": [0, 16],
        "window causal/range/runs": [0, 16], "lost rows": [0], "shared rows": [0],
        "append moves, full": [0], "append moves, sliding": [0],
        "rm moves, full": [0], "rm moves, sliding": [0],
        "shift moves, full": [0], "shift moves, sliding": [0],
        "append regrouped": [0], "defrag regrouped": [0], "defrag moves, full": [0],
        "defrag moves, sliding": [0], "defrag_reserve moves, full": [0],
        "dump": [0, 1], "load": [0, 1, 9], "load of shared rows": [0], "load beside others": [0],
        "lean load": [0], "lean load of shared rows": [0], "load in pieces": [0],
    }
    rare = {(name, status): seen[name, status] for name, statuses in answers.items()
            for status in statuses if seen[name, status] < 8}
    assert not rare, f"met fewer than eight times: {rare}"


@pytest.fixture(scope="module")
def driver():
    out = Driver()
    yield out
    out.close()


def test_one_run_among_many_holes(driver):
    """The only hole that is large enough, behind more smaller ones than placement looks at."""
    calls = [["new", 1, 2, 1000, "full", 1000], ["append", 0, 1000], ["rm", 0, 900, 907]]
    calls += [["rm", 0, 880 - 10 * i, 885 - 10 * i] for i in range(70)]
    assert all(status == 0 for status, _ in driver.call(*calls))
    for n in (7, 8, 300):
        [(status, _), (check, state)] = driver.call(["defrag_reserve", 1, n], ["state"])
        assert (status, check) == (0, 0)
        [held] = state[1][1][5]
        assert [length for _, length in held] == [n], f"{n} cells in {held}"


# ---- the order of moves ------------------------------------------------------------------------

def order_status(moves, scratch):
    """Arguments come before overlaps, and those before cycles, whatever group they are in."""
    found = []
    for group in {m.group for m in moves}:
        try:
            kv.order_moves([m for m in moves if m.group == group], None if scratch < 0 else scratch)
        except kv.KvError as error:
            found.append(STATUS[error.code])
    return min(found, default=0)


def test_moves_in_order_equal_all_at_once(driver):
    rng, seen = random.Random(1), collections.Counter()
    for _ in range(1500):
        moves, scratch = random_moves(rng)
        want = order_status(moves, scratch)
        [(status, rest)] = driver.call(["order", scratch, *(x for m in moves for x in m)])
        assert status == want, f"{status} {rest}, not {want}: {moves} scratch {scratch}"
        seen[status] += 1
        if status:
            continue
        ordered = [kv.Move(*m) for m in rest[0]]
        assert [m.group for m in ordered] == sorted(m.group for m in ordered)
        for group in range(3):
            mem = list(range(80))
            want = mem[:]
            for m in (m for m in moves if m.group == group):
                want[m.dst:m.dst + m.n] = mem[m.src:m.src + m.n]
            for m in (m for m in ordered if m.group == group):
                mem[m.dst:m.dst + m.n] = mem[m.src:m.src + m.n]
            if scratch >= 0:
                mem[scratch] = want[scratch]
            assert mem == want, f"{moves} as {ordered}"
    assert all(seen[status] >= 10 for status in (0, 1, 17, 18)), seen
