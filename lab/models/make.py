"""Trains the compressors in models/: a number of steps at a sitting, from where the last one ended.

A sitting that is interrupted (Ctrl-C, SIGTERM, or the end of --minutes) pauses after its step; the same command goes on
with it, to the bit while its checkpoint in runs/models is there, and else from the weights in models/. Each sitting
writes the weights in bfloat16, a line of history.jsonl, and the card.

example: OMP_NUM_THREADS=1 python lab/models/make.py smollm2-x500-4x --steps 2500
example: OMP_NUM_THREADS=1 python lab/models/make.py smollm2-x500-4x --steps 2500 --minutes 50
example: python lab/models/make.py smollm2-x500-4x --steps 10000 --batch 80 --minutes 25    # on a GPU
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from card import write_card
from measure import measured
from passages import Passages
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from texts import manuals
from transformers import TrainerCallback

from gistkit.common.signals import Interrupted
from gistkit.compress import METHODS, Compressor
from gistkit.hf.smollm2 import load_smollm2
from gistkit.info import machine
from gistkit.train import Recipe, Trainer, read_metrics
from gistkit_lab.studies.results import commit

FOLDER = Path(__file__).resolve().parents[2] / "models"
RUNS = FOLDER.parent / "runs" / "models"
MAPS = ["q_proj", "k_proj", "v_proj", "o_proj"]


@dataclass(frozen=True)
class Stage:
    """What is trained on for a number of steps; the last stage goes on as long as one likes.

    Contexts have `shortest` to `longest` tokens.
    """

    steps: int
    losses: Mapping[str, float]
    shortest: int
    longest: int
    continuation: int = 64


@dataclass(frozen=True)
class Model:
    """A compressor of SmolLM2-135M and how it is trained."""

    method: str
    settings: Mapping[str, Any]
    stages: Sequence[Stage]
    # Of LoRA on queries, keys, values and outputs.
    rank: int = 16
    # Contexts a step, where a sitting has no number of its own.
    batch: int = 4
    # Of each sitting, which ends with a falling learning rate, so that its weights can be used.
    learning_rate: float = 2e-3
    warmup: int = 50
    decay: float = 0.25
    precision: str = "bf16"


RECONSTRUCT = Stage(600, {"ae": 1.0}, 32, 128)
ALL = Stage(1680, {"ae": 1.0, "lm": 0.3, "qa": 0.5}, 32, 128)
# By then facts are found and what follows is read: half of a gradient's noise is of answers, and the last memory tokens
# of a chunk, which contexts of more than 120 tokens alone have, are seldom trained.
SHARPEN = Stage(1600, {"ae": 1.0, "lm": 0.1, "qa": 0.1}, 64, 128)
# Documents are of many chunks.
CHUNKS = Stage(30_000, {"ae": 1.0, "lm": 0.3, "qa": 0.5}, 32, 512)
# Means of tokens are read from the first step on: they need not be learned, only gone on from and answered from.
# 400 steps answer 97% of the questions about a fact in 128 tokens: longer contexts have more to teach.
ANSWER = Stage(400, {"lm": 1.0, "qa": 1.0}, 32, 128)
LONGER = Stage(30_000, {"lm": 1.0, "qa": 1.0}, 32, 512)
MODELS = {
    "smollm2-x500-4x": Model(
        "x500", {"chunk": 128, "ratio": 4, "layout": "epl"}, (RECONSTRUCT, ALL, SHARPEN, CHUNKS)
    ),
    "smollm2-avgpool-2x": Model("avgpool", {"ratio": 2}, (ANSWER, LONGER), learning_rate=1e-3, warmup=20),
}  # fmt: skip


@dataclass
class Sitting:
    """A line of history.jsonl: the steps [first, last) of those up to `until`, and what they gave.

    Steps are counted over all sittings; `last` is below `until` in one that has paused.
    """

    first: int
    last: int
    until: int
    batch: int = 4
    tokens: int = 0
    seconds: float = 0.0
    # Losses at the end in nats a token, and figures by domain, if it was measured.
    held_out: dict[str, float] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)


class Until(TrainerCallback):
    """Ends a training after a step, once it is `deadline` by the monotonic clock."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Looks whether it is time."""
        control.should_training_stop |= time.monotonic() >= self.deadline


