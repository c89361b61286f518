"""The reference model: what a GGUF file means, in float64 and in the plainest form.

Owns the definition that the engine is tested against. One sequence at a time, no cache, no batch,
every position computed anew by each call; a line of arithmetic is a line of code. Refuses an
architecture it has no row for and a file that lacks a key or tensor it needs (KeyError).

Nothing is rounded on the way except the weights, which are what the file's blocks say. With
`act_int8=True` activations are also rounded as the CPU backend rounds them: to int8 with one scale
per 32 elements, before each product with a quantised weight. That is the one big difference
between an exact engine and ours, so against this variant the engine has to be right to a few 1e-6.

Shapes: T tokens, E = n_embd, H query heads, K key/value heads, D = head_dim, F = n_ff, V = n_vocab.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

REAL = np.float64
EXACT_TYPES = {GGMLQuantizationType[t] for t in ("F32", "F16", "BF16")}
HEAD_CHUNK = 16384  # rows of the output matrix that are widened to float64 at a time


@dataclass(frozen=True)
class Traits:
    """What an architecture is, apart from its sizes."""

    norms: str = "before"  # of attention and of the feed-forward: "before", "after" or "both"
    qk_norm: str = "none"  # "head": over each head's D values; "row": over all H*D (or K*D)
    rope: str = "halves"  # rotated pairs: "halves" (i, i + n/2) or "neighbours" (2i, 2i + 1)
    glu: str = "silu"  # or "gelu_tanh"
    scale_embedding: bool = False  # by sqrt(E)
    windowed: Callable[[int], bool] = lambda layer: False  # if the file gives a window at all
    window_rope_base: float | None = None  # of windowed layers, which then ignore rope scaling too
    # Models of this many layers divide scores by sqrt(E / H), all others by sqrt(D).
    layers_scaled_by_width: int = 0


ARCHITECTURES = {
    "gemma3": Traits(
        norms="both",
        qk_norm="head",
        glu="gelu_tanh",
        scale_embedding=True,
        windowed=lambda layer: layer % 6 != 5,
        window_rope_base=10000.0,
        layers_scaled_by_width=62,
    ),
    "gemma2": Traits(
        norms="both",
        glu="gelu_tanh",
        scale_embedding=True,
        windowed=lambda layer: layer % 2 == 0,
        layers_scaled_by_width=46,
    ),
    # Also SmolLM and, by this name too, Mistral. A window that the file gives is used: the model was
    # trained with it (llama.cpp leaves it out here and for phi3).
    "llama": Traits(rope="neighbours", windowed=lambda layer: True),
    "mistral": Traits(rope="neighbours", windowed=lambda layer: True),
    "qwen2": Traits(),
    "qwen3": Traits(qk_norm="head"),
    "phi3": Traits(windowed=lambda layer: True),
    "olmo2": Traits(norms="after", qk_norm="row"),
}


@dataclass(frozen=True)
class Config:
    """A model's sizes and constants, as its file gives them."""

    arch: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int
    n_ctx_train: int
    eps: float
    window: int  # keys a query sees in a windowed layer, itself included; 0: no layer is windowed
    attn_softcap: float  # 0: none
    final_softcap: float  # 0: none
    rope_dim: int  # the first so many values of each head are rotated
    rope_base: float
    rope_scaling: str  # "none", "linear", "yarn" or "longrope"
    rope_factor: float
    rope_original_ctx: int
    rope_attn_factor: float
    rope_beta_fast: float
    rope_beta_slow: float


