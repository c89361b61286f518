"""minfer's own side of `minfer bench`: bench_worker.py MODEL serves these calls, in seconds.

    open N_CTX N_SEQ N_BATCH N_THREADS FORMAT  to load the model; 0 threads, "auto": the defaults
    first N                                    to read N tokens and pick the next
    prefill DEPTH N                            to read N tokens after DEPTH others
    decode DEPTH N                             to read N tokens one by one after DEPTH + 1 others
    batch N_SEQ N                              the same in so many empty sequences together
and
    facts  what the engine has chosen, and of each group of layers the kind, how many and the bytes
           of a token
    limits what the machine can do at most with the engine's threads
    peak   most bytes of the process since `open`

The rows before are computed once for all measurements of a depth. Invariant: sequence 0 holds the
rows of a depth, and after each call no other sequence holds any.
"""

import sys
from time import perf_counter
from typing import Any

import minfer
from minfer.tools.bench_serve import forget_peak, peak_bytes, serve, tokens


class _Worker:
    def __init__(self, path: str) -> None:
        self._path = path
        self._engine: minfer.Engine | None = None

    def open(self, n_ctx: str, n_seq: str, n_batch: str, n_threads: str, fmt: str) -> float:
        if self._engine:
            self._engine.close()
        forget_peak()
        start = perf_counter()
        self._engine = minfer.load(
            self._path,
            n_ctx=int(n_ctx),
            n_seq=int(n_seq),
            n_batch=int(n_batch),
            threads=int(n_threads) or None,
            cache_type=None if fmt == "auto" else fmt,
        )
        return perf_counter() - start

    def facts(self) -> dict[str, Any]:
        engine = self._engine
        groups = [(g.kind, g.n_layers, g.bytes_per_token) for g in engine.kv.stats()]
        return {"isa": engine.isa, "kv_format": engine.kv_format, "groups": groups}

    def limits(self) -> dict[str, float]:
        engine = self._engine
        return minfer.measure_limits(engine.isa, engine.n_threads)._asdict()

    def peak(self) -> int | None:
        return peak_bytes()

    def first(self, n: str) -> float:
        start = perf_counter()
        logits = self._engine.forward_cached(self._ids(0, int(n)))
        minfer.Sampling(temperature=0.0).pick(logits[0], int(n))
        return perf_counter() - start

    def prefill(self, depth: str, n: str) -> float:
        self._fill(int(depth))
        ids = self._ids(int(depth), int(n))
        start = perf_counter()
        self._engine.forward_cached(ids)
        return perf_counter() - start

    def decode(self, depth: str, n: str) -> float:
        self._fill(int(depth))
        first, *ids = self._ids(int(depth), int(n) + 1)
        self._engine.forward_cached([first])
        start = perf_counter()
        for token in ids:
            self._engine.forward_cached([token])
        return perf_counter() - start

    def batch(self, n_seq: str, n: str) -> float:
        engine = self._engine
        self._fill(0)
        steps = [
            [minfer.Chunk(seq, [token], "last") for seq in range(int(n_seq))]
            for token in self._ids(0, int(n) + 1)
        ]
        engine.forward_batch(steps[0])
        start = perf_counter()
        for chunks in steps[1:]:
            engine.forward_batch(chunks)
        seconds = perf_counter() - start
        for seq in range(int(n_seq)):
            engine.kv.free(seq)
        return seconds

    def _ids(self, first: int, n: int) -> list[int]:
        return list(tokens(first, n, self._engine.n_vocab))

    def _fill(self, depth: int) -> None:
        """Sequence 0 holds the first `depth` tokens; those that it has are kept."""
        kv, engine = self._engine.kv, self._engine
        more = kv.len(0) - depth
        if more > 0:
            if more <= kv.max_trim(0):
                kv.trim(0, more)
            else:
                kv.free(0)
        if missing := self._ids(kv.len(0), depth - kv.len(0)):
            engine.forward_cached(missing, logits="none")


def main() -> None:
    """Serves measurements until stdin ends."""
    worker = _Worker(sys.argv[1])
    names = ("open", "facts", "limits", "peak", "first", "prefill", "decode", "batch")
    serve({name: getattr(worker, name) for name in names})


if __name__ == "__main__":
    main()
