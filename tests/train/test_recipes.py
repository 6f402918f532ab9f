"""Optimizers, early stopping, and resumption under each schedule."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from accelerate import PartialState
from accelerate.state import AcceleratorState

from gistkit.train import Recipe, Trainer, read_metrics
from gistkit.train.arguments import RunOptions, arguments_of
from tests.helpers.tiers import mostly_slow
from tests.helpers.train_worker import RECIPE, Before, check_equal, make_batches, make_compressor, make_questions, train

pytestmark = pytest.mark.usefixtures("one_thread")
CHANGES = {
    "linear": {"schedule": "linear", "decay": 0.5},
    "adafactor": {"optimizer": "adafactor", "learning_rate": 0.1},
}


@pytest.mark.parametrize("name", mostly_slow(CHANGES, "adafactor"))
def test_a_resumed_run_has_the_same_bits(tmp_path, name):
    recipe = dataclasses.replace(RECIPE, **CHANGES[name])
    whole = train(tmp_path / "whole", recipe=recipe)

    def failing(step):
        if step == 5:
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        train(tmp_path / "resumed", recipe=recipe, callbacks=[Before(failing)])
    resumed = train(tmp_path / "resumed", recipe=recipe, resume=True)
    assert resumed.held_out == whole.held_out
    check_equal(tmp_path / "resumed", tmp_path / "whole")
    # It learns, under a learning rate that is the recipe's.
    records = [record for record in read_metrics(tmp_path / "whole" / "metrics.jsonl") if "lr" in record]
    assert [record["lr"] for record in records] == [recipe.learning_rate_at(step) for step in range(8)]
    held_out = [
        record["held_out"]["loss"]
        for record in read_metrics(tmp_path / "whole" / "metrics.jsonl")
        if "held_out" in record
    ]
    assert held_out[-1] < held_out[0]


def test_epochs_end_after_all_rows(tmp_path):
    recipe = dataclasses.replace(RECIPE, epochs=1)
    trainer = Trainer(make_compressor(("qa",)), make_questions(), recipe, tmp_path, cpu=True, progress=False)
    assert trainer.recipe.steps == 9 and "epochs" not in trainer.identity["recipe"]
    with pytest.raises(ValueError, match="epochs: expected steps"):
        Trainer(make_compressor(), make_batches(), recipe, tmp_path, cpu=True, progress=False)


def test_what_changes_a_loss_is_another_identity():
    def identity(**changes):
        return json.dumps(dataclasses.replace(RECIPE, **changes).identity)

    falling = {"schedule": "linear", "decay": 0.5}
    others = ({}, falling, falling | {"steps": 9}, {"schedule": "cosine"}, {"eps": 1e-5}, {"context_share": 0.8})
    assert len({identity(**changes) for changes in others}) == len(others)
    assert identity(patience=3) == identity(steps=9) == identity()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("steps", "5", "a whole number, got '5'"),
        ("steps", 2.5, r"a whole number, got 2\.5"),
        ("steps", True, "a whole number, got True"),
        ("steps", 0, "at least 1, got 0"),
        ("batch", None, "a whole number, got None"),
        ("learning_rate", "1e-4", "a number, got '1e-4'"),
        ("learning_rate", float("nan"), "a number above 0, got nan"),
        ("max_length", 5, "at least min_length, 510, got 5"),
        ("decay", 1.5, r"a share above 0, at most 1, got 1\.5"),
        ("decay", float("nan"), "a share above 0, at most 1, got nan"),
        ("decay", 0.5, r"schedule linear or cosine with it, got constant and decay 0\.5"),
        ("schedule", None, "one of constant, linear, cosine, got None"),
        ("schedule", "step", "one of constant, linear, cosine, got 'step'"),
        ("optimizer", "sgd", "one of adamw, adafactor, got 'sgd'"),
        ("eps", 0, "a number above 0, got 0"),
        ("epochs", -1, "a number above 0, got -1"),
        ("context_share", 0, "a share above 0, at most 1, got 0"),
        ("patience", 0, "at least 1, got 0"),
        ("betas", (0.9,), r"two numbers >= 0, below 1, got \(0\.9,\)"),
        ("betas", 0.9, r"two numbers >= 0, below 1, got 0\.9"),
        ("betas", (0.9, 1), r"two numbers >= 0, below 1, got \(0\.9, 1\)"),
    ],
)
def test_a_value_that_is_none_names_its_argument(name, value, expected):
    with pytest.raises(ValueError, match=f"^{name}: expected {expected}$"):
        Recipe(**{name: value})
    assert Recipe(steps=np.int64(5), learning_rate=1, betas=[0.9, 0.99], epochs=None).steps == 5


def test_a_run_is_on_the_current_gpu(tmp_path, monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    first = arguments_of(Recipe(), tmp_path, RunOptions(cpu=True), evaluates=False)
    assert str(first.device) == "cpu" and not chosen
    try:
        second = arguments_of(Recipe(), tmp_path, RunOptions(), evaluates=False)
        assert str(second.device) == str(PartialState().device) == "cuda:1" and chosen == [1]
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_memory_is_pinned_for_a_gpu_only(tmp_path):
    for cpu in (False, True):
        made = arguments_of(Recipe(), tmp_path, RunOptions(cpu=cpu), evaluates=False)
        assert made.dataloader_pin_memory == (torch.cuda.is_available() and not cpu)
