"""The command line as people and scripts meet it: exit statuses, streams, Ctrl-C."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

MINFER = [sys.executable, "-m", "minfer.tools.cli"]
PROMPT = "The capital of France is"


def minfer(*args, stdin="", status=0):
    """Runs the command; gives (stdout, stderr)."""
    command = [*MINFER, *(arg if isinstance(arg, bytes) else str(arg) for arg in args)]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=300)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("walk",),
        ("run",),
        ("run", "m.gguf", "hi", "-n", "-1"),
        ("run", "m.gguf", "hi", "-n", "many"),
        ("run", "m.gguf", "hi", "--greedy", "--temp", "1"),
        ("run", "m.gguf", "hi", "--threads", "0"),
        ("run", "m.gguf", "hi", "--cache-type", "f8"),
        ("run", "m.gguf", "hi", "--json", "--cnv"),
        ("chat", "m.gguf", "--json"),
        ("bench", "m.gguf", "--vs", "nothing"),
        ("info",),
        ("info", "m.gguf", "hi"),
        ("run", "m.gguf", "hi", "there"),
        ("run", "m.gguf", "-n", "3", "hi", "there"),
        ("run", "m.gguf", "hi", "-n", "3", "there"),
        ("run", "m.gguf", "-n", "3", "--bogus", "hi"),
        ("run", "m.gguf", "hi", "--bogus", "--", "--bogus"),
        ("run", "m.gguf", "-n", "3", "-x"),
        ("--bogus", "info", "m.gguf"),
    ],
    ids=" ".join,
)
def test_usage_errors(args):
    out, err = minfer(*args, status=2)
    assert out == "" and "usage: minfer" in err


@pytest.mark.parametrize("number", ["many", "1.5", "", "9" * 5000], ids=len)
def test_what_is_not_a_number_is_called_so(number):
    for args in (("info", "m.gguf", "--n-ctx"), ("run", "m.gguf", "-n"), ("bench", "kv", "--rows")):
        _, err = minfer(*args, number, status=2)
        last = err.splitlines()[-1]
        assert "is not a whole number" in last and "_" not in last and len(last) < 200


@pytest.mark.parametrize(
    "command", [("run", "absent.gguf", "hi"), ("info", "absent.gguf"), ("bench", "absent.gguf")]
)
def test_one_line_for_an_error(command):
    out, err = minfer(*command, status=1)
    assert (
        out == "" and err.count("\n") == 1 and err.startswith("minfer: ") and "absent.gguf" in err
    )


def test_refusals_are_errors_too(tiny_path):
    for args in (
        ("run", tiny_path, "hi", "--temp", "nan"),
        ("run", tiny_path, "hi", "--top-p", "7"),
        ("run", tiny_path, "hi", "--top-p", "0"),
        ("run", tiny_path, "hi", "--repeat-penalty", "0"),
        ("run", tiny_path, "hi", "--n-ctx", "100000000"),
        ("run", tiny_path, b"caf\xe9"),
    ):
        out, err = minfer(*args, status=1)
        assert out == "" and err.count("\n") == 1, args


def test_a_prompt_after_options(tiny_path):
    tail = ("-n", 3, "--seed", 4)
    for prompt in ("hi", "-x", "--bogus", ""):
        given = minfer("run", tiny_path, *tail, stdin=prompt)[0]
        assert minfer("run", tiny_path, *tail, "--", prompt)[0] == given
    given = minfer("run", tiny_path, *tail, stdin="hi")[0]
    assert minfer("run", tiny_path, *tail, "hi")[0] == given
    assert minfer("run", tiny_path, "hi", *tail)[0] == given
    assert minfer("run", *tail, tiny_path, "hi")[0] == given
    assert minfer("run", tiny_path, "--cnv", *tail, "hi")[0] == given


def test_a_prompt_that_does_not_fit(tiny_path):
    out, err = minfer("run", tiny_path, "hi " * 400, "--n-ctx", "64", status=1)
    assert out == ""
    assert re.fullmatch(
        r"minfer: the prompt has \d{3,4} tokens, the context 64; raise --n-ctx\n", err
    )


def test_an_answer_that_does_not_fit(tiny_path):
    args = ("run", tiny_path, "hi", "-n", 100, "--n-ctx", 20, "--seed", 1)
    out, err = minfer(*args)
    summary, full = err.splitlines()
    assert out.endswith("\n") and "decoded 17 tokens" in summary
    assert full == "the context of 20 tokens is full; raise --n-ctx"
    report = json.loads(minfer(*args, "--json")[0])
    assert report["finish"] == "full" and len(report["tokens"]) == 18


def test_a_context_beyond_the_trained_one(tiny_path):
    for n_ctx, said in ((512, False), (513, True)):
        err = minfer("run", tiny_path, "hi", "-n", 2, "--n-ctx", n_ctx)[1]
        assert ("more than the 512 that the model was trained for" in err) == said


def test_a_prompt_that_is_not_utf8(tiny_path):
    line = "the prompt is not UTF-8 (byte 0xe9 at 3); convert it"
    assert line in minfer("run", tiny_path, b"caf\xe9!", status=1)[1]
    for command in ("run", "chat"):
        done = subprocess.run(
            [*MINFER, command, str(tiny_path), "-n", "2"], input=b"caf\xe9!", capture_output=True
        )
        assert done.returncode == 1 and done.stderr.decode() == f"minfer: {line}\n"


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_closed_streams(tiny_path, closed):
    command = [*MINFER, "run", str(tiny_path), "-n", "3"] + ([] if 0 in closed else ["hi"])
    shut = " ".join(f"{n}>&-" for n in closed)
    done = subprocess.run(["sh", "-c", f'exec "$@" {shut}', "sh", *command], capture_output=True)
    assert done.returncode == 0 and b"Traceback" not in done.stderr
    assert (done.stdout == b"") == (1 in closed) and (done.stderr == b"") == (2 in closed)


def test_version_and_help():
    assert minfer("--version")[0].startswith("minfer 0.")
    assert "bench" in minfer("--help")[0]


def test_run_prints_the_answer_alone_on_stdout():
    out, err = minfer("run", "demo", PROMPT, "-n", 8, "--greedy")
    assert out.startswith(" the capital of") and out.endswith("\n")
    assert err.count("\n") == 1 and "prefilled 6 tokens" in err and "decoded 7 tokens" in err


def test_json_is_one_object():
    args = ("run", "demo", PROMPT, "-n", 8, "--greedy", "--json")
    out, err = minfer(*args)
    assert err == "" and out.count("\n") == 1
    report = json.loads(out)
    assert (
        report["text"].startswith(" the capital of")
        and len(report["tokens"]) == 8
        and report["finish"] == "length"
    )
    assert report["prefill"]["tokens"] == 6 and report["decode"]["tokens"] == 7
    again = json.loads(minfer(*args, "--threads", 1)[0])
    assert again["tokens"] == report["tokens"] and again["threads"] == 1


def test_seeds():
    texts = [
        minfer("run", "demo", PROMPT, "-n", 12, "--seed", seed, "--temp", "1.5")[0]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_prompt_from_stdin():
    given = minfer("run", "demo", PROMPT, "-n", 6, "--greedy")[0]
    assert minfer("run", "demo", "-n", 6, "--greedy", stdin=PROMPT + "\n")[0] == given


def test_conversation_from_a_pipe():
    out, err = minfer("chat", "demo", "-n", 4, "--greedy", stdin="One, two,\n\nand three:\n")
    assert out.count("\n") >= 2 and err.count("decoded") == 2


def test_info():
    out, _ = minfer("info", "demo")
    for fact in ("gemma3", "Q4_K", "sliding-512/f32/kv1x256", "full/f32/kv1x256", "memory"):
        assert fact in out
    report = json.loads(minfer("info", "demo", "--json")[0])
    assert report["layers"] == 18
    by_group = [(g["group"], g["kind"], g["n_layers"]) for g in report["groups"]]
    assert by_group == [(0, "sliding-512/f32/kv1x256", 15), (1, "full/f32/kv1x256", 3)]
    for group in report["groups"]:  # K and V of one head of 256 floats
        assert group["bytes_per_token"] == group["n_layers"] * 2 * 256 * 4
        assert f"{group['n_cells']:,}" in out and f"{group['bytes_per_token']:,}" in out
    assert report["kinds"] == [by_group[i % 6 == 5][1] for i in range(18)]
    assert report["memory"]["needed"] > 200e6 and report["chat_template"] is False


def test_bench(tiny_path):
    out, _ = minfer("bench", tiny_path, "-p", 32, "-n", 8, "-d", 16, "-r", 2)
    assert "prefill of 32" in out and "decode of 8" in out
    report = json.loads(minfer("bench", tiny_path, "-p", 32, "-n", 8, "-r", 2, "--json")[0])
    (run,) = report["runs"]
    assert all(result["minfer"]["median"] > 0 for result in run["results"])


def test_bench_without_the_peer(tiny_path):
    out, err = minfer(
        "bench",
        tiny_path,
        "-p",
        8,
        "-n",
        2,
        "--vs",
        "llama-cpp-python",
        "--vs-python",
        "/bin/false",
        status=1,
    )
    assert out == "" and err.count("\n") == 1 and "--vs-python" in err


def _interrupted(*args, wait_for=b"", delay=0.0, stdin=b""):
    """Sends Ctrl-C once `wait_for` is out, `delay` seconds later; gives (status, seconds, stdout,
    stderr)."""
    process = subprocess.Popen(
        [*MINFER, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdin.write(stdin)
    process.stdin.flush()
    seen = b""
    while len(seen) < len(wait_for):
        seen += os.read(process.stdout.fileno(), 1)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    start = time.perf_counter()
    out, err = process.communicate(timeout=60)
    return process.returncode, time.perf_counter() - start, seen + out, err


def test_ctrl_c_while_decoding():
    status, seconds, out, err = _interrupted(
        "run", "demo", PROMPT, "-n", 100000, wait_for=b"x" * 20
    )
    assert status == 130 and seconds < 3 and b"Traceback" not in err
    assert len(out) >= 20 and b"decoded" in err


def test_ctrl_c_in_a_conversation():
    status, seconds, out, err = _interrupted(
        "chat", "demo", "-n", 100000, wait_for=b"x" * 20, stdin=PROMPT.encode() + b"\n"
    )
    assert status == 130 and seconds < 3 and b"Traceback" not in err
    assert out.endswith(b"\n") and err.count(b"decoded") == 1


def test_ctrl_c_while_reading_the_prompt():
    text = "All work and no play makes Jack a dull boy. " * 700
    status, seconds, out, err = _interrupted(
        "run", "demo", text, "--n-ctx", 16384, "--threads", 1, "--json", delay=5.0
    )
    assert status == 130 and seconds < 3 and err == b""
    report = json.loads(out)
    assert report["finish"] == "interrupted" and report["tokens"] == []


def test_nobody_reads_the_answer():
    process = subprocess.Popen(
        [*MINFER, "run", "demo", PROMPT, "-n", "60"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    os.read(process.stdout.fileno(), 1)
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(60) == 1 and err == b""


def test_conversation_on_a_terminal():
    """Type two turns and Ctrl-D, as a person would."""
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        [*MINFER, "run", "demo", "-n", "4", "--greedy"],
        stdin=end,
        stdout=end,
        stderr=end,
        env=os.environ | {"TERM": "dumb"},
        start_new_session=True,
    )
    os.close(end)
    seen, give_up = b"", time.monotonic() + 120

    def read_past(mark):
        nonlocal seen
        while mark not in seen:
            assert time.monotonic() < give_up, seen
            if select.select([terminal], [], [], 0.1)[0]:
                seen += os.read(terminal, 4096)
        seen = seen.partition(mark)[2]

    try:
        for turn in (b"One, two,\r", b"and three:\r"):
            read_past(b"> ")
            os.write(terminal, turn)
            read_past(b"decoded")
        read_past(b"> ")
        while process.poll() is None:  # a Ctrl-D before the prompt listens is lost
            assert time.monotonic() < give_up
            os.write(terminal, b"\x04")
            time.sleep(0.2)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
