"""minfer run and minfer chat: a streamed answer to one prompt, or a conversation."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import minfer
from minfer.tools import render


def main(args) -> int:
    """Runs the subcommand; returns the exit status."""
    prompt = args.prompt
    if prompt is None and not args.cnv:
        if sys.stdin.isatty():
            args.cnv = True
        else:
            prompt = sys.stdin.read().removesuffix("\n")
    if args.cnv and args.json:
        args.usage_error("--json is for one answer; give a prompt and leave --cnv out")
    if prompt is not None:
        _require_utf8(prompt)
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
        talk = Talk(engine, args)
        if args.cnv:
            return _converse(talk, prompt)
        return _answer_once(talk, prompt, args)


class Talk:
    """A conversation in sequence 0. With a chat template every turn is rendered anew and the rows
    that still agree are kept; without one, turns are appended as plain text."""

    def __init__(self, engine: minfer.Engine, args) -> None:
        self.engine = engine
        self.args = args
        self.template = None if args.no_template else engine.chat_template
        self.messages: list[dict[str, str]] = []
        self.rows: list[int] = []  # tokens of the rows that the sequence holds
        self.ids: list[int] = []  # tokens of the last answer
        self.pending: list[int] = []  # those of them that have no row yet
        self.finish: str | None = None

    def answer(self, text: str) -> Iterator[str]:
        """Pieces of the answer to the next turn. KvFullError: the turn does not fit."""
        tokens = self._next_tokens(text)
        args, before = self.args, self.rows[:]
        pieces = self.engine.generate(
            tokens,
            max_tokens=args.n,
            temperature=args.temp,
            top_k=args.top_k,
            top_p=args.top_p,
            min_p=args.min_p,
            repeat_penalty=args.repeat_penalty,
            seed=args.seed,
        )
        said = ""
        try:
            with render.Bar(f"reading {len(tokens)} tokens"):
                piece = self._first(pieces, len(before) + len(tokens))
            while piece:
                said += piece
                yield piece
                piece = next(pieces, "")
        finally:
            self.ids, self.pending, self.finish = pieces.ids, pieces.pending, pieces.finish
            self.rows = (before + tokens + pieces.ids)[: self.engine.kv.len(0)]
            self.messages.append({"role": "assistant", "content": said})

    def _first(self, pieces: minfer.Generation, n_tokens: int) -> str:
        try:
            return next(pieces, "")
        except minfer.KvFullError:
            raise minfer.KvFullError(
                f"the prompt has {n_tokens} tokens, the context {self.engine.n_ctx}; raise --n-ctx"
            ) from None

    def _next_tokens(self, text: str) -> list[int]:
        self.messages.append({"role": "user", "content": text})
        if self.template is None:
            return self.pending + self.engine.tokenizer.encode(text, add_bos=not self.rows)
        wanted = self.template.encode(self.engine.tokenizer, self.messages)
        keep = _common_prefix(self.rows, wanted[:-1])
        drop = len(self.rows) - keep
        if drop > self.engine.kv.max_trim(0):
            self.engine.kv.free(0)
            keep = 0
        elif drop:
            self.engine.kv.trim(0, drop)
        self.rows = wanted[:keep]
        return wanted[keep:]


def _common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _answer_once(talk: Talk, prompt: str, args) -> int:
    text, status = "", 0
    try:
        for piece in talk.answer(prompt):
            text += piece
            if not args.json:
                print(render.printable(piece), end="", flush=True)
    except KeyboardInterrupt:
        talk.finish, status = "interrupted", 130
    if args.json:
        print(json.dumps(_report(talk, text)))
    else:
        print()
        _summary(talk.engine)
    if talk.finish == "full":
        _say_full(talk.engine)
    return status


def _converse(talk: Talk, prompt: str | None) -> int:
    """Ends where the turns do, or where the context is full: then no turn fits any more."""
    for text in _turns(prompt):
        if not text.strip():
            continue
        _require_utf8(text)
        first = not talk.rows
        try:
            for piece in talk.answer(text):
                print(render.printable(piece), end="", flush=True)
        except KeyboardInterrupt:
            print()
            _summary(talk.engine)
            return 130
        except minfer.KvFullError:
            if first:
                raise
            talk.finish = "full"
        else:
            print()
            _summary(talk.engine)
        if talk.finish == "full":
            _say_full(talk.engine)
            break
    return 0


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


def _turns(first: str | None) -> Iterator[str]:
    """What the person says: `first` if given, then lines until Ctrl-D or the end of stdin."""
    if first is not None:
        yield first
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield line.removesuffix("\n")
        return
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession()
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


def _report(talk: Talk, text: str) -> dict[str, Any]:
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
