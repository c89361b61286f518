"""minfer bench session: what saving and loading a cache costs, beside what the disk and the memory
cost anyway, and with --vs beside llama-cpp-python's save_state() and load_state().

Owns four comparisons. A save is compared with a write and an fsync of as many bytes to a new
file: what a save does besides (a copy of the rows, checksums, the new file's name, an fsync of the
folder) is its own cost. A load is compared with one read of the same file into memory that was
touched before, as the engine's arena was; both find the file in the page cache. Verifying is timed
alone. The peer keeps its state in memory and copies logits too; it is compared as it is, and what
llama.cpp does of it is shown beside it.

Invariant: all figures of a round are measured in turns, and every other round the other way round,
so that no one always comes first; the first round warms up and does not count.
"""

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import minfer
from minfer.demo import model_path
from minfer.tools import render
from minfer.tools.bench_child import peer
from minfer.tools.bench_figures import N_BATCH, Figure, fill, in_turns, ratios, show

PIECE = 1 << 18  # bytes written at a time, as a save does; all at once may be several times slower

Samples = dict[str, list[float]]  # seconds, one a round


def main(args) -> int:
    """Runs the subcommand; returns the exit status."""
    model = args.model or "demo"
    with render.Bar(f"loading {model}") as bar, ExitStack() as stack:
        folder = stack.enter_context(_folder(args.dir))
        path = model_path(model, bar)
        engine = stack.enter_context(
            minfer.load(
                path,
                n_ctx=args.rows,
                n_batch=N_BATCH,
                threads=args.threads,
                cache_type=args.cache_type,
                progress=bar,
            )
        )
        fill(engine, args.rows, bar)
        ours = _Ours(engine, folder)
        measures = ours.measures()
        if args.vs:
            bar(f"loading and filling {args.vs}", 0, 1)
            theirs = _Theirs(args.vs_python, engine)
            stack.callback(theirs.close)
            theirs.fill(args.rows)
            measures |= theirs.measures()
        samples = in_turns(
            measures, args.r, lambda name, *at: bar(f"measuring {name}", *at)
        )
        report = {
            "model": os.fspath(path),
            "rows": args.rows,
            "rounds": args.r,
            "isa": engine.isa,
            "threads": engine.n_threads,
            "kv_format": engine.kv_format,
            "bytes": ours.n_bytes,
            "folder": os.path.abspath(args.dir),
        }
    figures = _figures(samples, ours.n_bytes, report["threads"])
    if args.vs:
        report["peer"] = theirs.facts()
        figures += _peer_figures(samples)
    report["figures"] = {figure.name: figure.report() for figure in figures}
    if args.json:
        print(json.dumps(report))
    else:
        show(report, figures, _notes(report))
    return 0


def _folder(parent: str) -> tempfile.TemporaryDirectory:
    """A new one, removed with all that is in it at the end."""
    try:
        return tempfile.TemporaryDirectory(prefix="minfer-bench-", dir=parent)
    except OSError as error:
        raise minfer.FileError(
            f"{parent}: no file can be made there ({error.strerror}); name a folder with --dir"
        ) from None


# ---- measuring -----------------------------------------------------------------------------------


def _seconds(call: Callable[..., Any], *args: Any) -> float:
    start = perf_counter()
    call(*args)
    return perf_counter() - start


class _Ours:
    """What is done with sequence 0 of an engine, and with as many bytes as its file has."""

    def __init__(self, engine: minfer.Engine, folder: str) -> None:
        self._engine = engine
        self._saved, self._plain = Path(folder, "saved"), Path(folder, "plain")
        engine.kv_save(self._saved)
        self.n_bytes = self._saved.stat().st_size
        self._bytes = memoryview(np.ones(self.n_bytes, np.uint8))  # touched: no page is new
        _read(self._saved, self._bytes)  # so that the plain write is of bytes as real

    def measures(self) -> dict[str, Callable[[], float]]:
        """Each gives seconds."""
        return {
            "save": self._save,
            "write": self._write,
            "load": self._load,
            "read": lambda: _seconds(_read, self._saved, self._bytes),
            "verify_one": lambda: self._verify(1),
            "verify_all": lambda: self._verify(self._engine.n_threads),
        }

    def _save(self) -> float:
        _remove(self._saved)
        return _seconds(self._engine.kv_save, self._saved)

    def _write(self) -> float:
        _remove(self._plain)
        return _seconds(_write, self._plain, self._bytes)

    def _load(self) -> float:
        self._engine.kv.free(0)
        return _seconds(self._engine.kv_load, self._saved)

    def _verify(self, n_threads: int) -> float:
        start = perf_counter()
        session = minfer.SessionFile(self._saved, threads=n_threads)
        seconds = perf_counter() - start
        session.close()
        return seconds


