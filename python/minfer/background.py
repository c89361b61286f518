"""Calls into C that run in a thread of their own, so that Python goes on living meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

Progress = Callable[[str, int, int], None]  # what is done, bytes done, bytes in all


def start(call: Callable[[], Any]) -> queue.SimpleQueue:
    """Starts `call` in a thread of its own; the queue gets (result, error) when it ends."""
    done: queue.SimpleQueue = queue.SimpleQueue()

    def work() -> None:
        try:
            done.put((call(), None))
        except BaseException as error:
            done.put((None, error))

    threading.Thread(target=work, daemon=True, name="minfer").start()
    return done


def watched(call, what: str, so_far: Callable[[], tuple[int, int]], progress, must_end=False):
    """Runs `call` and tells `progress` about twenty times a second what `so_far` says: bytes done,
    bytes in all. Without a `progress` it only waits. Interrupted by Ctrl-C, a call that `must_end`
    is waited for first: nobody could tell later what it has changed."""
    if must_end and not progress:
        return call()
    done = start(call)
    while True:
        try:
            try:
                result, error = done.get(timeout=0.05 if progress else None)
                break
            except queue.Empty:
                progress(what, *so_far())
        except BaseException:
            if must_end:
                done.get()
            raise
    if error is not None:
        raise error
    return result
