"""The other side of `minfer bench --vs`: runs llama-cpp-python in its own process and interpreter.

bench_peer.py MODEL N_CTX N_BATCH N_THREADS, then per line of stdin "DEPTH PREFILL DECODE"; answers
each with the seconds of both as a JSON list. Imports nothing of minfer.
"""

import ctypes
import json
import sys
import time

import llama_cpp as llama


def main() -> None:
    """Serves measurements until stdin ends."""
    path, n_ctx, n_batch, n_threads = sys.argv[1], *map(int, sys.argv[2:5])
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
        ids = (ctypes.c_int32 * n)(*((first + i) * 7919 % n_vocab for i in range(n)))
        if llama.llama_decode(context, llama.llama_batch_get_one(ids, n)):
            sys.exit("llama_decode failed")
        llama.llama_get_logits_ith(context, -1)

    def fill(depth: int) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        for first in range(0, depth, n_batch):
            feed(first, min(n_batch, depth - first))

    print("ready", flush=True)
    for line in sys.stdin:
        depth, n_prefill, n_decode = map(int, line.split())
        fill(depth)
        start = time.perf_counter()
        for first in range(0, n_prefill, n_batch):
            feed(depth + first, min(n_batch, n_prefill - first))
        prefill = time.perf_counter() - start
        fill(depth)
        feed(depth, 1)
        start = time.perf_counter()
        for i in range(n_decode):
            feed(depth + 1 + i, 1)
        print(json.dumps([prefill, time.perf_counter() - start]), flush=True)


main()
