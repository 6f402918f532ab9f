"""Runs of a study one after another and side by side, and the command that keeps them."""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from study_runs import outcome

from gistkit import cli
from gistkit.train.data import load_corpus
from gistkit_lab.studies import results, runner
from gistkit_lab.studies.epl import STUDY, Recipe
from gistkit_lab.studies.registry import read
from gistkit_lab.studies.runner import processes_for, run_jobs
from gistkit_lab.studies.study import Job, StudyPlan

RECIPE = Recipe(steps=6, chunk=20, batch=2, eval_every=3, eval_chunks=2, final_chunks=4, hidden_size=16, heads=2)


@pytest.fixture(scope="module")
def plan() -> StudyPlan:
    return StudyPlan(RECIPE, [Job(arm, seed) for seed in (0, 1) for arm in ("dpl", "epl")], source=load_corpus())


def outcomes(found) -> dict:
    return {job.name: outcome(run) for job, run in found}


@pytest.mark.slow
def test_side_by_side_gives_what_one_after_another_gives_bit_for_bit(plan, tmp_path):
    whole = outcomes(run_jobs(STUDY, plan, plan.jobs, tmp_path / "one", processes=1))
    assert list(whole) == ["dpl-0", "epl-0", "dpl-1", "epl-1"]
    parts = outcomes(run_jobs(STUDY, plan, plan.jobs, tmp_path / "side", processes=3))
    assert parts == whole
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_a_mistake_in_one_run_is_raised_and_ends_the_others(plan, tmp_path):
    jobs = [Job("epl", 0), Job("no-layout", 0)]
    long = dataclasses.replace(plan, recipe=dataclasses.replace(RECIPE, steps=10**6, eval_every=10**6))
    with pytest.raises(ValueError, match="no-layout") as caught:
        list(run_jobs(STUDY, long, jobs, tmp_path, processes=2))
    assert "in the process of no-layout seed 0" in str(caught.value.__cause__)
    assert "build_compressor" in str(caught.value.__cause__)
    assert multiprocessing.active_children() == []


class Ends:
    """An arm that ends the process which takes it."""

    name = "ends"

    def __reduce__(self):
        return os._exit, (3,)


@pytest.mark.slow
def test_a_process_that_ends_is_told(plan, tmp_path):
    with pytest.raises(ChildProcessError, match="ends seed 0: expected a run, got none: its process ended with exit c"):
        list(run_jobs(STUDY, plan, [Job("epl", 0), Job(Ends(), 0)], tmp_path, processes=2))


@pytest.mark.parametrize(
    ("jobs", "cores", "count"),
    [(3, 2, 3), (1, 2, 1), (2, 2, 2), (4, 2, 2), (5, 2, 3), (9, 2, 3), (3, 1, 1), (0, 2, 1), (3, 16, 3), (96, 64, 12)],
)
def test_as_many_side_by_side_as_the_cores_carry(jobs, cores, count):
    assert processes_for(jobs, cores) == count


class Counts(type(STUDY)):
    """A study whose runs are torch's number of threads."""

    def __init__(self, small):
        self.is_small = small

    def small(self, recipe):
        return self.is_small

    def train(self, session):
        return torch.get_num_threads()


@pytest.mark.parametrize("small", [True, False])
def test_small_models_train_on_one_thread(plan, tmp_path, small):
    before = torch.get_num_threads()
    with runner.threads(2):
        found = [count for _, count in run_jobs(Counts(small), plan, plan.jobs[:2], tmp_path)]
    assert found == ([1, 1] if small else [2, 2]) and torch.get_num_threads() == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupt_or_a_kill_ends_all_processes(tmp_path, number):
    words = ["study", "epl", "--layouts", "dpl,epl", "--steps", "5000", "--processes", "2", "--out", str(tmp_path)]
    process = subprocess.Popen([sys.executable, "-m", "gistkit.cli", *words], stderr=subprocess.PIPE, text=True)
    try:
        wait(lambda: len({path.parent for path in tmp_path.glob("*/checkpoint-*")}) == 2, "both runs' first", 300)
        children = descendants(process.pid)
        process.send_signal(number)
        shown = process.communicate(timeout=120)[1]
    finally:
        process.kill()
    if number == signal.SIGINT:
        assert process.returncode == 130 and f"interrupted; {tmp_path} has what is saved, and the same command" in shown
        # Each run has a bar.
        assert "dpl seed 0: " in shown and "epl seed 0: " in shown
    # Two runs and the server that they are forked from; it ends by itself, when nobody is left.
    assert len(children) >= 3
    wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), f"the end of {children}", 60)


