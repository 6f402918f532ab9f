"""Python programs in processes of their own, each with a deadline: who waits longer says for what."""

import os
import re
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

# Seconds: what starts loads torch, on a machine that may be busy.
LONG = 300


def printed(code, *words, seconds=LONG, **environment):
    """What a program prints, whose status must be 0; it may import these helpers, and what they skip is skipped."""
    paths = filter(None, (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")))
    ran = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, timeout=seconds,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment,
    )  # fmt: skip
    if ran.returncode and (skipped := re.search(r"^Skipped: (.*)", ran.stderr, re.MULTILINE)):
        pytest.skip(skipped[1])
    assert ran.returncode == 0, f"expected status 0, got {ran.returncode}: {ran.stderr}"
    return ran.stdout


class Program:
    """A program whose standard output is read line by line; it is killed at the end of the block.

    Args:
        words: of the program, behind `python`.
        options: of `subprocess.Popen`.
    """

    def __init__(self, *words, **options):
        self._errors, self._unread = tempfile.TemporaryFile(), b""  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, *map(str, words)], stdout=subprocess.PIPE, stderr=self._errors, **options
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self._errors.close()

    def line(self, seconds=LONG):
        """The next line of standard output, with its end."""
        end = time.monotonic() + seconds
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0, end - time.monotonic()))
            new = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            if not new:
                what = "the end of the output" if ready else f"none in {seconds} s"
                raise AssertionError(f"expected a line, got {what} behind {self._unread!r}: {self.errors()}")
            self._unread += new
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode() + "\n"

    def status(self, seconds=LONG):
        """The status that the program ends with."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"expected the program's end in {seconds} s, got none: {self.errors()}") from None

    def errors(self):
        """What it has written to standard error."""
        return os.pread(self._errors.fileno(), 2**20, 0).decode(errors="replace")
