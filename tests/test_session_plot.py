"""minfer session plot: every cell has the colours of the sequences that read its row, in the boxes
that are drawn, in the SVG and in the PNG."""

import errno
import os
import subprocess
import sys
import tracemalloc
from collections import Counter
from functools import partial
from itertools import pairwise
from xml.etree import ElementTree

import matplotlib.image
import numpy as np
import pytest
import tinymodels
from test_session_file import numbered
from test_session_tool import N_SEQ, OPTIONS, fill, run_session, write_chain
from test_sessions import add

import minfer
from minfer.tools import session_plot

SVG = "{http://www.w3.org/2000/svg}"
LINK = "{http://www.w3.org/1999/xlink}href"
N_CTX = OPTIONS["n_ctx"]


@pytest.fixture(scope="module")
def live(tiny_path):
    with minfer.load(tiny_path, **OPTIONS) as engine:
        fill(engine)
        yield engine


@pytest.fixture
def path(live, tmp_path):
    path = tmp_path / "good.kv"
    live.kv_save(path, b"host state")
    return path


@pytest.fixture
def plot(capsys):
    return partial(run_session, capsys, "plot")


def test_runs(live, path):
    """Who reads which row is what the engine says."""
    with minfer.SessionFile(path) as file:
        for g, group in enumerate(file.groups):
            readers = [[] for _ in range(group.n_rows)]
            for seq, rows in enumerate(numbered(live, range(N_SEQ), g)):
                for _, number in rows:
                    readers[number].append(seq)
            found = session_plot.runs(file, g)
            assert [list(run.readers) for run in found for _ in range(run.len)] == [
                each[: session_plot.BANDS] for each in readers
            ]
            assert [r.n_readers for r in found for _ in range(r.len)] == list(map(len, readers))
            assert [run.first for run in found] == [0, *np.cumsum([r.len for r in found])[:-1]]
            assert all(readers[run.first - 1] != readers[run.first] for run in found[1:])
            assert sum(len(r) > 1 for r in readers) == live.kv.stats()[g].n_shared


def test_runs_of_many_sequences(tmp_path):
    """Of n sequences that all share and each end in another row, in memory in proportion to n."""
    peaks = []
    for n in (500, 2000):
        with minfer.SessionFile(write_chain(tmp_path / "chain.kv", n)) as file:
            tracemalloc.start()
            found = session_plot.runs(file, 0)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        assert [run.first for run in found] == list(range(n))
        for run in found:
            assert run.n_readers == n - run.first
            assert run.readers == tuple(range(n))[run.first :][: session_plot.BANDS]
    assert peaks[1] < 8 * peaks[0]


def cells_of(drawn, n_cells, width):
    """{colour: how much it has of each cell}; every cell must be drawn, and no part of it twice."""
    shares, parts = {}, [[] for _ in range(n_cells)]
    for box in drawn:
        assert 0 <= box.x < box.x + box.width <= width
        for cell in range(box.line * width + box.x, box.line * width + box.x + box.width):
            parts[cell].append((box.top, box.top + box.height))
            shares.setdefault(box.colour, np.zeros(n_cells))[cell] += box.height
    for each in parts:
        each.sort()
        assert each[0][0] == 0 and abs(each[-1][1] - 1) < 1e-9
        assert all(abs(x[1] - y[0]) < 1e-9 for x, y in pairwise(each))
    return shares


def expected_shares(live, group, n_cells):
    """The same, from what the engine says."""
    of_seq, readers = session_plot.colours(N_SEQ), [[] for _ in range(n_cells)]
    for seq, rows in enumerate(numbered(live, range(N_SEQ), group)):
        for _, number in rows:
            readers[number].append(of_seq[seq])
    shares = {}
    for cell, each in enumerate(readers):
        if len(each) > 3:
            each = [each[0], session_plot.OTHERS]
        for colour in each or [session_plot.FREE]:
            shares.setdefault(colour, np.zeros(n_cells))[cell] += 1 / max(1, len(each))
    return shares


@pytest.mark.parametrize("width", [1, 7, 16, 200, 1000])
def test_cells_have_the_colours_of_their_readers(live, path, width):
    of_seq = session_plot.colours(N_SEQ)
    with minfer.SessionFile(path) as file:
        for g in (0, 1):
            drawn = list(session_plot.boxes(session_plot.runs(file, g), N_CTX, width, of_seq))
            shares, expected = cells_of(drawn, N_CTX, width), expected_shares(live, g, N_CTX)
            assert set(shares) == set(expected) == {*of_seq, session_plot.OTHERS, session_plot.FREE}
            for colour in shares:
                assert np.allclose(shares[colour], expected[colour])


