"""Tokenizer: golden ids, equality with the plainest merging, families, round trips, decoding."""

import json
import random
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import minfer.bpe
from minfer.errors import ArgumentError, ArgumentTypeError
from minfer.pretokenizers import PRETOKENIZERS, byte_chars
from minfer.tokenizer import Tokenizer, TokenType

GOLDEN = json.loads((Path(__file__).parent / "data" / "gemma_tokenize.json").read_text())
KEY = "tokenizer.ggml."
SPACE = "\u2581"


def spm_meta(words, control=(), user=(), with_bytes=True, **keys):
    """Metadata of a SentencePiece-style vocabulary. `words`: {text: score}; ids in the order
    <unk>, <s>, </s>, bytes, words, control, user."""
    rows = [("<unk>", 0.0, TokenType.UNKNOWN)]
    rows += [(name, 0.0, TokenType.CONTROL) for name in ("<s>", "</s>")]
    if with_bytes:
        rows += [(f"<0x{value:02X}>", 0.0, TokenType.BYTE) for value in range(256)]
    rows += [(text, score, TokenType.NORMAL) for text, score in words.items()]
    rows += [(text, -1000.0, TokenType.CONTROL) for text in control]
    rows += [(text, -1000.0, TokenType.USER_DEFINED) for text in user]
    texts, scores, types = zip(*rows, strict=True)
    meta = {
        "model": "llama",
        "tokens": [text.encode() for text in texts],
        "scores": np.array(scores, np.float32),
        "token_type": np.array(types, np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **keys,
    }
    return {KEY + name: value for name, value in meta.items() if value is not None}


def byte_meta(pre="gpt-2", merges=("t h", "th e", "Ġ the", "l l", "a b"), **keys):
    """Metadata of a byte-level vocabulary: 256 bytes, a token per merge, four special ones."""
    tokens = byte_chars() + [pair.replace(" ", "") for pair in merges]
    types = [TokenType.NORMAL] * len(tokens)
    special = [("<|endoftext|>", 3), ("<|im_start|>", 3), ("<|im_end|>", 3), ("<tool>", 4)]
    first = len(tokens)
    tokens += [text for text, _ in special]
    types += [kind for _, kind in special]
    meta = {
        "model": "gpt2",
        "pre": pre,
        "tokens": [text.encode() for text in tokens],
        "token_type": np.array(types, np.int32),
        "merges": [pair.encode() for pair in merges],
        "bos_token_id": first,
        "eos_token_id": first,
        **keys,
    }
    return {KEY + name: value for name, value in meta.items() if value is not None}


def changed(meta, **keys):
    return {**meta, **{KEY + name: value for name, value in keys.items()}}


def merge_plainly(text, words):
    """What SentencePiece merging means, in quadratic time: pieces of text."""
    pieces = list(text)
    while True:
        pairs = [
            (words.get(a + b), i) for i, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False))
        ]
        scored = [(-score, i) for score, i in pairs if score is not None]
        if not scored:
            return pieces
        _, at = min(scored)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


def ids_plainly(text, words, ids):
    """The ids of merge_plainly's pieces; characters without a token as bytes (3 + value)."""
    found = []
    for piece in merge_plainly(text, words):
        found += [ids[piece]] if piece in words else [3 + value for value in piece.encode()]
    return found


def use_tokenizers(tokenizer):
    """Makes the next encode use the `tokenizers` library at once."""
    tokenizer._built()._credit = 0
    return tokenizer


@pytest.fixture(scope="module")
def gemma_meta(demo_path):
    from minfer import GgufFile

    with GgufFile(demo_path) as file:
        return {key: file[key] for key in file if key.startswith(KEY)}


@pytest.fixture(scope="module", params=["python", "tokenizers"])
def gemma(request, gemma_meta):
    """The demo model's tokenizer, on each of its two paths."""
    tokenizer = Tokenizer.from_metadata(gemma_meta, source="demo")
    if request.param == "tokenizers":
        use_tokenizers(tokenizer).encode("now")
        assert tokenizer._encoder._tokenizer is not None, "Gemma's vocabulary has a plain form"
    return tokenizer


# --- the demo model -----------------------------------------------------------------------------


def test_golden_ids(gemma):
    assert len(GOLDEN) == 34
    for case in GOLDEN:
        assert gemma.encode(case["text"], parse_special=True) == case["ids"], case["text"]


