"""minfer session inspect, verify and diff: what they say about good, damaged, different and hostile
files. Pictures are the business of test_session_plot.py."""

import json
import os
import struct
import tracemalloc
from collections import Counter
from functools import partial

import numpy as np
import pytest
import tinymodels
from kv_file import HOST, KEYS, KINDS, METADATA_LAYOUT, ROWS, SEQS, VALUES
from kv_file import Parts, books, pack, unpack
from test_cli import minfer as minfer_process
from test_session_file import numbered
from test_sessions import add

import minfer
from minfer.tools import cli, session_diff

N_SEQ = 6
OPTIONS = dict(n_ctx=200, n_seq=N_SEQ, n_batch=16, threads=1)


@pytest.fixture(scope="module")
def loaded(tiny_path):
    with minfer.load(tiny_path, **OPTIONS) as engine:
        yield engine


def fill(engine):
    """0 to 4 share rows, 2 less of them, and a window has dropped rows of 4; 5 has two gaps."""
    for seq in range(N_SEQ):
        engine.kv.free(seq)
    add(engine, 0, 30)
    for seq, n in enumerate((30, 25, 30, 30), 1):
        engine.kv.share(seq, 0, n)
    for seq in range(5):
        add(engine, seq, 1 + seq)
    add(engine, 4, 90)
    add(engine, 5, 9)
    engine.kv.shift(5, 4, 10)
    engine.kv.shift(5, 16, 10)


@pytest.fixture
def live(loaded):
    fill(loaded)
    return loaded


@pytest.fixture
def good(live, tmp_path):
    """(path, bytes)."""
    path = tmp_path / "good.kv"
    live.kv_save(path, b"host state")
    return path, path.read_bytes()


def run_session(capsys, *args, status=0, error=False):
    """Runs `minfer session` in this process; gives what it prints, or the line of an error."""
    assert cli.main(["session", *map(str, args)]) == status
    out, err = capsys.readouterr()
    if error:
        assert out == "" and err.count("\n") == 1 and err.startswith("minfer: ")
        return err
    assert err == ""
    return out


def write_chain(path, n):
    """A session file: sequence i of n reads the rows 0..i. Returns the path."""
    seqs = [struct.pack("<6I", i, 1 + i, 0, 1, 0, 0) for i in range(n)]
    rows = [struct.pack("<4I", 0, 1, 0, 1 + i) for i in range(n)]
    sections = {
        (KINDS, 0): b"full/f32/kv1x1".ljust(64, b"\0"),
        (SEQS, 0): struct.pack("<2I", n, 1) + b"".join(seqs),
        (ROWS, 0): struct.pack("<2I", 0, n) + b"".join(rows),
        (KEYS, 0): bytes(4 * n),
        (VALUES, 0): bytes(4 * n),
        (HOST, 0): b"",
    }
    path.write_bytes(pack(Parts(0, METADATA_LAYOUT.pack(0, 1, n, 8, 1, 1, 4, 1, 1, 2), sections)))
    return path


@pytest.fixture
def session(capsys):
    return partial(run_session, capsys)


@pytest.mark.parametrize(
    "args",
    [(), ("look", "x"), ("inspect",), ("verify", "x", "y"), ("diff", "x"), ("diff", "x", "y", "z"),
     ("plot", "x", "--json"), ("plot", "x", "-o", "x.jpg"), ("plot", "x", "-o", "png"),
     ("verify", "x", "--bogus")],
    ids=" ".join,
)  # fmt: skip
def test_usage_errors(args):
    out, err = minfer_process("session", *args, status=2)
    assert out == "" and "usage: minfer session" in err


# ---- inspect and verify --------------------------------------------------------------------------


def test_inspect_json(live, good, session):
    path = good[0]
    report = json.loads(session("inspect", path, "--json"))
    with minfer.SessionFile(path) as file:
        info = {name: report[name] for name in file.info._fields}
        assert info == file.info._asdict() and report["file"] == str(path)
        assert report["kinds"] == live.kv.kinds()
        for group, expected, stats in zip(report["groups"], file.groups, live.kv.stats()):
            size = group.pop("bytes")
            assert group == expected._asdict()
            assert size == stats.n_used * stats.bytes_per_token
        assert [s["seq"] for s in report["sequences"]] == list(range(N_SEQ))
        for i, seq in enumerate(report["sequences"]):
            groups = seq.pop("groups")
            assert seq == file.seqs[i]._asdict()
            for g, group in enumerate(groups):
                rows = [numbered(live, range(N_SEQ), g)[k] for k in range(N_SEQ)]
                readers = Counter(number for each in rows for _, number in each)
                assert group["live"] == len(rows[i])
                assert group["shared"] == sum(readers[number] > 1 for _, number in rows[i])
                assert group["spans"] == [span._asdict() for span in file.spans(i, g)]
                assert (group["live"] < seq["len"]) == ((i, g) == (4, 0))
        assert [group["shared"] for group in groups] == [0, 0]  # of the last one
        for section, expected in zip(report["sections"], file.sections, strict=True):
            assert section == {**expected._asdict(), "checksum": f"{expected.checksum:016x}"}
    assert report["host_state"] == {"is": "opaque", "bytes": 10}


