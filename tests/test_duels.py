"""Duels: what other engines' caches are known to get wrong, asked of this one.

Each test names the wrong answer in its first line, in brackets. Unless it is about the meaning of a
rotation, it compares bytes, with the same history computed the plainest way (replay.py).
"""

import numpy as np
import pytest
import tinymodels
from kv_judge import state
from reference import Reference
from replay import PROBE, Replay, signature

import minfer

VARIANTS = {name: (arch, overrides) for name, arch, overrides in tinymodels.VARIANTS}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A gemma3: six layers with a window of 8, and a full one."""
    return tinymodels.write(tmp_path_factory.mktemp("duels") / "gemma3.gguf", "gemma3")


@pytest.fixture
def load(path):
    engines = []

    def make(**options):
        engines.append(minfer.load(path, **{"n_ctx": 200, "n_seq": 4, "n_batch": 64} | options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def replay(path):
    replay = Replay(path, 512, threads=1)
    yield replay
    replay.close()


def tokens_of(n, salt=1):
    return np.random.RandomState(salt).randint(3, 300, n).tolist()


def says(engine, seq):
    """Signature of the next logits; the row that this takes is taken back."""
    logits = engine.forward_cached([PROBE], seq)
    engine.kv.trim(seq, 1)
    engine.kv.check()
    return signature(logits)


def spans(engine, seq):
    return [engine.kv.spans(seq, group) for group in range(engine.n_groups)]


def fragmented(load, n_mates, n_each, n_rows, tokens):
    """An engine whose sequence 0 has n_rows rows of `tokens` in the holes between other sequences'
    rows: n_mates of them filled the arena with n_each rows each, and every second one in it, by the
    cells of the full group, is gone. Also returns those that are left."""
    engine = load(n_ctx=n_mates * n_each, n_seq=1 + n_mates, n_batch=512)
    mates = list(range(1, 1 + n_mates))
    for seq in mates:
        engine.forward_cached(mate_tokens(seq, n_each), seq)
    mates.sort(key=lambda seq: engine.kv.spans(seq, engine.n_groups - 1)[0].cell)
    for seq in mates[::2]:
        engine.kv.free(seq)
    engine.forward_cached(tokens[:n_rows])
    return engine, mates[1::2]


def mate_tokens(seq, n):
    return tokens_of(n, 50 + seq)


# ---- edits of what others read ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "args"),
    [("shift", (0, 5)), ("shift", (1, 5)), ("shift", (14, 3)), ("rm", (3, 9)), ("rm", (0, 4))],
)
@pytest.mark.parametrize("edited", [0, 1], ids=["owner", "reader"])
def test_an_edit_of_a_shared_prefix_leaves_the_other_sequence_alone(
    load, replay, kind, args, edited
):
    """[The edit moves, or deletes, the rows of every sequence that reads them.]"""
    engine, tokens = load(), tokens_of(20)
    engine.forward_cached(tokens)
    engine.kv.share(1, 0, 16)
    other = 1 - edited
    histories = [replay.root.append(tokens), replay.root.append(tokens).then("trim", 4)]
    before, said = spans(engine, other), says(engine, other)

    getattr(engine.kv, kind)(edited, *args)
    assert spans(engine, other) == before
    assert said == says(engine, other) == replay.next(histories[other])
    edited_history = histories[edited].then(kind, *args)
    assert says(engine, edited) == replay.next(edited_history) != said
    more = tokens_of(30, 2)
    for seq, history in ((other, histories[other]), (edited, edited_history)):
        engine.forward_cached(more, seq)
        assert says(engine, seq) == replay.next(history.append(more))


def test_a_shift_back_of_a_shared_prefix_deletes_nothing(load, replay):
    """[A shift by -20 of the one sequence deletes the rows of the other.]"""
    engine, tokens = load(), tokens_of(30)
    engine.forward_cached(tokens)
    engine.kv.share(1, 0, 30)
    with pytest.raises(minfer.KvRangeError, match="-20"):
        engine.kv.shift(0, 0, -20)
    with pytest.raises(minfer.KvCollidesError, match="-20"):
        engine.kv.shift(0, 25, -20)
    assert (engine.kv.len(0), engine.kv.len(1)) == (30, 30)
    history = replay.root.append(tokens)
    assert says(engine, 0) == says(engine, 1) == replay.next(history)


@pytest.mark.parametrize("gone", [0, 1], ids=["owner", "reader"])
@pytest.mark.parametrize("how", ["free", "trim", "rm"])
def test_removing_one_of_two_sharing_sequences(load, replay, gone, how):
    """[The other one's rows change, or its cells are given away while it reads them.]"""
    engine, tokens = load(), tokens_of(40)
    engine.forward_cached(tokens)
    engine.kv.share(1, 0, 40)
    kept = 1 - gone
    before = spans(engine, kept)
    if how == "free":
        engine.kv.free(gone)
    elif how == "trim":
        engine.kv.trim(gone, 40)
    else:
        engine.kv.rm(gone, 0, 40)
    assert engine.kv.len(gone) == 0
    assert spans(engine, kept) == before
    # Whoever comes next takes cells: none of those that are read.
    engine.forward_cached(tokens_of(60, 3), gone)
    engine.forward_cached(tokens_of(60, 4), 2)
    assert spans(engine, kept) == before or engine.kv.max_trim(kept) < 40
    assert says(engine, kept) == replay.next(replay.root.append(tokens))


@pytest.mark.parametrize("n", [1, 7, 8, 9, 25, 39, 40])
def test_share_of_a_part(load, replay, n):
    """[Sharing a part of a sequence aborts the process.]"""
    engine, tokens = load(), tokens_of(40)
    engine.forward_cached(tokens)
    used = [group.n_used for group in engine.kv.stats()]
    engine.kv.share(2, 0, n)
    assert [group.n_used for group in engine.kv.stats()] == used
    source = replay.root.append(tokens)
    history = source.then("trim", 40 - n) if n < 40 else source
    assert says(engine, 2) == replay.next(history)
    # Both go on their own ways: nothing of one is seen by the other.
    mine, yours = tokens_of(20, 5), tokens_of(20, 6)
    for i in range(20):
        engine.forward_batch([minfer.Chunk(0, mine[i : i + 1]), minfer.Chunk(2, yours[i : i + 1])])
    assert says(engine, 0) == replay.next(source.append(mine))
    assert says(engine, 2) == replay.next(history.append(yours))


def test_share_into_a_sequence_that_has_rows_is_refused(load, replay):
    """[The rows of both are mixed.]"""
    engine = load()
    for seq in (0, 1):
        engine.forward_cached(tokens_of(12, seq), seq)
    before = state(engine)
    with pytest.raises(minfer.KvNotEmptyError, match="12"):
        engine.kv.share(1, 0, 5)
    assert state(engine) == before
    assert says(engine, 1) == replay.next(replay.root.append(tokens_of(12, 1)))


def test_a_trimmed_owner_goes_on_in_cells_of_its_own(load, replay):
    """[The owner's next rows are written over those that a reader still reads.]"""
    engine, tokens, more = load(), tokens_of(40), tokens_of(25, 7)
    engine.forward_cached(tokens)
    engine.kv.share(1, 0, 40)
    engine.kv.share(2, 1, 30)
    engine.kv.trim(0, 20)
    engine.forward_cached(more)
    source = replay.root.append(tokens)
    assert says(engine, 0) == replay.next(source.then("trim", 20).append(more))
    assert says(engine, 1) == replay.next(source)
    assert says(engine, 2) == replay.next(source.then("trim", 10))


# ---- windows ---------------------------------------------------------------------------------


def test_a_trim_past_the_window_is_exact_or_refused(load, replay):
    """[Rows that the window dropped are needed again: the call succeeds, the next answer is wrong.]"""
    refused = exact = 0
    for n in range(1, 61):
        engine, tokens = load(n_seq=1, n_batch=8), tokens_of(60)  # 24 cells for the windowed layers
        engine.forward_cached(tokens)
        history, before = replay.root.append(tokens), state(engine)
        if n <= engine.kv.max_trim(0) or n == 60:
            engine.kv.trim(0, n)
            exact += 1
            history = history.then("trim", n) if n < 60 else replay.root
        else:
            with pytest.raises(minfer.KvGoneError):
                engine.kv.trim(0, n)
            refused += 1
            assert state(engine) == before
        assert says(engine, 0) == replay.next(history)
        engine.close()
    assert refused > 30 and exact > 8


def test_rm_and_share_past_the_window_are_exact_or_refused(load, replay):
    """[As for trim: the rows that come into the window again are not there.]"""
    seen = set()
    for kind, *args in [
        *(("rm", p, 60) for p in range(0, 60, 3)),  # a trim
        *(("rm", p, 57) for p in range(0, 57, 3)),  # three rows of the window are left
        *(("share", n) for n in range(0, 61, 3)),
    ]:
        engine, tokens = load(n_seq=2, n_batch=8), tokens_of(60)  # 40 cells
        engine.forward_cached(tokens)
        history, before, seq = replay.root.append(tokens), state(engine), 0
        try:
            if kind == "rm":
                engine.kv.rm(0, *args)
                history = history.then("rm", *args) if args != [0, 60] else replay.root
            else:
                engine.kv.share(1, 0, *args)
                n, seq = args[0], 1
                history = (
                    history.then("trim", 60 - n) if 0 < n < 60 else (history if n else replay.root)
                )
            seen.add((kind, "exact"))
        except minfer.KvGoneError:
            assert state(engine) == before
            seen.add((kind, "refused"))
            seq = 0
        assert says(engine, seq) == replay.next(history)
        engine.close()
    assert len(seen) == 4


# ---- rotation --------------------------------------------------------------------------------

ROPES = ["llama-rope_freqs", "llama-linear", "llama-yarn-attn_factor", "qwen3-yarn", "phi3-short",
         "phi3-long", "llama", "phi3", "qwen2"]  # fmt: skip


@pytest.fixture(scope="module", params=ROPES)
def one_layer(request, tmp_path_factory):
    """(path, reference) of a model of one layer without a window: there a row's K and V are the
    token's own and its position's, so a sequence that was edited is one computed at those
    positions from the start."""
    arch, overrides = VARIANTS.get(request.param, (request.param, {}))
    path = tmp_path_factory.mktemp("rope") / f"{request.param}.gguf"
    tinymodels.write(path, arch, **overrides | {"n_layer": 1})
    return path, Reference(path, n_ctx=200)


def next_logits(engine, seq=0):
    logits = engine.forward_cached([PROBE], seq)[0].astype(np.float64)
    engine.kv.trim(seq, 1)
    return logits


@pytest.mark.parametrize(
    ("kind", "args"),
    [("shift", (0, 9)), ("shift", (12, 30)), ("shift", (25, 1)), ("rm", (10, 21)), ("rm", (0, 7)),
     ("rm", (29, 30))],
)  # fmt: skip
def test_an_edit_turns_keys_the_right_way(one_layer, kind, args):
    """[Keys are rotated by the opposite angle; or those of a scaled or partial rope by another.]"""
    path, reference = one_layer
    tokens, old = tokens_of(40), np.arange(40)
    with minfer.load(path, n_ctx=200, n_batch=64) as engine:
        engine.forward_cached(tokens)
        getattr(engine.kv, kind)(0, *args)
        engine.kv.check()
        ours, end = next_logits(engine), engine.kv.next_pos(0)
    first, delta = (args[0], args[1]) if kind == "shift" else (args[1], args[0] - args[1])
    keep = old if kind == "shift" else np.delete(old, slice(*args))
    moved = keep >= first
    kept = [tokens[i] for i in keep] + [PROBE]

    def at(positions):
        return reference.logits(kept, rows=[-1], positions=[*positions, end])[0]

    right = at(keep + delta * moved)
    scale = right.std()
    assert np.abs(ours - right).max() <= 1e-4 * scale
    for wrong in (at(keep - delta * moved), at(keep), at(keep + (delta + 1) * moved)):
        assert np.abs(ours - wrong).max() >= 1e-2 * scale


def test_a_shift_there_and_back_in_steps(one_layer):
    """[Rotations add up wrongly: a second shift starts from the first one's pending angle.]"""
    path, reference = one_layer
    tokens, shifts = tokens_of(40), [(10, 7), (30, 50), (17, -4), (13, -3)]
    with minfer.load(path, n_ctx=200, n_batch=64) as engine:
        engine.forward_cached(tokens)
        for shift in shifts:
            engine.kv.shift(0, *shift)
        ours, end = next_logits(engine), engine.kv.next_pos(0)
    positions = np.arange(40)
    for first, delta in shifts:
        positions[positions >= first] += delta
    assert end == positions[-1] + 1
    right = reference.logits([*tokens, PROBE], rows=[-1], positions=[*positions, end])[0]
    assert np.abs(ours - right).max() <= 1e-4 * right.std()


@pytest.mark.parametrize("name", ["gemma3", "gemma3-linear", "gemma2", "mistral", "phi3-window"])
def test_a_whole_sequence_moved_says_the_same(tmp_path, name):
    """[The layers of a windowed group, which have a base of their own, are rotated by another's.]"""
    arch, overrides = VARIANTS.get(name, (name, {}))
    path = tinymodels.write(tmp_path / "m.gguf", arch, **overrides)
    tokens, more = tokens_of(30), tokens_of(12, 8)
    with minfer.load(path, n_ctx=200, n_seq=2, n_batch=64) as engine:
        for seq in (0, 1):
            engine.forward_cached(tokens, seq)
        engine.kv.shift(1, 0, 77)
        for _ in range(2):
            there, here = next_logits(engine, 1), next_logits(engine, 0)
            assert np.abs(there - here).max() <= 1e-4 * here.std()
            for seq in (0, 1):
                engine.forward_cached(more, seq)
        assert engine.kv.next_pos(1) == engine.kv.next_pos(0) + 77


# ---- where rows lie --------------------------------------------------------------------------


def test_fragmented_and_defragmented_say_the_same(load, replay):
    """[Attention sums over cells, holes masked: after fragmentation they reorder.]"""
    tokens = tokens_of(60)
    engine, left = fragmented(load, 32, 4, 56, tokens)
    history = replay.root.append(tokens[:56])
    assert len(engine.kv.spans(0, engine.n_groups - 1)) >= 8
    assert says(engine, 0) == replay.next(history)
    mates = {s: says(engine, s) for s in left}

    moves = engine.kv.defrag()
    assert moves
    assert all(group.n_free_runs <= 1 for group in engine.kv.stats())
    assert says(engine, 0) == replay.next(history)
    assert mates == {s: says(engine, s) for s in mates}
    more = tokens_of(4, 9)
    engine.forward_cached(more)
    assert says(engine, 0) == replay.next(history.append(more))


def test_interleaved_sequences_say_what_they_say_alone(load, replay):
    """[The order of cells is the order of summation.]"""
    engine = load(n_ctx=160)
    tokens = [tokens_of(40, 20 + s) for s in range(4)]
    for i in range(40):
        chunks = [minfer.Chunk(s, tokens[s][i : i + 1]) for s in range(4)]
        engine.forward_batch(chunks[:: 1 if i % 2 else -1])
    engine.kv.trim(3, 1)  # room for a probe
    histories = [replay.root.append(t) for t in tokens]
    histories[3] = histories[3].then("trim", 1)
    assert sum(len(engine.kv.spans(s, engine.n_groups - 1)) for s in range(4)) > 4
    for _ in range(2):
        assert [says(engine, s) for s in range(4)] == [replay.next(h) for h in histories]
        engine.kv.defrag()


def test_more_spans_than_a_read_can_carry(load, replay):
    """[The read is cut off, or refused for good.] The forward regroups, and says so."""
    tokens = tokens_of(140)
    engine, left = fragmented(load, 160, 2, 120, tokens)
    full = engine.n_groups - 1
    before = engine.kv.stats()[full]
    assert before.compactions == 0 and len(engine.kv.spans(0, full)) >= 50
    engine.forward_cached(tokens[120:])
    after = engine.kv.stats()[full]
    assert after.compactions == 1 and after.generation > before.generation
    assert len(engine.kv.spans(0, full)) == 1
    assert says(engine, 0) == replay.next(replay.root.append(tokens))
    for s in left[::20]:
        assert says(engine, s) == replay.next(replay.root.append(mate_tokens(s, 2)))


# ---- a full arena ----------------------------------------------------------------------------


def test_a_full_arena_refuses_and_the_state_before_decodes_on(load, replay):
    """[Half of the batch is stored; or the older rows are gone.]"""
    engine, tokens = load(n_ctx=64, n_batch=16), tokens_of(80)
    engine.forward_cached(tokens[:40])
    other = tokens_of(20, 30)
    engine.forward_cached(other, 1)
    before = state(engine)
    for refused in (
        [minfer.Chunk(0, tokens[40:45])],
        [minfer.Chunk(0, tokens[40:80])],  # several batches: not one of them
        [minfer.Chunk(0, tokens[40:43]), minfer.Chunk(1, other[:2])],
        [minfer.Chunk(2, other[:2]), minfer.Chunk(3, other[:3])],
    ):
        with pytest.raises(minfer.KvFullError):
            engine.forward_batch(refused)
        assert state(engine) == before
    history = replay.root.append(tokens[:40])
    for token in tokens[40:44]:
        row = engine.forward_cached([token])
        history = history.append([token])
        assert signature(row) == replay.row(history)
    with pytest.raises(minfer.KvFullError):
        engine.forward_cached([tokens[44]])
    engine.kv.free(1)
    engine.forward_cached(tokens[44:60])
    assert says(engine, 0) == replay.next(history.append(tokens[44:60]))


def test_an_edit_that_needs_copies_is_refused_in_a_full_arena(load, replay):
    """[The shared rows are edited in place, for want of cells.]"""
    engine, tokens = load(n_ctx=64, n_batch=16), tokens_of(60)
    engine.forward_cached(tokens)
    engine.kv.share(1, 0, 60)
    before = state(engine)
    for edit in (lambda: engine.kv.shift(1, 0, 3), lambda: engine.kv.rm(0, 5, 9)):
        with pytest.raises(minfer.KvFullError):
            edit()
        assert state(engine) == before
    history = replay.root.append(tokens)
    assert says(engine, 0) == says(engine, 1) == replay.next(history)
    engine.kv.shift(1, 58, 3)  # two rows to copy
    assert says(engine, 1) == replay.next(history.then("shift", 58, 3))
    assert says(engine, 0) == replay.next(history)


# ---- batches ---------------------------------------------------------------------------------


def test_a_batch_says_what_each_sequence_says_alone(load, replay):
    """[Batch mates leak into each other.]"""
    engine = load(n_ctx=400, n_batch=128)
    tokens = [tokens_of(n, 40 + n) for n in (1, 9, 50, 66)]
    out = engine.forward_batch([minfer.Chunk(s, t, "all") for s, t in enumerate(tokens)])
    histories = []
    for rows, sequence in zip(out, tokens, strict=True):
        history = replay.root
        for token, row in zip(sequence, rows, strict=True):
            history = history.append([token])
            assert signature(row) == replay.row(history)
        histories.append(history)
    assert [says(engine, s) for s in range(4)] == [replay.next(h) for h in histories]


def test_pads_leave_no_trace(load, replay):
    """[Pads are attended to, push real tokens out of a ring, or take cells.]"""
    engine = load()
    histories = [replay.root] * 4
    left, right, length = [0, 3, 6, 11], [0, 2, 0, 0], 11
    for step in range(4):
        ids = np.array(tokens_of(4 * length, 60 + step)).reshape(4, length)
        used = [group.n_used for group in engine.kv.stats()]
        out = engine.forward_padded(ids, left_padding=left, right_padding=right)
        n_real = 4 * length - sum(left) - sum(right)
        full = engine.n_groups - 1
        assert engine.kv.stats()[full].n_used == used[full] + n_real
        for b in range(4):
            for i in range(left[b], length - right[b]):
                histories[b] = histories[b].append([ids[b, i]])
                assert signature(out[b, i]) == replay.row(histories[b])
    assert engine.kv.len(3) == 0
    for b in range(3):
        assert engine.kv.len(b) == histories[b].depth
        assert says(engine, b) == replay.next(histories[b])
