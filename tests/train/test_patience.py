"""Early stopping: a run ends with the weights of the lowest held-out loss, however often it is interrupted."""

import signal

import pytest
import torch

from gistkit.common.signals import Interrupted
from gistkit.train import checkpoints, read_metrics
from tests.helpers.tiers import mostly_slow
from tests.helpers.train_worker import SHORT_RUNS, Before, numbers, same_weights, short_run, stopping_run

pytestmark = pytest.mark.usefixtures("one_thread")


UP_TO_THE_LAST = {"losses": {step: 3.0 + abs(step - 2) for step in range(9)}, "patience": 7}


@pytest.mark.parametrize(
    ("name", "options", "steps"),
    [
        ("x500", {}, 4),
        pytest.param("x500", UP_TO_THE_LAST, 8, marks=pytest.mark.slow),
        *(pytest.param(name, {}, 4, marks=pytest.mark.slow) for name in SHORT_RUNS if name != "x500"),
    ],
)
def test_a_run_ends_with_the_weights_of_the_lowest_loss(name, options, steps, tmp_path):
    result = stopping_run(tmp_path / "a", name, **options)
    assert (result.steps, result.weights, result.held_out["loss"]) == (steps, 2, 3.0)
    # They learn at a constant rate.
    short_run(tmp_path / "two", name, steps=2)
    same_weights(tmp_path / "a", tmp_path / "two")
    # The checkpoint of the lowest stays beside the last two.
    kept = [path.name for path in checkpoints.find(tmp_path / "a")]
    assert kept == [f"checkpoint-{step}" for step in (2, steps - 1, steps)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """(folder, result) of a run that nothing interrupts."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("undisturbed")
    return out, stopping_run(out)


@pytest.mark.parametrize("step", mostly_slow(range(4), 2))
def test_a_paused_run_ends_as_an_undisturbed_one(step, undisturbed, tmp_path):
    """A signal in any step, after which an evaluation is due."""

    def pause(at):
        if at == step:
            signal.raise_signal(signal.SIGTERM)

    run, (whole, result) = tmp_path / "run", undisturbed
    with pytest.raises(Interrupted):
        stopping_run(run, callbacks=[Before(pause)])
    again = stopping_run(run, resume=True)
    assert (again.steps, again.weights, again.held_out) == (result.steps, result.weights, result.held_out)
    assert numbers(read_metrics(run / "metrics.jsonl")) == numbers(read_metrics(whole / "metrics.jsonl"))
    same_weights(run, whole)
    # It has ended: going on changes nothing; with more patience it goes on from its last step.
    assert stopping_run(run, losses={}, resume=True).weights == 2
    same_weights(run, whole)
    more = stopping_run(run, losses={5: 3.2, 6: 1.0, 7: 1.0, 8: 2.0}, patience=4, resume=True)
    assert (more.steps, more.weights, more.held_out["loss"]) == (8, 6, 1.0)
