"""Sessions from Python: what is resumed, what does not fit, and what is not a session at all.

A resumed session is compared with the engine that saved it and simply went on: the bits of the next
logits, the sampled text, positions, sharing and how far it can be undone. Files are compared byte
for byte. Damaged and forged files are the business of test_session_mutants.py.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import resume
import tinymodels
from kv_judge import state
from test_machine import BEST, FORMATS, SECOND

import minfer

RESUME = Path(resume.__file__)
N_SEQ = 4


def tokens(n, seed=0):
    return np.random.RandomState(seed).randint(3, 300, n)


def add(engine, seq, n, seed=0):
    if n:
        engine.forward_cached(tokens(n, seed + 10 * seq + n), seq, logits="none")


def in_a_new_process(model, options, jobs):
    wanted = json.dumps({"model": str(model), "options": options, "jobs": jobs})
    done = subprocess.run(
        [sys.executable, RESUME], input=wanted, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def empty(engine):
    for seq in range(engine.n_seq):
        engine.kv.free(seq)


def saved(engine, path, seqs=None):
    """The bytes of a session; None: all that have rows."""
    engine.kv_save(path, b"host", seqs)
    return Path(path).read_bytes()


# ---- what is resumed -----------------------------------------------------------------------------


def plain(engine, n):
    add(engine, 0, n)
    return [0]


def fragmented(engine, n):
    """Two sequences with the holes of a third between their rows."""
    for at in range(0, n, 9):
        for seq in (0, 1, 2):
            add(engine, seq, min(9, n - at), seed=at)
    engine.kv.free(1)
    return [0, 2]


def shared(engine, n):
    """Three that begin alike, and one that does not; then the first of them goes away."""
    add(engine, 0, n)
    engine.kv.share(1, 0, n)
    add(engine, 0, 3)
    add(engine, 1, 2)
    n -= min(2, engine.kv.max_trim(0))
    engine.kv.share(2, 0, n)
    engine.kv.share(3, 1, engine.kv.len(1))
    add(engine, 2, 4)
    engine.kv.free(0)
    return [1, 2, 3]


def shifted(engine, n):
    """Positions with gaps; the last thing that happens is an edit."""
    add(engine, 0, n)
    engine.kv.shift(0, n - 2, 7)
    add(engine, 0, 4)
    engine.kv.share(3, 0, n + 4)
    engine.kv.rm(0, n + 6, n + 8)
    engine.kv.shift(0, n + 6, 5)
    add(engine, 3, 1)
    return [0, 3]


CASES = [plain, fragmented, shared, shifted]
LENGTHS = [3, 300, 1500]
# Two groups, one with a window, and a full one; q8_0 takes heads of whole 32s.
MODELS = [("gemma3", {}), ("mistral", {"head_dim": 32}), ("qwen3", {})]


@pytest.mark.parametrize("cache_type", FORMATS)
@pytest.mark.parametrize("arch, overrides", MODELS, ids=[arch for arch, _ in MODELS])
def test_resume(tmp_path, arch, overrides, cache_type):
    model = tinymodels.write(tmp_path / "tiny.gguf", arch, **overrides)
    options = dict(n_ctx=5000, n_seq=N_SEQ, n_batch=16, cache_type=cache_type)
    elsewhere = {**options, "n_seq": N_SEQ + 2, "n_batch": 37}
    jobs, wanted = [], []
    with (
        minfer.load(model, isa=BEST, threads=2, **options) as engine,
        minfer.load(model, isa=BEST, threads=2, **options) as twin,  # never saved
        minfer.load(model, isa=SECOND, threads=1, **elsewhere) as other,
    ):
        for case in CASES:
            for n in LENGTHS:
                empty(engine)
                empty(twin)
                seqs = case(engine, n)
                assert case(twin, n) == seqs
                seen = state(engine)
                path = tmp_path / f"{case.__name__}-{n}.kv"
                data = saved(engine, path)
                assert state(engine) == seen
                assert saved(engine, tmp_path / "again.kv", seqs) == data

                empty(other)
                assert other.kv_load(path) == b"host"
                assert resume.look(other, seqs) == resume.look(engine, seqs)
                assert saved(other, tmp_path / "again.kv") == data
                other.kv.defrag()
                other.kv.reserve(5, 100)
                assert saved(other, tmp_path / "again.kv") == data

                # Loading what is there already: nothing is lost that the file needs.
                other.kv_load(path)
                assert saved(other, tmp_path / "again.kv") == data

                job = dict(path=str(path), seqs=seqs, into=None, step=16, undo=4, texts=4)
                jobs.append(job)
                wanted.append(
                    {
                        "host": "host",
                        "look": resume.look(engine, seqs),
                        "next": resume.follow(engine, seqs, 8),
                        "undo": resume.undo(twin, seqs, 4),
                    }
                )
                assert any(ids for ids in wanted[-1]["next"][1])
    for change in (dict(isa=BEST, threads=2), dict(isa=SECOND, threads=3)):
        for job, expected, found in zip(
            jobs, wanted, in_a_new_process(model, {**options, **change}, jobs), strict=True
        ):
            assert found == expected, job["path"]


@pytest.mark.parametrize("cache_type", FORMATS)
def test_resume_demo(tmp_path, demo_path, cache_type):
    """The real model, before, in and past its window of 512."""
    options = dict(n_ctx=4096, n_seq=N_SEQ, n_batch=256, cache_type=cache_type)
    jobs, wanted = [], []
    with minfer.load(demo_path, isa=BEST, threads=2, **options) as engine:
        for n in LENGTHS:
            empty(engine)
            add(engine, 2, 2)
            add(engine, 0, n // 2)
            add(engine, 2, 20)  # between the rows of 0
            add(engine, 0, n - n // 2)
            engine.kv.share(1, 0, n)
            engine.kv.shift(1, n - 2, 9)
            add(engine, 1, 2)
            engine.kv.rm(1, n + 8, n + 9)
            engine.kv.free(2)
            seqs = [0, 1]
            path = tmp_path / f"{n}.kv"
            saved(engine, path)
            jobs.append(dict(path=str(path), seqs=seqs, into=None, step=64, undo=0, texts=1))
            seen = resume.look(engine, seqs)
            found = resume.follow(engine, seqs, 16, 1)
            wanted.append({"host": "host", "look": seen, "next": found})
            assert seen[0][0] == n and n - 2 <= seen[3][1]  # shared rows of the full group
    change = dict(isa=SECOND, threads=1)
    for job, expected, found in zip(
        jobs, wanted, in_a_new_process(demo_path, {**options, **change}, jobs), strict=True
    ):
        assert found == expected, job["path"]


# ---- some of the sequences, and other numbers ----------------------------------------------------


@pytest.fixture(scope="module", params=FORMATS)
def pair(request, tiny_path):
    """Two engines of one model: one to save from, one to load into."""
    options = dict(n_ctx=200, n_seq=6, n_batch=16, threads=1, cache_type=request.param)
    with minfer.load(tiny_path, **options) as a, minfer.load(tiny_path, **options) as b:
        yield a, b


@pytest.fixture
def engines(pair):
    for engine in pair:
        empty(engine)
        for seq in range(engine.n_seq):
            engine.kv.reserve(seq, 0)
    return pair


def family(engine):
    """0, 1 and 4 share rows, 2 has gaps, 3 and 5 are empty."""
    add(engine, 0, 40)
    engine.kv.share(1, 0, 40)
    engine.kv.share(4, 0, 36)
    add(engine, 1, 5)
    add(engine, 4, 2)
    add(engine, 2, 17)
    engine.kv.shift(2, 14, 30)
    add(engine, 2, 2)


def says(engine, seqs):
    """The next logits of some sequences, which are as before afterwards."""
    out = []
    for seq in seqs:
        out.append(resume.digest(engine.forward_cached([5], seq)))
        engine.kv.trim(seq, 1)
    return out


SUBSETS = [[0], [2], [1], [0, 1], [1, 0], [4, 2, 1], [2, 4, 0, 1], [5], [3, 0, 5], []]


@pytest.mark.parametrize("seqs", SUBSETS, ids=str)
def test_some(engines, tmp_path, seqs):
    a, b = engines
    family(a)
    add(b, 5, 30)
    seen = state(a)
    data = saved(a, tmp_path / "x.kv", seqs)
    assert state(a) == seen
    if 5 not in seqs:
        expected = says(b, [5])
    assert b.kv_load(tmp_path / "x.kv") == b"host"
    assert resume.look(b, seqs) == resume.look(a, seqs)
    assert says(b, [s for s in seqs if a.kv.len(s)]) == says(a, [s for s in seqs if a.kv.len(s)])
    if 5 not in seqs:
        assert says(b, [5]) == expected
    for seq in set(range(5)) - set(seqs):
        assert b.kv.len(seq) == 0
    assert saved(b, tmp_path / "y.kv", seqs) == data


def test_other_numbers(engines, tmp_path):
    a, b = engines
    family(a)
    family(b)
    before = saved(b, tmp_path / "b.kv", [3, 4])
    expected = says(b, [4])
    data = saved(a, tmp_path / "x.kv", [0, 1, 2])
    b.kv_load(tmp_path / "x.kv", np.array([5, 0, 3]))
    assert resume.look(b, [5, 0, 3]) == resume.look(a, [0, 1, 2])
    assert says(b, [5, 0, 3]) == says(a, [0, 1, 2])
    assert says(b, [4]) == expected
    assert saved(b, tmp_path / "y.kv", [5, 0, 3]) != data  # the numbers are in it
    b.kv_load(tmp_path / "y.kv", (0, 1, 2))
    assert saved(b, tmp_path / "z.kv", [0, 1, 2]) == data
    assert len(before) < len(data)


def test_both_at_once(engines, tmp_path):
    """One file twice in one engine: two families that share nothing with each other."""
    a, b = engines
    family(a)
    saved(a, tmp_path / "x.kv", [0, 1])
    b.kv_load(tmp_path / "x.kv")
    b.kv_load(tmp_path / "x.kv", [2, 3])
    look = resume.look(b, [0, 1, 2, 3])
    assert look[:2] == look[2:4] == resume.look(a, [0, 1])[:2]
    used, *common = look[5]  # of the full group: pairs 01 02 03 12 13 23
    assert used == 90 and common == [40, 0, 0, 0, 0, 40]
    assert says(b, [0, 1, 2, 3]) == 2 * says(a, [0, 1])


def test_reservations_are_not_in_the_file(engines, tmp_path):
    a, b = engines
    family(a)
    data = saved(a, tmp_path / "x.kv")
    a.kv.reserve(0, 20)
    a.kv.reserve(3, 9)
    assert saved(a, tmp_path / "y.kv") == data
    b.kv.reserve(0, 11)
    b.kv.reserve(3, 13)
    b.kv_load(tmp_path / "y.kv")
    assert [group.n_reserved for group in b.kv.stats()] == [0, 13]  # 3 was not replaced


def test_two_processes_give_one_file(engines, tmp_path, tiny_path):
    """The same rows made in another process, whatever its memory holds: the same bytes."""
    a, _ = engines
    family(a)
    data = saved(a, tmp_path / "x.kv")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import test_sessions as t, minfer\n"
        "e = minfer.load(sys.argv[2], n_ctx=200, n_seq=9, n_batch=16, cache_type=sys.argv[3])\n"
        "t.family(e); e.kv.defrag(); t.saved(e, sys.argv[4])"
    )
    args = [RESUME.parent, tiny_path, a.kv_format, tmp_path / "y.kv"]
    for fill in ("0", "85", "170"):  # glibc fills what malloc gives with this byte's complement
        environment = {**os.environ, "MALLOC_PERTURB_": fill}
        subprocess.run([sys.executable, "-c", script, *args], check=True, env=environment)
        assert (tmp_path / "y.kv").read_bytes() == data


# ---- what does not fit ---------------------------------------------------------------------------


def refused(engine, classes, path, seqs=None, words=None):
    """kv_load is refused and nothing has changed."""
    before = state(engine), saved_state(engine)
    with pytest.raises(classes, match=words) as error:
        engine.kv_load(path, seqs)
    assert (state(engine), saved_state(engine)) == before
    assert "\n" not in str(error.value) and len(str(error.value)) > 10


def saved_state(engine):
    """What the engine holds, as the bytes of a file of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return saved(engine, Path(folder) / "state.kv")


