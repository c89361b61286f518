"""What a measurement asks of the machine: multiply-adds and bytes, and how long they must take at
the machine's limits.

A matrix of integers costs int8 multiply-adds, one of floats and attention f32 ones; the two are
added, since a token needs both one after the other. Every batch reads all matrices once (of the
embedding a row per token, which is nothing, unless it is the output matrix too), and every sequence
its rows of the cache; that and the computing can go on at the same time, so the longer one is the
limit. Rows of q8_0 are multiplied with the query as integers, which is faster than what is counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import minfer

FLOATS = ("F32", "F16", "BF16")


class Group(NamedTuple):
    """Layers of a cache: `window` 0 sees everything."""

    window: int
    n_layers: int
    bytes_per_token: int  # of all layers


@dataclass(frozen=True)
class Limit:
    """The least time that something takes here."""

    seconds: float
    what: str  # "int8", "f32" or "read": what most of it is spent on


@dataclass(frozen=True)
class Work:
    """A model with a cache. Of its matrices, the output matrix apart: multiply-adds of a token and
    bytes."""

    body: Mapping[str, int]  # "int8" and "f32"
    head: Mapping[str, int]
    n_bytes: int  # of all matrices
    attention: int  # multiply-adds of a query with a key, in one layer
    groups: list[Group]

    @classmethod
    def of(cls, file: minfer.GgufFile, groups: list[Group]) -> "Work":
        """Of a model file."""
        body, head, n_bytes = {"int8": 0, "f32": 0}, {"int8": 0, "f32": 0}, 0
        names = {tensor.name for tensor in file.tensors}
        output = "output.weight" if "output.weight" in names else "token_embd.weight"
        for tensor in file.tensors:
            if len(tensor.dims) < 2 or tensor.name == "token_embd.weight" != output:
                continue
            part = head if tensor.name == output else body
            part["f32" if tensor.type in FLOATS else "int8"] += tensor.dims[0] * tensor.dims[1]
            n_bytes += tensor.bytes
        arch = file["general.architecture"]
        n_head = int(file[f"{arch}.attention.head_count"])
        width = int(file.get(f"{arch}.attention.key_length", 0))
        width = width or int(file[f"{arch}.embedding_length"]) // n_head
        return cls(body, head, n_bytes, 2 * n_head * width, groups)

    def limit(
        self, limits: minfer.Limits, first: int, n: int, n_seq: int, n_batch: int, n_outputs: int
    ) -> Limit:
        """Of n tokens of each of n_seq sequences, at positions from `first` on, in n_batch batches
        with n_outputs logits in all."""
        tokens = n * n_seq
        macs = {kind: tokens * self.body[kind] + n_outputs * self.head[kind] for kind in self.body}
        n_bytes = n_batch * self.n_bytes
        for group in self.groups:
            seen = sum(min(p + 1, group.window or p + 1) for p in range(first, first + n)) * n_seq
            macs["f32"] += seen * self.attention * group.n_layers
            # A batch reads the rows that its queries see once.
            n_bytes += seen * group.bytes_per_token * n_batch // n
        seconds = {
            "int8": macs["int8"] / limits.int8_macs,
            "f32": macs["f32"] / limits.f32_fmas,
            "read": n_bytes / limits.read_bytes,
        }
        computing = seconds["int8"] + seconds["f32"]
        if seconds["read"] >= computing:
            return Limit(seconds["read"], "read")
        return Limit(computing, max(("int8", "f32"), key=seconds.__getitem__))


def limits_in_words(limits: Mapping[str, float]) -> str:
    """Those of a machine, by the names that minfer.Limits has for them."""
    return (
        f"{limits['int8_macs'] / 1e9:.0f} G int8 and {limits['f32_fmas'] / 1e9:.0f} G f32"
        f" multiply-adds, {limits['read_bytes'] / 1e9:.1f} GB read per second"
    )


def groups_of(facts: list[Any]) -> list[Group]:
    """From kinds, layers and bytes per token, as an engine says them."""
    out = []
    for kind, n_layers, n_bytes in facts:
        window = kind.partition("/")[0].removeprefix("sliding-")
        out.append(Group(int(window) if window.isdigit() else 0, n_layers, n_bytes))
    return out