class Reference:
    """A GGUF file that can be evaluated. `config` has its sizes."""

    def __init__(self, path, act_int8=False, n_ctx=None):
        """`n_ctx`: the context the engine is loaded with (default: the file's). It selects
        one of the two frequency tables of a longrope model and matters for nothing else."""
        reader = GGUFReader(path)
        self._tensors = {t.name: t for t in reader.tensors}
        self._dequantized = {}
        self.config = read_config(reader, self._tensors)
        self.traits = ARCHITECTURES[self.config.arch]
        self.act_int8 = act_int8
        self.n_ctx = n_ctx or self.config.n_ctx_train

    def logits(self, tokens, rows=None, positions=None):
        """float64 [len(rows), V]: the logits after each token in `rows` (default: all). `positions`
        [T] of the tokens: 0, 1, ... unless some were moved."""
        c = self.config
        tokens = np.asarray(tokens)
        self._positions = np.arange(len(tokens)) if positions is None else np.asarray(positions)
        x = self._table("token_embd.weight")[tokens].astype(REAL)  # [T, E]
        if self.traits.scale_embedding:
            x = x * REAL(np.sqrt(c.n_embd))
        for layer in range(c.n_layer):
            x = x + self._branch(x, layer, "attn_norm", self._attention, "post_attention_norm")
            x = x + self._branch(x, layer, "ffn_norm", self._feed_forward, "post_ffw_norm")
        x = x if rows is None else x[rows]
        x = self._norm(x, "output_norm.weight")
        head = "output.weight" if "output.weight" in self._tensors else "token_embd.weight"
        logits = self._linear(x, head)
        if c.final_softcap:
            logits = c.final_softcap * np.tanh(logits / c.final_softcap)
        return logits

    # ---- one layer ---------------------------------------------------------------------------

    def _branch(self, x, layer, norm_before, block, norm_after):
        """What a block adds to the residual x [T, E]."""
        norms = self.traits.norms
        if norms in ("before", "both"):
            x = self._norm(x, f"blk.{layer}.{norm_before}.weight")
        y = block(x, layer)
        if norms in ("after", "both"):
            y = self._norm(y, f"blk.{layer}.{norm_after}.weight")
        return y

    def _attention(self, x, layer):
        c, name = self.config, f"blk.{layer}."
        q_width, kv_width = c.n_head * c.head_dim, c.n_head_kv * c.head_dim
        if name + "attn_qkv.weight" in self._tensors:
            qkv = self._linear(x, name + "attn_qkv.weight")
            q, k, v = np.split(qkv, [q_width, q_width + kv_width], axis=1)
        else:
            q = self._linear(x, name + "attn_q.weight")  # [T, H*D]
            k = self._linear(x, name + "attn_k.weight")  # [T, K*D]
            v = self._linear(x, name + "attn_v.weight")  # [T, K*D]

        if self.traits.qk_norm == "row":
            q = self._norm(q, name + "attn_q_norm.weight")
            k = self._norm(k, name + "attn_k_norm.weight")
        q = q.reshape(-1, c.n_head, c.head_dim)
        k = k.reshape(-1, c.n_head_kv, c.head_dim)
        v = v.reshape(-1, c.n_head_kv, c.head_dim)
        if self.traits.qk_norm == "head":
            q = self._norm(q, name + "attn_q_norm.weight")
            k = self._norm(k, name + "attn_k_norm.weight")
        q, k = self._rope(q, layer), self._rope(k, layer)

        position = self._positions
        distance = position[:, None] - position[None, :]  # [T queries, T keys]
        visible = distance >= 0
        if self._is_windowed(layer):
            visible &= distance < c.window

        by_width = c.n_layer == self.traits.layers_scaled_by_width
        scale = 1 / np.sqrt(c.n_embd / c.n_head if by_width else c.head_dim)
        out = np.empty_like(q)
        for head in range(c.n_head):
            kv_head = head // (c.n_head // c.n_head_kv)
            scores = q[:, head] @ k[:, kv_head].T * REAL(scale)
            if c.attn_softcap:
                scores = c.attn_softcap * np.tanh(scores / c.attn_softcap)
            out[:, head] = softmax(np.where(visible, scores, -np.inf)) @ v[:, kv_head]
        return self._linear(out.reshape(-1, q_width), name + "attn_output.weight")

    def _feed_forward(self, x, layer):
        name = f"blk.{layer}."
        up = self._linear(x, name + "ffn_up.weight")
        if name + "ffn_gate.weight" in self._tensors:
            gate = self._linear(x, name + "ffn_gate.weight")
        else:
            gate, up = np.split(up, 2, axis=1)
        act = silu if self.traits.glu == "silu" else gelu_tanh
        return self._linear(act(gate) * up, name + "ffn_down.weight")

    # ---- pieces ------------------------------------------------------------------------------

    def _is_windowed(self, layer):
        return self.config.window > 0 and self.traits.windowed(layer)

    def _rope(self, x, layer):
        """Rotates the first rope_dim values of each head of x [T, heads, D], in pairs."""
        n = self.config.rope_dim
        frequency, magnitude = self._rope_frequencies(layer)  # [n/2]
        angle = self._positions[:, None, None] * frequency  # [T, 1, n/2]
        cos, sin = (magnitude * f(angle).astype(REAL) for f in (np.cos, np.sin))
        if self.traits.rope == "halves":
            first, second = slice(0, n // 2), slice(n // 2, n)
        else:
            first, second = slice(0, n, 2), slice(1, n, 2)
        a, b = x[..., first], x[..., second]
        y = x.copy()
        y[..., first] = a * cos - b * sin
        y[..., second] = a * sin + b * cos
        return y

    def _rope_frequencies(self, layer):
        """Radians per position of each pair, [rope_dim / 2], and a factor of the rotated values."""
        c = self.config
        local = self.traits.window_rope_base is not None and self._is_windowed(layer)
        base = self.traits.window_rope_base if local else c.rope_base
        pair = np.arange(c.rope_dim // 2)
        frequency = base ** (-2.0 * pair / c.rope_dim)
        if local:
            return frequency, 1.0

        if "rope_freqs.weight" in self._tensors:
            frequency = frequency / self._table("rope_freqs.weight")
        elif "rope_factors_long.weight" in self._tensors:
            which = "long" if self.n_ctx > c.rope_original_ctx else "short"
            frequency = frequency / self._table(f"rope_factors_{which}.weight")

        if c.rope_scaling == "linear":
            return frequency / c.rope_factor, c.rope_attn_factor
        if c.rope_scaling == "yarn":
            # Pairs that turn beta_fast times or more within the original context keep their
            # frequency, those that turn beta_slow times or fewer are stretched by the factor, and
            # those between are mixed linearly in the pair's number.
            def pair_turning(times):
                per_turn = c.rope_original_ctx / (times * 2 * np.pi)
                return c.rope_dim * np.log(per_turn) / (2 * np.log(base))

            low = max(np.floor(pair_turning(c.rope_beta_fast)), 0)
            high = min(np.ceil(pair_turning(c.rope_beta_slow)), c.rope_dim - 1)
            stretched = np.clip((pair - low) / max(high - low, 0.001), 0, 1)
            frequency = frequency * (1 - stretched) + frequency / c.rope_factor * stretched
            return frequency, c.rope_attn_factor * (1 + 0.1 * np.log(c.rope_factor))
        return frequency, c.rope_attn_factor

    def _norm(self, x, name):
        """RMS norm over the last axis."""
        mean_square = (x * x).mean(axis=-1, keepdims=True)
        return x / np.sqrt(mean_square + REAL(self.config.eps)) * self._table(name).astype(REAL)

    def _linear(self, x, name):
        """x [T, n_in] times a weight [n_out, n_in], plus its bias if the file has one."""
        if self.act_int8 and self._tensors[name].tensor_type not in EXACT_TYPES:
            x = through_int8(x)
        weight = self._table(name)
        y = np.empty((len(x), len(weight)), REAL)
        for row in range(0, len(weight), HEAD_CHUNK):
            y[:, row : row + HEAD_CHUNK] = x @ weight[row : row + HEAD_CHUNK].astype(REAL).T
        bias = name.removesuffix("weight") + "bias"
        return y + self._table(bias).astype(REAL) if bias in self._tensors else y

    def _table(self, name):
        """A tensor as float32, exactly as stored; kept, because Gemma's largest takes seconds."""
        if name not in self._dequantized:
            tensor = self._tensors[name]
            data = tensor.data  # [rows, bytes or values], or [values]
            shape = [int(n) for n in reversed(tensor.shape)]
            if data.ndim == 2 and len(data) % 64 == 0:
                # gguf works on 16 rows at a time; with longer rows it is four times as fast.
                data = data.reshape(-1, 64 * data.shape[1])
            self._dequantized[name] = dequantize(data, tensor.tensor_type).reshape(shape)
        return self._dequantized[name]


def softmax(scores):
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def silu(x):
    return x / (1 + np.exp(-x))


def gelu_tanh(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi).astype(REAL) * (x + 0.044715 * x**3)))


