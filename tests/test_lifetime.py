"""Lifetime: closing, finalisers, forks, threads and cancelling, in every order."""

import gc
import multiprocessing
import os
import signal
import threading
import time
import weakref

import pytest
from test_python_api import TOKENS, python

import minfer


def test_closed(tiny_path):
    engine = minfer.load(tiny_path)
    pieces = engine.generate(TOKENS, max_tokens=4)
    engine.close()
    engine.close()
    for call in (
        lambda: engine.forward_cached(TOKENS),
        lambda: engine.stats(),
        lambda: engine.cancel(),
        lambda: engine.generate(TOKENS),
        lambda: engine.generate("text"),
        lambda: engine.__enter__(),
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


def test_the_last_reference_frees_the_engine(tiny_path):
    """At once: weights are too large to wait for the collector of cycles."""
    gc.disable()
    try:
        engine = minfer.load(tiny_path)
        list(engine.generate(TOKENS, max_tokens=2))
        kv, gone = engine.kv, weakref.ref(engine)
        del engine
        assert kv.len(0) > 0  # a Kv keeps its engine
        del kv
        assert gone() is None
    finally:
        gc.enable()


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


def test_spawned_processes_agree(tiny_path):
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = pool.map(_logits_elsewhere, [tiny_path] * 2)
    assert set(results) == {_logits_elsewhere(tiny_path)}


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


def test_no_weight_is_in_memory_twice(demo_path):
    """The pages of the file leave it as they are packed: its largest matrix has 170 MB."""
    code = """
        import sys, minfer
        from minfer.tools.bench_serve import forget_peak, peak_bytes
        forget_peak()
        before = peak_bytes()
        with minfer.load(sys.argv[1], n_ctx=256) as engine:
            stats = engine.stats()
            wanted = stats.weight_bytes + stats.kv_bytes + stats.compute_bytes
            print(peak_bytes() - before - wanted)
    """
    assert int(python(code, demo_path)) < 60e6
