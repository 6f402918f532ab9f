"""Runs of a study, one after another or side by side in processes, with the same results.

Models as small as those of most studies train on one thread: two threads would wait for each other at thousands of
barriers a step, and for other work on the machine. Idle cores take other runs.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from gistkit.common.files import remove_partials
from gistkit.common.processes import launched
from gistkit.common.signals import Interrupted
from gistkit_lab.studies.fitting import Session
from gistkit_lab.studies.registry import find
from gistkit_lab.studies.study import Job, Study, StudyPlan

# A process takes some seconds to start, which runs of fewer steps are not worth.
WORTH = 50
# Each process has torch and transformers in memory.
MOST = 12
# Seconds between signs of progress.
EVERY = 0.1


def run_jobs(
    study: Study,
    plan: StudyPlan,
    jobs: Sequence[Job],
    out: Path,
    *,
    device: str = "cpu",
    resume: bool = False,
    processes: int | None = None,
) -> Iterator[tuple[Job, Any]]:
    """Yields (job, run) as each is done.

    Args:
        jobs: the jobs of `plan` to run.
        out: folder of the states.
        device: torch device; runs side by side are spread over all GPUs where it is "cuda".
        resume: continue from existing states.
        processes: number of runs side by side; None: as many as the cores can take if the models are small, else 1.
            Processes of a launcher make one run after another, all of them each, and only the first shows progress.

    Raises:
        ChildProcessError: if a process ended before its run. An error of a run is raised here and ends the others.
    """
    out.mkdir(parents=True, exist_ok=True)
    remove_partials(out)
    small = device == "cpu" and study.small(plan.recipe)
    launch = launched()
    if launch.count > 1:
        if processes not in (None, 1):
            raise ValueError(f"processes: expected 1 under a launcher of {launch.count} processes, got {processes}")
        processes, device = 1, launch.on(device)
    if processes is None:
        processes = processes_for(len(jobs), cores()) if small and plan.recipe.steps >= WORTH else 1
    processes = min(processes, len(jobs))
    if processes > 1:
        shared = 1 if small else max(1, cores() // processes)
        yield from _side_by_side(study, plan, jobs, out, device, resume, processes, shared)
        return
    _use(device)
    for job in jobs:
        bar_options: Any = {"unit": "step", "dynamic_ncols": True, "disable": not launch.is_first}
        with tqdm(desc=job.title, **bar_options) as bar, threads(1 if small else None):
            run = study.train(_session(plan, job, out, device, resume, bar))
        yield job, run


def _session(plan: StudyPlan, job: Job, out: Path, device: str, resume: bool, bar: Any) -> Session:
    return Session(plan.recipe, job.arm, job.seed, out, plan.source, device, resume, bar)


def devices(device: str, count: int) -> list[str]:
    """The devices of so many runs side by side: of "cuda" without a number all GPUs in turn."""
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    return [f"cuda:{place % gpus}" for place in range(count)] if gpus else [device] * count


def _use(device: str) -> None:
    if ":" in device and device.startswith("cuda"):
        torch.cuda.set_device(device)


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processes_for(job_count: int, cores: int) -> int:
    """How many single-threaded jobs to run side by side: one a core, or more if the last round left cores idle."""
    if cores == 1 or job_count <= 1:
        return 1
    return min(-(-job_count // max(1, job_count // cores)), cores + cores // 2, MOST)


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Inside, torch uses `count` threads; None: as many as before."""
    previous = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def _side_by_side(
    study: Study, plan: StudyPlan, jobs: Sequence[Job], out: Path, device: str, resume: bool, count: int, threads: int
) -> Iterator[tuple[Job, Any]]:
    # A server imports torch, transformers and the study once; processes forked from it begin at once.
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, type(study).__module__])
    packed = pickle.dumps((study.name, plan, out, resume))
    waiting = deque(jobs)
    workers: dict[Any, _Worker] = {}
    try:
        for place, its_device in enumerate(devices(device, count)):
            connection, worker_end = context.Pipe()
            # No daemon: those may not start processes that read images.
            process = context.Process(target=_work, args=(worker_end, packed, its_device, threads))
            process.start()
            worker_end.close()
            workers[connection] = _Worker(process, connection, place)
        for worker in workers.values():
            worker.begin(waiting.popleft(), plan.recipe.steps)
        while workers:
            for ready in wait(list(workers)):
                worker = workers[ready]
                run = worker.hear()
                if run is None:
                    continue
                yield worker.job, run[0]
                if waiting:
                    worker.begin(waiting.popleft(), plan.recipe.steps)
                else:
                    worker.end()
                    del workers[ready]
    finally:
        try:
            # A run saves its state after its step.
            for worker in workers.values():
                worker.process.terminate()
                worker.bar.close()
            for worker in workers.values():
                worker.process.join()
        except KeyboardInterrupt:
            for worker in workers.values():
                worker.process.kill()
            raise