def through_int8(x):
    """x [T, n] to int8 and back: per 32 values d = amax / 127, q = x / d to nearest, ties to even.

    In float32 like the kernel it stands for, so that both decide the same way near a half.
    """
    blocks = np.asarray(x, np.float32).reshape(len(x), -1, 32)
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    nonzero = amax >= np.float32(2.0**-100)
    inverse = np.divide(np.float32(127), amax, out=np.zeros_like(amax), where=nonzero)
    d = np.where(nonzero, amax / np.float32(127), np.float32(0))
    return (np.rint(blocks * inverse).astype(REAL) * d).reshape(x.shape)


def read_config(reader, tensors):
    """Config from the metadata of an open GGUFReader."""
    arch = reader.fields["general.architecture"].contents()
    if arch not in ARCHITECTURES:
        raise KeyError(f"no reference for the architecture {arch!r}")

    required = object()

    def key(name, default=required):
        field = reader.fields.get(f"{arch}.{name}")
        if field is None and default is required:
            raise KeyError(f"{arch}.{name} is missing")
        return default if field is None else field.contents()

    n_embd, n_head = key("embedding_length"), key("attention.head_count")
    head_dim = key("attention.key_length", n_embd // n_head)
    factor = key("rope.scaling.factor", 1.0)
    return Config(
        arch=arch,
        n_layer=key("block_count"),
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=key("attention.head_count_kv", n_head),
        head_dim=head_dim,
        n_ff=key("feed_forward_length"),
        n_vocab=int(tensors["token_embd.weight"].shape[1]),
        n_ctx_train=key("context_length"),
        eps=key("attention.layer_norm_rms_epsilon"),
        window=key("attention.sliding_window", 0),
        attn_softcap=key("attn_logit_softcapping", 0.0),
        final_softcap=key("final_logit_softcapping", 0.0),
        rope_dim=key("rope.dimension_count", head_dim),
        rope_base=key("rope.freq_base", 10000.0),
        # A factor without a type is from the days when linear was the only one.
        rope_scaling=key("rope.scaling.type", "linear" if factor != 1.0 else "none"),
        rope_factor=factor,
        rope_original_ctx=key("rope.scaling.original_context_length", key("context_length")),
        rope_attn_factor=key("rope.scaling.attn_factor", 1.0),
        rope_beta_fast=key("rope.scaling.yarn_beta_fast", 32.0),
        rope_beta_slow=key("rope.scaling.yarn_beta_slow", 1.0),
    )
