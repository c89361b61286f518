"""minfer session plot: a picture of the rows in a session file, and of who reads them.

A panel for each group of layers shows its cells, line by line; rows are in them by number, as
loading into an empty cache places them. A row has the colour of the sequence that reads it. One
that two or three read has a band of each, in the file's order; one that more read has a band of the
first and a black one. Free cells are shown where a file tells their number: in groups without a
window.
"""

import colorsys
import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from math import isqrt
from typing import NamedTuple

import minfer
from minfer.tools import plotting
from minfer.tools.plotting import GREY, LEGEND_LINE, MARGIN, PALETTE, TITLE, WIDTH, Page, label
from minfer.tools.render import count, printable, size
from minfer.tools.session import opened

from matplotlib.collections import PolyCollection  # after plotting, which says what lacks

FREE, OTHERS = "#e8e8e8", "#000000"
BANDS = 3  # of one row
LONG_LABELS = 12  # sequences; of more of them the legend has only the numbers
LEFT = 0.75  # inches: of the labels of lines
PANEL = WIDTH - LEFT - MARGIN
HEADING, TICKS, TEXT_LINE = 0.6, 0.28, 0.17  # heights
LEAST_LINE, MOST_LINES = 0.03, 8.0  # heights of a line of cells and of all of them


class Run(NamedTuple):
    """Rows first, first + 1, ... of a group that the same sequences read."""

    first: int
    len: int
    readers: tuple[int, ...]  # places in `seqs`, ascending: the first BANDS
    n_readers: int  # all of them


class Box(NamedTuple):
    """Cells x, x + 1, ... of a line, and which part of their height: from `top`, 0 to 1, down."""

    line: int
    x: int
    width: int
    top: float
    height: float
    colour: str


def main(args) -> int:
    """Runs the subcommand; returns the exit status."""
    out = args.out or args.file + ".png"
    with opened(args.file) as file:
        if os.path.exists(out) and os.path.samefile(out, args.file):
            raise minfer.ArgumentError(f"{out} is the session itself; name another file with -o")
        with plotting.written(out, "-o") as picture:
            picture.write(plotting.drawn(lambda: _page(file), out))
    print(printable(out))
    return 0


def runs(file: minfer.SessionFile, group: int) -> list[Run]:
    """All rows of a group by who reads them, in ascending order."""
    turns: dict[int, set[int]] = defaultdict(set)  # row: who reads it or the one before, not both
    for i in range(len(file.seqs)):
        for span in file.spans(i, group):
            turns[span.cell] ^= {i}
            turns[span.cell + span.len] ^= {i}
    rows = sorted(row for row in turns if turns[row])
    readers: list[int] = []
    out = []
    for first, end in pairwise(rows):
        for i in turns[first]:
            at = bisect_left(readers, i)
            if readers[at : at + 1] == [i]:
                del readers[at]
            else:
                readers.insert(at, i)
        out.append(Run(first, end - first, tuple(readers[:BANDS]), len(readers)))
    return out


def line_width(n_cells: int) -> int:
    """Cells in a line: a power of two, for panels 4 to 16 times as wide as high."""
    return max(16, 1 << isqrt(4 * max(1, n_cells) - 1).bit_length())


def colours(n: int) -> list[str]:
    """Of n sequences; those that are near each other differ most."""
    if n <= len(PALETTE):
        return list(PALETTE[:n])
    golden, lights = 0.618034, (0.42, 0.6, 0.3, 0.72)
    each = (colorsys.hls_to_rgb(i * golden % 1, lights[i % 4], 0.7) for i in range(n))
    return ["#" + "".join(f"{round(255 * part):02x}" for part in rgb) for rgb in each]


def boxes(found: Iterable[Run], n_cells: int, width: int, of_seq: list[str]) -> Iterator[Box]:
    """The picture of a group: every cell once, in boxes that do not overlap."""
    end = 0
    for run in found:
        bands = [of_seq[i] for i in run.readers]
        if run.n_readers > BANDS:
            bands = [bands[0], OTHERS]
        for k, colour in enumerate(bands):
            for line, x, n in _lines(run.first, run.len, width):
                yield Box(line, x, n, k / len(bands), 1 / len(bands), colour)
        end = run.first + run.len
    for line, x, n in _lines(end, n_cells - end, width):
        yield Box(line, x, n, 0.0, 1.0, FREE)


def _lines(first: int, n: int, width: int) -> Iterator[tuple[int, int, int]]:
    """(line, x, n) of consecutive cells."""
    while n > 0:
        line, x = divmod(first, width)
        part = min(n, width - x)
        yield line, x, part
        first, n = first + part, n - part


# ---- the page ------------------------------------------------------------------------------------


