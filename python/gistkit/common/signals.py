"""SIGINT (Ctrl-C), SIGTERM, SIGHUP: raised as `Interrupted`, or held until a step's end, where a run can be saved."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

# What ends a process from outside; SIGHUP comes where its terminal is closed.
ENDS = (signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal ended the work.

    Args:
        number: of the signal; a command then ends with the status 128 + number.
        message: what was saved, and how to go on.
    """

    def __init__(self, number: int, message: str = "") -> None:
        super().__init__(message)
        self.number = number


class DeferredSignal:
    """What `deferred_signals` gives; `number` is that of the first signal inside, 0 before."""

    number = 0


@contextmanager
def deferred_signals(notice: str = "") -> Iterator[DeferredSignal]:
    """Inside, the first SIGINT, SIGTERM or SIGHUP only leaves its number; a second one acts as it would outside.

    At the end the signal acts, unless an error is on its way: whoever looks at the number raises `Interrupted`. In
    another thread than the main one, which gets no signals, nothing is held.

    Args:
        notice: a line for standard error when the signal comes; "": none.
    """
    first = DeferredSignal()
    before: dict[int, Any] = {}

    def hold(number: int, frame: object) -> None:
        first.number = number
        _restore(before)
        # The signal may have come while this very stream was written, or its terminal may be gone.
        with suppress(RuntimeError, OSError):
            if notice:
                print(f"\n{notice}", file=sys.stderr, flush=True)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, *ENDS):
            # Who started the process may have wanted it ignored, and C code's handler cannot be put back.
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, hold)
    try:
        yield first
    finally:
        _restore(before)
    if first.number:
        signal.raise_signal(first.number)


@contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise `Interrupted`, so that what is half written is removed; otherwise all ends.

    Ctrl-C raises too in the foreground of a terminal, where whoever started the process left SIGINT ignored; in the
    background, as under nohup, it stays ignored.
    """
    before: dict[int, Any] = {}

    def end(number: int, frame: object) -> None:
        raise Interrupted(number)

    if threading.current_thread() is threading.main_thread():
        for ends in ENDS:
            # nohup has SIGHUP ignored.
            if signal.getsignal(ends) == signal.SIG_DFL:
                before[ends] = signal.signal(ends, end)
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN and _in_foreground():
            before[signal.SIGINT] = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        _restore(before)


def _in_foreground() -> bool:
    """Whether the process is in the foreground of the terminal that it reads from."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


def _restore(handlers: dict[int, Any]) -> None:
    """Puts handlers back, once."""
    while handlers:
        signal.signal(*handlers.popitem())
