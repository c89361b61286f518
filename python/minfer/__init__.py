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
    KvFullError,
    KvGoneError,
    KvRangeError,
    LimitError,
    MissingFileError,
    NoMemoryError,
    NotFoundError,
    UnsupportedError,
)
from minfer.formats import KvFormat, resolve_format
from minfer.gguf import GgufFile
from minfer.kv import Kv, KvGroup, Span
from minfer.sampling import Sampling

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
    "KvFormat",
    "KvFullError",
    "KvGoneError",
    "KvGroup",
    "KvRangeError",
    "LimitError",
    "MissingFileError",
    "NoMemoryError",
    "NotFoundError",
    "Sampling",
    "Span",
    "Stats",
    "UnsupportedError",
    "__version__",
    "isas",
    "load",
    "resolve_format",
]
