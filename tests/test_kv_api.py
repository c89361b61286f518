"""The KV cache from Python: edits and what they return, every bad call, and the order of moves.

A bad call raises the class and the built-in a caller expects, names the value, and changes nothing:
lengths, spans, counts and the next logits of every sequence are as before. That the edits compute
the right thing is for the law and the model tests.
"""

import re
import threading
from pathlib import Path

import numpy as np
import pytest
import tinymodels
from hypothesis import given, settings
from hypothesis import strategies as st

import minfer

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
WINDOW = 8  # of the tiny model's sliding layers


def tokens(n, seed=0):
    return np.random.RandomState(seed).randint(3, 300, n)


def state(engine, n_groups=2):
    """All that can be seen of a cache."""
    kv = engine.kv
    kv.check()
    return kv.stats(), [
        (kv.len(s), kv.next_pos(s), kv.max_trim(s), [kv.spans(s, g) for g in range(n_groups)])
        for s in range(engine.n_seq)
    ]


def next_logits(engine, seq):
    """What the sequence would answer to one more token; it is as before afterwards."""
    logits = engine.forward_cached([7], seq).tobytes()
    engine.kv.trim(seq, 1)
    return logits


def all_logits(engine):
    return [next_logits(engine, seq) for seq in range(engine.n_seq)]


@pytest.fixture
def fresh(tiny_path):
    with minfer.load(tiny_path, n_ctx=256, n_seq=5, n_batch=16, threads=1) as engine:
        yield engine


# ---- bad calls -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def edited(tiny_path):
    """0 has 40 rows, 1 shares 30 of them and has 2 more, 2 has a gap, 3 is empty, 4 has lost rows
    of its sliding layers: (engine, the logits of each)."""
    with minfer.load(tiny_path, n_ctx=256, n_seq=5, n_batch=16, threads=1) as engine:
        engine.forward_cached(tokens(40), 0)
        engine.kv.share(1, 0, 30)
        engine.forward_cached(tokens(2, 1), 1)
        engine.forward_cached(tokens(20, 2), 2)
        engine.kv.shift(2, 12, 30)
        engine.forward_cached(tokens(100, 3), 4)
        assert engine.kv.max_trim(4) < 90
        yield engine, all_logits(engine)


