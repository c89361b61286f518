"""minfer bench model: a GGUF file with random weights, so that anybody can repeat a benchmark.

Owns the shapes and the types of such files, the bytes of random matrices, and a tokenizer of
filler. What the model says is noise; it is as fast as a trained one of its shape and types. It
refuses a shape whose rows are not whole blocks of the type. The same arguments give the same bytes.

Weights have a standard deviation of 1/sqrt(n_in), so that values keep their size through the
layers. Quantised weights are random blocks, not quantised numbers: every code, sub-scale and
minimum of the format occurs, and only the block's own scale is set to a sane value. Matrices of one
type and row length take their rows from one pool, in turn, each from a row of its own on: a pool is
a few MB, and so a file is written about as fast as the disk is.

The only file that imports gguf.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np

import minfer
from minfer.tools import render
from minfer.tools.conversation import replacing

try:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, TokenType
    from gguf.quants import dequantize, quantize
except ImportError as error:
    raise minfer.UnsupportedError(
        f"writing a model needs gguf ({error}); pip install 'minfer[bench]'"
    ) from None

WEIGHT_TYPES = [
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0",
    "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
]  # fmt: skip
FLOAT_TYPES = WEIGHT_TYPES[:3]
MIXTURE = "Q4_K_M"

POOL = 1 << 21  # weights
MOST_LAYERS = 512  # llama.cpp has no more
MOST = 1 << 24  # of anything else
LEAST_VOCAB = 3 + 256  # special tokens and bytes

# Byte offsets of the float16 scales in a block, and their size relative to the first. The sizes put
# the mean of the random codes near zero: a minimum takes back what the unsigned codes add.
SCALES = {
    "Q4_0": [(0, 1.0)],
    "Q4_1": [(0, 1.0), (2, -7.5)],
    "Q5_0": [(0, 1.0)],
    "Q5_1": [(0, 1.0), (2, -15.5)],
    "Q8_0": [(0, 1.0)],
    "Q2_K": [(80, 1.0), (82, 1.5)],
    "Q3_K": [(108, 1.0)],
    "Q4_K": [(0, 1.0), (2, 7.5)],
    "Q5_K": [(0, 1.0), (2, 15.5)],
    "Q6_K": [(208, 1.0)],
    "IQ4_NL": [(0, 1.0)],
    "IQ4_XS": [(0, 1.0)],
}


@dataclass(frozen=True)
class Shape:
    """Of a llama, or a qwen2 with its biases. The whole numbers can be set on the command line."""

    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int
    n_ctx: int
    arch: str = "llama"
    rope_base: float = 1e4
    eps: float = 1e-5
    tied: bool = False  # the embedding is the output matrix too


SHAPES = {
    "1.1b": Shape(22, 2048, 32, 4, 64, 5632, 32000, 2048),  # TinyLlama
    "0.5b": Shape(24, 896, 14, 2, 64, 4864, 151936, 32768, "qwen2", 1e6, 1e-6, True),  # Qwen2.5
    "tiny": Shape(2, 256, 4, 2, 64, 512, 512, 512),
}
SIZES = [field.name for field in fields(Shape) if field.type is int]


class Tensor(NamedTuple):
    """What is written of it; a norm or a bias has one number in its shape."""

    name: str
    type: str
    shape: tuple[int, ...]  # (n_out, n_in) of a matrix


def main(args) -> int:
    """Runs the subcommand; returns the exit status."""
    if args.shape not in SHAPES:
        raise minfer.ArgumentError(f"no shape {args.shape!r:.40}; there are {', '.join(SHAPES)}")
    sizes = {name: getattr(args, name) for name in SIZES}
    shape = replace(SHAPES[args.shape], **{name: n for name, n in sizes.items() if n is not None})
    if os.path.lexists(args.out):
        raise minfer.ArgumentError(f"{args.out} exists; remove it, or name another file")
    with render.Bar(f"writing {args.out}") as bar:
        write(args.out, shape, args.type, args.seed, lambda *n: bar(f"writing {args.out}", *n))
    print(render.printable(f"{args.out}: {render.size(os.path.getsize(args.out))}"))
    return 0


def write(
    path: str, shape: Shape, weight_type: str, seed: int, progress: Callable[[int, int], None]
) -> None:
    """Writes a model whose matrices are all of one type, or mixed; its vectors are F32.

    Holds a pool of rows of each kind and one tensor; calls progress(bytes written, of how many).
    """
    _check(shape, weight_type, seed)
    tensors = list(_tensors(shape, weight_type))
    total = sum(map(_n_bytes, tensors))
    _check_room(path, total)
    rng, pools, done = np.random.RandomState(seed), {}, 0
    with replacing(path) as file, closing(GGUFWriter(file.name, shape.arch)) as writer:
        writer.add_name(f"random weights, {weight_type}")
        add_metadata(writer, shape)
        add_tokenizer(writer, shape.n_vocab)
        for tensor in tensors:
            qtype = GGMLQuantizationType[tensor.type]
            writer.add_tensor_info(
                tensor.name, tensor.shape, np.dtype(np.float32), _n_bytes(tensor), raw_dtype=qtype
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in tensors:
            writer.write_tensor_data(_values(tensor, rng, pools))
            done += _n_bytes(tensor)
            progress(done, total)


def mixed_type(name: str, n_in: int, n_layer: int, tied: bool) -> str:
    """The type of a matrix in a Q4_K_M file of llama.cpp's.

    The output matrix is of the larger type, and so are attn_v and ffn_down in the first and the
    last eighth of the layers and in every third between; all others are of the smaller. Those are
    Q6_K and Q4_K, or Q8_0 and Q5_0 for rows that are not whole blocks of 256.
    """
    part = name.removesuffix(".weight").rpartition(".")[2]
    larger = part == ("token_embd" if tied else "output")
    if part in ("attn_v", "ffn_down"):
        layer, eighth = int(name.split(".")[1]), n_layer // 8
        larger = layer < eighth or layer >= 7 * n_layer // 8 or (layer - eighth) % 3 == 2
    if n_in % 256:
        return "Q8_0" if larger else "Q5_0"
    return "Q6_K" if larger else "Q4_K"


def random_matrix(
    rng: np.random.RandomState, weight_type: str, n_out: int, n_in: int
) -> np.ndarray:
    """Bytes or floats of a random [n_out, n_in] matrix, in the form that GGUFWriter takes."""
    std = n_in**-0.5
    qtype = GGMLQuantizationType[weight_type]
    if weight_type in FLOAT_TYPES:
        values = (rng.standard_normal((n_out, n_in)) * std).astype(np.float32)
        return quantize(values, qtype)

    n_block, n_bytes = GGML_QUANT_SIZES[qtype]
    blocks = rng.randint(0, 256, (n_out * n_in // n_block, n_bytes), dtype=np.uint8)
    if weight_type == "MXFP4":  # the scale is a power of two: byte e stands for 2^(e - 128)
        blocks[:, 0] = 128 + rng.randint(-1, 2, len(blocks))
        spread = dequantize(blocks, qtype).std()
        blocks[:, 0] += np.int8(round(np.log2(std / spread))).view(np.uint8)
    else:
        jitter = rng.uniform(0.5, 1.5, (len(blocks), 2)) * rng.choice([-1, 1], (len(blocks), 1))
        _set_scales(blocks, weight_type, jitter)
        spread = dequantize(blocks, qtype).std()
        _set_scales(blocks, weight_type, jitter * (std / spread))
    return blocks.reshape(n_out, -1)


def block_size(weight_type: str) -> int:
    """Weights in a block; a row is a whole number of blocks."""
    return GGML_QUANT_SIZES[GGMLQuantizationType[weight_type]][0]


def add_metadata(writer: GGUFWriter, shape: Shape) -> None:
    """The keys that every model has."""
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_vocab_size(shape.n_vocab)


def add_tokenizer(writer: GGUFWriter, n_vocab: int) -> None:
    """SentencePiece style: three special tokens, all bytes if they fit, then pieces, best first."""
    control, byte, normal = TokenType.CONTROL, TokenType.BYTE, TokenType.NORMAL
    vocab = [("<unk>", 0.0, TokenType.UNKNOWN), ("<s>", 0.0, control), ("</s>", 0.0, control)]
    if n_vocab >= LEAST_VOCAB:
        vocab += [(f"<0x{b:02X}>", 0.0, byte) for b in range(256)]
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    pieces = ["▁", *letters, *("▁" + x for x in letters), *"0123456789.,!?'"]
    pieces += ["th", "▁th", "▁the"]
    while len(vocab) < n_vocab:
        rank = len(vocab)
        piece = pieces.pop(0) if pieces else f"piece{rank}"
        vocab.append((piece, -float(rank), normal))
    tokens, scores, types = zip(*vocab[:n_vocab], strict=True)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(list(tokens))
    writer.add_token_scores(list(scores))
    writer.add_token_types([int(t) for t in types])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


def _check(s: Shape, weight_type: str, seed: int) -> None:
    """What would not be found out below; an engine may refuse more."""
    if weight_type not in (*WEIGHT_TYPES, MIXTURE):
        known = ", ".join((*WEIGHT_TYPES, MIXTURE))
        raise minfer.ArgumentError(f"no type {weight_type!r:.40}; there are {known}")
    if seed >= 1 << 32:
        raise minfer.ArgumentError(f"seed {seed}: it must be less than 2^32")
    for name in SIZES:
        most = MOST_LAYERS if name == "n_layer" else MOST
        if getattr(s, name) > most:
            raise minfer.ArgumentError(f"{name} {getattr(s, name)}: at most {most}")
    if s.n_vocab < LEAST_VOCAB:
        raise minfer.ArgumentError(
            f"n_vocab {s.n_vocab}: at least {LEAST_VOCAB}, special tokens and bytes"
        )
    if s.n_head % s.n_head_kv:
        raise minfer.ArgumentError(
            f"n_head {s.n_head} must be a multiple of n_head_kv {s.n_head_kv}"
        )
    if s.head_dim % 2:
        raise minfer.ArgumentError(f"head_dim {s.head_dim} must be even: pairs are rotated")


def _check_room(path: str, total: int) -> None:
    free = shutil.disk_usage(os.path.dirname(path) or ".").free
    if total > free:
        raise minfer.LimitError(
            f"{path} would have {render.size(total)} and {render.size(free)} are free on its disk;"
            " free some, or write it to another"
        )


def _tensors(s: Shape, weight_type: str) -> Iterator[Tensor]:
    """All of the model, in the order in which they are written."""

    def matrix(name: str, n_out: int, n_in: int) -> Tensor:
        mixed = weight_type == MIXTURE
        kind = mixed_type(name, n_in, s.n_layer, s.tied) if mixed else weight_type
        if n_in % block_size(kind):
            raise minfer.ArgumentError(
                f"a row of {name} has {n_in} weights and a block of {kind} {block_size(kind)};"
                " choose another type or shape"
            )
        return Tensor(name, kind, (n_out, n_in))

    def vector(name: str, n: int) -> Tensor:
        return Tensor(name, "F32", (n,))

    q_width, kv_width = s.n_head * s.head_dim, s.n_head_kv * s.head_dim
    yield matrix("token_embd.weight", s.n_vocab, s.n_embd)
    yield vector("output_norm.weight", s.n_embd)
    if not s.tied:
        yield matrix("output.weight", s.n_vocab, s.n_embd)
    for layer in range(s.n_layer):
        b = f"blk.{layer}."
        yield vector(b + "attn_norm.weight", s.n_embd)
        for x, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
            yield matrix(b + f"attn_{x}.weight", width, s.n_embd)
            if s.arch == "qwen2":
                yield vector(b + f"attn_{x}.bias", width)
        yield matrix(b + "attn_output.weight", s.n_embd, q_width)
        yield vector(b + "ffn_norm.weight", s.n_embd)
        yield matrix(b + "ffn_gate.weight", s.n_ff, s.n_embd)
        yield matrix(b + "ffn_up.weight", s.n_ff, s.n_embd)
        yield matrix(b + "ffn_down.weight", s.n_embd, s.n_ff)


def _n_bytes(tensor: Tensor) -> int:
    n_block, n_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.type]]
    return int(np.prod(tensor.shape, dtype=object)) // n_block * n_bytes


def _values(
    tensor: Tensor, rng: np.random.RandomState, pools: dict[tuple[str, int], np.ndarray]
) -> np.ndarray:
    """A matrix of rows of its pool, which it fills at the first use; or a vector."""
    if len(tensor.shape) == 1:
        mean, std = (0.0, 0.3) if tensor.name.endswith(".bias") else (1.0, 0.1)
        return (mean + std * rng.standard_normal(tensor.shape)).astype(np.float32)
    n_out, n_in = tensor.shape
    kind = tensor.type, n_in
    if kind not in pools:
        pools[kind] = random_matrix(rng, tensor.type, max(1, POOL // n_in), n_in)
    pool = pools[kind]
    return pool[(rng.randint(len(pool)) + np.arange(n_out)) % len(pool)]


def _set_scales(blocks: np.ndarray, weight_type: str, sizes: np.ndarray) -> None:
    """blocks [n, bytes], sizes [n, 2]."""
    for (offset, relative), size in zip(SCALES[weight_type], sizes.T):
        scale = (size * relative).astype(np.float16)
        blocks[:, offset : offset + 2] = scale.view(np.uint8).reshape(-1, 2)
