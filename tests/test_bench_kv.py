"""minfer bench kv on a tiny model: that it measures everything, not how fast anything is."""

import json

import pytest

from minfer.tools import bench_kv, cli

SIZES = ("--rows", "1024", "-r", "2")
TARGETS = {
    "share_long": ("at_most", 20.0),
    "share_ratio": ("at_most", 2.0),
    "trim_rows_ratio": ("at_most", 2.0),
    "trim_spans_ratio": ("at_most", 40.0),
    "defrag_ratio": ("at_least", 0.5),
    "decode_ratio": ("at_most", 1.05),
    "bookkeeping": ("at_most", 2.0),
}
OTHERS = {
    "share_short", "share_middle", "trim_short", "trim_middle", "trim_long", "trim_one_span",
    "trim_some_spans", "trim_many_spans", "defrag", "memmove", "decode_compact",
    "decode_fragmented", "bookkeeping_mean",
}  # fmt: skip


def test_json_has_every_figure(tiny_path, capsys):
    assert cli.main(["bench", "kv", str(tiny_path), *SIZES, "--threads", "1", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.count("\n") == 1
    report = json.loads(out)
    assert (report["rows"], report["rounds"], report["threads"]) == (1024, 2, 1)
    assert report["model"] == str(tiny_path) and report["kv_format"] == "f32"
    figures = report["figures"]
    assert set(figures) == set(TARGETS) | OTHERS
    for name, figure in figures.items():
        assert len(figure["samples"]) == 2 and figure["unit"] and figure["label"], name
        assert min(figure["samples"]) == figure["min"] > 0, name
        assert figure["min"] <= figure["median"] <= figure["max"] == max(figure["samples"]), name
        kind, target = TARGETS.get(name, ("at_most", None))
        assert figure[kind] == target, name
        assert figure["met"] in ((None,) if target is None else (True, False)), name
    assert [figures[f"share_{n}"]["rows"] for n in ("short", "middle", "long")] == [64, 256, 1024]
    assert figures["defrag"]["bytes"] > 0 and figures["defrag"]["moves"] > 0
    assert figures["decode_fragmented"]["fragmentation"] >= 0.9
    assert 10 < figures["decode_fragmented"]["spans"] < 64
    assert figures["bookkeeping"]["sequences"] == 64 and figures["bookkeeping"]["cells"] == 2048


def test_table(tiny_path, capsys):
    assert cli.main(["bench", "kv", *SIZES, str(tiny_path)]) == 0  # MODEL after the options too
    out, err = capsys.readouterr()
    assert err == "" and str(tiny_path) in out and "medians of 2 rounds" in out
    for label in ("share of 1,024 rows", "40 spans", "memmove", "fragmented", "bookkeeping"):
        assert label in out
    assert sum(line.split()[-1] in ("yes", "NO") for line in out.splitlines()) == len(TARGETS)


def test_met():
    figure = bench_kv.Figure("a", "a", "x", [3.0, 1.0, 2.0], at_most=2.0)
    assert figure.median() == 2.0 and figure.met() is True
    assert bench_kv.Figure("a", "a", "x", [3.0, 1.0, 2.0], at_most=1.9).met() is False
    assert bench_kv.Figure("a", "a", "x", [2.0], at_least=2.0).met() is True
    assert bench_kv.Figure("a", "a", "x", [1.9], at_least=2.0).met() is False
    assert bench_kv.Figure("a", "a", "x", [1.9]).met() is None


@pytest.mark.parametrize("args", [("--rows", "1023"), ("-r", "0"), ("--n-ctx", "9"), ("a", "b")])
def test_usage_errors(args, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["bench", "kv", *args])
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and out == "" and "usage: minfer bench kv" in err


def test_kv_is_a_word_and_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for path in ("./kv", "kv/"):  # the other bench, and no such file
        assert cli.main(["bench", path]) == 1
        assert path in capsys.readouterr().err
    assert cli.main(["bench", "kv", "absent.gguf"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "absent.gguf" in err
