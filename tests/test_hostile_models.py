"""Models that are well-formed GGUF files and wrong as models: refused with the class, file and key or tensor.

One row of the tables is one damage done to a valid model. What is odd but legal must load, and weights
that are no numbers must give the same logits on every instruction set.
"""

import math

import numpy as np
import pytest
import tinymodels
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

import minfer
from minfer import FormatError, UnsupportedError
from minfer.tools.bench_model import SCALES

SMALL = dict(n_layer=2, n_embd=32, n_head=2, n_head_kv=1, head_dim=16, n_ff=64, n_vocab=24, n_ctx=64)
SHAPES = {"qwen2": dict(biases=True), "phi3": dict(rope_dim=12), "gemma3": dict(window=8)}
V = GGUFValueType


def u32(value):
    return (value, V.UINT32, None)


def f32(value):
    return (value, V.FLOAT32, None)


def text(value):
    return (value, V.STRING, None)


def array(values, kind=V.UINT32):
    return (values, V.ARRAY, kind)


def floats(*shape):
    return (np.ones(shape[::-1], np.float32), None)


def blocks(kind, n_bytes, *rows):
    return (np.zeros((*rows, n_bytes), np.uint8), GGMLQuantizationType[kind])


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    """A valid small model of an architecture, written at the first use."""
    folder, made = tmp_path_factory.mktemp("valid"), {}

    def of(arch):
        if arch not in made:
            shape = SMALL | SHAPES.get(arch, {})
            made[arch] = tinymodels.write(folder / f"{arch}.gguf", arch, **shape)
        return made[arch]

    return of


def rewrite(source, target, keys=None, tensors=None):
    """Copies a model with keys and tensors replaced or added, or removed where the value is None.

    A key that starts with a dot is one of the architecture's.
    """
    reader = GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    keys = {arch + k if k.startswith(".") else k: v for k, v in (keys or {}).items()}
    writer = GGUFWriter(target, arch)
    writer.kv_data[0].clear()
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in keys:
            sub_type = field.types[1] if field.types[0] == V.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
    for name, value in keys.items():
        if value is not None:
            writer.add_key_value(name, *value)
    tensors = dict(tensors or {})
    for tensor in reader.tensors:
        data, kind = tensors.pop(tensor.name, (np.array(tensor.data), tensor.tensor_type)) or (None, None)
        if data is not None:
            writer.add_tensor(tensor.name, data, raw_dtype=kind)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def refused(path, error, *words):
    with pytest.raises(minfer.Error) as caught:
        minfer.load(path, threads=1)
    message = str(caught.value)
    assert caught.type is error, message
    assert message.startswith(f"{path}: ") or f"{path.name}: " in message
    for word in words:
        assert word in message
    assert "\n" not in message and len(message) > len(str(path)) + 10


