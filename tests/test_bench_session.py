"""minfer bench session on a tiny model: that it measures what it says and cleans up behind itself,
not how fast anything is."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest

import minfer
from minfer.tools import bench_session, cli

SIZES = ("--rows", "100", "-r", "2")
TARGETS = {"save_ratio": 0.7, "load_ratio": 0.7, "verify_one": 5.0}
OTHERS = {"save", "write", "load", "read", "verify_all"}
PEER_TARGETS = {"peer_save_ratio": 2.0, "peer_load_ratio": 2.0}
PEER_OTHERS = {"peer_save", "peer_load", "peer_get", "peer_set"}

LLAMA_CPP = """
import json, os, types

def say(words):
    with open(os.environ["SAID"], "a") as file:
        print(json.dumps(words), file=file)


def llama_state_get_data(ctx, memory, n):
    say(["get", ctx, bytes(memory).decode(), n])


def llama_state_set_data(ctx, memory, n):
    say(["set", ctx, bytes(memory).decode(), n])


class Llama:
    ctx = "ctx"
    saves = 0

    def __init__(self, path, **options):
        say(["Llama", path, options])

    def n_vocab(self):
        return 1000

    def reset(self):
        say(["reset"])

    def eval(self, tokens):
        say(["eval", tokens])

    def save_state(self):
        say(["save"])
        self.saves += 1
        scores = types.SimpleNamespace(nbytes=2000)
        state = b"state" + bytes(self.saves)
        return types.SimpleNamespace(
            llama_state_size=len(state), llama_state=state, scores=scores
        )

    def load_state(self, state):
        say(["load", state.llama_state.decode()])
