"""Chat templates: messages to prompt text, and to token ids.

Owns the life of the process that runs the template (`chat_worker.py`) and the rule that text in a
message never becomes a control token. Refuses templates over MAX_SOURCE bytes, and whatever the
worker refuses: more than 2 s, 512 MB or 4 Mi characters of output. Invariant: after any
exception the worker is gone or ready; the next call starts from a clean state.

How content stays text. Before rendering, a *joint*, a character that occurs nowhere in the messages
or the template, is put before and after each character of the messages that can begin a control
token. No token spans a joint, and `Tokenizer` takes it out once control tokens have been found. So
a template may trim, split, join, cut, replace or turn round what it was given: no control token
comes from it. (One that turns other characters into the first of a control token is not covered.)

Joints hide content from a template that looks into it, as in `'</think>' in content`. So it is
rendered without joints too; if the two differ, then with joints only where a control token is
spelled out. That text is used if it equals the plain one and has the same control tokens as the
first; else the first stands, and the template has not seen what it looked for. Where that happens,
a template that encodes its input (urlencode) shows the joints encoded.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from minfer.bpe import Scanner
from minfer.errors import ArgumentError, ArgumentTypeError, FormatError, UnsupportedError
from minfer.tokenizer import Tokenizer

MAX_SOURCE = 1 << 20  # bytes
MAX_INPUT = 64 << 20  # bytes of messages as JSON
_WORKER = Path(__file__).with_name("chat_worker.py")
_NONCHARACTERS = range(0xFDD0, 0xFDF0)  # code points that Unicode promises never to assign
_PRIVATE = range(0x100000, 0x10FFFE)

Message = Mapping[str, Any]


class ChatTemplate:
    """A model's chat template. Safe to share between threads; one process stands behind it.

    It is rendered as Hugging Face models expect: jinja2, `trim_blocks` and `lstrip_blocks`, with
    `messages`, `add_generation_prompt`, `bos_token`, `eos_token`, `raise_exception`,
    `strftime_now`, `tojson`, `{% generation %}` and loop controls.
    """

    def __init__(
        self, source: str, bos_token: str = "", eos_token: str = "", name: str = "chat template"
    ) -> None:
        """`source`: the template; `name`: whose it is, for messages. The worker process is started
        but not waited for. Raises FormatError for one that is too large or not text."""
        try:
            size = len(source.encode())
        except UnicodeEncodeError:
            raise FormatError(f"{name}: tokenizer.chat_template is not UTF-8") from None
        if size > MAX_SOURCE:
            raise FormatError(
                f"{name}: tokenizer.chat_template has {size} bytes; at most {MAX_SOURCE}"
            )
        self.source = source
        self._name = name
        self._first = {"template": source, "bos_token": bos_token, "eos_token": eos_token}
        self._lock = threading.Lock()
        self._worker = _Worker(self._first)

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        """The prompt text. `messages`: dicts with "role" and "content"; `extra`: more variables,
        such as `tools`. All must be what JSON can hold.

        Raises ArgumentError if the template refuses the messages, and FormatError if it fails or
        exceeds a limit. Text in content that looks like a control token cannot be told from the
        template's own in the result: for token ids use `encode`."""
        messages = _checked(messages)
        return self._render({**extra, "messages": messages}, add_generation_prompt)

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        add_bos: bool = True,
        **extra: Any,
    ) -> list[int]:
        """Token ids of the prompt: the template's control tokens are parsed, those spelled out in
        messages stay text. `add_bos` adds the first token if the model wants one and the template
        has not written it. Raises as `render` and `Tokenizer.encode` do."""
        variables = {**extra, "messages": _checked(messages)}
        text, joint = self._jointed(tokenizer, variables, add_generation_prompt)
        ids = list(tokenizer._encode(text, True, joint))
        if add_bos and tokenizer.adds_bos and ids[:1] != [tokenizer.bos]:
            ids.insert(0, tokenizer.bos)
        return ids

    def close(self) -> None:
        """Ends the worker process; a later call starts another. Garbage collection does it too."""
        with self._lock:
            self._worker.end()

    def _jointed(
        self, tokenizer: Tokenizer, variables: dict, add_generation_prompt: bool
    ) -> tuple[str, str]:
        """The prompt with joints, and the joint; see the head of this file."""
        scanner = tokenizer.controls
        joint = _unused_character([self.source, json.dumps(variables, ensure_ascii=False)])
        plain = self._render(variables, add_generation_prompt)

        def with_joints(mark: Callable[[str], str]) -> str:
            changed = {name: _map_text(value, mark) for name, value in variables.items()}
            return plain if changed == variables else self._render(changed, add_generation_prompt)

        safe = with_joints(lambda text: _surround(text, scanner.firsts(text), joint))
        if safe.replace(joint, "") == plain:
            return safe, joint
        sparse = with_joints(lambda text: _break(text, scanner.starts(text), joint))
        if sparse.replace(joint, "") == plain and _controls(scanner, sparse) == _controls(
            scanner, safe
        ):
            return sparse, joint
        return safe, joint

    def _render(self, variables: dict, add_generation_prompt: bool) -> str:
        variables = {**variables, "add_generation_prompt": bool(add_generation_prompt)}
        try:
            request = json.dumps(variables, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ArgumentError(
                "messages contain a lone surrogate; it is not a character"
            ) from None
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(f"messages must be what JSON can hold: {error}") from None
        if len(request) > MAX_INPUT:
            raise ArgumentError(f"messages have {len(request)} bytes; at most {MAX_INPUT}")
        with self._lock:
            if not self._worker.usable():
                self._worker = _Worker(self._first)
            answer = self._worker.ask(request)
        if "text" in answer:
            return answer["text"]
        if "refused" in answer:
            raise ArgumentError(
                f"{self._name}: the chat template refuses these messages: {answer['refused']}"
            )
        problem = " ".join(str(answer["error"]).split())[:300]
        raise FormatError(f"{self._name}: tokenizer.chat_template {problem}")


def template_of(meta: Mapping[str, Any], tokenizer: Tokenizer | None = None) -> ChatTemplate | None:
    """The template of a GGUF file's metadata, or None for a base model, which has none.
    `tokenizer`: the file's, if it is at hand; else the names of `bos` and `eos` are read again.

    Raises FormatError if `tokenizer.chat_template` is not a string, or too long."""
    template = meta.get("tokenizer.chat_template")
    if template is None:
        return None
    source = str(getattr(meta, "path", "metadata"))
    if not isinstance(template, str):
        kind = type(template).__name__
        raise FormatError(f"{source}: tokenizer.chat_template is a {kind}; must be a string")
    tokenizer = tokenizer or Tokenizer.from_metadata(meta, source)
    bos, eos = (
        "" if token is None else tokenizer.token_bytes(token).decode("utf-8", "replace")
        for token in (tokenizer.bos, tokenizer.eos)
    )
    return ChatTemplate(template, bos, eos, source)


class _Worker:
    """One process of `chat_worker.py`. Not thread-safe."""

    def __init__(self, first: Mapping[str, str]) -> None:
        if not sys.executable:
            raise UnsupportedError("chat templates need sys.executable: run under a Python program")
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the host
        )
        self._end = weakref.finalize(self, _end, self._process, self._owner)
        path = [os.path.abspath(entry) for entry in sys.path if entry]
        try:
            self._send(json.dumps({**first, "path": path}).encode())
        except OSError:
            pass  # it died at once; ask() will say so

    def usable(self) -> bool:
        """Whether it runs, and was not inherited through a fork (its answers would be shared)."""
        return self._end.alive and self._owner == os.getpid() and self._process.poll() is None

    def ask(self, request: bytes) -> dict:
        """Sends variables, returns the answer; the kernel bounds how long the worker takes."""
        try:
            self._send(request)
            answer = self._receive()
        except OSError:
            answer = None
        except BaseException:  # an interrupt: a later answer must not be taken for another's
            self.end()
            raise
        if answer is None:
            return {"error": self._epitaph()}
        return answer

    def end(self) -> None:
        self._end()

    def _send(self, data: bytes) -> None:
        self._process.stdin.write(struct.pack("<I", len(data)) + data)
        self._process.stdin.flush()

    def _receive(self) -> dict | None:
        head = self._process.stdout.read(4)
        if len(head) < 4:
            return None
        (size,) = struct.unpack("<I", head)
        data = self._process.stdout.read(size)
        return json.loads(data) if len(data) == size else None

    def _epitaph(self) -> str:
        """Why the worker is gone."""
        import signal

        self._end()
        code = self._process.returncode
        if code == -signal.SIGALRM:
            return "takes longer than 2 s"
        return f"ends its process (status {code}); it needs too much memory or nesting"