# Key of a llama, what it becomes, and what the refusal says besides the key.
BAD_KEYS = [
    ("block_count", u32(0), FormatError, "0"),
    ("block_count", u32(10**9), FormatError, "1000000000"),
    ("block_count", None, FormatError, "missing"),
    ("block_count", text("two"), FormatError, ""),
    ("block_count", array([2, 2]), FormatError, ""),
    ("block_count", (-1, V.INT32, None), FormatError, "-1"),
    ("block_count", (2.0, V.FLOAT32, None), FormatError, ""),
    ("embedding_length", u32(0), FormatError, "0"),
    ("embedding_length", u32(2**32 - 1), FormatError, "4294967295"),
    ("embedding_length", (2**63, V.UINT64, None), FormatError, ""),
    ("embedding_length", None, FormatError, "missing"),
    ("embedding_length", (True, V.BOOL, None), FormatError, ""),
    ("feed_forward_length", u32(0), FormatError, "0"),
    ("feed_forward_length", None, FormatError, "missing"),
    ("feed_forward_length", array([64, 64]), FormatError, ""),
    ("context_length", u32(0), FormatError, "0"),
    ("context_length", u32(2**31), FormatError, "2147483648"),
    ("context_length", None, FormatError, "missing"),
    ("attention.head_count", u32(0), FormatError, "0"),
    ("attention.head_count", u32(4097), FormatError, "4097"),
    ("attention.head_count", f32(2.0), FormatError, ""),
    ("attention.head_count", text("2"), FormatError, ""),
    ("attention.head_count", None, FormatError, "missing"),
    ("attention.head_count", array([2, 2, 2]), FormatError, "3 entries for 2 layers"),
    ("attention.head_count", array([2, 1]), UnsupportedError, "differs between layers"),
    ("attention.head_count_kv", u32(0), FormatError, "0"),
    ("attention.head_count_kv", u32(3), FormatError, "not a multiple"),
    ("attention.head_count_kv", array([1]), FormatError, "1 entries for 2 layers"),
    ("attention.head_count_kv", array(["1", "1"], V.STRING), FormatError, "integers"),
    ("attention.head_count_kv", array([1, 2]), UnsupportedError, "differs between layers"),
    ("attention.head_count_kv", array([1.0, 1.0], V.FLOAT32), FormatError, "integers"),
    ("attention.head_count_kv", array([-1, -1], V.INT32), FormatError, "-1"),
    ("attention.key_length", u32(0), UnsupportedError, "value_length 16 differ"),
    ("attention.key_length", u32(32), UnsupportedError, "value_length 16 differ"),
    ("attention.key_length", (16.0, V.FLOAT64, None), FormatError, ""),
    ("attention.value_length", u32(32), UnsupportedError, "differ"),
    ("attention.layer_norm_rms_epsilon", f32(math.nan), FormatError, "nan"),
    ("attention.layer_norm_rms_epsilon", f32(math.inf), FormatError, "inf"),
    ("attention.layer_norm_rms_epsilon", f32(-1e-6), FormatError, "-1e-06"),
    ("attention.layer_norm_rms_epsilon", f32(0.0), FormatError, "0"),
    ("attention.layer_norm_rms_epsilon", None, FormatError, "missing"),
    ("attention.layer_norm_rms_epsilon", text("1e-6"), FormatError, ""),
    ("rope.dimension_count", u32(0), FormatError, "0"),
    ("rope.dimension_count", u32(15), FormatError, "odd"),
    ("rope.dimension_count", u32(18), FormatError, "18"),
    ("rope.freq_base", f32(0.0), FormatError, "0"),
    ("rope.freq_base", f32(-10000.0), FormatError, "-10000"),
    ("rope.freq_base", f32(math.nan), FormatError, "nan"),
    ("rope.freq_base", f32(math.inf), FormatError, "inf"),
    ("rope.scaling.factor", f32(0.0), FormatError, "0"),
    ("rope.scaling.factor", f32(math.nan), FormatError, "nan"),
    ("rope.scaling.factor", f32(math.inf), FormatError, "inf"),
    ("rope.scaling.attn_factor", f32(0.0), FormatError, "0"),
    ("rope.scaling.yarn_beta_fast", f32(-1.0), FormatError, "-1"),
    ("rope.scaling.original_context_length", u32(0), FormatError, "0"),
    ("rope.scaling.type", text("ntk"), UnsupportedError, "none, linear, yarn and longrope"),
    ("rope.scaling.type", u32(1), FormatError, ""),
    ("rope.scaling.type", text("longrope"), FormatError, "rope_factors_long.weight"),
    ("expert_count", u32(8), UnsupportedError, "dense models"),
    ("logit_scale", (0.5, V.FLOAT32, None), UnsupportedError, "0.5"),
    ("residual_scale", (2.0, V.FLOAT32, None), UnsupportedError, "2"),
    ("rope.scaling.yarn_ext_factor", (0.0, V.FLOAT32, None), UnsupportedError, "0"),
    ("attention.clamp_kqv", (8.0, V.FLOAT32, None), UnsupportedError, "8"),
    ("expert_count", text("8"), FormatError, ""),
    ("attention.sliding_window", text("8"), FormatError, ""),
]  # fmt: skip


