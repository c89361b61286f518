"""No file but one that kv_save could have written is loaded.

Every truncation and every changed byte is refused; so is, with all checksums put right again, every
changed number of header, table and bookkeeping, unless the file is then as good as any other: the
cache that it gives is sound, and saving that gives the same bytes. After each refusal the engine is
as it was, to the bit.
"""

import os
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import resume
import tinymodels
from kv_file import ENTRY, HEADER, HOST, KEYS, KINDS, METADATA, ROWS, SEQS, VALUES
from kv_file import books, pack, unpack, xxh64
from kv_judge import state
from test_machine import FORMATS

import minfer

FLAGS = {"f32": 0, "q8_0": 1, "f16": 2}
SHAPE = dict(n_layer=2, n_embd=32, n_head=2, n_head_kv=1, head_dim=32, n_ff=32)
N_SEQ, PROBE = 4, 5


class Target:
    """An engine with live sequences, which refuses to be changed by the files that it is given."""

    def __init__(self, engine, folder):
        self.engine, self.path, self.folder = engine, folder / "mutant.kv", folder
        self.state = state(engine)
        self.logits = self.says()
        self.saved = self.save()
        self.refusals = 0

    def says(self):
        """Bits of the next logits of every sequence."""
        logits = [self.engine.forward_cached([PROBE], s) for s in range(N_SEQ)]
        for s in range(N_SEQ):
            self.engine.kv.trim(s, 1)
        return resume.digest(*logits)

    def save(self):
        self.engine.kv_save(self.folder / "state.kv", b"now")
        return (self.folder / "state.kv").read_bytes()

    def refuses(self, classes=minfer.FormatError):
        """The message."""
        with pytest.raises(classes) as error:
            self.engine.kv_load(self.path)
        assert state(self.engine) == self.state and "mutant.kv: " in str(error.value)
        self.refusals += 1
        if self.refusals % 500 == 0:
            self.check()
        return str(error.value)

    def refuses_bytes(self, data, classes=minfer.FormatError):
        self.path.write_bytes(data)
        return self.refuses(classes)

    def restore(self):
        """After a file that was loaded."""
        for s in range(N_SEQ):
            self.engine.kv.free(s)
        (self.folder / "state.kv").write_bytes(self.saved)
        self.engine.kv_load(self.folder / "state.kv")
        self.state = state(self.engine)

    def check(self):
        """Nothing that was refused has left a trace."""
        self.engine.kv.check()
        assert self.says() == self.logits
        assert self.save() == self.saved
        assert state(self.engine) == self.state


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Two layers: one with a window of 8, and a full one."""
    return tinymodels.write(tmp_path_factory.mktemp("model") / "tiny.gguf", "gemma2", **SHAPE)


def options(cache_type):
    return dict(n_ctx=64, n_seq=N_SEQ, n_batch=4, threads=1, cache_type=cache_type)


@pytest.fixture(scope="module", params=FORMATS)
def session(request, model, tmp_path_factory):
    """(bytes, engine that is in the state of the file): 0 and 2 share rows, 1 has a gap."""
    with minfer.load(model, **options(request.param)) as engine:
        engine.forward_cached(list(range(3, 16)), 0)
        engine.kv.share(2, 0, 10)
        engine.forward_cached([7, 8], 2)
        engine.forward_cached([9, 10, 11, 12], 1)
        engine.kv.shift(1, 2, 5)
        engine.forward_cached([13], 1)
        path = tmp_path_factory.mktemp("session") / "good.kv"
        engine.kv_save(path, b"host state")
        yield path.read_bytes(), engine


@pytest.fixture(scope="module")
def target(session, model, tmp_path_factory):
    """Other rows than the session's, in the same sequences and in one more."""
    with minfer.load(model, **options(session[1].kv_format)) as engine:
        for s in range(N_SEQ):
            engine.forward_cached(list(range(20 + s, 30 + s)), s)
        yield Target(engine, tmp_path_factory.mktemp("target"))