def _remove(path: Path) -> None:
    """For good: what is measured next does not pay for it."""
    path.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write(path: Path, data: memoryview) -> None:
    with open(path, "xb", buffering=0) as file:
        while data:
            data = data[file.write(data[:PIECE]) :]
        os.fsync(file.fileno())


def _read(path: Path, data: memoryview) -> None:
    with open(path, "rb", buffering=0) as file:
        while n := file.readinto(data):
            data = data[n:]


class _Theirs:
    """llama-cpp-python with as many tokens."""

    def __init__(self, python: str, engine: minfer.Engine) -> None:
        self._peer = peer(python, "state", engine.metadata.path)
        self._bytes, self._logits = 0, 0
        self.close = self._peer.close
        self._peer.ask("open", engine.n_ctx, 1, N_BATCH, engine.n_threads, "f16")

    def fill(self, n_rows: int) -> None:
        """Once, before all measures."""
        self._peer.ask("fill", n_rows)

    def measures(self) -> dict[str, Callable[[], float]]:
        """Each gives seconds."""
        return {
            "peer_save": self._save,
            "peer_get": lambda: self._peer.ask("get"),
            "peer_load": lambda: self._peer.ask("load"),
            "peer_set": lambda: self._peer.ask("set"),
        }

    def facts(self) -> dict[str, Any]:
        """For --json."""
        return {"kv_format": "f16", "state_bytes": self._bytes, "logits_bytes": self._logits}

    def _save(self) -> float:
        seconds, self._bytes, self._logits = self._peer.ask("save")
        return seconds


# ---- figures -------------------------------------------------------------------------------------


def _times(name: str, label: str, seconds: list[float]) -> Figure:
    return Figure(name, label, "ms", [1e3 * s for s in seconds])


def _figures(samples: Samples, n_bytes: int, n_threads: int) -> list[Figure]:
    def speed(name: str, label: str, at_least: float | None = None) -> Figure:
        speeds = [n_bytes / seconds / 1e9 for seconds in samples[name]]
        return Figure(name, label, "GB/s", speeds, at_least=at_least)

    def over(name: str, other: str) -> Figure:
        rates = ratios(samples[other], samples[name])
        return Figure(f"{name}_ratio", f"  speed over {other}", "x", rates, at_least=0.7)

    size = render.size(n_bytes)
    return [
        _times("save", f"save, {size}", samples["save"]),
        _times("write", "write and fsync of as many bytes", samples["write"]),
        over("save", "write"),
        _times("load", f"load, {size}", samples["load"]),
        _times("read", "read of as many bytes", samples["read"]),
        over("load", "read"),
        speed("verify_one", "verify, 1 thread", at_least=5.0),
        speed("verify_all", f"verify, {n_threads} thread{'s' * (n_threads > 1)}"),
    ]


def _peer_figures(samples: Samples) -> list[Figure]:
    figures = []
    for call, part in (("save", "get"), ("load", "set")):
        theirs = samples[f"peer_{call}"]
        figures += [
            _times(f"peer_{call}", f"llama-cpp-python {call}_state()", theirs),
            Figure(
                f"peer_{call}_ratio",
                f"  time over {call}",
                "x",
                ratios(theirs, samples[call]),
                at_least=2.0,
            ),
            _times(f"peer_{part}", f"  llama_state_{part}_data() alone", samples[f"peer_{part}"]),
        ]
    return figures


def _notes(report: dict[str, Any]) -> list[str]:
    folder = render.printable(report["folder"])
    notes = [f"{report['rows']:,} rows; files in {folder}, synchronised when saved"]
    if "peer" in report:
        peer = report["peer"]
        notes.append(
            f"llama-cpp-python: {peer['kv_format']} cache; save_state() makes"
            f" {render.size(peer['state_bytes'])} of state and {render.size(peer['logits_bytes'])}"
            " of logits in memory, no file"
        )
    return notes