@pytest.mark.parametrize("key, value, error, words", BAD_KEYS)
def test_bad_keys(valid, tmp_path, key, value, error, words):
    path = rewrite(valid("llama"), tmp_path / "bad.gguf", {f".{key}": value})
    refused(path, error, key, words)


@pytest.mark.parametrize("size", [0, 15, 17, 1026, 2**32 - 1, 24, 1024])
def test_bad_head_dimensions(valid, tmp_path, size):
    keys = {".attention.key_length": u32(size), ".attention.value_length": u32(size)}
    error = UnsupportedError if size in (24, 1024) else FormatError
    refused(rewrite(valid("llama"), tmp_path / "bad.gguf", keys), error, "key_length", f" {size} ")


def test_more_heads_than_elements(valid, tmp_path):
    keys = {".attention.key_length": None, ".attention.value_length": None}
    heads = {".attention.head_count": u32(64), ".attention.head_count_kv": u32(64)}
    path = rewrite(valid("llama"), tmp_path / "bad.gguf", keys | heads)
    refused(path, FormatError, "head dimension 0", "head_count")


@pytest.mark.parametrize(
    "keys, error, words",
    [
        ({"general.architecture": None}, FormatError, ["general.architecture", "missing"]),
        ({"general.architecture": u32(1)}, FormatError, ["general.architecture"]),
        ({"general.architecture": text("")}, UnsupportedError, ["general.architecture", "gemma3"]),
        (
            {"general.architecture": text("mamba" * 100)},
            UnsupportedError,
            ["mamba", "gemma2", "gemma3", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3"],
        ),
        ({"tokenizer.ggml.tokens": array(["a"] * 23, V.STRING)}, FormatError, ["tokens", "23", "24"]),
        ({"tokenizer.ggml.tokens": array(["a"] * 25, V.STRING)}, FormatError, ["tokens", "25", "24"]),
    ],
)
def test_bad_general_keys(valid, tmp_path, keys, error, words):
    refused(rewrite(valid("llama"), tmp_path / "bad.gguf", keys), error, *words)


@pytest.mark.parametrize(
    "key, value, error",
    [
        ("attention.sliding_window_pattern", array([True, False], V.BOOL), UnsupportedError),
        ("attention.sliding_window_pattern", u32(0), FormatError),
        ("attention.sliding_window_pattern", text("LLG"), FormatError),
        ("attention.sliding_window", (-1, V.INT32, None), FormatError),
        ("rope.freq_base_swa", f32(math.nan), FormatError),
    ],
)
def test_bad_windows(valid, tmp_path, key, value, error):
    refused(rewrite(valid("gemma3"), tmp_path / "bad.gguf", {f".{key}": value}), error, key)


@pytest.mark.parametrize("cap", [math.nan, math.inf, -1.0])
def test_bad_softcaps(valid, tmp_path, cap):
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        path = rewrite(valid("gemma2"), tmp_path / f"{key}.gguf", {f".{key}": f32(cap)})
        refused(path, FormatError, key)


def test_layers_and_tensors_disagree(valid, tmp_path):
    path = rewrite(valid("llama"), tmp_path / "more.gguf", {".block_count": u32(3)})
    refused(path, FormatError, "blk.2.", "missing")
    path = rewrite(valid("llama"), tmp_path / "fewer.gguf", {".block_count": u32(1)})
    refused(path, UnsupportedError, "blk.1.")


@pytest.mark.parametrize("arch", tinymodels.ARCHS)
def test_every_tensor_is_needed(valid, tmp_path, arch):
    names = [tensor.name for tensor in GGUFReader(valid(arch)).tensors]
    for name in names:
        if name.startswith("blk.0."):
            continue  # as blk.1.
        path = rewrite(valid(arch), tmp_path / "bad.gguf", tensors={name: None})
        if name == "output.weight":  # then the head is the embedding
            minfer.load(path, threads=1).close()
        else:
            refused(path, FormatError, name, "missing")


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.attn_q_norm.weight",
        "blk.0.ffn_gate_inp.weight",
        "blk.2.attn_q.weight",
        "blk.00.attn_q.weight",
        "blk.+1.attn_q.weight",
        "blk.4294967296.attn_q.weight",
        "blk.18446744073709551616.attn_q.weight",
        "blk.attn_q.weight",
        "blk.1.attn_q.weigh",
        "x",
    ],
)
def test_extra_tensors(valid, tmp_path, name):
    path = rewrite(valid("llama"), tmp_path / "bad.gguf", tensors={name: floats(32, 32)})
    with pytest.raises(UnsupportedError) as caught:
        minfer.load(path, threads=1)
    assert f"tensor {name} " in str(caught.value) and str(path) in str(caught.value)


