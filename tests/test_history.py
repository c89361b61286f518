"""The history file of a conversation, and minfer chat on pipes: commands, errors, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys

import pytest

import minfer
from minfer.tools import conversation as conv

CHAT = [sys.executable, "-m", "minfer.tools.cli", "chat"]


def chat(*args, stdin="", status=0):
    """(stdout, stderr) of short greedy answers."""
    command = [*CHAT, *map(str, args), "-n", "4", "--greedy"]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "no conversation"),
        ("[" * 100_000, "no conversation"),
        ("[]", "messages"),
        ('{"messages": 3}', "messages"),
        ('{"messages": [], "version": 2}', "version 2; this minfer reads 1"),
        ('{"messages": [3], "version": 1}', "messages\\[0\\]"),
        ('{"messages": [{"role": "user"}], "version": 1}', "messages\\[0\\]"),
        ('{"messages": [{"role": "user", "content": "a"}], "version": 1}', "no answer"),
        ('{"messages": [{"role": "assistant", "content": "a"}], "version": 1}', "of user"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}], "version": 1}', "surrogate"),
        ("\x00", "no conversation"),
    ],
)
def test_what_is_no_history_is_refused_and_left_alone(tiny_path, tmp_path, text, reason):
    file = tmp_path / "talk.json"
    file.write_text(text)
    with pytest.raises(minfer.FormatError, match=reason):
        conv.read_history(str(file))
    out, err = chat(tiny_path, "--session", file, stdin="hello\n", status=1)
    assert err.count("\n") == 1 and not out
    assert file.read_text() == text and os.listdir(tmp_path) == ["talk.json"]


def test_the_history_is_replaced_as_a_whole(tmp_path, monkeypatch):
    file = tmp_path / "talk.json"
    file.write_text("old")
    (tmp_path / "talk.json.tmp-999999999").write_text("left by a killed process")
    (tmp_path / "talk.json.tmp-1").write_text("process 1 lives")
    other = tmp_path / "talk.json.tmp-x"
    other.write_text("not ours")
    for name in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda *_: (_ for _ in ()).throw(OSError(28, "disk full")))
            with pytest.raises(OSError, match="disk full"):
                conv.replace_file(str(file), b"new")
        assert file.read_text() == "old"
        assert sorted(os.listdir(tmp_path)) == ["talk.json", "talk.json.tmp-1", "talk.json.tmp-x"]
    conv.replace_file(str(file), b"new")
    assert file.read_text() == "new"
    link = tmp_path / "link.json"
    link.symlink_to(file)
    conv.replace_file(str(link), b"newer")
    assert not link.is_symlink() and file.read_text() == "new"


@pytest.mark.parametrize(
    "args",
    [("run", "m.gguf", "hi"), ("run", "m.gguf"), ("chat", "m.gguf", "--json")],
    ids=" ".join,
)
def test_a_session_is_for_a_conversation(args, tmp_path):
    command = [*CHAT[:-1], *args, "--session", str(tmp_path / "talk.json")]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 2 and "usage: minfer" in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_is_said_before_the_conversation(tiny_path, tmp_path):
    file = tmp_path / "nowhere" / "talk.json"
    out, err = chat(tiny_path, "--session", file, stdin="hello\n", status=1)
    assert not out and err.count("\n") == 1 and "no file can be made in" in err


def test_commands(tiny_path, tmp_path):
    file, other = tmp_path / "talk.json", tmp_path / "other.txt"
    other.write_text("precious")
    lines = ["/save", "hello", "/context", f"/save {other}", f"/save {file}", "and?", "/context"]
    lines += ["/undo", "/undo", "/undo", "/save", "/what", "/help", "again", "/reset", "/context"]
    out, err = chat(tiny_path, stdin="\n".join([*lines, "/exit", "not said"]))
    said = [line for line in err.splitlines() if "decoded" not in line]
    assert said[0] == "no file: use /save FILE"
    assert "of 512 rows in use; 1 exchange, 0 no longer" in said[1]
    assert said[1].endswith("session: none (/save FILE makes one)")
    assert "other.txt: no conversation" in said[2] and other.read_text() == "precious"
    assert said[3] == f"saved 1 exchange to {file}"
    assert "; 2 exchanges," in said[4] and said[4].endswith(f"session: {file}")
    assert said[5] == "nothing to take back"
    assert said[6] == f"saved 0 exchanges to {file}"
    assert said[7] == "/what is no command; /help lists them"
    for i, command in enumerate(("/help", "/save [FILE]", "/reset", "/undo", "/context", "/exit")):
        assert said[8 + i].startswith(command)
    assert said[14].startswith("0 of 512 rows in use; 0 exchanges,") and len(said) == 15
    assert err.count("decoded") == 3
    assert json.loads(file.read_text()) == {"version": 1, "messages": []}
    assert sorted(os.listdir(tmp_path)) == ["other.txt", "talk.json", "talk.json.kv"]


def test_ctrl_c_on_a_pipe_saves(tmp_path):
    file = tmp_path / "talk.json"
    process = subprocess.Popen(
        [*CHAT, "demo", "-n", "100000", "--session", str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdin.write(b"The capital of France is\n")
    process.stdin.flush()
    seen = b""
    while len(seen) < 10:
        seen += os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and b"Traceback" not in err
    messages = json.loads(file.read_text())["messages"]
    assert (seen + out).decode() == messages[1]["content"] + "\n"
    err = chat("demo", "--session", file)[1]
    assert err.startswith(f"{file}.kv: ") and "rows restored, nothing read again" in err
