"""minfer: run GGUF language models with a KV cache that can be trusted.

>>> import minfer
>>> with minfer.load("demo") as engine:
...     print("".join(engine.generate("The capital of France is", max_tokens=8)))
"""

from minfer._ffi import VERSION as __version__
from minfer.engine import Chunk, Engine, Generation, Stats, isas, load
from minfer.errors import (
    ArgumentError,
    ArgumentTypeError,
    CancelledError,
    ClosedError,
    Error,
    FileError,
    FormatError,
    InternalError,
    KvCollidesError,
    KvCycleError,
    KvFullError,
    KvGapsError,
    KvGoneError,
    KvNotEmptyError,
    KvOverlapError,
    KvRangeError,
    KvSharedError,
    KvSpansError,
    LimitError,
    MissingFileError,
    NoMemoryError,
    NotFoundError,
    UnsupportedError,
)
from minfer.formats import KvFormat, resolve_format
from minfer.gguf import GgufFile
from minfer.kv import Kv, KvGroup, Move, Span, order_moves
from minfer.limits import Limits, measure_limits
from minfer.sampling import Sampling
from minfer.session_file import SessionFile, SessionGroup, SessionInfo, SessionSection, SessionSeq

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "CancelledError",
    "Chunk",
    "ClosedError",
    "Engine",
    "Error",
    "FileError",
    "FormatError",
    "Generation",
    "GgufFile",
    "InternalError",
    "Kv",
    "KvCollidesError",
    "KvCycleError",
    "KvFormat",
    "KvFullError",
    "KvGapsError",
    "KvGoneError",
    "KvGroup",
    "KvNotEmptyError",
    "KvOverlapError",
    "KvRangeError",
    "KvSharedError",
    "KvSpansError",
    "LimitError",
    "Limits",
    "MissingFileError",
    "Move",
    "NoMemoryError",
    "NotFoundError",
    "Sampling",
    "SessionFile",
    "SessionGroup",
    "SessionInfo",
    "SessionSection",
    "SessionSeq",
    "Span",
    "Stats",
    "UnsupportedError",
    "__version__",
    "isas",
    "load",
    "measure_limits",
    "order_moves",
    "resolve_format",
]
