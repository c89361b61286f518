"""The inside of a process that `minfer bench` measures in: it answers questions with numbers.

Imports nothing of minfer, so that the interpreter of the peer can use it too.
"""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any


def serve(calls: dict[str, Callable[..., Any]]) -> None:
    """Answers each line of stdin, the name of a call and its arguments, with a line of JSON: what
    the call returns, or {"error": why it does not}."""
    for line in sys.stdin:
        name, *words = line.split()
        try:
            answer = calls[name](*words)
        except Exception as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


def tokens(first: int, n: int, n_vocab: int) -> Iterator[int]:
    """What is measured: no text, and the same for all sides."""
    return ((first + i) * 7919 % n_vocab for i in range(n))


def forget_peak() -> None:
    """From here on peak_bytes counts anew."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass  # not allowed everywhere: then the peak is that of the whole process


def peak_bytes() -> int | None:
    """Most memory that the process had at a time; None where the system does not say."""
    try:
        with open("/proc/self/status") as file:
            return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return None
