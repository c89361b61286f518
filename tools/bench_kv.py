"""minfer bench kv: what the KV cache costs, each figure beside the target it is meant to meet.

Owns five measurements: share, trim, a sliding defrag, decode in a fragmented arena, bookkeeping.

Calls are timed as Python makes them; of a short one, most is Python's own. Only what has to be real
is computed by the model. Rows whose contents do not matter are copies: a share is shifted by one
position, and rows that move away from their other readers are copied into cells of their own.
"""

import json
import os
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean, median
from time import perf_counter, perf_counter_ns

import numpy as np

import minfer
from minfer._ffi import ffi
from minfer.demo import model_path
from minfer.tools import render
from minfer.tools.bench_figures import N_BATCH, Figure, fill, ratios, show, token

N_SEQ = 64
CALLS = 200  # of a few microseconds each, for one sample
# The sequence that is decoded lies in N_RUNS runs of cells, of a length that is no multiple of the
# 64 positions that attention takes at a time, with free cells behind each run.
N_RUNS, HOLE = 40, 32
WARM, TIMED = 2, 24  # decoded tokens; the first ones may build a graph. All fit into one hole


def main(args) -> int:
    """Runs the subcommand; returns the exit status."""
    model, figures = args.model or "demo", []
    n_cells, run = 2 * args.rows, max(1, args.rows // 4 // N_RUNS)
    with render.Bar(f"loading {model}") as bar:
        path = model_path(model, bar)

        def load(n_ctx: int) -> minfer.Engine:
            return minfer.load(
                path,
                n_ctx=n_ctx,
                n_seq=N_SEQ,  # so many that no window drops a row: each arena has n_ctx cells
                n_batch=N_BATCH,
                threads=args.threads,
                cache_type=args.cache_type,
                progress=bar,
            )

        with load(n_cells) as engine:
            facts = {"isa": engine.isa, "threads": engine.n_threads, "kv_format": engine.kv_format}
            fill(engine, args.rows, bar)
            figures += _share(engine, args.rows, args.r, bar)
            figures += _trim(engine, args.rows, run, args.r, bar)
            engine.kv.free(0)
            engine.kv.free(1)
            n_rows = n_cells * 15 // 16 // N_SEQ
            figures += _bookkeeping(engine, n_cells, n_rows, args.r, bar)
            figures += _defrag(engine, n_rows, args.r, bar)
        with load(N_RUNS * (run + HOLE)) as engine:
            figures += _decode(engine, run, args.r, bar)
    report = {
        "model": os.fspath(path),
        "rows": args.rows,
        "rounds": args.r,
        **facts,
        "figures": {figure.name: figure.report() for figure in figures},
    }
    if args.json:
        print(json.dumps(report))
    else:
        show(report, figures)
    return 0


# ---- making rows ---------------------------------------------------------------------------------


def _copy(engine: minfer.Engine, dst: int, src: int) -> None:
    """All rows of a sequence once more, one position further, in cells of their own."""
    engine.kv.share(dst, src, engine.kv.len(src))
    engine.kv.shift(dst, 0, 1)


def _cut_holes(engine: minfer.Engine, run: int) -> None:
    """Of the N_RUNS * (run + HOLE) rows of sequence 0, one run, N_RUNS runs remain."""
    for first in range((N_RUNS - 1) * (run + HOLE), -1, -run - HOLE):
        engine.kv.rm(0, first + run, first + run + HOLE)


# ---- measuring -----------------------------------------------------------------------------------


def _microseconds(prepare: Callable[[], None], call: Callable[[], None]) -> float:
    """Of `call`, each time after `prepare`."""
    times = []
    for _ in range(CALLS):
        prepare()
        start = perf_counter_ns()
        call()
        times.append(perf_counter_ns() - start)
    return median(times) / 1000


def _share(engine: minfer.Engine, n_rows: int, rounds: int, bar: render.Bar) -> list[Figure]:
    """Sequence 1 becomes a prefix of sequence 0, again and again."""
    kv, lengths = engine.kv, {"short": n_rows // 16, "middle": n_rows // 4, "long": n_rows}
    times: dict[str, list[float]] = {name: [] for name in lengths}
    for turn in range(rounds):
        bar("share", turn, rounds)
        for name, n in lengths.items():
            times[name].append(_microseconds(lambda: kv.free(1), lambda: kv.share(1, 0, n)))
    figures = [
        Figure(
            f"share_{name}",
            f"share of {n:,} rows",
            "us",
            times[name],
            at_most=20.0 if name == "long" else None,
            facts={"rows": n},
        )
        for name, n in lengths.items()
    ]
    spread = [max(turn) / min(turn) for turn in zip(*times.values(), strict=True)]
    return [*figures, Figure("share_ratio", "  slowest over fastest", "x", spread, at_most=2.0)]


def _trim(
    engine: minfer.Engine, n_rows: int, run: int, rounds: int, bar: render.Bar
) -> list[Figure]:
    """Sequence 1, a share of sequence 0, loses its last rows: first many rows of one span, then few
    rows of many spans."""
    kv = engine.kv

    def measure(cases: dict[str, int]) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in cases}
        total = kv.len(0)

        def prepare() -> None:
            kv.free(1)
            kv.share(1, 0, total)

        for turn in range(rounds):
            bar("trim", turn, rounds)
            for name, n in cases.items():
                times[name].append(_microseconds(prepare, lambda: kv.trim(1, n)))
        return times

    rows = {"short": n_rows // 16, "middle": n_rows // 4, "long": n_rows}
    by_rows = measure(rows)
    figures = [
        Figure(
            f"trim_{name}",
            f"trim of {n:,} rows, 1 span",
            "us",
            by_rows[name],
            facts={"rows": n, "spans": 1},
        )
        for name, n in rows.items()
    ]
    costs = ratios(by_rows["long"], by_rows["short"])
    figures.append(Figure("trim_rows_ratio", "  last over first", "x", costs, at_most=2.0))

    kv.free(1)
    length = N_RUNS * (run + HOLE)
    kv.trim(0, max(0, n_rows - length))
    _fill_up(engine, length)
    _cut_holes(engine, run)
    spans = {"one_span": 1, "some_spans": N_RUNS // 4, "many_spans": N_RUNS}
    by_spans = measure({name: n * run for name, n in spans.items()})
    figures += [
        Figure(
            f"trim_{name}",
            f"trim of {n * run:,} rows, {n} span{'s' * (n > 1)}",
            "us",
            by_spans[name],
            facts={"rows": n * run, "spans": n},
        )
        for name, n in spans.items()
    ]
    costs = ratios(by_spans["many_spans"], by_spans["one_span"])
    return [
        *figures,
        Figure("trim_spans_ratio", "  last over first", "x", costs, at_most=float(N_RUNS)),
    ]


def _fill_up(engine: minfer.Engine, n_rows: int) -> None:
    """Gives sequence 0 at least n_rows rows: a few more than it has, if sizes are small."""
    missing = range(engine.kv.len(0), n_rows)
    if missing:
        engine.forward_cached([token(engine, i) for i in missing], logits="none")


def _bookkeeping(
    engine: minfer.Engine, n_cells: int, n_rows: int, rounds: int, bar: render.Bar
) -> list[Figure]:
    """A token's share of a step in which all sequences decode together, n_rows private rows each,
    in an arena that is all but full. The mean counts what else the machine did meanwhile."""
    fill(engine, n_rows, bar)
    for seq in range(1, N_SEQ):
        bar("copying rows", seq, N_SEQ)
        _copy(engine, seq, 0)
    steps, middle, mean = (n_cells - N_SEQ * n_rows) // N_SEQ, [], []
    for turn in range(rounds):
        seconds = [engine.stats().kv_seconds]
        for step in range(steps):
            bar("bookkeeping", turn * steps + step, rounds * steps)
            engine.forward_batch(
                [minfer.Chunk(seq, [token(engine, seq + step)], "none") for seq in range(N_SEQ)]
            )
            seconds.append(engine.stats().kv_seconds)
        times = [1e6 * (after - before) / N_SEQ for before, after in pairwise(seconds)]
        middle.append(median(times))
        mean.append(fmean(times))
        for seq in range(N_SEQ):
            engine.kv.trim(seq, steps)
    facts = {"sequences": N_SEQ, "cells": n_cells, "rows": N_SEQ * n_rows}
    label = f"bookkeeping, {N_SEQ} sequences"
    return [
        Figure("bookkeeping", label, "us", middle, at_most=2.0, facts=facts),
        Figure("bookkeeping_mean", "  mean, other programs too", "us", mean),
    ]


def _defrag(engine: minfer.Engine, n_rows: int, rounds: int, bar: render.Bar) -> list[Figure]:
    """Every other of the sequences, in the order of their cells, is freed: all others move down."""
    kv, costs = engine.kv, [group.bytes_per_token for group in engine.kv.stats()]
    sizes, counts = [], []
    speeds: list[float] = []
    plain: list[float] = []
    for turn in range(rounds):
        bar("defrag", turn, rounds)
        order = sorted(range(N_SEQ), key=lambda seq: kv.spans(seq)[0].cell)
        for seq in order[::2]:
            kv.free(seq)
        start = perf_counter()
        moves = kv.defrag(0)
        seconds = perf_counter() - start
        n_bytes = sum(move.n * costs[move.group] for move in moves)
        sizes.append(n_bytes)
        counts.append(len(moves))
        speeds.append(n_bytes / seconds / 1e9)
        plain.append(n_bytes / _memmove_seconds(n_bytes) / 1e9)
        for seq in order[::2]:
            _copy(engine, seq, order[1])
    facts = {"bytes": int(median(sizes)), "moves": int(median(counts))}
    label = f"defrag, {render.size(facts['bytes'])} in {facts['moves']} moves"
    return [
        Figure("defrag", label, "GB/s", speeds, facts=facts),
        Figure("memmove", "memmove of as many bytes", "GB/s", plain),
        Figure("defrag_ratio", "  defrag over memmove", "x", ratios(speeds, plain), at_least=0.5),
    ]


def _memmove_seconds(n_bytes: int) -> float:
    """One call, down by half of what it moves, as the rows of a defrag go on the average."""
    memory = np.ones(n_bytes + n_bytes // 2, np.uint8)  # touched: no page is new
    to, source = ffi.from_buffer(memory), ffi.from_buffer(memory[n_bytes // 2 :])
    start = perf_counter()
    ffi.memmove(to, source, n_bytes)
    return perf_counter() - start


def _decode(engine: minfer.Engine, run: int, rounds: int, bar: render.Bar) -> list[Figure]:
    """The same sequence before and after a defrag, alone in an arena without any other free cell
    than those between its runs."""
    kv, n_rows = engine.kv, N_RUNS * run
    fragmented: list[float] = []
    compact: list[float] = []
    shares, spans = [], []
    for turn in range(rounds):
        kv.free(0)
        fill(engine, N_RUNS * (run + HOLE), bar)
        bar("decode", turn, rounds)
        _cut_holes(engine, run)
        shares.append(min(group.fragmentation for group in kv.stats()))
        spans.append(len(kv.spans(0)))
        fragmented.append(_tokens_per_second(engine))
        kv.defrag(0)
        compact.append(_tokens_per_second(engine))
    facts = {"rows": n_rows, "spans": min(spans), "fragmentation": min(shares)}
    percent = int(100 * facts["fragmentation"])
    return [
        Figure("decode_compact", f"decode at {n_rows:,} rows, compact", "tokens/s", compact),
        Figure(
            "decode_fragmented",
            f"  {facts['spans']} spans, {percent} % fragmented",
            "tokens/s",
            fragmented,
            facts=facts,
        ),
        Figure(
            "decode_ratio", "  time over compact", "x", ratios(compact, fragmented), at_most=1.05
        ),
    ]


def _tokens_per_second(engine: minfer.Engine) -> float:
    """Of sequence 0, from the median of single steps; its rows are then as they were."""
    times = []
    for i in range(WARM + TIMED):
        start = perf_counter()
        engine.forward_cached([token(engine, i)])
        times.append(perf_counter() - start)
    engine.kv.trim(0, len(times))
    return 1 / median(times[WARM:])
