"""What a run tells its callbacks, and trackers of Accelerate: the same figures as its metrics, also when it goes on."""

import dataclasses
import importlib.machinery
import sys
import types

import accelerate.tracking
import pytest
from accelerate.tracking import GeneralTracker
from accelerate.utils import LoggerType

from gistkit.train import Callback, checkpoint, read_metrics
from gistkit.train.trainer import Diverged
from tests.helpers.train_worker import RECIPE, Notes, evaluations, make_batches, make_compressor, numbers, train

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_callback_hears_of_steps_evaluations_checkpoints_and_the_end(tmp_path):
    out = tmp_path / "run"
    result = train(out, callbacks=[Notes(tmp_path / "notes.txt", ends=None)])
    lines = [line.split() for line in (tmp_path / "notes.txt").read_text().splitlines()]
    records = read_metrics(out / "metrics.jsonl")
    found = {kind: [words[1:] for words in lines if words[0] == kind] for kind in ("step", "evaluate", "save")}
    assert found["step"] == [[str(each["step"]), str(each["loss"])] for each in records if "loss" in each]
    evaluated = [[str(each["step"]), str(each["held_out"]["loss"])] for each in records if "held_out" in each]
    assert found["evaluate"] == evaluated and len(evaluated) == 3
    assert [step for step, _ in found["save"]] == ["2", "4", "6", "8"]
    assert found["save"][-1][1] == checkpoint.find(out)[-1].name
    assert (lines[0], lines[1][0]) == (["start", "0", "8"], "evaluate")
    assert lines[-1] == ["end", "8"] and result.steps == 8
    # An evaluation comes behind its step, and the checkpoint behind both.
    order = [words[0] for words in lines if words[1] == "4"]
    assert order == ["step", "evaluate", "save"]


def test_a_callback_ends_a_run_which_goes_on_when_it_is_resumed(tmp_path):
    whole = train(tmp_path / "whole")
    result = train(
        tmp_path / "run", callbacks=[Notes(tmp_path / "notes.txt", ends=3), Notes(tmp_path / "b", ends=None)]
    )
    assert result.steps == result.weights == 3 and (result.folder / "compressor").is_dir()
    assert checkpoint.find(tmp_path / "run")[-1] == checkpoint.path_of(tmp_path / "run", 3)
    # Callbacks behind it hear of the same.
    assert (tmp_path / "b").read_text() == (tmp_path / "notes.txt").read_text()
    resumed = train(tmp_path / "run", resume=True, callbacks=[Notes(tmp_path / "notes.txt", ends=3)])
    assert (tmp_path / "notes.txt").read_text().splitlines()[-1] == "end 8"
    assert resumed.held_out == whole.held_out
    ours, theirs = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("run", "whole"))
    assert numbers(ours) == numbers(theirs)


def test_a_held_out_loss_may_end_a_run(tmp_path):
    class GoodEnough(Callback):
        def on_evaluate(self, step, held_out):
            return held_out["loss"] < 4.5

    with evaluations({0: 5.0, 1: 4.8, 2: 4.2}):
        result = train(tmp_path / "a", callbacks=[GoodEnough()], eval_every=1)
    assert result.steps == 2 and checkpoint.find(tmp_path / "a")[-1].stem == "step-00000002"
    with evaluations({0: 4.0}):
        assert train(tmp_path / "b", callbacks=[GoodEnough()], eval_every=1).steps == 0


def test_the_end_is_told_after_an_error_too(tmp_path):
    def fail(step):
        if step == 2:
            raise Diverged("the loss is gone")

    class Fails(Callback):
        def on_end(self, step):
            raise OSError("a callback of its own")

    told = [Notes(tmp_path / "a", ends=None), Fails(), Notes(tmp_path / "b", ends=None)]
    with pytest.raises(OSError, match="a callback of its own") as error:
        train(tmp_path / "run", batches=make_batches(before=fail), callbacks=told)
    assert isinstance(error.value.__context__, Diverged)
    assert all((tmp_path / name).read_text().splitlines()[-1] == "end 2" for name in "ab")


def test_the_bar_shows_the_loss_and_the_last_held_out_one(tmp_path, capsys):
    train(tmp_path, recipe=dataclasses.replace(RECIPE, steps=2), progress=True)
    shown = capsys.readouterr().err
    before, _, last = (record for record in read_metrics(tmp_path / "metrics.jsonl") if record["step"] != 1)
    assert "2/2" in shown and f"held-out {before['held_out']['loss']:.3f}" in shown
    assert last["step"] == 2


