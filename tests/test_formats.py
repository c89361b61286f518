"""KV formats: what they cost and keep, who refuses them, and that each engine has its own.

`python tests/test_formats.py` prints the table of docs/kv-formats.md.

The formats' own error is seen where nothing else rounds: on models with float weights. With
quantised weights activations are rounded to int8 too, and any change, however small, moves some of
them over an edge; what comes out of that is the same for all small changes and larger than f16's
own error.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import tinymodels
from kl import logsumexp

import minfer
from minfer.demo import model_path

GOLDENS = Path(__file__).parent / "goldens" / "gemma_reference.json"
UNFUSED = "MINFER_NO_FUSED_Q8_KV"

# Bounds of the mean KL divergence from f32 in nats, some three times what is measured, and of the
# change of perplexity on the story.
FLOAT_KL = {"f16": 4e-7, "q8_0": 3e-4}
STORY_KL = {"f16": 0.005, "q8_0": 0.008}
STORY_PERPLEXITY = {"f16": 0.02, "q8_0": 0.02}


@pytest.fixture(scope="module", params=["gemma3", "llama", "qwen3"])
def float_model(request, tmp_path_factory):
    """Float weights, heads of 32 or 64."""
    path = tmp_path_factory.mktemp("formats") / f"{request.param}.gguf"
    return tinymodels.write(path, request.param, "F32", head_dim=64)


def log_probabilities(logits):
    """In float64, row by row: a whole text's would be copied several times."""
    out = np.array(logits, np.float64)
    for row in out:
        row -= logsumexp(row[None])
    return out


def predict(path, tokens, n, cache_type):
    """Log probabilities after each of the last `n` tokens."""
    with minfer.load(path, n_ctx=2048, cache_type=cache_type) as engine:
        if len(tokens) > n:
            engine.forward_cached(tokens[:-n], logits="none")
        return log_probabilities(engine.forward_cached(tokens[-n:], logits="all"))


def mean_kl(reference, other):
    return float((np.exp(reference) * (reference - other)).sum(axis=1).mean())


def perplexity(log_p, tokens):
    """Of the last len(log_p) - 1 tokens, each after those before it."""
    n = len(log_p) - 1
    return float(np.exp(-log_p[np.arange(n), tokens[-n:]].mean()))


def some_tokens(n, seed=5):
    return np.random.RandomState(seed).randint(3, 300, n).tolist()


def test_each_format_is_as_close_as_it_claims(float_model):
    tokens = some_tokens(200)
    f32 = predict(float_model, tokens, 200, "f32")
    distances = {name: mean_kl(f32, predict(float_model, tokens, 200, name)) for name in FLOAT_KL}
    print(distances)
    for name, bound in FLOAT_KL.items():
        assert 0 < distances[name] <= bound
    assert distances["f16"] * 10 < distances["q8_0"]


N_BEGUN, N_TOLD = 320, 300


def tell(path, goldens):
    """A text: the beginning of a story and what the model, with an f32 cache, makes of it at
    temperature 1. It reaches over the model's window of 512; what the model told is judged."""
    tokens = goldens["story_700"]["ids"][:N_BEGUN]
    choose = minfer.Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
    with minfer.load(path, n_ctx=1024, cache_type="f32") as engine:
        logits = engine.forward_cached(tokens)[-1]
        while len(tokens) < N_BEGUN + N_TOLD:
            tokens.append(choose.pick(logits, len(tokens)))
            logits = engine.forward_cached(tokens[-1:])[-1]
    return tokens


def test_the_real_model_stays_close(demo_path, goldens):
    tokens, n = tell(demo_path, goldens), N_TOLD
    f32 = predict(demo_path, tokens, n, "f32")
    for name, bound in STORY_KL.items():
        other = predict(demo_path, tokens, n, name)
        distance = mean_kl(f32, other)
        ratio = perplexity(other, tokens) / perplexity(f32, tokens)
        print(name, distance, ratio)
        assert 0 < distance <= bound
        assert abs(ratio - 1) <= STORY_PERPLEXITY[name]


def test_engines_of_all_formats_live_side_by_side(float_model):
    """No state of the process: engines in turn, token by token, as each alone."""
    tokens = some_tokens(30)
    alone = {}
    for name in minfer.KvFormat:
        with minfer.load(float_model, n_ctx=64, cache_type=name) as engine:
            alone[name] = engine.forward_cached(tokens)[-1].tobytes()
    assert len(set(alone.values())) == 3
    engines = {name: minfer.load(float_model, n_ctx=64, cache_type=name) for name in alone}
    for token in tokens:
        last = {name: engine.forward_cached([token])[-1] for name, engine in engines.items()}
    for name, engine in engines.items():
        assert engine.kv_format == name and last[name].tobytes() == alone[name]
        engine.close()


def test_bytes(float_model):
    """A row of 64 elements: 256, 128 and 2 * 34 bytes."""
    of = {}
    for name in minfer.KvFormat:
        with minfer.load(float_model, n_ctx=64, cache_type=name) as engine:
            of[name] = (engine.stats().kv_bytes, sum(engine.kv.bytes_per_token().values()))
    for i in range(2):
        assert of["f16"][i] * 2 == of["f32"][i]
        assert of["q8_0"][i] * 256 == of["f32"][i] * 68
        assert of["q8_0"][i] <= 0.27 * of["f32"][i]


