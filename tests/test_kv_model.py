"""The C cell store against its specification (kv_model.py): the same random calls, good and bad, to
both, and after each call the same status, lengths, positions, max_trim, live rows and used cells.

The C side is the program kv_drive, built by meson into tests/; MINFER_BUILD_DIR names the build
folder. MINFER_KV_SEEDS=n walks n seeds. A failure names its seed and the calls that led to it.
"""
import os
import pickle
import random
import subprocess
from pathlib import Path

import pytest

import kv_model as kv

STATUS = {"KV_ARG": 1, "KV_FULL": 9, "KV_GONE": 10, "KV_RANGE": 11}
SEEDS = int(os.environ.get("MINFER_KV_SEEDS", "120"))
BAD_SEQS = [-1, 99, (1 << 31) - 1, -(1 << 31)]
BAD_COUNTS = [-1, (1 << 31) - 1, (1 << 32) - 1]


def find_driver():
    root = Path(__file__).resolve().parent.parent
    named = os.environ.get("MINFER_BUILD_DIR")
    folders = [Path(named)] if named else sorted(root.glob("build*"))
    for folder in folders:
        if (folder / "tests" / "kv_drive").is_file():
            return folder / "tests" / "kv_drive"
    raise FileNotFoundError(f"tests/kv_drive is in none of {[str(f) for f in folders]}: build with "
                            "meson, or name the build folder in MINFER_BUILD_DIR")


