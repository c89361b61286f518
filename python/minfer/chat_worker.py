"""The process in which chat templates run. Started by `chat.py` as a script, never imported.

A template is a program from a file of unknown origin, and Python cannot interrupt one that doubles
a string forty times. So it runs here: in jinja2's immutable sandbox, without a loader, and in a
process that has given up the right to write files, to start processes and to use more than
MEMORY bytes, and that the kernel ends when a request takes longer than SECONDS.

Protocol: on stdin and stdout, frames of a 4-byte little-endian length and that many bytes of JSON.
The first frame is `{"path": sys.path, "template", "bos_token", "eos_token"}`; every later one holds
the template's variables, and is answered by `{"text"}`, `{"refused"}` (the template called
raise_exception) or `{"error"}`.
"""

import json
import signal
import struct
import sys

SECONDS = 2.0
MEMORY = 512 << 20
MAX_OUTPUT = 4 << 20  # characters


def main() -> None:
    """Serves frames until stdin ends."""
    first = read_frame()
    if first is None:
        return
    sys.path[:] = first.pop("path")
    try:
        import jinja2.ext
        import jinja2.sandbox  # noqa: F401 - here, so that it counts against no limit
    except ImportError as error:
        first = {"missing": str(error)}
    give_up_rights()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the host may ignore or block it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    renderer = None
    while (variables := read_frame()) is not None:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)  # SIGALRM ends the process
        try:
            if "missing" in first:
                raise ImportError(first["missing"])
            if renderer is None:
                renderer = Renderer(**first)
            answer = renderer.render(variables)
        except MemoryError:
            answer = {"error": f"needs more than {MEMORY >> 20} MB of memory"}
        except RecursionError:
            answer = {"error": "is nested too deeply, or calls itself without end"}
        except Exception as error:
            answer = {"error": f"fails: {type(error).__name__}: {error}"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_frame(answer)


def give_up_rights() -> None:
    """No files to write, no processes to start, bounded memory: for good."""
    import resource

    for name, limit in (
        ("RLIMIT_FSIZE", 0),
        ("RLIMIT_NPROC", 0),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_AS", MEMORY),
    ):
        try:
            resource.setrlimit(getattr(resource, name), (limit, limit))
        except (AttributeError, ValueError, OSError):
            continue  # this system has no such limit; the sandbox and the clock remain


class Renderer:
    """One compiled template."""

    def __init__(self, template: str, bos_token: str, eos_token: str) -> None:
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(jinja2.ext.Extension):
            """`{% generation %}` marks a model's text, for training; here it changes nothing."""

            tags = {"generation"}

            def parse(self, parser):
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        env = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, "jinja2.ext.loopcontrols"],
        )
        del env.globals["lipsum"]
        env.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
        env.filters["tojson"] = to_json
        self._template = env.from_string(template)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(self, variables: dict) -> dict:
        pieces, size = [], 0
        try:
            for piece in self._template.generate(**{**self._tokens, **variables}):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_OUTPUT:
                    return {"error": f"gives more than {MAX_OUTPUT} characters"}
        except Refused as refusal:
            return {"refused": str(refusal)}
        return {"text": "".join(pieces)}


class Refused(Exception):
    """The template called raise_exception."""


def raise_exception(message: object) -> None:
    """How a template refuses messages that it cannot express."""
    raise Refused(str(message)[:500])


def strftime_now(fmt: str) -> str:
    """The local time in a strftime format."""
    from datetime import datetime

    return datetime.now().strftime(fmt)


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """JSON for a prompt: unlike jinja2's own it escapes nothing for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=tuple(separators) if separators else None,
        sort_keys=sort_keys,
    )


def read_frame() -> dict | None:
    """The next frame, or None at the end."""
    head = sys.stdin.buffer.read(4)
    if len(head) < 4:
        return None
    (size,) = struct.unpack("<I", head)
    return json.loads(sys.stdin.buffer.read(size))


def write_frame(answer: dict) -> None:
    """An answer; lone surrogates, which templates can make, become question marks."""
    data = json.dumps(answer, ensure_ascii=False).encode("utf-8", "replace")
    sys.stdout.buffer.write(struct.pack("<I", len(data)) + data)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