def test_inspect(good, session):
    path = good[0]
    words = session("inspect", path).split()
    with minfer.SessionFile(path) as file:
        assert file.info.fingerprint in words
        for group in file.groups:
            assert group.kind in words
        lines = [["0", "31", "31", "31", "0", "31", "1", "30"], ["1", "31", "1", "30"],
                 ["1", "32", "32", "32", "0", "32", "2", "30"],
                 ["2", "28", "28", "28", "0", "28", "2", "25"]]  # fmt: skip
        for line in lines:
            assert any(words[i : i + len(line)] == line for i in range(len(words))), line
        for name, n in Counter(section.name for section in file.sections).items():
            first = next(s for s in file.sections if s.name == name)
            at = words.index(name, words.index("offset"))
            assert words[at + 1 : at + 3] == [str(n), f"{first.offset:,}"]
    assert "10 opaque bytes" in session("inspect", path)


def test_inspect_many_sequences(tmp_path, session):
    """In memory in proportion to them, however many share a row."""
    peaks = []
    for n in (500, 2000):
        path = write_chain(tmp_path / "chain.kv", n)
        tracemalloc.start()
        report = json.loads(session("inspect", path, "--json"))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        shared = [seq["groups"][0]["shared"] for seq in report["sequences"]]
        assert shared == [*range(1, n), n - 1]
    assert peaks[1] < 8 * peaks[0]


def test_inspect_a_conversation(tiny_path, tmp_path, session):
    talk = tmp_path / "talk.json"
    args = ("-n", 5, "--seed", 3, "--top-k", 17, "--session", talk)
    minfer_process("chat", tiny_path, *args, stdin="hello\nand again\n")
    state = json.loads(session("inspect", f"{talk}.kv", "--json"))["host_state"]
    with minfer.SessionFile(f"{talk}.kv") as file:
        host = json.loads(file.host_state)
        assert state["bytes"] == len(file.host_state)
    assert (state["is"], state["version"], state["messages"]) == ("conversation", 1, 4)
    assert state["tokens"] == len(host["rows"]) and state["sampling"] == host["sampling"]
    words = " ".join(session("inspect", f"{talk}.kv").split())
    assert f"a conversation, version 1: 4 messages, {state['tokens']} tokens" in words
    assert "seed 3" in words and "top_k 17" in words

    for command in ("inspect", "verify", "plot"):
        assert f"in {talk}.kv" in session(command, talk, status=1, error=True)
    assert f"in {talk}.kv" in session("diff", f"{talk}.kv", talk, status=2, error=True)
    os.unlink(talk)
    assert f"in {talk}.kv" in session("verify", talk, status=1, error=True)
    assert ".kv" not in session("verify", tiny_path, status=1, error=True)
    assert os.listdir(tmp_path) == ["talk.json.kv"]


HOSTS = [
    (b"", "none"),
    (b"\xff\x00" * 600, "1,200 opaque bytes"),
    (b"3", "1 opaque bytes"),
    (b"[" * 100_000, "100,000 opaque bytes"),
    (b"1" * 5000, "5,000 opaque bytes"),
    (b"{}", "JSON (2 bytes) with the keys (none)"),
    (b'{"b": NaN, "a": 1e999}', "with the keys b, a"),
    (json.dumps({f"k{i}": i for i in range(20)}).encode(), "k11, and 8 more"),
    (json.dumps({"x" * 200: 1}).encode(), f"keys {'x' * 57}..."),
    (json.dumps({"\x1b[2J\x9b\x07a\nb": 1}).encode(), "keys [2Ja b"),
    (b'{"[red]a[/red][/x]:smile:": 1}', "keys [red]a[/red][/x]:smile:"),
    (b'{"version": 1, "messages": [], "rows": []}', "keys version, messages, rows"),
    (b'{"\\ud800": 1}', "keys ?"),
]