def test_one_cell_too_few(engines, tmp_path):
    """One cell less than it takes is left by others: refused. As many as it takes: loaded."""
    a, b = engines
    family(a)
    saved(a, tmp_path / "x.kv", [0, 1, 2, 4])
    wanted = 40 + 5 + 2 + 19
    add(b, 5, 200 - wanted + 1)
    expected = says(b, [5])
    refused(b, minfer.KvFullError, tmp_path / "x.kv", words=str(wanted))
    assert says(b, [5]) == expected
    b.kv.trim(5, 1)
    assert b.kv_load(tmp_path / "x.kv") == b"host"
    assert resume.look(b, [0, 1, 2, 4]) == resume.look(a, [0, 1, 2, 4])
    assert b.kv.stats()[1].n_used == 200


def test_reserved_cells_are_not_free(engines, tmp_path):
    a, b = engines
    family(a)
    saved(a, tmp_path / "x.kv", [2])
    b.kv.reserve(5, 200 - 19 + 1)
    refused(b, minfer.KvFullError, tmp_path / "x.kv")
    b.kv.reserve(5, 200 - 19)
    b.kv_load(tmp_path / "x.kv")
    assert says(a, [2])[0] == resume.digest(a.forward_cached([5], 2))
    assert b.kv.stats()[1].n_used == 200


