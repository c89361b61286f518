"""The engine: a model with its KV cache, as NumPy sees it."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from minfer import demo, padded, sessions
from minfer._ffi import (
    INT32_MAX,
    INT32_MIN,
    UINT32_MAX,
    c_string,
    check,
    ffi,
    integer,
    lib,
    options,
    text,
    token_array,
)
from minfer.background import Progress, start, watched
from minfer.errors import (
    ArgumentError,
    ArgumentTypeError,
    ClosedError,
    KvFullError,
    NoMemoryError,
)
from minfer.formats import KvFormat
from minfer.gguf import GgufFile
from minfer.kv import Kv
from minfer.sampling import PENALTY_WINDOW, Sampling

# What C accepts. Asked here too, so that nothing is loaded for a number that cannot be.
MAX_CTX, MAX_SEQ, MAX_BATCH, MAX_THREADS = 2**24, 4096, 65536, 1024

Tokens = Sequence[int] | np.ndarray


@dataclass(frozen=True, eq=False)
class Chunk:
    """Tokens to append to a sequence; logits are wanted of "none", the "last" or "all" of them."""

    seq: int
    tokens: Tokens
    logits: str = "last"


class Stats(NamedTuple):
    """Counters since the engine was made; seconds of wall time, bytes of memory."""

    graph_builds: int
    graph_reuses: int
    prefill_tokens: int
    decode_tokens: int
    prefill_seconds: float
    decode_seconds: float
    weight_bytes: int
    kv_bytes: int
    compute_bytes: int
    kv_seconds: float  # finding cells and windows for batches: a part of the seconds above


def isas() -> list[str]:
    """Instruction sets that this machine can run, best first; values for load's `isa`."""
    return text(lib.mf_isas()).split(",")


def load(
    model,
    *,
    n_ctx: int | None = None,
    n_seq: int = 1,
    n_batch: int = 512,
    device: str = "cpu",
    threads: int | None = None,
    cache_type: str | None = None,
    isa: str | None = None,
    progress: Progress | None = None,
) -> Engine:
    """Loads a GGUF file (a path) or the packaged Gemma ("demo") and makes an engine.

    n_ctx: cells that all sequences share (None: 4096, or less if the model says so); n_seq:
    sequences 0..n_seq-1; n_batch: most tokens per pass over the weights; threads: None for one per
    core; cache_type: a KV format (None: MINFER_CACHE_TYPE, else the device's choice); isa: one of
    isas() (None: MINFER_ISA, else the best present). `progress` is called with
    (what, bytes done, bytes in all) about twenty times a second.

    Raises FileError, FormatError, UnsupportedError, LimitError, NoMemoryError or ArgumentError.
    """
    wanted = dict(
        n_ctx=0 if n_ctx is None else integer("n_ctx", n_ctx, 1, MAX_CTX),
        n_seq=integer("n_seq", n_seq, 1, MAX_SEQ),
        n_batch=integer("n_batch", n_batch, 1, MAX_BATCH),
        n_threads=0 if threads is None else integer("threads", threads, 1, MAX_THREADS),
        device=c_string("device", device),
        cache_type=c_string("cache_type", cache_type),
        isa=c_string("isa", isa),
    )
    return Engine(
        demo.model_path(model, progress),
        progress=progress,
        **wanted,
    )


