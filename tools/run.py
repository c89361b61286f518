"""minfer run and minfer chat: a streamed answer to one prompt, or a conversation."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import minfer
from minfer.tools import render
from minfer.tools.conversation import Conversation, read_history

INTERRUPTED = 130  # exit status


def main(args) -> int:
    """Runs the subcommand; returns the exit status."""
    prompt = args.prompt
    if prompt is None and not args.cnv:
        if sys.stdin.isatty():
            args.cnv = True
        elif args.session is None:
            prompt = sys.stdin.read().removesuffix("\n")
    if args.cnv and args.json:
        args.usage_error("--json is for one answer; give a prompt and leave --cnv out")
    if args.session is not None and not args.cnv:
        args.usage_error("--session is for a conversation; add --cnv")
    if args.session == "":
        args.usage_error("--session needs the name of a file")
    if prompt is not None:
        _require_utf8(prompt)
    history = None
    if args.session is not None:
        history = read_history(args.session)
        _require_folder(args.session)
    with render.Bar(f"loading {args.model}") as bar:
        engine = minfer.load(
            args.model,
            n_ctx=args.n_ctx,
            threads=args.threads,
            cache_type=args.cache_type,
            progress=bar,
        )
    if engine.n_ctx > engine.n_ctx_train > 0:
        render.say(
            f"a context of {engine.n_ctx} tokens is more than the {engine.n_ctx_train} that the"
            " model was trained for; beyond them its answers get worse"
        )
    with engine:
        talk = conversation(engine, args)
        if not args.cnv:
            return _answer_once(talk, prompt, args)
        if history is not None:
            talk.restore(args.session, history)
        return Chat(talk, args.session).run(prompt)


def conversation(engine: minfer.Engine, args) -> Conversation:
    """An empty one, as the arguments want it."""
    return Conversation(
        engine,
        dict(
            temperature=args.temp,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            repeat_penalty=args.repeat_penalty,
            seed=args.seed,
        ),
        args.n,
        use_template=not args.no_template,
        notice=render.say,
        reading=lambda n: render.Bar(f"reading {n} tokens"),
    )


def _answer_once(talk: Conversation, prompt: str, args) -> int:
    text, status = "", 0
    try:
        for piece in talk.answer(prompt):
            text += piece
            if not args.json:
                print(render.printable(piece), end="", flush=True)
    except KeyboardInterrupt:
        talk.finish, status = "interrupted", INTERRUPTED
    if args.json:
        print(json.dumps(_report(talk, text)))
    else:
        print()
        _summary(talk.engine)
    if talk.finish == "full":
        _say_full(talk.engine)
    return status


HELP = """\
/help         these lines
/save [FILE]  write the conversation to FILE and its cache to FILE.kv
/reset        forget all but the system prompt
/undo         take the last exchange back
/context      how full the context is
/exit         end, as Ctrl-D does"""


class Chat:
    """Turns and commands from stdin. `path`: of the session, written at the end; None: no session.

    On a terminal Ctrl-C ends an answer; at the prompt, and where stdin is none, the chat."""

    def __init__(self, talk: Conversation, path: str | None) -> None:
        self.talk = talk
        self.path = path
        self.on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda rest: render.say(HELP),
            "/save": self._save,
            "/reset": lambda rest: talk.reset(),
            "/undo": self._undo,
            "/context": self._context,
        }

    def run(self, prompt: str | None) -> int:
        """`prompt`: the first turn, if given. Returns the exit status."""
        status = 0
        try:
            for text in _turns(prompt, self.talk if self.on_terminal else None):
                if prompt is None and text.startswith("/"):
                    command, _, rest = text.strip().partition(" ")
                    if command in ("/exit", "/quit"):
                        break
                    self._obey(command, rest.strip())
                elif text.strip():
                    self._turn(text)
                prompt = None
        except KeyboardInterrupt:
            status = INTERRUPTED
        finally:
            if self.path is not None:
                self._write(self.path)
        return status

    def _turn(self, text: str) -> None:
        talk = self.talk
        try:
            _require_utf8(text)
            with contextlib.closing(talk.answer(text)) as pieces:
                for piece in pieces:
                    print(render.printable(piece), end="", flush=True)
        except KeyboardInterrupt:
            print()
            _summary(talk.engine)
            if not self.on_terminal:
                raise
            return
        except minfer.Error as error:
            if not self.on_terminal:
                raise
            render.say(" ".join(str(error).split()))
            return
        print()
        _summary(talk.engine)
        if talk.finish == "full":
            _say_full(talk.engine)

    def _obey(self, command: str, rest: str) -> None:
        if command not in self._commands:
            render.say(f"{command} is no command; /help lists them")
            return
        try:
            self._commands[command](rest)
        except (minfer.Error, OSError) as error:
            render.say(" ".join(str(error).split()))

    def _save(self, path: str) -> None:
        """Where no session has been named, the file becomes it."""
        target = path or self.path
        if target is None:
            render.say("no file: use /save FILE")
            return
        if target != self.path:
            read_history(target)  # another kind of file is refused, not replaced
        self._write(target)
        self.path = self.path or target
        render.say(f"saved {_exchanges(self.talk)} to {target}")

    def _write(self, path: str) -> None:
        """Not interrupted: a second Ctrl-C would leave a history and the cache of another."""
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with render.Bar(f"saving {path}"):
                self.talk.save(path)
        finally:
            signal.signal(signal.SIGINT, before or signal.SIG_DFL)

    def _undo(self, rest: str) -> None:
        if not self.talk.undo():
            render.say("nothing to take back")

    def _context(self, rest: str) -> None:
        talk = self.talk
        render.say(
            f"{len(talk.rows)} of {talk.engine.n_ctx} rows in use; {_exchanges(talk)},"
            f" {talk.n_dropped} no longer in the context;"
            f" session: {self.path or 'none (/save FILE makes one)'}"
        )


def _exchanges(talk: Conversation) -> str:
    n = talk.n_exchanges
    return f"{n} exchange" if n == 1 else f"{n} exchanges"


def _require_folder(path: str) -> None:
    """Better now than after a long conversation."""
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise minfer.FileError(f"{path}: no file can be made in {folder}; name another")


def _require_utf8(prompt: str) -> None:
    """Bytes of arguments and of stdin that are no text arrive as lone surrogates."""
    try:
        prompt.encode("utf-8", "surrogateescape").decode()
    except UnicodeDecodeError as error:
        raise minfer.ArgumentError(
            f"the prompt is not UTF-8 (byte {error.object[error.start]:#04x} at {error.start});"
            " convert it"
        ) from None


def _say_full(engine: minfer.Engine) -> None:
    render.say(f"the context of {engine.n_ctx} tokens is full; raise --n-ctx")


def _turns(first: str | None, talk: Conversation | None) -> Iterator[str]:
    """What the person says: `first` if given, then lines until Ctrl-D or the end of stdin. With
    line editing if `talk` is given; it begins with what was said in it."""
    if first is not None:
        yield first
    if talk is None:
        for line in sys.stdin:
            yield line.removesuffix("\n")
        return
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import InMemoryHistory

    said = [message["content"] for message in talk.messages if message["role"] == "user"]
    session: PromptSession[str] = PromptSession(history=InMemoryHistory(said))
    while True:
        try:
            yield session.prompt("> ")
        except EOFError:
            return


def _rates(stats: minfer.Stats) -> dict[str, dict[str, Any]]:
    def rate(tokens: int, seconds: float) -> dict[str, Any]:
        per_second = tokens / seconds if seconds else 0.0
        return {"tokens": tokens, "seconds": seconds, "tokens_per_second": per_second}

    return {
        "prefill": rate(stats.prefill_tokens, stats.prefill_seconds),
        "decode": rate(stats.decode_tokens, stats.decode_seconds),
    }


def _summary(engine: minfer.Engine) -> None:
    parts = []
    for verb, rate in zip(("prefilled", "decoded"), _rates(engine.stats()).values()):
        parts.append(
            f"{verb} {rate['tokens']} tokens at {rate['tokens_per_second']:.1f} per second"
        )
    render.say(f"[{', '.join(parts)}]")


def _report(talk: Conversation, text: str) -> dict[str, Any]:
    engine = talk.engine
    return {
        "model": engine.metadata.path,
        "arch": engine.arch,
        "text": text,
        "tokens": talk.ids,
        "finish": talk.finish,
        **_rates(engine.stats()),
        "kv_format": engine.kv_format,
        "isa": engine.isa,
        "threads": engine.n_threads,
    }
