"""The exceptions minfer raises. Each is also the built-in that a caller would expect."""

from errno import ENOENT


class Error(Exception):
    """Everything minfer refuses; the message is one line with the cause, the value and the fix."""


class ArgumentError(Error, ValueError):
    """An argument is out of range or of the wrong size."""


class ArgumentTypeError(Error, TypeError):
    """An argument is of the wrong type."""


class ClosedError(Error, ValueError):
    """The object was used after close()."""


class FileError(Error, OSError):
    """The operating system refused a file."""


class MissingFileError(FileError, FileNotFoundError):
    """No file has that path."""

    errno = ENOENT


class FormatError(Error, ValueError):
    """The bytes of a file contradict its format."""


class UnsupportedError(Error, NotImplementedError):
    """Well-formed, but this build or device cannot do it."""


class LimitError(Error, ValueError):
    """A documented limit is exceeded."""


class NoMemoryError(Error, MemoryError):
    """An allocation failed."""


class NotFoundError(Error, LookupError):
    """No such key or tensor."""


class CancelledError(Error):
    """Engine.cancel() stopped the call; the unfinished batch left no rows."""


class KvFullError(Error, MemoryError):
    """Not enough free cells in the KV cache."""


class KvGoneError(Error, LookupError):
    """The edit needs rows that a sliding window has dropped."""


class KvRangeError(Error, ValueError):
    """A position outside [0, 2**24), or beyond those the engine's rope factors are for."""


class KvCollidesError(Error, ValueError):
    """A shift would put a row at or below the position of the row before it."""


class KvGapsError(Error, ValueError):
    """More gaps between a sequence's positions than a read can carry."""


class KvNotEmptyError(Error, ValueError):
    """A share into a sequence that has rows."""


class KvSpansError(Error, ValueError):
    """A sequence lies in more pieces than the read mode can carry."""


class KvOverlapError(Error, ValueError):
    """Two moves read or write the same row."""


class KvCycleError(Error, ValueError):
    """Moves in a circle: no order of them is right."""


class KvSharedError(Error, RuntimeError):
    """A store into a row that other sequences read: please report it."""


class InternalError(Error, RuntimeError):
    """A broken invariant of the library: please report it."""