def test_the_cells_of_what_is_replaced_count(engines, tmp_path):
    a, b = engines
    family(a)
    saved(a, tmp_path / "x.kv", [0, 1])
    add(b, 0, 120)
    b.kv.reserve(1, 80)
    refused(b, minfer.KvFullError, tmp_path / "x.kv", [2, 3])
    b.kv_load(tmp_path / "x.kv")
    assert resume.look(b, [0, 1]) == resume.look(a, [0, 1])


@pytest.mark.parametrize("cache_type", FORMATS)
def test_stale_rows_that_do_not_fit(tiny_path, tmp_path, cache_type):
    """A smaller arena of the windowed layers: what the next tokens see is loaded, the rows that
    only an undo would need are not."""
    large = dict(n_ctx=400, n_seq=4, n_batch=64, threads=1, cache_type=cache_type)
    small = {**large, "n_batch": 1, "n_seq": 3}
    with minfer.load(tiny_path, **large) as a, minfer.load(tiny_path, **small) as b:
        add(a, 0, 60)
        add(a, 1, 50)
        a.kv.share(2, 1, 50)
        add(a, 2, 3)
        data = saved(a, tmp_path / "x.kv")
        assert b.kv.stats()[0].n_cells < 60 < a.kv.max_trim(0) + 20
        b.kv_load(tmp_path / "x.kv")
        b.kv.check()
        for s in range(3):
            assert b.kv.len(s) == a.kv.len(s) and b.kv.max_trim(s) < a.kv.max_trim(s)
            assert b.kv.max_trim(s) <= 8
        lean = saved(b, tmp_path / "y.kv")
        assert len(lean) < len(data)
        assert says(b, [0, 1, 2]) == says(a, [0, 1, 2])
        assert resume.follow(b, [0], 1)[0] == resume.follow(a, [0], 16)[0]