def test_colours_and_lines():
    for n in (0, 1, 7, 8, 64, 200):
        of_seq = session_plot.colours(n)
        assert len(set(of_seq)) == len(of_seq) == n
        assert not {session_plot.FREE, session_plot.OTHERS} & set(of_seq)
        for i, colour in enumerate(of_seq[1:]):  # beside each other in the file, apart to the eye
            one, other = (np.array([int(c[k : k + 2], 16) for k in (1, 3, 5)]) for c in
                          (of_seq[i], colour))  # fmt: skip
            assert np.abs(one - other).sum() > 100
    for n_cells in (1, 8, 128, 200, 4096, 5000, 16384, 131072, 2**24):
        width = session_plot.line_width(n_cells)
        assert width & (width - 1) == 0
        assert n_cells < 64 or 4 <= width * width / n_cells < 16


def panels(svg):
    """[{colour: its area}] of the groups, in which no box lies on another."""
    root, found = ElementTree.fromstring(svg), []
    shared = {path.get("id"): path for path in root.iter(f"{SVG}path") if path.get("id")}
    for part in root.iter(f"{SVG}g"):
        if part.get("id", "").startswith("axes_"):
            found.append([])
        if part.get("id", "").startswith("PolyCollection_"):
            for drawn in part.iter():
                if drawn.get("id") or drawn.tag not in (f"{SVG}path", f"{SVG}use"):
                    continue
                path = shared[drawn.get(LINK)[1:]] if drawn.tag == f"{SVG}use" else drawn
                points = path.get("d").replace("M", "L").replace("z", "").split("L")[1:]
                corners = np.array([point.split() for point in points], float)
                corners += [float(drawn.get("x", 0)), float(drawn.get("y", 0))]
                colour = drawn.get("style", "fill: #000000").split("fill: ")[1][:7]
                found[-1].append((colour, corners.min(0), corners.max(0)))
    areas = []
    for panel in found:
        areas.append(Counter())
        for i, (colour, low, high) in enumerate(panel):
            areas[-1][colour] += np.prod(high - low)
            for _, other_low, other_high in panel[:i]:
                common = np.minimum(high, other_high) - np.maximum(low, other_low)
                assert min(common) < 1e-3
    return areas


