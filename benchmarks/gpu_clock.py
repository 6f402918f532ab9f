"""Times of a GPU, and of the host that feeds it; and rows that are written the moment they are known."""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """Milliseconds of a call: quartiles over runs; the host's are until it may go on."""

    low: float
    median: float
    high: float
    runs: int
    host: float


class Clock(Protocol):
    """Times a call."""

    def measure(self, call: Call) -> Times: ...


def _quartiles(runs: list[float], host: list[float]) -> Times:
    low, median, high = statistics.quantiles(runs, n=4)
    return Times(low, median, high, len(runs), statistics.median(host))


class GpuClock:
    """Between two events, the caches flushed and the host ahead: what the GPU takes, whatever the host takes.

    A kernel that only waits runs first, for longer than the host needs to queue the call. So no launch is waited for,
    and no graph has to be captured. A call that itself waits for the GPU is timed with that wait.

    Args:
        seconds: about how long a measurement takes, after its warm-up.
        device: where what flushes the caches is.
    """

    def __init__(self, seconds: float = 0.3, device: str = "cuda") -> None:
        self.seconds = seconds
        properties = torch.cuda.get_device_properties(0)
        # More than the cache holds, twice over, so that nothing of the call's is left in it.
        cache = getattr(properties, "L2_cache_size", 0) or 64 << 20
        self._flush = torch.empty(max(4 * cache, 256 << 20), dtype=torch.uint8, device=device)
        self._cycles = getattr(properties, "clock_rate", 0) * 1000 or 2_000_000_000

    def measure(self, call: Call) -> Times:
        for _ in range(3):
            call()
        host = []
        for _ in range(9):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            call()
            host.append((time.perf_counter() - begun) * 1e3)
        torch.cuda.synchronize()
        whole = (time.perf_counter() - begun) * 1e3
        ahead = 3 * statistics.median(host) + 0.2
        count = min(50, max(7, int(self.seconds * 1e3 / (whole + ahead))))
        cycles = int(ahead * 1e-3 * self._cycles)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for start, end in events:
            self._flush.zero_()
            torch.cuda._sleep(cycles)
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return _quartiles([start.elapsed_time(end) for start, end in events], host)


class WallClock:
    """The same on a CPU, so that the cases can be tried without a GPU."""

    def __init__(self, runs: int = 2) -> None:
        self.runs = runs

    def measure(self, call: Call) -> Times:
        runs = []
        for _ in range(self.runs):
            begun = time.perf_counter()
            call()
            runs.append((time.perf_counter() - begun) * 1e3)
        return _quartiles(runs, runs)


class Rows:
    """A file of one JSON object a line; each is on the disk when `add` returns.

    Args:
        shared: what every row says, such as the machine.
    """

    def __init__(self, path: Path, shared: Mapping[str, object]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._shared, self.count = path.open("w"), shared, 0

    def add(self, row: Mapping[str, object]) -> None:
        """Writes a row."""
        self._file.write(json.dumps({**row, **self._shared}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.count += 1

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises a TimeoutError in its block after so many seconds; in the main thread."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"expected an end within {seconds:.0f} s, got none")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.001))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