def _page(file: minfer.SessionFile) -> Page:
    info, n_seqs = file.info, len(file.seqs)
    found, of_seq = [runs(file, g) for g in range(len(file.groups))], colours(n_seqs)
    n_cells = [group.n_rows if group.window else info.n_ctx for group in file.groups]
    width = line_width(max(n_cells))
    entries, n_columns = _legend(file, found, of_seq)
    legend_height = LEGEND_LINE * -(-len(entries) // n_columns)
    lines = [_n_lines(n, width) for n in n_cells]
    heights = [min(max(PANEL / width, LEAST_LINE) * n, MOST_LINES) for n in lines]
    panels, caption = sum(HEADING + each + TICKS for each in heights), _caption(file, found)
    page = Page(2 * MARGIN + TITLE + legend_height + panels + TEXT_LINE * (1 + len(caption)))

    title = f"{label(os.path.basename(file.path))}: {count(n_seqs, 'sequence')}"
    page.title(title, f"context {info.n_ctx:,}, {info.kv_format}, {size(info.file_bytes)}")
    y = MARGIN + TITLE
    page.legend(y, entries, n_columns)
    y += legend_height
    for g, of_group in enumerate(found):
        heading, below = _headings(file, g, of_group)
        page.write(LEFT, y + HEADING - 0.28, heading, weight="bold")
        page.write(LEFT, y + HEADING - 0.09, below, color=GREY)
        axes = page.axes(LEFT, y + HEADING, PANEL, heights[g])
        parts = list(boxes(of_group, n_cells[g], width, of_seq))
        _panel(axes, parts, n_cells[g], width, heights[g] / lines[g])
        y += HEADING + heights[g] + TICKS
    for k, line in enumerate(caption):
        page.write(LEFT, y + TEXT_LINE * (2 + k), line, color=GREY, fontsize=8)
    return page


def _n_lines(n_cells: int, width: int) -> int:
    return max(1, -(-n_cells // width))


def _panel(axes, parts: list[Box], n_cells: int, width: int, line_height: float) -> None:
    n_lines = _n_lines(n_cells, width)
    corners, colour = [_corners(box) for box in parts], [box.colour for box in parts]
    axes.add_collection(PolyCollection(corners, facecolors=colour, lw=0, antialiased=False))
    cell = PANEL * 72 / width  # points
    if cell >= 2:
        lw = min(1.0, 0.12 * cell)
        axes.vlines(range(1, width), 0, n_lines, color="white", lw=lw)
        axes.hlines(range(1, n_lines), 0, width, color="white", lw=lw)
    axes.set(xlim=(0, width), ylim=(n_lines, 0))
    step = 1  # lines from one label to the next
    while step * line_height < TEXT_LINE:
        step *= 2
    lines = range(0, n_lines, step) if n_cells else ()
    axes.set_yticks([line + 0.5 for line in lines], [f"{line * width:,}" for line in lines])
    cells = range(0, min(width, n_cells), width // 8)
    axes.set_xticks([x + 0.5 for x in cells], [f"+{x}" for x in cells])


def _corners(box: Box) -> list[tuple[float, float]]:
    left, right = box.x, box.x + box.width
    top = box.line + box.top
    bottom = top + box.height
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _headings(file: minfer.SessionFile, g: int, found: list[Run]) -> tuple[str, str]:
    """What a group is, and how full."""
    group = file.groups[g]
    heading = f"group {g}: {label(group.kind)}, {count(group.n_layers, 'layer')}"
    spans = [spans for i in range(len(file.seqs)) if (spans := file.spans(i, g))]
    n_shared = sum(run.len for run in found if run.n_readers > 1)
    shared = f"{n_shared:,} of them shared" if n_shared else "none shared"
    held = (
        count(group.n_rows, "row")
        if group.window
        else (f"{group.n_rows:,} of {file.info.n_ctx:,} cells hold rows")
    )
    facts = [held, shared]
    if spans:
        first = min(each[0].pos for each in spans)
        last = max(each[-1].pos + each[-1].len - 1 for each in spans)
        facts.append(f"positions {first:,} to {last:,}")
        facts.append(f"a sequence in at most {count(max(map(len, spans)), 'span')}")
    return heading, "; ".join(facts)


def _legend(file: minfer.SessionFile, found: list[list[Run]], of_seq: list[str]):
    """([(label, colour)], columns)."""
    long = len(of_seq) <= LONG_LABELS
    names = (f"sequence {s.seq}: {count(s.len, 'row')}" if long else str(s.seq) for s in file.seqs)
    entries = [*zip(names, of_seq)]
    if not all(group.window for group in file.groups):
        entries.append(("free", FREE))
    if any(run.n_readers > BANDS for each in found for run in each):
        entries.append(("others", OTHERS))
    return entries, 5 if long else 16


def _caption(file: minfer.SessionFile, found: list[list[Run]]) -> list[str]:
    """Lines."""
    caption = ["Rows by number, as loading into an empty cache places them."]
    if any(group.window for group in file.groups):
        caption.append(
            "How many cells a group with a window has is up to the engine that loads it."
        )
    most = max((run.n_readers for each in found for run in each), default=0)
    if most > 1:
        bands = f", or of the first and black if they are more than {BANDS}" if most > BANDS else ""
        caption.append(f"A shared row has a band of each sequence that reads it{bands}.")
    return caption
