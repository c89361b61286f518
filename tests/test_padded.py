"""Padded batches: Engine.forward_padded equals solo runs without pads, bit for bit, at no cell.

Pads are nothing: their ids are not read, they take no cell, and a row of pads only is not run. Bad
arguments are refused by row and value and change nothing.
"""

import numpy as np
import pytest

import minfer


def tokens(n, seed=0):
    return np.random.RandomState(seed).randint(3, 300, n)


@pytest.fixture
def fresh(tiny_path):
    with minfer.load(tiny_path, n_ctx=256, n_seq=5, n_batch=16, threads=1) as engine:
        yield engine


def state(engine):
    """All that can be seen of a cache."""
    kv = engine.kv
    kv.check()
    return kv.stats(), [
        (kv.len(s), kv.next_pos(s), [kv.spans(s, g) for g in range(2)]) for s in range(engine.n_seq)
    ]


def solo(engine, row, seq):
    return engine.forward_cached(row, seq, logits="all")


@pytest.mark.parametrize("kind", [np.array, list, lambda ids: tuple(map(tuple, ids))])
def test_padded_equals_solo(fresh, kind):
    """Left, right, both, none and only pads; sequences at positions of their own."""
    left, right, length = [0, 3, 2, 6, 0], [0, 0, 1, 0, 5], 6
    started = [0, 17, 4, 9, 30]
    ids = tokens(5 * length, 5).reshape(5, length)
    expected = []
    for seq, n in enumerate(started):
        if n:
            fresh.forward_cached(tokens(n, seq), seq)
        row = ids[seq, left[seq] : length - right[seq]]
        expected.append(solo(fresh, row, seq) if len(row) else None)
    used = fresh.kv.stats()
    for seq in range(5):
        fresh.kv.free(seq)
    for seq, n in enumerate(started):
        if n:
            fresh.forward_cached(tokens(n, seq), seq)
    for b in range(5):  # a pad may be any integer
        ids[b, : left[b]] = [-1, 10**6, -(2**62), 2**31, 0, 2**62][: left[b]]
        ids[b, length - right[b] :] = -7
    out = fresh.forward_padded(kind(ids.tolist()), left, right)
    assert out.shape == (5, length, fresh.n_vocab) and out.dtype == np.float32
    for b in range(5):
        assert not out[b, : left[b]].any() and not out[b, length - right[b] :].any()
        if expected[b] is not None:
            assert out[b, left[b] : length - right[b]].tobytes() == expected[b].tobytes()
        assert fresh.kv.len(b) == started[b] + length - left[b] - right[b]
    assert [g.n_used for g in fresh.kv.stats()] == [g.n_used for g in used]
    fresh.kv.check()


def test_pads_take_no_cell(fresh):
    fresh.forward_padded(np.full((3, 200), 5), [199, 198, 200], seqs=[4, 2, 0])
    assert [fresh.kv.len(s) for s in range(5)] == [0, 0, 2, 0, 1]
    assert all(group.n_used == 3 for group in fresh.kv.stats())


def test_nothing_but_pads(fresh):
    before, counted = state(fresh), fresh.stats()
    for ids, left, shape in (
        ([[9, 9], [9, 9]], [2, 2], (2, 2)),
        (np.zeros((0, 4), int), None, (0, 4)),
        ([], [], (0, 0)),
        ([[]], None, (1, 0)),
    ):
        out = fresh.forward_padded(ids, left)
        assert out.shape == (*shape, fresh.n_vocab) and not out.any()
    assert state(fresh) == before and fresh.stats() == counted  # no forward ran


def test_padded_of_unusual_arrays(fresh):
    ids = tokens(12).reshape(2, 6)
    expected = fresh.forward_padded(ids, [1, 0], [0, 2]).tobytes()
    for other in (
        ids.astype(">i8"),
        ids.astype(np.uint16),
        np.asfortranarray(ids),
        np.repeat(ids, 2, axis=1)[:, ::2],
        [ids[0], ids[1].tolist()],
    ):
        for seq in range(2):
            fresh.kv.free(seq)
        pads = np.array([1, 0], np.uint8), (np.int64(0), 2)
        assert fresh.forward_padded(other, *pads).tobytes() == expected


ROWS = [[5, 6, 7], [8, 9, 10]]


