"""The other side of --vs: runs llama-cpp-python in its own process and interpreter.

bench_peer.py speed|state MODEL serves the calls of bench_worker.py, by llama.cpp's own functions,
or those of `minfer bench session`, by the class Llama:
    open N_CTX N_SEQ N_BATCH N_THREADS FORMAT
    fill N  seconds to prefill N tokens
    save    seconds of save_state(), bytes of llama.cpp's state and of logits in what it made
    load    seconds of load_state() with what the last save made
    get     seconds of what llama.cpp itself does of a save, into memory in use
    set     and of a load
Imports nothing of minfer.
"""

import ctypes
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import llama_cpp as llama
from bench_serve import forget_peak, peak_bytes, serve, tokens


def main() -> None:
    """Serves measurements until stdin ends."""
    side = {"speed": _Speed, "state": _State}[sys.argv[1]](sys.argv[2])
    serve({name: getattr(side, name) for name in dir(side) if not name.startswith("_")})


class _Speed:
    """As bench_worker.py says. Sequence 0 holds the rows of a depth, and what a call adds is taken
    away at the start of the next."""

    def __init__(self, path: str) -> None:
        llama.llama_backend_init()
        self._path = path
        self._model = self._context = None
        self._n_rows = 0  # of sequence 0

    def open(self, n_ctx: str, n_seq: str, n_batch: str, n_threads: str, fmt: str) -> float:
        if self._context:
            llama.llama_free(self._context)
            llama.llama_model_free(self._model)
        forget_peak()
        start = perf_counter()
        params = llama.llama_model_default_params()
        self._model = llama.llama_model_load_from_file(self._path.encode(), params)
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = int(n_ctx), int(n_seq), True
        params.n_batch = params.n_ubatch = self._n_batch = int(n_batch)
        params.n_threads = params.n_threads_batch = int(n_threads)
        params.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self._format = "f16" if fmt == "auto" else fmt
        params.type_k = params.type_v = getattr(llama, f"GGML_TYPE_{self._format.upper()}")
        self._context = self._model and llama.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"{self._path}: llama.cpp cannot load it")
        self._n_rows = 0
        vocab = llama.llama_model_get_vocab(self._model)
        self._n_vocab = llama.llama_vocab_n_tokens(vocab)
        return perf_counter() - start

    def facts(self) -> dict[str, str]:
        return {"kv_format": self._format}

    def peak(self) -> int | None:
        return peak_bytes()

    def first(self, n: str) -> float:
        start = perf_counter()
        self._feed(0, int(n))
        logits = llama.llama_get_logits_ith(self._context, -1)
        max(range(self._n_vocab), key=logits.__getitem__)
        return perf_counter() - start

    def prefill(self, depth: str, n: str) -> float:
        self._fill(int(depth))
        start = perf_counter()
        self._feed(int(depth), int(n))
        return perf_counter() - start

    def decode(self, depth: str, n: str) -> float:
        self._fill(int(depth))
        self._feed(int(depth), 1)
        start = perf_counter()
        for i in range(int(n)):
            self._feed(int(depth) + 1 + i, 1)
        return perf_counter() - start

    def batch(self, n_seq: str, n: str) -> float:
        self._fill(0)
        size = int(n_seq)
        batch = llama.llama_batch_init(size, 0, 1)
        batch.n_tokens = size

        def step(position: int) -> None:
            (token,) = tokens(position, 1, self._n_vocab)
            for seq in range(size):
                batch.token[seq] = token
                batch.pos[seq] = position
                batch.n_seq_id[seq] = 1
                batch.seq_id[seq][0] = seq
                batch.logits[seq] = 1
            self._decode(batch)

        step(0)
        start = perf_counter()
        for position in range(1, int(n) + 1):
            step(position)
        seconds = perf_counter() - start
        llama.llama_batch_free(batch)
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        return seconds

    def _decode(self, batch: Any) -> None:
        if llama.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        llama.llama_get_logits_ith(self._context, -1)

    def _feed(self, first: int, n: int) -> None:
        """In batches, after the rows that are there."""
        for at in range(first, first + n, self._n_batch):
            size = min(self._n_batch, first + n - at)
            ids = (ctypes.c_int32 * size)(*tokens(at, size, self._n_vocab))
            self._decode(llama.llama_batch_get_one(ids, size))
            self._n_rows = at + size

    def _fill(self, depth: int) -> None:
        """Sequence 0 holds the first `depth` tokens; those that it has are kept."""
        memory = llama.llama_get_memory(self._context)
        kept = min(depth, self._n_rows)
        if not llama.llama_memory_seq_rm(memory, 0, kept, -1):
            llama.llama_memory_clear(memory, True)
            kept = 0
        self._n_rows = kept
        self._feed(kept, depth - kept)


class _State:
    """The class Llama, which keeps the logits of all tokens too."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._kept: list[llama.LlamaState] = []

    def open(self, n_ctx: str, n_seq: str, n_batch: str, n_threads: str, fmt: str) -> float:
        start = perf_counter()
        self._model = llama.Llama(
            self._path,
            n_ctx=int(n_ctx),
            n_batch=int(n_batch),
            n_threads=int(n_threads),
            n_threads_batch=int(n_threads),
            verbose=False,
        )
        return perf_counter() - start

    def fill(self, n: str) -> float:
        start = perf_counter()
        self._model.reset()
        self._model.eval(list(tokens(0, int(n), self._model.n_vocab())))
        return perf_counter() - start

    def save(self) -> list[float]:
        self._kept.clear()  # its end is not part of the next one's time
        start = perf_counter()
        self._kept.append(self._model.save_state())
        seconds = perf_counter() - start
        return [seconds, self._kept[0].llama_state_size, self._kept[0].scores.nbytes]

    def load(self) -> float:
        start = perf_counter()
        self._model.load_state(self._kept[0])
        return perf_counter() - start

    def get(self) -> float:
        return self._part(llama.llama_state_get_data)

    def set(self) -> float:
        return self._part(llama.llama_state_set_data)

    def _part(self, call: Callable[..., int]) -> float:
        n = self._kept[0].llama_state_size
        memory = (ctypes.c_uint8 * n).from_buffer_copy(self._kept[0].llama_state)
        start = perf_counter()
        call(self._model.ctx, memory, n)
        return perf_counter() - start


main()