class CStore:
    def __init__(self, model):
        self.process = subprocess.Popen([find_driver()], stdin=subprocess.PIPE, text=True,
                                        stdout=subprocess.PIPE, bufsize=1)
        self.n_groups = len(model.groups)
        words = [f"{g.kind} {size}" + (f" {g.w}" if g.w else "")
                 for g, size in zip(model.groups, model.size)]
        assert self.call("new", model.n_seq, model.n_batch, *words) == "0"

    def call(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        answer = self.process.stdout.readline()
        assert answer, f"kv_drive died at {words}"
        return answer.strip()

    def close(self):
        self.process.stdin.close()
        assert self.process.wait(20) == 0, "kv_drive failed at its end"


def model_state(store):
    """What must be equal, as plain numbers: placement is not in it."""
    return ([store.size[g] - store._free(g) for g in store.attention],
            [(len(q.pos), kv.next_pos(q.pos), store.max_trim(s),
              [q.pos[q.base[g]:] for g in store.attention]) for s, q in enumerate(store.seqs)])


def c_state(answer, n_groups):
    head, *seqs, check = answer.split("|")
    assert check.split() == ["0"], f"kv_cache_check: {check}"
    status, *used = map(int, head.split())
    assert status == 0 and len(used) == n_groups
    out = []
    for text in seqs:
        numbers, *groups = text.split(",")
        live = []
        for spans in groups:
            runs = [tuple(map(int, s.split(":"))) for s in spans.split()]
            live.append([p + i for p, _, n in runs for i in range(n)])
        out.append((*map(int, numbers.split()), live))
    return used, out


def random_store(rng):
    wide = rng.random() < .1            # hunks of the full 64, long runs
    groups = [kv.Group("full") if rng.random() < .45 else
              kv.Group("sliding", rng.choice([100, 150] if wide else [1, 2, 3, 4, 5, 8, 16]))
              for _ in range(rng.choice([1, 2, 2, 3]))]
    n_seq, n_batch = rng.choice([1, 2, 3, 5]), rng.choice([1, 3, 6, 9])
    if wide:
        n_batch = 60
    n_ctx = rng.choice([500, 900]) if wide else rng.choice([10, 24, 40, 80])
    widest = max([g.w or 0 for g in groups])
    smallest = max(1, n_seq * (widest - 1) + n_batch)       # never refuses (T1)
    sliding = rng.choice([None, smallest, rng.randint(1, smallest)])
    return kv.Store(groups, n_ctx, n_seq, n_batch, sliding_cells=sliding)


def random_items(rng, model, most):
    """[(sequence, rows)], now and then illegal."""
    n_items = rng.choice([1, 1, 2, model.n_seq])
    items = [(s, 1) for s in rng.sample(range(model.n_seq), min(n_items, model.n_seq, most))]
    for _ in range(rng.choice([0, rng.randint(0, most - len(items))])):
        i = rng.randrange(len(items))
        items[i] = (items[i][0], items[i][1] + 1)
    kind = rng.randrange(60)
    if kind == 0:
        items[-1] = (rng.choice(BAD_SEQS), 1)
    elif kind == 1:
        items[0] = (items[0][0], 0)
    elif kind == 2:
        items.append(items[0])
    elif kind == 3:
        items = []
    elif kind == 4:
        items[0] = (items[0][0], model.n_batch + 1)
    return items


def refusal(call, *args):
    try:
        call(*args)
    except kv.KvError as error:
        return STATUS[error.code]
    return 0


def expect_can(model, items):
    """Append the items to a copy, batch by batch in their order; wrong arguments come first."""
    seqs = {s for s, _ in items}
    if len(seqs) != len(items) or not items or not all(n for _, n in items) or \
            not all(0 <= s < model.n_seq for s in seqs):
        return STATUS["KV_ARG"]
    trial = pickle.loads(pickle.dumps(model))
    rows = [s for s, n in items for _ in range(n)]
    for at in range(0, len(rows), model.n_batch):
        batch = rows[at:at + model.n_batch]
        status = refusal(trial.append, [(s, (0,) * batch.count(s)) for s in dict.fromkeys(batch)])
        if status:
            return status
    return 0


def step(rng, model):
    """One random call: its words for C, and the status the model gives (and the model changed)."""
    s = rng.randrange(model.n_seq)
    kind = rng.randrange(20)
    if kind < 11:
        items = random_items(rng, model, model.n_batch)
        batch = [(s, tuple(rng.randrange(9) for _ in range(n))) for s, n in items]
        return ("append", *(x for item in items for x in item)), refusal(model.append, batch)
    if kind < 13:
        items = random_items(rng, model, 4 * model.n_batch)
        return ("can", *(x for item in items for x in item)), expect_can(model, items)
    if kind < 18:
        most, length = model.max_trim(s), len(model.seqs[s].pos)
        n = rng.choice([0, 1, rng.randint(0, length), rng.randint(0, most), most, most + 1,
                        most + 2, most + 1, length, rng.choice([length + 1, *BAD_COUNTS])])
        s = rng.choice(BAD_SEQS) if rng.random() < .03 else s
        return ("trim", s, n), refusal(model.trim, s, n)
    s = rng.choice(BAD_SEQS) if rng.random() < .1 else s
    if rng.random() < .6:
        return ("state",), 0
    return ("free", s), refusal(model.free, s)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_same_calls_same_answers(seed):
    rng = random.Random(seed)
    model = random_store(rng)
    c, calls = CStore(model), []
    before = c.call("state")
    for _ in range(60):
        words, want = step(rng, model)
        calls.append(" ".join(map(str, words)))
        story = (f"seed {seed}: {model.groups} cells {model.size} n_seq {model.n_seq} n_batch "
                 f"{model.n_batch}\n  " + "\n  ".join(calls))
        got = int(c.call(*words).split()[0])
        assert got == want, story
        state = c.call("state")
        assert c_state(state, c.n_groups) == model_state(model), story
        if want or words[0] in ("can", "state"):
            assert state == before, "a call that changes nothing changed something\n" + story
        before = state
    c.close()


def test_the_walk_reaches_every_answer():
    """Random calls prove nothing about a refusal that they never meet."""
    seen = {}
    for seed in range(40):
        rng = random.Random(seed)
        model = random_store(rng)
        for _ in range(60):
            words, status = step(rng, model)
            lost = any(q.base[g] for q in model.seqs for g in model.attention)
            for key in [(words[0], status)] + [("lost rows", 0)] * lost:
                seen[key] = seen.get(key, 0) + 1
    for key in [("append", 0), ("append", 1), ("append", 9), ("trim", 0), ("trim", 1), ("trim", 10),
                ("can", 0), ("can", 1), ("can", 9), ("free", 0), ("free", 1), ("lost rows", 0)]:
        assert seen.get(key, 0) >= 10, f"{key} occurs {seen.get(key, 0)} times in {seen}"
