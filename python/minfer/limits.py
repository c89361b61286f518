"""What this machine can do at most: the measure of every computation's speed."""

from typing import NamedTuple

from minfer._ffi import UINT32_MAX, c_string, check, ffi, integer, lib, options


class Limits(NamedTuple):
    """Of all threads together, per second."""

    int8_macs: float  # multiply-adds of bytes in vector registers; tiles (AMX) may pass this
    f32_fmas: float  # fused multiply-adds of floats, likewise
    read_bytes: float  # from memory, far more than the caches hold


def measure_limits(isa: str | None = None, threads: int | None = None) -> Limits:
    """Measures the limits of an instruction set (None: the one that `load` would take) with
    `threads` threads (None: one per core).

    It takes about a second, up to 1 GiB of memory, and an idle machine if the numbers are to mean
    anything. Raises ArgumentError for an instruction set that this machine does not run.
    """
    out = options("mf_limits")
    name = ffi.NULL if isa is None else c_string("isa", isa)
    n_threads = 0 if threads is None else integer("threads", threads, 1, UINT32_MAX)
    check(lib.mf_measure_limits(out, name, n_threads))
    return Limits(*(getattr(out, field) for field in Limits._fields))
