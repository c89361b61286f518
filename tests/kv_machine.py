"""A state machine that does to a cache all that can be done to it, and what must hold meanwhile.

Owns the rules: every call goes to several engines that differ in instruction set and threads (and,
where acceptance cannot depend on it, in batch size); all must accept or refuse alike, as kv_judge.py
says, and answer with the same bytes. After every step, on all engines:

- kv.check() holds; lengths, positions and spans are what the calls so far make them;
- the next logits of every sequence equal, bit for bit, those of a fresh engine fed the sequence's
  own history the plainest way (replay.py);
- a refused call changed nothing: lengths, max_trim, spans and counters are what they were.

What the steps cover is counted in SEEN, so that a test can tell a run that did nothing.
"""

from collections import Counter

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from kv_judge import Argument, Gone, Judge, Sequence, state, window_of
from kv_model import POS_MAX, gaps, moved, next_pos, spans_of
from replay import PROBE, signature

import minfer

N_SEQ = 4
RULES = {}  # name -> (function of a machine, strategies of its arguments)
SEEN = Counter()  # what has been covered, over all runs of this process


def step(**strategies):
    """hypothesis.stateful.rule, and an entry in RULES for those who draw steps otherwise."""

    def register(function):
        RULES[function.__name__] = function, strategies
        return rule(**strategies)(function)

    return register


def cells_by_position(engine, s, g):
    return {p.pos + i: p.cell + i for p in engine.kv.spans(s, g) for i in range(p.len)}


def tokens_of(n, salt, n_vocab):
    """n tokens; without salt a simple run, which is what Hypothesis shrinks to."""
    if not salt:
        return [10 + i for i in range(n)]
    return np.random.RandomState(salt).randint(3, n_vocab, n).tolist()


seqs = st.integers(0, N_SEQ - 1)
salts = st.integers(0, 2**16)
counts = st.sampled_from([1, 2, 3, 5, 8, 16, 17, 30])
parts = st.integers(0, 64)  # of 64: a place in a sequence
deltas = st.one_of(st.integers(-9, 9), st.integers(-90, 90), st.sampled_from([63, 64, 65, 1000]))