def history(folder: Path) -> list[Sitting]:
    """The sittings of a model so far."""
    path = folder / "history.jsonl"
    return [Sitting(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def lora_of(rank: int) -> LoraConfig:
    """The LoRA of all adapters here."""
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=MAPS)


def new_compressor(model: Model, losses: Sequence[str] = ("ae",)) -> Compressor:
    """The untrained compressor, the same at every call."""
    torch.manual_seed(0)
    given: dict[str, Any] = {"losses": losses, "lora": lora_of(model.rank), **model.settings}
    made: Compressor = METHODS[model.method](load_smollm2()[0], **given)
    made.languages = ("en",)
    return made


def save(compressor: Compressor, folder: Path) -> None:
    """Writes a compressor with its trained weights in bfloat16."""
    compressor.save_pretrained(folder)
    for path in folder.rglob("*.safetensors"):
        half = {
            name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
            for name, tensor in load_file(path).items()
        }
        save_file(half, path, metadata={"format": "pt"})


def parts(stages: Sequence[Stage], first: int, until: int) -> list[tuple[Stage, int]]:
    """The stages of the steps [first, until), each with its number of them."""
    found, start = [], 0
    for index, stage in enumerate(stages):
        end = until if index == len(stages) - 1 else start + stage.steps
        count = min(until, end) - max(first, start)
        if count > 0:
            found.append((stage, count))
        start = end
    return found


def sit(name: str, steps: int, contexts: int, *, batch: int | None = None, deadline: float = float("inf")) -> Sitting:
    """Trains for a sitting, or to the end of the last one if that has paused; writes what it gave.

    Args:
        name: of `MODELS`.
        steps: of a new sitting.
        contexts: that a whole sitting is measured on, in each domain; 0: it is not.
        batch: contexts a step of a new sitting; None: the model's.
        deadline: by the monotonic clock, after which it pauses.

    Raises:
        Interrupted: after a signal, when all is written.
    """
    model, folder = MODELS[name], FOLDER / name
    before = history(folder)
    work = RUNS / name
    if before and before[-1].last < before[-1].until and (work / f"{before[-1].first}").exists():
        now = before.pop()
        now.last = now.first
    else:
        first = before[-1].last if before else 0
        now = Sitting(first, first, first + steps, batch=batch or model.batch)
    corpus = manuals()
    compressor = Compressor.from_pretrained(folder, load_smollm2()[0]) if before else new_compressor(model)
    now.machine = {**machine(), "commit": commit(FOLDER)}
    now.tokens, now.seconds = 0, 0.0
    interrupted, paused = None, False
    sections = parts(model.stages, now.first, now.until)
    for index, (stage, count) in enumerate(sections):
        out = work / f"{now.first}" / f"{index}"
        compressor.set_losses(dict(stage.losses))
        is_last = index == len(sections) - 1
        recipe = Recipe(
            steps=count, batch=now.batch, learning_rate=model.learning_rate, warmup=model.warmup,
            weight_decay=0.0, seed=now.first + index,
            schedule="linear" if is_last else "constant", decay=model.decay if is_last else 1.0,
        )  # fmt: skip
        passages = Passages(corpus, stage.shortest, stage.longest, stage.continuation, now.batch, recipe.seed)
        trainer = Trainer(
            compressor, passages, recipe, out, precision=model.precision, cpu=not torch.cuda.is_available(),
            eval_every=250, held_out=32, save_every=10**9, callbacks=[Until(deadline)],
        )  # fmt: skip
        try:
            # A part that had ended before only loads its last checkpoint.
            result = trainer.train(resume=out.exists())
            paused = result.steps < count
            now.held_out = now.held_out if paused else result.held_out
        except Interrupted as error:
            interrupted, paused = error, True
        steps_done = [record for record in read_metrics(out / "metrics.jsonl") if "seconds" in record]
        now.last += len(steps_done)
        now.seconds += steps_done[-1]["seconds"]
        clock = [0.0, *(record["seconds"] for record in steps_done)]
        rates = [record["tokens_per_second"] for record in steps_done]
        now.tokens += round(
            sum(rate * (end - begin) for rate, (begin, end) in zip(rates, pairwise(clock), strict=True))
        )
        if paused:
            break
    if contexts and not paused:
        now.measured = measured(compressor.eval(), contexts)
    partial = folder.with_name(f"{name}.new")
    shutil.rmtree(partial, ignore_errors=True)
    save(compressor, partial)
    lines = [*before, now]
    write_history(partial, lines)
    write_card(partial, name, model, lines)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    if interrupted is not None:
        raise interrupted
    return now


def write_history(folder: Path, lines: Sequence[Sitting]) -> None:
    """Writes history.jsonl, a line a sitting."""
    text = "".join(json.dumps(vars(line), separators=(",", ":")) + "\n" for line in lines)
    (folder / "history.jsonl").write_text(text)


def main() -> int:
    """Trains one of the models for a sitting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--steps", type=int, default=2500, help="of the sitting (default: %(default)s)")
    parser.add_argument("--batch", type=int, help="contexts a step of the sitting (default: the model's, for a CPU)")
    parser.add_argument("--minutes", type=float, help="after which the sitting pauses (default: at its end alone)")
    parser.add_argument(
        "--contexts", type=int, default=64, help="to measure it on in each domain; 0: none (default: %(default)s)"
    )
    options = parser.parse_args()
    start = time.monotonic()
    deadline = float("inf") if options.minutes is None else start + 60 * options.minutes
    try:
        found = sit(options.model, options.steps, options.contexts, batch=options.batch, deadline=deadline)
    except Interrupted as error:
        print(f"{error}; the weights are in {FOLDER / options.model}", file=sys.stderr)
        return 128 + error.number
    if found.last < found.until:
        print(
            f"Paused after step {found.last} of {found.until}, as {options.minutes:g} minutes are over; the same "
            f"command goes on. The weights are in {FOLDER / options.model}."
        )
        return 0
    print(json.dumps(vars(found)), f"{(time.monotonic() - start) / 60:.1f} minutes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
