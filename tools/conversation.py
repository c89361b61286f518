"""A conversation in sequence 0 of an engine: what was said, the rows it left, and its two files.

Owns the history (`messages`), the tokens of the sequence's rows, and the choice of what is read
again. Refuses histories that are not turns of a user and an assistant, after at most one system
prompt. Knows no terminal: it says what it did to the `notice` it is given.

Every turn is rendered as a whole; the rows that agree with it stay, the others are dropped, and
only what is missing is computed. Without a chat template the rendering is all texts in a row.

Where the context is full, the oldest exchanges are cut out of the sequence. Rows after a cut were
computed with what was cut in sight: their tokens are those of a shorter text, the rows are not. So
`_cut` says where such rows begin, and they only serve to carry on with what they were kept for.
Invariant: `rows` are the tokens of the sequence's rows, in order; rows before `_cut` are exactly
what their tokens alone make.

FILE holds the messages; FILE.kv the cache, and beside it everything else, with a digest of FILE.
"""

import contextlib
import hashlib
import json
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, BinaryIO

import minfer

SEQ = 0
HISTORY_VERSION = 1  # of FILE
SNAPSHOT_VERSION = 1  # of the state in FILE.kv

Messages = list[dict[str, str]]
Reading = Callable[[int], contextlib.AbstractContextManager]