def test_golden_text_comes_back(gemma):
    for case in GOLDEN:
        assert gemma.decode(gemma.encode(case["text"])) == case["text"]
        assert gemma.decode(case["ids"][1:], skip_special=False) == case["text"]


def test_gemma_special_text_stays_text(gemma):
    assert gemma.encode("<bos>literal")[0] == 2
    assert 2 not in gemma.encode("<bos>literal")[1:]
    assert 105 not in gemma.encode("<start_of_turn>user\n")
    assert gemma.encode("<start_of_turn>", add_bos=False, parse_special=True) == [105]


def test_gemma_ids_with_a_meaning(gemma):
    assert (gemma.n_vocab, gemma.bos, gemma.eos) == (262144, 2, 1)
    assert gemma.eog == {1, 106}, "</s> is a markup tag here, not an end"
    assert gemma.is_special(106) and not gemma.is_special(818)
    assert gemma.token_bytes(818) == b"The" and gemma.token_bytes(5279) == b" capital"
    assert gemma.token_bytes(238) == b"\0"


def test_gemma_merging_is_the_plainest(gemma, gemma_meta):
    tokens, types = gemma_meta[KEY + "tokens"], gemma_meta[KEY + "token_type"]
    normal = np.flatnonzero(types == TokenType.NORMAL).tolist()
    scores = gemma_meta[KEY + "scores"]
    words = {tokens[i].decode(): float(scores[i]) for i in normal}
    ids = {tokens[i].decode(): i for i in normal}
    users = np.flatnonzero(types == TokenType.USER_DEFINED).tolist()
    users = [tokens[i].decode().replace(" ", SPACE) for i in users]
    rng = random.Random(7)
    texts = list(words)
    compared = 0
    for _ in range(300):
        pieces = [rng.choice(texts) for _ in range(6)]
        text = "".join(piece[: rng.randint(1, len(piece))] for piece in pieces)
        if not any(user in text for user in users):
            want = [ids[piece] for piece in merge_plainly(text, words)]
            assert gemma.encode(text, add_bos=False) == want, text
            compared += 1
    assert compared > 150


def test_gemma_encodes_a_megabyte_in_linear_time(gemma):
    text = "It was a bright cold day in April, and the clocks were striking thirteen.\n" * 2000
    start = time.process_time()
    ids = gemma.encode(text)
    assert time.process_time() - start < 10
    assert gemma.decode(ids) == text
    assert ids.count(gemma.encode("\n", add_bos=False)[0]) == 2000


# --- SentencePiece-style merging ----------------------------------------------------------------


@st.composite
def vocabularies(draw):
    """{text: score} over a few letters: tied or distinct scores, letters possibly missing."""
    letters = draw(st.sampled_from(["ab", "abc", "aé" + SPACE]))
    texts = draw(st.lists(st.text(letters, min_size=2, max_size=5), unique=True, max_size=14))
    singles = draw(st.sampled_from([letters, letters[:-1]]))
    n = len(texts)
    if draw(st.booleans()):
        scores = draw(st.permutations(range(n)))
    else:
        scores = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    words = {text: -float(score) for text, score in zip(texts, scores, strict=True)}
    return letters, words | {letter: -100.0 for letter in singles}


@settings(max_examples=400, deadline=None)
@given(vocabularies(), st.data())
def test_merging_is_the_plainest(vocabulary, data):
    letters, words = vocabulary
    text = data.draw(st.text(letters, max_size=40))
    meta = spm_meta(words, add_space_prefix=False)
    ids = {token.decode(): i for i, token in enumerate(meta[KEY + "tokens"])}
    want = ids_plainly(text, words, ids)
    tokenizer = Tokenizer.from_metadata(meta)
    assert tokenizer.encode(text, add_bos=False) == want
    assert use_tokenizers(tokenizer).encode(text, add_bos=False) == want


def test_leftmost_wins_among_equals():
    tokenizer = Tokenizer.from_metadata(
        spm_meta(
            {"aa": -1.0, "aaa": -2.0, "a": -9.0, "ab": -1.0, "b": -9.0}, add_space_prefix=False
        )
    )
    for _ in range(2):
        pieces = [tokenizer.token_bytes(i) for i in tokenizer.encode("aaaaaaab", add_bos=False)]
        assert pieces == [b"aa", b"aa", b"aa", b"ab"]
        assert use_tokenizers(tokenizer)._encoder._tokenizer is None, "tied scores stay in Python"