BAD = {
    minfer.ArgumentError: [
        ("rm", (0, -1, 3), "-1"),
        ("rm", (0, 5, 4), "5"),
        ("rm", (0, 0, 41), "41"),
        ("rm", (0, 41, 41), "41"),
        ("rm", (3, 0, 1), "1"),
        ("rm", (0, INT32_MIN, INT32_MAX), "-2147483648"),
        ("rm", (0, 0, INT32_MAX), "2147483647"),
        ("rm", (0, 0, INT32_MAX + 1), "2147483648"),
        ("rm", (0, INT32_MIN - 1, 0), "-2147483649"),
        ("rm", (0, 2**64, 2**64), str(2**64)),
        ("shift", (0, -1, 1), "-1"),
        ("shift", (0, 41, 1), "41"),
        ("shift", (0, INT32_MIN, 0), "-2147483648"),
        ("shift", (0, INT32_MAX, 0), "2147483647"),
        ("shift", (0, 0, INT32_MAX + 1), "2147483648"),
        ("shift", (0, 0, INT32_MIN - 1), "-2147483649"),
        ("share", (3, 0, 41), "41"),
        ("share", (3, 0, -1), "-1"),
        ("share", (3, 0, 2**32), "4294967296"),
        ("share", (3, 0, 2**32 - 1), "4294967295"),
        ("share", (0, 0, 5), "0"),
        ("share", (3, 3, 0), "3"),
        ("share", (5, 0, 1), "5"),
        ("share", (3, 5, 1), "5"),
        ("share", (-1, 0, 1), "-1"),
        ("share", (3, INT32_MAX + 1, 1), "2147483648"),
        ("trim", (0, 41), "41"),
        ("trim", (0, -1), "-1"),
        ("trim", (0, 2**32), "4294967296"),
        ("reserve", (0, -1), "-1"),
        ("reserve", (0, 2**32), "4294967296"),
        ("reserve", (0, -1, True), "-1"),
        ("defrag", (-1,), "-1"),
        ("defrag", (2**32,), "4294967296"),
        ("spans", (0, 2), "2; it must be in [0, 1]"),
        ("spans", (0, -1), "-1; it must be in [0, 1]"),
    ]
    + [
        (name, (seq, *rest), str(seq))
        for name, rest in (
            ("len", ()),
            ("next_pos", ()),
            ("max_trim", ()),
            ("spans", ()),
            ("free", ()),
            ("trim", (0,)),
            ("rm", (0, 0)),
            ("shift", (0, 0)),
            ("reserve", (0,)),
            ("reserve", (0, True)),
        )
        for seq in (-1, 5, INT32_MAX, INT32_MAX + 1, 2**64)
    ],
    minfer.ArgumentTypeError: [
        (name, args[:i] + (wrong,) + args[i + 1 :], repr(wrong))
        for name, args in (
            ("rm", (0, 0, 1)),
            ("shift", (0, 0, 1)),
            ("share", (3, 0, 1)),
            ("reserve", (0, 1)),
            ("defrag", (1,)),
        )
        for i in range(len(args))
        for wrong in (1.0, True, "1", None)
    ]
    + [("reserve", (0, 1, 1), "1"), ("reserve", (0, 1, None), "None")],
    minfer.KvRangeError: [
        ("shift", (0, 0, -1), "-1"),
        ("shift", (0, 0, 2**24 - 39), str(2**24 - 39)),
        ("shift", (0, 0, INT32_MAX), "2147483647"),
        ("shift", (0, 0, INT32_MIN), "-2147483648"),
        ("shift", (2, 42, 2**24 - 49), str(2**24 - 49)),
    ],
    minfer.KvCollidesError: [
        ("shift", (0, 10, -1), "-1"),
        ("shift", (2, 42, -31), "-31"),
        ("shift", (2, 20, -31), "-31"),
    ],
    minfer.KvNotEmptyError: [("share", (1, 0, 4), "32"), ("share", (2, 0, 4), "20")],
    minfer.KvGoneError: [
        ("trim", (4, 99), "99"),
        ("rm", (4, 5, 96), "4"),
        ("share", (3, 4, 3), "3"),
    ],
    minfer.KvFullError: [
        ("reserve", (3, 95), "95"),
        ("reserve", (3, 95, True), "95"),
        ("reserve", (3, 2**32 - 1), "4294967295"),
        ("defrag", (95,), "95"),
        ("defrag", (2**32 - 1,), "4294967295"),
    ],
}
BUILT_IN = {
    minfer.ArgumentTypeError: TypeError,
    minfer.KvGoneError: LookupError,
    minfer.KvFullError: MemoryError,
}


