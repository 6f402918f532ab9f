"""How the studies train: what a signal, a damaged checkpoint and a fresh start leave of a run."""

import signal
import time
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from study_runs import session
from torch import nn

from gistkit.common.signals import Interrupted
from gistkit.train import resumable
from gistkit_lab.studies import fitting
from gistkit_lab.studies.draws import generator_of
from gistkit_lab.studies.fitting import Carried, StudyRecipe, optimise

RECIPE = StudyRecipe(steps=8, batch=4, eval_every=3)
IDENTITY = {"study": "tiny"}


def test_no_two_seeds_draw_the_same_batch():
    steps = (0, 1, 100_002, 100_003, 100_004, 200_006)
    numbers = [generator_of(*each).initial_seed() for each in product(range(3), steps, (0, 1))]
    assert len(set(numbers)) == len(numbers) == 36
    # That of the results that are committed.
    assert generator_of(1, 5).initial_seed() == 2 * 100_003 + 5


class Run:
    """A regression with dropout, and with a figure of its own that it carries along."""

    def __init__(self, folder: Path, signals: dict[int, int] | None = None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(
            [{"params": list(self.model.parameters()), "factor": 1.0}], lr=RECIPE.learning_rate
        )
        self.out, self.signals, self.carried = folder, signals or {}, 0.0

    def loss(self, step: int) -> torch.Tensor:
        if step in self.signals:
            signal.raise_signal(self.signals[step])
        # It changes at some steps alone, as a threshold does.
        self.carried = self.carried / 3 + 1.0 if step % 2 == 0 else self.carried
        x = torch.randn(RECIPE.batch, 3, generator=torch.Generator().manual_seed(step))
        return (self.model.train()(x).sum() - self.carried).square()

    def figures(self) -> tuple[float, ...]:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(99))
        with torch.no_grad():
            return (float(self.model.eval()(x).square().mean()),)

    def set_carried(self, value: float) -> None:
        self.carried = value

    def train(self, resume: bool = False, **options):
        return optimise(
            session(RECIPE, "run", self.out, resume=resume), list(self.model.named_parameters()), self.loss,
            self.figures, IDENTITY, optimizer=self.optimizer, learning_rate=lambda step: 1e-2,
            carried=Carried(lambda: self.carried, self.set_carried), **options,
        )  # fmt: skip


@pytest.fixture
def whole(tmp_path):
    (tmp_path / "whole").mkdir()
    run = Run(tmp_path / "whole")
    return run, run.train()


def check_equal(run, progress, whole):
    assert progress.curve == whole[1].curve and [step for step, _ in progress.curve] == [0, 3, 6, 8]
    for ours, theirs in zip(run.model.parameters(), whole[0].model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("step", "number"), [(0, signal.SIGINT), (2, signal.SIGTERM), (4, signal.SIGINT)])
def test_a_signal_ends_a_run_after_its_step_and_it_goes_on_bit_for_bit(step, number, whole, tmp_path):
    with pytest.raises(
        Interrupted, match=rf"after step {step + 1} of 8; .*run-0/checkpoint-{step + 1} is saved"
    ) as caught:
        Run(tmp_path, {step: number}).train()
    assert caught.value.number == number
    run = Run(tmp_path)
    check_equal(run, run.train(resume=True), whole)


def test_the_last_step_is_measured_when_the_run_goes_on(whole, tmp_path):
    with pytest.raises(Interrupted, match="after step 8 of 8"):
        Run(tmp_path, {7: signal.SIGINT}).train()
    run = Run(tmp_path)
    check_equal(run, run.train(resume=True), whole)


def test_a_run_that_begins_anew_knows_nothing_of_the_checkpoints_before(tmp_path):
    Run(tmp_path).train()
    with pytest.raises(Interrupted):
        Run(tmp_path, {0: signal.SIGINT}).train()
    assert [path.name for path in (tmp_path / "run-0").iterdir()] == ["checkpoint-1"]


def test_figures_that_are_enough_end_a_run_that_then_stays_ended(whole, tmp_path):
    _, (_, *third), *_ = whole[1].curve
    enough = lambda figures: figures == tuple(third)  # noqa: E731
    run, again = Run(tmp_path), Run(tmp_path)
    assert run.train(enough=enough).curve == again.train(resume=True, enough=enough).curve == whole[1].curve[:2]
    assert all(map(torch.equal, run.model.parameters(), again.model.parameters()))


def test_the_times_of_evaluations_are_those_of_training_alone(tmp_path, monkeypatch):
    clocks = {"perf_counter": 0.0, "process_time": 0.0}

    class Slow(Run):
        """A step takes the processor 1 s and, as other work is on the machine, 5 s by the clock; an evaluation 100."""

        def loss(self, step: int) -> torch.Tensor:
            clocks["process_time"] += 1
            clocks["perf_counter"] += 5
            return super().loss(step)

        def figures(self) -> tuple[float, ...]:
            clocks["process_time"] += 100
            clocks["perf_counter"] += 100
            return super().figures()

    reading = SimpleNamespace(**{name: lambda name=name: clocks[name] for name in clocks}, monotonic=time.monotonic)
    for module in (fitting, resumable):
        monkeypatch.setattr(module, "time", reading)
    for threads, a_step in ((1, 1.0), (2, 5.0)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        progress = Slow(tmp_path).train()
        assert progress.times == [a_step * step for step, _ in progress.curve] and progress.seconds == 40
        # Going on from the end adds nothing.
        assert Slow(tmp_path).train(resume=True).times == progress.times