def test_svg(live, path, plot, tmp_path):
    out = tmp_path / "picture.svg"
    assert plot(path, "-o", out) == f"{out}\n"
    svg, stats = out.read_text(), live.kv.stats()
    found = panels(svg)
    assert len(found) == 2
    for g, n_cells in enumerate((stats[0].n_used, N_CTX)):
        expected = expected_shares(live, g, n_cells)
        assert set(found[g]) == set(expected)
        cell = sum(found[g].values()) / n_cells
        for colour, area in found[g].items():
            assert abs(area / cell - expected[colour].sum()) < 0.01
    texts = list(ElementTree.fromstring(svg).itertext())
    for g, held in enumerate(
        (f"{stats[0].n_used} rows", f"{stats[1].n_used} of 200 cells hold rows")
    ):
        spans = [live.kv.spans(seq, g) for seq in range(N_SEQ)]
        low, high = min(s[0].pos for s in spans), max(s[-1].pos + s[-1].len for s in spans) - 1
        facts = f"{held}; {stats[g].n_shared} of them shared; positions {low} to {high}"
        assert f"{facts}; a sequence in at most 3 spans" in texts
        assert any(text.startswith(f"group {g}: {stats[g].kind}, ") for text in texts)
    for words in ("good.kv: 6 sequences", "sequence 5: 9 rows", "free", "others"):
        assert words in texts
    plot(path, "-o", tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == svg


def test_png(path, plot):
    out = path.with_name("good.kv.png")
    assert plot(path) == f"{out}\n"
    pixels = matplotlib.image.imread(out)
    assert pixels.shape[1] == 1650 and 400 < pixels.shape[0] < 3000
    seen = Counter(map(bytes, (pixels[..., :3] * 255).round().astype(np.uint8).reshape(-1, 3)))
    colours = {*session_plot.colours(N_SEQ), session_plot.OTHERS, session_plot.FREE}
    for colour in colours:
        assert seen[bytes.fromhex(colour[1:])] > 500, colour
    for colour in set(session_plot.PALETTE) - colours:
        assert seen[bytes.fromhex(colour[1:])] < 50, colour


@pytest.mark.parametrize("n_ctx, n_seq", [(1, 1), (128, 1), (128, 64), (16384, 64), (16384, 13)])
def test_sizes(tiny_path, tmp_path, plot, n_ctx, n_seq):
    with minfer.load(tiny_path, n_ctx=n_ctx, n_seq=n_seq, n_batch=64, threads=1) as engine:
        for seq in range(n_seq):
            add(engine, seq, 1 + seq % 2)
        engine.kv_save(tmp_path / "x.kv", b"")
        n_used = engine.kv.stats()[1].n_used
    plot(tmp_path / "x.kv", "-o", tmp_path / "x.SVG")
    rows = {colour: 1 + i % 2 for i, colour in enumerate(session_plot.colours(n_seq))}
    free = {session_plot.FREE: n_ctx - n_used} if n_used < n_ctx else {}
    for panel, expected in zip(panels((tmp_path / "x.SVG").read_text()), (rows, {**rows, **free})):
        cell = sum(panel.values()) / sum(expected.values())
        assert {colour: round(area / cell) for colour, area in panel.items()} == expected


def test_no_rows_and_no_full_group(tmp_path, plot):
    model = tinymodels.write(tmp_path / "tiny.gguf", "mistral")
    with minfer.load(model, n_ctx=64, threads=1) as engine:
        engine.kv_save(tmp_path / "x.kv", b"")
        plot(tmp_path / "x.kv", "-o", tmp_path / "x.svg")
        assert panels((tmp_path / "x.svg").read_text()) == [{}]
        add(engine, 0, 3)
        engine.kv_save(tmp_path / "x.kv", b"")
        plot(tmp_path / "x.kv", "-o", tmp_path / "x.svg")
        assert list(panels((tmp_path / "x.svg").read_text())[0]) == [session_plot.PALETTE[0]]


def test_where_a_picture_is_not_written(path, plot, tmp_path, monkeypatch):
    data, picture = path.read_bytes(), tmp_path / "x.png"
    picture.write_bytes(b"old")
    (tmp_path / "folder.png").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(session_plot, "_page", None)  # none of these is worth drawing for
        for out, cause in (
            ("none/x.png", "No such file or directory"),
            ("x.png/x.png", "Not a directory"),
            ("folder.png", "Is a directory"),
            ("x" * 255 + ".png", "File name too long"),
        ):
            line = plot(path, "-o", tmp_path / out, status=1, error=True)
            fix = "name a picture that can be written with -o"
            assert line == f"minfer: {tmp_path / out}: {cause}; {fix}\n"

        def denied(*_):
            raise PermissionError(errno.EACCES, "Permission denied")

        patch.setattr("builtins.open", denied)
        assert f"{picture}: Permission denied; name" in plot(
            path, "-o", picture, status=1, error=True
        )
    (tmp_path / "folder.png").rmdir()
    os.link(path, tmp_path / "good.svg")
    os.symlink(path, tmp_path / "same.svg")
    for name in ("good.svg", "same.svg"):
        line = plot(path, "-o", tmp_path / name, status=1, error=True)
        assert "is the session itself" in line

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert f"{picture}: No space" in plot(path, "-o", picture, status=1, error=True)
    assert picture.read_bytes() == b"old" and path.read_bytes() == data
    assert sorted(os.listdir(tmp_path)) == ["good.kv", "good.svg", "same.svg", "x.png"]
    plot(path, "-o", picture)
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_names_that_a_picture_takes_as_they_are(live, tmp_path, plot):
    """No mathematics, no markup, no letters that the font must have."""
    path = tmp_path / "$\\frac{$ <b>&amp; \u4f60 %s.kv"
    live.kv_save(path, b"")
    for name in ("x.svg", "x.png"):
        plot(path, "-o", tmp_path / name)
    texts = ElementTree.fromstring((tmp_path / "x.svg").read_text()).itertext()
    assert any(path.name in text for text in texts)
    path = os.fsdecode(bytes(tmp_path) + b"/a\xff\x1b\n.kv")
    live.kv_save(path, b"")
    for name in ("x.svg", "x.png"):
        plot(path, "-o", tmp_path / name)
    assert "a? .kv: 6 seq" in (tmp_path / "x.svg").read_text()


def test_without_matplotlib(path, tmp_path):
    """Only plot needs it; and whatever backend it is told to use, there is no window."""
    (tmp_path / "matplotlib.py").write_text("raise ImportError('No module named matplotlib')")
    absent, command = {"PYTHONPATH": str(tmp_path)}, [sys.executable, "-m", "minfer.tools.cli"]

    def run(name, environment):
        return subprocess.run([*command, "session", name, path], capture_output=True, text=True,
                              env={**os.environ, **environment})  # fmt: skip

    assert run("inspect", absent).returncode == 0
    done = run("plot", absent)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "pip install 'minfer[plot]'" in done.stderr
    assert run("plot", {"MPLBACKEND": "nonsense"}).returncode == 0
