"""The outside of a process that is measured in: bench_serve.py is its inside."""

import contextlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import minfer

PEER = "llama-cpp-python"


class Child:
    """A process that answers questions until it is closed. `hint` is what to do if it ends
    unasked."""

    def __init__(self, command: list[str], hint: str) -> None:
        self._name, self._hint = Path(command[0]).name, hint
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )

    def ask(self, *words: str | int) -> Any:
        """The answer."""
        try:
            self._process.stdin.write(" ".join(map(str, words)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # then there is no answer either
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            last = self._log.read().strip().rpartition("\n")[2]
            status = self._process.wait()
            ended = f"{self._name} ended with status {status}"
            raise minfer.NotFoundError(f"{ended} ({last}){self._hint}")
        answer = json.loads(line)
        if isinstance(answer, dict) and "error" in answer:
            raise minfer.ArgumentError(answer["error"])
        return answer

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):  # of a question that it ended before reading
            self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()


def ours(path: str) -> Child:
    """minfer with a model, in a process of its own."""
    return Child([sys.executable, "-m", "minfer.tools.bench_worker", path], "")


def peer(python: str, mode: str, path: str) -> Child:
    """llama-cpp-python with a model; bench_peer.py says what it can be asked in each mode."""
    script = str(Path(__file__).with_name("bench_peer.py"))
    hint = f"; name an interpreter that can run {PEER} with --vs-python"
    return Child([python, script, mode, path], hint)
