"""Checkpoints: at signals and by time, damaged ones, full disks, kills, and the metrics beside them."""

import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gistkit.common.signals import Interrupted
from gistkit.compress import FiveHundredX
from gistkit.train import checkpoints, read_metrics
from gistkit.train.trainer import Trainer
from tests.helpers.disks import limit
from tests.helpers.tiers import mostly_slow
from tests.helpers.train_worker import (
    RECIPE,
    ROWS,
    Before,
    by_arguments,
    check_equal,
    killed,
    make_compressor,
    numbers,
    train,
    trained,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run that nothing disturbs."""
    out = tmp_path_factory.mktemp("whole")
    torch.set_num_threads(1)
    train(out)
    return out


@pytest.fixture
def done(whole, tmp_path):
    """A copy of it."""
    return shutil.copytree(whole, tmp_path / "done")


def names(out):
    return [path.name for path in checkpoints.find(out)]


def check_clean(out):
    """A folder holds what a run is to leave, and nothing else."""
    assert {path.name for path in out.iterdir()} == {*names(out), "metrics.jsonl", "compressor"}
    assert len(names(out)) <= 2 and not list(out.rglob(".gistkit-*"))


def raising(at, *numbers):
    """In whose step `at` the process gets signals."""

    def before(step):
        if step == at:
            for number in numbers:
                signal.raise_signal(number)

    return [Before(before)]


@pytest.mark.parametrize(("number", "step"), [(signal.SIGTERM, 3), (signal.SIGINT, 7)])
def test_a_signal_ends_a_run_after_its_step_and_it_goes_on_bit_for_bit(number, step, whole, tmp_path, capsys):
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=rf"after step {step + 1} of 8; .*checkpoint-{step + 1} is saved"):
        train(tmp_path, callbacks=raising(step, number), save_every=100)
    assert signal.getsignal(number) == before
    assert capsys.readouterr().err.count("ends after this step, with a checkpoint") == 1
    assert names(tmp_path) == [f"checkpoint-{step + 1}"]
    # Nothing is measured any more, not even where step 4 or the last one would be.
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == step + 1
    assert "loss" in read_metrics(tmp_path / "metrics.jsonl")[-1]
    train(tmp_path, resume=True, save_every=100)
    check_equal(tmp_path, whole)
    check_clean(tmp_path)


@pytest.mark.parametrize("when", [{"eval_strategy": "epoch"}, {"eval_strategy": "steps", "eval_steps": 0.5}])
def test_a_run_of_epochs_that_goes_on_is_evaluated_as_often(when, tmp_path):

    def metrics(out, resume=False, callbacks=()):
        options = {"num_train_epochs": 2, "save_steps": 1, "eval_on_start": True}
        with contextlib.suppress(Interrupted):
            by_arguments(out, evaluated=ROWS[:4], own={"callbacks": callbacks}, **options, **when).train(resume)
        return numbers(read_metrics(out / "metrics.jsonl"))

    undisturbed = metrics(tmp_path / "undisturbed")
    assert [record["step"] for record in undisturbed if "held_out" in record] == [0, 3, 6]
    # Within an epoch, and at its end.
    for steps in (2, 3):
        ended = metrics(tmp_path / str(steps), callbacks=raising(steps - 1, signal.SIGINT))
        assert [record["step"] for record in ended if "held_out" in record] == [0]
        assert metrics(tmp_path / str(steps), resume=True) == undisturbed


def test_the_first_evaluations_may_be_left_out(tmp_path):
    """Also in a run that goes on from a step of which an evaluation would be due."""
    options = {"eval_strategy": "steps", "eval_steps": 2, "eval_delay": 3}

    def evaluated(out):
        return [record["step"] for record in read_metrics(out / "metrics.jsonl") if "held_out" in record]

    six_steps(tmp_path / "whole", **options).train()
    assert evaluated(tmp_path / "whole") == [4, 6]
    trainer = six_steps(tmp_path / "run", callbacks=raising(1, signal.SIGINT), **options)
    with pytest.raises(Interrupted):
        trainer.train()
    again = six_steps(tmp_path / "run", **options)
    again.train(True)
    assert evaluated(tmp_path / "run") == [4, 6]
    assert not trainer.args.eval_on_start and not again.args.eval_on_start


def test_a_run_goes_on_in_another_compressor_of_the_same_model(whole, tmp_path):
    with pytest.raises(Interrupted):
        train(tmp_path, callbacks=raising(3, signal.SIGTERM))
    # As in a notebook whose cell runs again: its adapters are the second of the model's.
    first = make_compressor()
    second = FiveHundredX(first.model, chunk=8, ratio=4, layout="epl", losses=("ae", "lm"), lora=4)
    assert second.adapters.names == {"encoder": "gistkit_1_encoder"}
    train(tmp_path, second, resume=True)
    check_equal(tmp_path, whole)


def test_a_second_signal_ends_a_run_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt) as caught:
        train(tmp_path, callbacks=raising(3, signal.SIGTERM, signal.SIGINT))
    assert not isinstance(caught.value, Interrupted) and names(tmp_path) == ["checkpoint-2"]
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 3


def test_an_ignored_signal_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        train(tmp_path, callbacks=raising(1, signal.SIGINT), recipe=replace(RECIPE, steps=3), eval_every=None)
    finally:
        signal.signal(signal.SIGINT, before)
    assert names(tmp_path)[-1] == "checkpoint-3"


def test_checkpoints_come_by_time_too(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("gistkit.train.resumable.time.monotonic", lambda: now[0])

    def before(step):
        # Three minutes a step.
        now[0] += 180

    options = {"callbacks": [Before(before)], "save_every": 3, "eval_every": None, "keep": 9}
    train(tmp_path / "a", **options)
    # Five minutes after the last one: not one step later, but two.
    assert names(tmp_path / "a") == [f"checkpoint-{step}" for step in (2, 3, 5, 6, 8)]
    train(tmp_path / "b", save_minutes=None, **options)
    assert names(tmp_path / "b") == [f"checkpoint-{step}" for step in (3, 6, 8)]


def six_steps(out, callbacks=(), measure=None, **options):
    """A `CompressorTrainer` with a checkpoint after every second step."""
    own = {"callbacks": callbacks, "measure": measure}
    return by_arguments(out, evaluated=ROWS[:4], own=own, **{"max_steps": 6, "save_steps": 2} | options)


def test_a_new_run_in_a_used_folder_keeps_its_own_checkpoints(done):
    assert names(done) == ["checkpoint-6", "checkpoint-8"]
    six_steps(done, save_total_limit=2, max_steps=2).train()
    assert names(done) == ["checkpoint-2", "checkpoint-8"]
    six_steps(done, save_total_limit=2).train()
    assert names(done) == ["checkpoint-4", "checkpoint-6"]
    # Going on from an earlier step too.
    six_steps(done, save_total_limit=1).train(str(done / "checkpoint-4"))
    assert names(done) == ["checkpoint-6"]


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_a_run_that_goes_on_has_the_order_of_one_that_never_stopped(tmp_path, strategy):
    """Whatever has drawn random numbers before."""

    def run(out, seed, callbacks=(), resume=False):
        trainer = six_steps(out, callbacks=callbacks, max_steps=9, train_sampling_strategy=strategy)
        torch.manual_seed(seed)
        with contextlib.suppress(Interrupted):
            trainer.train(resume)
        return numbers(read_metrics(out / "metrics.jsonl"))

    whole = run(tmp_path / "whole", 1)
    run(tmp_path / "run", 2, raising(4, signal.SIGINT))
    assert run(tmp_path / "run", 3, resume=True) == whole and len(whole) == 9


def test_the_best_checkpoint_is_one_that_there_is(tmp_path):
    """The lowest loss is that of a step without one."""
    losses = {1: 5.0, 2: 3.0, 3: 2.0, 4: 4.0, 5: 1.0, 6: 6.0}
    options = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_total_limit": 2}
    options["measure"] = lambda compressor: {"loss": losses[trainer.state.global_step]}
    trainer = six_steps(tmp_path, **options)
    trainer.train()
    assert trainer.state.best_global_step == 5 and names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    kept = make_compressor()
    checkpoints.restore(tmp_path / "checkpoint-2", kept.trainable())
    for (_, ours), (_, theirs) in zip(trainer.trained(), kept.trainable(), strict=True):
        assert torch.equal(ours, theirs)


def cut(path):
    os.truncate(path / checkpoints.OPTIMIZER, 999)


def flip(path):
    file = path / checkpoints.WEIGHTS
    content = bytearray(file.read_bytes())
    content[int(len(content) * 0.7)] ^= 8
    file.write_bytes(content)


def later(path):
    """A step more in the progress; the JSON stays right."""
    file = path / "trainer_state.json"
    file.write_text(file.read_text().replace('"global_step": 8,', '"global_step": 9,'))


def gone(path):
    (path / "scheduler.json").unlink()


def undigested(path):
    (path / checkpoints.DIGESTS).unlink()


DAMAGES = [cut, flip, later, gone, undigested]


@pytest.mark.parametrize("damage", mostly_slow(DAMAGES, flip, undigested))
def test_a_damaged_checkpoint_gives_way_to_the_one_before(damage, whole, done):
    damage(checkpoints.find(done)[-1])
    with pytest.warns(UserWarning, match=r"checkpoint-8: expected .*; the run goes on from .*checkpoint-6 instead"):
        train(done, resume=True)
    check_equal(done, whole)
    check_clean(done)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(done, resume=True)


def test_a_run_without_a_whole_checkpoint_is_refused_and_nothing_changes(done):
    for path in checkpoints.find(done):
        cut(path)
    before = {path: path.read_bytes() for path in done.rglob("*.*") if path.is_file()}
    compressor = make_compressor()
    weights = [parameter.clone() for _, parameter in compressor.trainable()]
    with pytest.raises(
        ValueError, match=r"checkpoint-8: expected .*digest of optimizer.*; the 1 before it are damaged"
    ):
        train(done, compressor, resume=True)
    assert {path: path.read_bytes() for path in done.rglob("*.*") if path.is_file()} == before
    assert all(torch.equal(a, b) for a, (_, b) in zip(weights, compressor.trainable(), strict=True))


def test_a_trained_compressor_without_checkpoints_is_not_replaced(done):
    metrics = (done / "metrics.jsonl").read_bytes()
    for path in checkpoints.find(done):
        shutil.rmtree(path)
    for resume in (False, True):
        with pytest.raises(ValueError, match=r"expected checkpoints beside the trained compressor/ .*use another fold"):
            train(done, resume=resume)
    assert (done / "metrics.jsonl").read_bytes() == metrics


def test_weights_of_another_compressor_are_refused(done):
    path = checkpoints.find(done)[-1]
    with pytest.raises(ValueError, match=r"expected .* with shape .*, got .*; the checkpoint is of another compressor"):
        checkpoints.restore(path, make_compressor(lora=2).trainable())
    assert checkpoints.restore(path, make_compressor().trainable())["trained_length"] == 20


def test_a_broken_line_of_metrics_is_named_and_a_cut_one_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for bad, why in (
        (b'{"step": 1, "l', "Unterminated"),
        (b"[1]", "no record with a step"),
        (b'{"loss": 1}', "no record"),
    ):
        path.write_bytes(b'{"step": 1}\n' + bad + b'\n{"step": 2}\n')
        with pytest.raises(
            ValueError, match=rf"metrics.jsonl, line 2: expected a record of metrics as JSON, got .*{why}"
        ):
            read_metrics(path)
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    with pytest.warns(UserWarning, match=r"metrics.jsonl, line 2: left out, since it was cut short"):
        assert read_metrics(path) == [{"step": 1}]
    # A whole record of which only the end of the line is missing.
    path.write_bytes(b'{"step": 1}\n{"step": 2, "loss": 0.10}')
    assert read_metrics(path)[-1] == {"step": 2, "loss": 0.1}


@pytest.fixture(scope="module")
def whole_with_dropout(tmp_path_factory):
    out = tmp_path_factory.mktemp("dropout")
    torch.set_num_threads(1)
    train(out, make_compressor(dropout=0.1))
    return out


def test_a_full_disk_is_told_in_one_line_and_loses_nothing(whole_with_dropout, tmp_path):
    out = tmp_path / "run"
    with limit(1500), pytest.raises(OSError) as caught:
        trained(out)
    assert re.match(rf"{re.escape(str(out))}/\S+: expected .* of space to write it, got .* free", str(caught.value))
    assert "\n" not in str(caught.value) and not list(out.rglob(".gistkit-*")) and not names(out)
    train(out, make_compressor(dropout=0.1), resume=True)
    check_equal(out, whole_with_dropout)
    check_clean(out)


def test_a_disk_that_is_full_at_the_end_keeps_what_there_was(done, monkeypatch):
    export, before = Trainer.save_model, {path: path.read_bytes() for path in done.rglob("*") if path.is_file()}

    def full(self):
        with limit(60):
            export(self)

    monkeypatch.setattr(Trainer, "save_model", full)
    told = rf"^{re.escape(str(done / 'compressor'))}: expected .* of space to write it, got .* free \(File too large\)$"
    with pytest.raises(OSError, match=told):
        train(done, resume=True)
    assert {path: path.read_bytes() for path in done.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_a_run_killed_while_it_writes_goes_on_to_the_same_losses(whole_with_dropout, tmp_path):
    """With dropout, so that random numbers drawn in a pass count too."""
    out = tmp_path / "killed"
    process = multiprocessing.get_context("spawn").Process(target=killed, args=(out,), daemon=True)
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL
    assert read_metrics(out / "metrics.jsonl")[-1]["step"] == 6 and names(out) == ["checkpoint-2", "checkpoint-4"]
    assert (out / checkpoints.PARTIAL / "checkpoint-6").is_dir()
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    train(out, make_compressor(dropout=0.1), resume=True)
    check_equal(out, whole_with_dropout)
    check_clean(out)


def test_a_kill_between_the_moves_of_a_checkpoint_that_replaces_another_loses_neither(done, monkeypatch):
    last, rename = checkpoints.find(done)[-1], os.rename

    def killed(source, target):
        rename(source, target)
        if Path(target).name == checkpoints.REPLACED:
            raise SystemExit

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(os, "rename", killed)
        # A killed process cleans nothing up.
        patch.setattr(checkpoints, "remove_partial", lambda out: None)
        with checkpoints.writing(done, 8, write=True, wait=lambda: None) as folder:
            shutil.copytree(last, folder, ignore=shutil.ignore_patterns(checkpoints.DIGESTS), dirs_exist_ok=True)
    assert names(done) == ["checkpoint-6"]
    # It may have been the only one.
    shutil.rmtree(done / "checkpoint-6")
    assert train(done, resume=True).steps == 8 and names(done) == ["checkpoint-8"] and checkpoints.checked(last)
    check_clean(done)


def test_what_a_kill_at_the_end_of_a_run_left_is_removed(done):
    last = checkpoints.find(done)[-1]
    for step in (4, 5):
        shutil.copytree(last, checkpoints.path_of(done, step))
    (done / ".gistkit-killed.partial").mkdir()
    assert train(done, resume=True).steps == 8 and names(done) == ["checkpoint-6", "checkpoint-8"]
    check_clean(done)
