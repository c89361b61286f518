"""minfer.SessionFile: what it says of a file is what the engine that saved it said, and what the
file's bytes say to a reader that shares no code with it (kv_file.py)."""

import gc
import pickle
import threading
import time
import weakref
from itertools import groupby

import numpy as np
import pytest
import tinymodels
from kv_file import HOST, KEYS, KINDS, ROWS, SEQS, VALUES, unpack, xxh64
from test_machine import FORMATS
from test_sessions import add

import minfer
from minfer import _ffi, session_file

NAMES = {KINDS: "KINDS", SEQS: "SEQS", ROWS: "ROWS", KEYS: "K", VALUES: "V", HOST: "HOST"}
N_SEQ, HOST_STATE = 6, b"what belongs to it"


def fill(engine):
    """0, 1 and 4 share rows, 2 has a gap, 3 and 5 are empty; windows have dropped rows. Returns the
    sequences that have rows."""
    add(engine, 0, 40)
    engine.kv.share(1, 0, 40)
    engine.kv.share(4, 0, 38)
    add(engine, 1, 5)
    add(engine, 4, 2)
    add(engine, 2, 17)
    engine.kv.shift(2, 14, 30)
    add(engine, 2, 2)
    add(engine, 0, 60)
    add(engine, 1, 3)
    return [0, 1, 2, 4]


@pytest.fixture(scope="module", params=[("gemma3", f) for f in FORMATS] + [("mistral", "f32")],
                ids="-".join)  # fmt: skip
def made(request, tmp_path_factory):
    """(path, engine that is in the state of the file, its sequences)."""
    arch, cache_type = request.param
    folder = tmp_path_factory.mktemp("made")
    model = tinymodels.write(folder / "tiny.gguf", arch)
    options = dict(n_ctx=160, n_seq=N_SEQ, n_batch=16, threads=1, cache_type=cache_type)
    with minfer.load(model, **options) as engine:
        seqs = fill(engine)
        engine.kv_save(folder / "made.kv", HOST_STATE)
        yield folder / "made.kv", engine, seqs


@pytest.fixture
def file(made):
    with minfer.SessionFile(made[0]) as file:
        yield file


def positions(spans):
    """[(pos, cell)] of every row."""
    return [(s.pos + i, s.cell + i) for s in spans for i in range(s.len)]


def numbered(engine, seqs, group):
    """[[(pos, number)] of each sequence]: rows are numbered in the order of the first visit."""
    numbers = {}
    return [
        [(pos, numbers.setdefault(cell, len(numbers))) for pos, cell in positions(spans)]
        for spans in (engine.kv.spans(seq, group) for seq in seqs)
    ]


def test_the_header(made, file):
    path, engine, _ = made
    parts = unpack(path.read_bytes())
    info, meta = file.info, parts.meta()
    assert info.file_bytes == path.stat().st_size and file.path == str(path)
    assert (info.version, info.flags, info.device) == (2, parts.flags, "cpu")
    assert info.kv_format == engine.kv_format
    for name in ("n_layer", "n_ctx", "n_embd"):
        assert getattr(info, name) == getattr(engine, name) == meta[name]
    for name in ("n_head_kv", "head_dim", "row_bytes"):
        assert getattr(info, name) == meta[name] > 0
    assert info.fingerprint == f"{meta['model[0]']:016x}{meta['model[1]']:016x}"
    assert file.host_state == HOST_STATE


def test_groups_and_sequences(made, file):
    _, engine, seqs = made
    stats = engine.kv.stats()
    assert [(g.kind, g.n_layers) for g in file.groups] == [(g.kind, g.n_layers) for g in stats]
    kinds = [file.groups[file.layer_group(i)].kind for i in range(engine.n_layer)]
    assert kinds == engine.kv.kinds()
    for group in file.groups:
        name = group.kind.split("/")[0]
        assert group.window == (int(name.removeprefix("sliding-")) if "-" in name else 0)
    assert [s.seq for s in file.seqs] == seqs
    for s in file.seqs:
        assert (s.len, s.next_pos) == (engine.kv.len(s.seq), engine.kv.next_pos(s.seq))
    assert [s.clean for s in file.seqs] == [100, 48, 14, 40]


def test_spans(made, file):
    """As those of the engine, with the numbers of the rows for its cells."""
    _, engine, seqs = made
    dropped = 0
    for g, group in enumerate(file.groups):
        expected = numbered(engine, seqs, g)
        for i, rows in enumerate(expected):
            spans = file.spans(i, g)
            assert positions(spans) == rows
            apart = groupby(enumerate(rows), lambda at: (at[1][0] - at[0], at[1][1] - at[0]))
            assert len(spans) == len(list(apart))  # none could be longer
            dropped += file.seqs[i].len - len(rows)
        assert group.n_rows == len({number for rows in expected for _, number in rows})
        assert group.n_rows == engine.kv.stats()[g].n_used
    assert dropped > 0


def test_sections_and_rows(made, file):
    path, engine, _ = made
    data = path.read_bytes()
    sections = unpack(data).sections
    assert [(s.name, s.index) for s in file.sections] == [(NAMES[k], i) for k, i in sections]
    for s, expected in zip(file.sections, sections.values(), strict=True):
        assert data[s.offset : s.offset + s.bytes] == expected == file.data(s.name, s.index)
        assert s.checksum == xxh64(expected)
    for layer in range(engine.n_layer):
        for value, kind in ((False, KEYS), (True, VALUES)):
            rows = file.rows(layer, value)
            n_rows = file.groups[file.layer_group(layer)].n_rows
            assert rows.shape == (n_rows, file.info.row_bytes) and rows.dtype == np.uint8
            assert rows.tobytes() == sections[kind, layer]
    assert np.array_equal(file.rows(1), file.rows(1, False))


