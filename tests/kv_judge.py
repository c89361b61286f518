"""Which calls a cache must accept, worked out from what is seen of it from outside.

Owns the rules of acceptance as the Python API shows them, for engines whose arenas are of the size
that only full groups refuse for cells: those of sliding groups whole, or capped at n_ctx beside a
full group. Which rows a window has dropped is read from the spans. A refusal is named by the error
that must be raised, in the order in which an engine checks.
"""

from bisect import bisect_left

from kv_model import first_needed, gaps, next_pos

import minfer

Gone, Full, Range = minfer.KvGoneError, minfer.KvFullError, minfer.KvRangeError
Collides, Gaps = minfer.KvCollidesError, minfer.KvGapsError
NotEmpty, Argument = minfer.KvNotEmptyError, minfer.ArgumentError


class Sequence:
    """A sequence as the calls so far make it: the positions of its rows, its history (replay.py) and
    the cells reserved for it."""

    def __init__(self, root):
        self.pos, self.history, self.reserved = [], root, 0

    def empty(self, root):
        self.pos, self.history = [], root


def window_of(kind):
    """Keys that a query sees in a group of this kind; None: all."""
    name = kind.split("/")[0]
    return int(name.split("-")[1]) if name.startswith("sliding") else None


class Judge:
    """Which calls must be accepted now. Refusals in the order in which they are checked."""

    def __init__(self, engine, seqs, pos_end):
        self.seqs, self.pos_end = seqs, pos_end
        self.max_gaps = 64 - len(seqs).bit_length()
        stats = engine.kv.stats()
        self.windows = [window_of(group.kind) for group in stats]
        self.free = [group.n_cells - group.n_used for group in stats]
        self.cells = [
            [[span.cell + i for span in engine.kv.spans(s, g) for i in range(span.len)]
             for g in range(len(stats))]
            for s in range(len(seqs))
        ]  # fmt: skip

    def base(self, s, g):
        return len(self.seqs[s].pos) - len(self.cells[s][g])

    def append(self, batch):
        """batch: [(sequence, number of rows)]"""
        if any(next_pos(self.seqs[s].pos) + n > self.pos_end for s, n in batch):
            return Range
        wanted = sum(max(0, n - self.seqs[s].reserved) for s, n in batch)
        return self._room(wanted)

    def trim(self, s, n):
        pos = self.seqs[s].pos
        if not 0 <= n <= len(pos):
            return Argument
        return self._edit(s, len(pos) - n, len(pos), 0) if n else None

    def rm(self, s, p0, p1):
        pos = self.seqs[s].pos
        if not 0 <= p0 <= p1 <= next_pos(pos):
            return Argument
        return (
            self._edit(s, bisect_left(pos, p0), bisect_left(pos, p1), p0 - p1) if p0 < p1 else None
        )

    def shift(self, s, p0, delta):
        pos = self.seqs[s].pos
        if not 0 <= p0 <= next_pos(pos):
            return Argument
        i = bisect_left(pos, p0)
        if i == len(pos) or not delta:
            return None
        if pos[i] + delta < 0 or pos[-1] + delta >= self.pos_end:
            return Range
        if i and pos[i] + delta <= pos[i - 1]:
            return Collides
        return self._edit(s, i, i, delta)

    def _edit(self, s, i0, i1, delta):
        pos = self.seqs[s].pos
        new = pos[:i0] + [p + delta for p in pos[i1:]]
        if gaps(new) > self.max_gaps:
            return Gaps
        for g, w in enumerate(self.windows):
            base = self.base(s, g)
            base = base if base <= i0 else max(i0, base - (i1 - i0))
            if first_needed(new, w) < min(len(new), base):
                return Gone
            if w is None and delta:
                others = {c for o in range(len(self.seqs)) if o != s for c in self.cells[o][g]}
                own = self.cells[s][g]
                freed = sum(c not in others for c in own[i0:i1])
                if sum(c in others for c in own[i1:]) > self.free[g] + freed:
                    return Full
        return None

    def share(self, dst, src, n):
        pos = self.seqs[src].pos
        if dst == src or not 0 <= n <= len(pos):
            return Argument
        if self.seqs[dst].pos:
            return NotEmpty
        for g, w in enumerate(self.windows):
            if first_needed(pos[:n], w) < min(n, self.base(src, g)):
                return Gone
        return None

    def reserve(self, s, n):
        return self._room(n - self.seqs[s].reserved)

    def defrag(self, need):
        return self._room(need)

    def _room(self, n):
        full = [free for free, window in zip(self.free, self.windows) if window is None]
        return Full if any(n > free for free in full) else None

    def shared(self, s, g):
        """Rows of s in a group whose cells others read too."""
        others = {c for o in range(len(self.seqs)) if o != s for c in self.cells[o][g]}
        return sum(c in others for c in self.cells[s][g])


def state(engine):
    """All that is seen of a cache from outside: what a refused call must leave alone."""
    kv = engine.kv
    return [
        (
            kv.len(s),
            kv.next_pos(s),
            kv.max_trim(s),
            [kv.spans(s, g) for g in range(engine.n_groups)],
        )
        for s in range(engine.n_seq)
    ], kv.stats()
