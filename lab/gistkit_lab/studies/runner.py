"""Runs of a study, one after another or side by side in processes, with the same results.

Models as small as those of most studies train on one thread: two threads would wait for each other at thousands of
barriers a step, and for other work on the machine. Idle cores take other runs.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
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
    common = Session(plan.recipe, None, 0, out, plan.source, device, resume)
    if processes > 1:
        shared = 1 if small else max(1, cores() // processes)
        yield from _side_by_side(study, common, jobs, processes, shared)
        return
    _use(device)
    for job in jobs:
        bar_options: Any = {"unit": "step", "dynamic_ncols": True, "disable": not launch.is_first}
        with tqdm(desc=job.title, **bar_options) as bar, threads(1 if small else None):
            run = study.train(replace(common, arm=job.arm, seed=job.seed, bar=bar))
        yield job, run


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
    study: Study, common: Session, jobs: Sequence[Job], count: int, threads: int
) -> Iterator[tuple[Job, Any]]:
    """`common`: the session of all jobs, but for their arms, seeds, bars and devices."""
    # A server imports torch, transformers and the study once; a process forked from it for a run begins at once.
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, type(study).__module__])
    packed, lock = pickle.dumps((study.name, common, threads)), context.RLock()
    waiting, free = deque(jobs), deque(enumerate(devices(common.device, count)))
    running: dict[Any, tuple[Job, Any, tuple[int, str]]] = {}
    try:
        while waiting or running:
            while waiting and free:
                receiver, sender = context.Pipe(duplex=False)
                job, place = waiting.popleft(), free.popleft()
                # No daemon: those may not start processes that read images.
                process = context.Process(target=_work, args=(sender, packed, pickle.dumps(job), *place, lock))
                process.start()
                running[receiver] = job, process, place
                sender.close()
            ended: list[Any] = wait(list(running))
            for ready in ended:
                job, process, place = running[ready]
                try:
                    run, failure = ready.recv()
                except EOFError:
                    process.join()
                    raise ChildProcessError(
                        f"{job.title}: expected a run, got none: its process ended with exit code {process.exitcode}"
                    ) from None
                if failure is not None:
                    error, worker_traceback = failure
                    raise error from RuntimeError(f"in the process of {job.title}:\n{worker_traceback}")
                process.join()
                del running[ready]
                free.append(place)
                yield job, run
    finally:
        try:
            # A run saves its state after its step.
            for _, process, _ in running.values():
                process.terminate()
            for _, process, _ in running.values():
                process.join()
        except KeyboardInterrupt:
            for _, process, _ in running.values():
                process.kill()
            raise


def _work(connection: Any, packed: bytes, packed_job: bytes, place: int, device: str, lock: Any) -> None:
    """The main function of a run's process, whose bar is in the line of its place."""
    # When the user interrupts, the parent process ends this one, by SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        name, common, threads = pickle.loads(packed)
        job = pickle.loads(packed_job)
        torch.set_num_threads(threads)
        _use(device)
        tqdm.set_lock(lock)
        with tqdm(desc=job.title, unit="step", position=place, leave=False, dynamic_ncols=True) as bar:
            run = find(name).train(replace(common, arm=job.arm, seed=job.seed, device=device, bar=bar))
            tqdm.write(str(bar), file=bar.fp)
        connection.send((run, None))
    except Interrupted:
        # The parent process waits for this one to end.
        return
    except Exception as error:
        connection.send((None, (_portable(error), traceback.format_exc())))


def _end_with_parent() -> None:
    """Ends this process, after its step, where the parent process was killed."""
    parent = parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)


def _portable(error: Exception) -> Exception:
    """The error, or one with its text if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
