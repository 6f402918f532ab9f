"""Runs that several processes train together, and runs side by side on several devices."""

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from study_runs import TINY
from test_image_folders import RECIPE as FOLDER
from test_image_folders import needs_torchvision, write
from torch import Tensor

from gistkit import cli
from gistkit.common.processes import Processes
from gistkit_lab.studies.images import Files, load_images
from gistkit_lab.studies.length import Recipe
from gistkit_lab.studies.positions import Learner, Student
from gistkit_lab.studies.registry import find, read
from gistkit_lab.studies.resolution import Classifier
from gistkit_lab.studies.runner import devices, run_jobs
from gistkit_lab.studies.study import Job, StudyPlan
from tests.helpers.launched import launch

TEXT = Recipe(
    **TINY, steps=4, batch=4, eval_every=2, length=8, longest=4, digits=2, max_position=60, eval_tokens=64,
    test_tokens=128, shift_rate=0.6,
)  # fmt: skip
IMAGES = dataclasses.replace(FOLDER, steps=3, eval_every=3, shift_rate=0.6)


def gradients(learner: Any, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [*learner.model.parameters()], materialize_grads=True))


def check_parts(monkeypatch: pytest.MonkeyPatch, make: Any, loss: Any, rounding: float, count: int = 2) -> None:
    """The mean of the parts' gradients is the whole batch's."""
    whole = make()
    expected = gradients(whole, loss(whole))
    parts = []
    for index in range(count):
        monkeypatch.setenv("RANK", str(index))
        monkeypatch.setenv("WORLD_SIZE", str(count))
        learner = make()
        assert learner.processes == Processes(index, count)
        parts.append(gradients(learner, loss(learner)))
    for mine, its in zip(expected, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(sum(its) / count, mine, rtol=1e3 * rounding, atol=10 * rounding)
    assert not torch.allclose(parts[0][0], parts[1][0])


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("name", "unlabelled"), [("seqpe-bias", [2]), ("alibi", [2]), ("alibi", [2, 3])])
def test_parts_of_a_text_batch_have_its_mean_gradient(
    monkeypatch: pytest.MonkeyPatch, name: str, unlabelled: list[int]
) -> None:
    """Also where most labels do not count, and those of one part fewer than those of another, or none."""
    ids, labels = torch.randint(256, (2, 4, 8), generator=torch.Generator().manual_seed(0))
    labels[:2, 1:], labels[unlabelled] = -100, -100
    positions = Student(TEXT, "seqpe-bias", 256, 0)
    # A step with rows at positions of their own.
    shifted = next(step for step in range(9) if positions.place(4, step).positions.dim() == 2)
    check_parts(monkeypatch, lambda: Student(TEXT, name, 256, 0), lambda one: one.loss(shifted, ids, labels), 1e-15)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"rand_augment": 9, "mixup": 0.8, "erasing": 0.5}, marks=needs_torchvision)]
)
@pytest.mark.parametrize("files", [True, False])
def test_parts_of_an_image_batch_have_its_mean_gradient(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: bool, changes: dict[str, Any], count: int
) -> None:
    images = load_images(write(tmp_path)) if files else load_images()
    recipe = dataclasses.replace(IMAGES, **changes)
    read_rows, decoded = [], Files._decoded
    monkeypatch.setattr(Files, "_decoded", lambda its, change: read_rows.append(len(its)) or decoded(its, change))
    check_parts(
        monkeypatch,
        lambda: Classifier(recipe, "seqpe-mul", images, 0),
        lambda one: one.loss(2),
        1e-7,
        count,
    )
    # A process reads its part, and the image that the first of it may be mixed with.
    assert read_rows == ([4, *[4 // count + 1] * count] if files else [])


def test_a_batch_that_cannot_be_shared_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="batch: expected a multiple of 3 processes, got 4 rows"):
        Student(TEXT, "nope", 256, 0)


def study(name: str, recipe: Any, words: list[str]) -> int:
    """The study's command, in which the preset `quick` is another recipe."""
    presets: Any = find(name).presets
    presets["quick"] = recipe
    return cli.main(["study", name, "--preset", "quick", "--device", "cpu", *words])


def stopped(name: str, recipe: Any, words: list[str]) -> int:
    """`study`, in which one of the processes gets a signal during step 2."""
    place = Learner.place

    def stop(self: Any, rows: int, step: int) -> Any:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return place(self, rows, step)

    if os.environ["RANK"] == "1":
        Learner.place = stop  # type: ignore[method-assign]
    return study(name, recipe, words)


@pytest.mark.nightly
def test_two_processes_train_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--encodings", "seqpe-bias,learned", "--out"]
    launch(2, study, "length", TEXT, [*words, str(tmp_path / "two")], logs=tmp_path)
    monkeypatch.setitem(find("length").presets, "quick", TEXT)  # type: ignore[arg-type]
    assert study("length", TEXT, [*words, str(tmp_path / "one")]) == 0
    one, two = (read(tmp_path / name / "results.jsonl") for name in ("one", "two"))
    assert len(two) == 2
    for mine, its in zip(two, one, strict=True):
        for figures in ("held_out", "test"):
            assert getattr(mine.run, figures) == pytest.approx(getattr(its.run, figures), rel=1e-5)
        assert [step for step, *_ in mine.run.curve] == [0, 2, 4]
    # Only the first says what was found.
    logs = [(tmp_path / f"process-{rank}.log").read_text() for rank in (0, 1)]
    assert "Written: " in logs[0] and "Written: " not in logs[1] and "100%" not in logs[1]
    # A signal to one ends all after the same step, and one process goes on from there.
    half = ["--encodings", "seqpe-bias", "--out", str(tmp_path / "half")]
    launch(2, stopped, "length", TEXT, half, logs=tmp_path, expected=128 + signal.SIGTERM)
    assert study("length", TEXT, [*half, "--resume"]) == 0
    (resumed,) = read(tmp_path / "half" / "results.jsonl")
    assert resumed.run.test == pytest.approx(one[0].run.test, rel=1e-5)


def test_studies_that_are_not_shared_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["study", "epl", "--steps", "2", "--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "study: expected one that the processes of a launcher can train together" in capsys.readouterr().err


def test_runs_side_by_side_take_all_gpus_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert devices("cuda", 4) == ["cuda:0", "cuda:1", "cuda:2", "cuda:0"]
    assert devices("cuda:1", 2) == ["cuda:1"] * 2 and devices("cpu", 2) == ["cpu"] * 2
    monkeypatch.setenv("WORLD_SIZE", "2")
    plan = StudyPlan(TEXT, [Job("nope", 0)])
    with pytest.raises(ValueError, match="processes: expected 1 under a launcher of 2 processes, got 3"):
        next(run_jobs(find("length"), plan, plan.jobs, tmp_path, processes=3))