@pytest.mark.parametrize("host, words", HOSTS, ids=[words[:20] for _, words in HOSTS])
def test_inspect_any_host_state(live, tmp_path, session, host, words):
    """Whatever the text, in the file or its name: it is shown, and not obeyed."""
    path = tmp_path / "[bold]\x1b[31m:smile:.kv"
    live.kv_save(path, host)
    out = session("inspect", path)
    shown = " ".join(out.split())
    assert words in shown or words in shown.replace(" ", "")
    verdict = session("verify", path)
    assert verdict.startswith(f"{tmp_path}/[bold][31m:smile:.kv: good: ")
    assert not any(c < " " and c != "\n" or "\x7f" <= c <= "\x9f" for c in out)
    report = strict_json(session("inspect", path, "--json"))
    assert report["host_state"]["bytes"] == len(host)


def strict_json(text):
    """JSON as everyone reads it: without NaN and infinities."""

    def refused(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refused)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "1e9"])
def test_inspect_a_conversation_with_a_number_that_is_none(live, tmp_path, session, number):
    state = dict(version=1, history="", template="", messages=[], encoded=[], first=0, rows=[],
                 position=0, cut=0, kept=0, sampling={"temperature": 0})  # fmt: skip
    host = json.dumps(state).replace('"temperature": 0', f'"temperature": {number}')
    live.kv_save(tmp_path / "x.kv", host.encode())
    session("inspect", tmp_path / "x.kv")
    report = strict_json(session("inspect", tmp_path / "x.kv", "--json"))["host_state"]
    assert report["is"] == ("conversation" if number == "1e9" else "json")


def test_verify(good, live, session, tmp_path):
    path, data = good
    n_rows = live.kv.stats()[1].n_used
    size = f"{len(data) / 1000:.1f} kB"
    line = f"{path}: good: 6 sequences, {n_rows} rows, {size}, every byte verified\n"
    assert session("verify", path) == line
    report = dict(file=str(path), good=True, sequences=6, rows=n_rows, bytes=len(data))
    assert json.loads(session("verify", path, "--json")) == report
    live.kv_save(path, b"", [0])
    assert ": good: 1 sequence, 31 rows, " in session("verify", path)


def test_every_command_refuses_what_is_damaged(good, session, tmp_path):
    path, data = good
    parts, bad = unpack(data), tmp_path / "bad.kv"
    wrong = [(data[:n], ("size", "cut", "empty")) for n in (0, 30, 1000, len(data) - 1)]
    for key in parts.sections:
        at = data.index(parts.sections[key], 2000 if key[0] == HOST else 0)
        flipped = data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
        wrong.append((flipped, ("checksum",)))
    for key, at, name in books(parts):
        section = parts.sections[key]
        changed = section[:at] + b"\xff\xff\xff\x7f" + section[at + 4 :]
        if name != "id":  # any will do
            words = ("SEQS", "ROWS", "section", "n_seqs")
            wrong.append((pack(parts.with_section(key, changed)), words))
    kinds = parts.sections[KINDS, 0].replace(b"sliding", b"gliding", 1)
    wrong.append((pack(parts.with_section((KINDS, 0), kinds)), ("layer 0",)))
    for i, (changed, words) in enumerate(wrong):
        assert changed != data
        bad.write_bytes(changed)
        commands = [("verify", bad)]
        if i < 6:
            commands += [("inspect", bad), ("plot", bad), ("diff", path, bad), ("diff", bad, path)]
        for command in commands:
            status = 2 if command[0] == "diff" else 1
            line = session(*command, status=status, error=True)
            assert f"{bad}: " in line and any(word in line for word in words), line
        report = json.loads(session("verify", bad, "--json", status=1))
        error = line.removeprefix("minfer: ").rstrip("\n")
        assert report == {"file": str(bad), "good": False, "error": error}
    for args in (("verify",), ("verify", "--json"), ("inspect", "--json"), ("diff", path)):
        for name, cause in (("absent.kv", "No such file"), (".", "is a folder")):
            status = 2 if args[0] == "diff" else 1
            line = session(*args, tmp_path / name, status=status, error=True)
            assert str(tmp_path / name) in line and cause in line, line
    assert sorted(os.listdir(tmp_path)) == ["bad.kv", "good.kv"]


