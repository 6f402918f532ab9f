"""Training: what a run leaves behind, resumption, processes, precision, checkpoints."""

import dataclasses
import errno
import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from gistkit.common.files import lock
from gistkit.train import Pretraining, Trainer, checkpoints, load_corpus, read_metrics
from gistkit.train.command import run
from gistkit.train.trainer import Diverged
from tests.helpers import train_worker
from tests.helpers.train_worker import (
    RECIPE,
    ROWS,
    Before,
    by_arguments,
    close,
    make_batches,
    make_compressor,
    make_gistpool,
    make_questions,
    make_reader,
    numbers,
    same_run,
    stopping_run,
    train,
)

WORKER = Path(train_worker.__file__)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A plain run, and its metrics."""
    out = tmp_path_factory.mktemp("unbroken")
    torch.set_num_threads(1)
    result = train(out)
    return out, result, read_metrics(out / "metrics.jsonl")


def test_a_run_learns_and_says_how(unbroken):
    out, result, records = unbroken
    steps = [record for record in records if "loss" in record]
    held_out = [record for record in records if "held_out" in record]
    assert [record["step"] for record in steps] == list(range(1, 9))
    assert [record["step"] for record in held_out] == [0, 4, 8]
    assert held_out[-1]["held_out"]["loss"] < held_out[0]["held_out"]["loss"] - 0.05
    assert steps[3]["loss"] == pytest.approx((steps[3]["ae"] + steps[3]["lm"]) / 2)
    assert [record["lr"] for record in steps[:4]] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2, 1e-2])
    assert all(record["tokens_per_second"] > 0 and record["grad_norm"] > 0 for record in steps)
    assert (result.steps, result.held_out) == (8, held_out[-1]["held_out"])
    assert result.seconds == steps[-1]["seconds"]
    assert [path.name for path in checkpoints.find(out)] == ["checkpoint-6", "checkpoint-8"]
    with safe_open(checkpoints.find(out)[-1] / checkpoints.WEIGHTS, framework="pt") as file:
        assert not [name for name in file.keys() if "embed_tokens" in name], "frozen weights are not saved"  # noqa: SIM118


@pytest.mark.slow
def test_two_processes_reach_the_losses_of_one(unbroken, tmp_path):
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    shown = subprocess.run([*launch, WORKER, tmp_path], capture_output=True, text=True, env=environment, timeout=900)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert {path.name for path in tmp_path.glob("process-*")} == {"process-0-of-2", "process-1-of-2"}
    # A callback of one process ends the run in both.
    assert read_metrics(tmp_path / "ended" / "metrics.jsonl")[-1]["step"] == 5
    assert checkpoints.find(tmp_path / "ended")[-1].name == "checkpoint-5"
    train(tmp_path / "one", make_compressor(("ae", "qa")), make_questions())
    one = read_metrics(tmp_path / "one" / "metrics.jsonl")
    close(read_metrics(tmp_path / "questions" / "metrics.jsonl"), one)
    for name in ("accumulated", "interrupted"):
        close(read_metrics(tmp_path / name / "metrics.jsonl"), unbroken[2])
    train(tmp_path / "reading", make_reader())
    close(*(read_metrics(tmp_path / name / "metrics.jsonl") for name in ("reader", "reading")))
    # What is saved is what one process saves.
    same_run(tmp_path / "passages", unbroken[0])
    for name in ("x500", "reader"):
        stopping_run(tmp_path / "alone" / name, name)
        same_run(tmp_path / "ending" / name, tmp_path / "alone" / name)


@pytest.mark.parametrize(("accumulate", "schedule"), [(1, "constant"), (2, "cosine")])
def test_losses_and_weights_are_those_of_a_loop_by_hand(tmp_path, accumulate, schedule):
    """AdamW with decay on matrices, groups, clipping, warm-up and a falling rate, accumulation, all written out."""
    recipe = dataclasses.replace(RECIPE, schedule=schedule, weight_decay=0.3, memory_factor=5.0)
    ours, by_hand = make_gistpool(), make_gistpool()
    train(tmp_path, ours, recipe=recipe, accumulate=accumulate, save_every=3)
    records = [record for record in read_metrics(tmp_path / "metrics.jsonl") if "lr" in record]
    parameters, batches = dict(by_hand.trainable()), make_batches(recipe)
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in parameters.items()}
    for step, record in enumerate(records):
        rows = batches(step)
        by_hand.train()
        found = []
        for part in range(accumulate):
            share = slice(part * 4 // accumulate, (part + 1) * 4 // accumulate)
            losses = by_hand(**{name: tensor[share] for name, tensor in rows.items()})
            (losses["loss"] / accumulate).backward()
            found.append(losses["loss"].item())
        assert record["loss"] == pytest.approx(sum(found) / accumulate, rel=2e-6)
        warm, left = min(1, (step + 1) / 3), min(1, (8 - step) / (8 - 3))
        rate = 1e-2 * warm * (1 if schedule == "constant" else 0.5 * (1 - math.cos(math.pi * left)))
        assert record["lr"] == pytest.approx(rate)
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters.values() if p.grad is not None))
        assert record["grad_norm"] == pytest.approx(norm, rel=1e-5)
        with torch.no_grad():
            for name, p in parameters.items():
                if p.grad is None:
                    continue
                gradient = p.grad * min(1.0, 1.0 / norm)
                first, second = moments[name]
                first.lerp_(gradient, 0.1)
                second.lerp_(gradient**2, 0.05)
                own = rate * (5.0 if by_hand.of_gists(name) else 1.0)
                p.mul_(1 - own * 0.3 * (p.dim() > 1))
                debiased = second / (1 - 0.95 ** (step + 1))
                p.sub_(own * first / (1 - 0.9 ** (step + 1)) / (debiased.sqrt() + 1e-8))
                p.grad = None
    assert len(records) == 8
    for (name, mine), (_, theirs) in zip(ours.trainable(), by_hand.trainable(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-5, msg=name)


def test_transformers_own_arguments_and_rows_of_any_dataset(tmp_path, capsys):
    """Shuffled over three epochs; it resumes within one to the same weights."""

    def trainer(out, compressor, rows):
        return by_arguments(
            out, rows, rows, compressor, num_train_epochs=3, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, save_steps=2, lr_scheduler_type="linear", warmup_steps=2, weight_decay=0.1,
            logging_steps=3, eval_strategy="steps", eval_steps=3, eval_on_start=True,
        )  # fmt: skip

    whole, again = make_compressor(dropout=0.1), make_compressor(dropout=0.1)
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(ROWS)
    output = trainer(tmp_path / "a", whole, rows).train()
    records = read_metrics(tmp_path / "a" / "metrics.jsonl")
    assert output.global_step == 9 and [each["step"] for each in records] == [0, 3, 3, 6, 6, 9, 9]
    assert records[-1]["held_out"]["loss"] < records[0]["held_out"]["loss"]
    assert [path.name for path in checkpoints.find(tmp_path / "a")] == [
        f"checkpoint-{step}" for step in (2, 4, 6, 8, 9)
    ]
    for step in (6, 8, 9):
        shutil.rmtree(tmp_path / "a" / f"checkpoint-{step}")
    trainer(tmp_path / "a", again, ROWS).train(resume_from_checkpoint=True)
    for (name, ours), (_, theirs) in zip(whole.trainable(), again.trainable(), strict=True):
        assert torch.equal(ours, theirs), name
    # A stream has no length, and is read in its order.
    stream = rows.to_iterable_dataset()
    # The bar counts steps, however seldom losses are logged.
    by_arguments(tmp_path / "b", stream, own={"progress": True}, max_steps=2, logging_steps=9).train()
    assert "| 2/2 [" in capsys.readouterr().err


def test_the_optimizer_is_the_one_that_is_given(tmp_path):
    """Of its own rate and that rate's factor, not the arguments'."""
    given = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.5})}
    trainer = by_arguments(tmp_path, compressor=make_gistpool(), own=given, max_steps=2)
    trainer.train()
    assert isinstance(trainer.optimizer.optimizer, torch.optim.SGD)
    assert {group["initial_lr"] for group in trainer.optimizer.param_groups} == {0.5, 1.5}


def test_options_that_a_compressor_cannot_use_are_named(tmp_path):
    for name in ("compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics"):
        with pytest.raises(ValueError, match=f"{name}: expected None, .* `measure` adds figures, got <built-in"):
            by_arguments(tmp_path, own={name: len})
    with pytest.raises(ValueError, match="accelerator_config: expected dispatch_batches: false, got true"):
        by_arguments(tmp_path, accelerator_config={"dispatch_batches": True})
    with pytest.raises(ValueError, match="fp16: expected bf16 or no mixed precision, got fp16"):
        by_arguments(tmp_path, fp16=True)


def test_an_evaluation_reads_a_stream_and_refuses_several_sets(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(ROWS)
    stream = rows.to_iterable_dataset()
    options = {"per_device_eval_batch_size": 5}
    found = [by_arguments(tmp_path, None, each, **options).evaluate() for each in (rows, stream)]
    assert found[0] == found[1] and found[0]["eval_loss"] > 1
    several = {"a": ROWS, "b": ROWS}
    with pytest.raises(ValueError, match=r"eval_dataset: expected one dataset, got \{'a': "):
        by_arguments(tmp_path, None, several)
    with pytest.raises(ValueError, match=r"eval_dataset: expected one dataset, got \{'a': "):
        by_arguments(tmp_path).evaluate(several)
    with pytest.raises(ValueError, match=r"train_dataset: expected rows by number, .* got IterableDataset"):
        by_arguments(tmp_path, stream, rows, make_reader(), max_steps=2).evaluate()


def test_gradient_checkpointing_changes_no_loss(unbroken, tmp_path):
    compressor = make_compressor()
    train(tmp_path, compressor, gradient_checkpointing=True)
    assert numbers(read_metrics(tmp_path / "metrics.jsonl")) == numbers(unbroken[2])
    assert not any(getattr(module, "gradient_checkpointing", False) for module in compressor.modules())


def test_a_disk_without_locks_has_runs(tmp_path, monkeypatch):
    def unsupported(*given):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert train(tmp_path, recipe=dataclasses.replace(RECIPE, steps=2)).steps == 2


def test_the_models_own_weights_train_without_lora(tmp_path):
    compressor = make_compressor(("ae",), lora=None)
    before = compressor.model.model.layers[0].mlp.up_proj.weight.clone()
    train(tmp_path, compressor, recipe=dataclasses.replace(RECIPE, steps=2))
    assert not torch.equal(before, compressor.model.model.layers[0].mlp.up_proj.weight)


def test_more_steps_go_on_and_another_run_is_refused(unbroken, tmp_path):
    short = dataclasses.replace(RECIPE, steps=4)
    train(tmp_path, recipe=short)
    with pytest.raises(ValueError, match="expected no checkpoints, got 2; resume, or use another folder"):
        train(tmp_path, recipe=short)
    with pytest.raises(ValueError, match="the saved run differs in recipe; use the same settings"):
        train(tmp_path, recipe=dataclasses.replace(RECIPE, learning_rate=1e-3), resume=True)
    with pytest.raises(ValueError, match="the saved run differs in losses; use the same settings"):
        train(tmp_path, make_compressor(("ae",)), resume=True)
    held = lock(tmp_path, "run")
    with pytest.raises(OSError, match="expected a folder of no other run, got one that is in use"):
        train(tmp_path, resume=True)
    os.close(held)
    train(tmp_path, resume=True)
    assert numbers(read_metrics(tmp_path / "metrics.jsonl")) == numbers(unbroken[2])
    done = train(tmp_path, resume=True)
    assert done.steps == 8 and done.held_out == unbroken[1].held_out


def poison(compressor, at):
    """A callback after which memory tokens are NaN before a step."""

    def act(step):
        if step == at:
            with torch.no_grad():
                compressor.memory_embeddings.fill_(torch.nan)

    return Before(act)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_checkpoint(tmp_path):
    compressor = make_compressor()
    with pytest.raises(Diverged, match=r"got ae nan, lm nan, .* in step 4; the last good checkpoint is .*checkpoint-2"):
        train(tmp_path, compressor, callbacks=[poison(compressor, 3)])
    assert [path.stem for path in checkpoints.find(tmp_path)] == ["checkpoint-2"]
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 3
    fresh = make_compressor()
    checkpoints.restore(checkpoints.find(tmp_path)[0], fresh.trainable())
    assert all(parameter.isfinite().all() for _, parameter in fresh.trainable())


def test_so_does_one_of_gradients_that_are_not_clipped(tmp_path):
    compressor = make_compressor()
    own = {"callbacks": [poison(compressor, 2)]}
    trainer = by_arguments(tmp_path, compressor=compressor, own=own, max_steps=4, max_grad_norm=0.0, save_steps=1)
    with pytest.raises(Diverged, match=r"grad_norm nan in step 3; the last good checkpoint is .*checkpoint-2"):
        trainer.train()
    assert [path.stem for path in checkpoints.find(tmp_path)] == ["checkpoint-1", "checkpoint-2"]


def test_mistakes_name_the_argument(tmp_path):
    compressor, batches = make_compressor(), make_batches()
    for options, message in [
        ({"accumulate": 3}, "expected a multiple of 1 processes x 3 passes, got 4 rows"),
        ({"accumulate": 0}, "accumulate: expected at least 1, got 0"),
        ({"precision": "fp8"}, "precision: expected one of no, bf16, got 'fp8'"),
        ({"keep": 1}, "keep: expected at least 2, got 1"),
        ({"save_every": 0}, "save_every: expected at least 1, got 0"),
        ({"save_minutes": -1}, "save_minutes: expected at least 0, got -1"),
        ({"gradient_checkpointing": "no"}, "gradient_checkpointing: expected True or False, got 'no'"),
    ]:
        with pytest.raises(ValueError, match=message):
            Trainer(compressor, batches, RECIPE, tmp_path, cpu=True, **options)
    for changes, message in [
        ({"batch": 5}, "batches: expected 5 rows as the recipe says, got 4"),
        ({"patience": 2}, r"patience: expected evaluations \(eval_every\) with it, got 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            Trainer(compressor, batches, dataclasses.replace(RECIPE, **changes), tmp_path, cpu=True, eval_every=None)
    with pytest.raises(ValueError, match="expected 2 <= min <= max, got 9 and 8"):
        Pretraining(load_corpus(), 1, 9, 8)


def test_run_trains_from_plain_arguments_then_on_questions(tmp_path):
    (tmp_path / "book.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 100)
    changes = {"steps": 2, "batch": 2, "min_length": 16, "max_length": 32}
    shape = {"chunk": 8, "ratio": 4, "lora": 4}
    plain = {"cpu": True, "progress": False}
    model = make_compressor(lora=None).model
    first = run(model, None, tmp_path / "a", text=tmp_path / "book.txt", recipe=changes, compressor=shape, **plain)
    assert set(first.held_out) == {"loss", "ae", "lm"} and (tmp_path / "a" / "compressor").is_dir()
    rows = [
        {"context": f"Number {n} follows {n - 1}.", "question": f"And {n}?", "answers": [str(n)]} for n in range(20)
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = make_compressor(lora=None).model
    options = {"preset": "epl-finetune", "recipe": changes, "questions": tmp_path / "questions.jsonl", **plain}
    second = run(model, None, tmp_path / "b", start=tmp_path / "a" / "compressor", **options)
    assert set(second.held_out) == {"loss", "qa"}
    with (
        pytest.warns(UserWarning, match="dtype float16: training has no loss scaling, .*; bfloat16 keeps them"),
        pytest.raises(FileNotFoundError, match="none"),
    ):
        run(make_compressor(lora=None).model.half(), None, tmp_path / "c", text=tmp_path / "none", **plain)
    qa = {"questions": tmp_path / "questions.jsonl"}
    for arguments, message in [
        ({"preset": "none"}, "preset: expected one of epl-pretrain, .*, smollm2-small, got 'none'"),
        ({"method": "gisty"}, "method: expected one of avgpool, .*, sac, select, separate_encoder, voco, got 'gisty'"),
        ({"method": "gistpool", "layout": "epl"}, "layout: expected some of bos_token, .* for gistpool, got layout"),
        ({"method": "icae", "compressor": {"windows": 3}}, "windows: expected some of chunk, .* for icae, got windows"),
        ({"recipe": {"stepz": 1}}, "recipe: expected some of .*steps.*, got stepz"),
        ({"limit": 9, **qa}, "limit: not allowed with questions, got 9"),
        ({"text": "a.txt", **qa}, r"text: not allowed with questions, got a\.txt"),
        ({"dataset": rows, **qa}, "dataset: not allowed with questions, got list"),
        ({"packed": True, **qa}, "packed: not allowed with questions, got True"),
        ({"weights": [2, 1]}, r"weights: not allowed without questions about texts, got \[2, 1\]"),
        ({"split": "test"}, "split: not allowed without questions about texts, got test"),
        ({"split": "test", "images": "a", **qa}, "split: not allowed without questions about texts, got test"),
        ({"preset": "epl-finetune"}, "questions: expected a file for the loss qa, kl, reverse_kl or hidden, got None"),
        (
            {"start": tmp_path, "compressor": {"chunk": 8}},
            "compressor: expected only losses, window and encoder with start, .*'chunk'",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            run(model, None, tmp_path / "c", **arguments)
