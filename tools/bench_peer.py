"""The other side of --vs: runs llama-cpp-python in its own process and interpreter.

bench_peer.py speed|state MODEL N_CTX N_BATCH N_THREADS says "ready" and answers each line of stdin
with a JSON list that begins with seconds. Imports nothing of minfer.

speed, of `minfer bench`, by llama.cpp's own calls:
    DEPTH PREFILL DECODE  seconds to prefill and to decode, with DEPTH tokens in the cache before
state, of `minfer bench session`, by the class Llama:
    fill N  seconds to prefill N tokens
    save    seconds of save_state(), bytes of llama.cpp's state and of logits in what it made
    load    seconds of load_state() with what the last save made
    get     seconds of what llama.cpp itself does of a save, into memory in use
    set     and of a load
"""

import ctypes
import json
import sys
from collections.abc import Callable, Iterator
from time import perf_counter

import llama_cpp as llama


def main() -> None:
    """Serves measurements until stdin ends."""
    make = {"speed": speed, "state": state}[sys.argv[1]]
    answer = make(sys.argv[2], *map(int, sys.argv[3:6]))
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(*line.split())), flush=True)


def tokens(first: int, n: int, n_vocab: int) -> Iterator[int]:
    """Those of minfer's side."""
    return ((first + i) * 7919 % n_vocab for i in range(n))


def speed(path: str, n_ctx: int, n_batch: int, n_threads: int) -> Callable[..., list[float]]:
    """What answers a line."""
    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.n_ctx = n_ctx
    params.n_batch = params.n_ubatch = n_batch
    params.n_threads = params.n_threads_batch = n_threads
    context = llama.llama_init_from_model(model, params)
    if not context:
        sys.exit(f"{path}: llama.cpp cannot load it")
    n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

    def feed(first: int, n: int) -> None:
        ids = (ctypes.c_int32 * n)(*tokens(first, n, n_vocab))
        if llama.llama_decode(context, llama.llama_batch_get_one(ids, n)):
            sys.exit("llama_decode failed")
        llama.llama_get_logits_ith(context, -1)

    def fill(depth: int) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        for first in range(0, depth, n_batch):
            feed(first, min(n_batch, depth - first))

    def answer(*words: str) -> list[float]:
        depth, n_prefill, n_decode = map(int, words)
        fill(depth)
        start = perf_counter()
        for first in range(0, n_prefill, n_batch):
            feed(depth + first, min(n_batch, n_prefill - first))
        prefill = perf_counter() - start
        fill(depth)
        feed(depth, 1)
        start = perf_counter()
        for i in range(n_decode):
            feed(depth + 1 + i, 1)
        return [prefill, perf_counter() - start]

    return answer


def state(path: str, n_ctx: int, n_batch: int, n_threads: int) -> Callable[..., list[float]]:
    """What answers a line."""
    model = llama.Llama(
        path,
        n_ctx=n_ctx,
        n_batch=n_batch,
        n_threads=n_threads,
        n_threads_batch=n_threads,
        verbose=False,
    )
    kept: list[llama.LlamaState] = []

    def fill(n: str) -> list[float]:
        start = perf_counter()
        model.reset()
        model.eval(list(tokens(0, int(n), model.n_vocab())))
        return [perf_counter() - start]

    def save() -> list[float]:
        kept.clear()  # its end is not part of the next one's time
        start = perf_counter()
        kept.append(model.save_state())
        seconds = perf_counter() - start
        return [seconds, kept[0].llama_state_size, kept[0].scores.nbytes]

    def load() -> list[float]:
        start = perf_counter()
        model.load_state(kept[0])
        return [perf_counter() - start]

    def part(call: Callable[..., int]) -> list[float]:
        n = kept[0].llama_state_size
        memory = (ctypes.c_uint8 * n).from_buffer_copy(kept[0].llama_state)
        start = perf_counter()
        call(model.ctx, memory, n)
        return [perf_counter() - start]

    calls = {
        "fill": fill,
        "save": save,
        "load": load,
        "get": lambda: part(llama.llama_state_get_data),
        "set": lambda: part(llama.llama_state_set_data),
    }
    return lambda call, *args: calls[call](*args)


main()
