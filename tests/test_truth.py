"""The engine against the truth: the float64 reference on tiny models, stored values on a real one.

How close is close enough:

- Float weights: 1e-4 of the logits' standard deviation; float32 gives 7e-6, after 62 layers 1.4e-5.
- Quantised weights against the reference that rounds activations like the engine: also 1e-4, in at
  least 3 of 4 short prompts, because an activation at a half may be rounded either way; when that
  happens the prompt is off by as much as the rounding itself.
- Quantised weights against the exact reference: an RMS of 3 %; the rounding gives up to 1.5 %.
- The real model: bounds of its own, below.
"""

import json
from pathlib import Path

import minfer
import numpy as np
import pytest
import tinymodels
from kl import kl_divergence
from reference import Reference
from tinymodels import ARCHS, FLOAT_TYPES, QUANT_TYPES, VARIANTS

GOLDENS = Path(__file__).parent / "goldens"
GEMMA = json.loads((GOLDENS / "gemma_reference.json").read_text(encoding="utf-8"))
GEMMA_ARRAYS = np.load(GOLDENS / "gemma_reference.npz")

N_CTX = 512
N_TOKENS = 150  # crosses the tiny windows of 8 many times and two attention tiles
TIGHT = 1e-4
N_PROMPTS, PROMPT_TOKENS = 16, 4
MIN_TIGHT_PROMPTS = 12
INT8_RMS = 0.03

FLOAT_CASES = [
    *((arch, arch, {}, "F32") for arch in ARCHS),
    *((*variant, "F32") for variant in VARIANTS),
    *((arch, arch, {}, t) for arch in ("llama", "gemma3") for t in FLOAT_TYPES if t != "F32"),
]
QUANT_CASES = [
    *((arch, t) for arch in ("llama", "gemma3") for t in QUANT_TYPES),
    *((arch, t) for arch in ARCHS if arch not in ("llama", "gemma3") for t in ("Q8_0", "Q4_K")),
]


@pytest.mark.parametrize(
    ("name", "arch", "overrides", "weight_type"),
    FLOAT_CASES,
    ids=[f"{case[0]}-{case[3]}" for case in FLOAT_CASES],
)
def test_float_weights(tmp_path, name, arch, overrides, weight_type):
    path = tinymodels.write(tmp_path / "m.gguf", arch, weight_type, **overrides)
    tokens = random_prompt(N_TOKENS)
    expected = Reference(path, n_ctx=N_CTX).logits(tokens)
    with minfer.load(path, n_ctx=N_CTX, n_batch=64) as engine:
        logits = engine.forward_cached(tokens, logits="all")
    assert logits.dtype == np.float32 and logits.shape == expected.shape
    assert np.abs(logits - expected).max() <= TIGHT * expected.std()


@pytest.mark.parametrize(("arch", "weight_type"), QUANT_CASES)
def test_quantised_weights(tmp_path, arch, weight_type):
    # One layer and short prompts: fewer activations that could lie at a half.
    path = tinymodels.write(tmp_path / "m.gguf", arch, weight_type, n_layer=1)
    exact, rounded = Reference(path), Reference(path, act_int8=True)
    n_tight, errors = 0, []
    with minfer.load(path, n_ctx=N_CTX) as engine:
        for seed in range(N_PROMPTS):
            tokens = random_prompt(PROMPT_TOKENS, seed)
            logits = engine.forward_cached(tokens, logits="all")
            engine.kv.free(0)
            expected = rounded.logits(tokens)
            n_tight += np.abs(logits - expected).max() <= TIGHT * expected.std()
            truth = exact.logits(tokens)
            errors.append((logits - truth) / truth.std())
    assert n_tight >= MIN_TIGHT_PROMPTS
    assert np.sqrt(np.mean(np.square(errors))) <= INT8_RMS


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
@pytest.mark.parametrize("form", ["version 2", "1 part", "3 parts"])
def test_other_forms_of_a_file_are_the_same_model(tmp_path, arch, form):
    path = tinymodels.write(tmp_path / "m.gguf", arch, "Q4_0")
    tokens = random_prompt(20)
    with minfer.load(path, n_ctx=N_CTX) as engine:
        expected = engine.forward_cached(tokens, logits="all")
    if form == "version 2":
        other = tinymodels.to_v2(path)
    else:
        other = tinymodels.split(path, int(form[0]))
        path.unlink()
    with minfer.load(other, n_ctx=N_CTX) as engine:
        assert engine.forward_cached(tokens, logits="all").tobytes() == expected.tobytes()


# ---- the real model ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gemma(demo_path):
    with minfer.load(demo_path, n_ctx=2048) as engine:
        yield engine


@pytest.fixture(scope="module")
def gemma_logits(gemma):
    """By prompt: the logits [n, n_vocab] of the last n positions, n being what the goldens have."""
    cache = {}

    def logits(prompt):
        if prompt not in cache:
            ids, n = GEMMA[prompt]["ids"], len(GEMMA_ARRAYS[f"{prompt}.top_ids"])
            gemma.kv.free(0)
            if len(ids) > n:  # 64 rows of logits are 67 MB, 1500 would be 1.6 GB
                gemma.forward_cached(ids[:-n], logits="none")
            cache[prompt] = gemma.forward_cached(ids[-n:], logits="all")
        return cache[prompt]

    return logits


def gemma_kl(prompt, logits):
    names = ("top_ids", "top_logits", "logsumexp")
    return kl_divergence(*(GEMMA_ARRAYS[f"{prompt}.{x}"] for x in names), logits)


def test_gemma_short_prompts_are_close(gemma_logits):
    kl = np.concatenate([gemma_kl(p, gemma_logits(p)) for p in ("france", "code", "unicode")])
    assert len(kl) == 25
    assert kl.mean() <= 0.003


@pytest.mark.parametrize("prompt", ["story_700", "story_1500"])
def test_gemma_stories_are_close(gemma_logits, prompt):
    kl = gemma_kl(prompt, gemma_logits(prompt))
    assert len(kl) == 64
    assert kl.mean() <= 0.0005


@pytest.mark.parametrize("prompt", GEMMA)
def test_gemma_agrees_on_the_first_choice(gemma_logits, prompt):
    top = GEMMA_ARRAYS[f"{prompt}.top_logits"]
    sure = top[:, 0] - top[:, 1] > 0.5
    assert sure.any()
    choice = gemma_logits(prompt).argmax(axis=1)
    assert choice[sure].tolist() == GEMMA_ARRAYS[f"{prompt}.top_ids"][sure, 0].tolist()


@pytest.mark.parametrize("prompt", GEMMA)
def test_gemma_greedy_text(gemma, prompt):
    golden = GEMMA[prompt]
    margins = np.array(golden["greedy_margin"])
    n_sure = int(np.argmax(margins < 0.5)) if (margins < 0.5).any() else len(margins)
    gemma.kv.free(0)
    logits = gemma.forward_cached(golden["ids"])
    text = []
    while len(text) < n_sure:
        text.append(int(logits[-1].argmax()))
        logits = gemma.forward_cached([text[-1]])
    assert text == golden["greedy"][:n_sure]


def random_prompt(n, seed=0):
    return np.random.RandomState(1000 + seed).randint(3, 300, n).tolist()
