"""What people see: progress on stderr, and text that cannot take over their terminal."""

import sys
import threading

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

BAR_DELAY = 0.5  # seconds; what is over sooner shows no bar


class Bar:
    """A progress bar on stderr while a `with` block runs, if that is a terminal and the block slow.

    Called with (what, done, total) it moves on; until then it only shows that something happens.
    """

    def __init__(self, what: str) -> None:
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task(what, total=None)
        self._timer = threading.Timer(BAR_DELAY, self._bar.start)

    def __call__(self, what: str, done: int, total: int) -> None:
        self._bar.update(self._task, description=what, completed=done, total=total)

    def __enter__(self) -> "Bar":
        self._timer.start()
        return self

    def __exit__(self, *_) -> None:
        self._timer.cancel()
        self._timer.join()
        self._bar.stop()


def printable(text: str) -> str:
    """Text without control characters but tab and newline: models may emit escape sequences."""
    return "".join(c for c in text if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f"))


def one_line(text: str, most: int = 60) -> str:
    """Text that came from a file, cut to a length that a line has room for."""
    text = " ".join(printable(text).split())
    return text if len(text) <= most else text[: most - 3] + "..."


def count(n: int, what: str) -> str:
    """3 and "row" as "3 rows"."""
    return f"{n:,} {what}{'s'[: n != 1]}"


def say(text: str) -> None:
    """A line on stderr."""
    print(printable(text), file=sys.stderr, flush=True)


def size(n_bytes: float) -> str:
    """253113024 as "253.1 MB"."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if n_bytes < 1000:
            break
        n_bytes /= 1000
    else:
        unit = "TB"
    return f"{n_bytes:.0f} bytes" if unit == "bytes" else f"{n_bytes:.1f} {unit}"
