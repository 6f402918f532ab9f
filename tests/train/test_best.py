"""Early stopping: a run ends with the weights of the lowest held-out loss, however often it is interrupted."""

import dataclasses
import functools
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file

from gistkit.common.signals import Interrupted
from gistkit.train import Trainer, checkpoint, read_metrics
from gistkit.train.best import Best
from tests.helpers.tiers import mostly_slow
from tests.helpers.train_worker import (
    RECIPE,
    SHORT_RUNS,
    evaluations,
    make_batches,
    make_compressor,
    numbers,
    same_weights,
    short_run,
    stopping_run,
    train,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """What a run has after two steps, by its name: they learn at a constant rate."""

    @functools.cache
    def run(name):
        torch.set_num_threads(1)
        return short_run(tmp_path_factory.mktemp("two"), name, steps=2).folder

    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    torch.set_num_threads(1)
    return out, stopping_run(out)


@pytest.mark.parametrize("name", mostly_slow(SHORT_RUNS, "x500"))
def test_a_run_ends_with_the_weights_of_the_lowest_loss(name, two_steps, tmp_path):
    result = stopping_run(tmp_path / "a", name)
    assert (result.steps, result.weights, result.held_out["loss"]) == (4, 2, 3.0)
    same_weights(tmp_path / "a", two_steps(name))
    # One file of the trained weights more than without patience; its checkpoints are of the last steps.
    kept = tmp_path / "a" / "best.safetensors"
    states = checkpoint.find(tmp_path / "a")
    assert [path.stem for path in states] == ["step-00000002", "step-00000004"]
    weights = {key: value for key, value in load_file(states[0]).items() if key.startswith("model.")}
    best = load_file(kept)
    assert best.keys() == weights.keys() and all(torch.equal(best[key], value) for key, value in weights.items())
    # AdamW keeps two numbers for each weight, Adafactor two for each row and column.
    assert kept.stat().st_size < states[0].stat().st_size / (1 if name == "adafactor" else 2)
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {"metrics.jsonl", "compressor", "best.safetensors"} | {path.name for path in states}


@pytest.mark.slow
def test_so_does_one_that_reaches_its_last_step(two_steps, tmp_path):
    losses = {step: 3.0 + abs(step - 2) for step in range(9)}
    compressor = make_compressor()
    result = stopping_run(tmp_path / "a", losses=losses, patience=7)
    assert (result.steps, result.weights, result.held_out["loss"]) == (8, 2, 3.0)
    same_weights(tmp_path / "a", two_steps("x500"))
    # The compressor in memory is the saved one; without patience nothing is kept.
    with evaluations({0: 1.0, 8: 2.0}):
        result = train(tmp_path / "b", compressor, recipe=dataclasses.replace(RECIPE, patience=8), eval_every=8)
    assert (result.steps, result.weights, result.held_out["loss"]) == (8, 0, 1.0)
    for (name, ours), (_, theirs) in zip(compressor.trainable(), make_compressor().trainable(), strict=True):
        assert torch.equal(ours, theirs), name
    result = train(tmp_path / "c", recipe=RECIPE)
    assert result.weights == result.steps == 8 and not (tmp_path / "c" / "best.safetensors").exists()


@pytest.mark.parametrize("step", mostly_slow(range(4), 2))
def test_a_paused_run_ends_as_an_undisturbed_one(step, undisturbed, tmp_path):
    """A signal in any step; the evaluation after it comes when the run goes on."""

    def pause(at):
        if at == step:
            signal.raise_signal(signal.SIGTERM)

    whole, result = undisturbed
    with pytest.raises(Interrupted):
        stopping_run(tmp_path, batches=make_batches(before=pause))
    assert (tmp_path / "best.safetensors").is_file()
    again = stopping_run(tmp_path, resume=True)
    assert (again.steps, again.weights, again.held_out) == (result.steps, result.weights, result.held_out)
    assert numbers(read_metrics(tmp_path / "metrics.jsonl")) == numbers(read_metrics(whole / "metrics.jsonl"))
    same_weights(tmp_path, whole)
    for run in (tmp_path, whole):
        assert checkpoint.find(run)[-1].stem == "step-00000004"
    ours, theirs = (load_file(checkpoint.find(run)[-1]) for run in (tmp_path, whole))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    # It has ended: going on changes nothing; with more patience it goes on from its last step.
    assert stopping_run(tmp_path, losses={4: 3.0}, resume=True).weights == 2
    same_weights(tmp_path, whole)
    assert numbers(read_metrics(tmp_path / "metrics.jsonl")) == numbers(read_metrics(whole / "metrics.jsonl"))
    more = stopping_run(tmp_path, losses={4: 3.0, 5: 3.2, 6: 1.0, 7: 1.0, 8: 2.0}, patience=4, resume=True)
    assert (more.steps, more.weights, more.held_out["loss"]) == (8, 6, 1.0)


@pytest.mark.slow
def test_a_run_that_goes_on_from_before_its_lowest_loss_finds_it_again(undisturbed, tmp_path, monkeypatch):
    def dying(self, step):
        if step == 3:
            raise RuntimeError("lost")
        return update(self, step)

    update = Trainer._update
    for name, changes in (("same", {}), ("other", {"losses": {4: 6.0, 8: 7.0}, "eval_every": 4})):
        out = tmp_path / name
        with monkeypatch.context() as patched:
            patched.setattr(Trainer, "_update", dying)
            with pytest.raises(RuntimeError, match="lost"):
                stopping_run(out, save_every=1, keep=9)
        # The checkpoints behind the first are gone, and the weights of step 2 are not.
        for step in (2, 3):
            checkpoint.path_of(out, step).unlink()
        assert Best(out, {"best_step": 2}).restore(make_compressor().trainable(), warn=True) == 2
        if not changes:
            result = stopping_run(out, resume=True)
            assert (result.steps, result.weights, result.held_out) == (4, 2, undisturbed[1].held_out)
            same_weights(out, undisturbed[0])
            continue
        # With other evaluations step 1 has the lowest loss, and its weights are gone.
        with pytest.warns(UserWarning, match="expected the weights of step 1, got those of 2; the trained weights are"):
            result = stopping_run(out, resume=True, **changes)
        assert (result.steps, result.weights, result.held_out["loss"]) == (8, 8, 7.0)


def test_weights_that_are_gone_are_told(undisturbed, tmp_path):
    whole, _ = undisturbed
    for name, break_it, message in [
        ("damaged", lambda path: path.write_bytes(path.read_bytes()[:-9]), "best.safetensors: expected"),
        ("gone", lambda path: path.unlink(), "best.safetensors: expected a training state, got none there"),
    ]:
        out = shutil.copytree(whole, tmp_path / name)
        break_it(out / "best.safetensors")
        with pytest.warns(UserWarning, match=f"{message}.*; the trained weights are those of the last step"):
            result = stopping_run(out, losses={}, resume=True)
        assert (result.weights, result.held_out["loss"]) == (4, 3.0)
    # Checkpoints of earlier releases know the loss alone.
    best = Best(tmp_path, {"best": 2.0, "waited": 1})
    assert not best.see(5, 2.0, {"loss": 2.0}) and best.waited == 2
    with pytest.warns(UserWarning, match="expected the weights of the lowest held-out loss, got none"):
        assert best.restore(make_compressor().trainable(), warn=True) is None
    # A new run has nothing of one before it.
    shutil.copy(whole / "best.safetensors", tmp_path / "best.safetensors")
    train(tmp_path, recipe=dataclasses.replace(RECIPE, steps=1))
    assert not (tmp_path / "best.safetensors").exists()
