"""Text to token ids, once special tokens have been cut out: the two merging schemes.

Owns the encoders `SpmEncoder` (SentencePiece-style, scores) and `ByteBpeEncoder` (byte-level,
ranked merges), both over the BPE of Hugging Face `tokenizers`, and `Scanner`, which finds literal
tokens in text. They trust their input: `tokenizer.py` has validated lengths, types and ids.
Invariant: an encoder never gives the id of a control token; these are not in its vocabulary.

Long text is cut into chunks where no token can reach across, so time and memory stay linear. A run
of more than MAX_RUN characters that offers no such place is cut at MAX_RUN: the one case where
ids may differ from those of an uncut run.
"""

from __future__ import annotations

import heapq
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from .pretokenizers import Pretokenizer

SPACE = "\u2581"  # how SentencePiece writes a space
CHUNK = 1 << 16  # characters; from here on a chunk ends at the first safe place
MAX_RUN = 1 << 20  # characters; the regex engine under `tokenizers` aborts on runs of some 5e6
SHORT = 1 << 19  # characters; merging them in Python costs less than setting up `tokenizers`
MAX_WORD = 512  # characters; a longer token takes no part in SentencePiece merging


class Scanner:
    """Finds literal tokens in text: leftmost first, and the longest of those that start there."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        """`ids`: token text to id. Empty texts are left out, they would match everywhere."""
        self._ids = {text: token for text, token in ids.items() if text}
        lengths: dict[str, set[int]] = {}
        seconds: dict[str, set[str]] = {}
        for text in self._ids:
            lengths.setdefault(text[:2], set()).add(len(text))
            seconds.setdefault(text[0], set()).add(text[1:2])
        self._lengths = {head: sorted(sizes, reverse=True) for head, sizes in lengths.items()}
        self._start = _start_pattern(seconds)
        self._first = re.compile(_one_of(seconds)) if seconds else None

    def split(self, text: str) -> Iterator[str | int]:
        """The text in order as ids, where a token stands, and the strings between (not empty)."""
        done = at = 0
        while self._start is not None and (hit := self._start.search(text, at)):
            at = hit.start()
            size = self._longest(text, at)
            if size == 0:
                at += 1
                continue
            if done < at:
                yield text[done:at]
            yield self._ids[text[at : at + size]]
            done = at = at + size
        if done < len(text):
            yield text[done:]

    def firsts(self, text: str) -> Iterator[int]:
        """Where any character stands that begins some token."""
        if self._first is not None:
            yield from (hit.start() for hit in self._first.finditer(text))

    def starts(self, text: str) -> Iterator[int]:
        """Where a token starts, those inside another one too."""
        return (at for at in self.firsts(text) if self._longest(text, at))

    def _longest(self, text: str, at: int) -> int:
        for size in self._lengths.get(text[at : at + 2], ()):
            if text[at : at + size] in self._ids:
                return size
        return 1 if text[at] in self._ids else 0


def _start_pattern(seconds: Mapping[str, set[str]]) -> re.Pattern[str] | None:
    """Matches where a token may begin: exact in two characters for a usual vocabulary."""
    if not seconds:
        return None
    if len(seconds) > 64:  # alternatives are tried one by one; a class is one look-up
        return re.compile(_one_of(seconds))
    parts = []
    for first, following in sorted(seconds.items()):
        single = "" in following
        parts.append(re.escape(first) + ("" if single else _one_of(following)))
    return re.compile("|".join(parts))


def _one_of(chars: Iterable[str]) -> str:
    return "[" + "".join(map(re.escape, sorted(chars))) + "]"


def _chunks(text: str, safe: re.Pattern[str]) -> Iterator[str]:
    """Cuts at matches of `safe`, each chunk about CHUNK and at most MAX_RUN characters long."""
    start = 0
    while len(text) - start > CHUNK:
        hit = safe.search(text, start + CHUNK, start + MAX_RUN)
        end = hit.start() if hit else min(start + MAX_RUN, len(text))
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


class SpmEncoder:
    """SentencePiece BPE: of all adjacent pairs whose concatenation is a token, merge the one with
    the highest score, the leftmost among equals, until none is left.

    That is a plain BPE over every split of every token, ranked by score. Which split of a token
    has which rank does not matter: merging inside a stretch of text goes as it would if the
    stretch stood alone, up to the moment when it is one token, so a token has one last merge and
    its other splits are never adjacent. Two cases have no such form, and stay in Python: different
    tokens with equal scores, and tokens with a character that is no token.

    Listing the splits of 262,144 tokens takes a second or two, so the first SHORT characters,
    which is all that many a run needs, are merged in Python too, to the same ids.
    """

    def __init__(
        self,
        ids: Mapping[str, int],
        scores: np.ndarray,
        byte_ids: Mapping[int, int],
        user_ids: Mapping[str, int],
        add_space_prefix: bool,
        unknown: Callable[[str], int],
    ) -> None:
        """`ids`: text to id of the tokens that merging may give; `scores`: float [n_vocab], by id;
        `byte_ids`: byte value to id; `user_ids`: tokens that are always matched first; `unknown`
        gives the id of a character that has neither token nor bytes, or raises."""
        self._words = {text: i for text, i in ids.items() if 0 < len(text) <= MAX_WORD}
        self._scores = scores.tolist()
        self._bytes = dict(byte_ids)
        self._unknown = unknown
        self._prefix = add_space_prefix
        self._users = Scanner({text.replace(" ", SPACE): i for text, i in user_ids.items()})
        self._longest = max(map(len, self._words), default=0)
        self._safe = _safe_space(self._words)
        self._lock = threading.Lock()
        self._credit: float = SHORT  # characters to merge in Python before `tokenizers` is set up
        self._tokenizer = None

    def _set_up(self) -> None:
        """Hands over to `tokenizers`, if the vocabulary has a plain form."""
        from tokenizers import Tokenizer
        from tokenizers.models import BPE

        words, scores = self._words, self._scores
        ranked = sorted((w for w in words if len(w) > 1), key=lambda w: -scores[words[w]])
        order = [scores[words[word]] for word in ranked]
        distinct = all(a != b for a, b in zip(order, order[1:], strict=False))
        if not distinct or not all(char in words for char in set("".join(ranked))):
            self._credit = float("inf")
            return
        merges = [
            (word[:k], word[k:])
            for word in ranked
            for k in range(1, len(word))
            if word[:k] in words and word[k:] in words
        ]
        vocab = words | {f"<0x{value:02X}>": i for value, i in self._bytes.items()}
        unknown = _fresh(vocab)
        vocab[unknown] = self._unknown_id = len(scores)
        model = BPE(vocab, merges, unk_token=unknown, byte_fallback=True, fuse_unk=False)
        self._tokenizer = Tokenizer(model)

    def encode(self, text: str, starts: bool) -> Iterator[int]:
        """Ids of text without control tokens; `starts`: it begins the input or follows one."""
        text = text.replace(" ", SPACE)
        if self._prefix and starts and text:
            text = SPACE + text
        for piece in self._users.split(text):
            if isinstance(piece, int):
                yield piece
                continue
            for chunk in _chunks(piece, self._safe):
                yield from self._merged(chunk)

    def _merged(self, text: str) -> Iterable[int]:
        if self._tokenizer is None:
            self._credit -= len(text)
            if self._credit < 0:
                with self._lock:
                    if self._tokenizer is None:
                        self._set_up()
        if self._tokenizer is None:
            return self._merge(text)
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._merge(text) if self._unknown_id in ids else ids

    def _merge(self, text: str) -> Iterator[int]:
        """The definition, with a heap: O(n log n)."""
        words, scores, longest = self._words, self._scores, self._longest
        n = len(text)
        end = list(range(1, n + 1))  # of the piece that starts at i; 0 once it was merged away
        before = list(range(-1, n - 1))  # start of the piece before the one at i
        heap: list[tuple[float, int, int]] = []  # (-score, start, end) of a possible merge

        def offer(start: int) -> None:
            middle = end[start]
            if middle < n and end[middle] - start <= longest:
                found = words.get(text[start : end[middle]])
                if found is not None:
                    heapq.heappush(heap, (-scores[found], start, end[middle]))

        for i in range(n - 1):
            offer(i)
        while heap:
            _, start, stop = heapq.heappop(heap)
            middle = end[start]
            if middle == 0 or middle >= n or end[middle] != stop:
                continue  # one of the two pieces has changed since
            end[start], end[middle] = stop, 0
            if stop < n:
                before[stop] = start
            offer(start)
            if start > 0:
                offer(before[start])
        start = 0
        while start < n:
            yield from self._ids(text[start : end[start]])
            start = end[start]

    def _ids(self, piece: str) -> Iterable[int]:
        found = self._words.get(piece)
        if found is not None:
            return (found,)
        try:
            return [self._bytes[value] for value in piece.encode()]
        except KeyError:
            return (self._unknown(piece),)


def _safe_space(words: Iterable[str]) -> re.Pattern[str]:
    """Matches before a "▁" that no token joins to the character before it."""
    inner = {pair[0] for w in words if SPACE in w[1:] for pair in re.findall(f".{SPACE}", w, re.S)}
    return re.compile(f"(?<!{_one_of(inner | {SPACE})}){SPACE}")


class ByteBpeEncoder:
    """Byte-level BPE: words cut by a pre-tokenizer, their bytes merged in the order of `merges`."""

    _safe = re.compile(r"(?<=\w) ")  # no pre-tokenizer joins these two; see pretokenizers.py

    def __init__(
        self,
        vocab: Mapping[str, int],
        merges: Iterable[tuple[str, str]],
        user_ids: Mapping[str, int],
        pretokenizer: Pretokenizer,
        unknown: Callable[[str], int],
    ) -> None:
        """`vocab`: byte-level text to id; `merges`: best first. A merge whose parts or result are
        no tokens is dropped, as it can give none; of a pair listed twice the first counts."""
        from tokenizers import Tokenizer
        from tokenizers.models import BPE

        kept = dict.fromkeys(m for m in merges if m[0] in vocab and m[1] in vocab)
        pairs = [m for m in kept if m[0] + m[1] in vocab]
        words = dict(vocab)
        missing = _fresh(words)
        self._unknown_id = words[missing] = 1 + max(words.values(), default=0)
        self._unknown = unknown
        self._users = Scanner(user_ids)
        model = BPE(
            words,
            pairs,
            unk_token=missing,
            ignore_merges=pretokenizer.ignore_merges,
            fuse_unk=False,
        )
        self._tokenizer = Tokenizer(model)
        self._tokenizer.pre_tokenizer = pretokenizer.build()

    def encode(self, text: str, starts: bool) -> Iterator[int]:
        """Ids of text without control tokens; `starts` changes nothing here."""
        for piece in self._users.split(text):
            if isinstance(piece, int):
                yield piece
                continue
            for chunk in _chunks(piece, self._safe):
                found = self._tokenizer.encode(chunk, add_special_tokens=False)
                if self._unknown_id not in found.ids:
                    yield from found.ids
                    continue
                for token, (start, stop) in zip(found.ids, found.offsets, strict=True):
                    known = token != self._unknown_id
                    yield token if known else self._unknown(chunk[start:stop])


def _fresh(taken: Mapping[str, int]) -> str:
    """A text that is no token and, being longer than a character, is never looked up as one."""
    name = "<no token>"
    while name in taken:
        name += ">"
    return name
