"""Executable specification of the cell store (engine/kv_*.c).

It fixes which calls are accepted, what every row contains afterwards and what each query sees. The
C store is right when, driven with the same calls, it accepts and refuses the same ones and holds
the same contents (test_kv_model.py). WHERE rows lie is not fixed: `_take`, `_evict`'s ties and
`_compact` are one good policy, and the law says that no answer depends on it. The model is ahead of
C: it also defines recurrent groups. An image's row numbers are free, too; C's are those of
kv_image.py.

A row's content is Row(token, ropes, ctx): the token; the position it was roped at, followed by
every re-rope since (their sum is its position now, so a missed, doubled or merged re-rope shows);
and the writer, a digest of all its query saw in every group. A wrong move, a missed copy, a row
read after it was freed or a window off by one changes ctx, as it would change the logits.

All is per cell and per row here, because that is the meaning; C keeps extents and spans.
"""
import bisect
import functools
import hashlib
import pickle
from collections import namedtuple

POS_MAX = 1 << 24     # first illegal position: every position below is exact in a float32


class KvError(ValueError):
    """A refusal. `code` names it; the state is exactly as before the call."""

    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")
        self.code = code


# kind: "full", "recurrent" or "sliding" with w, the keys a query sees, itself included
Group = namedtuple("Group", "kind w", defaults=(None,))
Row = namedtuple("Row", "token ropes ctx")
Move = namedtuple("Move", "src dst n group", defaults=(0,))


class Seq:
    """`pos`: positions of the rows, strictly increasing, the same in every group. Group g holds the
    rows [base[g], len) in cells[g]; the rows below base are lost there."""

    def __init__(self, n_groups):
        self.pos = []
        self.base = [0] * n_groups
        self.cells = [[] for _ in range(n_groups)]
        self.reserved = [[] for _ in range(n_groups)]   # full groups: cells that hold no row yet
        self.state = [""] * n_groups                    # recurrent groups
        self.clean = 0          # leading rows that equal a plain prefill of their tokens
        self.history = []       # accepted appends and edits, in order: what the law replays


def digest(*parts):
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def next_pos(pos):
    return pos[-1] + 1 if pos else 0


def first_seen(pos, w, q):
    """Index of the oldest row that a query at position q sees: positions in (q - w, q]."""
    return 0 if w is None else bisect.bisect_left(pos, q - w + 1)


def first_needed(pos, w):
    """Index of the oldest row the next query needs; len(pos) if it needs none (w = 1)."""
    return first_seen(pos, w, next_pos(pos))


def gaps(pos):
    return sum(b != a + 1 for a, b in zip(pos, pos[1:]))


def spans_of(pos, cells):
    """Maximal (pos, cell, len) runs: both the position and the cell continue."""
    out = []
    for p, c in zip(pos, cells):
        if out and p == out[-1][0] + out[-1][2] and c == out[-1][1] + out[-1][2]:
            out[-1] = (out[-1][0], out[-1][1], out[-1][2] + 1)
        else:
            out.append((p, c, 1))
    return out


def order_moves(moves, scratch=None):
    """Order (where needed split) moves so that executing them in turn, each with memmove meaning,
    equals all of them at once. "Upward by source top-down, then downward by source bottom-up" is
    right iff no upward move lands on a row that a downward move has yet to read. Otherwise rows go
    out along chains, the free end first. A cycle has no order: refused, or broken through
    `scratch`, a cell outside the arena."""
    out = []
    for group in sorted({m.group for m in moves}):
        out += _order_group([m for m in moves if m.group == group], group, scratch)
    return out