@pytest.mark.parametrize(
    ("args", "error", "word"),
    [
        ((ROWS, [0, -1]), minfer.ArgumentError, "left_padding[1] is -1"),
        ((ROWS, None, [4, 0]), minfer.ArgumentError, "right_padding[0] is 4"),
        ((ROWS, [0, 2], [0, 2]), minfer.ArgumentError, "row 1: left_padding 2 and right_padding 2"),
        ((ROWS, [0]), minfer.ArgumentError, "left_padding"),
        ((ROWS, [0, 0, 0]), minfer.ArgumentError, "left_padding"),
        ((ROWS, [[0, 0]]), minfer.ArgumentError, "left_padding"),
        ((ROWS, np.zeros((2, 1), int)), minfer.ArgumentError, "left_padding"),
        ((ROWS, np.array(0)), minfer.ArgumentError, "left_padding"),
        ((ROWS, [2**64, 0]), minfer.ArgumentError, str(2**64)),
        ((ROWS, 1), minfer.ArgumentTypeError, "left_padding"),
        ((ROWS, "01"), minfer.ArgumentTypeError, "left_padding"),
        ((ROWS, [0, 1.0]), minfer.ArgumentTypeError, "left_padding[1]"),
        ((ROWS, [0, True]), minfer.ArgumentTypeError, "left_padding[1]"),
        ((ROWS, np.zeros(2)), minfer.ArgumentTypeError, "left_padding[0]"),
        ((ROWS, None, None, [1, 1]), minfer.ArgumentError, "sequence 1"),
        ((ROWS, None, None, [1, 5]), minfer.ArgumentError, "seqs[1] is 5"),
        ((ROWS, None, None, [-1, 0]), minfer.ArgumentError, "seqs[0] is -1"),
        ((ROWS, None, None, [0]), minfer.ArgumentError, "seqs"),
        ((ROWS, [3, 3], None, [0, 5]), minfer.ArgumentError, "seqs[1] is 5"),
        ((ROWS, [3, 3], None, [2, 2]), minfer.ArgumentError, "sequence 2"),
        (([[1]] * 6,), minfer.ArgumentError, "6 rows"),
        (([[1, 2], [3]],), minfer.ArgumentError, "ids[1] has 1"),
        (([1, 2],), minfer.ArgumentTypeError, "ids[0]"),
        ((np.arange(3),), minfer.ArgumentError, "[3]"),
        ((np.zeros((1, 2, 3), int),), minfer.ArgumentError, "[1, 2, 3]"),
        ((np.zeros((2, 3)),), minfer.ArgumentTypeError, "float64"),
        ((np.zeros((2, 3), bool),), minfer.ArgumentTypeError, "bool"),
        (([[1.0, 2]],), minfer.ArgumentTypeError, "ids[0]"),
        (([[True, 2]],), minfer.ArgumentTypeError, "bool"),
        (([[None, 2]], [1]), minfer.ArgumentTypeError, "NoneType"),
        (([["a"]],), minfer.ArgumentTypeError, "str"),
        (("ab",), minfer.ArgumentTypeError, "'ab'"),
        ((None,), minfer.ArgumentTypeError, "None"),
        (([[5, 6], [-1, 6]],), minfer.ArgumentError, "ids[1]: token -1"),
        (([[3, 3], [5, 320]], [2, 0]), minfer.ArgumentError, "ids[1]: token 320"),
        (([[2**70, 6]],), minfer.ArgumentError, str(2**70)),
    ],
    ids=str,
)
def test_padded_refuses(fresh, args, error, word):
    fresh.forward_cached(tokens(12), 1)
    before = state(fresh)
    with pytest.raises(error) as refused:
        fresh.forward_padded(*args)
    assert type(refused.value) is error
    assert isinstance(refused.value, TypeError if "Type" in error.__name__ else ValueError)
    assert word in str(refused.value) and "\n" not in str(refused.value)
    assert state(fresh) == before
    with minfer.load(fresh.metadata.path, threads=1) as other:
        other.forward_cached(tokens(12))
        expected = other.forward_cached([7])
    assert fresh.forward_cached([7], 1).tobytes() == expected.tobytes()


def test_padded_that_does_not_fit(fresh):
    """All or nothing, in every row."""
    fresh.forward_cached(tokens(200), 0)
    before = state(fresh)
    with pytest.raises(MemoryError) as refused:
        fresh.forward_padded(np.full((2, 30), 9), [0, 3], seqs=[1, 2])
    assert type(refused.value) is minfer.KvFullError and state(fresh) == before
    fresh.forward_padded(np.full((2, 30), 9), [0, 4], seqs=[1, 2])
    assert [fresh.kv.len(s) for s in range(3)] == [200, 30, 26]
