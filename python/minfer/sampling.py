"""Picking a token from logits; the arithmetic is in C."""

import numpy as np

from minfer._ffi import INT32_MAX, check, ffi, integer, lib, options, real, token_array
from minfer.errors import ArgumentError, ArgumentTypeError

PENALTY_WINDOW = 64  # tokens that the repeat penalty looks back on


class Sampling:
    """How to pick: temperature (0: the largest logit), top_k (0: off), top_p (1: off), min_p (0:
    off), repeat_penalty (1: off), seed, and `choice`, which tells several answers to one prompt
    apart.

    ArgumentError for values out of range, judged once here. A top_p or repeat_penalty of 0 is
    refused: C means "off" by it, a reader "hardly anything".
    """

    def __init__(
        self,
        *,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        repeat_penalty: float = 1.0,
        seed: int = 0,
        choice: int = 0,
    ) -> None:
        self._options = options(
            "mf_sampling",
            temperature=real("temperature", temperature),
            top_k=integer("top_k", top_k, 0, INT32_MAX),
            top_p=_not_zero("top_p", top_p, "use 1 for off, or a small value"),
            min_p=real("min_p", min_p),
            repeat_penalty=_not_zero("repeat_penalty", repeat_penalty, "use 1 for off"),
            seed=integer("seed", seed, 0, 2**64 - 1),
            choice=integer("choice", choice, 0, 2**64 - 1),
        )
        self.pick(np.zeros(1, np.float32), position=0)

    def pick(self, logits: np.ndarray, position: int, recent=()) -> int:
        """A token for logits [n_vocab], numbers of any type that are read as float32; a pure
        function of its arguments and the seed.

        `position`: the place of the token in its sequence. `recent`: token ids for the penalty.
        """
        values = _logit_array(logits)
        history = token_array("recent", recent)
        token = ffi.new("int32_t *")
        check(
            lib.mf_sample(
                token,
                ffi.from_buffer("float[]", values),
                values.size,
                self._options,
                ffi.from_buffer("int32_t[]", history),
                history.size,
                integer("position", position, 0, 2**64 - 1),
            )
        )
        return token[0]


def _not_zero(name: str, value, instead: str) -> float:
    number = real(name, value)
    if number == 0:
        raise ArgumentError(f"{name} is 0; {instead}")
    return number


def _logit_array(logits) -> np.ndarray:
    """float32 [n]."""
    try:
        values = np.asarray(logits)
    except ValueError:
        raise ArgumentError("logits must be one-dimensional, not ragged") from None
    if values.dtype.kind not in "fiu":
        raise ArgumentTypeError(f"logits must be an array of numbers, not {logits!r:.60}")
    if values.ndim != 1:
        raise ArgumentError(f"logits must be one-dimensional, not of shape {values.shape}")
    with np.errstate(over="ignore"):  # what float32 cannot hold is infinite
        return np.ascontiguousarray(values, np.float32)
