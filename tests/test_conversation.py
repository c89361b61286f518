"""What a conversation computes, keeps and saves: on tiny models, without a terminal."""

import itertools
import json
import os
import subprocess
import sys

import chatmodel
import pytest

import minfer
from minfer.tools import conversation as conv

GREEDY = dict(temperature=0.0)
WARM = dict(temperature=0.8, seed=5)
TURNS = ["hello there", "and then?", "good night"]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def path(request, tmp_path_factory):
    """A tiny model with a chat template, without and with windows."""
    return chatmodel.write(tmp_path_factory.mktemp("chat"), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return chatmodel.write(tmp_path_factory.mktemp("chat"), "llama")


@pytest.fixture(params=[True, False], ids=["template", "plain"])
def use_template(request):
    return request.param


class Talk(conv.Conversation):
    """Keeps the notices, and counts what is computed."""

    def __init__(self, engine, sampling=GREEDY, max_tokens=8, **options):
        self.notices = []
        super().__init__(engine, sampling, max_tokens, notice=self.notices.append, **options)

    def turn(self, text):
        """(the answer, tokens prefilled)."""
        before = self.engine.stats().prefill_tokens
        said = "".join(self.answer(text))
        return said, self.engine.stats().prefill_tokens - before

    def turns(self, texts):
        return [self.turn(text)[0] for text in texts]

    def check(self):
        self.engine.kv.check()
        kv = self.engine.kv
        assert len(self.rows) == kv.len(0) == kv.next_pos(0)


def next_logits(engine, rows=()):
    """Of the token 7 after the rows of sequence 0, or after `rows` in an empty one."""
    if rows:
        engine.kv.free(0)
    return engine.forward_cached([*rows, 7]).tobytes()


def is_clean(talk):
    """Whether the rows were those of their tokens alone, to the last bit; now they are."""
    seen, rows = next_logits(talk.engine), talk.rows[:]
    fresh = next_logits(talk.engine, rows)
    talk.engine.kv.trim(0, 1)
    return seen == fresh


# ---- turns ---------------------------------------------------------------------------------------


def test_only_the_new_turn_is_computed(path, use_template):
    with minfer.load(path) as engine:
        talk = Talk(engine, use_template=use_template)
        for text in TURNS:
            before, pending = talk.rows[:], talk.pending
            _, computed = talk.turn(text)
            talk.check()
            if use_template:
                wanted = engine.chat_template.encode(engine.tokenizer, talk.messages[:-1])
                kept = conv._common_prefix(before, wanted)
            else:
                kept = len(before)
                wanted = before + pending + engine.tokenizer.encode(text, add_bos=not before)
            assert talk.rows[: len(wanted)] == wanted
            assert computed == len(wanted) - kept
        assert talk.n_exchanges == 3 and not talk.notices and is_clean(talk)


def test_an_interrupted_answer_is_carried_on(path, use_template):
    with minfer.load(path) as engine:
        talk = Talk(engine, use_template=use_template, max_tokens=40)
        pieces = talk.answer("hello")
        said = next(pieces) + next(pieces)
        pieces.close()
        assert talk.finish == "interrupted"
        assert talk.messages[1:] == [{"role": "assistant", "content": said}]
        talk.check()
        talk.turn("go on")
        talk.check()
        assert talk.n_exchanges == 2 and is_clean(talk)


@pytest.mark.parametrize("n_read", [4, None])
def test_a_turn_that_was_interrupted_before_its_answer_was_not_said(path, monkeypatch, n_read):
    with minfer.load(path, n_batch=4) as engine:
        talk = Talk(engine)
        talk.turn("hello")
        messages, forward = talk.messages[:], engine.forward_cached

        def interrupted(tokens, *args, **options):
            forward(tokens[:n_read], *args, **options)  # whole batches stay
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(engine, "forward_cached", interrupted)
            with pytest.raises(KeyboardInterrupt):
                talk.turn("a longer question")
        assert talk.messages == messages and talk.finish == "interrupted"
        talk.check()
        talk.turn("a longer question" if n_read is None else "another question")
        talk.check()
        assert talk.n_exchanges == 2 and is_clean(talk)


def test_a_turn_that_does_not_fit_changes_nothing(path):
    with minfer.load(path, n_ctx=64) as engine:
        talk = Talk(engine)
        talk.turn("hello")
        messages, rows = talk.messages[:], talk.rows[:]
        with pytest.raises(minfer.KvFullError, match="the prompt has .* the context 64; raise"):
            talk.turn("x " * 80)
        assert (talk.messages, talk.rows, talk.first) == (messages, rows, 0)
        talk.check()
        assert not talk.notices


def test_undo(path, use_template):
    with minfer.load(path) as engine:
        talk = Talk(engine, use_template=use_template)
        assert talk.undo() is False
        talk.turn(TURNS[0])
        once = talk.messages[:]
        first = talk.turn(TURNS[1])
        assert talk.undo() and talk.messages == once
        talk.check()
        assert is_clean(talk)
        second = talk.turn(TURNS[1])
        assert second[0] == first[0]
        assert talk.undo() and talk.undo() and not talk.undo()
        assert talk.messages == [] and len(talk.rows) <= 1


def test_undo_beyond_a_window_reads_again(tmp_path):
    path = chatmodel.write(tmp_path, "gemma3")
    with minfer.load(path, n_batch=8) as engine:
        talk = Talk(engine, max_tokens=4)
        talk.turn("hello")
        talk.turn("a text that is longer than the window, " * 3)
        talk.undo()
        assert len(talk.notices) == 1 and "read again" in talk.notices[0]
        assert talk.n_exchanges == 1 and is_clean(talk)
        talk.check()


def test_reset(path, use_template):
    with minfer.load(path) as engine:
        talk = Talk(engine, use_template=use_template)
        first = talk.turn(TURNS[0])
        talk.turn(TURNS[1])
        talk.reset()
        assert talk.messages == [] and talk.rows == [] == engine.kv.spans(0)
        assert talk.turn(TURNS[0]) == first


# ---- a full context ------------------------------------------------------------------------------


def long_talk(engine, **options):
    talk = Talk(engine, **options)
    for turn in range(30):
        talk.turn(f"{turn} question")
        talk.check()
        if talk.notices:
            return talk
    raise AssertionError("96 rows were enough")


def test_the_oldest_turns_are_cut_out(llama, use_template, monkeypatch):
    cuts, rm = [], minfer.Kv.rm

    def spy(kv, seq, p0, p1):
        cuts.append((kv.len(seq), p0, p1))
        rm(kv, seq, p0, p1)

    with minfer.load(llama, n_ctx=192) as engine, minfer.load(llama, n_ctx=192) as other:
        talk = Talk(engine, max_tokens=4, use_template=use_template)
        with monkeypatch.context() as patch:
            patch.setattr(minfer.Kv, "rm", spy)
            while talk.n_dropped == 0:
                before = talk.rows[:]
                _, computed = talk.turn("question?")
        ((n_before, p0, p1),) = cuts
        n_cut, n_moved = p1 - p0, n_before - p1
        assert n_moved > 0
        s = "s" if talk.n_dropped > 1 else ""
        assert talk.notices == [
            f"the context of 192 tokens is full: the oldest {talk.n_dropped} exchange{s} cut out"
            f" ({n_cut} rows), {n_moved} rows moved down"
        ]
        assert talk.n_exchanges > talk.n_dropped, "the history is whole"
        assert computed == len(talk.rows) - len(talk.ids) + len(talk.pending) - p0 - n_moved
        talk.check()

        other.forward_cached(before[:n_before], logits="none")  # the same by hand
        other.kv.rm(0, p0, p1)
        other.forward_cached(talk.rows[p0 + n_moved :], logits="none")
        assert next_logits(engine) == next_logits(other)
        engine.kv.trim(0, 1)
        assert not is_clean(talk), "rows after a cut have seen what is gone"


def test_rows_after_a_cut_are_used_for_what_they_were_kept(llama):
    with minfer.load(llama, n_ctx=96) as engine:
        talk = long_talk(engine, use_template=False)
        _, computed = talk.turn("ok")
        assert computed <= 1 + len(engine.tokenizer.encode("ok", add_bos=False))
        texts = [m["content"] for m in talk.messages[talk.first :] if m["role"] == "user"]
        talk.reset()
        talk.turn(texts[0])
        assert is_clean(talk)


def test_rows_after_a_cut_do_not_serve_another_text(llama):
    with minfer.load(llama, n_ctx=96) as engine:
        talk = long_talk(engine, use_template=False)
        talk.undo()
        talk._encoded[-1] = [9]  # another answer than the one that the rows hold
        talk.turn("what?")
        talk.check()
        assert is_clean(talk)


def test_rows_after_a_cut_are_not_read_again(llama, monkeypatch):
    """Nor taken for those of a shorter text that begins like them."""
    with minfer.load(llama, n_ctx=96) as engine:
        talk = Talk(engine, use_template=False)
        while talk.n_dropped == 0:
            talk.turn("question?")
        talk._cut = 1  # the equal questions would hide it

        def refused(*_):
            raise minfer.KvGoneError("gone")

        monkeypatch.setattr(minfer.Kv, "rm", refused)
        while len(talk.notices) == 1:
            talk.turn("question?")
        n_prompt = len(talk.rows) - len(talk.ids) + len(talk.pending)
        assert f" {n_prompt - 1} tokens are read again (gone)" in talk.notices[1]
        assert is_clean(talk)


def test_undo_beyond_a_cut(llama, use_template):
    with minfer.load(llama, n_ctx=96) as engine:
        talk = long_talk(engine, use_template=use_template)
        while talk.undo():
            talk.check()
        said = talk.turn("hello")[0]
        talk.check()
        rows = talk.rows
        talk.reset()
        assert talk.turn("hello")[0] == said and talk.rows == rows


def test_a_template_that_counts_the_messages(tmp_path):
    template = chatmodel.TEMPLATE.replace("[{{ m.role", "[{{ messages|length }}{{ m.role")
    with minfer.load(chatmodel.write(tmp_path, "llama", template), n_ctx=128) as engine:
        talk = long_talk(engine)
        assert "the chat template writes the others differently" in talk.notices[0]
        assert is_clean(talk)


@pytest.mark.parametrize("error", [minfer.UnsupportedError, minfer.KvGoneError])
def test_where_nothing_can_be_cut_out_the_rest_is_read_again(
    llama, use_template, monkeypatch, error
):
    def refused(*_):
        raise error("this format cannot shift")

    monkeypatch.setattr(minfer.Kv, "rm", refused)
    with minfer.load(llama, n_ctx=96) as engine:
        talk = long_talk(engine, use_template=use_template)
        (notice,) = talk.notices
        assert "dropped," in notice and "read again (this format cannot shift)" in notice
        assert talk.n_dropped > 0 and is_clean(talk)


def test_a_window_that_has_dropped_rows(tmp_path):
    path = chatmodel.write(tmp_path, "gemma3")
    with minfer.load(path, n_ctx=96, n_batch=8) as engine:
        talk = Talk(engine)
        for turn in range(12):
            talk.turn(f"question {turn}")
            talk.check()
        assert talk.notices and all("the context of 96" in notice for notice in talk.notices)


def test_the_system_prompt_stays(llama, tmp_path):
    file = tmp_path / "talk.json"
    system = {"role": "system", "content": "be brief"}
    file.write_bytes(conv._history_bytes([system]))
    with minfer.load(llama, n_ctx=128) as engine:
        talk = Talk(engine)
        talk.restore(str(file), conv.read_history(str(file)))
        while talk.n_dropped == 0:
            talk.turn("question?")
        kept = [system, *talk.messages[talk.first : -1]]
        wanted = engine.chat_template.encode(engine.tokenizer, kept)
        assert talk.rows[: len(wanted)] == wanted
        talk.reset()
        assert talk.messages == [system]


def test_room_is_made_in_the_middle_of_an_answer(llama, use_template):
    with minfer.load(llama, n_ctx=96) as engine:
        talk = Talk(engine, dict(temperature=1.0, seed=2), 60, use_template=use_template)
        talk.max_tokens = 25
        talk.turn("hello")
        talk.max_tokens = 78
        talk.turn("and?")
        talk.check()
        if talk.finish == "length":
            assert len(talk.ids) == 78
        assert talk.n_dropped == 1 and talk.messages[-1]["content"]
        assert talk.rows[-20:] == talk.ids[-21:-1] or talk.finish == "end"


def test_a_cut_in_an_answer_cuts_no_letter(llama, use_template, monkeypatch):
    with minfer.load(llama, n_ctx=96) as engine:
        letter = engine.tokenizer.encode("é", add_bos=False)[-2:]
        said = iter(())
        monkeypatch.setattr(minfer.Sampling, "__init__", lambda *_, **__: None)
        monkeypatch.setattr(minfer.Sampling, "pick", lambda *_: next(said))
        for first in range(2):
            talk = Talk(engine, {}, 25, use_template=use_template)
            for talk.max_tokens, text in ((25, "hello"), (70, "and?")):
                said = itertools.cycle(letter[first:] + letter[:first])
                talk.turn(text)
            text = talk.messages[-1]["content"]
            assert talk.n_dropped == 1 and len(talk.ids) == 70
            assert text == ("é" * 35 if first == 0 else "\ufffd" + "é" * 34 + "\ufffd")
            engine.kv.free(0)


def test_an_answer_alone_can_fill_the_context(llama):
    with minfer.load(llama, n_ctx=32) as engine:
        talk = Talk(engine, dict(temperature=1.0, seed=1), 500, use_template=False)
        talk.turn("hello")
        assert talk.finish == "full" and len(talk.rows) == 32
        talk.max_tokens = 4
        talk.turn("and?")
        assert talk.n_dropped == 1
        talk.check()


# ---- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_resuming_goes_on_as_if_nothing_had_happened(path, use_template, tmp_path, sampling):
    file = str(tmp_path / "talk.json")
    with minfer.load(path) as engine:
        talk = Talk(engine, sampling, use_template=use_template)
        talk.turns(TURNS[:2])
        talk.save(file)
        wanted = talk.turn(TURNS[2]), talk.messages, talk.rows
    with minfer.load(path, threads=1) as engine:
        talk = Talk(engine, sampling, use_template=use_template)
        assert talk.restore(file, conv.read_history(file))
        assert engine.stats().prefill_tokens == 0
        assert talk.notices == [f"{file}.kv: {len(talk.rows)} rows restored, nothing read again"]
        assert (talk.turn(TURNS[2]), talk.messages, talk.rows) == wanted
        talk.check()


def test_resuming_after_a_cut(llama, use_template, tmp_path):
    file = str(tmp_path / "talk.json")
    with minfer.load(llama, n_ctx=96) as engine:
        talk = long_talk(engine, use_template=use_template)
        talk.save(file)
        saved = talk.rows[:], talk.first, talk._cut, talk._kept
        assert None not in saved and 0 not in saved
        wanted = [*talk.turns(TURNS), talk.rows, talk.n_dropped]
    with minfer.load(llama, n_ctx=96) as engine:
        talk = Talk(engine, use_template=use_template)
        assert talk.restore(file, conv.read_history(file))
        assert (talk.rows, talk.first, talk._cut, talk._kept) == saved
        assert [*talk.turns(TURNS), talk.rows, talk.n_dropped] == wanted


def chat(model, *args, lines):
    command = [sys.executable, "-m", "minfer.tools.cli", "chat", str(model), "-n", "8", "--greedy"]
    done = subprocess.run(
        [*command, *map(str, args)],
        input="".join(line + "\n" for line in lines),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_resuming_in_another_process(path, tmp_path):
    file = tmp_path / "talk.json"
    whole, _ = chat(path, lines=TURNS)
    first, _ = chat(path, "--session", file, lines=TURNS[:2])
    n_rows = None
    with minfer.load(path) as engine:
        engine.kv_load(f"{file}.kv")
        n_rows = engine.kv.len(0)
    second, err = chat(path, "--session", file, lines=["/context", TURNS[2]])
    assert first + second == whole
    lines = err.splitlines()
    assert lines[0] == f"{file}.kv: {n_rows} rows restored, nothing read again"
    assert lines[1].startswith(f"{n_rows} of 512 rows in use; 2 exchanges, 0 no longer")
    with minfer.load(path) as engine:
        talk = Talk(engine)
        talk.turns(TURNS[:2])
        _, computed = talk.turn(TURNS[2])
    assert f"[prefilled {computed} tokens" in lines[2], "only the new turn was computed"
    assert len(json.loads(file.read_text())["messages"]) == 6


def change_history(file):
    value = json.loads(file.read_text())
    value["messages"][1]["content"] += " indeed"
    file.write_text(json.dumps(value))


def change_state(**changes):
    """Saves the cache again with another state beside it."""

    def change(file):
        with minfer.load(file.parent / "llama.gguf", n_ctx=192) as engine:
            state = json.loads(engine.kv_load(f"{file}.kv"))
            engine.kv_save(f"{file}.kv", json.dumps({**state, **changes}).encode())

    return change


def not_ours(file):
    with minfer.load(file.parent / "llama.gguf", n_ctx=192) as engine:
        engine.kv_load(f"{file}.kv")
        engine.kv_save(f"{file}.kv", b"\xff[[[")


def damage(file):
    data = bytearray((file.parent / "talk.json.kv").read_bytes())
    data[len(data) // 2] ^= 1
    (file.parent / "talk.json.kv").write_bytes(data)


def nothing(file):
    pass


REASONS = {
    "edited history": (change_history, {}, "the history has been changed"),
    "same text, other bytes": (
        lambda file: file.write_text(file.read_text() + " "), {}, "the history has been changed"
    ),
    "missing": (lambda file: os.unlink(f"{file}.kv"), {}, "talk.json.kv"),
    "damaged": (damage, {}, "talk.json.kv"),
    "cut": (lambda file: os.truncate(f"{file}.kv", 1000), {}, "1000"),
    "empty": (lambda file: os.truncate(f"{file}.kv", 0), {}, "talk.json.kv"),
    "other n_ctx": (nothing, dict(n_ctx=193), "n_ctx is 192 in the file, 193 here"),
    "other format": (nothing, dict(cache_type="f16"), "f16"),
    "other model": (nothing, dict(seed=1), "talk.json.kv"),
    "no template": (nothing, dict(use_template=False), "another chat template"),
    "not ours": (not_ours, {}, "not the cache of a conversation"),
    "newer": (change_state(version=2), {}, "snapshot version 2; this minfer reads 1"),
    "version true": (change_state(version=True), {}, "snapshot version True"),
    "rows short": (change_state(rows=[1, 2]), {}, "rows contradicts"),
    "rows of no tokens": (change_state(rows=[-1]), {}, "rows has what is no token"),
    "rows of truths": (change_state(rows=[True]), {}, "rows has what is no token"),
    "encoded short": (change_state(encoded=[]), {}, "encoded contradicts"),
    "encoded flat": (change_state(encoded=[1, 2, 3, 4]), {}, "encoded has what is no token"),
    "position": (change_state(position=3), {}, "position contradicts"),
    "first": (change_state(first=1), {}, "first contradicts"),
    "first too large": (change_state(first=6), {}, "first contradicts"),
    "cut row": (change_state(cut=-1), {}, "cut contradicts"),
    "kept": (change_state(kept=10**30), {}, "kept contradicts"),
    "type": (change_state(first="0"), {}, "first is '0', not of type int"),
    "messages": (change_state(messages=[{"role": "user"}]), {}, "messages"),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(llama, tmp_path_factory):
    """A model and a session of two exchanges with it."""
    folder = tmp_path_factory.mktemp("saved")
    os.link(llama, folder / "llama.gguf")
    with minfer.load(folder / "llama.gguf", n_ctx=192) as engine:
        talk = Talk(engine)
        talk.turns(TURNS[:2])
        talk.save(str(folder / "talk.json"))
    return folder


@pytest.mark.parametrize("case", REASONS, ids=lambda name: name.replace(" ", "-"))
def test_whatever_does_not_match_is_read_again(saved, tmp_path, case):
    change, other, reason = REASONS[case]
    other = dict(other)
    for name in os.listdir(saved):
        (tmp_path / name).write_bytes((saved / name).read_bytes())
    file, model = tmp_path / "talk.json", tmp_path / "llama.gguf"
    change(file)
    if "seed" in other:
        model = tmp_path / "other" / "llama.gguf"
        model.parent.mkdir()
        chatmodel.write(model.parent, "llama", seed=other.pop("seed"))
    history = conv.read_history(str(file))
    n_ctx, cache_type = other.pop("n_ctx", 192), other.pop("cache_type", "f32")
    with minfer.load(model, n_ctx=n_ctx, cache_type=cache_type) as engine:
        talk = Talk(engine, **other)
        assert not talk.restore(str(file), history)
        (notice,) = talk.notices
        assert notice.startswith("not resumed, ") and reason in notice and "\n" not in notice
        assert engine.stats().prefill_tokens == len(talk.rows) > 20
        assert talk.messages == history.messages
        talk.check()
        assert is_clean(talk)
        _, computed = talk.turn(TURNS[2])
        assert computed < 40 and is_clean(talk)


def test_other_settings_of_the_sampler_are_said(llama, tmp_path):
    file = str(tmp_path / "talk.json")
    with minfer.load(llama) as engine:
        talk = Talk(engine)
        talk.turn("hello")
        talk.save(file)
        talk = Talk(engine, WARM)
        assert talk.restore(file, conv.read_history(file))
        assert len(talk.notices) == 2 and "sampler" in talk.notices[1]


def test_an_empty_conversation_is_saved_and_resumed(llama, tmp_path):
    file = str(tmp_path / "talk.json")
    assert conv.read_history(file) is None
    with minfer.load(llama) as engine:
        talk = Talk(engine)
        talk.save(file)
        assert talk.restore(file, conv.read_history(file))
        wanted = Talk(engine).turn("hello")
        engine.kv.free(0)
        assert talk.turn("hello") == wanted


def test_a_save_that_was_stopped_between_the_files_is_noticed(llama, tmp_path, monkeypatch):
    file = str(tmp_path / "talk.json")
    with minfer.load(llama) as engine:
        talk = Talk(engine)
        talk.turn("hello")
        talk.save(file)
        talk.turn("and?")
        with monkeypatch.context() as patch:
            patch.setattr(engine, "kv_save", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                talk.save(file)
        engine.kv.free(0)
        talk = Talk(engine)
        assert not talk.restore(file, conv.read_history(file))
        assert talk.n_exchanges == 2 and "the history has been changed" in talk.notices[0]