def test_more_sequences_than_there_are(tiny_path, tmp_path):
    options = dict(n_ctx=100, n_batch=8, threads=1)
    with (
        minfer.load(tiny_path, n_seq=5, **options) as a,
        minfer.load(tiny_path, n_seq=2, **options) as b,
    ):
        for s in range(5):
            add(a, s, 4)
        add(b, 0, 3)
        saved(a, tmp_path / "all.kv")
        saved(a, tmp_path / "4.kv", [4])
        refused(b, minfer.FormatError, tmp_path / "all.kv", words="n_seqs is 5.* 2")
        refused(b, minfer.ArgumentError, tmp_path / "4.kv", words="sequence 4")
        b.kv_load(tmp_path / "4.kv", [1])
        assert says(b, [1]) == says(a, [4])


# ---- small ones, and threads ---------------------------------------------------------------------


def test_nothing_and_one_token(engines, tmp_path):
    a, b = engines
    data = saved(a, tmp_path / "0.kv")
    add(b, 0, 9)
    seen = state(b)
    assert b.kv_load(tmp_path / "0.kv") == b"host" and state(b) == seen
    assert saved(b, tmp_path / "1.kv", []) == data
    a.forward_cached([4])
    saved(a, tmp_path / "1.kv")
    b.kv_load(tmp_path / "1.kv")
    assert says(b, [0]) == says(a, [0]) and b.kv.len(0) == 1
    b.kv_load(tmp_path / "1.kv", [5])
    assert says(b, [5]) == says(a, [0])
    # An empty sequence that is named is in the file, and empties the one it goes to.
    saved(a, tmp_path / "2.kv", [3])
    b.kv_load(tmp_path / "2.kv", [0])
    assert b.kv.len(0) == 0 and b.kv.len(5) == 1