def test_bytes_keep_the_file_open(made):
    path = made[0]
    with minfer.SessionFile(path) as file:
        part, host = file.rows(0)[1:, 3:7], file.data("HOST")
        expected = part.tobytes()
    del file
    minfer.SessionFile(path).close()
    assert part.tobytes() == expected and host == HOST_STATE
    for array in (part, minfer.SessionFile(path).rows(0)):
        assert not array.flags.writeable
        with pytest.raises(ValueError):
            array.flags.writeable = True
    with pytest.raises(TypeError):
        host[0] = 1


def test_a_closed_file(made):
    with minfer.SessionFile(made[0]) as file:
        assert "4 sequences" in repr(file) and str(made[0]) in repr(file)
        with pytest.raises(TypeError, match="pickled"):
            pickle.dumps(file)
    file.close()
    assert "closed" in repr(file) and file.info.version == 2  # what it has said stays
    for call in (
        lambda: file.spans(0), lambda: file.rows(0), lambda: file.data("K"),
        lambda: file.layer_group(0), lambda: file.host_state, lambda: file.handle,
    ):  # fmt: skip
        with pytest.raises(minfer.ClosedError, match=r"made\.kv"):
            call()


def test_wrong_arguments(made, file):
    path = made[0]
    for call in (
        lambda: file.spans(4), lambda: file.spans(-1), lambda: file.spans(2**32),
        lambda: file.spans(0, len(file.groups)), lambda: file.spans(0, -1),
        lambda: file.layer_group(file.info.n_layer), lambda: file.layer_group(-1),
        lambda: file.rows(file.info.n_layer), lambda: file.rows(-1),
        lambda: file.data("K", file.info.n_layer), lambda: file.data("k"), lambda: file.data(""),
        lambda: file.data("K", -1),
        lambda: minfer.SessionFile(path, threads=0),
        lambda: minfer.SessionFile(path, threads=2**32), lambda: minfer.SessionFile("a\0b"),
    ):  # fmt: skip
        with pytest.raises(minfer.ArgumentError):
            call()
    for call in (
        lambda: file.spans("0"), lambda: file.spans(0, 1.0), lambda: file.rows(None),
        lambda: file.layer_group(True), lambda: file.data([]), lambda: file.data(b"K"),
        lambda: file.data("K", True), lambda: file.data("K", 0.0), lambda: file.data("K", None),
        lambda: minfer.SessionFile(path, threads="2"), lambda: minfer.SessionFile(3),
    ):  # fmt: skip
        with pytest.raises(minfer.ArgumentTypeError):
            call()


def test_what_cannot_be_opened(made, tmp_path):
    for path in (tmp_path / "absent.kv", "", b"", tmp_path / "x" / "y"):
        with pytest.raises(minfer.MissingFileError):
            minfer.SessionFile(path)
    with pytest.raises(minfer.FileError) as error:
        minfer.SessionFile(tmp_path)
    assert not isinstance(error.value, minfer.MissingFileError)
    data = bytearray(made[0].read_bytes())
    data[-1] ^= 1
    (tmp_path / "bad.kv").write_bytes(data)
    with pytest.raises(minfer.FormatError, match=r"bad\.kv: "):
        minfer.SessionFile(tmp_path / "bad.kv")
    assert minfer.SessionFile(str(made[0]).encode(), threads=3).info.version == 2


def test_an_empty_session(made, tmp_path):
    made[1].kv_save(tmp_path / "none.kv", b"", [])
    with minfer.SessionFile(tmp_path / "none.kv") as file:
        assert file.seqs == [] and file.host_state == b""
        assert {group.n_rows for group in file.groups} == {0}
        assert file.rows(0, True).shape == (0, file.info.row_bytes)


def test_progress_and_ctrl_c(made, monkeypatch):
    """Progress is told while C verifies; an interrupted opening does not wait for its end."""
    opened, told, ended = session_file.lib.mf_session_open, [], threading.Event()

    class Slow:
        """The library; it opens once the test lets it."""

        def __getattr__(self, name):
            return getattr(LIB, name)

        def mf_session_open(self, *arguments):
            assert ended.wait(60)
            return opened(*arguments)

    LIB = session_file.lib
    monkeypatch.setattr(session_file, "lib", Slow())

    def progress(what, done, total):
        told.append(what)
        if len(told) == 3:
            ended.set()

    with minfer.SessionFile(made[0], progress=progress) as file:
        assert len(file.seqs) == 4
    assert set(told) == {"verifying"} and len(told) >= 3

    ended.clear()
    start = time.monotonic()

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        minfer.SessionFile(made[0], progress=stop)
    assert time.monotonic() - start < 30
    ended.set()


def test_options_keep_what_they_point_at():
    """Or a thread that an interrupt has left in C would count into memory of others."""
    numbers = _ffi.ffi.new("uint64_t[2]")
    seen, made = weakref.ref(numbers), _ffi.options("mf_session_options", progress=numbers)
    del numbers
    gc.collect()
    assert seen() is not None
    del made
    gc.collect()
    assert seen() is None
