"""The KV cache of an engine, seen from outside: rows, spans, edits and costs.

A row is what one token left in the cache; it has a position, which rotates its K, and lies in a
cell of every group. `len`, `trim`, `max_trim`, `share` and `reserve` count rows; `rm` and `shift`
are in positions. The two differ only after a shift has left a gap. A refused call has changed
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from minfer._ffi import (
    INT32_MAX,
    INT32_MIN,
    UINT32_MAX,
    brief,
    check,
    ffi,
    integer,
    lib,
    options,
    text,
)
from minfer.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from minfer.engine import Engine


class Span(NamedTuple):
    """Positions [pos, pos + len) lie in cells [cell, cell + len)."""

    pos: int
    cell: int
    len: int


class Move(NamedTuple):
    """The rows of cells [src, src + n) of a group go to [dst, dst + n), as memmove does."""

    src: int
    dst: int
    n: int
    group: int = 0


class KvGroup(NamedTuple):
    """The layers that share one cell store, its costs, and how full it is now."""

    kind: str  # "sliding-512/f32/kv1x256"
    n_layers: int
    n_cells: int  # of the arena
    n_used: int  # cells that are not free: they hold a row, or are reserved for one
    bytes_per_token: int  # of all layers of the group
    n_shared: int  # cells that several sequences read
    n_stale: int  # rows of all sequences that are older than their window, and still there
    n_reserved: int  # cells that reserve() holds for rows to come
    n_free_runs: int  # maximal runs of free cells
    largest_run: int  # cells of the longest of them
    compactions: int  # made by a forward, because a sequence lay in too many spans
    generation: int  # changes whenever rows move to other cells: spans are worth reading again

    @property
    def fragmentation(self) -> float:
        """1 - largest_run / free cells; 0.0 if none are free."""
        free = self.n_cells - self.n_used
        return 1.0 - self.largest_run / free if free else 0.0


class Kv:
    """`engine.kv`. A sequence is a number in [0, n_seq); an unknown one raises ArgumentError, as
    does a number out of range; a number of the wrong type raises ArgumentTypeError."""

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
        """Drops the last n rows in all groups, or raises and drops none. Costs O(spans).

        ArgumentError: n is more than it has. KvGoneError: a window has dropped rows that the
        shorter sequence needs (see max_trim).
        """
        rows = integer("n", n, 0, UINT32_MAX)
        check(lib.mf_kv_trim(self._engine.handle, _seq(seq), rows))

    def rm(self, seq: int, p0: int, p1: int) -> None:
        """Cuts positions [p0, p1) out of a sequence: rows there are dropped, later rows move down
        by p1 - p0. Up to next_pos it is a trim.

        Other sequences keep what they read: moved rows that they share are copied first. The rows
        after the cut were computed with the removed tokens in sight, and stay so. Costs a rotation
        of K per moved row and layer.

        ArgumentError: not 0 <= p0 <= p1 <= next_pos. KvGoneError: as for trim. KvFullError: no
        cells for the copies. KvGapsError. UnsupportedError: rows would move and cannot be rotated.
        """
        p0, p1 = _int32("p0", p0), _int32("p1", p1)
        check(lib.mf_kv_rm(self._engine.handle, _seq(seq), p0, p1))

    def shift(self, seq: int, p0: int, delta: int) -> None:
        """Moves the rows at positions >= p0 of a sequence by delta positions; they keep their
        order, and a gap that opens holds no row. Copies and costs as for rm.

        ArgumentError: not 0 <= p0 <= next_pos. KvCollidesError: at or below the row before.
        KvRangeError: a position below 0 or too large. KvGapsError: too many gaps. KvGoneError,
        KvFullError and UnsupportedError as for rm.
        """
        p0, delta = _int32("p0", p0), _int32("delta", delta)
        check(lib.mf_kv_shift(self._engine.handle, _seq(seq), p0, delta))

    def share(self, dst: int, src: int, n: int) -> None:
        """The empty sequence dst becomes the first n rows of src, read in place: no row is copied,
        no cell taken. What either does later stays its own. Costs O(spans), whatever n is.

        ArgumentError: n is more than src has, or dst is src. KvNotEmptyError: dst has rows.
        KvGoneError: a window of src has dropped rows that a sequence of n rows needs.
        """
        dst, src = _int32("dst", dst), _int32("src", src)
        check(lib.mf_kv_share(self._engine.handle, dst, src, integer("n", n, 0, UINT32_MAX)))

    def reserve(self, seq: int, n: int, defrag: bool = False) -> list[Move]:
        """Holds exactly n free cells for the next rows of a sequence, whatever the others do:
        appends use them up, free gives them back, and so does 0. With `defrag` the cells are one
        run: the cache is compacted if it has none, and the moves are returned in the order they
        were made (a holder of cells applies them).

        KvFullError: fewer than n cells are free.
        """
        handle, seq, n = self._engine.handle, _seq(seq), integer("n", n, 0, UINT32_MAX)
        if not isinstance(defrag, bool):
            raise ArgumentTypeError(f"defrag must be True or False, not {brief(defrag)}")
        if defrag:
            return _moves(lib.mf_kv_reserve_with_defrag, handle, seq, n)
        check(lib.mf_kv_reserve(handle, seq, n))
        return []

    def defrag(self, need: int = 0) -> list[Move]:
        """Compacts until each full group has a run of `need` free cells (a sliding one: of n_batch
        at most); 0 closes all holes. Contents do not change. Returns the moves in the order they
        were made. Costs at most a copy of every row.

        KvFullError: a group cannot have that many free cells.
        """
        return _moves(lib.mf_kv_defrag, self._engine.handle, integer("need", need, 0, UINT32_MAX))

    def free(self, seq: int) -> None:
        """Drops all rows of a sequence, and what is reserved for it; it then starts at position 0
        again. Sequences that share its rows keep them."""
        check(lib.mf_kv_free(self._engine.handle, _seq(seq)))

    def spans(self, seq: int, group: int = 0) -> list[Span]:
        """Where the rows of a sequence lie in a group, in position order; rows that a window has
        dropped lie nowhere."""
        handle, seq = self._engine.handle, _seq(seq)
        group = integer("group", group, 0, self._engine.n_groups - 1)
        n, status = ffi.new("size_t *"), lib.MF_ARG
        while status:  # again, if another thread's edit made them more in between
            check(lib.mf_kv_spans(n, ffi.NULL, 0, handle, seq, group))
            spans = ffi.new("mf_kv_span[]", n[0])
            status = lib.mf_kv_spans(n, spans, len(spans), handle, seq, group)
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
        """Every group with its costs and its cells."""
        handle, groups = self._engine.handle, []
        for i in range(self._engine.n_groups):
            group = options("mf_kv_group")
            check(lib.mf_kv_get_group(group, handle, i))
            numbers = (getattr(group, field) for field in KvGroup._fields[1:])
            groups.append(KvGroup(text(group.kind), *numbers))
        return groups

    def check(self) -> None:
        """Walks every invariant of the cache; InternalError names the broken one."""
        check(lib.mf_kv_check(self._engine.handle))

    def _number(self, ctype: str, call, seq: int) -> int:
        out = ffi.new(ctype)
        check(call(out, self._engine.handle, _seq(seq)))
        return out[0]


def order_moves(moves: Iterable[Move | tuple[int, ...]]) -> list[Move]:
    """The moves, cut where needed, in an order in which making them one by one, each as memmove
    does, gives what all of them at once would. Groups are kept apart and come in rising order.

    ArgumentError: a negative cell, n below 1, an end beyond 2**24. KvOverlapError: two moves read
    or write one row. KvCycleError: no order is right.
    """
    if not isinstance(moves, Iterable):
        raise ArgumentTypeError(f"moves must be minfer.Move in a list, not {brief(moves)}")
    moves = list(moves)
    table = ffi.new("mf_kv_move[]", len(moves))
    for i, (row, move) in enumerate(zip(table, moves)):
        if not isinstance(move, tuple):
            raise ArgumentTypeError(f"moves[{i}] must be a Move or a tuple, not {brief(move)}")
        if not 3 <= len(move) <= 4:
            raise ArgumentError(f"moves[{i}] is {brief(move)}; it must be (src, dst, n[, group])")
        for field, value in zip(Move._fields, move):
            setattr(row, field, _int32(f"moves[{i}].{field}", value))
    return _moves(lib.mf_kv_order_moves, table, len(moves))


def _moves(call, *args) -> list[Move]:
    out, n = ffi.new("mf_kv_move **"), ffi.new("size_t *")
    check(call(out, n, *args))
    moves = ffi.gc(out[0], lib.mf_kv_moves_free)
    return [Move(*(getattr(moves[i], field) for field in Move._fields)) for i in range(n[0])]


def _seq(seq) -> int:
    return _int32("seq", seq)


def _int32(name: str, value) -> int:
    return integer(name, value, INT32_MIN, INT32_MAX)
