"""The only seam to C: `ffi` and `lib`, statuses as exceptions, and the conversion of arguments.

What a value may be is judged in C; here it is only made sure that C sees what the caller meant.
"""

import operator
import os
from weakref import WeakKeyDictionary

import numpy as np

from minfer import errors
from minfer._native import ffi, lib

VERSION = "0.1.0"
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
UINT32_MAX = 2**32 - 1

if ffi.string(lib.mf_version()).decode() != VERSION:
    raise ImportError(
        f"minfer {VERSION} found the native module of {ffi.string(lib.mf_version()).decode()};"
        " reinstall the package"
    )

_CLASSES = {
    lib.MF_ARG: errors.ArgumentError,
    lib.MF_IO: errors.FileError,
    lib.MF_FORMAT: errors.FormatError,
    lib.MF_UNSUPPORTED: errors.UnsupportedError,
    lib.MF_LIMIT: errors.LimitError,
    lib.MF_NOMEM: errors.NoMemoryError,
    lib.MF_NOT_FOUND: errors.NotFoundError,
    lib.MF_CANCELLED: errors.CancelledError,
    lib.MF_KV_FULL: errors.KvFullError,
    lib.MF_KV_GONE: errors.KvGoneError,
    lib.MF_KV_RANGE: errors.KvRangeError,
    lib.MF_INTERNAL: errors.InternalError,
    lib.MF_KV_COLLIDES: errors.KvCollidesError,
    lib.MF_KV_GAPS: errors.KvGapsError,
    lib.MF_KV_NOT_EMPTY: errors.KvNotEmptyError,
    lib.MF_KV_SPANS: errors.KvSpansError,
    lib.MF_KV_OVERLAP: errors.KvOverlapError,
    lib.MF_KV_CYCLE: errors.KvCycleError,
    lib.MF_KV_SHARED: errors.KvSharedError,
}


def check(status: int) -> None:
    """Raises the exception of a status, with the line that C left for this thread."""
    if status:
        raise _CLASSES[status](text(lib.mf_last_error()))


def text(chars) -> str:
    """A C string; bytes that are not UTF-8 survive as lone surrogates."""
    return ffi.string(chars).decode("utf-8", "surrogateescape")


def brief(value) -> str:
    """A value for a message: its repr on one line, at most 60 characters."""
    return " ".join(repr(value).split())[:60]


_kept: WeakKeyDictionary = WeakKeyDictionary()  # option struct: what its pointers point at


def options(struct: str, **fields):
    """A zeroed option struct with its `size` set; fields that are None stay zero, the default.
    What the fields point at lives as long as the struct does."""
    made = ffi.new(struct + " *")
    made.size = ffi.sizeof(struct)
    _kept[made] = fields
    for name, value in fields.items():
        if value is not None:
            setattr(made, name, value)
    return made


def integer(name: str, value, low: int, high: int) -> int:
    """`value` as an int in [low, high]; integers of numpy are welcome, bools and floats are not."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise errors.ArgumentTypeError(f"{name} must be an integer, not {brief(value)}") from None
    if not low <= number <= high:
        raise errors.ArgumentError(f"{name} is {number}; it must be in [{low}, {high}]")
    return number


def real(name: str, value) -> float:
    """`value` as a float; str, bool and None are not numbers."""
    try:
        if isinstance(value, (bool, str, bytes)):
            raise TypeError
        return float(value)
    except (TypeError, OverflowError):
        message = f"{name} must be a number that a float can hold, not {brief(value)}"
        raise errors.ArgumentTypeError(message) from None


def token_types(name: str, tokens) -> None:
    """Refuses what is not a list, tuple, range or one-dimensional array of integers."""
    if isinstance(tokens, np.ndarray):
        if tokens.dtype.kind not in "iu":
            raise errors.ArgumentTypeError(
                f"{name} must be integers, not an array of {tokens.dtype}"
            )
        if tokens.ndim != 1:
            raise errors.ArgumentError(
                f"{name} must be one-dimensional, not of shape {tokens.shape}"
            )
    elif isinstance(tokens, (list, tuple, range)):
        for kind in set(map(type, tokens)):
            if not issubclass(kind, (int, np.integer)) or kind is bool:
                raise errors.ArgumentTypeError(f"{name} must be integers, not {kind.__name__}")
    else:
        kind = type(tokens).__name__
        raise errors.ArgumentTypeError(
            f"{name} must be a list, tuple or array of integers, not {kind}"
        )


def token_array(name: str, tokens) -> np.ndarray:
    """A copy of token ids as int32 [n]: nobody can change it while C reads. Whether the model has
    them is judged there."""
    token_types(name, tokens)
    if len(tokens):
        is_array = isinstance(tokens, np.ndarray)
        low = int(tokens.min() if is_array else min(tokens))
        high = int(tokens.max() if is_array else max(tokens))
        if low < 0 or high > INT32_MAX:
            bad = low if low < 0 else high
            raise errors.ArgumentError(f"{name}: token {bad} is outside [0, n_vocab)")
    return np.array(tokens, np.int32)


def c_string(name: str, value):
    """A str as zero-terminated UTF-8; None stays NULL. The caller keeps the result alive."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise errors.ArgumentTypeError(f"{name} must be a str, not {brief(value)}")
    if not value:
        raise errors.ArgumentError(f"{name} is empty; leave it out for the default")
    if "\0" in value:
        raise errors.ArgumentError(f"{name} contains a NUL character: {brief(value)}")
    return ffi.new("char[]", value.encode("utf-8", "surrogateescape"))


def c_path(path) -> bytes:
    """A path (str, bytes or os.PathLike) as the system wants it."""
    try:
        encoded = os.fsencode(path)
    except TypeError:
        message = f"a path must be a str, bytes or os.PathLike, not {brief(path)}"
        raise errors.ArgumentTypeError(message) from None
    except UnicodeEncodeError:
        raise errors.ArgumentError(f"not a path this system can name: {brief(path)}") from None
    if b"\0" in encoded:
        raise errors.ArgumentError(f"a path cannot contain a NUL byte: {brief(path)}")
    return encoded
