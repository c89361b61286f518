"""The command `minfer`: parses arguments, runs a subcommand, turns errors into one line.

Exit status: 0, 1 for an error, 2 for wrong usage, 130 after Ctrl-C. As with diff(1), `session diff`
has 1 for files that differ, and 2 for an error.
"""

import argparse
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import minfer


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    args = None
    try:
        _prepare_streams()
        args = _parse(sys.argv[1:] if argv is None else argv)
        status = import_module(f"minfer.tools.{args.module}").main(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads what is left
        return _error_status(args)
    except (minfer.Error, OSError, MemoryError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"minfer: {message}", file=sys.stderr)
        return _error_status(args)


def _error_status(args: argparse.Namespace | None) -> int:
    return getattr(args, "error_status", 1)


def _prepare_streams() -> None:
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, mode))
    for stream, errors in (
        (sys.stdin, "surrogateescape"),  # judged where it is used
        (sys.stdout, "replace"),  # a terminal that lacks a character is no error
        (sys.stderr, "replace"),
    ):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors=errors)


def _parse(argv: list[str]) -> argparse.Namespace:
    """The arguments; an optional one may stand after options too, where argparse leaves it over."""
    if argv[:2] in (["bench", "kv"], ["bench", "model"], ["bench", "session"]):
        argv = [" ".join(argv[:2]), *argv[2:]]  # argparse picks a command by one word
    args, left = _parser().parse_known_args(argv)
    words = argv[argv.index("--") + 1 :] if "--" in argv else []  # no options, whatever they are
    options = [word for word in left if word.startswith("-") and word != "--"]
    for word in words:
        if word in options:
            options.remove(word)
    left = [word for word in left if word != "--"]
    for name in ("prompt", "model"):
        if not options and len(left) == 1 and getattr(args, name, "") is None:
            setattr(args, name, left.pop())
    if left:
        args.usage_error(f"unrecognized arguments: {' '.join(options or left)}")
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minfer", description="Runs GGUF language models with a KV cache that can be trusted."
    )
    parser.add_argument("--version", action="version", version=f"minfer {minfer.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = _command(commands, "run", "run", "answer a prompt, or talk (--cnv)")
    _add_run(run)
    run.add_argument("--cnv", action="store_true", help="a conversation, until Ctrl-D")
    chat = _command(commands, "chat", "run", "the same as run --cnv")
    _add_run(chat)
    chat.set_defaults(cnv=True)

    info = _command(commands, "info", "info", "architecture, tensors, cache kinds and memory")
    _add_engine(info)

    _add_bench(commands)

    kv = _command(commands, "bench kv", "bench_kv", "measure the KV cache against its targets", "?")
    kv.epilog = _BENCH_KV
    _add_device(kv)
    kv.add_argument(
        "--rows",
        type=_bench_rows,
        default=16384,
        metavar="N",
        help="of the longest prefix; arenas and other rows are in proportion (16384)",
    )
    kv.add_argument(
        "-r", type=_positive, default=5, metavar="N", help="rounds; medians are shown (5)"
    )

    _add_bench_model(commands)
    _add_bench_session(commands)
    _add_session(commands)
    return parser


def _add_bench(commands) -> None:
    bench = _command(commands, "bench", "bench", "measure how fast a model is read and continued")
    formats = [str(name) for name in minfer.KvFormat]
    for flag, of, default, about in (
        ("-p", _positive, 512, "prompt tokens (512)"),
        ("-n", _positive, 128, "decoded tokens (128)"),
        ("-d", _list_of(_natural), [0], "tokens in the cache before either (0)"),
        ("-b", _list_of(_positive), [], "sequences that decode together, at depth 0 (none)"),
        ("-r", _positive, 5, "repetitions; medians are shown (5)"),
        ("--threads", _list_of(_positive), None, "default: one per core"),
        ("--n-ctx", _positive, None, "tokens the cache can hold, if more than is needed"),
    ):
        bench.add_argument(flag, type=of, default=default, metavar="N", help=about)
    bench.add_argument(
        "--cache-type",
        type=_list_of(_one_of(formats)),
        default=["auto"],
        metavar="TYPE",
        help=f"format of the KV cache: {', '.join(formats)}",
    )
    bench.add_argument("--json", action="store_true", help="one JSON object on stdout")
    bench.add_argument("--plot", type=_picture, metavar="OUT", help="draw it: a .png or .svg file")
    _add_peer(bench)
    bench.epilog = (
        "-d, -b, --threads and --cache-type take several values too: 0,4096. bench kv [MODEL]"
        " measures the KV cache, bench session [MODEL] saving and loading it, bench model OUT"
        " writes a model to measure. Files with these names are ./kv, ./session and ./model."
    )


_BENCH_KV = """
share and trim: one call, from Python, at several numbers of rows and of spans. defrag: half of 64
sequences slide down over the rows of the others; memmove: one call for as many bytes. decode: one
sequence in 40 runs of cells, with free cells behind each, and again after a defrag. bookkeeping:
what finding cells and windows costs while 64 sequences with rows of their own decode together.
Every ratio is of figures measured in turns. A missed target does not change the exit status.
"""

_BENCH_MODEL = """
Shapes: 1.1b is TinyLlama's, 0.5b that of Qwen2.5, tiny is for tests. Types: those of GGUF that
minfer reads, for every matrix, or Q4_K_M, which mixes Q4_K with Q6_K as llama.cpp does. The same
arguments give the same bytes. OUT must not exist. Needs gguf: pip install 'minfer[bench]'.
"""

_BENCH_SESSION = """
save: of one sequence that fills its context, under a new name; write: the same bytes written and
synchronised. load: into the same engine; read: the same file read into memory in use. The file is
in the page cache for both. verify: opens the file without an engine. --vs: save_state() and
load_state() with as many tokens, which keep the state in memory. Every ratio is of figures measured
in turns. A missed target does not change the exit status.
"""


def _command(
    commands, name: str, module: str, about: str, n_models: str | None = None
) -> argparse.ArgumentParser:
    command = _bare_command(commands, name, module, about)
    about = 'a GGUF file, or "demo"' + (" (the default)" if n_models else "")
    command.add_argument("model", nargs=n_models, metavar="MODEL", help=about)
    return command


def _bare_command(commands, name: str, module: str, about: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
    command.set_defaults(module=module, usage_error=command.error)
    return command


def _add_bench_model(commands) -> None:
    about = "write a model with random weights, to measure instead of a trained one"
    model = _bare_command(commands, "bench model", "bench_model", about)
    model.epilog = _BENCH_MODEL
    model.add_argument("out", metavar="OUT", help="the GGUF file to write")
    model.add_argument("--shape", default="1.1b", metavar="NAME", help="1.1b, 0.5b or tiny (1.1b)")
    model.add_argument(
        "--type", type=str.upper, default="Q8_0", metavar="TYPE", help="of the matrices (Q8_0)"
    )
    model.add_argument("--seed", type=_natural, default=0, metavar="S", help="of the weights (0)")
    for name, about in (
        ("n-layer", "layers"),
        ("n-embd", "width of the embedding"),
        ("n-head", "heads"),
        ("n-head-kv", "heads of keys and values"),
        ("head-dim", "width of a head"),
        ("n-ff", "width of the feed-forward network"),
        ("n-vocab", "tokens in the vocabulary"),
        ("n-ctx", "tokens in the context"),
    ):
        model.add_argument(f"--{name}", type=_positive, metavar="N", help=f"{about} (the shape's)")


def _add_bench_session(commands) -> None:
    session = _command(
        commands,
        "bench session",
        "bench_session",
        "measure saving and loading the KV cache against its targets",
        "?",
    )
    session.epilog = _BENCH_SESSION
    _add_device(session)
    session.add_argument(
        "--rows", type=_positive, default=16384, metavar="N", help="in the cache (16384)"
    )
    session.add_argument(
        "-r", type=_positive, default=5, metavar="N", help="rounds; medians are shown (5)"
    )
    session.add_argument(
        "--dir",
        default=".",
        metavar="DIR",
        help="where files are made and removed: on the disk whose speed matters (here)",
    )
    _add_peer(session)


def _add_session(commands) -> None:
    about = "look into the files in which sessions are saved"
    session = commands.add_parser("session", help=about, description="Look" + about[4:] + ".")
    commands = session.add_subparsers(required=True, metavar="COMMAND")

    inspect = _bare_command(commands, "inspect", "session", "show what is in a session file")
    verify = _bare_command(commands, "verify", "session", "verify every byte of a session file")
    diff = _bare_command(
        commands, "diff", "session_diff", "show the first difference of two session files"
    )
    diff.epilog = "Exit status: 0: equal byte for byte; 1: they differ; 2: an error."
    diff.set_defaults(error_status=2)
    plot = _bare_command(
        commands, "plot", "session_plot", "draw which sequences read which rows of a session file"
    )
    for command in (inspect, verify, diff, plot):
        command.add_argument("file", metavar="FILE", help="a session, as kv_save writes it")
    diff.add_argument("other", metavar="FILE", help="another")
    for command in (inspect, verify, diff):
        command.add_argument("--json", action="store_true", help="one JSON object on stdout")
    inspect.set_defaults(verify=False)
    verify.set_defaults(verify=True)
    plot.add_argument(
        "-o", dest="out", type=_picture, metavar="OUT", help="a .png or .svg file (FILE.png)"
    )


def _add_engine(command: argparse.ArgumentParser) -> None:
    command.add_argument("--n-ctx", type=_positive, metavar="N", help="tokens the cache can hold")
    _add_device(command)


def _add_device(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--cache-type",
        choices=[str(name) for name in minfer.KvFormat],
        help="format of the KV cache",
    )
    command.add_argument("--threads", type=_positive, metavar="N", help="default: one per core")
    command.add_argument("--json", action="store_true", help="one JSON object on stdout")


def _add_peer(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--vs", choices=["llama-cpp-python"], help="measure this in turns with minfer"
    )
    command.add_argument(
        "--vs-python", metavar="PATH", default=sys.executable, help="interpreter that can import it"
    )


def _add_run(command: argparse.ArgumentParser) -> None:
    command.add_argument("prompt", nargs="?", metavar="PROMPT", help="default: read from stdin")
    _add_engine(command)
    command.add_argument("-n", type=_natural, default=256, metavar="N", help="most tokens (256)")
    heat = command.add_mutually_exclusive_group()
    heat.add_argument("--temp", type=float, default=0.8, metavar="T", help="temperature (0.8)")
    heat.add_argument(
        "--greedy", dest="temp", action="store_const", const=0.0, help="always the likeliest token"
    )
    command.add_argument("--top-k", type=_natural, default=40, metavar="K", help="0: off (40)")
    command.add_argument("--top-p", type=float, default=0.95, metavar="P", help="1: off (0.95)")
    command.add_argument("--min-p", type=float, default=0.05, metavar="P", help="0: off (0.05)")
    command.add_argument(
        "--repeat-penalty", type=float, default=1.0, metavar="R", help="1: off (1)"
    )
    command.add_argument("--seed", type=_natural, default=0, metavar="S", help="of the sampler (0)")
    command.add_argument(
        "--no-template", action="store_true", help="do not use the model's chat template"
    )
    command.add_argument(
        "--session",
        metavar="FILE",
        help="of a conversation: goes on with it, and saves it at the end (the cache in FILE.kv)",
    )


def _picture(text: str) -> str:
    if not text.lower().endswith((".png", ".svg")):
        raise argparse.ArgumentTypeError(f"{text[-60:]!r} does not end in .png or .svg")
    return text


def _list_of(one: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [one(word) for word in text.split(",")]


def _one_of(words: list[str]) -> Callable[[str], str]:
    def one(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(f"{text!r:.60} is none of {', '.join(words)}")
        return text

    return one


def _natural(text: str) -> int:
    return _whole(text, 0)


def _positive(text: str) -> int:
    return _whole(text, 1)


def _bench_rows(text: str) -> int:
    return _whole(text, 1024)


def _whole(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r:.60} is not a whole number") from None
    if number < least:
        raise argparse.ArgumentTypeError(f"{number} is less than {least}")
    return number


if __name__ == "__main__":
    sys.exit(main())
