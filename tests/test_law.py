"""The law: nothing physical changes one bit of the logits.

Each test computes a sequence the plainest way (alone, one call, one thread) and again with something
physical changed, and compares all bytes. The tiny models have a window of 8 and prompts many times
that long, so rows leave the window and their cells are used again. All of it in every KV format,
which MINFER_CACHE_TYPE says to all engines of a test.
"""

import numpy as np
import pytest
import tinymodels

import minfer

ISAS = minfer.isas()
TINY = [("gemma3", "Q4_K"), ("gemma2", "Q6_K"), ("llama", "F16"), ("phi3", "Q5_0"), ("olmo2", "MXFP4")]
FORMATS = list(minfer.KvFormat)
MATES = [3, 17, 40]  # lengths of the other sequences in a batch


@pytest.fixture(scope="module", params=FORMATS)
def cache_type(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINFER_CACHE_TYPE", request.param)
        yield request.param


@pytest.fixture(scope="module", params=TINY, ids="-".join)
def tiny(request, tmp_path_factory):
    arch, weights = request.param
    path = tmp_path_factory.mktemp("law") / f"{arch}.gguf"
    # Heads of 32 or 64, which q8_0 can pack.
    overrides = {"n_embd": 256, "n_ff": 256} if weights.endswith("_K") else {"head_dim": 32}
    tinymodels.write(path, arch=arch, weight_type=weights, **overrides)
    return path


def some_tokens(n, n_vocab, seed=1):
    return np.random.RandomState(seed).randint(0, n_vocab, n).astype(np.int32)


def forward(path, tokens, chunk=None, **options):
    """Last-token logits of `tokens` fed in chunks of `chunk`."""
    options = {"n_ctx": 256, "n_batch": 128, "threads": 1} | options
    with minfer.load(path, **options) as engine:
        return feed(engine, tokens, chunk)


def feed(engine, tokens, chunk=None, seq=0):
    chunk = chunk or len(tokens)
    for start in range(0, len(tokens), chunk):
        last = engine.forward_cached(tokens[start : start + chunk], seq)
    return last[-1]


def equal(a, b):
    return a.tobytes() == b.tobytes()


@pytest.fixture(scope="module")
def plain(tiny, cache_type):
    """(path, tokens, their last logits the plainest way)."""
    with minfer.load(tiny, n_ctx=256, n_batch=128, threads=1) as engine:
        assert engine.kv_format == cache_type
        tokens = some_tokens(100, engine.n_vocab)
        return tiny, tokens, feed(engine, tokens)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks(plain, chunk):
    path, tokens, expected = plain
    assert equal(forward(path, tokens, chunk), expected)


@pytest.mark.parametrize("n_batch", [1, 16, 37])
def test_batches_of_one_call(plain, n_batch):
    path, tokens, expected = plain
    assert equal(forward(path, tokens, n_batch=n_batch), expected)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads(plain, threads):
    path, tokens, expected = plain
    assert equal(forward(path, tokens, threads=threads), expected)
    assert equal(forward(path, tokens, 1, threads=threads), expected)


@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets(plain, isa):
    path, tokens, expected = plain
    assert equal(forward(path, tokens, isa=isa), expected)
    assert equal(forward(path, tokens, 3, isa=isa, threads=2), expected)


def test_all_logits_equal_each_step(plain):
    path, tokens, expected = plain
    with minfer.load(path, n_ctx=256, threads=1) as engine:
        every = engine.forward_cached(tokens, logits="all")
    assert equal(every[-1], expected)
    with minfer.load(path, n_ctx=256, threads=2) as engine:
        for i, token in enumerate(tokens):
            assert equal(engine.forward_cached([token])[0], every[i]), i


def test_batch_mates(plain):
    """In turn with three other sequences, of other lengths and in other chunks, that fill the arena's cells between."""
    path, tokens, expected = plain
    with minfer.load(path, n_ctx=512, n_seq=4, n_batch=64, threads=2) as engine:
        mates = [some_tokens(n, engine.n_vocab, n) for n in MATES]
        engine.forward_batch([minfer.Chunk(1 + i, m[: len(m) // 2]) for i, m in enumerate(mates)])
        engine.forward_cached(tokens[:30])
        batch = [minfer.Chunk(1 + i, m[len(m) // 2 :]) for i, m in enumerate(mates)]
        out = engine.forward_batch([batch[0], minfer.Chunk(0, tokens[30:]), *batch[1:]])
        engine.kv.check()
        assert equal(out[1][0], expected)
        for i, mate in enumerate(mates):  # nor did the company change the others
            assert equal(out[i if i == 0 else i + 1][0], forward(path, mate))


def test_decode_in_company(plain):
    path, tokens, expected = plain
    with minfer.load(path, n_ctx=512, n_seq=4, threads=2) as engine:
        for i, token in enumerate(tokens):
            chunks = [minfer.Chunk(0, [token])]
            chunks += [minfer.Chunk(1 + k, [int(tokens[i - 7 * k])]) for k in range(1, 3) if i >= 7 * k]
            last = engine.forward_batch(chunks)[0][0]
    assert equal(last, expected)


def test_trim_and_append_again(plain):
    path, tokens, expected = plain
    with minfer.load(path, n_ctx=256, n_batch=128, threads=1) as engine:
        feed(engine, tokens[:96])
        feed(engine, some_tokens(4, engine.n_vocab, 9), 1)
        engine.kv.trim(0, 4)
        engine.kv.check()
        assert equal(feed(engine, tokens[96:]), expected)
        engine.kv.trim(0, min(5, engine.kv.max_trim(0)))
        assert equal(feed(engine, tokens[engine.kv.len(0) :]), expected)


def test_free_and_reuse_of_cells(plain):
    """The cells of a sequence that is gone hold its rows until they are overwritten; nobody may read them."""
    path, tokens, expected = plain
    with minfer.load(path, n_ctx=128, n_seq=2, threads=1) as engine:
        feed(engine, some_tokens(120, engine.n_vocab, 5), seq=1)
        engine.kv.free(1)
        assert equal(feed(engine, tokens), expected)


def test_graph_reused_and_rebuilt(plain):
    path, tokens, expected = plain
    with minfer.load(path, n_ctx=256, threads=1) as engine:
        feed(engine, tokens, 1)
        stats = engine.stats()
        assert (stats.graph_builds, stats.graph_reuses) == (1, len(tokens) - 1)  # every step after the first
        engine.kv.free(0)
        assert equal(feed(engine, tokens), expected)  # another bucket: built anew
        engine.kv.free(0)
        assert equal(feed(engine, tokens), expected)  # and reused
        stats = engine.stats()
        assert (stats.graph_builds, stats.graph_reuses) == (2, len(tokens))


def edited(engine, tokens, chunk=None, src=None):
    """40 tokens, then two are cut and what follows is moved on by three, then the others. With
    `src` the first 40 are that sequence's, which keeps them."""
    feed(engine, tokens[:40], chunk, src or 0)
    if src:
        engine.kv.share(0, src, 40)
    engine.kv.rm(0, 36, 38)
    engine.kv.shift(0, 37, 3)
    engine.kv.check()
    return feed(engine, tokens[40:], chunk)


@pytest.mark.parametrize("isa", ISAS)
def test_edits(plain, isa):
    """Rows that an edit moves are turned and stored again, shared ones as copies."""
    path, tokens, unedited = plain
    with minfer.load(path, n_ctx=256, n_batch=128, threads=1) as engine:
        expected = edited(engine, tokens)
    assert not equal(expected, unedited)
    with minfer.load(path, n_ctx=256, n_seq=2, n_batch=64, threads=2, isa=isa) as engine:
        assert equal(edited(engine, tokens, 5), expected)
        engine.kv.free(0)
        assert equal(edited(engine, tokens, 64, src=1), expected)
        engine.kv.defrag(0)
        assert equal(feed(engine, tokens[40:], seq=1), unedited)  # whose rows nobody changed


def test_the_comparison_can_fail(plain):
    path, tokens, expected = plain
    other = tokens.copy()
    other[-3] = (other[-3] + 1) % 90
    assert not equal(forward(path, other), expected)


# ---- the real model: 700 tokens cross its window of 512 --------------------------------------


@pytest.fixture(scope="module")
def real(demo_path, goldens, cache_type):
    """(path, tokens, last logits the plainest way) of a prompt longer than the window."""
    tokens = np.array(goldens["story_700"]["ids"], np.int32)
    return demo_path, tokens, forward(demo_path, tokens, n_ctx=1024, n_batch=1024)


@pytest.mark.parametrize("chunk", [7, 64])
def test_real_chunks(real, chunk):
    path, tokens, expected = real
    assert equal(forward(path, tokens, chunk, n_ctx=1024, threads=2), expected)


def test_real_decode(real):
    path, tokens, _ = real
    with minfer.load(path, n_ctx=1024, threads=2) as engine:
        every = engine.forward_cached(tokens[:600], logits="none")
        every = engine.forward_cached(tokens[600:], logits="all")
        engine.kv.trim(0, 100)
        for i, token in enumerate(tokens[600:]):
            assert equal(engine.forward_cached([token])[0], every[i]), i


def test_real_batch_mates(real):
    path, tokens, expected = real
    with minfer.load(path, n_ctx=4096, n_seq=4, threads=2) as engine:
        chunks = [minfer.Chunk(1 + i, tokens[5 : 5 + n]) for i, n in enumerate((40, 555, 9))]
        engine.forward_cached(tokens[:333])
        out = engine.forward_batch([chunks[0], minfer.Chunk(0, tokens[333:]), *chunks[1:]])
        assert equal(out[1][0], expected)


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa != "scalar"])
def test_real_instruction_sets(real, isa):
    path, tokens, expected = real
    assert equal(forward(path, tokens, n_ctx=1024, threads=2, isa=isa), expected)


def test_real_scalar(real):
    """The definition itself, on a prompt short enough for it."""
    path, tokens, _ = real
    assert equal(forward(path, tokens[:12], isa="scalar", threads=2), forward(path, tokens[:12]))