@pytest.fixture
def parts(session):
    return unpack(session[0])


def test_the_layout_is_understood(session, parts):
    data, engine = session
    assert xxh64(b"") == 0xEF46DB3751D8E999 and xxh64(b"abc") == 0x44BC2CF5AD770999
    assert pack(parts) == data
    assert parts.flags == FLAGS[engine.kv_format]
    assert [key[0] for key in parts.sections] == [KINDS, SEQS, ROWS, ROWS, 4, 4, 5, 5, HOST]
    assert parts.sections[HOST, 0] == b"host state"
    names = Counter(name for _, _, name in books(parts))
    assert names["pos"] == 4 and names["first"] == 8 and names["id"] == 3


def test_every_truncation(session, target):
    data, _ = session
    target.path.write_bytes(data)
    for n in range(len(data) - 1, -1, -1):
        os.truncate(target.path, n)
        message = target.refuses()
        assert "empty" in message if n == 0 else "size" in message or "cut" in message, message
    for more in (b"\0", b"\1", bytes(64), data):
        assert "size" in target.refuses_bytes(data + more)
    target.check()


@pytest.mark.parametrize("how", ["flip", "bit", "zero"])
def test_every_byte(session, target, how):
    data, _ = session
    target.path.write_bytes(data)
    with open(target.path, "r+b", buffering=0) as file:
        for at, byte in enumerate(data):
            wrong = {"flip": byte ^ 255, "bit": byte ^ 1 << at % 8, "zero": 0}[how]
            if wrong == byte:
                continue
            os.pwrite(file.fileno(), bytes([wrong]), at)
            target.refuses()
            os.pwrite(file.fileno(), bytes([byte]), at)
    assert target.path.read_bytes() == data
    target.check()


def others(value, bits):
    """Numbers near a field's value and at the ends of its range."""
    top = 2**bits - 1
    near = [value - 1, value + 1, value ^ 1 << bits - 1, 2 * value, value + 64]
    ends = [0, 1, 2, 7, 63, 64, 255, 4096, 2**24, 2**31 - 1, 2**31, top - 1, top]
    return sorted({n & top for n in near + ends} - {value})


HEADER_WORDS = {
    "magic": "magic", "version": "version", "flags": "flags", "n_file": "size",
    "n_header": "header", "n_metadata": "metadata", "n_sections": ("sections", "header"),
}  # fmt: skip


def says_one_of(message, words):
    return any(word in message for word in ([words] if isinstance(words, str) else words))


def test_header(session, target, parts):
    data, engine = session
    values = dict(version=2, flags=parts.flags, n_file=len(data), n_metadata=len(parts.metadata),
                  n_header=len(pack(replace(parts, sections={}))) + 32 * len(parts.sections),
                  n_sections=len(parts.sections))  # fmt: skip
    assert pack(parts, header=values) == data and set(values) == set(HEADER)
    for field, value in values.items():
        for wrong in others(value, 64 if field in ("n_file", "n_header") else 32):
            message = target.refuses_bytes(pack(parts, header={field: wrong}))
            words = HEADER_WORDS[field]
            if field == "flags" and wrong in FLAGS.values():
                words = f"{engine.kv_format} here"
            assert says_one_of(message, words), (field, wrong, message)
            if field == "version":
                assert f"says {wrong}," in message
    for wrong in (b"GGUF\3\0\0\0", b"\x89MFK\n\x1a\n\0", bytes(8)):
        assert "magic" in target.refuses_bytes(pack(parts, header={"magic": wrong}))
    assert "flags say both" in target.refuses_bytes(pack(replace(parts, flags=3)))
    assert "checksum of the header" in target.refuses_bytes(pack(parts, checksum=1))
    target.check()