def _end(process: subprocess.Popen, owner: int) -> None:
    if owner != os.getpid():
        return
    try:
        process.stdin.close()
    except OSError:
        pass  # what was left to write has no reader
    if process.poll() is None:
        process.kill()
    process.wait()
    process.stdout.close()


def _checked(messages: Sequence[Message]) -> list[dict]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ArgumentTypeError(f"messages must be a list of dicts, not {type(messages).__name__}")
    for message in messages:
        if not isinstance(message, Mapping):
            raise ArgumentTypeError(f"a message must be a dict, not {type(message).__name__}")
    return [dict(message) for message in messages]


def _unused_character(texts: Iterable[str]) -> str:
    used = set().union(*texts)
    for code in (*_NONCHARACTERS, *_PRIVATE):
        if chr(code) not in used:
            return chr(code)
    raise ArgumentError("messages use every private character of Unicode")


def _surround(text: str, places: Iterable[int], joint: str) -> str:
    """A joint before and after each of the places: a template may turn text round."""
    pieces, done = [], 0
    for at in places:
        pieces += [text[done:at], text[at]]
        done = at + 1
    return joint.join([*pieces, text[done:]])


def _break(text: str, places: Iterable[int], joint: str) -> str:
    """A joint after each of the places."""
    pieces, done = [], 0
    for at in places:
        pieces.append(text[done : at + 1])
        done = at + 1
    return joint.join([*pieces, text[done:]])


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every string in it changed, the keys of objects too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_text(k, change): _map_text(item, change) for k, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_text(item, change) for item in value]
    return value


def _controls(scanner: Scanner, text: str) -> list[int]:
    return [token for token in scanner.split(text) if isinstance(token, int)]
