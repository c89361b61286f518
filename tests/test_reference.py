"""The reference model against values it cannot have influenced, and the tiny models by themselves.

The reference is what the engine is judged by, so it is judged first: by a float32 run of a real
model, by another engine's logits of tiny ones (goldens/), and by what holds whatever the weights.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import tinymodels
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from kl import kl_divergence, logsumexp
from reference import Reference, through_int8
from tinymodels import ARCHS, QUANT_TYPES, VARIANTS, WEIGHT_TYPES

GOLDENS = Path(__file__).parent / "goldens"
GEMMA = json.loads((GOLDENS / "gemma_reference.json").read_text(encoding="utf-8"))
GEMMA_ARRAYS = np.load(GOLDENS / "gemma_reference.npz")
PEER = np.load(GOLDENS / "peer_tiny.npz")
ROWS = [(arch, arch, {}) for arch in ARCHS] + VARIANTS
ROW_IDS = [name for name, _, _ in ROWS]


@pytest.fixture(scope="module")
def gemma(demo_path):
    return Reference(demo_path)


@pytest.mark.parametrize("prompt", ["france", "code", "unicode", "story_700"])
def test_gemma_agrees_with_the_float32_run(gemma, prompt):
    golden = GEMMA[prompt]
    tokens = golden["ids"] + golden["greedy"][:-1]
    n_prompt, n = len(golden["ids"]), len(GEMMA_ARRAYS[f"{prompt}.top_ids"])
    logits = gemma.logits(tokens, rows=np.arange(n_prompt - n, len(tokens)))

    # Measured: 7e-5 and 2e-10, the float32 run's own rounding; a wrong term shows at 1e-2.
    top_ids, top = GEMMA_ARRAYS[f"{prompt}.top_ids"], GEMMA_ARRAYS[f"{prompt}.top_logits"]
    total = GEMMA_ARRAYS[f"{prompt}.logsumexp"]
    ours = np.take_along_axis(logits[:n], top_ids.astype(np.int64), axis=1)
    assert np.abs(ours - top).max() <= 1e-3
    assert np.abs(logsumexp(logits[:n]) - total).max() <= 1e-3
    assert kl_divergence(top_ids, top, total, logits[:n]).max() <= 1e-8
    if f"{prompt}.final_logits" in GEMMA_ARRAYS:
        assert np.abs(logits[n - 1] - GEMMA_ARRAYS[f"{prompt}.final_logits"]).max() <= 1e-3

    # The smallest margin of these steps is 0.0124, far above the difference: all must agree.
    steps = logits[n - 1 :]
    assert steps.argmax(axis=1).tolist() == golden["greedy"]
    second, first = np.partition(steps, -2, axis=1)[:, -2:].T
    assert np.abs(first - second - golden["greedy_margin"]).max() <= 1e-3


@pytest.mark.parametrize("name", [name for name in PEER.files if name != "ids"])
def test_tiny_models_agree_with_another_engine(tmp_path, name):
    arch, overrides = {row: (arch, overrides) for row, arch, overrides in ROWS}[name]
    model = Reference(tinymodels.write(tmp_path / "m.gguf", arch, **overrides))
    logits = model.logits(PEER["ids"], rows=[9, 59])
    bound = 2e-2 if arch.startswith("gemma") else 1e-5  # the peer's gelu table
    assert np.abs(logits - PEER[name]).max() <= bound * logits.std()


@pytest.mark.parametrize(("name", "arch", "overrides"), ROWS, ids=ROW_IDS)
def test_rows_are_finite_and_causal(tmp_path, name, arch, overrides):
    model = Reference(tinymodels.write(tmp_path / "m.gguf", arch, **overrides))
    assert model.config.arch == arch
    tokens = random_tokens(30)
    logits = model.logits(tokens)
    assert logits.shape == (30, model.config.n_vocab) and logits.dtype == np.float64
    assert np.isfinite(logits).all()
    assert 0.3 < logits.std() < 3.0  # a test relative to it means something

    tokens[20] += 1
    changed = np.abs(model.logits(tokens) - logits).max(axis=1)
    assert changed[:20].max() <= 1e-12  # the same sums, at most in another order of the library's
    assert changed[20:].min() > 1e-3


def test_a_windowed_layer_sees_exactly_its_window(tmp_path):
    # With w keys a layer reaches w - 1 positions back, so n layers reach n * (w - 1).
    model = Reference(tinymodels.write(tmp_path / "m.gguf", "mistral", n_layer=3, window=5))
    tokens = random_tokens(40)
    reach = 3 * (5 - 1)
    logits = model.logits(tokens)
    tokens[10] += 1
    changed = np.abs(model.logits(tokens) - logits).max(axis=1)
    assert changed[10 : 10 + reach + 1].min() > 1e-6
    assert changed[10 + reach + 1 :].max() <= 1e-12


@pytest.mark.parametrize(
    ("arch", "n_layer", "reaches"),
    [
        ("gemma3", 5, False), ("gemma3", 6, True), ("gemma2", 1, False), ("gemma2", 2, True),
        ("mistral", 2, False), ("llama", 1, False), ("phi3", 2, False), ("qwen3", 1, True),
    ],
)  # fmt: skip
def test_which_layers_are_windowed(tmp_path, arch, n_layer, reaches):
    # The last position, 59 behind the first, feels its change only through a full layer.
    path = tinymodels.write(tmp_path / "m.gguf", arch, n_layer=n_layer, window=8)
    model = Reference(path)
    tokens = random_tokens(60)
    logits = model.logits(tokens, rows=[59])
    tokens[0] += 1
    changed = np.abs(model.logits(tokens, rows=[59]) - logits).max()
    assert changed > 1e-4 if reaches else changed <= 1e-12


def test_rows_selects_positions(tmp_path):
    model = Reference(tinymodels.write(tmp_path / "m.gguf", "llama"))
    tokens = random_tokens(12)
    expected = model.logits(tokens)[[3, 11]]
    np.testing.assert_allclose(model.logits(tokens, rows=[3, 11]), expected, atol=1e-12)


@pytest.mark.parametrize("scaling", ["linear", "yarn"])
def test_scaling_by_one_is_no_scaling(tmp_path, scaling):
    plain = Reference(tinymodels.write(tmp_path / "a.gguf", "llama"))
    path = tinymodels.write(tmp_path / "b.gguf", "llama", rope_scaling=scaling, rope_factor=1.0)
    tokens = random_tokens(20)
    np.testing.assert_allclose(Reference(path).logits(tokens), plain.logits(tokens), atol=1e-12)


def test_longrope_takes_its_table_by_the_context(tmp_path):
    overrides = dict(rope_scaling="longrope", rope_original_ctx=128)
    path = tinymodels.write(tmp_path / "m.gguf", "phi3", **overrides)
    tokens = random_tokens(20)
    short, at_limit, long = (Reference(path, n_ctx=n).logits(tokens) for n in (64, 128, 129))
    assert (short == at_limit).all()
    assert np.abs(short - long).max() > 1e-2


def test_an_unknown_architecture_is_refused(tmp_path):
    path = tinymodels.write(tmp_path / "m.gguf", "llama")
    path.write_bytes(path.read_bytes().replace(b"llama", b"lhama"))
    with pytest.raises(KeyError, match="lhama"):
        Reference(path)


def test_int8_rounds_ties_to_even_and_keeps_the_largest():
    x = np.zeros((1, 64))
    x[0, :6] = [127.0, 0.5, 1.5, 2.5, -0.5, -3.5]
    x[0, 32:34] = [-2.0, 1.0]  # its own scale: d = 2 / 127, so 1 is 63.5 -> 64
    y = through_int8(x)
    assert y[0, :6].tolist() == [127.0, 0.0, 2.0, 2.0, 0.0, -4.0]
    np.testing.assert_allclose(y[0, 32:34], [-2.0, 128 / 127], rtol=1e-7)
    assert (y[0, 6:32] == 0).all() and (y[0, 34:] == 0).all()
    assert (through_int8(np.full((2, 32), 2.0**-101)) == 0).all()
    assert (through_int8(np.full((2, 32), 2.0**-100)) > 0).all()


def test_int8_activations_are_for_quantised_weights_only(tmp_path):
    tokens = random_tokens(8)
    for weight_type, differs in (("F16", False), ("Q8_0", True)):
        path = tinymodels.write(tmp_path / f"{weight_type}.gguf", "llama", weight_type)
        difference = Reference(path, act_int8=True).logits(tokens) - Reference(path).logits(tokens)
        assert (np.abs(difference).max() > 1e-3) == differs


def test_kl_of_known_distributions():
    logits = np.log([[0.5, 0.25, 0.125, 0.125]])
    ids, top = np.array([[0, 1]]), logits[:, :2]
    zero = np.zeros(1)
    assert abs(kl_divergence(ids, top, zero, logits + 3.0)[0]) < 1e-15
    # Inside the bucket nothing counts, but its total does.
    assert abs(kl_divergence(ids, top, zero, np.log([[0.5, 0.25, 0.2, 0.05]]))[0]) < 1e-15
    got = kl_divergence(ids, top, zero, np.log([[0.25, 0.25, 0.4, 0.1]]))[0]
    assert abs(got - (0.5 * np.log(2.0) + 0.25 * np.log(0.5))) < 1e-15
    assert np.isnan(kl_divergence(ids, top, zero, np.full((1, 4), np.nan))[0])


# ---- tiny models -------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
def test_random_weights_have_a_sane_size(weight_type):
    matrix = tinymodels.random_matrix(np.random.RandomState(3), weight_type, 64, 512)
    values = dequantize(matrix, GGMLQuantizationType[weight_type])
    assert values.shape == (64, 512) and np.isfinite(values).all()
    assert 0.7 < values.std() * 512**0.5 < 1.4
    assert abs(values.mean()) < 0.05 * values.std()
    if weight_type in QUANT_TYPES:
        assert (values > 0).any() and (values < 0).any()


def test_the_same_arguments_give_the_same_bytes(tmp_path):
    a, b, c = (
        tinymodels.write(tmp_path / f"{i}.gguf", "qwen2", "Q4_K", seed=seed).read_bytes()
        for i, seed in enumerate((1, 1, 2))
    )
    assert a == b and a != c


def test_a_vocabulary_ends_inside_a_panel(tmp_path):
    model = Reference(tinymodels.write(tmp_path / "m.gguf", "llama"))
    assert model.config.n_vocab % 16 != 0


@pytest.mark.parametrize("n_vocab", [8, 259, 331, 500])
def test_the_tokenizer_matches_the_embedding(tmp_path, n_vocab):
    reader = GGUFReader(tinymodels.write(tmp_path / "m.gguf", "llama", n_vocab=n_vocab))
    tokens, scores, types = (
        reader.fields[f"tokenizer.ggml.{x}"].contents() for x in ("tokens", "scores", "token_type")
    )
    assert len(tokens) == len(set(tokens)) == len(scores) == len(types) == n_vocab
    assert types.count(6) == (256 if n_vocab >= 259 else 0)


def test_a_file_for_bit_flips_is_small_and_whole(tmp_path):
    path = tinymodels.write_4k(tmp_path / "m.gguf")
    assert path.stat().st_size < 6144
    assert np.isfinite(Reference(path).logits([1, 3, 5])).all()


def test_version_2_is_the_same_model(tmp_path):
    path = tinymodels.write(tmp_path / "m.gguf", "llama")
    before = Reference(path).logits([5, 6, 7])
    reader = GGUFReader(tinymodels.to_v2(path))
    assert reader.fields["GGUF.version"].contents() == 2
    assert (Reference(path).logits([5, 6, 7]) == before).all()


@pytest.mark.parametrize("n", [1, 3, 5])
def test_split_files_hold_the_model_between_them(tmp_path, n):
    path = tinymodels.write(tmp_path / "m.gguf", "llama", "Q4_0")
    whole = GGUFReader(path)
    first = tinymodels.split(path, n)
    assert first.name == f"m-00001-of-0000{n}.gguf"
    parts = [GGUFReader(p) for p in sorted(tmp_path.glob("m-*.gguf"))]
    assert len(parts) == n
    for i, part in enumerate(parts):
        assert part.fields["split.no"].contents() == i
        assert part.fields["split.count"].contents() == n
        assert part.fields["split.tensors.count"].contents() == len(whole.tensors)
        assert ("general.architecture" in part.fields) == (i == 0)
    assert set(whole.fields) < set(parts[0].fields)
    for name, field in whole.fields.items():
        if not name.startswith("GGUF."):
            assert parts[0].fields[name].contents() == field.contents()
            assert parts[0].fields[name].types == field.types
    tensors = [t for part in parts for t in part.tensors]
    assert [t.name for t in tensors] == [t.name for t in whole.tensors]
    for ours, theirs in zip(tensors, whole.tensors, strict=True):
        assert ours.tensor_type == theirs.tensor_type and (ours.shape == theirs.shape).all()
        assert (ours.data == theirs.data).all()


def random_tokens(n):
    return np.random.RandomState(7).randint(3, 300, n)
