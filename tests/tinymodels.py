"""Tiny random GGUF models for every architecture and every weight type.

Owns the files that the truth, law and hostile-input tests run on: complete models with a tokenizer,
a few hundred KB each, the same bytes for the same arguments. Their shapes are chosen so that what
an engine can get wrong shows: grouped heads, a window of 8 that a short prompt crosses, full and
windowed layers, a vocabulary that is not whole panels of 16 rows.

Weights and tokenizer are those of minfer bench model. The generator is NumPy's frozen one, because
goldens/peer_tiny.npz has logits of the files of seed 0.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

from minfer.tools.bench_model import (
    FLOAT_TYPES,
    WEIGHT_TYPES,
    add_metadata,
    add_tokenizer,
    block_size,
    random_matrix,
)

QUANT_TYPES = [name for name in WEIGHT_TYPES if name not in FLOAT_TYPES]


@dataclass(frozen=True)
class Shape:
    """What `write` can be told about a model; the defaults of an architecture are in ARCHS."""

    n_layer: int = 2
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 16
    n_ff: int = 96
    n_vocab: int = 320
    n_ctx: int = 512
    window: int = 0  # 0: the key is absent
    eps: float = 1e-6
    tied: bool = False  # the embedding is the output matrix too
    biases: bool = False  # of q, k, v
    qk_norm: str = "none"  # "head", "row"
    norms: str = "before"  # "after", "both"
    fused: bool = False  # attn_qkv, and gate and up in ffn_up
    attn_softcap: float = 0.0
    final_softcap: float = 0.0
    rope_dim: int = 0  # 0: the key is absent, all of head_dim is rotated
    rope_base: float = 10000.0
    rope_freqs: bool = False  # a rope_freqs.weight tensor
    rope_scaling: str = ""  # "linear", "yarn", "longrope"
    rope_factor: float = 4.0
    rope_original_ctx: int = 128
    rope_attn_factor: float = 1.0  # 1: the key is absent


_GEMMA = Shape(head_dim=32, tied=True, window=8, norms="both")
# The soft caps are far below Gemma 2's 50 and 30: those a tiny model's scores would not feel.
_ARCH_SHAPES = {
    "gemma3": replace(_GEMMA, n_layer=7, qk_norm="head", rope_base=1e6),
    "gemma2": replace(_GEMMA, n_layer=3, attn_softcap=2.0, final_softcap=3.0),
    "llama": Shape(n_vocab=331),
    "mistral": Shape(window=8),
    "qwen2": Shape(biases=True, rope_base=1e6),
    "qwen3": Shape(head_dim=64, qk_norm="head", tied=True, rope_base=1e6),
    "phi3": Shape(n_embd=128, head_dim=32, rope_dim=24, fused=True),
    "olmo2": Shape(norms="after", qk_norm="row", rope_base=5e5),
}
ARCHS = list(_ARCH_SHAPES)

_LONGROPE = dict(rope_scaling="longrope", rope_attn_factor=1.2)

# What a row of the architecture table leaves open: (name, architecture, overrides).
VARIANTS = [
    ("smollm", "llama", dict(tied=True, n_head=3, n_head_kv=1, n_embd=96, head_dim=32)),
    ("llama-multihead", "llama", dict(n_head_kv=4)),
    ("llama-biases", "llama", dict(biases=True)),
    ("llama-rope_freqs", "llama", dict(rope_freqs=True)),
    ("llama-linear", "llama", dict(rope_scaling="linear")),
    ("llama-yarn", "llama", dict(rope_scaling="yarn", rope_original_ctx=4096)),
    ("llama-yarn-attn_factor", "llama", dict(rope_scaling="yarn", rope_attn_factor=0.8)),
    ("llama-window", "llama", dict(window=8)),
    ("phi3-window", "phi3", dict(window=8)),
    ("mistral-beyond-context", "mistral", dict(n_ctx=8)),
    ("gemma3-window-of-context", "gemma3", dict(n_ctx=8)),
    ("mistral-no-window", "mistral", dict(window=0)),
    ("qwen2-tied", "qwen2", dict(tied=True)),
    ("qwen3-yarn", "qwen3", dict(rope_scaling="yarn")),
    ("qwen3-untied", "qwen3", dict(tied=False)),
    ("phi3-short", "phi3", dict(_LONGROPE, rope_original_ctx=512)),
    ("phi3-long", "phi3", dict(_LONGROPE, rope_original_ctx=64)),
    ("gemma3-linear", "gemma3", dict(rope_scaling="linear", rope_factor=8.0)),
    ("gemma3-27b", "gemma3", dict(n_layer=62)),
    ("gemma2-27b", "gemma2", dict(n_layer=46)),
]  # fmt: skip


def write(path, arch="gemma3", weight_type="F32", seed=0, **overrides):
    """Writes a model and returns its path. `overrides` are fields of Shape.

    `weight_type` is that of every matrix; norms, biases and rope factors are F32, as in real files.
    """
    shape = _ARCH_SHAPES[arch]
    if block_size(weight_type) == 256:  # rows must be whole blocks
        n_head = overrides.get("n_head", shape.n_head)
        shape = replace(shape, n_embd=256, n_ff=256, n_head=n_head, head_dim=256 // n_head)
    shape = replace(shape, **overrides)

    writer = GGUFWriter(path, arch)
    _add_metadata(writer, shape, arch)
    add_tokenizer(writer, shape.n_vocab)
    _add_tensors(writer, shape, weight_type, np.random.RandomState(seed))
    _finish(writer)
    return Path(path)


def write_4k(path, seed=0):
    """A whole llama of about 4 KB, for tests that go over every bit of a file."""
    return write(
        path, "llama", "Q4_0", seed, n_layer=1, n_embd=32, n_head=2, n_head_kv=1, n_ff=32,
        n_vocab=8, n_ctx=64, tied=True,
    )  # fmt: skip


def to_v2(path):
    """Makes a file say version 2, in place: little-endian files of 2 and 3 are laid out alike."""
    with open(path, "r+b") as file:
        file.seek(4)
        file.write((2).to_bytes(4, "little"))
    return Path(path)


def split(path, n):
    """Writes a model again as n files beside it and returns the first one's path.

    The first holds all metadata; each holds a run of the tensors, the number of parts and its own.
    """
    path = Path(path)
    reader = GGUFReader(path)
    arch = reader.fields["general.architecture"].contents()
    runs = np.array_split(np.arange(len(reader.tensors)), n)
    parts = [path.with_name(f"{path.stem}-{i + 1:05}-of-{n:05}.gguf") for i in range(n)]
    for i, (part, run) in enumerate(zip(parts, runs, strict=True)):
        writer = GGUFWriter(part, arch)
        if i == 0:
            _copy_metadata(writer, reader)
        else:
            writer.kv_data[0].clear()
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", n)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in (reader.tensors[t] for t in run):
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        _finish(writer)
    return parts[0]


def _add_metadata(writer, s, arch):
    writer.add_name("tiny random model")
    add_metadata(writer, s)
    if s.rope_dim:
        writer.add_rope_dimension_count(s.rope_dim)
    if s.window:
        writer.add_sliding_window(s.window)
    if s.attn_softcap:
        writer.add_attn_logit_softcapping(s.attn_softcap)
    if s.final_softcap:
        writer.add_final_logit_softcapping(s.final_softcap)
    if s.rope_scaling:
        writer.add_string(f"{arch}.rope.scaling.type", s.rope_scaling)
        writer.add_rope_scaling_orig_ctx_len(s.rope_original_ctx)
        if s.rope_scaling != "longrope":
            writer.add_rope_scaling_factor(s.rope_factor)
    if s.rope_attn_factor != 1.0:
        writer.add_rope_scaling_attn_factors(s.rope_attn_factor)


def _add_tensors(writer, s, weight_type, rng):
    def matrix(name, n_out, n_in):
        data = random_matrix(rng, weight_type, n_out, n_in)
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[weight_type])

    def vector(name, n, mean, std):
        writer.add_tensor(name, (mean + std * rng.standard_normal(n)).astype(np.float32))

    def norm(name, n):
        vector(name, n, 1.0, 0.1)

    def factors(name, n, low, high):
        writer.add_tensor(name, rng.uniform(low, high, n).astype(np.float32))

    q_width, kv_width = s.n_head * s.head_dim, s.n_head_kv * s.head_dim
    n_pairs = (s.rope_dim or s.head_dim) // 2
    matrix("token_embd.weight", s.n_vocab, s.n_embd)
    norm("output_norm.weight", s.n_embd)
    if not s.tied:
        matrix("output.weight", s.n_vocab, s.n_embd)
    if s.rope_freqs:
        factors("rope_freqs.weight", n_pairs, 1.0, 8.0)
    if s.rope_scaling == "longrope":
        factors("rope_factors_short.weight", n_pairs, 1.0, 2.0)
        factors("rope_factors_long.weight", n_pairs, 2.0, 8.0)

    for layer in range(s.n_layer):
        b = f"blk.{layer}."
        if s.norms in ("before", "both"):
            norm(b + "attn_norm.weight", s.n_embd)
            norm(b + "ffn_norm.weight", s.n_embd)
        if s.norms in ("after", "both"):
            norm(b + "post_attention_norm.weight", s.n_embd)
            norm(b + "post_ffw_norm.weight", s.n_embd)
        if s.qk_norm != "none":
            norm(b + "attn_q_norm.weight", s.head_dim if s.qk_norm == "head" else q_width)
            norm(b + "attn_k_norm.weight", s.head_dim if s.qk_norm == "head" else kv_width)
        if s.fused:
            matrix(b + "attn_qkv.weight", q_width + 2 * kv_width, s.n_embd)
        else:
            for x, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
                matrix(b + f"attn_{x}.weight", width, s.n_embd)
                if s.biases:
                    vector(b + f"attn_{x}.bias", width, 0.0, 0.3)
        matrix(b + "attn_output.weight", s.n_embd, q_width)
        if not s.fused:
            matrix(b + "ffn_gate.weight", s.n_ff, s.n_embd)
        matrix(b + "ffn_up.weight", s.n_ff * (2 if s.fused else 1), s.n_embd)
        matrix(b + "ffn_down.weight", s.n_embd, s.n_ff)


def _copy_metadata(writer, reader):
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        sub_type = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)


def _finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