class _Worker:
    """A process that runs jobs, and the progress bar of its current job.

    Args:
        process: that runs `_work`.
        connection: to it.
        place: of the bar, in lines from the first.
    """

    def __init__(self, process: Any, connection: Any, place: int) -> None:
        self.process, self.connection, self.place = process, connection, place
        self.job = Job("", 0)
        self.bar: Any = tqdm(disable=True)

    def begin(self, job: Job, steps: int) -> None:
        self.job = job
        self.bar = tqdm(
            desc=job.title, total=steps, unit="step", position=self.place, leave=False, dynamic_ncols=True
        )  # fmt: skip
        self.connection.send(job)

    def hear(self) -> tuple[Any] | None:
        """Receives one message; returns (run,) if it ends the job."""
        try:
            kind, value = self.connection.recv()
        except EOFError:
            self.process.join()
            raise ChildProcessError(
                f"{self.job.title}: expected a run, got none: its process ended with exit code {self.process.exitcode}"
            ) from None
        if kind == "failed":
            error, worker_traceback = value
            raise error from RuntimeError(f"in the process of {self.job.title}:\n{worker_traceback}")
        if kind == "done":
            self.bar.clear()
            line = str(self.bar)
            self.bar.close()
            tqdm.write(line, file=self.bar.fp)
            return (value,)
        if kind == "reset":
            self.bar.reset(total=value)
        elif kind == "postfix":
            self.bar.set_postfix_str(value)
        else:
            self.bar.update(value)
        return None

    def end(self) -> None:
        self.connection.send(None)
        self.process.join()


class _Bar:
    """The progress bar of a run in another process."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.count, self.last_sent = connection, 0, time.monotonic()

    def reset(self, total: int) -> None:
        self._tell("reset", total)

    def update(self, count: int = 1) -> None:
        self.count += count
        if time.monotonic() - self.last_sent >= EVERY:
            self._flush()

    def set_postfix_str(self, text: str) -> None:
        self._flush()
        self._tell("postfix", text)

    def _flush(self) -> None:
        if self.count:
            self._tell("update", self.count)
            self.count, self.last_sent = 0, time.monotonic()

    def _tell(self, kind: str, value: Any) -> None:
        self.connection.send((kind, value))


def _work(connection: Connection, packed: bytes, device: str, threads: int) -> None:
    """The main function of a process: runs job after job, until there is none."""
    # When the user interrupts, the parent process ends this one, by SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    try:
        name, plan, out, resume = pickle.loads(packed)
        _use(device)
        study = find(name)
        while (job := connection.recv()) is not None:
            run = study.train(_session(plan, job, out, device, resume, _Bar(connection)))
            connection.send(("done", run))
    except (EOFError, Interrupted):
        # The parent process is gone, or waits for this one to end.
        return
    except Exception as error:
        connection.send(("failed", (_portable(error), traceback.format_exc())))


def _portable(error: Exception) -> Exception:
    """The error, or one with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