BAD_TENSORS = [
    ("llama", "token_embd.weight", floats(31, 24), FormatError),
    ("llama", "token_embd.weight", floats(32), FormatError),
    ("llama", "token_embd.weight", floats(32, 25), FormatError),
    ("llama", "token_embd.weight", floats(32, 12, 2), FormatError),
    ("llama", "output.weight", floats(32, 23), FormatError),
    ("llama", "output_norm.weight", floats(31), FormatError),
    ("llama", "output_norm.weight", floats(32, 2), FormatError),
    ("llama", "output_norm.weight", floats(1, 32), FormatError),
    ("llama", "output_norm.weight", blocks("Q4_0", 18), UnsupportedError),
    ("llama", "output_norm.weight", blocks("Q8_0", 34), UnsupportedError),
    ("llama", "output_norm.weight", (np.ones(32, np.int32), None), UnsupportedError),
    ("llama", "output_norm.weight", (np.ones(32, np.float64), None), UnsupportedError),
    ("llama", "blk.1.attn_norm.weight", floats(16), FormatError),
    ("llama", "blk.1.attn_q.weight", floats(32, 16), FormatError),
    ("llama", "blk.1.attn_q.weight", (np.ones((32, 32), np.int8), None), UnsupportedError),
    ("llama", "blk.1.attn_k.weight", floats(32, 32), FormatError),
    ("llama", "blk.1.attn_v.weight", floats(16, 32), FormatError),
    ("llama", "blk.1.attn_output.weight", floats(32, 31), FormatError),
    ("llama", "blk.1.ffn_gate.weight", floats(32, 63), FormatError),
    ("llama", "blk.1.ffn_up.weight", floats(64, 32), FormatError),
    ("llama", "blk.1.ffn_down.weight", floats(32, 64), FormatError),
    ("llama", "blk.1.attn_q.bias", floats(31), FormatError),
    ("llama", "rope_freqs.weight", floats(7), FormatError),
    ("llama", "rope_freqs.weight", (np.ones(8, np.float16), None), UnsupportedError),
    ("llama", "rope_freqs.weight", (np.zeros(8, np.float32), None), FormatError),
    ("llama", "rope_freqs.weight", (np.full(8, np.nan, np.float32), None), FormatError),
    ("llama", "rope_freqs.weight", (np.full(8, -1, np.float32), None), FormatError),
    ("llama", "rope_factors_long.weight", floats(8), FormatError),
    ("llama", "rope_factors_short.weight", floats(8), FormatError),
    ("qwen2", "blk.1.attn_k.bias", blocks("Q4_0", 18), FormatError),
    ("qwen2", "blk.1.attn_q.bias", blocks("Q4_0", 18), UnsupportedError),
    ("qwen3", "blk.1.attn_q_norm.weight", floats(32), FormatError),
    ("olmo2", "blk.1.attn_k_norm.weight", floats(32), FormatError),
    ("phi3", "blk.1.attn_qkv.weight", floats(32, 63), FormatError),
    ("phi3", "blk.1.ffn_up.weight", floats(32, 64), FormatError),
    ("phi3", "blk.1.attn_q.weight", floats(32, 32), UnsupportedError),
    ("gemma3", "blk.1.post_ffw_norm.weight", floats(64), FormatError),
]  # fmt: skip


