"""minfer bench on a tiny model: that it measures what it says, in turns, and not how fast it is."""

import json
import re
from dataclasses import replace

import pytest
import tinymodels

import minfer
from minfer.tools import bench, bench_child, cli
from minfer.tools.bench_figures import in_turns
from minfer.tools.bench_work import Group, Limit, Work, groups_of
from minfer.tools.bench_worker import _Worker

SIZES = ["-p", "24", "-n", "5", "-r", "2", "--threads", "1"]
PEER = "llama-cpp-python"

# What bench_peer.py uses of llama_cpp, with a cache that is a list of tokens for each sequence:
# whoever asks for the wrong rows is told so.
LLAMA_CPP = """
import json, os, types

GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0 = "f32", "f16", "q8_0"
LLAMA_FLASH_ATTN_TYPE_ENABLED = 1
rows = {}


def say(*words):
    with open(os.environ["SAID"], "a") as file:
        print(json.dumps(words), file=file)


def llama_backend_init():
    pass


def llama_model_default_params():
    return None


def llama_model_load_from_file(path, params):
    return path


def llama_context_default_params():
    return types.SimpleNamespace()


def llama_init_from_model(model, params):
    rows.clear()
    say("open", vars(params))
    return "context"


def llama_model_get_vocab(model):
    return "vocab"


def llama_vocab_n_tokens(vocab):
    return 1000


def llama_free(context):
    pass


llama_model_free = llama_free


def llama_get_memory(context):
    return "memory"


def llama_memory_clear(memory, data):
    rows.clear()


def llama_memory_seq_rm(memory, seq, p0, p1):
    if os.environ.get("NO_RM"):
        return False
    rows[seq] = rows.get(seq, [])[:p0]
    return True


def llama_batch_get_one(ids, n):
    return [(0, None, id) for id in ids]


def llama_batch_init(n, embd, n_seq_max):
    return types.SimpleNamespace(
        token=[0] * n, pos=[0] * n, n_seq_id=[0] * n, seq_id=[[0] for _ in range(n)], logits=[0] * n
    )


def llama_batch_free(batch):
    pass


def llama_decode(context, batch):
    if not isinstance(batch, list):
        said = zip(batch.seq_id, batch.pos, batch.token)
        batch = [(seq[0], pos, token) for seq, pos, token in said]
    for seq, pos, token in batch:
        had = rows.setdefault(seq, [])
        assert pos is None or pos == len(had)
        assert token == len(had) * 7919 % 1000
        had.append(token)
    say("decode", len(batch), {seq: len(had) for seq, had in rows.items()})
    return 0


def llama_get_logits_ith(context, i):
    return [0.0] * 1000
"""