def _order_group(moves, group, scratch):
    f, lands = {}, {}                                   # source -> destination, and back
    for m in moves:
        if m.n < 1 or m.src < 0 or m.dst < 0:
            raise KvError("KV_ARG", f"move {tuple(m)}: n below 1 or a negative cell")
        for s, d in zip(range(m.src, m.src + m.n), range(m.dst, m.dst + m.n)):
            if s in f or d in lands or scratch in (s, d):
                raise KvError("KV_OVERLAP", f"move {tuple(m)} overlaps another or the scratch cell")
            f[s], lands[d] = d, s
    up = sorted((m for m in moves if m.dst > m.src), key=lambda m: -m.src)
    down = sorted((m for m in moves if m.dst < m.src), key=lambda m: m.src)
    if not any(d > s and f.get(d, d) < d for s, d in f.items()):
        return up + down
    steps, left = [], {s for s in f if f[s] != s}
    for s in sorted(s for s in left if f[s] not in left):
        while s in left:                                # the destination is free: fill it, go back
            steps.append((s, f[s]))
            left.remove(s)
            s = lands.get(s)
    while left:
        if scratch is None:
            raise KvError("KV_CYCLE", f"the moves form a cycle through cell {min(left)}")
        first = min(left)
        steps.append((first, scratch))
        s = lands[first]
        while s != first:
            steps.append((s, f[s]))
            left.remove(s)
            s = lands[s]
        steps.append((scratch, f[first]))
        left.remove(first)
    out = []
    for s, d in steps:                                  # join steps: up descending, down ascending
        m = out[-1] if out else Move(-9, -9, 1)
        if d < s and m.dst < m.src and (s, d) == (m.src + m.n, m.dst + m.n):
            out[-1] = Move(m.src, m.dst, m.n + 1, group)
        elif d > s and m.dst > m.src and (s, d) == (m.src - 1, m.dst - 1):
            out[-1] = Move(s, d, m.n + 1, group)
        else:
            out.append(Move(s, d, 1, group))
    return out


def moved(moves, cell, group=0):
    """Where a cell cached before the moves is now: apply them in the order returned."""
    for m in moves:
        if m.group == group and m.src <= cell < m.src + m.n:
            cell += m.dst - m.src
    return cell


def atomic(op):
    """Refused means unchanged, in every group: bookkeeping is put back, rows are touched only after
    the last check. (C checks first and then applies; it needs no undo.)"""

    @functools.wraps(op)
    def run(self, *args):
        saved, self.todo = pickle.dumps((self.seqs, self.refs, self.counts)), []
        try:
            result = op(self, *args)
        except KvError:
            (self.seqs, self.refs, self.counts), self.todo = pickle.loads(saved), []
            raise
        self._execute()
        return result

    return run