class Conversation:
    """`sampling`: how to pick, by the names of Engine.generate. `max_tokens`: of one answer.
    `notice` is called with a line about what happened, `reading` with a number of tokens for a
    context in which they are computed."""

    def __init__(
        self,
        engine: minfer.Engine,
        sampling: Mapping[str, Any],
        max_tokens: int = 256,
        *,
        use_template: bool = True,
        notice: Callable[[str], None] = lambda line: None,
        reading: Reading = lambda n: contextlib.nullcontext(),
    ) -> None:
        self.engine = engine
        self.sampling = dict(sampling)
        self.max_tokens = max_tokens
        self.template = engine.chat_template if use_template else None
        self.notice = notice
        self.reading = reading
        self.messages: Messages = []  # everything, also what the context no longer holds
        self.first = 0  # message after the system prompt that the context begins with
        self.rows: list[int] = []  # tokens of the rows that the sequence holds
        self.ids: list[int] = []  # tokens of the last answer
        self.pending: list[int] = []  # those of them that have no row yet
        self.finish: str | None = None  # as of a Generation, or "interrupted"
        self._encoded: list[list[int]] = []  # of each message, where there is no template
        self._cut: int | None = None  # rows from here on saw what is gone
        self._kept = 0  # rows that a cut has left
        self._running: tuple[list[int], minfer.Generation] | None = None

    # ---- turns ----------------------------------------------------------------------------------

    def answer(self, text: str) -> Iterator[str]:
        """Pieces of the answer to the next turn. KvFullError: the turn does not fit. After that,
        and after an interrupt before the first token of the answer, the turn was not said."""
        self._settle()
        self._say("user", text, self._encode(text))
        self.ids, self.finish, said, done = [], None, "", False
        stream = self.engine.tokenizer.stream()  # one, so that no cut of the context cuts a letter
        try:
            missing: list[int] | None = self._next(self._room(self.max_tokens))
            while missing is not None:
                pieces = self._generate(missing, stream)
                with self.reading(len(missing)):
                    piece = next(pieces, "")
                while piece:
                    said += piece
                    yield piece
                    piece = next(pieces, "")
                self._settle()
                missing = self._go_on() if self.finish == "full" else None
            if piece := stream.flush():
                said += piece
                yield piece
            done = True
        finally:
            self._settle()
            if not done:
                self.finish = "interrupted"
            if done or self.ids:
                self._say("assistant", said, self.ids)
            else:
                self._unsay(1)

    def undo(self) -> bool:
        """Takes the last exchange back; False if there is none."""
        self._settle()
        if len(self.messages) < self._n_system + 2:
            return False
        self._unsay(2)
        self.first = min(self.first, len(self.messages))
        wanted = self._render(self.first, answering=False)
        keep = _common_prefix(self.rows, wanted)
        if not self._keep(keep):
            self.notice(
                f"the exchange before needs rows that a window has dropped: {len(wanted)} tokens"
                " are read again"
            )
            self._read(self._fit(0, answering=False))
        return True

    def reset(self) -> None:
        """Forgets everything but the system prompt."""
        self._settle()
        self._unsay(len(self.messages) - self._n_system)
        self.first = self._n_system
        self._keep(0)

    @property
    def n_exchanges(self) -> int:
        """Exchanges since the start, also those that are no longer in the context."""
        return (len(self.messages) - self._n_system) // 2

    @property
    def n_dropped(self) -> int:
        """Exchanges that are no longer in the context."""
        return (self.first - self._n_system) // 2

    @property
    def _n_system(self) -> int:
        return int(bool(self.messages) and self.messages[0]["role"] == "system")

    def _say(self, role: str, text: str, ids: list[int]) -> None:
        self.messages.append({"role": role, "content": text})
        self._encoded.append(ids[:] if self.template is None else [])

    def _unsay(self, n: int) -> None:
        del self.messages[len(self.messages) - n :]
        del self._encoded[len(self._encoded) - n :]

    def _encode(self, text: str) -> list[int]:
        if self.template is not None:
            return []
        return self.engine.tokenizer.encode(text, add_bos=False)

    def _generate(self, missing: list[int], stream) -> Iterator[str]:
        """The text of an answer as far as it goes, each piece when it is there."""
        limit = self.max_tokens - len(self.ids)
        pieces = self.engine.generate(missing, max_tokens=limit, seq=SEQ, **self.sampling)
        self._running = (self.rows + missing, pieces)

        def texts() -> Iterator[str]:
            n, going = 0, True
            while going:
                going = next(pieces, None) is not None
                text = "".join(map(stream.push, pieces.ids[n:]))
                n = len(pieces.ids)
                if text:
                    yield text

        return texts()

    def _settle(self) -> None:
        """Takes over what an answer has left, however it ended. Again is fine: it can be
        interrupted itself."""
        if self._running is None:
            return
        before, pieces = self._running
        pieces.close()
        stream = before + pieces.ids
        self.rows = stream[: self.engine.kv.len(SEQ)]
        self.pending = stream[len(self.rows) :]
        self.finish = pieces.finish
        self._running, self.ids = None, self.ids + pieces.ids

    def _room(self, n: int) -> int:
        """Rows that should be free for n tokens of an answer."""
        return min(n, self.engine.n_ctx // 4)

    def _go_on(self) -> list[int] | None:
        """Makes room in the middle of an answer; None if there is none to make."""
        try:
            return self._next(self._room(self.max_tokens - len(self.ids)))
        except minfer.KvFullError:
            return None

    # ---- rows -----------------------------------------------------------------------------------

    def _next(self, room: int) -> list[int]:
        """Makes the rows a beginning of the prompt and returns the tokens that are missing: one at
        least, whose logits pick the next."""
        wanted = self._fit(room, answering=True)
        keep = _common_prefix(self.rows, wanted[:-1])
        if keep < self._kept:  # another text than the one that the rows were kept for
            keep = min(keep, self._n_clean)
        self._keep(keep)
        return wanted[len(self.rows) :]

    @property
    def _n_clean(self) -> int:
        return len(self.rows) if self._cut is None else self._cut

    def _render(self, first: int, answering: bool) -> list[int]:
        """Tokens of the system prompt and of the messages from `first` on; then of what has been
        answered so far, if an answer is wanted."""
        system, said = self._n_system, self.ids if answering else []
        if self.template is None:
            tokenizer = self.engine.tokenizer
            bos = [tokenizer.bos] if tokenizer.adds_bos else []
            return bos + list(chain(*self._encoded[:system], *self._encoded[first:], said))
        messages = self.messages[:system] + self.messages[first:]
        if not messages:
            return []
        encode = self.template.encode
        return encode(self.engine.tokenizer, messages, add_generation_prompt=answering) + said

    def _fit(self, room: int, answering: bool) -> list[int]:
        """The rendering of what the context is to hold. Drops the oldest exchanges if less than
        `room` were left. KvFullError, and nothing is dropped, if it does not fit alone."""
        limit = self.engine.n_ctx
        wanted = self._render(self.first, answering)
        if len(wanted) + room <= limit:
            return wanted
        end = len(self.messages) - answering
        firsts = range(self.first + 2, end + 1, 2)
        short = wanted
        if firsts:
            at = bisect_left(
                firsts, True, key=lambda i: len(self._render(i, answering)) + room <= limit
            )
            first = firsts[min(at, len(firsts) - 1)]
            short = self._render(first, answering)
        if len(short) > limit:
            raise minfer.KvFullError(
                f"the prompt has {len(short)} tokens, the context {limit}; raise --n-ctx"
            )
        if firsts:
            dropped, self.first = (first - self.first) // 2, first
            self._drop(wanted, short, f"the oldest {dropped} exchange{'s'[: dropped > 1]}")
        return short

    def _drop(self, wanted: list[int], short: list[int], what: str) -> None:
        """Makes the rows of `wanted` such of `short`, which lacks some in the middle."""
        full = f"the context of {self.engine.n_ctx} tokens is full: "
        at, n = _common_prefix(wanted, short), len(wanted) - len(short)
        if wanted[at + n :] != short[at:]:
            reason = "the chat template writes the others differently without them"
        elif not self._keep(_common_prefix(self.rows, wanted)):
            reason = "a window has dropped rows that the others need"
        else:
            try:
                n_moved = self._rm(at, n)
                self.notice(f"{full}{what} cut out ({n} rows), {n_moved} rows moved down")
                return
            except (minfer.KvGoneError, minfer.UnsupportedError, minfer.KvFullError) as error:
                reason = str(error)
        self._keep(min(_common_prefix(self.rows, short), self._n_clean))
        n_again = len(short) - len(self.rows)
        self.notice(f"{full}{what} dropped, {n_again} tokens are read again ({reason})")

    def _rm(self, at: int, n: int) -> int:
        """Cuts n rows out; returns how many moved. Positions are row numbers: no edit leaves a
        gap."""
        n_moved = len(self.rows) - (at + n)
        if n_moved <= 0:
            self._keep(min(at, len(self.rows)))
            return 0
        self.engine.kv.rm(SEQ, at, at + n)
        self._cut = min(at, self._n_clean)
        del self.rows[at : at + n]
        self._kept = len(self.rows)
        return n_moved

    def _keep(self, n: int) -> bool:
        """Drops all rows but the first n; all of them, and returns False, where a window has
        dropped what those would need."""
        drop, kept = len(self.rows) - n, True
        if drop:
            try:
                if n:
                    self.engine.kv.trim(SEQ, drop)
                else:
                    self.engine.kv.free(SEQ)
            except minfer.KvGoneError:
                self.engine.kv.free(SEQ)
                n, kept = 0, False
        self.rows = self.rows[:n]
        self._kept = min(self._kept, n)
        if self._cut is not None and self._cut >= n:
            self._cut, self._kept = None, 0
        return kept

    def _read(self, wanted: list[int]) -> None:
        """Appends what the rows lack of a text that they begin."""
        missing = wanted[len(self.rows) :]
        if not missing:
            return
        try:
            with self.reading(len(missing)):
                self.engine.forward_cached(missing, SEQ, logits="none")
        finally:
            self.rows = wanted[: self.engine.kv.len(SEQ)]

    # ---- files ----------------------------------------------------------------------------------

    def save(self, path: str) -> None:
        """Writes the messages to a file, and the cache beside it. Each is replaced as a whole;
        between the two, the cache is one of another history and will not be used."""
        self._settle()
        data = _history_bytes(self.messages)
        replace_file(path, data)
        state = _State(
            version=SNAPSHOT_VERSION,
            history=_digest(data),
            template=self._template_digest(),
            messages=self.messages,
            encoded=self._encoded,
            first=self.first,
            rows=self.rows,
            position=self.engine.kv.next_pos(SEQ),
            cut=self._n_clean,
            kept=self._kept,
            sampling=self.sampling,
        )
        self.engine.kv_save(cache_path(path), state.to_bytes(), seqs=[SEQ])

    def restore(self, path: str, history: "History") -> bool:
        """Takes up what `save` wrote: with the rows if the cache beside the file is that of this
        history and engine; else the reason is noticed and the history is read again. Returns
        whether the rows were restored."""
        cache = cache_path(path)
        try:
            state = self._load(cache, history)
        except (minfer.Error, _MismatchError) as error:
            reason = str(error) if isinstance(error, minfer.Error) else f"{cache}: {error}"
            self._read_again(history.messages, " ".join(reason.split()))
            return False
        self.messages, self._encoded = state.messages, state.encoded
        self.first, self.rows, self._kept = state.first, state.rows, state.kept
        self._cut = state.cut if state.cut < len(state.rows) else None
        self.notice(f"{cache}: {len(self.rows)} rows restored, nothing read again")
        if state.sampling != self.sampling:
            self.notice("the sampler's settings are not those of the saved conversation")
        return True

    def _load(self, cache: str, history: "History") -> "_State":
        """Leaves the sequence empty if it fails."""
        kv = self.engine.kv
        data = self.engine.kv_load(cache, seqs=[SEQ])
        try:
            state = _State.from_bytes(data)
            state.check(self.engine.n_vocab, kv.len(SEQ), kv.next_pos(SEQ))
            if state.template != self._template_digest():
                raise _MismatchError("it was made with another chat template, or without one")
            if state.history != history.digest or state.messages != history.messages:
                raise _MismatchError("the history has been changed since")
        except BaseException:
            kv.free(SEQ)
            raise
        return state

    def _read_again(self, messages: Messages, reason: str) -> None:
        self.messages = [dict(message) for message in messages]
        self._encoded = [self._encode(message["content"]) for message in messages]
        self.first = self._n_system
        if not messages:
            self.notice(f"not resumed: {reason}")
            return
        wanted = self._fit(0, answering=False)
        self.notice(f"not resumed, {len(wanted)} tokens of the history are read again: {reason}")
        self._read(wanted)

    def _template_digest(self) -> str:
        return "" if self.template is None else _digest(self.template.source.encode())


def _common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


# ---- the history ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class History:
    """The messages of a file, and what tells whether it has been changed."""

    messages: Messages
    digest: str


def cache_path(path: str) -> str:
    """The file beside a history that holds its cache."""
    return path + ".kv"


def read_history(path: str) -> History | None:
    """The history in a file; None if there is no file, or an empty one. OSError, FormatError."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return None
    if not data:
        return None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise minfer.FormatError(f"{path}: no conversation: {error}") from None
    if not isinstance(value, dict) or not isinstance(value.get("messages"), list):
        raise minfer.FormatError(f'{path}: no conversation: it has no list "messages"')
    if value.get("version") != HISTORY_VERSION:
        raise minfer.FormatError(
            f"{path}: version {value.get('version')!r:.40}; this minfer reads {HISTORY_VERSION}"
        )
    problem = _problem(value["messages"])
    if problem:
        raise minfer.FormatError(f"{path}: {problem}")
    messages = [{key: m[key] for key in ("role", "content")} for m in value["messages"]]
    return History(messages, _digest(data))


def _problem(messages: list) -> str:
    """What is wrong with messages; "" for nothing."""
    roles = ("user", "assistant")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            return f'messages[{i}] is no object with a "content"'
        try:
            message["content"].encode()
        except UnicodeEncodeError:
            return f"messages[{i}] has a lone surrogate; it is not a character"
        if i == 0 and message.get("role") == "system":
            roles = ("assistant", "user")
        elif message.get("role") != roles[i % 2]:
            return f"messages[{i}] is of {message.get('role')!r:.40}; it must be of {roles[i % 2]}"
    if messages and messages[-1]["role"] == "user":
        return f"messages[{len(messages) - 1}] has no answer"
    return ""


def _history_bytes(messages: Messages) -> bytes:
    value = {"version": HISTORY_VERSION, "messages": messages}
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def replace_file(path: str, data: bytes) -> None:
    """Writes a file; whenever it is stopped, the old one or the new one is there, whole."""
    with replacing(path) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: str) -> Iterator[BinaryIO]:
    """An empty file beside `path` that is renamed to it at the end of the `with` block, and removed
    if that fails. Removes what stopped processes have left."""
    path = os.path.abspath(path)
    folder, name = os.path.split(path)
    _sweep(folder, name)
    temporary = f"{path}.tmp-{os.getpid()}"
    with open(temporary, "xb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _sweep(folder: str, name: str) -> None:
    """Removes temporary files of processes that are gone, and of this one."""
    for entry in os.listdir(folder):
        found = re.fullmatch(re.escape(name) + r"\.tmp-([0-9]{1,9})", entry)
        if found and not _runs(int(found[1])):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, entry))


def _runs(pid: int) -> bool:
    """Whether another process with that number runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # it is someone else's
    return pid != os.getpid()


# ---- the state beside the cache ------------------------------------------------------------------


class _MismatchError(Exception):
    """Why a cache is not that of the history and this run."""


@dataclass(frozen=True)
class _State:
    """What lies beside the rows, as JSON."""

    version: int
    history: str  # digest of the history file
    template: str  # digest of the chat template, "" without one
    messages: Messages
    encoded: list[list[int]]  # tokens of each message, where there is no template
    first: int  # message that the context begins with, after the system prompt
    rows: list[int]  # tokens of the rows
    position: int  # of the next row
    cut: int  # rows that are exactly what their tokens make
    kept: int  # rows that a cut has left
    sampling: dict[str, Any]

    def to_bytes(self) -> bytes:
        return json.dumps(self.__dict__, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "_State":
        """_MismatchError names what it cannot be."""
        try:
            value = json.loads(data)
            json.dumps(value, allow_nan=False)  # JSON has no NaN and no infinity
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict) or "version" not in value:
            raise _MismatchError("it is not the cache of a conversation")
        if value["version"] != SNAPSHOT_VERSION or isinstance(value["version"], bool):
            raise _MismatchError(
                f"snapshot version {value['version']!r:.40}; this minfer reads {SNAPSHOT_VERSION}"
            )
        for field in fields(cls):
            given = value.get(field.name)
            wanted = getattr(field.type, "__origin__", field.type)
            if type(given) is not wanted:
                raise _MismatchError(
                    f"{field.name} is {given!r:.40}, not of type {wanted.__name__}"
                )
        return cls(**{field.name: value[field.name] for field in fields(cls)})

    def check(self, n_vocab: int, n_rows: int, position: int) -> None:
        """_MismatchError if it contradicts itself or the cache."""
        problem = _problem(self.messages)
        if problem:
            raise _MismatchError(problem)
        system = int(bool(self.messages) and self.messages[0]["role"] == "system")
        for name, ids in [("rows", self.rows), *(("encoded", ids) for ids in self.encoded)]:
            tokens = isinstance(ids, list) and all(type(token) is int for token in ids)
            if not tokens or not all(0 <= token < n_vocab for token in ids):
                raise _MismatchError(f"{name} has what is no token")
        for name, right in (
            ("rows", len(self.rows) == n_rows),
            ("position", self.position == position == n_rows),
            ("encoded", len(self.encoded) == len(self.messages)),
            ("first", system <= self.first <= len(self.messages)),
            ("first", (self.first - system) % 2 == 0),
            ("cut", 0 <= self.cut <= n_rows),
            ("kept", 0 <= self.kept <= n_rows),
        ):
            if not right:
                raise _MismatchError(f"{name} contradicts the rest of the state")


def state_summary(data: bytes) -> dict[str, Any] | None:
    """What `save` put beside the rows, in brief; None if it is something else."""
    try:
        state = _State.from_bytes(data)
    except _MismatchError:
        return None
    return {
        "version": state.version,
        "messages": len(state.messages),
        "tokens": len(state.rows),
        "sampling": state.sampling,
    }
