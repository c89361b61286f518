"""Random stores, and walks of random calls over them, good and bad: what test_kv_model.py makes the
C cell store do. Only the model (kv_model.py) is walked; which calls come depends on nothing that C
answers.
"""
import pickle
import random

import kv_image
import kv_model as kv

STATUS = {"KV_ARG": 1, "KV_NO_ROPE": 4, "KV_FULL": 9, "KV_GONE": 10, "KV_RANGE": 11,
          "KV_COLLIDES": 13, "KV_GAPS": 14, "KV_NOT_EMPTY": 15, "KV_SPANS": 16, "KV_OVERLAP": 17,
          "KV_CYCLE": 18, "KV_SHARED": 19}
BAD_SEQS = [-1, 999, (1 << 31) - 1, -(1 << 31)]
BAD_COUNTS = [(1 << 32) - 1, 1 << 31, (1 << 31) - 1]
BAD_POSITIONS = [-1, -(1 << 31), (1 << 31) - 1, kv.POS_MAX, kv.POS_MAX - 1]

WEIGHTS = {   # how often a walk makes each call
    "mixed": dict(append=32, can=6, trim=10, free=3, share=14, rm=12, shift=10, reserve=4,
                  defrag_reserve=3, defrag=4, cells=6, window=3, dump=5, load=7),
    "tight": dict(append=28, can=10, trim=4, free=1, share=12, rm=18, shift=26, reserve=1,
                  defrag_reserve=1, defrag=1, cells=2, window=1, dump=2, load=5),
    "shred": dict(append=12, can=2, trim=2, free=1, share=6, rm=30, shift=3, reserve=2,
                  defrag_reserve=2, defrag=2, cells=1, window=6, dump=4, load=4),
    "gaps": dict(append=3, can=1, trim=1, free=0, share=4, rm=4, shift=80, reserve=1,
                 defrag_reserve=1, defrag=1, cells=1, window=2, dump=3, load=3),
    "crowd": dict(append=36, can=3, trim=4, free=14, share=10, rm=4, shift=2, reserve=3,
                  defrag_reserve=2, defrag=2, cells=1, window=2, dump=3, load=5),
}


