"""Every bad call of kv_save and kv_load: the class it raises, and that it changes nothing."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from kv_judge import state
from test_sessions import add, empty, family, refused, saved, says

import minfer


@pytest.fixture(scope="module")
def loaded(tiny_path):
    with minfer.load(tiny_path, n_ctx=200, n_seq=6, n_batch=16, threads=1) as engine:
        yield engine


@pytest.fixture
def live(loaded):
    """An engine with a few sequences."""
    empty(loaded)
    family(loaded)
    return loaded


WRONG_SEQS = [
    (minfer.ArgumentTypeError, [3, "0", b"\0", 1.5, [0.0], [None], ["0"], [[0]], object()]),
    (minfer.ArgumentError, [[-1], [6], [2**31], [-(2**31) - 1], [2**64]]),
    (minfer.ArgumentError, [[0, 0], [1, 2, 1], [0] * 7]),
]  # fmt: skip
WRONG_SEQS = [(error, seqs) for error, list_ in WRONG_SEQS for seqs in list_]


@pytest.mark.parametrize("error, seqs", WRONG_SEQS, ids=str)
def test_wrong_seqs(live, tmp_path, error, seqs):
    path = tmp_path / "x.kv"
    seen = state(live)
    with pytest.raises(error):
        live.kv_save(path, b"", seqs)
    assert not list(tmp_path.iterdir())
    saved(live, path, [0, 1, 2] if seqs == [1, 2, 1] else [0, 1])
    with pytest.raises(error):
        live.kv_load(path, seqs)
    assert state(live) == seen


def test_as_many_seqs_as_the_file_has(live, tmp_path):
    saved(live, tmp_path / "x.kv", [0, 1])
    for seqs in ([], [0], [0, 1, 2]):
        refused(live, minfer.ArgumentError, tmp_path / "x.kv", seqs, words="2")


def test_kinds_of_seqs(live, tmp_path):
    """Whatever holds whole numbers."""
    path = tmp_path / "x.kv"
    data = saved(live, path, [0, 2])
    alike = [(0, 2), np.array([0, 2]), np.array([0, 2], np.uint8), [np.int64(0), np.int32(2)],
             iter([0, 2]), {0: 1, 2: 3}, range(0, 4, 2)]  # fmt: skip
    for seqs in alike:
        assert saved(live, path, seqs) == data
    live.kv_load(path, np.array([4, 5], np.int16))
    assert says(live, [4, 5]) == says(live, [0, 2])


@pytest.mark.parametrize("host_state", ["text", None, 3, [1], 1.5, object()])
def test_wrong_host_state(live, tmp_path, host_state):
    with pytest.raises(minfer.ArgumentTypeError, match="host_state"):
        live.kv_save(tmp_path / "x.kv", host_state)
    assert not list(tmp_path.iterdir())


def test_host_states(live, tmp_path):
    path = tmp_path / "x.kv"
    many = np.random.default_rng(1).bytes(10_000_000)
    for host_state in (b"", b"\0", b"x\0y", bytearray(b"abc"), memoryview(b"abcdef")[1:4],
                       memoryview(b"abcdef")[::2], memoryview(np.arange(6)), many):  # fmt: skip
        live.kv_save(path, host_state)
        found = live.kv_load(path)
        assert type(found) is bytes and found == bytes(host_state)
    live.kv_save(path)
    assert live.kv_load(path) == b""
    live.kv_save(path, seqs=[], host_state=b"nothing else")
    seen = state(live)
    assert live.kv_load(path) == live.kv_load(path, []) == b"nothing else"
    assert state(live) == seen


@pytest.mark.parametrize("path", [None, 3, 1.5, [], object()])
def test_wrong_types_of_path(live, path):
    for call in (live.kv_save, live.kv_load):
        with pytest.raises(minfer.ArgumentTypeError):
            call(path)


def test_types_of_path(live, tmp_path):
    name = tmp_path / "ünï ✓.kv"
    data = saved(live, name)
    for path in (name, str(name), os.fsencode(name)):
        live.kv_save(path, b"host")
        assert live.kv_load(path) == b"host" and name.read_bytes() == data
    for path in ("a\0b", b"a\0b"):
        for call in (live.kv_save, live.kv_load):
            with pytest.raises(minfer.ArgumentError, match="NUL"):
                call(path)
    assert [p.name for p in tmp_path.iterdir()] == [name.name]


def not_files(folder):
    """Paths that mean no regular file, made in a folder."""
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    return [folder / "fifo", folder / "folder", folder, Path("/dev/null"), Path("/dev/full")]


def test_what_is_no_file(live, tmp_path):
    seen = state(live)
    for path in (*not_files(tmp_path), Path("/proc/self/x.kv")):
        for call in (live.kv_save, live.kv_load):
            with pytest.raises(minfer.FileError):
                call(path)
    missing = tmp_path / "missing.kv"
    with pytest.raises(FileNotFoundError) as error:
        live.kv_load(missing)
    assert isinstance(error.value, minfer.MissingFileError) and "missing.kv" in str(error.value)
    for path in (tmp_path / "no folder" / "x.kv", tmp_path / "fifo" / "x.kv", ""):
        for call in (live.kv_save, live.kv_load):
            with pytest.raises(minfer.FileError):
                call(path)
    with pytest.raises(minfer.FileError):
        live.kv_save(tmp_path / ("x" * 300))
    assert state(live) == seen
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fifo", "folder"]


def test_symlinks(live, tmp_path):
    """A save does not write through one, a load reads through it."""
    data = saved(live, tmp_path / "x.kv")
    (tmp_path / "link.kv").symlink_to("x.kv")
    (tmp_path / "dangling.kv").symlink_to("gone.kv")
    for name in ("link.kv", "dangling.kv"):
        with pytest.raises(minfer.FileError, match="link"):
            live.kv_save(tmp_path / name, b"other")
        assert (tmp_path / name).is_symlink()
    assert live.kv_load(tmp_path / "link.kv") == b"host"
    with pytest.raises(minfer.MissingFileError):
        live.kv_load(tmp_path / "dangling.kv")
    assert (tmp_path / "x.kv").read_bytes() == data and len(list(tmp_path.iterdir())) == 3


def test_what_a_save_leaves(live, tmp_path):
    """A new file only its owner may read; the permissions of an old one stay; nothing beside it."""
    path = tmp_path / "x.kv"
    saved(live, path)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    os.link(path, tmp_path / "hard.kv")
    first = path.read_bytes()
    add(live, 3, 5)
    assert saved(live, path) != first == (tmp_path / "hard.kv").read_bytes()
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hard.kv", "x.kv"]


def test_closed(tiny_path, tmp_path):
    with minfer.load(tiny_path, n_ctx=64, threads=1) as engine:
        add(engine, 0, 3)
        saved(engine, tmp_path / "x.kv")
    for call in (engine.kv_save, engine.kv_load):
        with pytest.raises(minfer.ClosedError):
            call(tmp_path / "x.kv")


def test_progress(tiny_path, tmp_path, monkeypatch):
    """It is told while the call lasts; when it raises, the call has ended all the same."""
    path = tmp_path / "x.kv"
    seen = []
    call = minfer.sessions._call

    def slow(*arguments):
        time.sleep(0.3)  # progress is told after a twentieth of a second
        call(*arguments)

    def told(*args):
        seen.append(args)
        raise KeyError("enough")

    monkeypatch.setattr(minfer.sessions, "_call", slow)
    with minfer.load(tiny_path, n_ctx=64, threads=1) as engine:
        add(engine, 0, 3)
        with pytest.raises(KeyError, match="enough"):
            engine.kv_save(path, b"host", progress=told)
        assert path.exists()
        assert seen[0][0] == "saving" and len(seen) == 1
        assert engine.kv_load(path, progress=lambda *args: None) == b"host"
        assert engine.kv.len(0) == 3