"""


@pytest.fixture
def bench(tiny_path, tmp_path, capsys):
    """Runs it in a folder that it must leave empty; gives its output."""
    folder = tmp_path / "here"
    folder.mkdir()

    def run(*args):
        words = ["bench", "session", str(tiny_path), *SIZES, "--dir", str(folder), *args]
        assert cli.main(words) == 0
        out, err = capsys.readouterr()
        assert err == "" and list(folder.iterdir()) == []
        return out

    run.folder = folder
    return run


def check(figures, targets, others):
    assert set(figures) == set(targets) | others
    for name, figure in figures.items():
        assert len(figure["samples"]) == 2 and figure["unit"] and figure["label"], name
        assert min(figure["samples"]) == figure["min"] > 0, name
        assert figure["min"] <= figure["median"] <= figure["max"] == max(figure["samples"]), name
        assert (figure["at_most"], figure["at_least"]) == (None, targets.get(name)), name
        assert figure["met"] in ((True, False) if name in targets else (None,)), name


@pytest.mark.parametrize("cache_type", ["f32", "q8_0"])
def test_json_has_every_figure(bench, tiny_path, cache_type):
    out = bench("--threads", "2", "--cache-type", cache_type, "--json")
    assert out.count("\n") == 1
    report = json.loads(out)
    assert (report["rows"], report["rounds"], report["threads"]) == (100, 2, 2)
    assert report["model"] == str(tiny_path) and report["kv_format"] == cache_type
    assert report["folder"] == str(bench.folder) and "peer" not in report
    check(report["figures"], TARGETS, OTHERS)
    with minfer.load(tiny_path, n_ctx=100, n_batch=512, cache_type=cache_type) as engine:
        engine.forward_cached([1] * 100, logits="none")
        engine.kv_save(bench.folder / "saved")
    assert report["bytes"] == (bench.folder / "saved").stat().st_size


def test_table(bench):
    out = bench()
    for words in ("read of as many bytes", "100 rows", str(bench.folder), "medians of 2 rounds"):
        assert words in out
    assert sum(line.split()[-1] in ("yes", "NO") for line in out.splitlines() if line) == 3


def test_peer(bench, tiny_path, tmp_path, monkeypatch):
    (tmp_path / "llama_cpp.py").write_text(LLAMA_CPP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    report = json.loads(bench("--vs", "llama-cpp-python", "--threads", "2", "--json"))
    check(report["figures"], TARGETS | PEER_TARGETS, OTHERS | PEER_OTHERS)
    assert report["peer"] == {"kv_format": "f16", "state_bytes": 8, "logits_bytes": 2000}
    said = [json.loads(line) for line in (tmp_path / "said").read_text().splitlines()]
    threads = {"n_threads": 2, "n_threads_batch": 2}
    assert said[0] == [
        "Llama", str(tiny_path), {"n_ctx": 100, "n_batch": 512, **threads, "verbose": False}
    ]  # fmt: skip
    assert said[1:3] == [["reset"], ["eval", [i * 7919 % 1000 for i in range(100)]]]
    old, new = "state\0", "state\0\0\0"  # as of the last save
    assert said[3:] == [
        ["save"], ["get", "ctx", old, 6], ["load", old], ["set", "ctx", old, 6],
        ["set", "ctx", old, 6], ["load", old], ["get", "ctx", old, 6], ["save"],
        ["save"], ["get", "ctx", new, 8], ["load", new], ["set", "ctx", new, 8],
    ]  # fmt: skip
    out = bench("--vs", "llama-cpp-python")
    assert "f16 cache" in out and "8 bytes of state and 2.0 kB of logits in memory, no file" in out
    assert sum(line.split()[-1] in ("yes", "NO") for line in out.splitlines() if line) == 5


def test_ratios_are_of_speeds():
    samples = {"save": [2.0], "write": [1.0], "load": [1.0], "read": [2.0]}
    samples |= {"verify_one": [0.5], "verify_all": [0.25], "peer_save": [8.0], "peer_load": [1.0]}
    samples |= {"peer_get": [3.0], "peer_set": [4.0]}
    figures = bench_session._figures(samples, int(4e9), 2) + bench_session._peer_figures(samples)
    values = {figure.name: (figure.median(), figure.met()) for figure in figures}
    assert values == {
        "save": (2000.0, None),
        "write": (1000.0, None),
        "save_ratio": (0.5, False),
        "load": (1000.0, None),
        "read": (2000.0, None),
        "load_ratio": (2.0, True),
        "verify_one": (8.0, True),
        "verify_all": (16.0, None),
        "peer_save": (8000.0, None),
        "peer_save_ratio": (4.0, True),
        "peer_get": (3000.0, None),
        "peer_load": (1000.0, None),
        "peer_load_ratio": (1.0, False),
        "peer_set": (4000.0, None),
    }


def test_what_is_timed(bench, tiny_path, monkeypatch):
    """Nothing is in the way of a save or of a load, and who verifies gets the threads."""
    seen = {"save": [], "load": [], "threads": []}
    save, load, file = minfer.Engine.kv_save, minfer.Engine.kv_load, minfer.SessionFile

    def kv_save(engine, path):
        seen["save"].append((path.exists(), engine.kv.len(0)))
        save(engine, path)

    def kv_load(engine, path):
        seen["load"].append((path.exists(), engine.kv.len(0)))
        return load(engine, path)

    def session_file(path, threads):
        seen["threads"].append(threads)
        return file(path, threads=threads)

    monkeypatch.setattr(minfer.Engine, "kv_save", kv_save)
    monkeypatch.setattr(minfer.Engine, "kv_load", kv_load)
    monkeypatch.setattr(minfer, "SessionFile", session_file)
    bench("--threads", "2")
    assert seen["save"] == [(False, 100)] * 4  # once to know the size, then a turn to warm up
    assert seen["load"] == [(True, 0)] * 3
    assert seen["threads"] == [1, 2, 2, 1, 1, 2]


class ShortFile(io.FileIO):
    """Does less than it is asked for, as the system may."""

    def write(self, data):
        return super().write(data[:700])

    def readinto(self, data):
        return super().readinto(data[:700])


def test_plain_write_and_read(tmp_path, monkeypatch):
    data, back = memoryview(bytes(range(256)) * 10), memoryview(bytearray(2560))
    sizes, sync = [], os.fsync

    def fsync(fd):
        sizes.append(os.fstat(fd).st_size)
        sync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(
        bench_session, "open", lambda path, mode, buffering: ShortFile(path, mode), raising=False
    )
    bench_session._write(tmp_path / "plain", data)
    assert sizes == [2560]
    bench_session._read(tmp_path / "plain", back)
    assert back == data
    with pytest.raises(FileExistsError):
        bench_session._write(tmp_path / "plain", data)
    bench_session._remove(tmp_path / "plain")
    bench_session._remove(tmp_path / "plain")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_nothing(tiny_path, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "minfer.tools.cli", "bench", "session", tiny_path,
         "--rows", "100", "-r", "1000000", "--dir", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    give_up = time.monotonic() + 60
    while not list(tmp_path.glob("*/plain")):
        assert process.poll() is None and time.monotonic() < give_up
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")
    assert list(tmp_path.iterdir()) == []


def test_without_the_peer(tiny_path, tmp_path, capsys):
    words = ["--vs", "llama-cpp-python", "--vs-python", "/bin/false", "--dir", str(tmp_path)]
    assert cli.main(["bench", "session", str(tiny_path), *SIZES, *words]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "--vs-python" in err
    assert list(tmp_path.iterdir()) == []


def test_no_such_folder(tiny_path, tmp_path, capsys):
    assert cli.main(["bench", "session", str(tiny_path), "--dir", str(tmp_path / "absent")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "absent" in err and "--dir" in err


def test_no_such_model(tmp_path, capsys):
    assert cli.main(["bench", "session", "absent.gguf", "--dir", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "absent.gguf" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("args", [("--rows", "0"), ("-r", "0"), ("--n-ctx", "9"), ("a", "b")])
def test_usage_errors(args, capsys):
    with pytest.raises(SystemExit) as exit:
        cli.main(["bench", "session", *args])
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and out == "" and "usage: minfer bench session" in err


def test_session_is_a_word_and_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for path in ("./session", "session/"):  # the other bench, and no such file
        assert cli.main(["bench", path]) == 1
        assert path in capsys.readouterr().err
