"""minfer bench --plot: every rate is a bar of its length, beside its ratio and its limit; nothing
is measured for a picture that cannot be drawn or written."""

import json
import os
import subprocess
import sys
from itertools import combinations
from xml.etree import ElementTree

import matplotlib
import pytest
from test_bench import PEER, SIZES

from minfer.tools import bench, bench_plot, cli, plotting

OURS = "minfer"
LIMITS = {"int8_macs": 512e9, "f32_fmas": 131e9, "read_bytes": 21.3e9}
ROWS = ("prefill of 16,384", "decode of 128", "prefill of 16,384 at 131,072",
        "decode of 128 at 131,072", "1 x decode of 128", "16 x decode of 128")  # fmt: skip
KINDS = (("prefill", 0, 2), ("decode", 1, 3), ("N x decode", 4, 5))  # which rows a panel has
OF = {"int8": "int8", "f32": "f32", "read": "memory"}


def about(*samples):
    low, middle, high = sorted(samples) if len(samples) > 1 else samples * 3
    return {"median": middle, "min": low, "max": high, "samples": list(samples)}


def make_run(threads, fmt, peer, times, n):
    """With rates that are all different: of each row, times as fast as in the first run."""
    results = [{"what": "load", "unit": "s", OURS: about(0.25), PEER: about(0.5)}]
    for i, what in enumerate(ROWS):
        rate, result = times * 1000 / (1 + i), {"what": what, "unit": "tokens/s"}
        result[OURS] = about(*(rate, 0.9 * rate, 1.2 * rate)[:n])
        if peer:
            result[PEER] = about(*(rate / 4, rate / 5, rate / 2)[:n])
            result["ratio"] = about(*(3 + i, 2.0, 90.0)[:n])
        result["limit"] = {"share": 0.5 + i / 10, "of": list(OF)[i % 3]}
        results.append(result)
    formats = {OURS: fmt, PEER: "f16"} if peer else {OURS: fmt}
    return {"n_ctx": 4608, "n_seq": 16, "threads": threads, "isa": "fast", "kv_formats": formats,
            "limits": LIMITS, "results": results}  # fmt: skip


def make_report(peer=True, n=3):
    runs = [make_run(1, "f16", peer, 1, n), make_run(8, "q8_0", peer, 5, n)]
    return {"model": "folder/some.gguf", "repetitions": n, "runs": runs}


@pytest.fixture
def style():
    with matplotlib.rc_context(plotting.STYLE):
        yield


def segments(axes):
    """((x, y), (x, y)) of whiskers, which are level, and of marks, which are not."""
    found = [s.tolist() for lines in axes.collections for s in lines.get_segments()]
    level = [(a, b) for a, b in found if a[1] == b[1]]
    return level, [(a, b) for a, b in found if a[1] != b[1]]


def bars(axes):
    """{the height of its middle: the bar}."""
    return {round(bar.get_y() + bar.get_height() / 2, 6): bar for bar in axes.patches}


@pytest.mark.parametrize("peer", [True, False])
def test_a_bar_for_every_rate(style, peer):
    report, sides = make_report(peer), [OURS, PEER] if peer else [OURS]
    panels = iter(bench_plot.page(report).figure.axes)
    for run in report["runs"]:
        rates = run["results"][1:]
        for kind, *rows in KINDS:
            axes, results = next(panels), [rates[i] for i in rows]
            assert axes.get_xlabel() == f"{kind}, tokens/s"
            found = [bars(axes)[y] for y in sorted(bars(axes))]
            assert len(found) == len(axes.patches) == len(results) * len(sides)
            drawn = [(bar.get_x(), bar.get_width()) for bar in found]
            assert drawn == [(0, result[side]["median"]) for result in results for side in sides]
            colours = [matplotlib.colors.to_hex(bar.get_facecolor()) for bar in found]
            assert colours == list(plotting.PALETTE[: len(sides)]) * len(results)
            whiskers, marks = segments(axes)
            assert sorted((a[1], a[0], b[0]) for a, b in whiskers) == [
                (y, pytest.approx(of["min"]), pytest.approx(of["max"]))
                for y, of in zip(sorted(bars(axes)), (r[s] for r in results for s in sides))
            ]
            assert [(a[0], (a[1] + b[1]) / 2) for a, b in marks] == [
                (pytest.approx(r[OURS]["median"] / r["limit"]["share"]), pytest.approx(y))
                for r, y in zip(results, sorted(bars(axes))[:: len(sides)])
            ]
    assert next(panels, None) is None


def test_one_scale_for_a_column(style):
    panels = bench_plot.page(make_report()).figure.axes
    for k, _ in enumerate(KINDS):
        column = panels[k :: len(KINDS)]
        (low, high), other = (axes.get_xlim() for axes in column)
        assert (low, high) == other and low == 0
        drawn = [x for axes in column for a, b in sum(segments(axes), []) for x in (a[0], b[0])]
        assert 0.9 * high < max(drawn) < high