@pytest.mark.parametrize("field", METADATA)
def test_metadata(target, parts, field):
    words = {"backend": "backend", "row_bytes": "bytes of a row"}.get(field, field)
    if field.startswith("model"):
        words = "fingerprint"
    for wrong in others(parts.meta()[field], 64 if field.startswith("model") else 32):
        changed = parts.with_meta(**{field: wrong})
        assert words in target.refuses_bytes(pack(changed)), wrong
    target.check()


@pytest.mark.parametrize("more", [-48, -8, 8, 48, 4048])
def test_metadata_of_another_size(target, parts, more):
    metadata = (parts.metadata + bytes(4096))[: len(parts.metadata) + more]
    assert "metadata" in target.refuses_bytes(pack(replace(parts, metadata=metadata)))


@pytest.mark.parametrize("field", ENTRY)
def test_table(session, target, parts, field):
    data, _ = session
    start = 40 + len(parts.metadata)
    for i in range(len(parts.sections)):
        at = start + 32 * i + [0, 4, 8, 16, 24][ENTRY.index(field)]
        n = 4 if field in ("type", "index") else 8
        value = int.from_bytes(data[at : at + n], "little")
        for wrong in others(value, 8 * n):
            message = target.refuses_bytes(pack(parts, entries={(i, field): wrong}))
            words = {"checksum": "checksum", "n": ("bytes", "offset", "size")}.get(field, "section")
            assert says_one_of(message, words), (i, wrong, message)
    target.check()


def test_overlapping_sections_and_holes(target, parts):
    keys = list(parts.sections)
    a, b = keys.index((KEYS, 0)), keys.index((KEYS, 1))
    data = pack(parts)
    start = 40 + len(parts.metadata)
    offset = [int.from_bytes(data[start + 32 * i + 8 :][:8], "little") for i in (a, b)]
    both = {(a, "offset"): offset[1], (b, "offset"): offset[0]}
    assert "offset" in target.refuses_bytes(pack(parts, entries=both))
    assert "offset" in target.refuses_bytes(pack(parts, entries={(b, "offset"): offset[0]}))
    swapped = dict(parts.sections)
    swapped[keys[a]] = swapped.pop(keys[a])  # the last one now
    assert "order" in target.refuses_bytes(pack(replace(parts, sections=swapped)))
    for extra in ((KINDS, 1), (SEQS, 1), (ROWS, 2), (KEYS, 2), (VALUES, 2), (HOST, 1), (7, 0)):
        sections = dict(sorted({**parts.sections, extra: b"x" * 64}.items()))
        assert "sections" in target.refuses_bytes(pack(replace(parts, sections=sections))), extra
    sections = {(0, 0): b"", **parts.sections}
    assert "order" in target.refuses_bytes(pack(replace(parts, sections=sections)))
    target.check()


def test_sections_missing_and_of_other_sizes(target, parts):
    for key, data in parts.sections.items():
        message = target.refuses_bytes(pack(parts.without(key)))
        assert f"section {key[0]}.{key[1]} (" in message and "missing" in message
        if key == (HOST, 0):
            continue
        for wrong in (b"", data[:-1], data[:-4], data[:-8], data + b"\0", data + bytes(4),
                      data + bytes(32), data + data):  # fmt: skip
            message = target.refuses_bytes(pack(parts.with_section(key, wrong)))
            assert "section" in message or "SEQS" in message or "ROWS" in message, message
    target.check()


def test_every_byte_of_the_kinds(target, parts):
    kinds = parts.sections[KINDS, 0]
    for at, byte in enumerate(kinds):
        for wrong in (byte ^ 1, byte ^ 255, 0, ord("\n")):
            if wrong != byte:
                changed = kinds[:at] + bytes([wrong]) + kinds[at + 1 :]
                message = target.refuses_bytes(pack(parts.with_section((KINDS, 0), changed)))
                assert f"layer {at * 2 // len(kinds)} stores" in message
    half = len(kinds) // 2
    changed = kinds[half:] + kinds[:half]
    assert "layer 0" in target.refuses_bytes(pack(parts.with_section((KINDS, 0), changed)))
    target.check()


