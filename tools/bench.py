"""minfer bench: how fast a model is read and continued here, alone or in turns with
llama-cpp-python.

Each side runs in a process of its own (bench_worker.py, bench_peer.py), so that what one needs to
start, to load and to hold can be compared, and neither computes in a program that does something
else. Invariant: the sides are measured in turns, and every other round the other way round, so that
no one always comes first; the first round warms up and does not count. A ratio is the median of the
rounds' ratios. The machine's limits are measured in the same process as minfer, and its medians are
shown as a share of what they allow.
"""

import json
import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

import minfer
from minfer.demo import model_path
from minfer.tools import bench_child, render
from minfer.tools.bench_figures import N_BATCH, in_turns, number, ratios
from minfer.tools.bench_work import Work, groups_of, limits_in_words

OURS = "minfer"
FIRST_PROMPT = 16  # tokens read for the first token of an answer

Side = Callable[[], bench_child.Child]  # starts its process
Samples = dict[str, list[float]]  # of each side, one a round


@dataclass(frozen=True)
class Row:
    """One line of the table: so many tokens in the seconds that a question takes."""

    label: str
    question: tuple[str | int, ...]
    amount: int
    work: tuple[int, ...]  # as Work.limit takes it

    def rates(self, seconds: list[float]) -> list[float]:
        """Tokens per second."""
        return [self.amount / s for s in seconds]


def main(args) -> int:
    """Runs the subcommand; returns the exit status."""
    if args.plot is None:
        _show(_report(args), args.json)
        return 0

    from minfer.tools import bench_plot, plotting  # only a picture needs what they import

    with plotting.written(args.plot, "--plot") as picture:
        report = _report(args)
        _show(report, args.json)
        picture.write(plotting.drawn(lambda: bench_plot.page(report), args.plot))
    return 0


def _report(args) -> dict[str, Any]:
    """All that is measured."""
    runs = []
    with render.Bar(f"loading {args.model}") as bar, ExitStack() as stack:
        path = os.fspath(model_path(args.model, bar))
        file = stack.enter_context(minfer.GgufFile(path))  # what is no model is said here
        sides: dict[str, Side] = {OURS: lambda: bench_child.ours(path)}
        if args.vs:
            sides[args.vs] = lambda: bench_child.peer(args.vs_python, "speed", path)
        for threads, fmt in product(args.threads or [_cores()], args.cache_type):
            runs.append(_run(file, sides, args, threads, fmt, bar))
    return {"model": path, "repetitions": args.r, "runs": runs}


