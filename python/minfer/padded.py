"""Padded batches: what an array [B, L] of token ids with padding says, as ragged rows.

Owns the judgement of the arguments of Engine.forward_padded. Pads exist only here: they take no
cell and no attention, because no chunk contains them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from minfer._ffi import brief, ffi, integer, token_array, token_types
from minfer.errors import ArgumentError, ArgumentTypeError


class Row(NamedTuple):
    """The tokens ids[row, first : first + len(tokens)], the next ones of a sequence."""

    row: int
    first: int
    seq: int
    tokens: np.ndarray  # int32, at least one


def rows_of(ids, left_padding, right_padding, seqs, n_seq: int, n_vocab: int):
    """(B, L, the rows that have tokens)."""
    length, rows = _rows(ids)
    left = _per_row("left_padding", left_padding, len(rows), length)
    right = _per_row("right_padding", right_padding, len(rows), length)
    if seqs is None and len(rows) > n_seq:
        raise ArgumentError(
            f"ids has {len(rows)} rows; this engine has {n_seq} sequences (n_seq at load raises it)"
        )
    seqs = range(len(rows)) if seqs is None else _per_row("seqs", seqs, len(rows), n_seq - 1)
    of: dict[int, int] = {}
    for b, seq in enumerate(seqs):
        if of.setdefault(seq, b) != b:
            raise ArgumentError(f"seqs: rows {of[seq]} and {b} are both of sequence {seq}")
    found = []
    for b, (row, lo, pads, seq) in enumerate(zip(rows, left, right, seqs)):
        hi = length - pads
        if lo > hi:
            raise ArgumentError(
                f"row {b}: left_padding {lo} and right_padding {pads} exceed its {length} ids"
            )
        tokens = token_array(f"ids[{b}]", row[lo:hi])
        if tokens.size and (worst := int(tokens.max())) >= n_vocab:
            raise ArgumentError(f"ids[{b}]: token {worst} is outside [0, {n_vocab})")
        if tokens.size:
            found.append(Row(b, lo, seq, tokens))
    return len(rows), length, found


def spread(out: np.ndarray, rows: list[Row]) -> None:
    """Moves the logits of all tokens, one behind the other from the start of `out` [B, L, n_vocab],
    to where their tokens are, in place; fills the rest with zeros."""
    flat, length = out.reshape(-1, out.shape[2]), out.shape[1]
    source = sum(row.tokens.size for row in rows)
    end = len(flat)
    for row in reversed(rows):  # each moves up or stays: the last first overwrites none to come
        n = row.tokens.size
        source -= n
        to = row.row * length + row.first
        if to != source:
            target, logits = flat[to : to + n], flat[source : source + n]
            ffi.memmove(target, logits, logits.nbytes)
        flat[to + n : end] = 0
        end = to
    flat[:end] = 0


def _rows(ids) -> tuple[int, Sequence]:
    """(L, the rows), each of L integers; the values are not looked at, they may be pads."""
    if isinstance(ids, np.ndarray):
        if ids.dtype.kind not in "iu":
            raise ArgumentTypeError(f"ids must be integers, not an array of {ids.dtype}")
        if ids.ndim != 2:
            raise ArgumentError(f"ids must be of shape [B, L], not {list(ids.shape)}")
        return ids.shape[1], ids
    if not isinstance(ids, (list, tuple)):
        raise ArgumentTypeError(f"ids must be an array [B, L] of integers, not {brief(ids)}")
    for b, row in enumerate(ids):
        if not isinstance(row, (list, tuple, range, np.ndarray)):
            raise ArgumentTypeError(f"ids[{b}] must be a list of integers, not {brief(row)}")
        if len(row) != len(ids[0]):
            raise ArgumentError(
                f"ids[{b}] has {len(row)} ids and ids[0] {len(ids[0])}; pad the shorter rows"
            )
        token_types(f"ids[{b}]", row)
    return len(ids[0]) if ids else 0, ids


def _per_row(name: str, values, n: int, high: int) -> list[int]:
    """One integer in [0, high] for each of n rows; None is all zeros."""
    if values is None:
        return [0] * n
    if not isinstance(values, (list, tuple, range, np.ndarray)):
        raise ArgumentTypeError(f"{name} must be a list of integers, not {brief(values)}")
    if getattr(values, "ndim", 1) != 1 or len(values) != n:
        raise ArgumentError(f"{name} must have a number for each of {n} rows, not {brief(values)}")
    return [integer(f"{name}[{b}]", value, 0, high) for b, value in enumerate(values)]