@pytest.mark.parametrize(
    ("error", "name", "args", "word"),
    [(error, *call) for error, calls in BAD.items() for call in calls],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_bad_calls(edited, error, name, args, word):
    engine, logits = edited
    before = state(engine)
    with pytest.raises(error) as refused:
        getattr(engine.kv, name)(*args)
    assert type(refused.value) is error
    assert isinstance(refused.value, BUILT_IN.get(error, ValueError))
    assert word in str(refused.value) and "\n" not in str(refused.value)
    assert state(engine) == before
    assert all_logits(engine) == logits


@pytest.mark.parametrize("seq", [-1, 5])
def test_an_unknown_sequence_names_those_there_are(edited, seq):
    engine, _ = edited
    for call in (
        lambda: engine.kv.free(seq),
        lambda: engine.kv.share(3, seq, 0),
        lambda: engine.forward_cached([5], seq),
        lambda: engine.generate([5], seq=seq),
    ):
        with pytest.raises(minfer.ArgumentError, match=f" {seq}; this engine has 0 to 4 .n_seq"):
            call()


def test_closed(tiny_path):
    engine = minfer.load(tiny_path)
    kv = engine.kv
    engine.close()
    for call in (
        lambda: kv.rm(0, 0, 0),
        lambda: kv.shift(0, 0, 0),
        lambda: kv.share(0, 1, 0),
        lambda: kv.reserve(0, 0),
        lambda: kv.reserve(0, 0, defrag=True),
        lambda: kv.defrag(),
        lambda: kv.stats(),
        lambda: engine.forward_padded([[1]]),
    ):
        with pytest.raises(minfer.ClosedError):
            call()


def test_too_many_gaps(tiny_path):
    with minfer.load(tiny_path, n_ctx=256, n_seq=2, threads=1) as engine:
        engine.forward_cached(tokens(100))
        gaps = 0
        with pytest.raises(ValueError) as refused:
            for gaps in range(99):
                engine.kv.shift(0, 99 - gaps, 1)  # from the end, so that positions below stay
        assert type(refused.value) is minfer.KvGapsError
        assert gaps == 62  # a read carries 64 runs; two sequences may need one for the layout
        assert len(engine.kv.spans(0, 1)) == gaps + 1
        before, logits = state(engine), next_logits(engine, 0)
        with pytest.raises(minfer.KvGapsError):
            engine.kv.shift(0, 5, 1)
        assert state(engine) == before and next_logits(engine, 0) == logits
        engine.kv.shift(0, 0, 3)  # a gap before the first row is free


def test_shift_beyond_the_rope_factors(tmp_path):
    """An engine that took the factors for short texts has none for positions beyond them."""
    longrope = dict(rope_scaling="longrope", rope_attn_factor=1.2, rope_original_ctx=512)
    path = tinymodels.write(tmp_path / "phi3.gguf", "phi3", **longrope)
    with minfer.load(path, n_ctx=64, threads=1) as engine:
        engine.forward_cached(tokens(10))
        before, logits = state(engine, 1), next_logits(engine, 0)
        with pytest.raises(minfer.KvRangeError, match=r"by 503.* 511"):
            engine.kv.shift(0, 4, 503)
        assert state(engine, 1) == before and next_logits(engine, 0) == logits
        engine.kv.shift(0, 4, 502)
        assert engine.kv.next_pos(0) == 512
        with pytest.raises(minfer.KvRangeError):
            engine.forward_cached([5])


def test_edit_of_shared_rows_without_cells(tiny_path):
    """A full cache has no cell to copy a shared row to: refused, and the old state decodes on."""
    with minfer.load(tiny_path, n_ctx=64, n_seq=3, n_batch=16, threads=1) as engine:
        engine.forward_cached(tokens(20), 0)
        engine.kv.share(1, 0, 20)
        engine.forward_cached(tokens(44, 1), 2)
        before = state(engine)
        for call in (
            lambda: engine.kv.rm(1, 2, 4),
            lambda: engine.kv.shift(0, 3, 4),
            lambda: engine.forward_cached([5], 1),
            lambda: engine.forward_padded([[5], [5]], seqs=[0, 1]),
        ):
            with pytest.raises(MemoryError) as refused:
                call()
            assert type(refused.value) is minfer.KvFullError
            assert state(engine) == before
        engine.kv.free(2)
        engine.kv.rm(1, 2, 4)
        assert engine.kv.len(1) == 18 and engine.kv.len(0) == 20
        with minfer.load(tiny_path, threads=1) as other:
            other.forward_cached(tokens(20))
            assert next_logits(engine, 0) == next_logits(other, 0)
            other.kv.rm(0, 2, 4)
            assert next_logits(engine, 1) == next_logits(other, 0)


# ---- good calls ------------------------------------------------------------------------------


def test_nothing_to_do(edited):
    engine, _ = edited
    before, kv = state(engine), engine.kv
    kv.rm(0, 0, 0)
    kv.rm(0, 40, 40)
    kv.shift(0, 7, 0)
    kv.shift(0, 40, 5)
    kv.shift(0, 40, INT32_MIN)
    kv.share(3, 0, 0)
    kv.trim(0, 0)
    kv.free(3)
    assert kv.reserve(0, 0) == [] and kv.reserve(0, 0, defrag=False) == []
    assert state(engine) == before


def test_spans_while_another_thread_edits(fresh):
    fresh.forward_cached(tokens(100))
    done, seen = threading.Event(), set()

    def edit():
        for _ in range(4000):
            fresh.kv.shift(0, 50, 1)
            fresh.kv.shift(0, 51, -1)
        done.set()

    editor = threading.Thread(target=edit)
    editor.start()
    while not done.is_set():
        seen.add(tuple(fresh.kv.spans(0, 1)))
    editor.join()
    assert {len(spans) for spans in seen} == {1, 2}
    assert all(sum(span.len for span in spans) == 100 for spans in seen)


def test_integers_of_numpy(fresh):
    fresh.forward_cached(tokens(20))
    fresh.kv.share(np.int64(1), np.uint8(0), np.int16(20))
    fresh.kv.rm(np.int32(1), np.int64(3), np.uint64(5))
    fresh.kv.shift(np.int8(1), np.int8(4), np.int8(2))
    fresh.kv.reserve(np.int8(1), np.int8(2))
    assert (fresh.kv.len(1), fresh.kv.next_pos(1)) == (18, 20)


def test_rm_of_the_end_is_a_trim(fresh):
    for seq in range(2):
        fresh.forward_cached(tokens(30), seq)
    fresh.kv.rm(0, 26, 30)
    fresh.kv.trim(1, 4)
    assert fresh.kv.next_pos(0) == fresh.kv.next_pos(1) == 26
    assert next_logits(fresh, 0) == next_logits(fresh, 1)


def test_share_counts_and_answers(fresh):
    prompt, ends = tokens(40), [tokens(5, 1), tokens(9, 2)]
    fresh.forward_cached(prompt, 0)
    used = [group.n_used for group in fresh.kv.stats()]
    fresh.kv.share(1, 0, 40)
    fresh.kv.share(2, 1, 33)
    groups = fresh.kv.stats()
    assert [group.n_used for group in groups] == used
    assert all(group.n_shared == group.n_used for group in groups)
    assert [fresh.kv.len(s) for s in range(3)] == [40, 40, 33]
    answers = [fresh.forward_cached(ends[i], i) for i in range(2)]
    fresh.kv.free(0)
    for i in range(2):
        alone = fresh.forward_cached(np.concatenate([prompt, ends[i]]), 3)
        assert alone.tobytes() == answers[i].tobytes()
        fresh.kv.free(3)


def test_counts_of_a_group(fresh):
    sliding, full = fresh.kv.stats()
    assert full.n_cells == full.largest_run == 256 and full.fragmentation == 0.0
    assert sliding.kind.startswith("sliding-8/") and full.kind.startswith("full/")
    assert (full.n_used, full.n_free_runs, full.n_reserved, full.n_stale) == (0, 1, 0, 0)
    fresh.kv.reserve(0, 250)
    fresh.forward_cached(tokens(3), 1)
    sliding, full = fresh.kv.stats()
    assert (full.n_reserved, full.n_used, sliding.n_reserved) == (250, 253, 0)
    with pytest.raises(minfer.KvFullError):
        fresh.forward_cached(tokens(4), 1)
    fresh.forward_cached(tokens(30), 0)
    sliding, full = fresh.kv.stats()
    assert (full.n_reserved, full.n_used) == (220, 253)  # appends draw on the reservation
    assert sliding.n_stale == 30 - (WINDOW - 1) and full.n_stale == 0
    fresh.kv.reserve(1, 3)
    full = fresh.kv.stats()[1]
    assert (full.n_used, full.n_free_runs, full.largest_run) == (256, 0, 0)
    assert full.fragmentation == 0.0  # nothing is free, so nothing is scattered
    fresh.kv.free(0)
    assert fresh.kv.stats()[1].n_reserved == 3


def test_fragmentation(fresh):
    for seq in range(3):
        fresh.forward_cached(tokens(20), seq)
    fresh.kv.free(1)
    for group in fresh.kv.stats():
        free = group.n_cells - group.n_used
        assert group.n_used == 40 and group.n_free_runs == 2
        assert group.fragmentation == 1 - group.largest_run / free > 0


def scattered(engine):
    """Interleaves sequences 0 to 3 and drops some, so that every arena is full of holes."""
    for i in range(12):
        for seq in range(4):
            engine.forward_cached(tokens(1 + (i + seq) % 3, i), seq)
    engine.kv.share(4, 2, engine.kv.len(2))
    engine.kv.free(1)
    engine.kv.trim(0, 2)


def cells(engine, seq, group):
    """Cell of every row that is there, in position order."""
    return [s.cell + i for s in engine.kv.spans(seq, group) for i in range(s.len)]


def moved(moves, cell, group):
    for move in moves:
        if move.group == group and move.src <= cell < move.src + move.n:
            cell += move.dst - move.src
    return cell


@pytest.mark.parametrize("how", ["all", "need", "reserve"])
def test_moves_tell_where_rows_went(fresh, how):
    scattered(fresh)
    before, logits = fresh.kv.stats(), all_logits(fresh)
    remembered = {(s, g): cells(fresh, s, g) for s in range(5) for g in range(2)}
    need = before[1].n_cells - before[1].n_used  # all that is free, in one run
    if how == "reserve":
        moves = fresh.kv.reserve(1, need, defrag=True)
    else:
        moves = fresh.kv.defrag() if how == "all" else fresh.kv.defrag(need)
    fresh.kv.check()
    after = fresh.kv.stats()
    assert moves and all(isinstance(move, minfer.Move) and move.n > 0 for move in moves)
    assert any(m.group == 1 for m in moves)
    for (seq, group), old in remembered.items():
        now = cells(fresh, seq, group)
        assert now == [moved(moves, cell, group) for cell in old[len(old) - len(now) :]]
    for group in {move.group for move in moves}:
        assert after[group].generation != before[group].generation
    if how == "reserve":
        assert after[1].n_reserved == need
        fresh.kv.reserve(1, 0)
        assert fresh.kv.reserve(1, need, defrag=True) == []  # it is one run already
        fresh.kv.reserve(1, 0)
    else:
        assert after[1].largest_run == need and after[1].fragmentation == 0.0
        assert fresh.kv.defrag() == [] or how == "need"
    assert all_logits(fresh) == logits


def test_kv_seconds(fresh):
    fresh.forward_cached(tokens(40))
    first = fresh.stats()
    fresh.forward_cached(tokens(40))
    second = fresh.stats()
    assert 0 < first.kv_seconds < second.kv_seconds <= second.prefill_seconds


# ---- the order of moves ----------------------------------------------------------------------


def executed(moves, n_cells=16):
    """Cells after the moves in turn; cell c of group g holds (g, c) before."""
    memory = {g: [(g, c) for c in range(n_cells)] for g in range(3)}
    for move in moves:
        rows = memory[move.group]
        rows[move.dst : move.dst + move.n] = rows[move.src : move.src + move.n]
    return memory


def wanted(moves, n_cells=16):
    """The destinations after all moves at once, and what forbids them."""
    wrong, target = set(), {}
    to: dict = {}
    read: set = set()
    for move in moves:
        for i in range(move.n):
            source, at = (move.group, move.src + i), (move.group, move.dst + i)
            if source in read or at in target:
                wrong.add(minfer.KvOverlapError)
            read.add(source)
            target[at] = source
            to[source] = at
    for start in to:
        at, steps = to[start], 0
        while at in to and at != start and steps < len(to):
            at, steps = to[at], steps + 1
        if at == start and to[start] != start:
            wrong.add(minfer.KvCycleError)
    return target, wrong


a_move = st.builds(
    minfer.Move, st.integers(0, 11), st.integers(0, 11), st.integers(1, 5), st.integers(0, 2)
)


@settings(max_examples=400, deadline=None)
@given(st.lists(a_move, max_size=6))
def test_order_moves_equals_all_at_once(moves):
    target, wrong = wanted(moves)
    try:
        ordered = minfer.order_moves(moves)
    except minfer.Error as error:
        assert type(error) in wrong
        return
    assert not wrong
    assert [m.group for m in ordered] == sorted(m.group for m in ordered)
    memory = executed(ordered)
    for group in range(3):
        for cell in range(16):
            if (group, cell) in target:
                assert memory[group][cell] == target[group, cell]
    moved_rows = {(m.group, m.dst + i) for m in ordered for i in range(m.n)}
    assert moved_rows <= set(target)  # nothing else is written


@settings(max_examples=200, deadline=None)
@given(st.permutations(range(10)), st.integers(1, 10))
def test_order_moves_of_single_rows(places, n):
    """Dense: most of these have chains, many a cycle."""
    moves = [minfer.Move(src, dst, 1) for src, dst in zip(range(n), places)]
    target, wrong = wanted(moves)
    try:
        memory = executed(minfer.order_moves(moves))
    except minfer.Error as error:
        assert type(error) in wrong
        return
    assert not wrong and all(memory[0][at] == source for (_, at), source in target.items())


def test_order_moves_takes_tuples_and_iterables():
    expected = [minfer.Move(1, 2, 1), minfer.Move(0, 1, 1)]
    assert minfer.order_moves([(0, 1, 1), (1, 2, 1, 0)]) == expected
    assert minfer.order_moves(move for move in reversed(expected)) == expected
    assert minfer.order_moves([(np.int64(5), np.uint8(3), np.int32(2))]) == [(5, 3, 2, 0)]
    assert minfer.order_moves([]) == []
    assert minfer.Move(1, 2, 3) == (1, 2, 3, 0)


@pytest.mark.parametrize(
    ("moves", "error", "word"),
    [
        ([(0, 1, 1), (1, 0, 1)], minfer.KvCycleError, ""),
        ([(0, 1, 2), (2, 0, 1)], minfer.KvCycleError, ""),
        ([(0, 8, 4), (3, 20, 1)], minfer.KvOverlapError, "3"),
        ([(0, 8, 4), (20, 11, 1)], minfer.KvOverlapError, "11"),
        ([(0, 8, 4), (0, 8, 4)], minfer.KvOverlapError, ""),
        ([(-1, 0, 1)], minfer.ArgumentError, "-1"),
        ([(0, -1, 1)], minfer.ArgumentError, "-1"),
        ([(0, 1, 0)], minfer.ArgumentError, "0"),
        ([(0, 1, -2)], minfer.ArgumentError, "-2"),
        ([(0, 1, 1, -1)], minfer.ArgumentError, "-1"),
        ([(INT32_MAX, 0, 1)], minfer.ArgumentError, "2147483647"),
        ([(0, INT32_MAX, INT32_MAX)], minfer.ArgumentError, "2147483647"),
        ([(INT32_MIN, 0, 1)], minfer.ArgumentError, "-2147483648"),
        ([(0, 1, 2**31)], minfer.ArgumentError, "2147483648"),
        ([(2**64, 1, 1)], minfer.ArgumentError, str(2**64)),
        ([(0, 1)], minfer.ArgumentError, "(0, 1)"),
        ([(0, 1, 1, 0, 0)], minfer.ArgumentError, "(0, 1, 1, 0, 0)"),
        ([(0, 1.0, 1)], minfer.ArgumentTypeError, "1.0"),
        ([(0, 1, True)], minfer.ArgumentTypeError, "True"),
        ([("0", 1, 1)], minfer.ArgumentTypeError, "'0'"),
        ([(0, 1, 1), 5], minfer.ArgumentTypeError, "moves[1]"),
        ([None], minfer.ArgumentTypeError, "None"),
        ("abc", minfer.ArgumentTypeError, "'a'"),
        (5, minfer.ArgumentTypeError, "5"),
        (None, minfer.ArgumentTypeError, "None"),
    ],
    ids=str,
)
def test_order_moves_refuses(moves, error, word):
    with pytest.raises(error) as refused:
        minfer.order_moves(moves)
    assert type(refused.value) is error
    assert isinstance(refused.value, TypeError if "Type" in error.__name__ else ValueError)
    assert word in str(refused.value) and "\n" not in str(refused.value)


# ---- the manual ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1])
def test_the_readme_runs(demo_path, n, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it saves a session
    text = (Path(__file__).parent.parent / "README.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[n]
    exec(code.replace('"demo"', repr(str(demo_path))), {"minfer": minfer})
    assert len(capsys.readouterr().out.split()) > 5
