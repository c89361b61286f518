"""The plainest way to compute a sequence: what the law says every other way must equal.

Owns histories and their replay. A history is what happened to one sequence: the tokens appended and
the edits accepted, in order, as a path in a tree, so that histories with a common beginning share
it. A share copies the source's history and adds the trim that it amounts to; a refused call, and
anything that happens to other sequences, is not in it; a sequence that was emptied has none.

The replay runs alone in an engine of its own, one token per forward, the same edits between the
same tokens, with room for every row, so that nothing is evicted, shared, compacted or reserved.
"""

from hashlib import blake2b

import minfer

PROBE = 5  # the token whose logits stand for what a sequence says next


def signature(logits):
    """Of all bits of an array: equal signatures mean equal bytes."""
    return blake2b(logits.tobytes(), digest_size=16).digest()


class History:
    """A node of the tree: the history of `parent`, then `event`."""

    __slots__ = ("parent", "event", "depth", "children", "row", "next")

    def __init__(self, parent=None, event=None):
        self.parent, self.event = parent, event
        self.depth = parent.depth + 1 if parent else 0
        self.children = {}
        self.row = None  # signature of the logits that this event, an append, returned
        self.next = None  # signature of the logits of PROBE after it

    def then(self, *event):
        """This history and one more event: ("append", token), ("trim", n), ("rm", p0, p1) or
        ("shift", p0, delta)."""
        if event not in self.children:
            self.children[event] = History(self, event)
        return self.children[event]

    def append(self, tokens):
        node = self
        for token in tokens:
            node = node.then("append", int(token))
        return node

    def events(self, since=None):
        """The events after the node `since`, in order."""
        out, node = [], self
        while node is not since and node.parent:
            out.append(node)
            node = node.parent
        return out[::-1]


class Replay:
    """Computes histories of one model in one KV format. `root` is the empty history.

    An engine that stands at an ancestor of the wanted history goes on from there, because its state
    came about by that very history; otherwise a new one is loaded. What a probe adds is trimmed
    away again, which must leave no trace: `afresh` proves it, with an engine that was never probed.
    """

    def __init__(self, path, n_rows, *, n_live=4, lead=0, **options):
        """`n_rows`: most rows of a history at any time. `n_live` engines are kept. `lead`: the first
        so many events, if all are appends, go in with one forward, except afresh; for a model that
        is slow. Their rows stay unknown."""
        # A sliding group has room for n_batch rows beyond its windows: here, for every row.
        self._load = lambda: minfer.load(path, n_ctx=n_rows, n_seq=1, n_batch=n_rows, **options)
        self.root = History()
        self._n_live, self._lead = n_live, lead
        self._live = {}  # node -> the engine that stands there; the least recently used first
        self.loads = self.forwards = self.afresh_checks = 0

    def close(self):
        for engine in self._live.values():
            engine.close()
        self._live = {}

    def row(self, history):
        """Signature of the logits of the append that ends the history."""
        if history.row is None:
            self._stand_at(history)
        return history.row

    def next(self, history):
        """Signature of the logits of PROBE after the history."""
        if history.next is None:
            engine = self._stand_at(history)
            history.next = signature(engine.forward_cached([PROBE]))
            engine.kv.trim(0, 1)
        return history.next

    def afresh(self, history):
        """Computes the history from nothing in a new engine: must equal what is known of it."""
        with self._load() as engine:
            for node in history.events():
                self._do(engine, node)
            logits = signature(engine.forward_cached([PROBE]))
            engine.kv.check()
        self.afresh_checks += 1
        assert history.next in (None, logits), "the replay depends on how it came about"
        history.next = logits

    def _stand_at(self, history):
        node = history
        while node not in self._live and node.parent:
            node = node.parent
        steps = history.events(node)
        engine = self._live.pop(node, None)
        if engine is None:
            engine = self._fresh()
            lead = [step.event[1] for step in steps[: self._lead] if step.event[0] == "append"]
            if lead and len(lead) == self._lead:
                engine.forward_cached(lead, logits="none")
                steps = steps[self._lead :]
        for step in steps:
            self._do(engine, step)
        self._live[history] = engine
        return engine

    def _fresh(self):
        while len(self._live) >= self._n_live:
            self._live.pop(next(iter(self._live))).close()
        self.loads += 1
        return self._load()

    def _do(self, engine, node):
        name, *args = node.event
        if name != "append":
            getattr(engine.kv, name)(0, *args)
            return
        self.forwards += 1
        row = signature(engine.forward_cached(args))
        assert node.row in (None, row), "the replay depends on how it came about"
        node.row = row
