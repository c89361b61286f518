"""Generating: answers as functions of their arguments, how they end, and the demo model."""

import os
import pathlib
import subprocess
import sys

import pytest
import tinymodels

import minfer

TOKENS = [5, 9, 12, 60, 33, 7]


@pytest.fixture(scope="module")
def shared(tiny_path):
    with minfer.load(tiny_path, n_ctx=256, n_seq=2, threads=2) as engine:
        yield engine


def test_generate_is_a_function_of_its_arguments(engine):
    def text(**options):
        engine.kv.free(0)
        pieces = engine.generate(TOKENS, max_tokens=20, **options)
        return "".join(pieces), pieces.ids

    assert text(seed=3) == text(seed=3)
    assert text(seed=3)[1] != text(seed=4)[1]
    assert text(temperature=0) == text(temperature=0, seed=9) == text(top_k=1)


def test_a_prompt_without_tokens_is_refused_at_once(engine):
    engine.forward_cached(TOKENS)
    for prompt in ([], ""):
        with pytest.raises(minfer.ArgumentError, match="prompt has no token"):
            engine.generate(prompt)


def test_edits_between_two_pieces(engine):
    """The next token follows what the sequence then holds."""
    pieces = engine.generate(TOKENS, max_tokens=30, temperature=0)
    while len(pieces.ids) < 12:
        next(pieces)
    kept, picked = TOKENS[:2] + TOKENS[5:] + pieces.ids[:-3], pieces.ids[-1:]
    engine.kv.trim(0, 2)
    engine.kv.rm(0, 2, 5)
    rest = len(pieces.ids)
    list(pieces)
    engine.forward_cached(TOKENS + pieces.ids[: rest - 3], seq=1, logits="none")
    engine.kv.rm(1, 2, 5)
    assert engine.kv.len(1) == len(kept)
    for token in pieces.ids[rest:]:
        assert engine.forward_cached(picked, seq=1).argmax() == token
        picked = [token]


def test_generate_equals_steps_by_hand(engine):
    liked = engine.generate(TOKENS, max_tokens=20, seed=5)
    list(liked)
    engine.kv.free(0)
    prompt = liked.ids + TOKENS  # what the penalty takes away would be picked again
    sampling = minfer.Sampling(seed=5, repeat_penalty=20.0)
    pieces = engine.generate(prompt, max_tokens=12, seed=5, repeat_penalty=20.0)
    list(pieces)
    history = list(prompt)
    logits = engine.forward_cached(prompt, seq=1)
    for token in pieces.ids:
        assert sampling.pick(logits[0], engine.kv.next_pos(1), history[-64:]) == token
        history.append(token)
        logits = engine.forward_cached([token], seq=1)


def test_early_end_leaves_rows_of_all_but_the_last_token(engine):
    pieces = engine.generate(TOKENS, max_tokens=30, temperature=0)
    for _ in range(3):
        next(pieces)
    pieces.close()
    assert list(pieces) == []
    assert engine.kv.len(0) == len(TOKENS) + len(pieces.ids) - 1

    with pytest.raises(ZeroDivisionError):
        for _ in engine.generate(TOKENS, max_tokens=30, seq=1):
            1 / 0  # noqa: B018
    engine.kv.check()
    history = TOKENS + pieces.ids[:-1]
    logits = engine.forward_cached(pieces.ids[-1:])
    engine.kv.free(1)
    assert logits.tobytes() == engine.forward_cached([*history, pieces.ids[-1]], seq=1).tobytes()


def test_no_second_bos(engine):
    for text in ("ab", "cd"):
        list(engine.generate(text, max_tokens=1))
    ids = engine.tokenizer.encode("ab") + engine.tokenizer.encode("cd", add_bos=False)
    assert engine.kv.len(0) == len(ids)
    logits = engine.forward_cached([7])
    assert logits.tobytes() == engine.forward_cached([*ids, 7], seq=1).tobytes()


def test_a_full_cache_ends_an_answer(tiny_path):
    with minfer.load(tiny_path, n_ctx=32, n_seq=2) as engine:
        pieces = engine.generate(TOKENS, max_tokens=100, seed=3)
        text = "".join(pieces)
        assert pieces.finish == "full" and pieces.pending == pieces.ids[-1:]
        assert engine.kv.len(0) == 32 == len(TOKENS) + len(pieces.ids) - 1
        assert text == engine.tokenizer.decode(pieces.ids)
        with pytest.raises(minfer.KvFullError):
            next(engine.generate(TOKENS, seq=1))
        engine.kv.check()


def test_pending_is_what_has_no_row(engine):
    ends = set()
    for seed in range(40):
        engine.kv.free(0)
        pieces = engine.generate(TOKENS, max_tokens=100, seed=seed, temperature=3.0, top_k=0)
        assert pieces.pending == []
        for _ in pieces:
            assert pieces.pending == pieces.ids[-1:] or pieces.finish == "end"
        ends.add(pieces.finish)
        assert len(pieces.pending) == (pieces.finish != "end")
        assert engine.kv.len(0) == len(TOKENS) + len(pieces.ids) - len(pieces.pending)
    assert ends == {"end", "length"}, "both must have been seen"


def test_stop_of_none_is_no_stop(engine):
    texts = []
    for stop in (None, (), []):
        engine.kv.free(0)
        texts.append("".join(engine.generate(TOKENS, max_tokens=8, seed=2, stop=stop)))
    assert texts[0] == texts[1] == texts[2]


def test_length_and_zero(engine):
    pieces = engine.generate(TOKENS, max_tokens=5, seed=1)
    list(pieces)
    assert pieces.finish in ("length", "end") and len(pieces.ids) <= 5
    nothing = engine.generate(TOKENS, max_tokens=0, seq=1)
    assert list(nothing) == [] and engine.kv.len(1) == 0


def test_stop_strings_span_pieces(demo_path):
    with minfer.load(demo_path, n_ctx=256) as engine:
        whole = "".join(engine.generate("The capital of France is", max_tokens=24, temperature=0))
        assert len(whole) > 40
        for first, last in ((10, 22), (5, 6), (0, 1), (17, 33)):
            stop = whole[first:last]
            engine.kv.free(0)
            pieces = engine.generate(
                "The capital of France is",
                max_tokens=24,
                temperature=0,
                stop=["no such text", stop],
            )
            assert "".join(pieces) == whole[: whole.index(stop)]
            assert pieces.finish == "stop"
        engine.kv.free(0)
        unfinished = whole[-3:] + "and more"
        pieces = engine.generate(
            "The capital of France is", max_tokens=24, temperature=0, stop=unfinished
        )
        assert "".join(pieces) == whole


def test_demo_joins_once_and_survives_rivals(tmp_path):
    code = "import minfer.demo; print(minfer.demo.model_path('demo'))"
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    rivals = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    paths = {rival.communicate()[0].strip() for rival in rivals}
    assert len(paths) == 1 and all(rival.returncode == 0 for rival in rivals)
    path = pathlib.Path(paths.pop())
    assert [path] == list((tmp_path / "minfer").iterdir())
    before = path.stat().st_mtime_ns
    again = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert again.returncode == 0 and again.stdout.decode().strip() == str(path)
    assert path.stat().st_mtime_ns == before


def test_tiny_models_of_all_rows_generate(tmp_path):
    for arch in tinymodels.ARCHS:
        path = tinymodels.write(tmp_path / f"{arch}.gguf", arch)
        with minfer.load(path) as engine:
            list(engine.generate(TOKENS, max_tokens=3))
            assert engine.arch