def events(folder):
    """{(tag, step): value} of the event files in a folder, as TensorBoard itself reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder))
    board.Reload()
    found = [(tag, event) for tag in board.Tags()["scalars"] for event in board.Scalars(tag)]
    assert len({(tag, event.step) for tag, event in found}) == len(found), "a figure is there twice"
    return {(tag, event.step): event.value for tag, event in found}


@pytest.mark.slow
def test_tensorboard_has_the_figures_of_a_run_once_also_of_a_resumed_one(tmp_path):
    pytest.importorskip("tensorboard")

    def stop(step):
        if step == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, batches=make_batches(before=stop), track="tensorboard", save_every=5)
    # Steps 6 and 7 have no checkpoint, and are made again.
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 7
    train(tmp_path, resume=True, track="tensorboard", save_every=5)
    expected = {}
    for record in read_metrics(tmp_path / "metrics.jsonl"):
        kind, values = ("held_out", record["held_out"]) if "held_out" in record else ("train", record)
        expected |= {(f"{kind}/{name}", record["step"]): value for name, value in values.items() if name != "step"}
    found = events(tmp_path / "tensorboard" / "gistkit")
    assert found == pytest.approx(expected, rel=1e-6) and ("held_out/ae", 8) in found
    # What determines the run is there once.
    configs = list((tmp_path / "tensorboard").rglob("hparams.yml"))
    assert len(configs) == 1 and "recipe.learning_rate: 0.01" in configs[0].read_text()


class Memo(GeneralTracker):
    """A tracker that keeps what it gets."""

    name = "memo"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.values, self.config, self.calls = {}, None, []

    @property
    def tracker(self):
        return self.values

    def start(self):
        self.calls.append("start")

    def store_init_configuration(self, values):
        self.config = values

    def log(self, values, step=None, **options):
        self.values.setdefault(step, {}).update(values)

    def finish(self):
        self.calls.append("finish")


def test_a_tracker_of_ones_own_gets_them_too(tmp_path):
    memo = Memo()
    train(tmp_path, track=[memo], recipe=dataclasses.replace(RECIPE, steps=2))
    before, first, second, after = read_metrics(tmp_path / "metrics.jsonl")
    assert memo.values[0] == {f"held_out/{name}": value for name, value in before["held_out"].items()}
    assert memo.values[1] == {f"train/{name}": value for name, value in first.items() if name != "step"}
    assert memo.values[2]["train/loss"] == second["loss"] and memo.values[2]["held_out/lm"] == after["held_out"]["lm"]
    assert memo.config["method"] == "x500" and memo.config["recipe.learning_rate"] == 1e-2 and memo.config["steps"] == 2
    assert all(isinstance(value, str | bool | int | float) for value in memo.config.values())
    # Nothing stays open, and another run starts it anew.
    train(tmp_path / "other", track=memo, recipe=dataclasses.replace(RECIPE, steps=1))
    assert memo.calls == ["start", "finish", "start", "finish"]


def test_a_resumed_run_goes_on_in_the_same_run_of_wandb(tmp_path, monkeypatch):
    """With a stand-in for the package, whose `init` and `log` Accelerate's own tracker calls."""
    inits, logged = [], []

    class Run:
        def log(self, values, step):
            logged.append(step)

        def finish(self):
            logged.append("finish")

    def init(**options):
        inits.append(options)
        return Run()

    wandb = types.ModuleType("wandb")
    wandb.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    wandb.init, wandb.config = init, types.SimpleNamespace(update=lambda values, allow_val_change: None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", [LoggerType.WANDB])
    out = tmp_path / "first"
    train(out, recipe=dataclasses.replace(RECIPE, steps=2), track="wandb")
    train(out, recipe=dataclasses.replace(RECIPE, steps=3), track="wandb", resume=True)
    train(tmp_path / "second", recipe=dataclasses.replace(RECIPE, steps=1), track=["wandb", "wandb"])
    assert [(each["project"], each["name"], each["resume"]) for each in inits] == [
        ("gistkit", "first", "allow"), ("gistkit", "first", "allow"), ("gistkit", "second", "allow")
    ]  # fmt: skip
    assert inits[0]["id"] == inits[1]["id"] != inits[2]["id"] and inits[0]["dir"] == str(out)
    assert logged == [0, 1, 2, 2, "finish", 3, 3, "finish", 0, 1, 1, "finish"]


def test_missing_packages_and_unknown_trackers_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", [])
    for name in ("tensorboard", "wandb"):
        with pytest.raises(ImportError, match=f"track: '{name}' needs the package {name}; pip install {name}"):
            train(tmp_path, track=name)
    with pytest.raises(ValueError, match=r"track: expected some of tensorboard, wandb, or trackers .*, got 'mlflow'"):
        train(tmp_path, make_compressor(), track=["mlflow"])
