"""Picking a token from logits; the arithmetic is in C."""

import numpy as np

from minfer._ffi import check, ffi, integer, lib, options, real

PENALTY_WINDOW = 64  # tokens that the repeat penalty looks back on
_INT32_MIN, _INT32_MAX = -(2**31), 2**31 - 1


class Sampling:
    """How to pick: temperature (0: the largest logit), top_k (0: off), top_p (1: off), min_p (0:
    off), repeat_penalty (1: off), seed, and `choice`, which tells several answers to one prompt
    apart.

    ArgumentError for values out of range, judged once here by the C library.
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
            top_k=integer("top_k", top_k, _INT32_MIN, _INT32_MAX),
            top_p=real("top_p", top_p),
            min_p=real("min_p", min_p),
            repeat_penalty=real("repeat_penalty", repeat_penalty),
            seed=integer("seed", seed, 0, 2**64 - 1),
            choice=integer("choice", choice, 0, 2**64 - 1),
        )
        self.pick(np.zeros(1, np.float32), position=0)

    def pick(self, logits: np.ndarray, position: int, recent=()) -> int:
        """A token for float32 logits [n_vocab]; a pure function of its arguments and the seed.

        `position`: the place of the token in its sequence. `recent`: token ids for the penalty.
        """
        values = np.ascontiguousarray(logits, np.float32)
        token = ffi.new("int32_t *")
        check(
            lib.mf_sample(
                token,
                ffi.from_buffer("float[]", values),
                values.size,
                self._options,
                ffi.new("int32_t[]", list(recent)),
                len(recent),
                integer("position", position, 0, 2**64 - 1),
            )
        )
        return token[0]
