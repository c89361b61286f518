"""What surrounds a session file and wishes it ill: tables that promise terabytes, disks that are
full, and other processes that save the same path or die while they do.

Fields and bytes that are wrong are the business of test_session_mutants.py.
"""

import os
import resource
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import resume
from kv_file import ALIGN, HOST, KEYS, KINDS, ROWS, SEQS, VALUES, pack, unpack
from kv_judge import state
from test_sessions import add, empty, family, saved, saved_state, says

import minfer

OPTIONS = dict(n_ctx=200, n_seq=6, n_batch=16, threads=1)
SECONDS, MEMORY = 2, 64 << 20  # that a refusal may take


@pytest.fixture(scope="module")
def loaded(tiny_path):
    with minfer.load(tiny_path, **OPTIONS) as engine:
        yield engine


@pytest.fixture
def live(loaded):
    """An engine with a few sequences."""
    empty(loaded)
    family(loaded)
    return loaded


# ---- tables that promise more than there is ------------------------------------------------------


def promise(path, parts, key, n_file):
    """A sparse file of n_file bytes with a header and a table that agree with each other: all the
    sections of `parts`, that of `key` as large as it takes."""
    good = pack(parts)
    n_good = len(parts.sections[key])
    more = (n_file - len(good)) // ALIGN * ALIGN
    entries, at = {}, 40 + len(parts.metadata)
    keys = list(parts.sections)
    for i in range(keys.index(key) + 1, len(keys)):
        offset = int.from_bytes(good[at + 32 * i + 8 :][:8], "little")
        entries[i, "offset"] = offset + more
    entries[keys.index(key), "n"] = n_good + more
    path.write_bytes(pack(parts, header={"n_file": len(good) + more}, entries=entries))
    os.truncate(path, len(good) + more)


def peak():
    """The most memory this process has had since the last call, in bytes."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x)
    Path("/proc/self/clear_refs").write_text("5")
    return int(line.split()[1]) << 10


SECTIONS = [(KINDS, 0), (SEQS, 0), (ROWS, 0), (ROWS, 1), (KEYS, 0), (VALUES, 1), (HOST, 0)]


@pytest.mark.parametrize("key", SECTIONS, ids=str)
def test_sparse(live, tmp_path, key):
    """5 GB and a terabyte, and it is this engine's model: refused for the size of the section,
    without reading it."""
    path = tmp_path / "x.kv"
    data = saved(live, path)
    parts = unpack(data)
    rest = len(data) - len(parts.sections[key])
    seen, said, held = state(live), says(live, [0, 1, 2, 4]), saved_state(live)
    peak()
    before = peak()
    for n_file in (5 << 30, 1 << 40):
        promise(path, parts, key, n_file)
        started = time.monotonic()
        with pytest.raises(minfer.FormatError) as error:
            live.kv_load(path)
        assert time.monotonic() - started < SECONDS
        name = ["", "KINDS", "SEQS", "ROWS", "K", "V", "HOST"][key[0]]
        section = f"section {key[0]}.{key[1]} ({name})"
        n_bytes = path.stat().st_size - rest
        assert f"x.kv: {section} has {n_bytes} bytes" in str(error.value)
    assert peak() - before < MEMORY
    assert state(live) == seen and says(live, [0, 1, 2, 4]) == said
    assert saved_state(live) == held


def test_host_state_too_large(live, tmp_path):
    """What could not be loaded is not saved."""
    path = tmp_path / "x.kv"
    old = saved(live, path)
    with pytest.raises(minfer.LimitError, match=f"{2**30 + 1} bytes.* {2**30}"):
        live.kv_save(path, bytes(2**30 + 1))
    assert path.read_bytes() == old and os.listdir(tmp_path) == ["x.kv"]


# ---- full disks ----------------------------------------------------------------------------------


@contextmanager
def files_of_at_most(n):
    """A limit that the system keeps as a full disk does: a short write, then an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk(live, tmp_path):
    """Wherever in the file it is full."""
    path = tmp_path / "x.kv"
    old = saved(live, path)
    add(live, 3, 30)
    n = len(saved(live, tmp_path / "new.kv"))
    (tmp_path / "new.kv").unlink()
    for room in (0, 1, 40, 4096, n // 2, n - 1):
        with files_of_at_most(room), pytest.raises(minfer.FileError, match=r"x\.kv: .* write"):
            live.kv_save(path, b"host")
        assert path.read_bytes() == old and os.listdir(tmp_path) == ["x.kv"]
    with files_of_at_most(n):
        assert saved(live, path) != old
    assert live.kv_load(path) == b"host"


# ---- several processes, one path -----------------------------------------------------------------

N_SAVES = 200
SAVERS = (b"one", b"two")
SAVER = """
import sys; sys.path.insert(0, sys.argv[1])
import minfer, test_session_hostile as t
name, path, ready = sys.argv[3].encode(), sys.argv[4], t.Path(sys.argv[5])
with minfer.load(sys.argv[2], **t.OPTIONS) as engine:
    t.fill(engine, name)
    for n in range(10**9):
        if n == t.N_SAVES: ready.touch()
        engine.kv_save(path, name)
"""


def fill(engine, name):
    """What a saver saves."""
    seed = SAVERS.index(name)
    add(engine, 0, 150 + seed, seed)
    engine.kv.share(3, 0, 140)
    add(engine, 3, 7, seed)


def whole(engine):
    return resume.look(engine, range(engine.n_seq)), says(engine, [0, 3])


def test_two_savers_and_a_loader(loaded, tiny_path, tmp_path):
    """Two processes save one path over and over, until they are killed: each load meanwhile gives
    the whole state of one of them. What they leave beside it is gone after the next save."""
    (tmp_path / "kv").mkdir()
    path = tmp_path / "kv" / "x.kv"
    expected, files = {}, {}
    for name in SAVERS:
        empty(loaded)
        fill(loaded, name)
        expected[name] = whole(loaded)
        loaded.kv_save(path, name)
        files[name] = path.read_bytes()
    ready = [tmp_path / f"{name.decode()}.ready" for name in SAVERS]
    savers = [
        subprocess.Popen(
            [sys.executable, "-c", SAVER, Path(__file__).parent, tiny_path, name, path, r],
            stderr=subprocess.PIPE,
        )
        for name, r in zip(SAVERS, ready, strict=True)
    ]
    loads = dict.fromkeys(SAVERS, 0)
    try:
        until = time.monotonic() + 300
        while not all(r.exists() for r in ready) and time.monotonic() < until:
            if any(saver.poll() is not None for saver in savers):
                break
            name = loaded.kv_load(path)
            assert whole(loaded) == expected[name]
            loads[name] += 1
            assert path.read_bytes() in files.values()
    finally:
        for saver in savers:
            saver.kill()
        errors = [saver.communicate()[1] for saver in savers]
    assert not any(errors) and all(r.exists() for r in ready), errors
    assert all(loads.values()), loads
    assert path.read_bytes() in files.values()
    loaded.kv_save(path, b"mine")
    assert os.listdir(path.parent) == ["x.kv"] and loaded.kv_load(path) == b"mine"
