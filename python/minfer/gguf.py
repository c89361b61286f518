"""GGUF files: metadata as a read-only mapping, and the table of tensors."""

import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from minfer._ffi import c_path, check, ffi, lib
from minfer.errors import ClosedError, FileError, MissingFileError

_FLOATS = (lib.MF_GGUF_F32, lib.MF_GGUF_F64)


class Tensor(NamedTuple):
    """A row of the tensor table: `dims` fastest first, `bytes` in the file."""

    name: str
    type: str
    dims: tuple[int, ...]
    bytes: int


class GgufFile(Mapping[str, Any]):
    """An open GGUF file (of a split model the first part), validated by C before anything is read.

    As a mapping it gives the metadata: scalars are int, float, bool or str; arrays of numbers are
    numpy arrays (int64, float64 or bool); arrays of strings are list[bytes]. Text that is not UTF-8
    survives as lone surrogates. Raises FormatError, UnsupportedError, LimitError or FileError at
    opening (MissingFileError for a path without a file), KeyError for a missing key and ClosedError
    after close().
    """

    def __init__(self, path) -> None:
        encoded = c_path(path)
        self.path = encoded.decode("utf-8", "surrogateescape")
        if not encoded:
            raise MissingFileError("'': an empty path names no file; give the path of a GGUF file")
        out = ffi.new("mf_gguf **")
        try:
            check(lib.mf_gguf_open(out, encoded))
        except FileError as error:
            raise or_missing(encoded, error) from None
        self._file = ffi.gc(out[0], lib.mf_gguf_free)
        info = ffi.new("mf_kv_info *")
        self._index: dict[str, int] = {}
        for i in range(lib.mf_gguf_n_kv(self._file)):
            check(lib.mf_gguf_kv(info, self._file, i))
            self._index[_chars(info.key, info.key_len)] = i

    @property
    def handle(self):
        """The C handle; holding it keeps the file open."""
        if self._file is None:
            raise ClosedError(f"{self.path}: the file is closed; open it again")
        return self._file

    def close(self) -> None:
        """Lets the file go. Models made from it stay whole. Closing twice is fine."""
        self._file = None

    def __enter__(self) -> "GgufFile":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._index)

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __contains__(self, key: object) -> bool:
        return key in self._index

    def __getitem__(self, key: str) -> Any:
        index, file = self._index[key], self.handle
        info = ffi.new("mf_kv_info *")
        check(lib.mf_gguf_kv(info, file, index))
        if info.type == lib.MF_GGUF_STRING:
            values = _strings(file, index, info.n)
            return values if info.is_array else values[0].decode("utf-8", "surrogateescape")
        if info.type in _FLOATS:
            array = np.empty(info.n, np.float64)
            out = ffi.from_buffer("double[]", array, require_writable=True)
            check(lib.mf_gguf_floats(out, file, index, 0, info.n))
        else:
            array = np.empty(info.n, np.int64)
            out = ffi.from_buffer("int64_t[]", array, require_writable=True)
            check(lib.mf_gguf_ints(out, file, index, 0, info.n))
            if info.type == lib.MF_GGUF_BOOL:
                array = array.astype(bool)
        return array if info.is_array else array[0].item()

    @property
    def tensors(self) -> list[Tensor]:
        """The tensor table, in the file's order."""
        file, info, table = self.handle, ffi.new("mf_tensor_info *"), []
        for i in range(lib.mf_gguf_n_tensors(file)):
            check(lib.mf_gguf_tensor(info, file, i))
            name, kind = _chars(info.name, info.name_len), ffi.string(info.type).decode()
            table.append(Tensor(name, kind, tuple(info.dims[0 : info.n_dims]), info.bytes))
        return table

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors in the file."""
        return lib.mf_gguf_data_bytes(self.handle)

    def __reduce__(self):
        raise TypeError("a GgufFile cannot be pickled; open the path again in the other process")

    def __repr__(self) -> str:
        state = "closed" if self._file is None else f"{len(self)} keys"
        return f"<minfer.GgufFile {self.path!r}, {state}>"


def or_missing(path: bytes, error: FileError) -> FileError:
    """The error as it is, or as a MissingFileError if there is no such file."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return MissingFileError(str(error))
    except OSError:
        pass  # there may be one, out of reach
    return error


def _chars(start, length: int) -> str:
    return bytes(ffi.buffer(start, length)).decode("utf-8", "surrogateescape")


def _strings(file, index: int, n: int) -> list[bytes]:
    n_bytes = ffi.new("size_t *")
    check(lib.mf_gguf_strings(n_bytes, ffi.NULL, 0, ffi.NULL, file, index))
    joined, ends = bytearray(n_bytes[0]), np.empty(n, np.uint64)
    check(
        lib.mf_gguf_strings(
            n_bytes,
            ffi.from_buffer("char[]", joined, require_writable=True),
            len(joined),
            ffi.from_buffer("uint64_t[]", ends, require_writable=True),
            file,
            index,
        )
    )
    whole, stops = bytes(joined), ends.tolist()
    return [whole[a:b] for a, b in zip([0, *stops], stops)]
