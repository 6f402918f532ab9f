"""transformers' callbacks and trackers hear of a run, may end it, and a progress bar shows it."""

import dataclasses

import pytest
from transformers import TrainerCallback

from gistkit.train import checkpoints, read_metrics
from tests.helpers.train_worker import RECIPE, Ends, by_arguments, evaluations, numbers, train

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_callback_ends_a_run_which_goes_on_when_it_is_resumed(tmp_path):
    whole = train(tmp_path / "whole")
    result = train(tmp_path / "run", callbacks=[Ends(3)])
    assert result.steps == result.weights == 3 and (result.folder / "compressor").is_dir()
    assert checkpoints.find(tmp_path / "run")[-1] == checkpoints.path_of(tmp_path / "run", 3)
    resumed = train(tmp_path / "run", resume=True, callbacks=[Ends(3)])
    assert resumed.held_out == whole.held_out
    ours, theirs = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("run", "whole"))
    assert numbers(ours) == numbers(theirs)


def test_a_held_out_loss_may_end_a_run(tmp_path):
    class GoodEnough(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **_):
            control.should_training_stop = metrics["eval_loss"] < 4.5

    with evaluations({0: 5.0, 1: 4.8, 2: 4.2}):
        result = train(tmp_path, callbacks=[GoodEnough()], eval_every=1)
    assert result.steps == 2 and checkpoints.find(tmp_path)[-1].name == "checkpoint-2"


@pytest.mark.parametrize("event", ["on_log", "on_step_end", "on_epoch_end"])
def test_a_callback_behind_the_others_ends_a_run_with_a_checkpoint(tmp_path, event):
    def ends(self, args, state, control, **_):
        if state.global_step == 3:
            control.should_training_stop = True

    trainer = by_arguments(tmp_path, max_steps=6, save_steps=2)
    trainer.add_callback(type("Ending", (TrainerCallback,), {event: ends})())
    assert trainer.train().global_step == 3
    assert [path.name for path in checkpoints.find(tmp_path)] == ["checkpoint-2", "checkpoint-3"]


def test_the_bar_shows_the_loss_and_the_last_held_out_one(tmp_path, capsys):
    train(tmp_path, recipe=dataclasses.replace(RECIPE, steps=2), progress=True)
    shown = capsys.readouterr().err
    before, _, last = (record for record in read_metrics(tmp_path / "metrics.jsonl") if record["step"] != 1)
    assert "2/2" in shown and f"held-out {before['held_out']['loss']:.3f}" in shown
    assert last["step"] == 2


@pytest.mark.slow
def test_tensorboard_has_the_figures_of_a_run(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tmp_path, track="tensorboard")
    board = EventAccumulator(str(next(tmp_path.rglob("events.out.tfevents.*")).parent))
    board.Reload()
    records = read_metrics(tmp_path / "metrics.jsonl")
    for tag, values in {
        "train/ae": [each["ae"] for each in records if "ae" in each],
        "eval/lm": [each["held_out"]["lm"] for each in records if "held_out" in each],
    }.items():
        assert [event.value for event in board.Scalars(tag)] == pytest.approx(values, rel=1e-6)


def test_a_tracker_that_there_is_not_is_named(tmp_path):
    with pytest.raises(ValueError, match="mlfloww"):
        train(tmp_path, track="mlfloww")
