"""The picture of minfer bench: tokens per second as bars.

A block for each run has a panel for prefill, one for decoding, and one for sequences that decode
together. A bar is the median, its whisker goes from the lowest to the highest sample, and the mark
is the machine's limit of what minfer does. Invariant: all bars of a column begin at 0 and have one
scale, whatever run they are of, so that their lengths can be compared.
"""

import os
from typing import Any

from minfer.tools.bench_figures import number
from minfer.tools.bench_work import limits_in_words
from minfer.tools.plotting import GREY, LEGEND_LINE, MARGIN, PALETTE, TITLE, WIDTH, Page, label
from minfer.tools.render import count

LIMIT, GRID = "#000000", "#e8e8e8"
LEFT, RIGHT = 0.5, 0.95  # inches beside the bars, for medians and shares of limits
HEADING, LINE, AXIS, TEXT_LINE = 0.7, 0.2, 0.5, 0.17  # heights in inches; a bar takes a line
BAR, MARK, GAP = 0.8, 1.2, 0.5  # heights in lines; the gap is between rows

Result = dict[str, Any]  # as a report has it


def page(report: dict[str, Any]) -> Page:
    """Of the report that `minfer bench --json` prints."""
    runs, sides = report["runs"], list(report["runs"][0]["kv_formats"])
    blocks = [_panels(run) for run in runs]
    tops = {
        what: max(_highest(result, sides) for block in blocks for result in block[what])
        for what in blocks[0]
    }
    height = HEADING + max(map(len, blocks[0].values())) * _lines(sides) * LINE + AXIS
    caption = _caption(sides)
    blocks_height, caption_height = len(runs) * height, len(caption) * TEXT_LINE
    sheet = Page(2 * MARGIN + TITLE + LEGEND_LINE + blocks_height + caption_height)

    name = label(os.path.basename(report["model"]))
    sheet.title(f"{name}: tokens per second", f"medians of {report['repetitions']}")
    y = MARGIN + TITLE
    sheet.legend(y, [*zip(sides, PALETTE), ("the machine's limit", LIMIT)], 4)
    y += LEGEND_LINE
    for run, block in zip(runs, blocks):
        heading, below = _headings(run)
        sheet.write(MARGIN, y + 0.32, heading, weight="bold", fontsize=11)
        sheet.write(MARGIN, y + 0.51, below, color=GREY)
        _block(sheet, y + HEADING, block, sides, tops)
        y += height
    for k, line in enumerate(caption):
        sheet.write(MARGIN, y + (1 + k) * TEXT_LINE, line, color=GREY, fontsize=8)
    return sheet


def _panels(run: dict[str, Any]) -> dict[str, list[Result]]:
    """Rates by what they are of, the same in every run; what is no rate is left to the table."""
    panels: dict[str, list[Result]] = {}
    for result in run["results"]:
        if result["unit"] == "tokens/s":
            kind = result["what"].split()[0]
            kind = kind if kind in ("prefill", "decode") else "N x decode"
            panels.setdefault(kind, []).append(result)
    return panels


def _limit(result: Result, ours: str) -> float:
    """The rate that would be all of the limit."""
    return result[ours]["median"] / result["limit"]["share"]


def _highest(result: Result, sides: list[str]) -> float:
    """The highest rate that is drawn."""
    return max(_limit(result, sides[0]), *(result[side]["max"] for side in sides))


def _lines(sides: list[str]) -> float:
    """Of a row: what was measured, the bars and a gap."""
    return 1 + len(sides) + GAP


def _headings(run: dict[str, Any]) -> tuple[str, str]:
    """What was asked for, and where it was measured."""
    (_, cache), *others = run["kv_formats"].items()
    theirs = "".join(f" ({side}: {other})" for side, other in others if other != cache)
    heading = f"{count(run['threads'], 'thread')}, {cache} cache{theirs}"
    limits = limits_in_words(run["limits"])
    return heading, f"{run['isa']}, n_ctx {run['n_ctx']:,}; limits here: {limits}"


def _caption(sides: list[str]) -> list[str]:
    """Lines."""
    caption = [
        "Bars are medians; whiskers go from the lowest to the highest.",
        "On the right: minfer's share of the limit, and what most of the limit's time is spent on.",
    ]
    if len(sides) > 1:
        caption.append(f"3x: three times the rate of {sides[1]}, in the median of the rounds.")
    return caption


# ---- panels --------------------------------------------------------------------------------------


def _block(
    sheet: Page, y: float, block: dict[str, list[Result]], sides: list[str], tops: dict[str, float]
) -> None:
    """The panels of a run, side by side."""
    column = (WIDTH - 2 * MARGIN) / len(block)
    for k, (what, results) in enumerate(block.items()):
        height = len(results) * _lines(sides) * LINE
        axes = sheet.axes(MARGIN + k * column + LEFT, y, column - LEFT - RIGHT, height)
        _panel(axes, results, sides)
        axes.set(xlim=(0, 1.03 * tops[what]), xlabel=f"{what}, tokens/s")


def _panel(axes, results: list[Result], sides: list[str]) -> None:
    """Rows from the top down, in lines."""
    ticks = []
    for i, result in enumerate(results):
        top = i * _lines(sides)
        axes.text(0, top + 0.7, result["what"], bbox={"fc": "white", "lw": 0, "pad": 1})
        for k, (side, colour) in enumerate(zip(sides, PALETTE)):
            _bar(axes, top + 1.5 + k, result[side], colour)
            ticks.append((top + 1.5 + k, number(result[side]["median"])))
        _mark(axes, top + 1.5, _limit(result, sides[0]))
        _beside(axes, top, result)
    axes.set(ylim=(len(results) * _lines(sides), 0))
    axes.set_yticks(*zip(*ticks))
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(axis="x", color=GRID)
    axes.set_axisbelow(True)


def _bar(axes, y: float, about: dict[str, Any], colour: str) -> None:
    middle = about["median"]
    several = len(about["samples"]) > 1
    whisker = [[middle - about["min"]], [about["max"] - middle]] if several else None
    axes.barh(y, middle, BAR, color=colour, xerr=whisker, error_kw={"capsize": 2.5, "lw": 1})


def _mark(axes, y: float, limit: float) -> None:
    axes.vlines(limit, y - MARK / 2, y + MARK / 2, color=LIMIT, lw=2.5)


def _beside(axes, top: float, result: Result) -> None:
    """On the right: the ratio above, and how much of the limit is reached beside our bar."""
    where, limit = {"x": 1.03, "transform": axes.get_yaxis_transform()}, result["limit"]
    what = "memory" if limit["of"] == "read" else limit["of"]
    share = f"{100 * limit['share']:.0f} % {what}"
    axes.text(y=top + 1.5, s=share, va="center_baseline", fontsize=8, **where)
    if "ratio" in result:
        ratio = f"{number(result['ratio']['median'])}x"
        axes.text(y=top + 0.7, s=ratio, weight="bold", **where)