@pytest.fixture
def run(tiny_path, capsys):
    """Runs it; gives its output."""

    def run(*args):
        assert cli.main(["bench", str(tiny_path), *SIZES, *args]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return out

    return run


@pytest.fixture
def said(tmp_path, monkeypatch):
    """A peer that keeps what it is asked for."""
    (tmp_path / "llama_cpp.py").write_text(LLAMA_CPP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SAID", str(tmp_path / "said"))
    return lambda: [json.loads(line) for line in (tmp_path / "said").read_text().splitlines()]


def check(about, n):
    assert len(about["samples"]) == n and about["min"] == min(about["samples"]) > 0
    assert about["min"] <= about["median"] <= about["max"] == max(about["samples"])


WHAT = ["start to first token", "load", "prefill of 24", "decode of 5", "prefill of 24 at 40",
        "decode of 5 at 40", "1 x decode of 5", "3 x decode of 5",
        "most memory"]  # fmt: skip


def test_json(run, tiny_path):
    out = run("-d", "0,40", "-b", "1,3", "--cache-type", "f16,q8_0", "--json")
    assert out.count("\n") == 1
    report = json.loads(out)
    assert report["model"] == str(tiny_path) and report["repetitions"] == 2
    assert [r["kv_formats"] for r in report["runs"]] == [{"minfer": "f16"}, {"minfer": "q8_0"}]
    for one in report["runs"]:
        assert (one["threads"], one["n_seq"], one["n_ctx"]) == (1, 3, 64)
        assert one["isa"] == minfer.isas()[0] and min(one["limits"].values()) > 0
        assert [result["what"] for result in one["results"]] == WHAT
        for result in one["results"]:
            check(result["minfer"], 1 if result["unit"] == "bytes" else 2)
            assert "ratio" not in result and ("limit" in result) == (result["unit"] == "tokens/s")
            assert "limit" not in result or result["limit"]["share"] > 0


def test_table(run):
    out = run("-d", "40", "--n-ctx", "200")
    assert "n_ctx 200" in out and "1 thread," in out and "medians of 2\n" in out
    for words in ("start to first token, s", "prefill of 24 at 40", "most memory"):
        assert words in out
    assert len(re.findall(r"\d - \d", out)) == 4 and "ratio" not in out
    assert len(re.findall(r"\d % (int8|f32|read)", out)) == 2 and "limits here: " in out


def test_in_turns():
    order, numbers = [], iter(range(100))

    def of(name):
        return lambda: order.append(name) or next(numbers)

    samples = in_turns({"a": of("a"), "b": of("b")}, 2, lambda *_: None)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert samples == {"a": [3, 4], "b": [2, 5]}, "the first round does not count"


def test_rates(monkeypatch, tiny_path, capsys):
    """Seconds become tokens per second, and ratios are made round by round."""
    asked = []

    class Child:
        def __init__(self, name, seconds):
            self.name, self.seconds = name, iter(seconds)

        def ask(self, call, *words):
            asked.append((self.name, call, *words))
            if call == "facts":
                return {"isa": "fast", "kv_format": "f16", "groups": []}
            if call == "limits":
                return {"int8_macs": 1e9, "f32_fmas": 1e9, "read_bytes": 1e3}
            return 5 if call == "peak" else next(self.seconds) if call == "prefill" else 1.0

        def close(self):
            asked.append((self.name, "close"))

    monkeypatch.setattr(bench_child, "ours", lambda path: Child("ours", [9.0, 2.0, 4.0]))
    monkeypatch.setattr(bench_child, "peer", lambda *_: Child("theirs", [99.0, 6.0, 1.0]))
    assert cli.main(["bench", str(tiny_path), *SIZES, "--vs", PEER, "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["runs"]
    prefill = next(r for r in one["results"] if r["what"] == "prefill of 24")
    assert prefill["minfer"]["samples"] == [12.0, 6.0] and prefill["minfer"]["median"] == 9.0
    assert prefill[PEER]["samples"] == [4.0, 24.0]
    assert prefill["ratio"]["samples"] == [3.0, 0.25]
    n_bytes = Work.of(minfer.GgufFile(tiny_path), []).n_bytes
    assert prefill["limit"] == {"share": pytest.approx(n_bytes / 1e3 * 9.0 / 24), "of": "read"}
    assert one["results"][-1]["ratio"]["samples"] == [1.0]
    starts = [a for a in asked if a[1] == "first"]
    assert [a[0] for a in starts] == ["ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert sum(a[1] == "close" for a in asked) == 8, "every process is ended"
    assert {a for a in asked if a[1] == "open"} == {
        (name, "open", 24, 1, 512, 1, "auto") for name in ("ours", "theirs")
    }


def test_the_rows_of_a_depth_are_kept(tiny_path):
    worker = _Worker(tiny_path)
    worker.open("100", "3", "16", "1", "f32")
    engine = worker._engine
    for call, words, n_computed in (
        ("prefill", ("40", "24"), 64),
        ("prefill", ("40", "24"), 24),
        ("decode", ("40", "5"), 6),
        ("decode", ("70", "5"), 24 + 6),
        ("decode", ("10", "5"), 10 + 6),  # a window has dropped too much: all anew
        ("batch", ("3", "5"), 18),
        ("decode", ("0", "5"), 6),
    ):
        before = engine.stats().prefill_tokens + engine.stats().decode_tokens
        assert getattr(worker, call)(*words) > 0
        stats = engine.stats()
        assert stats.prefill_tokens + stats.decode_tokens - before == n_computed, call
        assert engine.kv.len(1) == engine.kv.len(2) == 0
    assert worker.first("16") > 0 and worker.facts()["kv_format"] == "f32"


@pytest.mark.parametrize("no_rm", [False, True])
def test_peer(run, said, monkeypatch, no_rm):
    if no_rm:
        monkeypatch.setenv("NO_RM", "1")
    words = ["--vs", PEER, "-d", "40", "-b", "2", "--cache-type", "q8_0", "--json"]
    (one,) = json.loads(run(*words))["runs"]
    assert one["kv_formats"] == {"minfer": "q8_0", PEER: "q8_0"}
    for result in one["results"]:
        check(result[PEER], 1 if result["unit"] == "bytes" else 2)
        check(result["ratio"], 1 if result["unit"] == "bytes" else 2)
    opened = [line[1] for line in said() if line[0] == "open"]
    assert len(opened) == 6 and all(options == opened[0] for options in opened)
    assert opened[0] == {
        "n_ctx": 64, "n_seq_max": 2, "kv_unified": True, "n_batch": 512, "n_ubatch": 512,
        "n_threads": 1, "n_threads_batch": 1, "flash_attn_type": 1,
        "type_k": "q8_0", "type_v": "q8_0",
    }  # fmt: skip
    decoded = [line[1:] for line in said() if line[0] == "decode"]
    assert [24, {"0": 64}] in decoded and [1, {"0": 46}] in decoded
    assert [2, {"0": 6, "1": 6}] in decoded
    assert [line[0] for line in decoded].count(40) == (6 if no_rm else 1)


def test_a_peer_that_cannot_load(said, tiny_path, tmp_path, capsys):
    path = tmp_path / "llama_cpp.py"
    path.write_text(path.read_text().replace('return "context"', "return None"))
    assert cli.main(["bench", str(tiny_path), *SIZES, "--vs", PEER]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "llama.cpp cannot load it" in err


def test_what_the_worker_refuses(tiny_path, capsys):
    assert cli.main(["bench", str(tiny_path), "-p", "99999999", "-r", "1"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "n_ctx" in err


@pytest.mark.parametrize("before", [False, True], ids=["while asked", "before it is asked"])
def test_a_child_that_dies(tmp_path, before):
    script = tmp_path / "child.py"
    script.write_text("import sys; sys.exit('gone: no reason')")
    child = bench_child.Child([bench_child.sys.executable, str(script)], "; try again")
    if before:
        child._process.wait()
    with pytest.raises(minfer.NotFoundError, match=r"status 1 \(gone: no reason\); try again"):
        child.ask("open")
    child.close()


@pytest.mark.parametrize(
    "args",
    [("-d", "-1"), ("-d", "1,,2"), ("-b", "0"), ("--cache-type", "f16,f8"), ("--threads", "x")],
)
def test_wrong_usage(tiny_path, capsys, args):
    with pytest.raises(SystemExit) as exit:
        cli.main(["bench", str(tiny_path), *args])
    assert exit.value.code == 2 and "usage: minfer bench" in capsys.readouterr().err


def test_cores(monkeypatch):
    assert bench._cores() >= 1
    monkeypatch.delattr(bench.os, "sched_getaffinity")
    assert bench._cores() == (bench.os.cpu_count() or 1)


def test_work_of_a_model(tmp_path):
    """A llama of 2 layers with 4 heads of 16 and 2 of keys and values, 64 wide, 96 within, and 331
    tokens; its matrices are of Q8_0 or, in another file, of F16."""
    body = 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 96 * 64)
    for name, kind, of_32 in (("Q8_0", "int8", 34), ("F16", "f32", 64)):
        path = tinymodels.write(tmp_path / f"{name}.gguf", "llama", name)
        with minfer.GgufFile(path) as file:
            work = Work.of(file, [])
        other = {"int8": "f32", "f32": "int8"}[kind]
        assert work.body == {kind: body, other: 0}
        assert work.head == {kind: 331 * 64, other: 0}
        assert work.n_bytes == (body + 331 * 64) // 32 * of_32
        assert work.attention == 2 * 4 * 16


LIMITS = minfer.Limits(int8_macs=1e3, f32_fmas=1e2, read_bytes=1e4)
WORK = Work({"int8": 100, "f32": 0}, {"int8": 10, "f32": 0}, 1000, 2, [])


@pytest.mark.parametrize(
    "work, asked, limit",
    [
        (WORK, (0, 8, 1, 1, 1), Limit(0.81, "int8")),  # 8 bodies, 1 head
        (WORK, (0, 1, 1, 1, 1), Limit(0.11, "int8")),
        (replace(WORK, n_bytes=2000), (0, 1, 1, 1, 1), Limit(0.2, "read")),
        (replace(WORK, n_bytes=2000), (0, 4, 3, 4, 12), Limit(1.32, "int8")),
        # positions 0 to 3 see 1 + 2 + 3 + 4 keys, with a window of 2 only 1 + 2 + 2 + 2
        (replace(WORK, groups=[Group(0, 5, 0)]), (0, 4, 1, 1, 0), Limit(1.4, "f32")),
        (replace(WORK, groups=[Group(2, 5, 0)]), (0, 4, 1, 1, 0), Limit(1.1, "f32")),
        # four tokens one by one read 1 + 2 + 3 + 4 rows, in one batch the mean of them
        (replace(WORK, groups=[Group(0, 0, 1000)]), (0, 4, 1, 4, 0), Limit(1.4, "read")),
        (replace(WORK, groups=[Group(0, 0, 9000)]), (0, 4, 1, 1, 0), Limit(2.35, "read")),
    ],
)
def test_limit(work, asked, limit):
    found = work.limit(LIMITS, *asked)
    assert (pytest.approx(found.seconds), found.what) == (limit.seconds, limit.what)


def test_groups():
    facts = [["sliding-512/f16/kv1x256", 15, 30720], ["full/f16/kv1x256", 3, 6144]]
    assert groups_of(facts) == [Group(512, 15, 30720), Group(0, 3, 6144)]
