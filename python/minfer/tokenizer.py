"""Text to token ids and back, from the vocabulary in a GGUF file.

Owns the reading and checking of the `tokenizer.ggml.*` keys, the rules for special tokens, and
decoding. Merging is in `bpe.py`, and is built at the first `encode`: decoding needs only the
tokens' bytes. Refuses, with a FormatError that names the key and the value, arrays of unequal
length or wrong type, ids outside the vocabulary, byte tokens that are no bytes, and merges that are
no pairs. Tolerated, because they can do no harm: empty tokens and tokens that are not UTF-8 (never
given by `encode`), a text that is listed twice (the lowest id counts), merges that name unknown
tokens (dropped).

Invariant: without `parse_special`, no text whatsoever gives the id of a control token.
"""

from __future__ import annotations

import codecs
import operator
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from typing import Any

import numpy as np

from minfer.bpe import SPACE, ByteBpeEncoder, Scanner, SpmEncoder
from minfer.errors import ArgumentError, ArgumentTypeError, FormatError, UnsupportedError
from minfer.pretokenizers import PRETOKENIZERS, Pretokenizer, byte_chars

_KEY = "tokenizer.ggml."
_MAX_TOKENS = 1 << 22
_MAX_MERGES = 1 << 22
_MAX_TOKEN_BYTES = 1 << 16
_MODELS = {"llama": "SentencePiece-style BPE", "gpt2": "byte-level BPE"}
_END_NAMES = frozenset(
    b"<end_of_turn> <|eot_id|> <|eom_id|> <|im_end|> <|end|> <|endoftext|> <|end_of_text|> "
    b"<|end_of_turn|> <|endofturn|> <|EOT|>".split()
)
_END_NAMES_IF_CONTROL = frozenset((b"</s>", b"<eos>", b"<EOT>"))  # else a tag of some markup


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class Tokenizer:
    """A model's vocabulary. Immutable and safe to share between threads.

    `bos`, `eos`: ids, or None where the model has none. `eog`: all ids that end a generation (end
    of sequence, of turn, of message). `adds_bos`: whether `encode` begins with `bos`.
    """

    bos: int | None
    eos: int | None
    eog: frozenset[int]
    adds_bos: bool
    controls: Scanner  # finds control tokens by name; for `chat.py`

    def __init__(self, meta: Mapping[str, Any], source: str = "metadata") -> None:
        """As `from_metadata`."""
        self._read = read = _Reader(meta, source)
        self._kind = read.kind()
        self._tokens = read.tokens()
        self._types = read.types(self._tokens)
        self._scores = read.scores(len(self._tokens)) if self._kind == "llama" else None
        self._merges = read.merges() if self._kind == "gpt2" else None
        self._pretokenizer = read.pretokenizer() if self._kind == "gpt2" else None
        self._set_ids(read)
        self._set_control()
        self._bytes = self._byte_values()
        by_default = self._kind == "llama" or self._pretokenizer.add_bos
        self.adds_bos = self.bos is not None and read.flag("add_bos_token", by_default)
        self._prefix = self._kind == "llama" and read.flag("add_space_prefix", True)
        self._pieces: dict[int, bytes] = {}
        self._char_bytes = {char: bytes([i]) for i, char in enumerate(byte_chars())}
        self._encoder: SpmEncoder | ByteBpeEncoder | None = None
        self._lock = threading.Lock()

    @classmethod
    def from_metadata(cls, meta: Mapping[str, Any], source: str = "metadata") -> Tokenizer:
        """`meta`: the file's metadata by key, with strings as str, arrays of strings as list[bytes]
        and arrays of numbers as numpy arrays or lists; `source`: its path, for messages.

        Raises UnsupportedError for another kind of tokenizer and FormatError for a broken one."""
        return cls(meta, source)

    @property
    def n_vocab(self) -> int:
        """Number of tokens; ids are 0..n_vocab-1."""
        return len(self._tokens)

    def encode(self, text: str, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text of any length.

        `add_bos`: begin with `bos` if the model wants it (`adds_bos`). An end token is never added.
        `parse_special`: text such as `<end_of_turn>` means that control token; else it stays text.
        User-defined tokens (runs of newlines, tags) are always matched. Models with a space
        prefix get one at the start and after each control token. Linear in the text, except that
        a run of more than 2**20 characters without a space is cut there.

        Raises ArgumentTypeError unless `text` is a str, and ArgumentError for lone surrogates and
        for a character that the vocabulary cannot express."""
        ids = [self.bos] if add_bos and self.adds_bos else []
        ids.extend(self._encode(text, parse_special, ""))
        return ids

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of token ids: with `skip_special` the inverse of `encode`, else control tokens
        appear by name. Bytes that are not UTF-8 become U+FFFD. The space that a model with a
        space prefix puts before a text is taken away again; to continue a text, use `stream`.

        Raises ArgumentError for an id outside 0..n_vocab-1, ArgumentTypeError for what is none."""
        if not isinstance(ids, Iterable):
            raise ArgumentTypeError(f"ids must be a list of token ids, not {_show(ids)}")
        data = b"".join([self._piece(token, skip_special) for token in ids])
        if self._prefix and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", "replace")

    def stream(self, skip_special: bool = True) -> TokenStream:
        """A decoder for tokens that come one by one and continue a text."""
        return TokenStream(self, skip_special)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for; a control token stands for its name."""
        token = self._checked(token)
        kind, text = int(self._types[token]), self._tokens[token]
        if kind == TokenType.BYTE:
            return bytes([self._bytes[token]])
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            return text
        if self._kind == "llama":
            return text.replace(SPACE.encode(), b" ")
        if kind == TokenType.USER_DEFINED:
            return text
        chars = text.decode("utf-8", "surrogateescape")
        table = self._char_bytes
        return b"".join([table.get(c) or c.encode("utf-8", "surrogateescape") for c in chars])

    def is_special(self, token: int) -> bool:
        """Whether a token is a control token (or the unknown token): never made from plain text."""
        return self._checked(token) in self._special

    def _piece(self, token: int, skip_special: bool) -> bytes:
        """`token_bytes`, remembered: a long text uses few different tokens."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[self._checked(token)] = self.token_bytes(token)
        return b"" if skip_special and token in self._special else piece

    def _checked(self, token: int) -> int:
        try:
            token = operator.index(token)
        except TypeError:
            raise ArgumentTypeError(f"token id {_show(token)} is not an integer") from None
        if not 0 <= token < self.n_vocab:
            raise ArgumentError(
                f"token id {token} is outside the vocabulary (0..{self.n_vocab - 1})"
            )
        return token

    def _encode(self, text: str, parse_special: bool, joint: str) -> Iterator[int]:
        """`joint`: a character that no token may span and that is then taken out; "" for none."""
        _check_text(text)
        encoder = self._built()
        starts = True
        for run in self.controls.split(text) if parse_special else (text,):
            if isinstance(run, int):
                yield run
                starts = True
                continue
            if joint:
                run = run.replace(joint, "")
            if run:
                yield from encoder.encode(run, starts)
                starts = False

    def _set_ids(self, read: _Reader) -> None:
        n = self.n_vocab
        self.bos, self.eos = read.token_id("bos_token_id", n), read.token_id("eos_token_id", n)
        self._unknown_id = read.token_id("unknown_token_id", n)
        ends = {self.eos, read.token_id("eot_token_id", n), read.token_id("eom_token_id", n)}
        kinds = (TokenType.CONTROL, TokenType.USER_DEFINED) if read.has_types else TokenType
        types = self._types.tolist()  # NumPy's own integers compare slowly, and eat a Ctrl-C
        for i in np.flatnonzero(np.isin(self._types, kinds)).tolist():
            sure = types[i] == TokenType.CONTROL
            if self._tokens[i] in _END_NAMES or sure and self._tokens[i] in _END_NAMES_IF_CONTROL:
                ends.add(i)
        self.eog = frozenset(ends - {None})

    def _set_control(self) -> None:
        """Control tokens are those of that type, and the ids with a meaning whatever their type."""
        chosen = [i for i in (*self.eog, self.bos, self._unknown_id) if i is not None]
        self._types[chosen] = TokenType.CONTROL
        control = np.isin(self._types, (TokenType.CONTROL, TokenType.UNKNOWN))
        self._special = frozenset(np.flatnonzero(control).tolist())
        self.controls = Scanner(self._texts(control))

    def _texts(self, mask: np.ndarray) -> dict[str, int]:
        """Text to id of the tokens in `mask` that are UTF-8; the lowest id of equal texts."""
        found = {}
        for token in np.flatnonzero(mask)[::-1].tolist():
            try:
                found[self._tokens[token].decode()] = token
            except UnicodeDecodeError:
                continue  # no str contains it
        return found

    def _byte_values(self) -> dict[int, int]:
        """Token id to byte value of the byte tokens."""
        values = {}
        for token in np.flatnonzero(self._types == TokenType.BYTE).tolist():
            text = self._tokens[token]
            if not re.fullmatch(rb"<0x[0-9A-Fa-f]{2}>", text):
                raise self._read.error(
                    f"tokens[{token}]", f"is the byte token {_show(text)}; must be <0x00>..<0xFF>"
                )
            values[token] = int(text[3:5], 16)
        return values

    def _built(self) -> SpmEncoder | ByteBpeEncoder:
        with self._lock:
            if self._encoder is None:
                spm = self._kind == "llama"
                self._encoder = self._spm_encoder() if spm else self._byte_encoder()
            return self._encoder

    def _spm_encoder(self) -> SpmEncoder:
        words = self._texts(self._types <= TokenType.NORMAL)
        byte_ids = {value: token for token, value in sorted(self._bytes.items(), reverse=True)}
        users = self._texts(self._types == TokenType.USER_DEFINED)
        return SpmEncoder(words, self._scores, byte_ids, users, self._prefix, self._unknown)

    def _byte_encoder(self) -> ByteBpeEncoder:
        vocab = self._texts(self._types <= TokenType.NORMAL)
        users = self._texts(self._types == TokenType.USER_DEFINED)
        pairs = (pair.decode("utf-8", "replace") for pair in self._merges)
        merges = ((pair[:at], pair[at + 1 :]) for pair in pairs for at in (pair.find(" ", 1),))
        return ByteBpeEncoder(vocab, merges, users, self._pretokenizer, self._unknown)

    def _unknown(self, char: str) -> int:
        if self._unknown_id is not None and self._kind == "llama":
            return self._unknown_id
        raise ArgumentError(
            f"{self._read.source}: the vocabulary cannot express {char!r}: it has neither a token "
            "nor bytes for it; leave that character out"
        )

    def __repr__(self) -> str:
        return f"<minfer.Tokenizer {_MODELS[self._kind]}, {self.n_vocab} tokens>"


class TokenStream:
    """Decodes token by token, giving text only as whole characters."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The characters that are complete now; "" while one is not. Raises as `decode` does."""
        return self._decoder.decode(self._tokenizer._piece(token, self._skip))

    def flush(self) -> str:
        """What is left at the end: U+FFFD if the last character is incomplete, else ""."""
        return self._decoder.decode(b"", final=True)


class _Reader:
    """Typed, checked access to the `tokenizer.ggml.*` keys of one file."""

    def __init__(self, meta: Mapping[str, Any], source: str) -> None:
        self._meta = meta
        self.source = source
        self.has_types = meta.get(_KEY + "token_type") is not None

    def error(self, name: str, problem: str) -> FormatError:
        return FormatError(f"{self.source}: {_KEY}{name} {problem}")

    def kind(self) -> str:
        kind = self._text("model", None)
        if kind is None:
            raise self.error("model", "is missing; the file carries no tokenizer")
        if kind not in _MODELS:
            raise UnsupportedError(
                f"{self.source}: {_KEY}model is {_show(kind)}; supported are {', '.join(_MODELS)}"
            )
        return kind

    def pretokenizer(self) -> Pretokenizer:
        name = self._text("pre", "default")
        if name not in PRETOKENIZERS:
            raise UnsupportedError(
                f"{self.source}: {_KEY}pre is {_show(name)}; "
                f"supported are {', '.join(PRETOKENIZERS)}"
            )
        return PRETOKENIZERS[name]

    def tokens(self) -> list[bytes]:
        tokens = self._strings("tokens")
        if not 0 < len(tokens) <= _MAX_TOKENS:
            raise self.error("tokens", f"has {len(tokens)} entries; must be 1..{_MAX_TOKENS}")
        longest = max(map(len, tokens))
        if longest > _MAX_TOKEN_BYTES:
            at = next(i for i, text in enumerate(tokens) if len(text) == longest)
            raise self.error(f"tokens[{at}]", f"has {longest} bytes; at most {_MAX_TOKEN_BYTES}")
        return tokens

    def merges(self) -> list[bytes]:
        merges = self._strings("merges")
        if len(merges) > _MAX_MERGES:
            raise self.error("merges", f"has {len(merges)} entries; at most {_MAX_MERGES}")
        for i, pair in enumerate(merges):
            if not 0 < pair.find(b" ", 1) < len(pair) - 1:
                raise self.error(
                    f"merges[{i}]", f"is {_show(pair)}; must be two tokens and a space"
                )
        return merges

    def scores(self, n: int) -> np.ndarray:
        """float64 [n]."""
        scores = self._numbers("scores", n, "iuf", "floats").astype(np.float64)
        bad = np.flatnonzero(np.isnan(scores))
        if bad.size:
            raise self.error(f"scores[{bad[0]}]", "is NaN; scores order the merges")
        return scores

    def types(self, tokens: list[bytes]) -> np.ndarray:
        """int8 [n]. A file without types has normal tokens, and byte tokens by their spelling."""
        if not self.has_types:
            byte = re.compile(rb"<0x[0-9A-F]{2}>").fullmatch
            kinds = [TokenType.BYTE if byte(text) else TokenType.NORMAL for text in tokens]
            return np.array(kinds, np.int8)
        types = self._numbers("token_type", len(tokens), "iu", "integers")
        bad = np.flatnonzero((types < 0) | (types > max(TokenType)))
        if bad.size:
            at = bad[0]
            raise self.error(f"token_type[{at}]", f"is {types[at]}; must be 0..{max(TokenType):d}")
        return types.astype(np.int8)

    def token_id(self, name: str, n: int) -> int | None:
        value = self._meta.get(_KEY + name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise self.error(name, f"is {_show(value)}; must be an integer")
        if not 0 <= value < n:
            raise self.error(name, f"is {value}; the vocabulary has ids 0..{n - 1}")
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._meta.get(_KEY + name)
        if value is None:
            return default
        if not isinstance(value, (bool, np.bool_)):
            raise self.error(name, f"is {_show(value)}; must be a bool")
        return bool(value)

    def _text(self, name: str, default: str | None) -> str | None:
        value = self._meta.get(_KEY + name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(name, f"is {_show(value)}; must be a string")
        return value

    def _strings(self, name: str) -> list[bytes]:
        value = self._meta.get(_KEY + name)
        if value is None:
            raise self.error(name, "is missing")
        if not isinstance(value, list) or not all(type(text) is bytes for text in value):
            raise self.error(name, f"is {_show(value)}; must be an array of strings")
        return value

    def _numbers(self, name: str, n: int, kinds: str, what: str) -> np.ndarray:
        value = self._meta.get(_KEY + name)
        if value is None:
            raise self.error(name, "is missing")
        try:
            array = np.asarray(value) if isinstance(value, (list, np.ndarray)) else None
        except ValueError:
            array = None  # nested
        if array is None or array.ndim != 1 or array.dtype.kind not in kinds:
            raise self.error(name, f"is {_show(value)}; must be an array of {what}")
        if array.size != n:
            raise self.error(name, f"has {array.size} entries; tokens has {n}")
        return array


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise ArgumentTypeError(f"text must be str, not {type(text).__name__}; decode bytes first")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        bad = ord(text[error.start])
        raise ArgumentError(
            f"text has the lone surrogate U+{bad:04X} at {error.start}; it is not a character"
        ) from None


def _show(value: object) -> str:
    """A value for a one-line message, short whatever it holds."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}"
    if isinstance(value, list):
        return (
            f"an array of {', '.join(sorted({type(item).__name__ for item in value})) or 'nothing'}"
        )
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
