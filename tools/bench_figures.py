"""What the benches of the KV cache share: figures beside their targets, and rows to measure.

Refuses to judge the machine: things are compared only with others measured in turns with them, and
a missed target is shown, it is no error. Invariant: a figure has one sample a round, and a ratio is
made of samples of one round.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

import minfer
from minfer.tools import render

N_BATCH = 512


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    name: str
    label: str
    unit: str
    samples: list[float]  # one a round
    at_most: float | None = None
    at_least: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def median(self) -> float:
        return median(self.samples)

    def met(self) -> bool | None:
        """None without a target."""
        if self.at_most is not None:
            return self.median() <= self.at_most
        return None if self.at_least is None else self.median() >= self.at_least

    def report(self) -> dict[str, Any]:
        """For --json."""
        return {
            "label": self.label,
            "unit": self.unit,
            "median": self.median(),
            "min": min(self.samples),
            "max": max(self.samples),
            "samples": self.samples,
            "at_most": self.at_most,
            "at_least": self.at_least,
            "met": self.met(),
            **self.facts,
        }


def ratios(above: list[float], below: list[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(above, below, strict=True)]


def in_turns(
    measures: dict[str, Callable[[], float]], rounds: int, progress: Callable[[str, int, int], None]
) -> dict[str, list[float]]:
    """What each gives in each of the rounds. Every other round goes the other way round, so that no
    one always comes first; a first round warms up and does not count."""
    samples: dict[str, list[float]] = {name: [] for name in measures}
    for turn in range(rounds + 1):
        for name in list(measures)[:: -1 if turn % 2 else 1]:
            progress(name, turn, rounds + 1)
            value = measures[name]()
            if turn:
                samples[name].append(value)
    return samples


def token(engine: minfer.Engine, i: int) -> int:
    """The i-th token of what is measured: no text, and always the same."""
    return i * 7919 % engine.n_vocab


def fill(engine: minfer.Engine, n_rows: int, bar: render.Bar) -> None:
    """Rows that the model computed, in the empty sequence 0 of an empty cache: one run of cells."""
    for first in range(0, n_rows, N_BATCH):
        bar(f"filling {n_rows:,} rows", first, n_rows)
        last = min(first + N_BATCH, n_rows)
        engine.forward_cached([token(engine, i) for i in range(first, last)], logits="none")


def show(report: dict[str, Any], figures: list[Figure], notes: Iterable[str] = ()) -> None:
    """The table, between a line about the run and lines about what was measured."""
    console = Console()
    console.print(
        f"{report['model']}: {report['isa']}, {report['threads']} threads, "
        f"{report['kv_format']} cache",
        soft_wrap=True,
        highlight=False,
    )
    table = Table("", box=None)
    for title in ("median", "lowest - highest", "target", "met"):
        table.add_column(title, justify="right", no_wrap=True)
    for figure in figures:
        low, high = min(figure.samples), max(figure.samples)
        target = ""
        if figure.at_most is not None:
            target = f"<= {number(figure.at_most)}"
        elif figure.at_least is not None:
            target = f">= {number(figure.at_least)}"
        table.add_row(
            figure.label,
            f"{number(figure.median())} {figure.unit}",
            f"{number(low)} - {number(high)}",
            target,
            {None: "", True: "yes", False: "NO"}[figure.met()],
        )
    console.print(table)
    for line in (f"medians of {report['rounds']} rounds", *notes):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def number(value: float) -> str:
    """Three digits, as many as a timing deserves."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"