def wait(is_there, what, seconds) -> None:
    end = time.monotonic() + seconds
    while not is_there():
        assert time.monotonic() < end, f"waited {seconds} s for {what}"
        time.sleep(0.1)


def descendants(root: int) -> list[int]:
    """The processes that come from `root`."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    children = [pid for pid, parent in parents.items() if parent == root]
    return children + [below for child in children for below in descendants(child)]


@pytest.mark.slow
@pytest.mark.usefixtures("few_chunks")
def test_committed_results_gain_the_runs_that_are_missing(tmp_path, monkeypatch, capsys):
    def words(layouts: str) -> list[str]:
        given = ["--layouts", layouts, "--steps", "2", "--save", str(tmp_path / "kept"), "--out", str(tmp_path / "out")]
        return ["study", "epl", *given]

    path = tmp_path / "kept" / "epl.jsonl"
    assert cli.main(words("dpl")) == 0
    before = path.read_text()
    (line,) = results.load(path)
    assert line["run"]["attention"] == [] and not path.with_suffix(".npz").exists()
    assert {"commit", "cores", "torch_isa", "processor"} <= set(line["machine"])
    assert cli.main(words("dpl,upl")) == 0
    assert path.read_text().startswith(before) and [one.run.layout for one in read(path)] == ["dpl", "upl"]
    # All that are asked for are shown, whoever made them.
    capsys.readouterr()
    monkeypatch.setattr(type(STUDY), "train", None)
    assert cli.main(words("upl,dpl")) == 0
    shown = capsys.readouterr().out
    assert shown.index("| UPL ") < shown.index("| DPL ") and len(path.read_text().splitlines()) == 2
    assert cli.main([*words("epl"), "--steps", "3"]) == 2
    assert "epl.jsonl: the saved runs differ in steps; use the same settings" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("few_chunks")
def test_results_go_on_with_resume_and_begin_anew_with_overwrite(tmp_path, capsys):
    words = ["study", "epl", "--steps", "2", "--out", str(tmp_path), "--layouts"]
    path = tmp_path / "results.jsonl"
    assert cli.main([*words, "dpl"]) == 0
    (first,) = read(path)
    assert cli.main([*words, "epl", "--resume"]) == 0
    assert [one.run.layout for one in read(path)] == ["dpl", "epl"] and read(path)[0] == first
    capsys.readouterr()
    text = tmp_path / "text.txt"
    text.write_text("Another text. " * 200)
    assert cli.main([*words, "epl", "--resume", "--text", str(text)]) == 2
    assert "results.jsonl: the saved runs have another text" in capsys.readouterr().err
    assert cli.main(["study", "compression-loss", "--steps", "2", "--out", str(tmp_path), "--resume"]) == 2
    assert "results.jsonl: the saved runs are of the study epl; use another --out folder" in capsys.readouterr().err
    # What a later run of this command would take for its own goes first.
    (tmp_path / "old-0" / "checkpoint-1").mkdir(parents=True)
    assert cli.main([*words, "upl", "--overwrite"]) == 0
    assert [one.run.layout for one in read(path)] == ["upl"] and not (tmp_path / "old-0").exists()


@pytest.mark.parametrize("name", ["results.jsonl", "epl-0/checkpoint-1"])
def test_what_is_in_a_folder_is_not_overwritten_unasked(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("gistkit_lab.studies.runner.run_jobs", lambda *_, **__: pytest.fail("a run began"))
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("kept")
    words = ["study", "epl", "--steps", "2", "--layouts", "dpl", "--out", str(tmp_path)]
    assert cli.main(words) == 2
    told = capsys.readouterr().err
    assert f"got {tmp_path / name}" in told and "--resume keeps" in told and "--overwrite begins anew" in told
    assert (tmp_path / name).read_text() == "kept"
    with pytest.raises(SystemExit):
        cli.main([*words, "--resume", "--overwrite"])
    assert "not allowed with argument" in capsys.readouterr().err
    # Committed runs are added to, and what is asked of --out is that it has no checkpoint of theirs.
    words += ["--save", str(tmp_path / "kept")]
    with pytest.raises(pytest.fail.Exception, match="a run began"):
        cli.main(words)
    state = tmp_path / "dpl-0" / "checkpoint-1"
    state.mkdir(parents=True)
    assert cli.main(words) == 2 and state.exists()
    assert f"got {state}, a checkpoint of a run; --resume keeps" in capsys.readouterr().err
