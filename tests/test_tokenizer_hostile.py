"""Tokenizer: vocabularies that are broken or made to hurt. Each row is one in a table."""

import time

import numpy as np
import pytest
from test_tokenizer import KEY, SPACE, byte_meta, changed, spm_meta, use_tokenizers

from minfer.errors import FormatError, UnsupportedError
from minfer.tokenizer import Tokenizer


def with_token(meta, at, text, kind=None):
    meta[KEY + "tokens"][at] = text
    if kind is not None:
        meta[KEY + "token_type"][at] = kind
    return meta


WORDS = {"a": -1.0, "b": -2.0, "ab": -3.0, SPACE: -9.0}
REFUSED = [
    ("no model", lambda: {}, "tokenizer.ggml.model is missing"),
    ("model of a wrong type", lambda: spm_meta(WORDS, model=3), "model is 3"),
    ("no tokens", lambda: spm_meta(WORDS, tokens=None), "tokens is missing"),
    ("empty tokens", lambda: spm_meta(WORDS, tokens=[]), "tokens has 0 entries"),
    (
        "tokens of numbers",
        lambda: spm_meta(WORDS, tokens=np.arange(263)),
        "tokens is an array of int",
    ),
    ("tokens of str", lambda: spm_meta(WORDS, tokens=["a"] * 263), "tokens is an array of str"),
    ("scores too short", lambda: spm_meta(WORDS, scores=np.zeros(262)), "scores has 262 .* 263"),
    ("scores too long", lambda: spm_meta(WORDS, scores=[0.0] * 264), "scores has 264 .* 263"),
    (
        "scores of strings",
        lambda: spm_meta(WORDS, scores=[b"x"] * 263),
        "scores is an array of bytes",
    ),
    (
        "scores nested",
        lambda: spm_meta(WORDS, scores=[[1.0], 2.0]),
        "scores is an array of float, list",
    ),
    ("scores missing", lambda: spm_meta(WORDS, scores=None), "scores is missing"),
    ("a score is NaN", lambda: spm_meta(WORDS, scores=np.full(263, np.nan)), r"scores\[0\] is NaN"),
    ("types too short", lambda: spm_meta(WORDS, token_type=[1]), "token_type has 1 .* 263"),
    (
        "types of floats",
        lambda: spm_meta(WORDS, token_type=np.ones(263)),
        "token_type is an array of f",
    ),
    ("type 7", lambda: spm_meta(WORDS, token_type=[7] * 263), r"token_type\[0\] is 7"),
    ("type -1", lambda: spm_meta(WORDS, token_type=[-1] * 263), r"token_type\[0\] is -1"),
    ("byte -1", lambda: with_token(spm_meta(WORDS), 5, b"<0x-1>"), r"tokens\[5\] .*<0x-1>"),
    ("byte ZZ", lambda: with_token(spm_meta(WORDS), 6, b"<0xZZ>"), r"tokens\[6\] .*<0xZZ>"),
    (
        "byte of another name",
        lambda: with_token(spm_meta(WORDS), 9, b"a", 6),
        r"tokens\[9\] .*b'a'",
    ),
    (
        "token of 10 MB",
        lambda: with_token(spm_meta(WORDS), 260, b"a" * 10**7),
        r"\[260\] has 10000000",
    ),
    ("bos = vocab", lambda: spm_meta(WORDS, bos_token_id=263), r"bos_token_id is 263; .* 0\.\.262"),
    ("eos = -1", lambda: spm_meta(WORDS, eos_token_id=-1), "eos_token_id is -1"),
    (
        "eos = 2^32 - 1",
        lambda: spm_meta(WORDS, eos_token_id=2**32 - 1),
        "eos_token_id is 4294967295",
    ),
    ("eot = vocab", lambda: spm_meta(WORDS, eot_token_id=263), "eot_token_id is 263"),
    ("unknown = vocab", lambda: spm_meta(WORDS, unknown_token_id=263), "unknown_token_id is 263"),
    ("bos is a string", lambda: spm_meta(WORDS, bos_token_id="1"), "bos_token_id is '1'"),
    ("add_bos is a number", lambda: spm_meta(WORDS, add_bos_token=2), "add_bos_token is 2"),
    (
        "prefix is a string",
        lambda: spm_meta(WORDS, add_space_prefix="no"),
        "add_space_prefix is 'no'",
    ),
    ("no merges", lambda: changed(byte_meta(), merges=None), "merges is missing"),
    (
        "merge without a space",
        lambda: changed(byte_meta(), merges=[b"a b", b"ab"]),
        r"merges\[1\] is b'ab'",
    ),
    ("merge of one token", lambda: changed(byte_meta(), merges=[b"a "]), r"merges\[0\] is b'a '"),
    ("merge of a space", lambda: changed(byte_meta(), merges=[b" "]), r"merges\[0\] is b' '"),
    ("empty merge", lambda: changed(byte_meta(), merges=[b""]), r"merges\[0\] is b''"),
    (
        "merges of numbers",
        lambda: changed(byte_meta(), merges=np.arange(3)),
        "merges is an array of int",
    ),
    ("10^7 merges", lambda: changed(byte_meta(), merges=[b"a b"] * 10**7), "merges has 10000000"),
]