class Machine(RuleBasedStateMachine):
    """Sequences 0..3 of some engines. Arguments are drawn as places ("so many 64ths of it"), so that
    most calls make sense at any length, and reach a little beyond the ends."""

    setup = None  # the class's Setup, see there

    def __init__(self):
        super().__init__()
        self.steps = 0
        self.engines, self.replay = self.setup.make()
        self.pos_end, self.n_vocab = self.setup.pos_end, self.engines[0].n_vocab
        self.seqs = [Sequence(self.replay.root) for _ in range(N_SEQ)]
        kinds = [[group.kind for group in engine.kv.stats()] for engine in self.engines]
        assert all(k == kinds[0] for k in kinds)
        if self.setup.n_prompt:
            prompt = tokens_of(self.setup.n_prompt, 1, self.n_vocab)
            self.do_chunks("prompt", [(0, prompt)], ["last"])
            self.do_share(1, 0, len(prompt))

    def teardown(self):
        if self.setup.afresh_every:
            for sequence in self.seqs:
                self.afresh(sequence)
        SEEN["afresh"] += self.replay.afresh_checks
        for engine in self.engines:
            SEEN[f"isa {engine.isa}"] += 1
            for group in engine.kv.stats():
                SEEN["regroups by a forward"] += group.compactions
        self.setup.done(self.engines, self.replay)

    def afresh(self, sequence):
        if sequence.pos and next_pos(sequence.pos) < self.pos_end:
            self.replay.afresh(sequence.history)

    # ---- calls ----

    def call(self, name, make, expected):
        """make(engine) on all engines: all must do as expected, and alike. Returns the results, or
        None after a refusal."""
        before = [state(engine) for engine in self.engines] if expected else None
        results, errors = [], []
        for engine in self.engines:
            try:
                results.append(make(engine))
                errors.append(None)
            except minfer.Error as error:
                results.append(error)
                errors.append(type(error))
        assert all(error is expected for error in errors), (
            f"{name}: expected {expected and expected.__name__}, got {results}"
        )
        SEEN[f"{name}: {expected.__name__}" if expected else name] += 1
        if expected:
            after = [state(engine) for engine in self.engines]
            assert before == after, f"{name} was refused and changed something"
            return None
        return results

    def judge(self):
        return Judge(self.engines[0], self.seqs, self.pos_end)

    def do_append(self, name, batch, forward):
        """forward(engine) appends batch [(sequence, tokens)] and returns per chunk the rows of
        logits it gave, as {index of the token: row}."""
        for s, _ in batch:
            if self.seqs[s].history.depth > self.setup.max_events:
                self.do_free(s)
        results = self.call(name, forward, self.judge().append([(s, len(t)) for s, t in batch]))
        if results is None:
            return False
        for k, (s, tokens) in enumerate(batch):
            sequence = self.seqs[s]
            nodes = [sequence.history]
            for token in tokens:
                nodes.append(nodes[-1].append([token]))
            for engine, chunks in zip(self.engines, results, strict=True):
                for i, row in chunks[k].items():
                    assert signature(row) == self.replay.row(nodes[1 + i]), (
                        f"{name}: logits of token {i} of sequence {s} on {engine.isa}"
                    )
                    SEEN["rows compared"] += 1
            p = next_pos(sequence.pos)
            sequence.pos = sequence.pos + list(range(p, p + len(tokens)))
            sequence.history = nodes[-1]
            sequence.reserved = max(0, sequence.reserved - len(tokens))
        return True

    def do_chunks(self, name, batch, logits):
        """batch [(sequence, tokens)] through forward_batch; logits: one word per chunk."""
        chunks = [minfer.Chunk(s, t, want) for (s, t), want in zip(batch, logits)]

        def forward(engine):
            out = engine.forward_batch(chunks)
            return [
                dict(enumerate(rows, 0 if want == "all" else len(t) - 1))
                for (_, t), want, rows in zip(batch, logits, out, strict=True)
            ]

        return self.do_append(name, batch, forward)

    def do_edit(self, s, kind, *args):
        """trim, rm or shift."""
        judge = self.judge()
        expected = getattr(judge, kind)(s, *args)
        shared = judge.shared(s, 0)
        if self.call(kind, lambda e: getattr(e.kv, kind)(s, *args), expected) is None:
            return False
        sequence = self.seqs[s]
        pos = sequence.pos
        if kind == "trim":
            idle, new = args[0] == 0, pos[: len(pos) - args[0]]
        elif kind == "rm":
            p0, p1 = args
            new = [p for p in pos if p < p0] + [p - (p1 - p0) for p in pos if p >= p1]
            idle = p0 == p1
        else:
            p0, delta = args
            new = [p + delta if p >= p0 else p for p in pos]
            idle = new == pos
        if idle:
            return True
        if shared:
            SEEN[f"{kind} of a sequence that shares"] += 1
        if gaps(new):
            SEEN[f"{kind} among gaps"] += 1
        sequence.pos = new
        if new:
            sequence.history = sequence.history.then(kind, *args)
        else:
            sequence.empty(self.replay.root)
        return True

    def do_free(self, s):
        self.call("free", lambda e: e.kv.free(s), None)
        self.seqs[s].empty(self.replay.root)
        self.seqs[s].reserved = 0

    def do_share(self, dst, src, n):
        done = self.call(
            "share", lambda e: e.kv.share(dst, src, n), self.judge().share(dst, src, n)
        )
        if done is None or not n:
            return
        source, n_rows = self.seqs[src], len(self.seqs[src].pos)
        self.seqs[dst].pos = source.pos[:n]
        self.seqs[dst].history = (
            source.history.then("trim", n_rows - n) if n < n_rows else source.history
        )

    def do_moves(self, name, expected, make):
        """A call that may compact: whoever applies the returned moves knows where each row is."""
        groups = range(self.engines[0].n_groups)
        places = [(s, g) for s in range(N_SEQ) for g in groups]
        before = [[cells_by_position(e, s, g) for s, g in places] for e in self.engines]
        results = self.call(name, make, expected)
        if results is None:
            return None
        for engine, moves, old in zip(self.engines, results, before, strict=True):
            SEEN["rows moved"] += sum(move.n for move in moves)
            for (s, g), cells in zip(places, old, strict=True):
                for p, cell in cells_by_position(engine, s, g).items():
                    assert moved(moves, cells[p], g) == cell, (
                        f"moves {moves} lose position {p} of {s}"
                    )
        return results

    def rows(self, s):
        return len(self.seqs[s].pos)

    def place(self, s, part):
        """A position of s, from 0 to next_pos."""
        return next_pos(self.seqs[s].pos) * part // 64

    def emptied(self, src, n):
        """n sequences other than src, the shortest, and frees them."""
        out = sorted((s for s in range(N_SEQ) if s != src), key=self.rows)[:n]
        for s in out:
            self.do_free(s)
        return out

    # ---- rules: growing ----

    @step(s=seqs)
    def advance(self, s):
        """Plain growth. Hypothesis favours the rule of the fewest arguments and the first name."""
        n = 1 + self.steps % 7
        self.do_chunks("append", [(s, tokens_of(n, 1 + self.steps, self.n_vocab))], ["all"])

    @step(s=seqs, n=counts, salt=salts, logits=st.sampled_from(["all", "last", "none"]))
    def append(self, s, n, salt, logits):
        self.do_chunks("append", [(s, tokens_of(n, salt, self.n_vocab))], [logits])

    @step(
        sizes=st.lists(st.integers(0, 12), min_size=N_SEQ, max_size=N_SEQ),
        order=st.permutations(range(N_SEQ)),
        salt=salts,
        logits=st.sampled_from(["all", "last", "none"]),
    )
    def batch(self, sizes, order, salt, logits):
        tokens = tokens_of(sum(sizes), salt, self.n_vocab)
        chunks, at = [], 0
        for s in order:
            if sizes[s]:
                chunks.append((s, tokens[at : at + sizes[s]]))
                at += sizes[s]
        if chunks:
            words = ["all", "last", "none"]
            first = words.index(logits)
            self.do_chunks("batch", chunks, [words[(first + i) % 3] for i in range(len(chunks))])

    @step(
        pads=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=N_SEQ),
        extra=st.integers(0, 3),
        order=st.permutations(range(N_SEQ)),
        salt=salts,
    )
    def padded(self, pads, extra, order, salt):
        """Rows of 4 + extra tokens: some are pads and nothing else."""
        width, which = 4 + extra, list(order[: len(pads)])
        left = [a for a, _ in pads]
        right = [min(b, width - a) for a, b in pads]
        ids = np.array(tokens_of(width * len(pads), salt, self.n_vocab)).reshape(-1, width)
        batch = [
            (s, row[a : width - b].tolist())
            for s, row, a, b in zip(which, ids, left, right)
            if a + b < width
        ]
        lefts = [a for a, b in zip(left, right) if a + b < width]
        kept = [k for k, (a, b) in enumerate(zip(left, right)) if a + b < width]
        SEEN["rows that are all pads"] += len(pads) - len(kept)

        def forward(engine):
            out = engine.forward_padded(ids, left_padding=left, right_padding=right, seqs=which)
            assert out.shape == (len(pads), width, engine.n_vocab)
            return [
                {i: out[k, a + i] for i in range(len(t))}
                for k, a, (_, t) in zip(kept, lefts, batch, strict=True)
            ]

        if batch:
            self.do_append("padded", batch, forward)

    @step(s=seqs, salt=salts, back=st.sampled_from([4, 4, 4, 0]))
    def fill(self, s, salt, back):
        """Appends until no cell is free; mostly, then takes back what a probe of all needs."""
        n = 16
        endless = None not in self.judge().windows
        for i in range(4 if endless else min(40, self.setup.max_edits)):
            tokens = tokens_of(n, salt and salt + i, self.n_vocab)
            if next_pos(self.seqs[s].pos) + n > self.pos_end:
                break
            if not self.do_chunks("fill", [(s, tokens)], ["last"]):
                if n == 1:
                    self.do_edit(s, "trim", min(back, self.rows(s)))
                    break
                n = n // 4

    # ---- rules: sharing ----

    @step(dst=seqs, src=seqs, part=parts, extra=st.sampled_from([0, 0, 0, 0, 1]))
    def share(self, dst, src, part, extra):
        self.do_share(dst, src, self.rows(src) * part // 64 + extra)

    @step(src=seqs, part=parts, salt=salts, n=st.integers(0, 3))
    def chain(self, src, part, salt, n):
        """Frees two sequences: one reads the source, goes on, and is read by the other."""
        b, c = self.emptied(src, 2)
        self.do_share(b, src, self.rows(src) * part // 64)
        if n:
            self.do_chunks("append", [(b, tokens_of(n, salt, self.n_vocab))], ["all"])
        self.do_share(c, b, self.rows(b))
        SEEN["chain"] += 1

    @step(
        src=seqs, part=parts, at=parts, back=st.booleans(), edit=st.sampled_from(["rm", "up", "down"]),
        n=st.integers(1, 9),
    )  # fmt: skip
    def fork_and_edit(self, src, part, at, back, edit, n):
        """Shares, and edits one of the two before anything else has happened to them."""
        (dst,) = self.emptied(src, 1)
        self.do_share(dst, src, self.rows(src) * part // 64)
        s = src if back else dst
        p0 = self.place(s, at)
        if edit == "rm":
            self.do_edit(s, "rm", p0, min(p0 + n, next_pos(self.seqs[s].pos)))
        else:
            self.do_edit(s, "shift", p0, n if edit == "up" else -n)
        SEEN["fork and edit"] += 1

    @step(s=seqs)
    def free(self, s):
        self.do_free(s)

    # ---- rules: edits ----

    @step(s=seqs, n=st.integers(-1, 24))
    def trim(self, s, n):
        if n >= 0:
            self.do_edit(s, "trim", n)

    @step(s=seqs, beyond=st.booleans())
    def trim_all_it_can(self, s, beyond):
        """max_trim rows can go; one more must be refused, unless nothing would be left."""
        limits = {engine.kv.max_trim(s) for engine in self.engines}
        assert len(limits) == 1
        n = limits.pop() + beyond
        if beyond and n != self.rows(s):
            assert self.judge().trim(s, n) in (Argument, Gone)
        elif not beyond:
            assert self.judge().trim(s, n) is None
        self.do_edit(s, "trim", n)
        SEEN["trim past the limit" if beyond else "trim to the limit"] += 1

    @step(s=seqs, a=parts, b=parts, order=st.sampled_from([False, False, False, True]))
    def rm(self, s, a, b, order):
        p0, p1 = self.place(s, a), self.place(s, b)
        self.do_edit(s, "rm", *((p0, p1) if order else sorted((p0, p1))))

    @step(s=seqs, a=parts, n=st.integers(1, 4))
    def rm_few(self, s, a, n):
        p0 = self.place(s, a)
        self.do_edit(s, "rm", p0, p0 + n)  # at times beyond the end

    @step(s=seqs, at=parts, delta=deltas)
    def shift(self, s, at, delta):
        self.do_edit(s, "shift", self.place(s, at), delta)

    @step(s=seqs, at=parts, beyond=st.integers(0, 1))
    def shift_to_the_end(self, s, at, beyond):
        """The last row to the last legal position, or one beyond. Appends are then refused."""
        pos = self.seqs[s].pos
        if pos:
            self.do_edit(s, "shift", self.place(s, at), self.pos_end - 1 + beyond - pos[-1])

    @step(s=seqs, below=st.integers(0, 1))
    def shift_to_the_start(self, s, below):
        pos = self.seqs[s].pos
        if pos:
            self.do_edit(s, "shift", pos[0], -pos[0] - below)

    @step(s=seqs, step=st.sampled_from([1, 2, 70]))
    def comb(self, s, step):
        """A gap before as many rows as may have one."""
        for i in range(self.rows(s) - 1, 0, -1)[: self.setup.max_edits]:
            if not self.do_edit(s, "shift", self.seqs[s].pos[i], step):
                break

    @step(
        s=seqs, kind=st.sampled_from(["rm", "trim", "share"]), off=st.integers(-3, 3),
        tail=st.integers(0, 3),
    )  # fmt: skip
    def at_the_window(self, s, kind, off, tail):
        """Edits after which the next query needs rows about as old as the oldest that are left."""
        judge, pos = self.judge(), self.seqs[s].pos
        edges = [judge.base(s, g) + w - 1 for g, w in enumerate(judge.windows) if w]
        keep = max(edges, default=0) + off
        if not tail < keep < len(pos):
            return
        if kind == "trim":
            self.do_edit(s, "trim", len(pos) - keep)
        elif kind == "rm":
            end = pos[-tail] if tail else next_pos(pos)
            self.do_edit(s, "rm", pos[keep - tail], end)
        else:
            (dst,) = self.emptied(s, 1)
            self.do_share(dst, s, keep)

    # ---- rules: cells ----

    @step(s=seqs, n=st.sampled_from([0, 1, 4, 20, 60, 149]), defrag=st.booleans())
    def reserve(self, s, n, defrag):
        expected = self.judge().reserve(s, n)
        if defrag:
            done = self.do_moves(
                "reserve with defrag", expected, lambda e: e.kv.reserve(s, n, defrag=True)
            )
        else:
            done = self.call("reserve", lambda e: e.kv.reserve(s, n), expected)
        if done is not None and None in self.judge().windows:
            self.seqs[s].reserved = n

    @step(need=st.sampled_from([0, 1, 8, 30, 60, 150]))
    def defrag(self, need):
        self.do_moves("defrag", self.judge().defrag(need), lambda e: e.kv.defrag(need))
        if need == 0:
            for engine in self.engines:
                assert all(group.n_free_runs <= 1 for group in engine.kv.stats())

    @step(s=st.sampled_from([-1, N_SEQ, 2**31 - 1]), other=seqs)
    def unknown_sequence(self, s, other):
        calls = {
            "len": lambda kv: kv.len(s),
            "next_pos": lambda kv: kv.next_pos(s),
            "max_trim": lambda kv: kv.max_trim(s),
            "spans": lambda kv: kv.spans(s),
            "trim": lambda kv: kv.trim(s, 1),
            "rm": lambda kv: kv.rm(s, 0, 1),
            "shift": lambda kv: kv.shift(s, 0, 1),
            "share to": lambda kv: kv.share(s, other, 1),
            "share from": lambda kv: kv.share(other, s, 1),
            "free": lambda kv: kv.free(s),
            "reserve": lambda kv: kv.reserve(s, 1),
        }
        for name, call in calls.items():
            self.call(f"unknown {name}", lambda e, call=call: call(e.kv), Argument)
        self.call("unknown append", lambda e: e.forward_cached([PROBE], s), Argument)
        SEEN["unknown sequence"] += 1

    # ---- what must hold after every step ----

    @invariant()
    def the_law(self):
        SEEN["steps"] += 1
        self.steps += 1
        self.check_books()
        self.check_logits()
        every = self.setup.afresh_every
        if every and self.steps % every == 0:
            self.afresh(self.seqs[self.steps // every % N_SEQ])

    def check_books(self):
        for engine in self.engines:
            kv = engine.kv
            kv.check()
            for s, sequence in enumerate(self.seqs):
                pos = sequence.pos
                assert (kv.len(s), kv.next_pos(s)) == (len(pos), next_pos(pos))
                for g in range(engine.n_groups):
                    cells = cells_by_position(engine, s, g)
                    live = list(cells)
                    assert live == pos[len(pos) - len(live) :], f"positions of {s} in group {g}"
                    assert kv.spans(s, g) == spans_of(live, list(cells.values()))
            for g, group in enumerate(kv.stats()):
                held = sum(q.reserved for q in self.seqs) if window_of(group.kind) is None else 0
                assert group.n_reserved == held, f"group {g} holds {group.n_reserved}, not {held}"
        for group in self.engines[0].kv.stats():
            SEEN["steps with shared cells"] += group.n_shared > 0
            SEEN["steps with stale rows"] += group.n_stale > 0
            SEEN["steps with several free runs"] += group.n_free_runs > 1

    def check_logits(self):
        """One token more for every sequence and back again: trim is exact, so it leaves no trace but
        older rows that a window has dropped for it, and what it drew of a reservation."""
        todo = [s for s in range(N_SEQ) if 0 < next_pos(self.seqs[s].pos) < self.pos_end]
        for s in todo:
            self.count_shape(s)
        if not todo or self.probe(todo):
            return
        for s in todo:  # no cell for all at once
            if not self.probe([s]):
                SEEN["not probed for want of a cell"] += 1

    def count_shape(self, s):
        spans = self.engines[0].kv.spans(s, 0)
        SEEN["sequences in several spans"] += len(spans) > 1
        SEEN["sequences with gaps"] += gaps(self.seqs[s].pos) > 0
        SEEN["longest sequence"] = max(SEEN["longest sequence"], len(self.seqs[s].pos))

    def probe(self, which):
        chunks = [minfer.Chunk(s, [PROBE]) for s in which]
        expected = self.judge().append([(s, 1) for s in which])
        results = self.call("probe", lambda e: e.forward_batch(chunks), expected)
        if results is None:
            return False
        for s in which:
            self.call("probe back", lambda e, s=s: e.kv.trim(s, 1), None)
            held = self.seqs[s].reserved
            if held:
                self.call("probe hold", lambda e, s=s, n=held: e.kv.reserve(s, n), None)
        for k, s in enumerate(which):
            wanted = self.replay.next(self.seqs[s].history)
            for engine, out in zip(self.engines, results, strict=True):
                assert signature(out[k]) == wanted, (
                    f"next logits of sequence {s} on {engine.isa}, {engine.n_threads} threads"
                )
                SEEN["next logits compared"] += 1
        return True


class Setup:
    """What a machine runs on: engines to drive in lockstep, and the replay.

    pos_end: first position that the engines refuse; n_prompt: tokens that sequence 0 begins with,
    and 1 reads; afresh_every: steps between replays from nothing (0: none); max_events: a sequence
    with a longer history is freed before it goes on; max_edits: most calls of one step in a row.
    """

    pos_end, n_prompt, afresh_every, max_events, max_edits = POS_MAX, 0, 8, 500, 70

    def make(self):
        """(engines with empty sequences, a Replay)"""
        raise NotImplementedError

    def done(self, engines, replay):
        for engine in engines:
            engine.close()
        replay.close()


def machine_of(setup):
    return type("Machine", (Machine,), {"setup": setup})
