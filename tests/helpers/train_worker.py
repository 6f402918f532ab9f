"""A tiny compressor and its training, for tests of training in processes of their own.

example: python tests/helpers/train_worker.py runs/processes
"""

import contextlib
import dataclasses
import functools
import os
import signal
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from gistkit.common.signals import Interrupted
from gistkit.compress import AvgPool, Compressive, Compressor, Dodo, FiveHundredX, GistPool, MixedResolution
from gistkit.evaluate import Example
from gistkit.train import (
    CompressorTrainer,
    Pretraining,
    QuestionAnswering,
    Recipe,
    Trainer,
    checkpoints,
    load_corpus,
    read_metrics,
)

RECIPE = Recipe(steps=8, batch=4, learning_rate=1e-2, warmup=3, clip=1.0, min_length=16, max_length=40)
# Of a step and of an evaluation: whatever else a record holds are seconds.
NUMBERS = ("step", "loss", "ae", "lm", "qa", "lr", "grad_norm", "held_out")


def make_model(dtype=torch.float32):
    """The same weights at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).to(dtype)


def make_compressor(losses=("ae", "lm"), *, lora=4, dropout=0.0, dtype=torch.float32, method=FiveHundredX):
    """The same weights at every call."""
    model = make_model(dtype)
    if lora and dropout:
        lora = LoraConfig(r=lora, lora_alpha=2 * lora, lora_dropout=dropout, target_modules=["q_proj", "v_proj"])
    return method(model, chunk=8, ratio=4, layout="epl", losses=losses, lora=lora)


def make_gistpool():
    """One that makes keys of a layer's output, with adapters by role."""
    return GistPool(make_model(), ratio=4, losses=("ae", "lm"), lora=4, bos_token=0)


def make_dodo():
    """One that runs the lower layers of the base model by themselves, and learns through the bias of its keys."""
    return Dodo(make_model(), ratio=4, layer=1, losses=("ae", "lm"), lora=4, bos_token=0)


def make_reader(tau=8, segment=4, **options):
    """A Dodo that reads on, whose threshold training finds."""
    dodo = Dodo(make_model(), **{"ratio": 4, "layer": 1, "lora": 4, "bos_token": 0} | options)
    return MixedResolution(dodo, tau=tau, segment=segment)


def make_compressive():
    """An AvgPool that reads on."""
    return Compressive(AvgPool(make_model(), ratio=4, lora=4, bos_token=0), tau=8, segment=4)


def make_batches(recipe=RECIPE):
    """Passages of the default corpus."""
    return Pretraining(load_corpus(), recipe.batch, recipe.min_length, recipe.max_length, recipe.seed)


class Before(TrainerCallback):
    """Calls a function with each step 0, 1, ... when it begins."""

    def __init__(self, action):
        self.action = action

    def on_step_begin(self, args, state, control, **_):
        self.action(state.global_step)