class Walk:
    """A random store and a walk over it."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.kind = rng.choices(list(WEIGHTS), [7, 8, 4, 2, 1])[0]
        self.steps = {"mixed": 105, "tight": 200, "shred": 120, "gaps": 140, "crowd": 90}[self.kind]
        self.calls, self.opening, self.images = [], [], []
        self.image = None                   # of the last dump, or load
        self.model = getattr(self, "_" + self.kind)()

    def _mixed(self):
        rng = self.rng
        wide = rng.random() < .08           # hunks of the full 64, long runs
        groups = self._groups([100, 150] if wide else [1, 2, 3, 4, 5, 8, 16])
        n_seq, n_batch = rng.choice([1, 2, 3, 3, 5]), 60 if wide else rng.choice([1, 3, 6, 9])
        n_ctx = rng.choice([500, 900]) if wide else rng.choice([10, 24, 40, 80])
        return self._store(groups, n_ctx, n_seq, n_batch)

    def _tight(self):
        """Hardly a cell to spare: edits of shared rows and of windows that gaps made shorter."""
        groups = self._groups([4, 8, 16])
        n_seq, n_batch = self.rng.choice([2, 3]), self.rng.choice([4, 8])
        return self._store(groups, self.rng.choice([16, 30, 200, 200]), n_seq, n_batch)

    def _shred(self):
        """One long sequence that loses single rows all over: more runs than a read can carry."""
        n, then = self.rng.choice([150, 200]), self.rng.choice(["grow", "fill", "fill and defrag"])
        self.opening = [("append", [(0, n)])]
        self.opening += [("rm", 0, p) for p in range(1, 70)]
        self.opening += [("window",)]
        if then == "grow":
            self.opening += [("append", [(0, 4)])]
            n_ctx, n_seq = self.rng.choice([n, 400]), self.rng.choice([1, 2])
        elif then == "fill":                            # another sequence, into the holes
            self.opening += [("append", [(1, 66)])]
            n_ctx, n_seq = n, 2
        else:
            self.opening += [("append", [(1, 35), (2, 34)]), ("defrag", 0)]
            n_ctx, n_seq = n, 3
        return self._store(self._both([100, 150]), n_ctx, n_seq, n)

    def _gaps(self):
        """One long sequence that is pulled apart until no more gaps are allowed."""
        n = self.rng.choice([80, 100])
        self.opening = [("append", [(0, n)])]
        self.opening += [("shift", 0, 2 * i + 1) for i in range(50)]
        return self._store(self._groups([8, 70]), self.rng.choice([120, 300]),
                           self.rng.choice([1, 2, 5, 40]), n)

    def _crowd(self):
        """Short sequences everywhere, every second one freed, then a long one in the holes."""
        n = self.rng.choice([70, 140, 140])
        self.opening = [("append", [(s, 1) for s in range(n)])]
        self.opening += [("free", s) for s in range(0, n, 2)]
        self.opening += [("append", [(1, n // 2 - 2)])]
        return self._store(self._both([2, 100]), n + self.rng.choice([0, 0, 30]), n, n)

    def _groups(self, windows):
        return [kv.Group("full") if self.rng.random() < .45 else
                kv.Group("sliding", self.rng.choice(windows))
                for _ in range(self.rng.choice([1, 2, 2, 3]))]

    def _both(self, windows):
        groups = [kv.Group("full"), kv.Group("sliding", self.rng.choice(windows))]
        return self.rng.sample(groups, 2)

    def _store(self, groups, n_ctx, n_seq, n_batch):
        smallest = max(1, n_seq * (max(g.w or 0 for g in groups) - 1) + n_batch)
        sliding = self.rng.choice([None, smallest, self.rng.randint(1, smallest)])
        if self.kind == "shred":
            sliding = None
        if self.kind == "tight":
            sliding = max(1, smallest - self.rng.randint(0, n_batch))
        rope = self.kind != "mixed" or self.rng.random() > .08
        return kv.Store(groups, n_ctx, n_seq, n_batch, rope=rope, sliding_cells=sliding)

    def story(self):
        m = self.model
        return (f"{self.kind}: {m.groups} cells {m.size} n_seq {m.n_seq} n_batch {m.n_batch} rope "
                f"{m.rope}\n  " + "\n  ".join(self.calls))

    def step(self):
        """One random call: (name, its numbers, the status it must have), the model changed."""
        weights = WEIGHTS[self.kind]
        name = self.rng.choices(list(weights), list(weights.values()))[0]
        if name == "share" and all(q.pos for q in self.model.seqs) and self.rng.random() < .8:
            name = "free" if self.model.n_seq > 1 else "append"         # nowhere to share to
        forced = []
        if self.opening:
            name, *forced = self.opening.pop(0)
        args, op, *op_args = getattr(self, "_call_" + name)(*forced)
        self.calls.append(" ".join(map(str, (name, *args))))
        try:
            op(*op_args)
        except kv.KvError as error:
            return name, args, STATUS[error.code]
        return name, args, 0

    def seq(self, bad=.02):
        """A sequence, rather a long one; now and then none."""
        rng, n_seq = self.rng, self.model.n_seq
        if rng.random() < bad:
            return rng.choice(BAD_SEQS)
        long = self.kind == "gaps" or n_seq > 5
        tries = rng.choice([1, n_seq, n_seq, n_seq] if long else [1, 1, 3])
        return max((rng.randrange(n_seq) for _ in range(tries)),
                   key=lambda s: len(self.model.seqs[s].pos))

    def hides(self, s, i):
        """Would closing the gap before row i take rows that a window has lost since?"""
        pos, model = self.pos(s), self.model
        new = pos[:i] + [p + pos[i - 1] + 1 - pos[i] for p in pos[i:]]
        return any(kv.first_needed(new, model.groups[g].w) < model.seqs[s].base[g]
                   for g in model.attention)

    def poor(self):
        """A sequence with more shared rows in a full group than there are cells to copy them to."""
        model = self.model
        return next((s for s, q in enumerate(model.seqs) for g, group in enumerate(model.groups)
                     if group.kind == "full" and len(q.pos) < 99 and
                     sum(model.refs[g][c] > 1 for c in q.cells[g]) > model._free(g) + 1), None)

    def pos(self, s):
        return self.model.seqs[s].pos if 0 <= s < self.model.n_seq else []

    def items(self, most):
        """[(sequence, rows)], now and then illegal."""
        rng, n_seq = self.rng, self.model.n_seq
        n_items = min(rng.choice([1, 1, 2, rng.randint(1, n_seq), n_seq]), n_seq, most)
        items = [[s, 1] for s in rng.sample(range(n_seq), n_items)]
        for _ in range(rng.choice([0, rng.randint(0, most - n_items)])):
            rng.choice(items)[1] += 1
        far = [s for s in range(n_seq) if kv.next_pos(self.pos(s)) > kv.POS_MAX - 12]
        if far and rng.random() < .5:
            items[0][0] = rng.choice(far)
        kind = rng.randrange(80)
        if kind == 0:
            items[-1][0] = rng.choice(BAD_SEQS)
        elif kind == 1:
            items[0][1] = 0
        elif kind == 2:
            items.append(list(items[0]))
        elif kind == 3:
            items = []
        elif kind == 4:
            items[0][1] = self.model.n_batch + 1
        elif kind == 5:
            items[0][1] = rng.choice(BAD_COUNTS)
        elif kind == 6 and n_items > 1:
            items[0][1] = items[1][1] = 1 << 31         # a sum that wraps to nothing
        return [tuple(item) for item in items]

    def _call_append(self, items=None):
        items = self.items(self.model.n_batch) if items is None else items
        args = [x for item in items for x in item]
        if any(n >= 1 << 30 for _, n in items):
            return args, self._refuse, "KV_ARG"
        tokens = [(s, tuple(self.rng.randrange(9) for _ in range(n))) for s, n in items]
        return args, self.model.append, tokens

    def _call_can(self):
        items = self.items(4 * self.model.n_batch)
        return [x for item in items for x in item], self._can, items

    def _refuse(self, code):
        raise kv.KvError(code, "")

    def _can(self, items):
        """Batch by batch on a copy, cut from the items in their order; all is as for an append but
        the limit on a batch."""
        if len({s for s, _ in items}) != len(items) or not items or not all(n for _, n in items):
            self._refuse("KV_ARG")
        for s, n in items:
            if kv.next_pos(self.model._seq(s).pos) + n > kv.POS_MAX:
                self._refuse("KV_RANGE")
        trial = pickle.loads(pickle.dumps(self.model))
        rows = [s for s, n in items for _ in range(n)]
        for at in range(0, len(rows), trial.n_batch):
            batch = rows[at:at + trial.n_batch]
            trial.fill_batch_inputs([(s, (0,) * batch.count(s)) for s in dict.fromkeys(batch)])

    def _call_trim(self):
        s, rng = self.seq(), self.rng
        length = len(self.pos(s))
        most = self.model.max_trim(s) if 0 <= s < self.model.n_seq else 0
        n = rng.choice([0, 1, 1, 2, rng.randint(0, length), rng.randint(0, most), most, most + 1,
                        most + 1, most + 2, length, rng.choice([length + 1, *BAD_COUNTS])])
        return (s, n), self.model.trim, s, n

    def _call_free(self, s=None):
        s = self.seq(.15) if s is None else s
        return (s,), self.model.free, s

    def _call_share(self):
        rng, n_seq = self.rng, self.model.n_seq
        empty = [s for s in range(n_seq) if not self.pos(s)]
        src, used = self.seq(), [s for s in range(n_seq) if self.pos(s)]
        if not self.pos(src) and used and rng.random() < .9:
            src = rng.choice(used)
        empty = [s for s in empty if s != src]
        dst = rng.choice(empty) if empty and rng.random() < .9 else self.seq()
        length = len(self.pos(src))
        n = rng.choice([length, length, length, max(0, length - 1), rng.randint(0, length),
                        rng.randint(0, length), max(0, length - rng.randint(0, 6)), 0])
        if rng.random() < .5 and 0 <= src < n_seq:
            n = max(0, length - self.model.max_trim(src) - 1)      # just too little, if anything
        if rng.random() < .05:
            n = rng.choice([length + 1, *BAD_COUNTS])
        return (dst, src, n), self.model.share, dst, src, n

    def _call_rm(self, s=None, p0=None):
        if p0 is not None:
            return (s, p0, p0 + 1), self.model.rm, s, p0, p0 + 1
        s, rng = self.seq(), self.rng
        pos = self.pos(s) or [0]
        end = pos[-1] + 1
        p0 = rng.choice([rng.choice(pos), rng.choice(pos), rng.randint(0, end), 0, end])
        p1 = min(end, p0 + rng.choice([1, 1, 2, 3, rng.randint(0, end - p0)]))
        if self.kind == "shred" and rng.random() < .9:
            p0 = rng.choice(pos)
            p1 = p0 + 1
        poor = self.poor() if rng.random() < .6 else None
        if poor is not None:
            s, pos = poor, self.pos(poor)
            end, p0, p1 = pos[-1] + 1, pos[0], pos[0] + 1           # all the others move
        if rng.random() < .15 and 0 <= s < self.model.n_seq:        # as trim's first refusal
            p1 = max(0, end - rng.choice([0, 1, 2]))
            p0 = max(0, p1 - self.model.max_trim(s) - 1)
        if rng.random() < .06:
            p0, p1 = rng.choice([(p1, p0), (p0, end + 1), (-1, p1), (p0, rng.choice(BAD_POSITIONS)),
                                 (rng.choice(BAD_POSITIONS), p1), (end, end), (p0, p0)])
        return (s, p0, p1), self.model.rm, s, p0, p1

    def _call_shift(self, s=None, p0=None):
        if p0 is not None:
            return (s, p0, 1), self.model.shift, s, p0, 1
        s, rng = self.seq(), self.rng
        poor = self.poor() if rng.random() < .2 else None
        if poor is not None:
            return (poor, 0, 1), self.model.shift, poor, 0, 1
        pos = self.pos(s) or [0]
        i = rng.choice([rng.randrange(len(pos)), max(0, len(pos) - rng.randint(1, 4))])
        gaps = [i for i in range(1, len(pos)) if pos[i] > pos[i - 1] + 1]
        if gaps and rng.random() < .4:
            i = rng.choice(gaps[-3:])
        before = pos[i] - (pos[i - 1] if i else -1)     # 1: no gap
        p0 = pos[i]
        delta = rng.choice([1, 1, 2, 3, rng.randint(1, 9), 1 - before, 1 - before, -before,
                            -rng.randint(1, 4)])
        if pos[-1] > 1 << 20 and rng.random() < .5:
            p0, delta = pos[0], -pos[0]                 # back from the end of the axis
        elif self.kind == "gaps" and rng.random() < .9:
            plain = [b for a, b in zip(pos, pos[1:]) if b == a + 1]
            p0, delta = rng.choice(plain or pos), rng.choice([1, 2])
        elif gaps and rng.random() < .5:
            i = next((i for i in gaps[::-1] if self.hides(s, i)), i)
            p0, delta = pos[i], pos[i - 1] + 1 - pos[i] if i else -1
        elif rng.random() < .2:
            p0 = rng.choice([p0, rng.randint(0, pos[-1] + 1), pos[-1] + 1, pos[-1] + 2,
                             rng.choice(BAD_POSITIONS)])
            last = kv.POS_MAX - 1 - pos[-1]
            delta = rng.choice([0, last, last - rng.randint(0, 4), last + 1, -p0 - 1,
                                (1 << 31) - 1, -(1 << 31), delta])
            delta = max(-(1 << 31), min((1 << 31) - 1, delta))
        return (s, p0, delta), self.model.shift, s, p0, delta

    def _room(self):
        free = min(self.model._free(g) for g in self.model.attention)
        rng = self.rng
        return rng.choice([0, 1, 2, rng.randint(0, free), free, free + 1,
                           rng.choice([rng.randint(0, 2 * free + 3), *BAD_COUNTS])])

    def _call_reserve(self):
        s, n = self.seq(.1), self._room()
        return (s, n), self.model.reserve_seq, s, n

    def _call_defrag_reserve(self):
        s, n = self.seq(.1), self._room()
        return (s, n), self.model.reserve_seq, s, n, True

    def _call_defrag(self, n=None):
        n = self._room() if n is None else n
        return (n,), self.model.defrag, n

    def _call_cells(self):
        """The rows that a store would write: all live, and nobody else's."""
        g, s, rng = self.rng.choice(self.model.attention), self.seq(), self.rng
        length = len(self.pos(s))
        first = rng.randint(0, length)
        n = rng.choice([1, rng.randint(1, max(1, length - first)), *BAD_COUNTS])
        shared = [i for i in range(length) if 0 <= s and self._readers(g, s, i) > 1]
        if rng.random() < .6:
            first, n = rng.choice(shared) if shared else max(0, length - 1), 1
        return (g, s, first, n), self._store_cells, g, s, first, n

    def _readers(self, g, s, i):
        q = self.model.seqs[s]
        return self.model.refs[g][q.cells[g][i - q.base[g]]] if i >= q.base[g] else 0

    def _store_cells(self, g, s, first, n):
        q = self.model._seq(s)
        if not q.base[g] <= first <= first + n <= len(q.pos):
            self._refuse("KV_ARG")
        for i in range(first, first + n):
            self.model.store_cell(s, g, i)

    def _call_window(self):
        """Windows of rows that are not fresh; the comparison is check_windows'."""
        return (), lambda: None

    def some(self, most):
        """Different sequences."""
        n_seq = self.model.n_seq
        n = min(most, self.rng.choice([1, 1, 2, n_seq, self.rng.randint(0, n_seq)]))
        return self.rng.sample(range(n_seq), n)

    def _bad(self, ids):
        """Now and then a sequence that is not there, or one twice."""
        if ids and self.rng.random() < .05:
            ids[self.rng.randrange(len(ids))] = self.rng.choice(BAD_SEQS)
        elif ids and self.rng.random() < .05:
            ids.append(ids[0])
        return ids

    def _call_dump(self):
        ids = self._bad(self.some(self.model.n_seq))
        return ids, self._dump, ids

    def _dump(self, ids):
        if len(set(ids)) < len(ids) or not all(0 <= s < self.model.n_seq for s in ids):
            self._refuse("KV_ARG")
        self.image = kv_image.image_of(self.model, ids)
        self.images = [*self.images[-3:], self.image]

    def _call_load(self):
        """Something that was dumped before, or that a store with more room made."""
        kept = [i for i in self.images if self.rng.random() < .5]
        self.image = image = self.rng.choice(kept) if kept else self._donated()
        n = len(image["seqs"])
        into = self.rng.sample(range(self.model.n_seq), n)
        if self.rng.random() < .3 and all(s < self.model.n_seq for s in image["seqs"]):
            into = list(image["seqs"])
        into = self._bad(into)
        if self.rng.random() < .03:
            into = into[:-1] if self.rng.random() < .5 else [*into, 0]
        return ([*kv_image.encode(image, self.model.groups), "into", *into],
                self._load, image, into)

    def _load(self, image, into):
        if len(set(into)) < len(into) or len(into) != len(image["seqs"]):
            self._refuse("KV_ARG")
        for s in into:
            self.model._seq(s)
        self.image = kv_image.renamed(image, into)
        self.model.load(self.image, {s: [] for s in into})

    def _donated(self):
        """An image from a store with room for everything: much of it is stale."""
        rng, n_seq = self.rng, self.model.n_seq
        most = max(2, min(self.model.size[g] for g in self.model.attention))
        donor = kv.Store(self.model.groups, 8 * most, n_seq, 8 * most, sliding_cells=8 * most)
        names = rng.sample(range(n_seq), min(n_seq, rng.choice([1, 2, 2, 3])))
        rows = rng.choice([rng.randint(1, most) // len(names), most // 2, most])
        if len(names) > 1 and rng.random() < .3:        # more shared rows than a window keeps
            donor.append([(names[0], (0,) * (most - 1))])
            rows = rng.randint(1, 4)
        for s in names:
            try:
                self._write(donor, s, rng.choice(names), rows)
            except kv.KvError:                          # an edit before let stale rows go
                pass
        return kv_image.image_of(donor, names)

    def _write(self, store, s, src, rows):
        """Something for sequence s, shared with src or not."""
        rng, q, length = self.rng, store.seqs[s], len(store.seqs[src].pos)
        if not q.pos and s != src and length and rng.random() < .7:
            store.share(s, src, rng.choice([length, rng.randint(1, length)]))
            rows = min(rows, 8)
        if rng.random() < .8:
            n = rng.randint(1, rows + 1)
            store.append([(s, tuple(rng.randrange(9) for _ in range(n)))])
        for _ in range(rng.choice([0, 0, 1, 3]) if self.model.rope else 0):
            p = rng.choice(q.pos or [0])
            if rng.random() < .6:
                store.rm(s, p, p + 1)
            else:
                store.shift(s, p, rng.randint(1, 3))
        if rng.random() < .4:
            store.trim(s, rng.randint(0, store.max_trim(s)))

    def queries(self):
        """[(sequence, n)] whose last n rows still have their windows in every group."""
        out = []
        for s in self.rng.sample(range(self.model.n_seq), min(3, self.model.n_seq)):
            q, n = self.model.seqs[s], self.rng.choice([1, 2, 5])
            if len(q.pos) >= n and all(
                    kv.first_seen(q.pos, self.model.groups[g].w, q.pos[-n]) >= q.base[g]
                    for g in self.model.attention):
                out.append((s, n))
        return out


def random_moves(rng):
    """Runs between random places, mostly a map that no two rows share; rarely nonsense."""
    moves, n = [], rng.choice([3, 6, 12, 30])
    for group in rng.sample(range(3), rng.choice([1, 1, 2])):
        cells = rng.sample(range(n), rng.randint(0, n))
        places = sorted(rng.sample(range(n), len(cells)))
        if rng.random() < .5:
            cells.sort()
        if rng.random() < .3:                           # a rotation or another permutation
            places = rng.sample(cells, len(cells))
        moves += [kv.Move(a, b, length, group) for b, a, length in kv.spans_of(places, cells)]
    rng.shuffle(moves)
    kind = rng.randrange(12)
    if moves and kind == 0:
        i = rng.randrange(len(moves))
        moves[i] = rng.choice([moves[i]._replace(n=rng.choice([0, -1, -(1 << 31)])),
                               moves[i]._replace(src=rng.choice([-1, -(1 << 31)])),
                               moves[i]._replace(dst=-1)])
    elif moves and kind == 1:
        m = rng.choice(moves)
        moves.append(rng.choice([m._replace(dst=m.dst + n), m._replace(src=m.src + n)]))
    return moves, rng.choice([-1, n, n])