def test_space_prefix():
    words = {SPACE: -9.0, "a": -9.0, "b": -9.0, SPACE + "a": -1.0}
    tokenizer = Tokenizer.from_metadata(spm_meta(words, control=("<end>",), user=("<tag>",)))
    pieces = lambda text, **how: [  # noqa: E731
        tokenizer._tokens[i].decode() for i in tokenizer.encode(text, **how)
    ]
    assert pieces("a") == ["<s>", "▁a"]
    assert pieces(" a") == ["<s>", "▁", "▁a"]
    assert pieces("") == ["<s>"]
    assert pieces("a<end>a<end>", parse_special=True) == ["<s>", "▁a", "<end>", "▁a", "<end>"]
    assert pieces("b<tag>a") == ["<s>", "▁", "b", "<tag>", "a"]
    for text in ("a", " a", "  a", "", "b<tag>a", "<end> a"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    no_prefix = Tokenizer.from_metadata(spm_meta(words, add_space_prefix=False))
    assert no_prefix.decode(no_prefix.encode(" a")) == " a"
    assert no_prefix.encode("a", add_bos=False) != tokenizer.encode("a", add_bos=False)


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_byte_fallback_round_trip(text):
    tokenizer = _small_spm()
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace(SPACE, " ")


@cache
def _small_spm():
    words = {SPACE: -9.0, "a": -9.0, "é": -9.0, SPACE + "a": -1.0, "aé": -2.0}
    return Tokenizer.from_metadata(spm_meta(words, user=("\n\n", "  ", "<b>")))


def test_unknown_characters():
    words = {"a": -1.0, SPACE: -2.0}
    tokenizer = Tokenizer.from_metadata(spm_meta(words, with_bytes=False, add_space_prefix=False))
    for _ in range(2):
        assert tokenizer.encode("aéa", add_bos=False) == [3, 0, 3]
        use_tokenizers(tokenizer)
    meta = spm_meta(words, with_bytes=False, add_space_prefix=False, unknown_token_id=None)
    with pytest.raises(ArgumentError, match="'é'"):
        Tokenizer.from_metadata(meta).encode("aéa")


def test_user_defined_tokens_are_always_found_and_the_longest_first():
    words = {char: -9.0 for char in "<b>x" + SPACE} | {"<b": -1.0}
    tokenizer = Tokenizer.from_metadata(
        spm_meta(words, user=("<b>", "<b>x", SPACE * 2), add_space_prefix=False)
    )
    pieces = [
        tokenizer._tokens[i].decode() for i in tokenizer.encode("<b><b>x   <b", add_bos=False)
    ]
    assert pieces == ["<b>", "<b>x", SPACE * 2, SPACE, "<b"]


def test_control_tokens_need_parse_special():
    words = {char: -9.0 for char in "<>/sendu" + SPACE} | {"<s": -1.0, "<s>": -2.0}
    tokenizer = Tokenizer.from_metadata(spm_meta(words, control=("<end>",), add_space_prefix=False))
    special = {i for i in range(tokenizer.n_vocab) if tokenizer.is_special(i)}
    assert len(special) == 4
    for text in ("<s>", "</s>", "<end>", "<unk>", "<0x41>"):
        assert not special & set(tokenizer.encode(text, add_bos=False))
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<end>", parse_special=True)[1:] == [tokenizer.n_vocab - 1]


def test_the_id_of_an_end_token_is_control_whatever_its_type():
    meta = byte_meta()
    meta[KEY + "token_type"][:] = TokenType.NORMAL
    tokenizer = Tokenizer.from_metadata(meta)
    assert tokenizer.is_special(tokenizer.eos)
    assert tokenizer.eos not in tokenizer.encode("<|endoftext|>")


@pytest.mark.parametrize("kind", ["spm", *PRETOKENIZERS])
def test_cutting_long_text_changes_nothing(kind, monkeypatch):
    if kind == "spm":
        words = {char: -9.0 - i for i, char in enumerate("abc1.\n" + SPACE)}
        words |= {"b▁": -1.0, "▁a": -2.0, "▁▁": -3.0, "a▁c": -4.0, "a▁": -5.0, "bc": -6.0}
        tokenizer = Tokenizer.from_metadata(spm_meta(words, add_space_prefix=False))
    else:
        merges = ("Ġ a", "a b", "Ġ Ġ", "Ċ Ċ", "1 1", "' s", ". .", "Ġ .", "b c", "Ġa b")
        tokenizer = Tokenizer.from_metadata(byte_meta(kind, merges))
    rng = random.Random(3)
    texts = ["".join(rng.choices("abc1.'s \n  é²", k=300)) for _ in range(40)]
    whole = [tokenizer.encode(text) for text in texts]
    monkeypatch.setattr(minfer.bpe, "CHUNK", 4)
    shown = [text.replace(" ", SPACE) if kind == "spm" else text for text in texts]
    safe = tokenizer._encoder._safe
    assert sum(len(list(minfer.bpe._chunks(text, safe))) for text in shown) > 400
    assert [tokenizer.encode(text) for text in texts] == whole


# --- byte-level BPE -----------------------------------------------------------------------------

SPLITS = {
    "gpt-2": [
        ("Hello  world's 123", ["Hello", " ", " world", "'s", " 123"]),
        ("DON'T a\n\nb ", ["DON", "'", "T", " a", "\n", "\n", "b", " "]),
    ],
    "llama-bpe": [
        ("Hello  world'S 12345", ["Hello", " ", " world", "'S", " ", "123", "45"]),
        ("a!!\n\nb \n x\t", ["a", "!!\n\n", "b", " \n", " x", "\t"]),
        ("(tab)\tx", ["(tab", ")", "\tx"]),
    ],
    "qwen2": [("Hi'LL 123 ٣٤", ["Hi", "'LL", " ", "1", "2", "3", " ", "٣", "٤"])],
    "smollm": [("ab 12'll  c", ["ab", " ", "1", "2", "'ll", " ", " c"])],
    "tekken": [
        ("helloWorld HELLOworld", ["hello", "World", " HELLOworld"]),
        ("don't 42/\n/x", ["don", "'t", " ", "4", "2", "/\n/", "x"]),
        ("aÉ ΣΑΣ", ["a", "É", " ΣΑΣ"]),
    ],
    "default": [("ab, 12345", ["ab", ",", " ", "123", "45"]), ("a+b", ["a", "+", "b"])],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_pretokenizers_split(pre):
    assert SPLITS.keys() == PRETOKENIZERS.keys()
    splitter = PRETOKENIZERS[pre].build()
    for text, want in SPLITS[pre]:
        spans = [span for _, span in splitter.pre_tokenize_str(text)]
        assert [text[a:b] for a, b in spans] == want


@pytest.mark.parametrize("pre", PRETOKENIZERS)
@settings(max_examples=60, deadline=None)
@given(text=st.text())
def test_byte_level_round_trip(pre, text):
    tokenizer = _small_bytes(pre)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.encode(text, add_bos=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@cache
def _small_bytes(pre):
    return Tokenizer.from_metadata(byte_meta(pre))


def test_merges_apply_in_their_order():
    merges = ("b c", "a b", "Ġ a", "ab c")
    tokenizer = Tokenizer.from_metadata(byte_meta("gpt-2", merges))
    pieces = [tokenizer.token_bytes(i) for i in tokenizer.encode("abc ab aab")]
    assert pieces == [b"a", b"bc", b" ", b"ab", b" a", b"ab"]


def test_whole_words_skip_the_merges_where_the_family_does():
    merges = ("b c", "a b", "ab c")  # no way from "abc" to the token: "bc" comes first
    for pre, n in (("llama-bpe", 1), ("tekken", 1), ("qwen2", 2)):
        ids = Tokenizer.from_metadata(byte_meta(pre, merges)).encode("abc", add_bos=False)
        assert len(ids) == n, pre


def test_a_control_token_is_no_word():
    meta = byte_meta("llama-bpe", ("a b", "ab c"))
    meta[KEY + "tokens"][-2] = b"abcd"
    tokenizer = Tokenizer.from_metadata(changed(meta, merges=[b"a b", b"ab c", b"abc d"]))
    assert len(tokenizer.encode("abcd", add_bos=False)) == 2
    assert tokenizer.encode("abcd", add_bos=False, parse_special=True) == [tokenizer.n_vocab - 2]


def test_byte_level_special_tokens():
    tokenizer = Tokenizer.from_metadata(byte_meta("qwen2"))
    start, end, tool = (tokenizer.n_vocab - i for i in (3, 2, 1))
    assert tokenizer.eog == {tokenizer.eos, end}
    text = "<|im_start|>a<|im_end|>"
    assert tokenizer.encode(text, parse_special=True) == [start, ord("a"), end]
    assert not {start, end} & set(tokenizer.encode(text))
    assert tokenizer.encode("x<tool>y")[1] == tool
    assert tokenizer.decode([start, ord("a")], skip_special=False) == "<|im_start|>a"


@pytest.mark.parametrize("pre", PRETOKENIZERS)
def test_first_token_by_family(pre):
    by_default = pre in ("llama-bpe", "tekken")
    for flag, want in ((None, by_default), (True, True), (False, False)):
        tokenizer = Tokenizer.from_metadata(byte_meta(pre, add_bos_token=flag))
        assert tokenizer.adds_bos == want
        assert (tokenizer.encode("a")[0] == tokenizer.bos) == want
        assert tokenizer.encode("a", add_bos=False) == [ord("a")]


@pytest.mark.parametrize("pre", ["llama-bpe", "tekken"])
def test_runs_stay_below_what_the_regex_engine_gives_up_on(pre):
    """It panics after 10 million steps, some 5 million characters of one word."""
    splitter = PRETOKENIZERS[pre].build()
    for run in (" ", "A"):
        chunks = list(minfer.bpe._chunks(run * 6_000_000 + "x", minfer.bpe.ByteBpeEncoder._safe))
        assert "".join(chunks) == run * 6_000_000 + "x"
        assert max(map(len, chunks)) <= 1 << 20
        assert len(splitter.pre_tokenize_str(chunks[-1])) <= 2
        assert len(splitter.pre_tokenize_str(run * (1 << 20))) == 1


def test_a_byte_that_is_no_token():
    meta = byte_meta("gpt-2")
    meta[KEY + "tokens"][byte_chars().index("Ã")] = b"none"
    tokenizer = Tokenizer.from_metadata(meta)
    assert tokenizer.encode("abc")
    with pytest.raises(ArgumentError, match="'é'"):
        tokenizer.encode("abc é")


# --- decoding -----------------------------------------------------------------------------------


def test_stream_gives_whole_characters():
    tokenizer = _small_bytes("gpt-2")
    text = "é你😀a"
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in tokenizer.encode(text, add_bos=False)]
    assert [piece for piece in pieces if piece] == list(text)
    assert len(pieces) == len(text.encode()) and stream.flush() == ""
    stream = tokenizer.stream()
    assert stream.push(tokenizer.encode("é")[0]) == "" and stream.flush() == "\ufffd"
    assert tokenizer.stream().push(tokenizer.eos) == ""
    assert tokenizer.stream(skip_special=False).push(tokenizer.eos) == "<|endoftext|>"


def test_stream_keeps_the_space_that_decode_takes_away():
    tokenizer = _small_spm()
    ids = tokenizer.encode("a a", add_bos=False)
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) == " a a"
    assert tokenizer.decode(ids) == "a a"


def test_tokens_that_are_not_utf8():
    meta = byte_meta("gpt-2")
    meta[KEY + "tokens"][261:] = [b"\xff\xfe", b"\xc3"]
    meta[KEY + "token_type"] = None
    meta[KEY + "bos_token_id"] = meta[KEY + "eos_token_id"] = None
    tokenizer = Tokenizer.from_metadata(meta)
    assert tokenizer.token_bytes(tokenizer.n_vocab - 2) == b"\xff\xfe"
    assert tokenizer.decode([tokenizer.n_vocab - 1]) == "\ufffd"
    assert tokenizer.encode("ab", add_bos=True) and tokenizer.bos is None and not tokenizer.eog


@pytest.mark.parametrize("bad", [-1, 10**6, 2**40])
def test_ids_outside_the_vocabulary(bad):
    tokenizer = _small_spm()
    for call in (lambda: tokenizer.decode([1, bad]), lambda: tokenizer.stream().push(bad)):
        with pytest.raises(ArgumentError, match=str(bad)):
            call()


def test_wrong_types():
    tokenizer = _small_spm()
    for text in (b"a", None, 3, ["a"]):
        with pytest.raises(TypeError):
            tokenizer.encode(text)
    for ids in (["a"], [None], [1.5]):
        with pytest.raises(ArgumentTypeError):
            tokenizer.decode(ids)
    with pytest.raises(ValueError, match="U\\+D800 at 1"):
        tokenizer.encode("a\ud800")
    assert tokenizer.decode(np.array([1, 260])) == tokenizer.decode([1, 260])