@pytest.mark.parametrize(
    "arch, name, tensor, error", BAD_TENSORS, ids=[f"{i}-{row[1]}" for i, row in enumerate(BAD_TENSORS)]
)
def test_bad_tensors(valid, tmp_path, arch, name, tensor, error):
    path = rewrite(valid(arch), tmp_path / "bad.gguf", tensors={name: tensor})
    refused(path, error, name if "factors" not in name else "rope_factors")


def test_two_kinds_of_rope_factors(valid, tmp_path):
    names = ("rope_freqs", "rope_factors_long", "rope_factors_short")
    tensors = {f"{name}.weight": floats(8) for name in names}
    path = rewrite(valid("llama"), tmp_path / "bad.gguf", tensors=tensors)
    refused(path, UnsupportedError, "rope_freqs.weight", "rope_factors_long.weight")


def test_columns_that_are_not_whole_blocks(tmp_path):
    shape = SMALL | dict(n_embd=64, head_dim=32)
    path = tinymodels.write(tmp_path / "bad.gguf", "llama", "Q4_0", **shape)
    data = bytearray(path.read_bytes())
    name = b"blk.1.attn_q.weight"
    at = data.index(name) + len(name) + 4
    assert data[at : at + 8] == (64).to_bytes(8, "little")
    data[at : at + 8] = (48).to_bytes(8, "little")
    path.write_bytes(data)
    refused(path, FormatError, name.decode(), "48", "32")


# ---- odd, but a model ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arch, keys",
    [
        ("llama", {".attention.head_count_kv": array([1, 1])}),
        ("llama", {".attention.head_count_kv": (1, V.INT8, None)}),
        ("llama", {".block_count": (2, V.UINT64, None)}),
        ("llama", {".expert_count": u32(0)}),
        ("llama", {".rope.scaling.type": text("none"), ".rope.scaling.factor": f32(8.0)}),
        ("llama", {".rope.freq_base": (1.0, V.FLOAT64, None), ".rope.scaling.type": text("yarn")}),
        ("llama", {"general.name": None, "tokenizer.ggml.tokens": None}),
        ("llama", {".context_length": u32(1)}),
        ("llama", {".context_length": u32(2**24)}),
        ("mistral", {".attention.sliding_window": u32(0)}),
        ("mistral", {".attention.sliding_window": u32(2**32 - 1)}),
        ("mistral", {".attention.sliding_window": u32(1)}),
        ("gemma3", {".attention.sliding_window_pattern": u32(1)}),
        ("gemma3", {".attention.sliding_window_pattern": u32(1024)}),
    ],
)
def test_odd_models_load(valid, tmp_path, arch, keys):
    with minfer.load(rewrite(valid(arch), tmp_path / "odd.gguf", keys), threads=1) as engine:
        assert np.isfinite(engine.forward_cached([1])).all()
        window = keys.get(".attention.sliding_window", u32(8))[0]
        sliding = any(kind.startswith("sliding") for kind in engine.kv.kinds())
        assert sliding == (arch == "gemma3" or (arch == "mistral" and window > 0))


# ---- weights that are no numbers ---------------------------------------------------------------


def wild(weight_type, tensor):
    """The bytes of a matrix with a NaN, an infinite and a largest scale in three rows."""
    data = np.array(tensor.data)
    if weight_type == "BF16":
        data.view(np.uint16)[:3, 0] = [0x7FC1, 0xFF80, 0x7F7F]
    elif weight_type in tinymodels.FLOAT_TYPES:
        data[:3, 0] = [np.nan, -np.inf, np.finfo(data.dtype).max]
    elif weight_type == "MXFP4":
        data[:3, 0] = [255, 254, 0]
    else:
        for offset, _ in SCALES[weight_type]:
            scales = np.array([np.nan, -np.inf, np.finfo(np.float16).max], np.float16)
            data[:3, offset : offset + 2] = scales.view(np.uint8).reshape(3, 2)
    return data


