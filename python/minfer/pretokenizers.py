"""Pre-tokenizers of byte-level BPE vocabularies, by their `tokenizer.ggml.pre` name.

Owns the regular expressions that cut text into words before merging, and the two defaults that
hang on the name. Refuses names it does not know: a wrong split gives wrong ids silently.
Invariant: every pattern ends a word before a space that follows a word character, which is what
lets `bpe.py` cut long text there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Pretokenizer:
    """How one family cuts text: `patterns` apply in order, each to the pieces of the one before."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a whole word that is a token is taken as it is
    add_bos: bool = False  # when the file has no add_bos_token

    def build(self) -> PreTokenizer:
        """The `tokenizers` object: the splits, then bytes as printable characters."""
        from tokenizers import Regex, pre_tokenizers

        steps = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in self.patterns]
        bytes_to_chars = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*steps, bytes_to_chars])


PRETOKENIZERS = {
    "default": Pretokenizer(
        (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    ),
    "gpt-2": Pretokenizer((_GPT2,)),
    "llama-bpe": Pretokenizer(
        (rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}",), ignore_merges=True, add_bos=True
    ),
    "qwen2": Pretokenizer((rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_REST}",)),
    "smollm": Pretokenizer((r"\p{N}", _GPT2)),
    "tekken": Pretokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
}


def byte_chars() -> list[str]:
    """[256] the printable character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 bytes stand for themselves; the others, in order, are U+0100, U+0101, ...
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]
