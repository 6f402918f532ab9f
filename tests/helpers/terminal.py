"""A program in a pseudo-terminal, as a user has it: what it shows, and keys for it."""

import fcntl
import os
import pty
import select
import subprocess
import sys
import termios
import time


class Terminal:
    """A Python program whose standard streams are one terminal; `shown` is all that it has written.

    Args:
        words: of the program, behind `python`.
    """

    def __init__(self, *words):
        self._master, slave = pty.openpty()
        # Lines end as they are written.
        settings = termios.tcgetattr(slave)
        settings[1] &= ~termios.OPOST
        termios.tcsetattr(slave, termios.TCSANOW, settings)
        self.process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            # Keys such as Ctrl-C are signals of the controlling terminal alone.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env=os.environ | {"TERM": "dumb", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
        )
        os.close(slave)
        self.shown, self._seen = "", 0
        self._bytes = b""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)

    def send(self, keys):
        """Types keys; "\\x03" is Ctrl-C, "\\x04" is Ctrl-D."""
        os.write(self._master, keys.encode())

    def rest(self, seconds=120):
        """Waits until the program waits for keys: input() misses a Ctrl-C typed while it handles the key before."""
        end, asleep = time.monotonic() + seconds, 0
        while asleep < 3:
            if time.monotonic() > end:
                raise AssertionError(f"expected a program that waits for keys, got {self.shown!r}")
            time.sleep(0.02)
            with open(f"/proc/{self.process.pid}/stat") as file:
                # The name, in parentheses, may hold anything.
                asleep = asleep + 1 if file.read().rpartition(")")[2].split()[0] == "S" else 0

    def until(self, text, seconds=120):
        """What is shown from the last such call to the next `text`, which is left out."""
        end = time.monotonic() + seconds
        while text not in self.shown[self._seen :]:
            if not self._read(end):
                raise AssertionError(f"expected {text!r}, got {self.shown[self._seen :]!r}")
        found = self.shown.index(text, self._seen)
        part, self._seen = self.shown[self._seen : found], found + len(text)
        return part

    def status(self, seconds=120):
        """The status that the program ends with, whose last words are read."""
        end = time.monotonic() + seconds
        while self._read(end):
            pass
        return self.process.wait(max(1, end - time.monotonic()))

    def _read(self, end):
        ready, _, _ = select.select([self._master], [], [], max(0, end - time.monotonic()))
        try:
            new = os.read(self._master, 65536) if ready else b""
        except OSError:
            # The other end is closed.
            return False
        self._bytes += new
        self.shown = self._bytes.decode(errors="replace")
        return bool(new)