# What a file may say instead, if it says so soundly: another sequence, where its gap is and how
# wide, and that fewer of its rows were never rotated.
MAY_DIFFER = {"id", "row", "pos", "clean"}


def harmless(engine, path, data):
    """Whether what came of a file is as good as any other session: sound, and saved it is the same
    file."""
    engine.kv.check()
    parts = unpack(data)
    ids = [at for key, at, name in books(parts) if name == "id"]
    seqs = [int.from_bytes(parts.sections[SEQS, 0][at : at + 4], "little") for at in ids]
    engine.kv_save(path.with_name("again.kv"), parts.sections[HOST, 0], seqs)
    return path.with_name("again.kv").read_bytes() == data


def test_every_number_of_the_books(target, parts):
    """Each is changed to numbers near it and to the ends of its range; each pair of numbers that
    lie next to each other is exchanged."""
    accepted, refused = Counter(), Counter()
    unknown = minfer.ArgumentError  # a sequence that this engine does not have

    def attempt(name, key, changed):
        data = pack(parts.with_section(key, changed))
        target.path.write_bytes(data)
        try:
            target.engine.kv_load(target.path)
        except (minfer.FormatError, unknown) as error:
            assert isinstance(error, minfer.FormatError) or name == "id"
            words = ("SEQS", "ROWS", "section", "sequence")
            assert says_one_of(str(error), words), str(error)
            assert "mutant.kv: " in str(error) or name == "id"
            target.refusals += 1
            refused[name] += 1
            assert state(target.engine) == target.state
            return
        accepted[name] += 1
        assert harmless(target.engine, target.path, data), (name, key)
        target.restore()

    numbers = books(parts)
    for key, at, name in numbers:
        data = parts.sections[key]
        value = int.from_bytes(data[at : at + 4], "little")
        for wrong in others(value, 32):
            attempt(name, key, data[:at] + wrong.to_bytes(4, "little") + data[at + 4 :])
    for (key, at, _), (key2, at2, _) in zip(numbers, numbers[1:]):
        data = parts.sections[key]
        changed = data[:at] + data[at2 : at2 + 4] + data[at:at2] + data[at2 + 4 :]
        if key == key2 and changed != data:
            attempt("two", key, changed)
    print(dict(accepted), dict(refused))
    assert set(accepted) - {"two"} <= MAY_DIFFER and set(refused) >= {n for _, _, n in numbers}
    target.check()


def test_random_books(target, parts):
    """Several numbers changed at once: whatever is loaded is sound."""
    rng = np.random.default_rng(1)
    numbers = books(parts)
    likely = [i for i, (_, _, name) in enumerate(numbers) if name in MAY_DIFFER]
    accepted = 0
    for round_ in range(600):
        changed = parts
        among = likely if round_ % 3 == 0 else range(len(numbers))
        for i in rng.choice(among, rng.integers(1, 4), replace=False):
            key, at, _ = numbers[i]
            data = changed.sections[key]
            value = int.from_bytes(data[at : at + 4], "little")
            value = [value ^ 1, value + 1, rng.integers(16), rng.integers(2**32)][rng.integers(4)]
            word = int(value).to_bytes(4, "little")
            changed = changed.with_section(key, data[:at] + word + data[at + 4 :])
        data = pack(changed)
        target.path.write_bytes(data)
        try:
            target.engine.kv_load(target.path)
        except (minfer.FormatError, minfer.ArgumentError):
            assert state(target.engine) == target.state
            continue
        accepted += 1
        assert harmless(target.engine, target.path, data)
        target.restore()
    assert 3 < accepted < 200, accepted
    target.check()


