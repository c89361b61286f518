"""minfer bench model: that its files are what was asked for, and that the engine runs them."""

import os
import subprocess
import sys

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

import minfer
from minfer.tools import bench_model, cli
from minfer.tools.bench_model import MIXTURE, WEIGHT_TYPES

IDS = [1, 300, 5, 260, 44]


@pytest.fixture
def make(tmp_path, capsys):
    """Runs the command for a tiny model; gives the file."""

    def run(*args, name="m.gguf"):
        path = tmp_path / name
        assert cli.main(["bench", "model", str(path), "--shape", "tiny", *map(str, args)]) == 0
        out, err = capsys.readouterr()
        assert err == "" and out.startswith(f"{path}: ") and out.count("\n") == 1
        return path

    return run


def matrices(path):
    """Type and row length of each, by name."""
    with minfer.GgufFile(path) as file:
        return {t.name: (t.type, t.dims[0]) for t in file.tensors if len(t.dims) > 1}


def logits(path):
    with minfer.load(path, n_ctx=64) as engine:
        return engine.forward_cached(IDS, logits="all")


@pytest.mark.parametrize("weight_type", [*WEIGHT_TYPES, MIXTURE])
def test_every_type_runs(make, weight_type):
    path = make("--type", weight_type.lower())
    types = {kind for kind, _ in matrices(path).values()}
    assert types == ({"Q4_K", "Q6_K"} if weight_type == MIXTURE else {weight_type})
    values = logits(path)
    assert values.shape == (len(IDS), 512) and np.isfinite(values).all()
    assert 0.3 < values.std() < 3.0


def test_qwen2_runs(make):
    sizes = ("--n-layer", 2, "--n-vocab", 600, "--n-ctx", 64)
    path = make("--shape", "0.5b", "--type", MIXTURE, *sizes)
    found = matrices(path)
    assert "output.weight" not in found and found["token_embd.weight"] == ("Q8_0", 896)
    assert np.isfinite(logits(path)).all()


def test_sizes_are_those_asked_for(make):
    sizes = dict(n_layer=3, n_embd=96, n_head=6, n_head_kv=3, head_dim=32, n_ff=160, n_vocab=300)
    path = make(*(w for key, n in sizes.items() for w in (f"--{key.replace('_', '-')}", n)))
    with minfer.load(path) as engine:
        assert (engine.n_layer, engine.n_embd, engine.n_vocab) == (3, 96, 300)
    shapes = {tensor.name: list(tensor.shape[::-1]) for tensor in GGUFReader(path).tensors}
    assert len(shapes) == 3 + 3 * 9
    assert shapes["blk.2.attn_q.weight"] == [192, 96]
    assert shapes["blk.2.attn_v.weight"] == [96, 96]
    assert shapes["blk.2.attn_output.weight"] == [96, 192]
    assert shapes["blk.2.ffn_up.weight"] == [160, 96]
    assert shapes["blk.2.ffn_down.weight"] == [96, 160]
    assert shapes["token_embd.weight"] == shapes["output.weight"] == [300, 96]


def test_the_same_arguments_give_the_same_bytes(make):
    args = ("--type", MIXTURE, "--seed", 7)
    data = make(*args, name="a.gguf").read_bytes()
    assert make(*args, name="b.gguf").read_bytes() == data
    other = make(*args[:3], 8, name="c.gguf").read_bytes()
    assert len(other) == len(data) and other != data


def test_rows_repeat_only_where_the_pool_ends(make, monkeypatch):
    monkeypatch.setattr(bench_model, "POOL", 100 * 256)
    tensors = {tensor.name: tensor for tensor in GGUFReader(make("--type", "Q4_1")).tensors}
    rows = {}
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.1.attn_q.weight"):
        values = dequantize(tensors[name].data, tensors[name].tensor_type)
        assert len(np.unique(values[:100], axis=0)) == 100
        assert (values[100:] == values[:-100]).all()
        assert 0.9 < values.std() * 16 < 1.1
        assert values.reshape(-1, 32).mean(axis=1).std() < 0.7 * values.std()  # of each block
        rows[name] = values[0].tobytes()
    assert len(set(rows.values())) == 3


def test_the_mixture_is_llama_cpp_s(demo_path):
    """The demo is a Q4_K_M file that llama.cpp made, with rows of whole blocks and others."""
    found = matrices(demo_path)
    assert len(found) == 1 + 18 * 7
    for name, (kind, n_in) in found.items():
        assert bench_model.mixed_type(name, n_in, 18, True) == kind, name


def test_the_mixture(make):
    found = matrices(make("--type", MIXTURE, "--n-layer", 22))
    more = {0, 1, 4, 7, 10, 13, 16, 19, 20, 21}
    larger = {f"blk.{i}.{part}.weight" for i in more for part in ("attn_v", "ffn_down")}
    assert {name for name in found if found[name][0] == "Q6_K"} == {"output.weight", *larger}
    assert len(found) == 2 + 22 * 7


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--shape", "7b"), "no shape '7b'; there are 1.1b, 0.5b, tiny"),
        (("--type", "Q9_K"), "no type 'Q9_K'; there are F32, "),
        (("--type", "Q4_K", "--n-ff", "96"), "a row of blk.0.ffn_down.weight has 96 weights"),
        (("--type", "Q8_0", "--n-embd", "40"), "a row of token_embd.weight has 40 weights"),
        (("--seed", str(1 << 32)), "seed 4294967296"),
        (("--n-layer", "513"), "n_layer 513: at most 512"),
        (("--n-vocab", "258"), "n_vocab 258: at least 259"),
        (("--n-vocab", "16777217"), "n_vocab 16777217: at most 16777216"),
        (("--n-head", "3"), "n_head 3 must be a multiple of n_head_kv 2"),
        (("--head-dim", "5"), "head_dim 5 must be even"),
        (("--n-vocab", "16777216", "--n-embd", "16777216"), "would have "),
    ],
)
def test_refused(tmp_path, capsys, args, words):
    path = tmp_path / "m.gguf"
    assert cli.main(["bench", "model", str(path), "--shape", "tiny", *args]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("minfer: ") and err.count("\n") == 1 and words in err
    assert os.listdir(tmp_path) == []


def test_no_file_is_overwritten_or_left_half_written(make, tmp_path, capsys, monkeypatch):
    path = make()
    data = path.read_bytes()
    words = ["bench", "model", str(path), "--shape", "tiny"]
    assert cli.main(words) == 1 and "exists; remove it" in capsys.readouterr().err
    path.unlink()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(bench_model.GGUFWriter, "write_tensor_data", full)
        assert cli.main(words) == 1 and "No space left" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []
    assert cli.main(words) == 0 and path.read_bytes() == data


def test_without_gguf(tmp_path):
    (tmp_path / "gguf.py").write_text("raise ImportError('No module named gguf')")
    command = [sys.executable, "-m", "minfer.tools.cli", "bench", "model", tmp_path / "m.gguf"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "pip install 'minfer[bench]'" in done.stderr


@pytest.mark.parametrize("args", [(), ("m.gguf", "--n-embd", "0"), ("m.gguf", "--seed", "-1")])
def test_wrong_usage(capsys, args):
    with pytest.raises(SystemExit) as exit:
        cli.main(["bench", "model", *args])
    out, err = capsys.readouterr()
    assert exit.value.code == 2 and out == "" and "usage: minfer bench model" in err
