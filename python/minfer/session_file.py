"""Session files without an engine: what is in one, verified whole before anything is read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from minfer._ffi import UINT32_MAX, brief, c_path, check, ffi, integer, lib, options, text
from minfer.background import Progress, watched
from minfer.errors import (
    ArgumentError,
    ArgumentTypeError,
    ClosedError,
    FileError,
    MissingFileError,
)
from minfer.gguf import or_missing
from minfer.kv import Span


class SessionInfo(NamedTuple):
    """What a session file says about itself and the run that saved it."""

    file_bytes: int
    version: int
    flags: int
    device: str  # "cpu"
    kv_format: str  # "f32"
    n_layer: int
    n_ctx: int
    n_embd: int
    n_head_kv: int
    head_dim: int
    row_bytes: int  # of the K, or the V, of one row in one layer
    fingerprint: str  # of the model: 32 hexadecimal digits


class SessionSection(NamedTuple):
    """A part of the file with its checksum, XXH64."""

    name: str  # "KINDS", "SEQS", "ROWS", "K", "V", "HOST"
    index: int  # the group of ROWS, the layer of K and V, else 0
    offset: int
    bytes: int
    checksum: int


class SessionGroup(NamedTuple):
    """Layers that share their rows' numbers, 0..n_rows-1. A row that several sequences read is
    there once."""

    kind: str  # "sliding-512/f32/kv1x256"
    n_layers: int
    window: int  # 0: none
    n_rows: int


class SessionSeq(NamedTuple):
    """A sequence of the file."""

    seq: int  # its number in the engine that saved it
    len: int  # rows, also those that have left their window
    next_pos: int  # one above the last row's
    clean: int  # leading rows that equal a plain prefill of their tokens


class SessionFile:
    """An open session file, every byte of it verified. It takes no model.

    `threads` work on the checksums (None: one per core); `progress` is called with (what, bytes
    done, bytes in all) about twenty times a second. Raises FormatError, UnsupportedError or
    FileError (MissingFileError for a path without a file) at opening, and ClosedError after
    close(). The file is mapped while it is open: do not truncate it.
    """

    def __init__(
        self, path, *, threads: int | None = None, progress: Progress | None = None
    ) -> None:
        encoded, done = c_path(path), ffi.new("uint64_t[2]")
        self.path = encoded.decode("utf-8", "surrogateescape")
        if not encoded:
            raise MissingFileError("'': an empty path names no file; give the path of a session")
        n_threads = 0 if threads is None else integer("threads", threads, 1, UINT32_MAX)
        wanted = options("mf_session_options", n_threads=n_threads, progress=done)

        def verify():
            out = ffi.new("mf_session **")
            check(lib.mf_session_open(out, encoded, wanted))
            return ffi.gc(out[0], lib.mf_session_free)

        try:
            self._file = watched(verify, "verifying", lambda: (done[0], done[1]), progress)
        except FileError as error:
            raise or_missing(encoded, error) from None
        self._read()

    def _read(self) -> None:
        info = self._get("mf_session_info", lib.mf_session_get_info)
        self.info = SessionInfo(
            info.file_bytes,
            info.version,
            info.flags,
            text(info.device),
            text(info.kv_format),
            *(getattr(info, name) for name in SessionInfo._fields[5:-1]),
            "".join(f"{half:016x}" for half in info.fingerprint),
        )
        self.groups, self.seqs, self.sections = [], [], []
        for i in range(info.n_groups):
            group = self._get("mf_session_group", lib.mf_session_get_group, i)
            numbers = (getattr(group, name) for name in SessionGroup._fields[1:])
            self.groups.append(SessionGroup(text(group.kind), *numbers))
        for i in range(info.n_seqs):
            seq = self._get("mf_session_seq", lib.mf_session_get_seq, i)
            self.seqs.append(SessionSeq(*(getattr(seq, name) for name in SessionSeq._fields)))
        for i in range(info.n_sections):
            part = self._get("mf_session_section", lib.mf_session_get_section, i)
            numbers = (getattr(part, name) for name in SessionSection._fields[1:])
            self.sections.append(SessionSection(text(part.name), *numbers))
        self._at = {(part.name, part.index): i for i, part in enumerate(self.sections)}

    def _get(self, struct: str, call, *index: int):
        out = options(struct)
        check(call(out, self.handle, *index))
        return out

    @property
    def handle(self):
        """The C handle; holding it keeps the file open."""
        if self._file is None:
            raise ClosedError(f"{self.path}: the session is closed; open it again")
        return self._file

    def close(self) -> None:
        """Lets the file go, as soon as nobody holds its bytes. Closing twice is fine."""
        self._file = None

    def __enter__(self) -> SessionFile:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def layer_group(self, layer: int) -> int:
        """The group of a layer."""
        handle, layer = self.handle, integer("layer", layer, 0, self.info.n_layer - 1)
        out = ffi.new("uint32_t *")
        check(lib.mf_session_layer_group(out, handle, layer))
        return out[0]

    def spans(self, i: int, group: int = 0) -> list[Span]:
        """Where the rows of `seqs[i]` are in a group, in position order; `cell` is a row's number.
        Rows that a window has dropped are nowhere."""
        handle = self.handle
        i, group = integer("i", i, 0, UINT32_MAX), integer("group", group, 0, UINT32_MAX)
        n = ffi.new("size_t *")
        check(lib.mf_session_spans(n, ffi.NULL, 0, handle, i, group))
        spans = ffi.new("mf_kv_span[]", n[0])
        check(lib.mf_session_spans(n, spans, len(spans), handle, i, group))
        return [Span(s.pos, s.cell, s.len) for s in spans]

    def data(self, name: str, index: int = 0) -> memoryview:
        """The bytes of a section, read-only and in place: they keep the file open."""
        handle, index = self.handle, integer("index", index, 0, UINT32_MAX)
        if not isinstance(name, str):
            raise ArgumentTypeError(f"name must be a str, not {brief(name)}")
        at = self._at.get((name, index))
        if at is None:
            raise ArgumentError(f"{self.path} has no section {name!r:.40} of index {index}")
        part = self._get("mf_session_section", lib.mf_session_get_section, at)
        if not part.bytes:
            return memoryview(b"")
        start = ffi.gc(part.data, lambda _, handle=handle: None)
        return memoryview(ffi.buffer(start, part.bytes)).toreadonly()

    def rows(self, layer: int, value: bool = False) -> np.ndarray:
        """The K, or with `value` the V, of all rows of a layer: uint8 [n_rows, row_bytes],
        read-only and in place, as `data`."""
        n_rows = self.groups[self.layer_group(layer)].n_rows
        flat = np.asarray(self.data("V" if value else "K", layer))
        return flat.reshape(n_rows, self.info.row_bytes)

    @property
    def host_state(self) -> bytes:
        """What the host saved beside the rows."""
        return bytes(self.data("HOST"))

    def __reduce__(self):
        raise TypeError("a SessionFile cannot be pickled; open the path again in the other process")

    def __repr__(self) -> str:
        state = "closed" if self._file is None else f"{len(self.seqs)} sequences"
        return f"<minfer.SessionFile {self.path!r}, {state}>"