@pytest.mark.parametrize("weight_type", tinymodels.WEIGHT_TYPES)
@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.attn_v.weight", "blk.0.ffn_down.weight"])
def test_wild_weights(tmp_path, weight_type, name):
    shape = dict(n_layer=1, n_vocab=24, n_ctx=64)
    source = tinymodels.write(tmp_path / "tiny.gguf", "gemma2", weight_type, **shape)
    (tensor,) = [tensor for tensor in GGUFReader(source).tensors if tensor.name == name]
    path = rewrite(
        source, tmp_path / "wild.gguf", tensors={name: (wild(weight_type, tensor), tensor.tensor_type)}
    )
    expected = None
    for isa in minfer.isas():
        with minfer.load(path, isa=isa, threads=2) as engine:
            logits = engine.forward_cached([3, 1, 0, 2, 9], logits="all")
        expected = logits if expected is None else expected
        assert logits.tobytes() == expected.tobytes()
    bits = expected[np.isnan(expected)].view(np.uint32)
    assert len(bits) > 0 and set(bits) == {0x7FC00000}


@pytest.mark.parametrize("arch", ["olmo2", "qwen2", "qwen3"])
def test_a_window_that_would_not_be_used_is_refused(tmp_path, arch):
    source = tinymodels.write(tmp_path / "m.gguf", arch)
    path = rewrite(source, tmp_path / "w.gguf", {".attention.sliding_window": u32(8)})
    refused(path, UnsupportedError, f"{arch}.attention.sliding_window", "8")
    whole = rewrite(source, tmp_path / "whole.gguf", {".attention.sliding_window": u32(512)})
    minfer.load(whole, threads=1).close()  # as long as the context: no window


def test_older_name_of_the_rope_factor(tmp_path):
    new = tinymodels.write(tmp_path / "new.gguf", "llama", rope_scaling="linear", rope_factor=4.0)
    old = rewrite(
        new,
        tmp_path / "old.gguf",
        {".rope.scaling.type": None, ".rope.scaling.factor": None, ".rope.scale_linear": (4.0, V.FLOAT32, None)},
    )
    with minfer.load(new) as a, minfer.load(old) as b:
        assert a.forward_cached(range(20)).tobytes() == b.forward_cached(range(20)).tobytes()


def test_attention_scale(tmp_path):
    source = tinymodels.write(tmp_path / "m.gguf", "llama")
    with minfer.load(source) as engine:
        expected = engine.forward_cached(range(9)).tobytes()
    for scale, same in ((0.25, True), (0.5, False)):  # 1 / sqrt(16)
        path = rewrite(source, tmp_path / f"{scale}.gguf", {".attention.scale": (scale, V.FLOAT32, None)})
        with minfer.load(path) as engine:
            assert (engine.forward_cached(range(9)).tobytes() == expected) == same


def test_longrope_factors_are_part_of_the_kind(tmp_path):
    """n_ctx chooses them, so it must show in the identity of K rows, and the short ones end with their context."""
    longrope = dict(rope_scaling="longrope", rope_original_ctx=32, window=8)
    path = tinymodels.write(tmp_path / "m.gguf", "phi3", **longrope)
    with minfer.load(path, n_ctx=32) as short, minfer.load(path, n_ctx=64) as long:
        assert short.kv.kinds()[0].endswith("/rope-short") and long.kv.kinds()[0].endswith("/rope-long")
        short.forward_cached(range(30))
        with pytest.raises(minfer.KvRangeError, match="32"):
            short.forward_cached(range(3))
        assert short.kv.len(0) == 30
        short.forward_cached(range(2))
        long.forward_cached(range(60))


def test_gemma2_has_a_window_even_if_the_file_is_silent(tmp_path):
    path = tinymodels.write(tmp_path / "m.gguf", "gemma2", window=0)
    with minfer.load(path) as engine:
        assert engine.kv.kinds()[0].startswith("sliding-4096/")
