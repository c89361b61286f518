"""The KV cache of an engine, seen from outside: rows, spans and costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from minfer._ffi import INT32_MAX, UINT32_MAX, check, ffi, integer, lib, options, text

if TYPE_CHECKING:
    from minfer.engine import Engine


class Span(NamedTuple):
    """Positions [pos, pos + len) lie in cells [cell, cell + len)."""

    pos: int
    cell: int
    len: int


class KvGroup(NamedTuple):
    """The layers that share one cell store."""

    kind: str  # "sliding-512/f32/kv1x256"
    n_layers: int
    n_cells: int  # of the arena
    n_used: int  # cells that hold a row
    bytes_per_token: int  # of all layers of the group


class Kv:
    """`engine.kv`. A sequence is a number in [0, n_seq); an unknown one raises ArgumentError."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def len(self, seq: int) -> int:
        """Rows of a sequence."""
        return self._number("uint32_t *", lib.mf_kv_len, seq)

    def next_pos(self, seq: int) -> int:
        """The position that the sequence's next row gets."""
        return self._number("uint32_t *", lib.mf_kv_next_pos, seq)

    def max_trim(self, seq: int) -> int:
        """The largest n such that every trim of at most n rows is accepted now."""
        return self._number("uint32_t *", lib.mf_kv_max_trim, seq)

    def trim(self, seq: int, n: int) -> None:
        """Drops the last n rows in all groups, or raises and drops none.

        KvGoneError: a window has dropped rows that the shorter sequence needs (see max_trim).
        """
        rows = integer("n", n, 0, UINT32_MAX)
        check(lib.mf_kv_trim(self._engine.handle, _seq(seq), rows))

    def free(self, seq: int) -> None:
        """Drops all rows of a sequence, which then starts at position 0 again."""
        check(lib.mf_kv_free(self._engine.handle, _seq(seq)))

    def spans(self, seq: int, group: int = 0) -> list[Span]:
        """Where the rows of a sequence lie in a group, in position order."""
        handle, seq, group = self._engine.handle, _seq(seq), _group(group)
        n = ffi.new("size_t *")
        check(lib.mf_kv_spans(n, ffi.NULL, 0, handle, seq, group))
        spans = ffi.new("mf_kv_span[]", n[0])
        check(lib.mf_kv_spans(n, spans, len(spans), handle, seq, group))
        return [Span(s.pos, s.cell, s.len) for s in spans[0 : n[0]]]

    def kinds(self) -> list[str]:
        """The kind string of every layer, the identity of its storage."""
        groups, number = self.stats(), ffi.new("uint32_t *")
        kinds = []
        for layer in range(self._engine.n_layer):
            check(lib.mf_kv_layer_group(number, self._engine.handle, layer))
            kinds.append(groups[number[0]].kind)
        return kinds

    def bytes_per_token(self) -> dict[str, int]:
        """What one more token of one sequence costs, per kind, in bytes."""
        return {group.kind: group.bytes_per_token for group in self.stats()}

    def stats(self) -> list[KvGroup]:
        """Every group with its cells and costs."""
        handle, groups = self._engine.handle, []
        for i in range(self._engine.n_groups):
            group = options("mf_kv_group")
            check(lib.mf_kv_get_group(group, handle, i))
            groups.append(
                KvGroup(
                    text(group.kind),
                    group.n_layers,
                    group.n_cells,
                    group.n_used,
                    group.bytes_per_token,
                )
            )
        return groups

    def check(self) -> None:
        """Walks every invariant of the cache; InternalError names the broken one."""
        check(lib.mf_kv_check(self._engine.handle))

    def _number(self, ctype: str, call, seq: int) -> int:
        out = ffi.new(ctype)
        check(call(out, self._engine.handle, _seq(seq)))
        return out[0]


def _seq(seq) -> int:
    return integer("seq", seq, 0, INT32_MAX)


def _group(group) -> int:
    return integer("group", group, 0, UINT32_MAX)