class Computing:
    """A thread that appends to sequence 0, at most so many tokens ahead of those who watch it."""

    def __init__(self, engine, text):
        self.allowed, self.found, self.errors = threading.Semaphore(0), [], []
        self.thread = threading.Thread(target=self._run, args=(engine, text))
        self.thread.start()

    def _run(self, engine, text):
        try:
            for t in text:
                self.allowed.acquire(timeout=60)
                self.found.append(engine.forward_cached([int(t)]).tobytes())
        except BaseException as error:
            self.errors.append(error)

    def go_on(self, n):
        self.allowed.release(n)

    def end(self):
        self.thread.join()
        assert not self.errors


def one_by_one(engine, text):
    return [engine.forward_cached([int(t)]).tobytes() for t in text]


def test_while_another_thread_computes(engines, tmp_path):
    """A save is of one moment between two calls: what it holds can be said from its length."""
    a, b = engines
    text = tokens(150)
    wanted = one_by_one(b, text)
    computing = Computing(a, text)
    for i in range(30):
        computing.go_on(5)
        a.kv_save(tmp_path / f"{i}.kv", seqs=[0])
    computing.end()
    assert computing.found == wanted
    lengths = set()
    for i in range(30):
        empty(b)
        b.kv_load(tmp_path / f"{i}.kv")
        b.kv.check()
        n = b.kv.len(0)
        lengths.add(n)
        assert n <= 5 * (i + 1)
        if n < len(text):
            assert b.forward_cached([int(text[n])]).tobytes() == wanted[n]
    print(sorted(lengths))


def test_loads_while_another_thread_computes(engines, tmp_path):
    """Loads into other sequences leave the one that computes meanwhile alone."""
    a, b = engines
    add(b, 1, 30)
    saved(b, tmp_path / "x.kv")
    said = says(b, [1])
    text = tokens(120)
    wanted = one_by_one(b, text)
    computing = Computing(a, text)
    for i in range(30):
        computing.go_on(4)
        a.kv_load(tmp_path / "x.kv", [1 + i % 2])
    computing.end()
    a.kv.check()
    assert computing.found == wanted and says(a, [1, 2]) == 2 * said