class Ends(TrainerCallback):
    """Ends the run behind a step, in one process."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step and args.process_index == 0:
            control.should_training_stop = True


def make_questions(recipe=RECIPE):
    """Contexts, questions and answers of lengths that differ within a batch."""
    examples = [
        Example(
            f"{'word ' * (1 + number % 7)}number {number}.",
            question="Which?" * (1 + number % 3),
            answers=(f"It is {number}{'!' * (number % 5)}",),
        )
        for number in range(40)
    ]
    return QuestionAnswering(examples, None, recipe.batch, recipe.seed)


def train(out, compressor=None, batches=None, recipe=RECIPE, *, resume=False, **options):
    options = {"cpu": True, "progress": False, "eval_every": 4, "held_out": 10, "save_every": 2} | options
    compressor = compressor or make_compressor()
    return Trainer(compressor, batches or make_batches(recipe), recipe, out, **options).train(resume=resume)


# Compressors whose adapters, own weights and roles are sharded in their own ways.
SHORT_RUNS = {
    "x500": make_compressor,
    "own": functools.partial(make_compressor, lora=None),
    "gistpool": make_gistpool,
    "dodo": make_dodo,
    "reader": make_reader,
}


def short_run(out, name, steps=4, **options):
    """A run of one of `SHORT_RUNS`, with an evaluation before each checkpoint."""
    recipe = dataclasses.replace(RECIPE, steps=steps)
    options = {"gradient_checkpointing": name == "dodo"} | options
    return train(out, SHORT_RUNS[name](), recipe=recipe, eval_every=2, held_out=4, **options)


def broken_run(out, name):
    """The same in two parts."""
    short_run(out, name, steps=2)
    short_run(out, name, resume=True)


def exported(run):
    """The weights of the trained compressor that a run saved, by name."""
    model = None if (run / "compressor" / "model").is_dir() else make_model()
    return dict(Compressor.from_pretrained(run / "compressor", model).trainable())


def same_weights(run, other, **tolerance):
    """Two runs saved the same, to the bit where no tolerance is given."""
    ours, theirs = exported(run), exported(other)
    assert ours.keys() == theirs.keys() and len(ours) > 5
    for name, weight in ours.items():
        torch.testing.assert_close(
            weight, theirs[name], **{"rtol": 0, "atol": 0} | tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def same_run(ours, theirs):
    """Two runs have the same records and save the same weights, up to the rounding of sums in another order."""
    close(*(read_metrics(run / "metrics.jsonl") for run in (ours, theirs)))
    same_weights(ours, theirs, rtol=1e-4, atol=1e-5)


def close(records, others, rtol=5e-6):
    """Same records, numbers within rtol of each other."""
    assert [record.keys() for record in records] == [other.keys() for other in others]
    for record, other in zip(numbers(records), numbers(others), strict=True):
        for name, value in record.items():
            expected = other[name]
            pairs = [(value[key], expected[key]) for key in value] if isinstance(value, dict) else [(value, expected)]
            assert all(abs(a - b) <= rtol * abs(b) for a, b in pairs), (record["step"], name, value, expected)


@contextlib.contextmanager
def evaluations(losses):
    """Inside, evaluations find these losses by step, in place of their own."""
    evaluate = Trainer.evaluate

    def found(self, *args, **options):
        measure, loss = self.measure, losses[self.state.global_step]
        self.measure = lambda compressor: dict.fromkeys(["loss", *self.losses.names], loss)
        metrics = evaluate(self, *args, **options)
        self.measure = measure
        return metrics

    Trainer.evaluate = found
    try:
        yield
    finally:
        Trainer.evaluate = evaluate


# The lowest is that of step 2; the run ends after two evaluations that are no lower.
LOSSES = {0: 5.0, 1: 4.0, 2: 3.0, 3: 3.5, 4: 3.0}


def stopping_run(out, name="x500", losses=LOSSES, patience=2, **options):
    """A run of one of `SHORT_RUNS` that ends early, with an evaluation after each step."""
    recipe = dataclasses.replace(RECIPE, patience=patience)
    with evaluations(losses):
        return train(out, SHORT_RUNS[name](), recipe=recipe, **{"eval_every": 1, "held_out": 4} | options)


def numbers(records):
    """The part of metrics that does not depend on the clock."""
    return [{name: value for name, value in record.items() if name in NUMBERS} for record in records]


def killed(out):
    """Training with dropout that dies while the checkpoint of step 6 takes its place."""
    rename = os.rename

    def die(source, target):
        if Path(target) == checkpoints.path_of(out, 6):
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    os.rename = die
    train(out, make_compressor(dropout=0.1))


def processes(out):
    """The runs that must not depend on the number of processes."""
    train(out / "passages")
    state = PartialState()
    train(out / "ended", callbacks=[Ends(5)])
    (out / f"process-{state.process_index}-of-{state.num_processes}").touch()
    train(out / "accumulated", accumulate=2)
    train(out / "questions", make_compressor(("ae", "qa")), make_questions())
    interrupted(out / "interrupted", state.process_index == 1)
    for name in ("x500", "reader"):
        stopping_run(out / "ending" / name, name)
    train(out / "reader", make_reader(), accumulate=2)


# Of lengths that differ, for `by_arguments`.
ROWS = [{"input_ids": list(range(row, row + 5 + row % 3)), "continuation_ids": [row, 7]} for row in range(12)]


def by_arguments(out, rows=None, evaluated=None, compressor=None, own=(), **options):
    """A `CompressorTrainer` with options of its `own`, and those of `TrainingArguments`."""
    options = {"per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 1e-2} | options
    args = TrainingArguments(str(out), use_cpu=True, report_to=[], **options)
    own = {"progress": False} | dict(own)
    return CompressorTrainer(compressor or make_compressor(), args, rows or ROWS, evaluated, **own)


def evaluated_first(out):
    """Training after an evaluation; each process writes the weights it ends with."""
    options = {"max_steps": 3, "per_device_train_batch_size": 2, "save_strategy": "no"}
    trainer = by_arguments(out, evaluated=ROWS[:4], **options)
    trainer.evaluate()
    trainer.train()
    weights = [weight.detach() for _, weight in trainer.trained()]
    torch.save(weights, out / f"weights-{trainer.args.process_index}.pt")


class Stream(torch.utils.data.IterableDataset):
    """Rows of one length and of several by turns, so that some batches have a mask."""

    def __iter__(self):
        for row in range(24):
            length = 4 + row % 3 * (row // 4 % 2)
            yield {"input_ids": list(range(row, row + length)), "continuation_ids": [row, 7]}


def streamed(out, rows):
    """Training on a stream, `rows` at a time in each process."""
    by_arguments(out, Stream(), max_steps=6, per_device_train_batch_size=rows, save_strategy="no").train()


def interrupted(out, gets_signal):
    """Training that one process's signal ends in all of them, and that then goes on."""

    def signalling(step):
        if gets_signal and step == 2:
            signal.raise_signal(signal.SIGTERM)

    try:
        train(out, callbacks=[Before(signalling)])
    except Interrupted as error:
        assert error.number == signal.SIGTERM and checkpoints.find(out)[-1] == checkpoints.path_of(out, 3)
    else:
        raise AssertionError("the run went on")
    train(out, resume=True)


def check_equal(out, whole):
    """Two runs have the same losses, and every step once; their last checkpoints are the same bit for bit."""
    assert numbers(read_metrics(out / "metrics.jsonl")) == numbers(read_metrics(whole / "metrics.jsonl"))
    for file in (checkpoints.WEIGHTS, checkpoints.OPTIMIZER):
        ours, theirs = (load_file(checkpoints.find(folder)[-1] / file) for folder in (out, whole))
        assert ours.keys() == theirs.keys() and len(ours) > 10
        assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def trained(out):
    """A run with a checkpoint at every step, from the last one on; with dropout."""
    torch.set_num_threads(1)
    train(out, make_compressor(dropout=0.1), resume=True, save_every=1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    processes(Path(sys.argv[1]))