def _cores() -> int:
    """Those that minfer takes by default: the peer gets as many."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# ---- measuring -----------------------------------------------------------------------------------


def _rows(args) -> list[Row]:
    rows = []
    for depth in args.d:
        at = f" at {depth:,}" if depth else ""
        n_batch, p, n = -(-args.p // N_BATCH), args.p, args.n
        rows += [
            Row(f"prefill of {p:,}{at}", ("prefill", depth, p), p, (depth, p, 1, n_batch, 1)),
            Row(f"decode of {n:,}{at}", ("decode", depth, n), n, (depth + 1, n, 1, n, n)),
        ]
    for n_seq in args.b:
        work = (1, args.n, n_seq, args.n, n_seq * args.n)
        label = f"{n_seq} x decode of {args.n:,}"
        rows.append(Row(label, ("batch", n_seq, args.n), n_seq * args.n, work))
    return rows


def _run(
    file: minfer.GgufFile, sides: dict[str, Side], args, threads: int, fmt: str, bar: render.Bar
) -> dict[str, Any]:
    """All rows with a number of threads and a format of the cache."""
    n_seq = max(args.b, default=1)
    n_most = max(args.d) + max(args.p, args.n + 1)
    n_ctx = max(args.n_ctx or 0, n_most, n_seq * (args.n + 1), FIRST_PROMPT)
    opening = ("open", n_ctx, n_seq, N_BATCH, threads, fmt)

    def each(what: str, ask: Callable[[str], float]) -> Samples:
        calls = {name: partial(ask, name) for name in sides}
        return in_turns(calls, args.r, lambda name, *at: bar(f"{what}, {name}", *at))

    def first(name: str) -> float:
        start = perf_counter()
        with closing(sides[name]()) as child:
            child.ask(*opening)
            child.ask("first", FIRST_PROMPT)
            return perf_counter() - start

    results = [_result("start to first token", "s", each("first token", first))]
    with ExitStack() as stack:
        children = {name: stack.enter_context(closing(side())) for name, side in sides.items()}
        loads = each("loading", lambda name: children[name].ask(*opening))
        results.append(_result("load", "s", loads))
        facts = {name: child.ask("facts") for name, child in children.items()}
        work = Work.of(file, groups_of(facts[OURS]["groups"]))
        measured = {}
        for row in _rows(args):
            seconds = each(row.label, lambda name: children[name].ask(*row.question))
            rates = {name: row.rates(s) for name, s in seconds.items()}
            measured[row] = _result(row.label, "tokens/s", rates)
        results += measured.values()
        peaks = {name: [child.ask("peak")] for name, child in children.items()}
        if all(peak[0] for peak in peaks.values()):
            results.append(_result("most memory", "bytes", peaks))
        limits = minfer.Limits(**children[OURS].ask("limits"))
    for row, result in measured.items():
        limit = work.limit(limits, *row.work)
        share = limit.seconds * result[OURS]["median"] / row.amount
        result["limit"] = {"share": share, "of": limit.what}
    return {
        "n_ctx": n_ctx,
        "n_seq": n_seq,
        "threads": threads,
        "isa": facts[OURS]["isa"],
        "kv_formats": {name: about["kv_format"] for name, about in facts.items()},
        "limits": limits._asdict(),
        "results": results,
    }


def _result(what: str, unit: str, samples: Samples) -> dict[str, Any]:
    def about(values: list[float]) -> dict[str, Any]:
        return {
            "median": median(values),
            "min": min(values),
            "max": max(values),
            "samples": values,
        }

    sides = {name: about(values) for name, values in samples.items()}
    result: dict[str, Any] = {"what": what, "unit": unit, **sides}
    ours, *others = samples.values()
    if others:
        result["ratio"] = about(ratios(ours, others[0]))
    return result


# ---- showing -------------------------------------------------------------------------------------


def _show(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report))
        return
    console = Console()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    for run in report["runs"]:
        threads = render.count(run["threads"], "thread")
        say(f"{render.printable(report['model'])}: {run['isa']}, {threads}, n_ctx {run['n_ctx']:,}")
        sides = run["kv_formats"]
        table = Table("tokens/s, or as said", box=None)
        columns = [*sides, *(["ratio"] if len(sides) > 1 else []), "range", "of limit"]
        for name in columns:
            table.add_column(name.replace("-python", "\n-python"), justify="right", no_wrap=True)
        table.add_row("cache", *sides.values())
        for result in run["results"]:
            table.add_row(*_cells(result, list(sides)))
        console.print(table)
        say(f"limits here: {limits_in_words(run['limits'])}")
    ratios_are = "; ratios are minfer's figures over the other's" if len(sides) > 1 else ""
    say(f"medians of {report['repetitions']}{ratios_are}")


def _cells(result: dict[str, Any], sides: list[str]) -> list[str]:
    """What, the medians, the spread of what stands before it, and minfer's share of the limit."""
    unit, last = result["unit"], result.get("ratio", result[OURS])
    show = render.size if unit == "bytes" else number
    spread = number if "ratio" in result else show
    cells = [result["what"] + (", s" if unit == "s" else "")]
    cells += [show(result[name]["median"]) for name in sides]
    if "ratio" in result:
        cells.append(f"{number(last['median'])}x")
    several = len(last["samples"]) > 1
    cells.append(f"{spread(last['min'])} - {spread(last['max'])}" if several else "")
    if "limit" in result:
        cells.append(f"{100 * result['limit']['share']:.0f} % {result['limit']['of']}")
    return cells
