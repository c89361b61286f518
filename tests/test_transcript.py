"""minfer chat as a person meets it: typed into a real terminal, killed, resumed, interrupted."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

# Makes the terminal the one whose Ctrl-C is for the process, as a shell does.
OWN_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    " os.execv(sys.executable, [sys.executable, '-m', 'minfer.tools.cli', *sys.argv[1:]])"
)
N_CTX = 160


class Terminal:
    """A chat with the demo model in a pseudo-terminal of its own."""

    def __init__(self, file, n):
        self.master, end = pty.openpty()
        args = ["chat", "demo", "--session", file, "-n", n, "--n-ctx", N_CTX, "--greedy"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWN_TERMINAL, *map(str, args)],
            stdin=end,
            stdout=end,
            stderr=end,
            env=os.environ | {"TERM": "dumb"},
            start_new_session=True,
        )
        os.close(end)
        self.unread = ""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self.master)

    def past(self, pattern):
        """Reads until the pattern comes; gives what came before it, and the match."""
        give_up = time.monotonic() + 120
        while (found := re.search(pattern, self.unread)) is None:
            assert time.monotonic() < give_up, self.unread
            if select.select([self.master], [], [], 0.1)[0]:
                self.unread += os.read(self.master, 4096).decode("utf-8", "replace")
        before, self.unread = self.unread[: found.start()], self.unread[found.end() :]
        return before, found

    def type(self, text):
        os.write(self.master, text.encode())

    def turn(self, text):
        """The answer, and the tokens prefilled since the start."""
        self.past("> ")
        self.type(text + "\r")
        before, found = self.past(r"\[prefilled (\d+) tokens.*?\]\r\n")
        return before.rpartition(text)[2].strip(), int(found[1])

    def command(self, text, pattern):
        self.past("> ")
        self.type(text + "\r")
        return self.past(pattern)[1]

    def ends(self, keys):
        """The exit status after some keys; typed again if nobody listened yet."""
        give_up, again = time.monotonic() + 120, 0.0
        while self.process.poll() is None:
            assert time.monotonic() < give_up, self.unread
            if time.monotonic() > again:
                self.type(keys)
                again = time.monotonic() + 10
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.unread += os.read(self.master, 4096).decode("utf-8", "replace")
                except OSError:  # the other end is closed
                    time.sleep(0.05)
        return self.process.returncode


def messages(file):
    return json.loads(file.read_text())["messages"]


def test_save_kill_resume_overflow_interrupt(tmp_path):
    file = tmp_path / "talk.json"

    with Terminal(file, n=20) as chat:
        first, n_first = chat.turn("Some words about rivers:")
        assert first and 4 < n_first < 12
        chat.command("/save", "saved 1 exchange to .*talk.json")
        second, n_second = chat.turn("And about the sea:")
        chat.past("> ")
        chat.process.send_signal(signal.SIGKILL)
        assert chat.process.wait() == -signal.SIGKILL
    assert len(messages(file)) == 2, "what had been saved"

    with Terminal(file, n=20) as chat:
        chat.past(r"talk.json.kv: \d+ rows restored, nothing read again\r\n")
        again, n_again = chat.turn("And about the sea:")
        assert again == second and n_again == n_second - n_first, "only the new turn is computed"
        chat.command("/undo", "\r\n")
        chat.command("/context", rf"\d+ of {N_CTX} rows in use; 1 exchange,")
        for text in ("And about the sea:", "Then of birds:", "And trees:", "And the wind:"):
            _, total = chat.turn(text)
        chat.command("/nothing", "/nothing is no command")
        chat.past("> ")
        for turn in range(8):
            chat.type(f"Number {turn}:\r")
            before, found = chat.past(r"\[prefilled (\d+) tokens")
            if "is full" in before:
                break
            chat.past("> ")
        assert re.search(
            rf"the context of {N_CTX} tokens is full: the oldest \d exchanges? cut out"
            r" \(\d+ rows\), \d+ rows moved down\r\n",
            before,
        )
        assert int(found[1]) - total < 10 * (turn + 1), "nothing was read again"
        chat.command("/help", r"/save \[FILE\]")
        chat.past("> ")
        assert chat.ends("/exit\r") == 0
    n_before = len(messages(file))
    assert n_before == 2 + 2 * 4 + 2 * (turn + 1), "nothing said is lost"

    with Terminal(file, n=100_000) as chat:
        chat.past(r"\d+ rows restored, nothing read again\r\n")
        chat.past("> ")
        chat.type("Tell a long story:\r")
        chat.past("long story:\r\r\n")  # the line as accepted; now Ctrl-C is a signal
        # a line of the answer, not "the context ... is full" or "reading 6 tokens"
        chat.past("(?m)^(?!the).*[a-zA-Z]{2} [a-zA-Z]")
        chat.type("\x03")
        before, _ = chat.past(r"\[prefilled \d+ tokens")
        assert "Traceback" not in before
        chat.command("/context", "rows in use")
        chat.past("> ")
        assert chat.ends("\x03") == 130
    said = messages(file)
    assert len(said) == n_before + 2 and said[-2]["content"] == "Tell a long story:"
    assert 2 <= len(said[-1]["content"]) < 2000

    with Terminal(file, n=8) as chat:
        chat.past(r"\d+ rows restored, nothing read again\r\n")
        chat.past("> ")
        assert chat.ends("\x04") == 0
    assert messages(file) == said