# ---- diff ----------------------------------------------------------------------------------------


def books_of(parts, key):
    """The numbers of a bookkeeping section, to be changed and put back."""
    return list(struct.unpack(f"<{len(parts.sections[key]) // 4}I", parts.sections[key]))


def with_numbers(parts, key, numbers):
    return parts.with_section(key, struct.pack(f"<{len(numbers)}I", *numbers))


def at_of(parts, key, name, k=0):
    """Which number of a section has a name, the k-th of them."""
    return [at // 4 for found, at, n in books(parts) if found == key and n == name][k]


def changed_number(parts, key, name, k, to):
    numbers = books_of(parts, key)
    numbers[at_of(parts, key, name, k)] = to
    return with_numbers(parts, key, numbers)


def changed_byte(parts, key, at):
    section = parts.sections[key]
    return parts.with_section(key, section[:at] + bytes([section[at] ^ 1]) + section[at + 1 :])


@pytest.fixture
def difference(good, session, tmp_path):
    """Of the good file and another: (field, value there, value here); None if they are equal."""

    def find(data):
        other = tmp_path / "other.kv"
        other.write_bytes(data)
        status = 0 if data == good[0].read_bytes() else 1
        report = json.loads(session("diff", good[0], other, "--json", status=status))
        line = session("diff", good[0], other, status=status)
        back = json.loads(session("diff", other, good[0], "--json", status=status))
        if report.pop("equal"):
            assert line == "equal\n" and report == {} and back == {"equal": True}
            return None
        assert list(report) == ["field", "a", "b"]
        assert line.startswith(f"{report['field']}: ") and line.count("\n") == 1
        assert f" in {good[0]}, " in line and line.endswith(f" in {other}\n")
        assert (back["a"], back["b"]) == (report["b"], report["a"])
        return tuple(report.values())

    return find


def test_equal(live, good, difference, session, tmp_path):
    assert difference(good[1]) is None
    assert session("diff", good[0], good[0]) == "equal\n"
    live.kv.defrag()
    live.kv_save(tmp_path / "x.kv", b"host state")
    assert difference((tmp_path / "x.kv").read_bytes()) is None


def test_differences_in_the_header(good, difference):
    parts = unpack(good[1])
    meta = parts.meta()
    for name in ("n_ctx", "n_embd"):
        found = difference(pack(parts.with_meta(**{name: 2 * meta[name]})))
        assert found == (name, meta[name], 2 * meta[name])
    for half in (0, 1):
        name = f"model[{half}]"
        field, a, b = difference(pack(parts.with_meta(**{name: 1})))
        assert field == "fingerprint"
        assert b[16 * half :][:16] == f"{1:016x}" and a[:16] == f"{meta['model[0]']:016x}"


def test_another_format_and_another_model(live, good, difference, tiny_path, tmp_path):
    def saved(path, **options):
        with minfer.load(path, **{**OPTIONS, **options}) as engine:
            add(engine, 0, 5)
            engine.kv_save(tmp_path / "x.kv", b"")
        return (tmp_path / "x.kv").read_bytes()

    assert difference(saved(tiny_path, cache_type="q8_0")) == ("kv_format", "f32", "q8_0")
    deeper = tinymodels.write(tmp_path / "deeper.gguf", "gemma3", n_layer=8)
    assert difference(saved(deeper)) == ("n_layer", 7, 8)
    other = tinymodels.write(tmp_path / "other.gguf", "gemma3", seed=5, window=9)
    assert difference(saved(other))[0] == "fingerprint"


def test_differences_in_the_kinds(good, difference):
    parts = unpack(good[1])
    kinds = parts.sections[KINDS, 0].replace(b"sliding-8/", b"sliding-7/")
    changed = changed_number(parts.with_section((KINDS, 0), kinds), (ROWS, 0), "window", 0, 7)
    found = difference(pack(changed))
    assert found == ("layer 0, kind", "sliding-8/f32/kv2x32", "sliding-7/f32/kv2x32")


def test_differences_in_the_sequences(live, good, difference, tmp_path):
    parts = unpack(good[1])

    def saved(seqs=None):
        live.kv_save(tmp_path / "x.kv", b"host state", seqs)
        return (tmp_path / "x.kv").read_bytes()

    assert difference(saved([0, 1, 2])) == ("sequences", 6, 3)
    assert difference(saved([0, 1, 2, 4, 3, 5])) == ("number of the sequence in place 3", 3, 4)
    changed = changed_number(parts, (SEQS, 0), "id", 1, 77)
    assert difference(pack(changed)) == ("number of the sequence in place 1", 1, 77)
    clean = changed_number(parts, (SEQS, 0), "clean", 5, 3)
    assert difference(pack(clean)) == ("sequence 5, clean", 4, 3)

    # The gaps of sequence 5: rows 0..3 at 0, 4..5 at 14, 6..8 at 26.
    numbers = books_of(parts, (SEQS, 0))
    assert numbers[-6:] == [0, 0, 4, 14, 6, 26]
    for runs_, found in (
        ([0, 0, 4, 14, 6, 27], ("sequence 5, next_pos", 29, 30)),
        ([0, 0, 4, 15, 6, 26], ("sequence 5, position of row 4", 14, 15)),
        ([0, 0, 4, 14, 7, 27], ("sequence 5, position of row 6", 26, 16)),
        ([0, 0, 4, 14, 5, 25], ("sequence 5, position of row 5", 15, 25)),
    ):
        assert difference(pack(with_numbers(parts, (SEQS, 0), numbers[:-6] + runs_))) == found

    live.kv.trim(3, 2)
    assert difference(saved()) == ("sequence 3, len", 34, 32)


def test_a_difference_in_what_is_shared(live, good, difference, tmp_path):
    """The same tokens and rows, once computed and once read from another sequence."""
    live.kv.trim(2, 5)
    live.kv_save(tmp_path / "x.kv", b"host state", [0, 2])
    before = (tmp_path / "x.kv").read_bytes()
    live.kv.free(2)
    live.kv.share(2, 0, 20)
    live.forward_cached(np.random.RandomState(30).randint(3, 300, 30)[20:23], 2)
    live.kv_save(good[0], b"host state", [0, 2])
    with minfer.SessionFile(good[0]) as a:
        changed = changed_byte(unpack(before), (KEYS, 0), 0)
        field, x, y = difference(pack(changed))
        assert field == "group 0, sequence 2, span 0"
        assert x == "20 from position 0 in rows from 0" and y == "23 from position 0 in rows from 0"
        assert a.seqs[1].len == 23


def test_a_difference_in_what_windows_have_dropped(live, good, difference, tmp_path):
    for seq in range(N_SEQ):
        live.kv.free(seq)
    add(live, 0, 10)
    live.kv.shift(0, 5, 7)
    add(live, 0, 30)
    live.kv_save(good[0], b"", [0])
    for seq in range(1, N_SEQ):
        add(live, seq, 16)  # in cells that only 0 can give up
    live.kv_save(tmp_path / "x.kv", b"", [0])
    field, before, after = difference((tmp_path / "x.kv").read_bytes())
    assert field == "group 0, sequence 0, span 0"
    assert before == "5 from position 0 in rows from 0"
    n, pos = live.kv.spans(0, 0)[0].len, live.kv.spans(0, 0)[0].pos
    assert after == f"{n} from position {pos} in rows from 0" and pos > 12 and n + pos == 47


def test_differences_in_the_rows(live, good, difference):
    """Each is named by its layer, its number, and the first sequence that reads it."""
    path, rng = good[0], np.random.RandomState(1)
    live.kv_save(path, b'{"a": 1}')
    parts = unpack(path.read_bytes())
    with minfer.SessionFile(path) as file:
        n, groups = file.info.row_bytes, [file.layer_group(i) for i in range(file.info.n_layer)]
        n_rows = [file.groups[g].n_rows for g in groups]
    readers = [{}, {}]  # number: its first reader and its position there
    for g in (0, 1):
        for seq, rows in enumerate(numbered(live, range(N_SEQ), g)):
            for pos, number in rows:
                readers[g].setdefault(number, (seq, pos))
    cases = [(0, KEYS, 0, 0), (6, VALUES, n_rows[6] - 1, n - 1)]
    for layer in rng.randint(7, size=10):
        kind = [KEYS, VALUES][rng.randint(2)]
        cases.append((layer, kind, rng.randint(n_rows[layer]), rng.randint(n)))
    for layer, kind, row, byte in cases:
        key, at = (kind, layer), row * n + byte
        seq, pos = readers[groups[layer]][row]
        value = parts.sections[key][at]
        where = f"layer {layer}, {'KV'[kind == VALUES]}, row {row} (sequence {seq}, position {pos})"
        expected = f"{where}: byte {byte} of {n}", f"{value:#04x}", f"{value ^ 1:#04x}"
        changed = changed_byte(changed_byte(parts, (HOST, 0), 6), key, at)
        assert difference(pack(changed)) == expected
        if at + 1 < len(parts.sections[key]):
            changed = changed_byte(changed, key, len(parts.sections[key]) - 1)
        assert difference(pack(changed)) == expected


def test_sections_longer_than_what_is_compared_at_a_time(live, good, difference, monkeypatch):
    parts = unpack(good[1])
    for chunk in (100, 257):
        monkeypatch.setattr(session_diff, "CHUNK_BYTES", chunk)
        for at in (0, 99, 100, 256, 257, len(parts.sections[KEYS, 6]) - 1):
            field, *_ = difference(pack(changed_byte(parts, (KEYS, 6), at)))
            assert f"row {at // 256} " in field and field.endswith(f"byte {at % 256} of 256")
    assert difference(good[1]) is None


def test_what_only_the_bytes_tell(tmp_path, session):
    """Positions of rows that every window has dropped."""
    model = tinymodels.write(tmp_path / "tiny.gguf", "mistral")
    with minfer.load(model, n_ctx=64, n_batch=4, threads=1) as engine:
        add(engine, 0, 9)
        engine.kv.shift(0, 4, 5)
        for seed in range(30):
            add(engine, 0, 4, seed)
        engine.kv_save(tmp_path / "a.kv", b"")
    parts = unpack((tmp_path / "a.kv").read_bytes())
    numbers = books_of(parts, (SEQS, 0))
    assert numbers[-4:] == [0, 0, 4, 9]
    clean = at_of(parts, (SEQS, 0), "clean")
    numbers[clean] = 3
    parts = with_numbers(parts, (SEQS, 0), numbers)
    (tmp_path / "a.kv").write_bytes(pack(parts))
    numbers[-2:] = [3, 8]
    (tmp_path / "b.kv").write_bytes(pack(with_numbers(parts, (SEQS, 0), numbers)))
    at = 4 * (len(numbers) - 2)
    line = session("diff", tmp_path / "a.kv", tmp_path / "b.kv", status=1)
    assert line.startswith(f"section SEQS 0, byte {at}: 0x04 in ") and ", 0x03 in " in line


HOST_PAIRS = [
    (b"host state", b"host stale", ("host state, byte 8", "0x74", "0x6c")),
    (b"host state", b"host", ("host state, bytes", 10, 4)),
    (b"", b"{}", ("host state, bytes", 0, 2)),
    ({"a": 1, "b": 2}, {"a": 1, "b": 3}, ("host state, b", "2", "3")),
    ({"a": 1}, {"a": 1, "c": None}, ("host state, c", None, "null")),
    ({"a": {"b": [1, {"c": "x"}]}}, {"a": {"b": [1, {"c": 2}]}},
     ("host state, a, b[1], c", '"x"', "2")),
    ({"a": [1, 2]}, {"a": [1]}, ("host state, a[1]", "2", None)),
    ({"a": "one " * 50 + "x"}, {"a": "one " * 50 + "yz"},
     ("host state, a, from character 200", '"x"', '"yz"')),
    ({"a": "x", "b": 1}, {"a": "x" * 99, "b": 2},
     ("host state, a, from character 1", '""', '"' + "x" * 56 + "...")),
    (b'{"a":1}', b'{"a": 1}', ("host state, byte 5", "0x31", "0x20")),
    (b'{"a":NaN,"b":1}', b'{"a":NaN,"b":2}', ("host state, b", "1", "2")),
    (b'{"a":[' + b"[" * 90_000, b'{"a":[' + b"[" * 90_001, ("host state, bytes", 90_006, 90_007)),
    (b"[1]", b"[2]", ("host state, byte 1", "0x31", "0x32")),
    ({"\x1b\n[x]": "\x1b"}, {"\x1b\n[x]": "\x07"},
     ("host state, [x], from character 0", '"\\u001b"', '"\\u0007"')),
]  # fmt: skip


@pytest.mark.parametrize("a, b, expected", HOST_PAIRS, ids=range(len(HOST_PAIRS)))
def test_differences_in_the_host_state(live, good, difference, tmp_path, a, b, expected):
    both = [host if isinstance(host, bytes) else json.dumps(host).encode() for host in (a, b)]
    live.kv_save(good[0], both[0])
    data = good[0].read_bytes()
    assert difference(pack(unpack(data).with_section((HOST, 0), both[1]))) == expected