def kinds(path, **options):
    with minfer.load(path, n_ctx=64, **options) as engine:
        return engine.kv.kinds()


def test_kinds_differ(float_model, monkeypatch):
    seen = [kinds(float_model, cache_type=name) for name in minfer.KvFormat]
    monkeypatch.setenv(UNFUSED, "1")
    seen.append(kinds(float_model, cache_type="q8_0"))
    for name, of in zip((*minfer.KvFormat, "q8_0"), seen, strict=True):
        assert all(f"/{name}/kv" in kind for kind in of)
    assert all(kind.endswith("/widened") for kind in seen[-1])
    assert len(set(sum(seen, []))) == 4 * len(set(seen[0]))
    assert kinds(float_model, cache_type="f16") == seen[1]  # which has nothing to leave unpacked


def test_the_environment_is_read_at_load_and_nowhere_else(float_model, monkeypatch):
    tokens = some_tokens(20)
    monkeypatch.setenv("MINFER_CACHE_TYPE", "q8_0")
    with minfer.load(float_model, n_ctx=64) as engine:
        before = engine.forward_cached(tokens)
        monkeypatch.setenv("MINFER_CACHE_TYPE", "f16")
        monkeypatch.setenv(UNFUSED, "1")
        engine.kv.free(0)
        assert engine.forward_cached(tokens).tobytes() == before.tobytes()
        assert engine.kv_format == "q8_0"
    with minfer.load(float_model, n_ctx=64, cache_type="f32") as engine:  # what is asked for wins
        assert engine.kv_format == "f32"
    monkeypatch.setenv("MINFER_CACHE_TYPE", "q4_0")
    with pytest.raises(minfer.ArgumentError, match="MINFER_CACHE_TYPE: unknown KV format .q4_0."):
        minfer.load(float_model, n_ctx=64)
    with pytest.raises(minfer.ArgumentError, match="cache_type: unknown KV format .F16."):
        minfer.load(float_model, n_ctx=64, cache_type="F16")


def test_packed_rows_read_as_floats(float_model, monkeypatch):
    """The A/B: near the packed read, not the same bits, the same memory; and it obeys the law."""
    tokens = some_tokens(150)
    f32, packed = (predict(float_model, tokens, 150, name) for name in ("f32", "q8_0"))
    with minfer.load(float_model, n_ctx=256, cache_type="q8_0") as engine:
        kv_bytes = engine.stats().kv_bytes
    monkeypatch.setenv(UNFUSED, "1")
    widened = predict(float_model, tokens, 150, "q8_0")
    assert 0 < mean_kl(packed, widened) <= FLOAT_KL["q8_0"]
    assert 0 < mean_kl(f32, widened) <= FLOAT_KL["q8_0"]
    outputs = set()
    for isa in minfer.isas():
        with minfer.load(float_model, n_ctx=256, cache_type="q8_0", isa=isa, threads=2) as engine:
            assert engine.stats().kv_bytes == kv_bytes
            outputs.add(engine.forward_cached(tokens)[-1].tobytes())
            engine.kv.free(0)
            for token in tokens:
                last = engine.forward_cached([token])[-1]
            outputs.add(last.tobytes())
    assert len(outputs) == 1
    for value in ("0", ""):
        monkeypatch.setenv(UNFUSED, value)
        assert not any(kind.endswith("/widened") for kind in kinds(float_model, cache_type="q8_0"))
    monkeypatch.setenv(UNFUSED, "yes")
    with pytest.raises(minfer.ArgumentError, match=f"{UNFUSED}: .yes.; use 0 or 1"):
        minfer.load(float_model, n_ctx=64, cache_type="q8_0")


def test_heads_that_do_not_fill_a_block(tmp_path):
    path = tinymodels.write(tmp_path / "m.gguf", "llama", "F32", head_dim=48)
    with pytest.raises(minfer.UnsupportedError, match="q8_0 packs 32 .* heads have 48; use f16"):
        minfer.load(path, n_ctx=64, cache_type="q8_0")
    with minfer.load(path, n_ctx=64, cache_type="f16") as engine:
        assert np.isfinite(engine.forward_cached(some_tokens(20))).all()


def main():
    goldens = json.loads(GOLDENS.read_text(encoding="utf-8"))
    tokens, n = tell(model_path("demo"), goldens), N_TOLD
    path = tinymodels.write(Path("formats.gguf"), "gemma3", "F32", head_dim=64)
    prompt = some_tokens(200)
    print("format  KL, float weights  KL, demo  perplexity, demo")
    tiny_f32, f32 = predict(path, prompt, 200, "f32"), predict(model_path("demo"), tokens, n, "f32")
    for name in minfer.KvFormat:
        tiny = mean_kl(tiny_f32, predict(path, prompt, 200, name))
        log_p = predict(model_path("demo"), tokens, n, name)
        print(f"{name:6}  {tiny:17.1e}  {mean_kl(f32, log_p):8.5f}  {perplexity(log_p, tokens):.4f}")
    path.unlink()


if __name__ == "__main__":
    main()