class Store:
    def __init__(self, groups, n_ctx, n_seq, n_batch, rope=True, map_max=64, grow=64, hunk=64,
                 sliding_cells=None):
        self.groups, self.n_seq, self.n_batch, self.rope = list(groups), n_seq, n_batch, rope
        self.map_max, self.grow = map_max, grow
        # A read carries map_max runs. Layout alone can need 1 + floor(log2 n_seq) (see _forest);
        # the rest is what shifts may use up in position gaps.
        self.max_gaps = map_max - n_seq.bit_length()
        if self.max_gaps < 0:
            raise KvError("KV_ARG", f"{map_max} runs per read cannot hold {n_seq} sequences")
        self.size, self.hunk = [], []
        for gr in self.groups:
            lazy = min(n_ctx, sliding_cells or n_seq * 2 * (gr.w or 0) + n_batch)
            self.size.append({"full": n_ctx, "sliding": lazy, "recurrent": 0}[gr.kind])
            self.hunk.append(max(1, min(hunk, (gr.w or 0) // 2)))
        self.mem = [[None] * (n + 1) for n in self.size]      # the last cell is scratch
        self.refs = [[0] * n for n in self.size]
        self.seqs = [Seq(len(self.groups)) for _ in range(n_seq)]
        self.attention = [g for g, gr in enumerate(self.groups) if gr.kind != "recurrent"]
        self.counts = {"compactions": 0, "generation": 0}
        self.todo = []

    def _seq(self, s):
        if not isinstance(s, int) or not 0 <= s < self.n_seq:
            raise KvError("KV_ARG", f"sequence {s} is not in [0, {self.n_seq})")
        return self.seqs[s]

    def _free(self, g):
        return self.refs[g].count(0)

    def _drop(self, g, cells):
        for c in cells:
            self.refs[g][c] -= 1

    def _free_runs(self, g):
        free = [c for c, r in enumerate(self.refs[g]) if r == 0]
        return [(c, n) for _, c, n in spans_of(free, free)]

    def _largest(self, g):
        return max([n for _, n in self._free_runs(g)] + [0])

    # ---- room: placement (a policy, not a promise), lazy windows, reservation ----

    def _take(self, s, g, n, behind):
        """n free cells: in place behind the last of `behind` if all fit there; else one run: the
        smallest with `grow` cells to spare, else the largest that fits, and never right behind
        another sequence's tail while half the run can be left to it; else several, largest first.
        (Plain best fit would put each decoded row into the smallest hole.)"""
        refs, at, room = self.refs[g], behind[-1] + 1 if behind else self.size[g], 0
        while at + room < self.size[g] and refs[at + room] == 0:
            room += 1
        tails = {(q.cells[g] + q.reserved[g])[-1] for i, q in enumerate(self.seqs)
                 if i != s and q.cells[g] + q.reserved[g]}
        skips = [(c, length, (c - 1 in tails) * min(self.grow, max(0, length - n) // 2))
                 for c, length in self._free_runs(g)]
        fits = [(length - skip, c + skip) for c, length, skip in skips if length - skip >= n]
        roomy = [r for r in fits if r[0] >= n + self.grow]
        if n <= room:
            out = list(range(at, at + n))
        elif fits:
            c = min(roomy)[1] if roomy else max(fits, key=lambda r: (r[0], -r[1]))[1]
            out = list(range(c, c + n))
        else:
            out = list(range(at, at + room))
            for length, c in sorted(((n, c) for c, n in self._free_runs(g)), reverse=True):
                out += [x for x in range(c, c + length) if x not in out]
            out = out[:n]
        for c in out:
            assert refs[c] == 0, "taken cell is not free"
            refs[c] = 1
        return out

    def _stale(self, s, g):
        """How many rows of s in g are older than its next query's window."""
        return first_needed(self.seqs[s].pos, self.groups[g].w) - self.seqs[s].base[g]

    def _evict(self, g):
        """THE eviction policy: the sequence with the most stale rows gives up its oldest ones, at
        most `hunk` (ties: lowest sequence). A row that its sequence's next query needs is never
        given up; a cell is free when its last reader gave it up. False: nothing is stale."""
        s = max(range(self.n_seq), key=lambda s: (self._stale(s, g), -s))
        n = min(self._stale(s, g), self.hunk[g])
        self._forget(s, g, n)
        return n > 0

    def _forget(self, s, g, n):
        q = self.seqs[s]
        self._drop(g, q.cells[g][:n])
        q.cells[g], q.base[g] = q.cells[g][n:], q.base[g] + n

    def _make_room(self, g, n):
        while self._free(g) < n:
            if not self._evict(g):
                raise KvError("KV_FULL", f"group {g} has {self._free(g)} free cells of "
                                         f"{self.size[g]}, {n} needed")

    @atomic
    def reserve_seq(self, s, n, defrag=False):
        """Afterwards s holds exactly n cells beyond its rows in each full group (0 gives them
        back): its next n rows cannot be refused for want of cells. A sliding group holds none: its
        arena is large enough by construction. Never moves a row, unless `defrag`
        (kv_reserve_seq_with_defrag): then the n cells are one run; returns the moves."""
        q, moves = self._seq(s), []
        if n < 0:
            raise KvError("KV_ARG", f"room for {n} rows")
        for g in self.attention:
            if self.groups[g].kind != "full":
                continue
            self._drop(g, q.reserved[g])
            q.reserved[g] = []
            self._make_room(g, n)
            if defrag and self._largest(g) < n:
                moves += self._compact(g, self._slide(g))
            q.reserved[g] = self._take(s, g, n, q.cells[g])
        return moves

    # ---- append ----

    def append(self, batch):
        """batch: [(sequence, tokens)], all of it or nothing. Returns {sequence: [ctx per token]},
        which stands for the logits."""
        self.fill_batch_inputs(batch)
        windows = {g: self.window(g, [(s, len(t)) for s, t in batch]) for g in self.attention}
        out = {}
        for s, tokens in batch:
            first = len(self.seqs[s].pos) - len(tokens)
            out[s] = [self._forward(s, first + i, t, windows) for i, t in enumerate(tokens)]
            self.seqs[s].history.append(("append", tuple(tokens)))
        return out

    @atomic
    def fill_batch_inputs(self, batch):
        """The one entry point: every group has private cells for every new row before the first
        cell is resolved. Rows are only appended, so no row is copied here: a reader trimmed below
        its share gave the references back, and its new rows get cells of their own."""
        if len({s for s, _ in batch}) != len(batch):
            raise KvError("KV_ARG", "a sequence is named twice in one batch")
        if not 0 < sum(len(t) for _, t in batch) <= self.n_batch or not all(t for _, t in batch):
            raise KvError("KV_ARG", f"{[len(t) for _, t in batch]} tokens, batch {self.n_batch}")
        for s, tokens in batch:
            if next_pos(self._seq(s).pos) + len(tokens) > POS_MAX:
                raise KvError("KV_RANGE", f"sequence {s} would reach position {POS_MAX}")
        for g in self.attention:
            for s, tokens in batch:
                q, n = self.seqs[s], len(tokens)
                self._drop(g, q.reserved[g])
                want = max(n, len(q.reserved[g]))
                q.reserved[g] = []
                self._make_room(g, want)
                got = self._take(s, g, want, q.cells[g])
                q.cells[g], q.reserved[g] = q.cells[g] + got[:n], got[n:]
                self.todo += [("wipe", g, c, 0, 1) for c in got]
        for s, tokens in batch:
            q, p = self.seqs[s], next_pos(self.seqs[s].pos)
            q.clean += len(tokens) if q.clean == len(q.pos) else 0
            q.pos += range(p, p + len(tokens))
        for g in self.attention:
            if any(len(self._read_spans(s, g, len(t))) > self.map_max for s, t in batch):
                self._compact(g, self._forest(g))
                self.counts["compactions"] += 1

    def _forward(self, s, i, token, windows):
        q, seen = self.seqs[s], []
        for g, gr in enumerate(self.groups):
            if gr.kind == "recurrent":
                seen.append(q.state[g])
                continue
            cells = [c for p, c in resolve(*windows[g], s, q.pos[i], gr.w) if p < q.pos[i]]
            seen.append([self.mem[g][c] for c in cells])
            assert None not in seen[-1], "read of a cell without a row"
        row = Row(token, (q.pos[i],), digest(token, q.pos[i], seen))
        for g, gr in enumerate(self.groups):
            if gr.kind == "recurrent":
                q.state[g] = digest(q.state[g], row.ctx)
            else:
                self.mem[g][self.store_cell(s, g, i)] = row
        return row.ctx

    def store_cell(self, s, g, i):
        """The store resolver: the belt to fill_batch_inputs' brace."""
        c = self.seqs[s].cells[g][i - self.seqs[s].base[g]]
        if self.refs[g][c] != 1:
            raise KvError("KV_SHARED", f"cell {c} of group {g} has {self.refs[g][c]} readers")
        return c

    # ---- edits ----

    def _keeps(self, s, n):
        """Can the sequence be its first n rows? Each group must hold the rows a query there needs;
        an empty sequence needs none."""
        q = self._seq(s)
        return all(n in (0, len(q.pos)) if gr.kind == "recurrent" else
                   first_needed(q.pos[:n], gr.w) >= min(n, q.base[g])
                   for g, gr in enumerate(self.groups))

    def max_trim(self, s):
        """The largest n such that trim(s, m) is accepted for every m <= n."""
        n, k = len(self._seq(s).pos), 0
        while k < n and self._keeps(s, n - k - 1):
            k += 1
        return k

    @atomic
    def trim(self, s, n):
        """Drop the last n rows, exactly: as if they had never been appended."""
        q = self._seq(s)
        if not 0 <= n <= len(q.pos):
            raise KvError("KV_ARG", f"trim of {n} rows, sequence {s} has {len(q.pos)}")
        if n:
            self._edit(s, len(q.pos) - n, len(q.pos), 0, ("trim", n))

    @atomic
    def rm(self, s, p0, p1):
        """Drop the rows at positions [p0, p1); all later positions fall by p1 - p0."""
        q = self._seq(s)
        if not 0 <= p0 <= p1 <= next_pos(q.pos):
            raise KvError("KV_ARG", f"[{p0}, {p1}) is not a range in [0, {next_pos(q.pos)})")
        if p0 < p1:
            self._edit(s, bisect.bisect_left(q.pos, p0), bisect.bisect_left(q.pos, p1), p0 - p1,
                       ("rm", p0, p1))

    @atomic
    def shift(self, s, p0, delta):
        """Move the rows at positions >= p0 by delta. Rows keep their order and never merge: a
        position outside [0, POS_MAX) or not above the row before is refused. A positive delta
        leaves a gap: positions that no row has."""
        q = self._seq(s)
        if not 0 <= p0 <= next_pos(q.pos):
            raise KvError("KV_ARG", f"position {p0} is not in [0, {next_pos(q.pos)}]")
        i = bisect.bisect_left(q.pos, p0)
        if i == len(q.pos) or delta == 0:
            return
        if q.pos[i] + delta < 0 or q.pos[-1] + delta >= POS_MAX:
            raise KvError("KV_RANGE", f"shift by {delta} leaves [0, {POS_MAX})")
        if i and q.pos[i] + delta <= q.pos[i - 1]:
            raise KvError("KV_COLLIDES", f"shift by {delta} puts position {q.pos[i]} at or below "
                                         f"{q.pos[i - 1]}")
        self._edit(s, i, i, delta, ("shift", p0, delta))

    def _edit(self, s, i0, i1, delta, event):
        """Rows [i0, i1) go, rows from i1 on move by delta: the one body of trim, rm and shift."""
        q = self.seqs[s]
        new = q.pos[:i0] + [p + delta for p in q.pos[i1:]]
        if i1 < len(q.pos) and not self.rope:
            raise KvError("KV_NO_ROPE", "positions of this model cannot be moved")
        if gaps(new) > self.max_gaps:
            raise KvError("KV_GAPS", f"{gaps(new)} position gaps, {self.max_gaps} can be read")
        q.pos, q.clean = new, min(q.clean, i0)
        for g, gr in enumerate(self.groups):
            if gr.kind == "recurrent":
                if i0 < i1 and new:
                    raise KvError("KV_GONE", f"group {g}: a recurrent state cannot forget rows")
                q.state[g] = q.state[g] if new else ""
                continue
            b = q.base[g]
            lo, hi = max(i0 - b, 0), max(i1 - b, 0)
            self._drop(g, q.cells[g][lo:hi])
            del q.cells[g][lo:hi]
            q.base[g] = b if b <= i0 else max(i0, b - (i1 - i0))
            if first_needed(new, gr.w) < min(len(new), q.base[g]):
                raise KvError("KV_GONE", f"group {g} has lost rows that {len(new)} rows need")
            self._move_rows(s, g, i0, delta)
        q.history = q.history + [event] if new else []

    def _move_rows(self, s, g, i0, delta):
        """Re-rope the rows from index i0 on. A row others read is copied first; one that only
        laziness keeps is let go instead of copied, and the older ones with it."""
        q = self.seqs[s]

        def shared():
            return [j for j in range(max(i0, q.base[g]), len(q.pos))
                    if self.refs[g][q.cells[g][j - q.base[g]]] > 1]

        lazy = [j for j in shared() if j < first_needed(q.pos, self.groups[g].w)]
        self._forget(s, g, lazy[-1] + 1 - q.base[g] if lazy else 0)
        while len(shared()) > self._free(g):            # an eviction may also make rows private
            if not self._evict(g):
                raise KvError("KV_FULL", f"group {g} has {self._free(g)} free cells of "
                                         f"{self.size[g]}, {len(shared())} shared rows to copy")
        js = shared()
        new = self._take(s, g, len(js), q.cells[g][:js[0] - q.base[g]] if js else [])
        for j, c in zip(js, new):
            old = q.cells[g][j - q.base[g]]
            self.todo.append(("copy", g, old, c, 1))
            self._drop(g, [old])
            q.cells[g][j - q.base[g]] = c
        self.todo += [("rope", g, c, delta, 1) for c in q.cells[g][max(i0 - q.base[g], 0):]]

    # ---- sharing ----

    @atomic
    def share(self, dst, src, n):
        """The empty sequence dst becomes src's first n rows, read in place."""
        d, q = self._seq(dst), self._seq(src)
        if dst == src or not 0 <= n <= len(q.pos):
            raise KvError("KV_ARG", f"share of {n} rows of sequence {src} with {dst}")
        if d.pos:
            raise KvError("KV_NOT_EMPTY", f"sequence {dst} has {len(d.pos)} rows")
        if not self._keeps(src, n):
            raise KvError("KV_GONE", f"sequence {src} cannot be read at {n}: a group lost rows")
        if not n:
            return
        d.pos, d.state, d.clean = q.pos[:n], q.state[:], min(q.clean, n)
        d.history = q.history + [("trim", len(q.pos) - n)] * (n < len(q.pos))
        for g in self.attention:
            d.base[g] = min(q.base[g], n)
            d.cells[g] = q.cells[g][:n - d.base[g]]
            for c in d.cells[g]:
                self.refs[g][c] += 1

    @atomic
    def free(self, s):
        q = self._seq(s)
        for g in self.attention:
            self._drop(g, q.cells[g] + q.reserved[g])
        self.seqs[s] = Seq(len(self.groups))

    # ---- compaction ----

    @atomic
    def defrag(self, need):
        """Afterwards each full group has a free run of at least `need` cells, each sliding one of
        min(need, n_batch); 0 compacts everything. Returns the moves, in the order made."""
        if need < 0:
            raise KvError("KV_ARG", f"a run of {need} cells")
        moves = []
        for g in self.attention:
            n = need if self.groups[g].kind == "full" else min(need, self.n_batch)
            self._make_room(g, n)
            if any(len(self._read_spans(s, g, 0)) > self.map_max for s in range(self.n_seq)):
                moves += self._compact(g, self._forest(g))
            elif not need or self._largest(g) < n:
                moves += self._compact(g, self._slide(g))
        return moves

    def _slide(self, g):
        """Keep the order of the cells, close the holes: all moves go down, no span is split."""
        return [c for c, r in enumerate(self.refs[g]) if r]

    def _forest(self, g):
        """Regroup. Rows that several sequences read are a common prefix of theirs, so the rows form
        a forest. Laid out heavy child first, a sequence leaves its run at most floor(log2 n_seq)
        times, so it lies in at most that many + 1 runs (position gaps apart)."""
        paths = [q.cells[g] + q.reserved[g] for q in self.seqs]
        parent, kids, ends = {}, {}, {}
        for path in paths:
            for a, c in zip([None] + path, path):
                if parent.get(c) is None:
                    parent[c] = a                # another reader may have lost the row before
        for c in parent:
            kids.setdefault(parent[c], []).append(c)
        for path in paths:
            c = path[-1] if path else None
            while c is not None:                 # sequences that end in c's subtree
                ends[c] = ends.get(c, 0) + 1
                c = parent[c]
        out, stack = [], kids.get(None, [])[::-1]
        while stack:
            out.append(stack.pop())
            stack += sorted(kids.get(out[-1], [])[::-1], key=lambda k: ends[k])   # heavy on top
        return out

    def _compact(self, g, order):
        """Rows move verbatim, no rope; the returned moves have been applied in this order."""
        new = {c: i for i, c in enumerate(order)}
        runs = [Move(a, b, n, g) for b, a, n in spans_of(range(len(order)), order) if a != b]
        moves = order_moves(runs, self.size[g])
        self.todo += [("copy", g, m.src, m.dst, m.n) for m in moves]
        for q in self.seqs:
            q.cells[g] = [new[c] for c in q.cells[g]]
            q.reserved[g] = [new[c] for c in q.reserved[g]]
        self.refs[g] = [self.refs[g][c] for c in order] + [0] * (self.size[g] - len(order))
        self.counts["generation"] += bool(moves)
        return moves

    def _execute(self):
        """The backend's part, in order; copies have memmove meaning. Freed cells are forgotten so
        that a read of one shows."""
        for op, g, a, b, n in self.todo:
            if op == "copy":
                self.mem[g][b:b + n] = self.mem[g][a:a + n]
            elif op == "wipe":
                self.mem[g][a] = None
            else:
                assert self.mem[g][a], "re-rope of a cell without a row"
                self.mem[g][a] = self.mem[g][a]._replace(ropes=self.mem[g][a].ropes + (b,))
        for g in self.attention:
            self.mem[g] = [m if r else None for m, r in zip(self.mem[g], self.refs[g])] + [None]
        self.todo = []

    # ---- reading ----

    def _read_spans(self, s, g, n):
        """Spans of the rows that the last n rows of s see as queries; n = 0: the next query."""
        q, w = self.seqs[s], self.groups[g].w
        i = first_seen(q.pos, w, q.pos[-n]) if n else first_needed(q.pos, w)
        assert i >= min(q.base[g], len(q.pos)), "a query needs a lost row"
        return spans_of(q.pos[i:], q.cells[g][i - q.base[g]:])

    def window(self, g, batch, force=None):
        """(mode, data) for the last n rows of each (sequence, n) as queries: the cheapest true one.
        causal: one sequence, and for a query at q every position p in its window is in cell p;
        range:  {(s, q): (lo, hi)}, the window of each query is the cells [lo, hi);
        runs:   {s: [(pos, cell, len)]}, a query reads their positions in (q - w, q]."""
        w, runs, ranges, causal = self.groups[g].w, {}, {}, len(batch) == 1
        for s, n in batch:
            q, runs[s] = self.seqs[s], self._read_spans(s, g, n)
            for p in q.pos[-n:]:
                i, j = first_seen(q.pos, w, p), bisect.bisect_right(q.pos, p)
                (first, lo, length), *more = \
                    spans_of(q.pos[i:j], q.cells[g][i - q.base[g]:j - q.base[g]])
                causal &= not more and first == lo == (max(0, p - w + 1) if w else 0)
                if not more:
                    ranges[s, p] = (lo, lo + length)
        true = {"causal": causal, "range": len(ranges) == sum(n for _, n in batch),
                "runs": all(len(r) <= self.map_max for r in runs.values())}
        mode = force or next((m for m in true if true[m]), "runs")
        if not true[mode]:
            raise KvError("KV_SPANS", f"group {g} cannot be read as {mode}: "
                                      f"{ {s: len(r) for s, r in runs.items()} } spans")
        return mode, {"causal": None, "range": ranges, "runs": runs}[mode]

    def peek(self, s):
        """What the next query of s would see in every group: equal peeks mean equal logits."""
        q, out = self._seq(s), [next_pos(self._seq(s).pos)]
        for g, gr in enumerate(self.groups):
            i = first_needed(q.pos, gr.w)
            out.append(q.state[g] if gr.kind == "recurrent" else
                       list(zip(q.pos[i:], (self.mem[g][c] for c in q.cells[g][i - q.base[g]:]))))
        return out

    def spans(self, s, g=0):
        q = self._seq(s)
        return spans_of(q.pos[q.base[g]:], q.cells[g])

    def stats(self, g=0):
        free, largest = self._free(g), self._largest(g)
        return {"cells_used": self.size[g] - free, "shared": sum(r > 1 for r in self.refs[g]),
                "stale": sum(self._stale(s, g) for s in range(self.n_seq)),
                "free_runs": len(self._free_runs(g)), "largest_run": largest,
                "fragmentation": 1 - largest / free if free else 0.0, **self.counts}

    # ---- sessions ----

    def dump(self):
        """What a file holds: per sequence positions, states and the clean length; per group every
        live row once, in forest order (two saves of one state are equal wherever its rows lie), and
        per sequence the first row it has and the row numbers. Reservations are not state."""
        live = {s: q for s, q in enumerate(self.seqs) if q.pos}
        image = {"seqs": {s: (q.pos, q.state, q.clean) for s, q in live.items()}, "groups": {}}
        for g in self.attention:
            used = {c for q in live.values() for c in q.cells[g]}
            at = {c: i for i, c in enumerate(c for c in self._forest(g) if c in used)}
            image["groups"][g] = ([self.mem[g][c] for c in at],
                                  {s: (q.base[g], [at[c] for c in q.cells[g]])
                                   for s, q in live.items()})
        return pickle.loads(pickle.dumps(image))

    def load(self, image, histories):
        """The named sequences become the image's; others stay. Refused if it does not fit; stale
        rows are left out where they alone do not."""
        for g, at in self._load(image).items():
            for i, c in at.items():
                self.mem[g][c] = image["groups"][g][0][i]
        for s in image["seqs"]:
            self.seqs[s].history = list(histories[s])

    @atomic
    def _load(self, image):
        rows, seqs = {}, image["seqs"]
        for s in seqs:
            for g in self.attention:
                self._drop(g, self._seq(s).cells[g] + self._seq(s).reserved[g])
            self.seqs[s] = Seq(len(self.groups))
        for g in self.attention:
            keep = image["groups"][g][1]
            while self._free(g) < len({i for _, numbers in keep.values() for i in numbers}):
                if not self._evict(g):
                    low = {s: max(b, first_needed(seqs[s][0], self.groups[g].w))
                           for s, (b, _) in keep.items()}
                    lean = {s: (low[s], numbers[low[s] - b:]) for s, (b, numbers) in keep.items()}
                    if lean == keep:
                        raise KvError("KV_FULL", f"group {g} has {self._free(g)} free cells of "
                                                 f"{self.size[g]}, too few to load")
                    keep = lean
            used = sorted({i for _, numbers in keep.values() for i in numbers})
            rows[g] = dict(zip(used, self._take(None, g, len(used), [])))
            self._drop(g, rows[g].values())
            for s, (base, numbers) in keep.items():
                self.seqs[s].base[g], self.seqs[s].cells[g] = base, [rows[g][i] for i in numbers]
                for c in self.seqs[s].cells[g]:
                    self.refs[g][c] += 1
        for s, (pos, state, clean) in seqs.items():
            q = self.seqs[s]
            q.pos, q.state, q.clean = pos[:], state[:], clean
        return rows

    # ---- invariants ----

    def check(self):
        """kv_check: every invariant of the bookkeeping."""
        for g in self.attention:
            count, before, at, w = [0] * self.size[g], {}, {}, self.groups[g].w
            for q in self.seqs:
                assert len(q.cells[g]) == len(q.pos) - q.base[g] >= 0
                for c in q.cells[g] + q.reserved[g]:
                    count[c] += 1
                for a, c in zip(q.cells[g], q.cells[g][1:]):
                    assert before.setdefault(c, a) == a, "shared rows are no common prefix"
                for p, c in zip(q.pos[q.base[g]:], q.cells[g]):
                    assert at.setdefault(c, p) == p, "one cell at two positions"
                assert all(self.refs[g][c] == 1 for c in q.reserved[g]), "shared reservation"
                assert first_needed(q.pos, w) >= min(q.base[g], len(q.pos)), "needed row lost"
                assert w or q.base[g] == 0
                assert not w or not q.reserved[g]
            assert count == self.refs[g], "reference counts"
        for q in self.seqs:
            assert all(a < b for a, b in zip([-1] + q.pos, q.pos + [POS_MAX]))
            assert gaps(q.pos) <= self.max_gaps and q.pos[:q.clean] == list(range(q.clean))

    def check_rows(self):
        """Every live row is roped to its position, and is the same row in every group."""
        for q in self.seqs:
            seen = {}
            for g in self.attention:
                for i, c in enumerate(q.cells[g], q.base[g]):
                    row = self.mem[g][c]
                    assert row and sum(row.ropes) == q.pos[i], "row not at its position"
                    assert seen.setdefault(i, row) == row, "groups disagree"


def resolve(mode, data, s, q, w):
    """The rows a query at q reads, as (position, cell) in position order: what a backend does."""
    if mode == "causal":
        return [(p, p) for p in range(max(0, q - w + 1) if w else 0, q + 1)]
    if mode == "range":
        lo, hi = data[s, q]
        return [(q - (hi - 1 - c), c) for c in range(lo, hi)]
    return [(p + i, c + i) for p, c, n in data[s] for i in range(n)
            if p + i <= q and (w is None or p + i > q - w)]


def flat_batch(ids, left=None, right=None, seqs=None):
    """A padded batch [B][L] to [(sequence, tokens)]: pads take no cell, an all-pad row no chunk."""
    out = []
    for b, row in enumerate(ids):
        lo, hi = left[b] if left else 0, len(row) - (right[b] if right else 0)
        if not 0 <= lo <= hi <= len(row):
            raise KvError("KV_ARG", f"row {b}: padding {lo} + {len(row) - hi} of {len(row)}")
        if lo < hi:
            out.append((seqs[b] if seqs else b, tuple(row[lo:hi])))
    return out


def replay(groups, history, rope=True):
    """The plainest way: alone in a fresh store with room for everything, one token per call, the
    same edits at the same places. Nothing is shared, evicted, compacted or reserved."""
    n = 1 + sum(len(e[1]) for e in history if e[0] == "append")
    big = Store(groups, n, 1, n, rope=rope, map_max=1 << 20, sliding_cells=n)
    for name, *args in history:
        if name == "append":
            for t in args[0]:
                big.append([(0, (t,))])
        else:
            getattr(big, name)(0, *args)
    return big
