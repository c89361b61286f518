"""minfer bench: prefill and decode per second, alone or in turns with llama-cpp-python."""

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

import minfer
from minfer.demo import model_path
from minfer.tools import render

N_BATCH = 512


def main(args) -> int:
    """Runs the subcommand; returns the exit status."""
    n_ctx = max(args.n_ctx or 0, args.d + max(args.p, args.n + 1))
    times: dict[str, list[tuple[float, float]]] = {}
    with render.Bar(f"loading {args.model}") as bar:
        path = model_path(args.model, bar)
        start = time.perf_counter()
        with minfer.load(
            path,
            n_ctx=n_ctx,
            n_batch=N_BATCH,
            threads=args.threads,
            cache_type=args.cache_type,
            progress=bar,
        ) as engine:
            load_seconds = time.perf_counter() - start
            runners = {"minfer": lambda: _measure(engine, args.d, args.p, args.n)}
            peer = None
            if args.vs:
                peer = Peer(args.vs_python, "speed", engine)
                runners[args.vs] = lambda: peer.ask(args.d, args.p, args.n)
            try:
                for turn in range(args.r + 1):
                    for name, runner in runners.items():
                        bar(f"measuring {name}", turn, args.r + 1)
                        seconds = runner()
                        if turn:  # the first turn warms up
                            times.setdefault(name, []).append(seconds)
            finally:
                if peer:
                    peer.close()
            facts = {"isa": engine.isa, "threads": engine.n_threads, "kv_format": engine.kv_format}
    report = {
        "model": os.fspath(path),
        "depth": args.d,
        "prefill_tokens": args.p,
        "decode_tokens": args.n,
        "repetitions": args.r,
        "load_seconds": load_seconds,
        **facts,
        "results": {name: _rates(rows, args) for name, rows in times.items()},
    }
    if args.vs:
        ours, theirs = report["results"]["minfer"], report["results"][args.vs]
        report["ratio"] = {key: ours[key] / theirs[key] for key in ours}
    if args.json:
        print(json.dumps(report))
    else:
        _show(report)
    return 0


def _rates(rows: list[tuple[float, float]], args) -> dict[str, float]:
    """Median tokens per second."""
    return {
        "prefill": args.p / median(prefill for prefill, _ in rows),
        "decode": args.n / median(decode for _, decode in rows),
    }


def _measure(
    engine: minfer.Engine, depth: int, n_prefill: int, n_decode: int
) -> tuple[float, float]:
    """Seconds to prefill and to decode, each with `depth` tokens in the cache before."""
    ids = [i * 7919 % engine.n_vocab for i in range(depth + max(n_prefill, n_decode + 1))]

    def fill() -> None:
        engine.kv.free(0)
        if depth:
            engine.forward_cached(ids[:depth], logits="none")

    fill()
    start = time.perf_counter()
    engine.forward_cached(ids[depth : depth + n_prefill])
    prefill = time.perf_counter() - start
    fill()
    engine.forward_cached(ids[depth : depth + 1])
    start = time.perf_counter()
    for token in ids[depth + 1 : depth + 1 + n_decode]:
        engine.forward_cached([token])
    return prefill, time.perf_counter() - start


class Peer:
    """llama-cpp-python on the same file, context, batch size and number of threads; bench_peer.py
    says what it can be asked for."""

    def __init__(self, python: str, mode: str, engine: minfer.Engine) -> None:
        self._log = tempfile.TemporaryFile("w+")
        script = Path(__file__).with_name("bench_peer.py")
        numbers = map(str, (engine.n_ctx, N_BATCH, engine.n_threads))
        self._process = subprocess.Popen(
            [python, script, mode, engine.metadata.path, *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._read()

    def ask(self, *words: str | int) -> list[float]:
        """The numbers that answer them."""
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        return json.loads(self._read())

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            last = self._log.read().strip().rpartition("\n")[2]
            raise minfer.NotFoundError(
                f"llama-cpp-python ended with status {self._process.wait()} ({last});"
                " name an interpreter that can run it with --vs-python"
            )
        return line


def _show(report: dict[str, Any]) -> None:
    console = Console()
    console.print(
        f"{report['model']}: {report['isa']}, {report['threads']} threads, "
        f"{report['kv_format']} cache, loaded in {report['load_seconds']:.2f} s",
        soft_wrap=True,
        highlight=False,
    )
    table = Table("tokens per second", box=None)
    table.add_column(f"prefill of {report['prefill_tokens']}", justify="right")
    table.add_column(f"decode of {report['decode_tokens']}", justify="right")
    for name, rates in report["results"].items():
        table.add_row(name, *(f"{rates[key]:.1f}" for key in ("prefill", "decode")))
    if "ratio" in report:
        table.add_row("ratio", *(f"{report['ratio'][key]:.2f}x" for key in ("prefill", "decode")))
    console.print(table)
    console.print(
        f"medians of {report['repetitions']} at depth {report['depth']}",
        highlight=False,
        soft_wrap=True,
    )