class Engine:
    """Made by `load`. Several threads may use one engine: C runs their calls one after the other.

    After close() every method raises ClosedError; a call that another thread is in still ends well.
    """

    def __init__(
        self, path, *, n_ctx, n_seq, n_batch, n_threads, device, cache_type, isa, progress
    ) -> None:
        self.metadata = GgufFile(path)
        model = _load_model(self.metadata, device, n_threads, progress)
        wanted = options(
            "mf_engine_options",
            n_ctx=n_ctx,
            n_seq=n_seq,
            n_batch=n_batch,
            n_threads=n_threads,
            isa=isa,
            cache_type=cache_type,
        )
        out = ffi.new("mf_engine **")
        check(lib.mf_engine_new(out, model, wanted))
        self._engine = ffi.gc(out[0], lib.mf_engine_free)
        info = options("mf_model_info")
        check(lib.mf_model_get_info(info, model))
        self.arch = text(info.arch)
        self.n_layer = info.n_layer
        self.n_embd = info.n_embd
        self.n_vocab = info.n_vocab
        self.n_ctx_train = info.n_ctx_train
        self.n_params = info.n_params
        self.n_groups = info.n_groups  # of layers that share a cell store
        self.n_ctx = lib.mf_engine_n_ctx(self._engine)
        self.n_seq = n_seq
        self.n_batch = min(n_batch, self.n_ctx)
        self.n_threads = lib.mf_engine_n_threads(self._engine)
        self.isa = text(lib.mf_engine_isa(self._engine))
        self.kv_format = KvFormat(text(lib.mf_engine_kv_format(self._engine)))

    @property
    def kv(self) -> Kv:
        """Its KV cache."""
        return Kv(self)  # not kept: a cycle would keep the weights until the collector comes by

    @property
    def handle(self):
        """The C handle. It keeps the engine alive, so a call takes it into a local first."""
        engine = self._engine
        if engine is None:
            raise ClosedError("the engine is closed; load the model again")
        return engine

    def close(self) -> None:
        """Lets the engine go, with its cache, as soon as no call uses it. Closing twice is fine."""
        self._engine = None
        self.metadata.close()

    def __enter__(self) -> Engine:
        _ = self.handle  # a closed engine is refused here
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __reduce__(self):
        raise TypeError("an Engine cannot be pickled; load the model in the other process")

    def __repr__(self) -> str:
        state = (
            "closed" if self._engine is None else f"n_ctx={self.n_ctx} {self.kv_format} {self.isa}"
        )
        return f"<minfer.Engine {self.arch} {self.metadata.path!r}, {state}>"

    @cached_property
    def tokenizer(self):
        """The model's Tokenizer, built at first use."""
        from minfer.tokenizer import Tokenizer

        return Tokenizer.from_metadata(self.metadata, source=self.metadata.path)

    @cached_property
    def chat_template(self):
        """The model's ChatTemplate, or None for a base model."""
        from minfer.chat import template_of

        return template_of(self.metadata, self.tokenizer)

    def forward_cached(self, tokens: Tokens, seq: int = 0, logits: str = "last") -> np.ndarray:
        """Appends tokens to a sequence. Returns float32 [1 | len(tokens) | 0, n_vocab] for
        logits "last", "all" or "none"."""
        return self.forward_batch([Chunk(seq, tokens, logits)])[0]

    def forward_batch(self, chunks: Iterable[Chunk]) -> list[np.ndarray]:
        """Appends chunks to different sequences in one call; each gets an array as forward_cached
        returns it, the same to the last bit.

        KvFullError: the rows of all chunks do not fit (nothing was appended). NoMemoryError: no
        memory for the arrays. Ctrl-C in the main thread cancels the call within a few milliseconds;
        whole batches of n_batch tokens stay. It cancels whatever forward runs on this engine at
        that moment: where several threads share an engine, that may be another one's, which then
        raises CancelledError.
        """
        handle = self.handle
        if not isinstance(chunks, Iterable):
            raise ArgumentTypeError(f"chunks must be minfer.Chunk in a list, not {chunks!r:.60}")
        chunks = list(chunks)
        for chunk in chunks:
            if not isinstance(chunk, Chunk):
                raise ArgumentTypeError(f"chunks must be minfer.Chunk, not {chunk!r:.60}")
        arrays = [token_array("tokens", chunk.tokens) for chunk in chunks]
        wanted = [_n_logits(chunk.logits, len(array)) for chunk, array in zip(chunks, arrays)]
        out = _logits((sum(wanted), self.n_vocab))
        seqs = (integer("seq", chunk.seq, INT32_MIN, INT32_MAX) for chunk in chunks)
        modes = (_LOGITS[chunk.logits] for chunk in chunks)
        _forward(handle, list(zip(seqs, modes, arrays)), out)
        if len(chunks) == 1:
            return [out]
        return np.split(out, np.cumsum(wanted)[:-1])

    def forward_padded(self, ids, left_padding=None, right_padding=None, seqs=None) -> np.ndarray:
        """Appends the rows of ids, integers [B, L], to different sequences in one call. Returns
        float32 [B, L, n_vocab]: the logits of every token, the same to the last bit as if its row
        were alone and unpadded. Those at pads mean nothing; they are zeros.

        left_padding, right_padding: how many ids at the ends of each row are pads, integers [B]
        (None: none). seqs: the sequence of each row, integers [B] (None: 0..B-1), each at its own
        position. Ids at pads are not looked at. A pad takes no cell and no time, and a row of pads
        only leaves its sequence as it is.

        ArgumentError names the row: padding negative or more than L, a token the model does not
        have, one sequence in two rows. Otherwise as forward_batch.
        """
        handle = self.handle
        n_rows, length, rows = padded.rows_of(
            ids, left_padding, right_padding, seqs, self.n_seq, self.n_vocab
        )
        out = _logits((n_rows, length, self.n_vocab))
        if rows:
            tight = out.reshape(-1, self.n_vocab)[: sum(row.tokens.size for row in rows)]
            _forward(handle, [(row.seq, lib.MF_LOGITS_ALL, row.tokens) for row in rows], tight)
        padded.spread(out, rows)
        return out

    def kv_save(
        self,
        path,
        host_state: bytes = b"",
        seqs: Iterable[int] | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Writes sequences (None: all that have rows) to a file, with their rows, positions and
        sharing, and `host_state` beside them: what the caller wants to find again. `progress` is
        called as in `load`.

        The file is replaced as a whole: whenever the process is stopped, the old file or the new
        one is there. FileError: the system refused; the old file is as it was.
        """
        sessions.save(self.handle, path, host_state, seqs, progress)

    def kv_load(
        self, path, seqs: Iterable[int] | None = None, progress: Progress | None = None
    ) -> bytes:
        """Reads a file that kv_save wrote and returns its host_state. The file's sequences replace
        those of the same numbers, or those in `seqs`, in the file's order, and go on bit for bit;
        all others stay as they are.

        The whole file is verified first. FormatError names what is damaged, or what differs from
        this engine: model, n_ctx, KV format, device. KvFullError: the rows do not fit. FileError:
        it cannot be read. Each time, nothing has changed.
        """
        return sessions.load(self.handle, path, seqs, progress)

    def cancel(self) -> None:
        """Makes a forward that runs in another thread raise CancelledError soon."""
        lib.mf_engine_cancel(self.handle)

    def generate(
        self,
        prompt: str | Tokens,
        *,
        max_tokens: int = 256,
        temperature: float = 0.8,
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        repeat_penalty: float = 1.0,
        seed: int = 0,
        stop: str | Sequence[str] | None = None,
        seq: int = 0,
    ) -> Generation:
        """Appends a prompt to a sequence and returns an iterator of the answer's pieces of text.

        It ends at one of the model's end tokens, before a stop string, or after max_tokens. Text in
        a prompt that looks like a special token stays text; pass token ids to mean one. Equal
        arguments on equal histories give equal text. Arguments are judged at once, as are a closed
        engine and a sequence it does not have; the iterator raises KvFullError if the cache has no
        room for the prompt, and ends early (see Generation) if it has none for the answer.
        """
        n_rows = self.kv.len(seq)
        if isinstance(prompt, str):
            tokens = self.tokenizer.encode(prompt, add_bos=n_rows == 0)
        else:
            tokens = prompt
        sampling = Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repeat_penalty=repeat_penalty,
            seed=seed,
        )
        limit = integer("max_tokens", max_tokens, 0, UINT32_MAX)
        seq = integer("seq", seq, INT32_MIN, INT32_MAX)
        prompt = token_array("tokens", tokens)
        if not prompt.size:
            raise ArgumentError(
                "prompt has no token, and an answer needs one to follow; to go on where a sequence"
                " ends, trim its last row and pass that token"
            )
        return Generation(self, prompt, sampling, limit, _stop_strings(stop), seq)

    def stats(self) -> Stats:
        """Counters and memory."""
        stats = options("mf_stats")
        check(lib.mf_engine_stats(stats, self.handle))
        return Stats(*(getattr(stats, field) for field in Stats._fields))


class Generation(Iterator[str]):
    """The pieces of an answer. `ids` are the tokens picked so far, without the end token; `finish`
    is None while it runs, then "end" (the model ended it), "stop" (a stop string), "length"
    (max_tokens) or "full" (the cache has no room for another row).

    The sequence holds the prompt and all of `ids` but those in `pending`. That is the token picked
    last, which is appended only when another one is wanted, or nothing if the answer ended with
    "end". To go on after an answer, append `pending` and then what is new. The sequence may be
    edited between two pieces: the next ones answer to what it then holds.
    """

    def __init__(
        self, engine: Engine, prompt: np.ndarray, sampling: Sampling, limit: int, stop, seq: int
    ) -> None:
        self.ids: list[int] = []
        self.pending: list[int] = []
        self.finish: str | None = None
        self._pieces = self._run(engine, prompt, sampling, limit, stop, seq)

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the iteration early."""
        self._pieces.close()

    def _run(self, engine, prompt, sampling, limit, stop, seq) -> Iterator[str]:
        stream, end_tokens = engine.tokenizer.stream(), engine.tokenizer.eog
        recent = deque(prompt[-PENALTY_WINDOW:].tolist(), PENALTY_WINDOW)
        tokens: Any = prompt
        held = ""  # text that may turn out to begin a stop string
        while len(self.ids) < limit:
            try:
                logits = engine.forward_cached(tokens, seq)
            except KvFullError:
                if not self.ids:
                    raise
                self.finish = "full"
                break
            self.pending = []
            token = sampling.pick(logits[0], engine.kv.next_pos(seq), list(recent))
            if token in end_tokens:
                self.finish = "end"
                break
            self.ids.append(token)
            recent.append(token)
            tokens = self.pending = [token]
            held += stream.push(token)
            found = min((at for s in stop if (at := held.find(s)) >= 0), default=-1)
            if found >= 0:
                self.finish = "stop"
                held = held[:found]
                break
            ready = len(held) - _stop_begun(held, stop)
            if ready:
                piece, held = held[:ready], held[ready:]
                yield piece
        else:
            self.finish = "length"
        if self.finish != "stop":
            held += stream.flush()
        if held:
            yield held


def _stop_begun(held: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `held` that begins a stop string."""
    longest = min(len(held), max(map(len, stop), default=1) - 1)
    return next((n for n in range(longest, 0, -1) if any(s.startswith(held[-n:]) for s in stop)), 0)


def _stop_strings(stop) -> list[str]:
    if isinstance(stop, str):
        stop = [stop]
    strings = [] if stop is None else list(stop) if isinstance(stop, Iterable) else [stop]
    if not all(isinstance(s, str) for s in strings):
        raise ArgumentTypeError(f"stop must be a list of str, not {stop!r:.60}")
    if "" in strings:
        raise ArgumentError("a stop string must not be empty")
    return strings


_LOGITS = {"none": lib.MF_LOGITS_NONE, "last": lib.MF_LOGITS_LAST, "all": lib.MF_LOGITS_ALL}


def _forward(handle, parts: list[tuple[int, int, np.ndarray]], out: np.ndarray) -> None:
    """Appends (sequence, mf_logits, tokens) of each part; `out` gets the logits."""
    table, n_tokens = ffi.new("mf_chunk[]", len(parts)), 0
    for chunk, (seq, logits, tokens) in zip(table, parts):
        chunk.seq = seq
        chunk.logits = logits
        chunk.tokens = ffi.from_buffer("int32_t[]", tokens)
        chunk.n_tokens = tokens.size
        n_tokens += tokens.size
    floats = ffi.from_buffer("float[]", out, require_writable=True)

    def compute() -> None:
        check(lib.mf_engine_forward(floats, out.size, handle, table, len(parts)))

    if n_tokens > len(parts):
        _interruptibly(compute, handle)
    else:
        compute()  # one token per sequence: over before anyone can press a key


def _n_logits(logits: str, n_tokens: int) -> int:
    if not isinstance(logits, str) or logits not in _LOGITS:
        raise ArgumentError(f'logits is {logits!r:.60}; it must be "none", "last" or "all"')
    return {"none": 0, "last": 1, "all": n_tokens}[logits]


def _logits(shape: tuple[int, ...]) -> np.ndarray:
    """Room for logits, not filled."""
    try:
        return np.empty(shape, np.float32)
    except (MemoryError, ValueError) as error:  # numpy: too large for now, or for ever
        raise NoMemoryError(f"logits: {error}; ask for those of fewer tokens in a call") from None


def _interruptibly(compute: Callable[[], None], engine) -> None:
    """Runs `compute` so that Ctrl-C, which Python delivers to the main thread only, cancels it.

    While C computes in the main thread no signal handler of Python can run; so C gets a thread of
    its own and the main thread waits.
    """
    if threading.current_thread() is not threading.main_thread():
        compute()
        return
    done = start(compute)
    try:
        _, error = done.get()
    except BaseException:
        ended = False
        while not ended:  # again and again: the thread may not have got as far as C when we cancel
            lib.mf_engine_cancel(engine)
            try:
                done.get(timeout=0.005)
                ended = True
            except queue.Empty:
                pass
        raise
    if error is not None:
        raise error


def _load_model(file: GgufFile, device, n_threads: int, progress: Progress | None):
    n_done = ffi.new("uint64_t *")
    wanted = options("mf_model_options", device=device, n_threads=n_threads, progress=n_done)
    handle, total = file.handle, file.data_bytes

    def pack():
        out = ffi.new("mf_model **")
        check(lib.mf_model_load(out, handle, wanted))
        return ffi.gc(out[0], lib.mf_model_free)

    return watched(pack, "packing weights", lambda: (n_done[0], total), progress)