@pytest.mark.parametrize("peer", [True, False])
def test_no_text_lies_on_another(style, peer):
    figure = bench_plot.page(make_report(peer)).figure
    figure.draw_without_rendering()
    texts = list(figure.texts)
    for axes in figure.axes:
        ticks = [*axes.get_yticklabels(), *axes.get_xticklabels()]
        texts += [*axes.texts, axes.xaxis.label, *ticks]
    areas = {text: text.get_window_extent() for text in texts if text.get_text()}
    for one, other in combinations(areas, 2):
        assert not areas[one].overlaps(areas[other]), (one.get_text(), other.get_text())
    for text, area in areas.items():
        assert figure.bbox.x0 < area.x0 < area.x1 < figure.bbox.x1, text.get_text()
        assert figure.bbox.y0 < area.y0 < area.y1 < figure.bbox.y1, text.get_text()
    for axes in figure.axes:
        for (x, low), (_, high) in segments(axes)[1]:
            ends = axes.transData.transform([(x, low), (x, high)])
            mark = matplotlib.transforms.Bbox(ends).padded(1)
            assert not any(mark.overlaps(area) for area in areas.values())


def texts_of(svg):
    return [text.strip() for text in ElementTree.fromstring(svg).itertext() if text.strip()]


def test_texts():
    svg = plotting.drawn(lambda: bench_plot.page(make_report()), "x.SVG")
    assert svg == plotting.drawn(lambda: bench_plot.page(make_report()), "x.svg")
    texts = texts_of(svg)
    for words in ("some.gguf: tokens per second", "medians of 3", OURS, PEER, "1 thread, f16 cache",
                  f"8 threads, q8_0 cache ({PEER}: f16)"):  # fmt: skip
        assert texts.count(words) == 1, words
    limits = "512 G int8 and 131 G f32 multiply-adds, 21.3 GB read per second"
    assert texts.count(f"fast, n_ctx 4,608; limits here: {limits}") == 2
    for i, what in enumerate(ROWS):
        assert texts.count(what) == 2
        assert texts.count(f"{3 + i}.00x") == 2
        assert texts.count(f"{50 + 10 * i} % {OF[list(OF)[i % 3]]}") == 2
    assert {"1000", "250", "5000", "83.3"} <= set(texts)
    alone = texts_of(plotting.drawn(lambda: bench_plot.page(make_report(False, 1)), "x.svg"))
    assert "50 % int8" in alone and not any(PEER in text or "00x" in text for text in alone)


def test_one_sample_has_no_whisker(style):
    for axes in bench_plot.page(make_report(n=1)).figure.axes:
        whiskers, marks = segments(axes)
        assert whiskers == [] and len(marks) == 2


@pytest.fixture
def plot(tiny_path, tmp_path, capsys):
    """Measures the tiny model; gives what is said."""

    def plot(name, *args, status=0):
        command = ["bench", str(tiny_path), *SIZES, *args, "--plot", str(tmp_path / name)]
        assert cli.main(command) == status
        return capsys.readouterr()

    return plot


def test_json_and_picture(plot, tmp_path):
    out, err = plot("x.svg", "-b", "2", "--json")
    report, texts = json.loads(out), texts_of((tmp_path / "x.svg").read_text())
    assert err == "" and os.listdir(tmp_path) == ["x.svg"]
    for result in report["runs"][0]["results"]:
        assert (result["what"] in texts) == (result["unit"] == "tokens/s")
    assert "tiny.gguf: tokens per second" in texts and "1 thread, f32 cache" in texts


@pytest.fixture
def measured(monkeypatch):
    """What a measurement gives, at once."""
    monkeypatch.setattr(bench, "_report", lambda args: make_report())


def test_table_and_picture(measured, plot, tmp_path):
    out, err = plot("x.PNG")
    assert err == "" and "prefill of 16,384" in out and "limits here: " in out
    assert (tmp_path / "x.PNG").read_bytes()[:4] == b"\x89PNG"


def test_what_is_refused_before_measuring(plot, tiny_path, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "_report", None)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(SystemExit) as exit:
        plot("x.jpg")
    assert exit.value.code == 2
    assert "x.jpg' does not end in .png or .svg" in capsys.readouterr().err
    for name, cause in (("none/x.png", "No such file or directory"),
                        ("folder.png", "Is a directory")):  # fmt: skip
        out, err = plot(name, status=1)
        fix = "name a picture that can be written with --plot"
        assert (out, err) == ("", f"minfer: {tmp_path / name}: {cause}; {fix}\n")
    assert os.listdir(tmp_path) == ["folder.png"]


def test_what_fails_leaves_the_old_picture(measured, plot, tmp_path, monkeypatch):
    (tmp_path / "x.png").write_bytes(b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    def missing(args):
        raise FileNotFoundError(2, "No such file or directory", "model.gguf")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        out, err = plot("x.png", status=1)
    assert "prefill of 16,384" in out and f"{tmp_path / 'x.png'}: No space" in err
    monkeypatch.setattr(bench, "_report", missing)
    out, err = plot("x.png", status=1)
    assert "model.gguf" in err and "x.png" not in err, "no fault of the picture"
    assert os.listdir(tmp_path) == ["x.png"] and (tmp_path / "x.png").read_bytes() == b"old"


def test_without_matplotlib(tmp_path):
    """Only --plot needs it, and looks for it first."""
    (tmp_path / "matplotlib.py").write_text("raise ImportError('No module named matplotlib')")

    def run(*args):
        command = [sys.executable, "-m", "minfer.tools.cli", "bench", "none.gguf", *args]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
        return done.stderr

    assert "pip install 'minfer[plot]'" in run("--plot", str(tmp_path / "x.png"))
    assert "none.gguf" in run()
    assert not (tmp_path / "x.png").exists()
