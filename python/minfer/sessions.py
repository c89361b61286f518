"""Session files: the KV cache of some sequences with what its owner wants to find beside it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from minfer._ffi import INT32_MAX, INT32_MIN, brief, c_path, check, ffi, integer, lib, options
from minfer.background import Progress, watched
from minfer.errors import ArgumentTypeError, FileError
from minfer.gguf import or_missing


def save(handle, path, host_state, seqs: Iterable[int] | None, progress: Progress | None) -> None:
    """See Engine.kv_save."""
    if not isinstance(host_state, (bytes, bytearray, memoryview)):
        raise ArgumentTypeError(f"host_state must be bytes, not {brief(host_state)}")
    state = bytes(host_state)
    (c_seqs, n_seqs), done = _seqs(seqs), ffi.new("uint64_t[2]")
    wanted = options("mf_kv_save_options", seqs=c_seqs, n_seqs=n_seqs, progress=done)
    buffer = ffi.from_buffer(state)
    wanted.host_state, wanted.host_bytes = buffer, len(state)
    encoded = c_path(path)
    call = partial(_call, lib.mf_kv_save, handle, encoded, wanted)
    watched(call, "saving", lambda: (done[0], done[1]), progress, must_end=True)


def load(handle, path, seqs: Iterable[int] | None, progress: Progress | None) -> bytes:
    """See Engine.kv_load."""
    state, n = ffi.new("void **"), ffi.new("size_t *")
    (c_seqs, n_seqs), done = _seqs(seqs), ffi.new("uint64_t[2]")
    wanted = options("mf_kv_load_options", seqs=c_seqs, n_seqs=n_seqs, progress=done)
    encoded = c_path(path)
    try:
        call = partial(_call, lib.mf_kv_load, state, n, handle, encoded, wanted)
        watched(call, "loading", lambda: (done[0], done[1]), progress, must_end=True)
    except FileError as error:
        raise or_missing(encoded, error) from None
    try:
        return bytes(ffi.buffer(state[0], n[0]))
    finally:
        lib.mf_kv_host_free(state[0])


def _call(function, *arguments) -> None:
    check(function(*arguments))  # in the thread that called: the error's line is the thread's own


def _seqs(seqs):
    """(int32_t[] or None, its length); None is all."""
    if seqs is None:
        return None, 0
    if not isinstance(seqs, Iterable) or isinstance(seqs, (str, bytes)):
        raise ArgumentTypeError(f"seqs must be a list of sequences, not {brief(seqs)}")
    numbers = [integer(f"seqs[{i}]", s, INT32_MIN, INT32_MAX) for i, s in enumerate(seqs)]
    return ffi.new("int32_t[]", numbers or 1), len(numbers)