@pytest.mark.parametrize("make, message", [pytest.param(*row[1:], id=row[0]) for row in REFUSED])
def test_refused(make, message):
    meta = make()
    start = time.process_time()
    with pytest.raises(FormatError, match=message) as caught:
        Tokenizer.from_metadata(meta, source="x.gguf")
    assert time.process_time() - start < 2
    text = str(caught.value)
    assert text.startswith("x.gguf: tokenizer.ggml.") and "\n" not in text and len(text) < 200


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", "plamo2", "x" * 10**6])
def test_other_models_are_named(kind):
    with pytest.raises(
        UnsupportedError, match=f"model is '{kind[:50]}.* supported are llama, gpt2"
    ):
        Tokenizer.from_metadata(spm_meta(WORDS, model=kind))


def test_other_pretokenizers_are_named():
    with pytest.raises(
        UnsupportedError, match="'deepseek-llm'; supported are default, gpt-2, llama-bpe"
    ):
        Tokenizer.from_metadata(byte_meta("deepseek-llm"))


def nested(n):
    """A SentencePiece vocabulary of a, aa, aaa, ...: the most splits that its bytes can have."""
    return spm_meta({"a" * k: -float(k) for k in range(1, n)} | {SPACE: -9e9})


TOLERATED = [
    ("empty tokens", lambda: with_token(with_token(spm_meta(WORDS), 260, b"", 1), 261, b"", 4)),
    ("empty control token", lambda: with_token(spm_meta(WORDS), 1, b"")),
    ("duplicated tokens", lambda: with_token(spm_meta(WORDS), 260, b"a")),
    ("duplicated bytes", lambda: with_token(spm_meta(WORDS), 100, b"<0x61>")),
    ("merges of unknown tokens", lambda: changed(byte_meta(), merges=[b"x y", b"zz q", b"a b"])),
    ("one merge, many times", lambda: changed(byte_meta(), merges=[b"a b"] * 300_000)),
    ("no merges at all", lambda: changed(byte_meta(), merges=[])),
    ("infinite scores", lambda: spm_meta(WORDS, scores=np.full(263, -np.inf))),
    ("a megabyte of nested tokens", lambda: nested(1500)),
    ("a token longer than any that merges", lambda: spm_meta(WORDS | {"a" * 60_000: -4.0})),
    ("the name of the sentinel", lambda: spm_meta(WORDS | {"<no token>": -4.0})),
    (
        "100,000 user tokens",
        lambda: spm_meta(
            WORDS, user=[chr(0x4E00 + i % 20000) * (i // 20000 + 1) for i in range(100_000)]
        ),
    ),
]


@pytest.mark.parametrize("make", [pytest.param(row[1], id=row[0]) for row in TOLERATED])
def test_tolerated(make):
    meta = make()
    start = time.process_time()
    tokenizer = use_tokenizers(Tokenizer.from_metadata(meta))
    text = "ab" * 500 + "a" * 500 + " 中中é"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert time.process_time() - start < 4, "2 s are allowed, on a machine that does nothing else"


def test_of_equal_texts_the_lowest_id_counts():
    tokenizer = Tokenizer.from_metadata(
        with_token(spm_meta(WORDS, add_space_prefix=False), 260, b"a")
    )
    for _ in range(2):
        assert tokenizer.encode("a", add_bos=False) == [259]
        use_tokenizers(tokenizer)


def test_types_may_be_missing():
    meta = spm_meta(WORDS, token_type=None, add_space_prefix=False)
    tokenizer = Tokenizer.from_metadata(meta)
    assert tokenizer.encode("abé") == [1, 261, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.eog == {2} and tokenizer.is_special(1) and not tokenizer.is_special(261)