def test_rows_of_any_bits(target, parts):
    """Row data is taken as it is, NaN and infinity too: with a right checksum it is what was saved.
    It is then kept bit for bit, and computing with it ends."""
    for key in ((KEYS, 0), (VALUES, 1)):
        for fill in (b"\xff", b"\x7f\x80", b"\0"):
            n = len(parts.sections[key])
            data = pack(parts.with_section(key, (fill * n)[:n]))
            target.path.write_bytes(data)
            assert target.engine.kv_load(target.path) == b"host state"
            assert harmless(target.engine, target.path, data)
            target.engine.forward_cached([PROBE], 0)
            target.restore()
    target.check()


# ---- files of other engines ----------------------------------------------------------------------


def other(target, path, words, **load):
    with minfer.load(path, **load) as engine:
        engine.forward_cached([3, 4, 5], 0)
        engine.kv_save(target.path, b"x")
    message = target.refuses()
    assert words in message, message


def test_other_models(target, session, tmp_path):
    same = options(session[1].kv_format)
    for i, change in enumerate((dict(seed=1), dict(eps=2e-6), dict(rope_base=10001.0))):
        path = tinymodels.write(tmp_path / f"{i}.gguf", "gemma2", **{**SHAPE, **change})
        other(target, path, "fingerprint", **same)
    path = tinymodels.write(tmp_path / "half.gguf", "gemma2", "F16", **SHAPE)
    other(target, path, "fingerprint", **same)
    path = tinymodels.write(tmp_path / "3.gguf", "gemma2", **{**SHAPE, "n_layer": 3})
    other(target, path, "fingerprint", **same)
    target.check()


def test_one_weight_of_another_model(target, session, model, tmp_path):
    """The first and the last bytes of the tensors' data are in the fingerprint."""
    data = bytearray(model.read_bytes())
    data[-5] ^= 1
    (tmp_path / "last.gguf").write_bytes(data)
    other(target, tmp_path / "last.gguf", "fingerprint", **options(session[1].kv_format))


def test_a_copy_is_the_same_model(session, model, tmp_path):
    """Another path, and cut in parts: the model is what it holds."""
    data, engine = session
    (tmp_path / "x.kv").write_bytes(data)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(model.read_bytes())
    for path in (copy, tinymodels.split(copy, 3)):
        with minfer.load(path, **options(engine.kv_format)) as again:
            assert again.kv_load(tmp_path / "x.kv") == b"host state"


def test_other_options(target, session, model):
    same = options(session[1].kv_format)
    other(target, model, "n_ctx is 65 in the file, 64 here", **{**same, "n_ctx": 65})
    other(target, model, "n_ctx is 63 in the file, 64 here", **{**same, "n_ctx": 63})
    for cache_type in set(FORMATS) - {session[1].kv_format}:
        words = f"{cache_type} in the file, {session[1].kv_format} here"
        other(target, model, words, **{**same, "cache_type": cache_type})
    target.check()


@pytest.mark.parametrize("size", [1, 7, 8, 39, 40, 100, 10**9, 2**40])
def test_zeros(target, size):
    """Nothing but zeros, of any size: refused at once."""
    target.path.write_bytes(b"")
    os.truncate(target.path, size)
    assert "magic" in target.refuses()
    target.path.unlink()


def test_a_sparse_file_with_a_good_header(target, parts):
    """5 GB, all of it in the table: what does not fit this run is refused before that is read."""
    n, last = 5 * 2**30, len(parts.sections) - 1
    other_n_ctx = parts.with_meta(n_ctx=65)
    data = pack(other_n_ctx)
    target.path.write_bytes(data)
    os.truncate(target.path, n)
    assert "size" in target.refuses()
    n_host = n - (len(data) - len(parts.sections[HOST, 0]))
    data = pack(other_n_ctx, header={"n_file": n}, entries={(last, "n"): n_host})
    target.path.write_bytes(data)
    os.truncate(target.path, n)
    assert "n_ctx is 65" in target.refuses()
    target.path.unlink()
    target.check()
