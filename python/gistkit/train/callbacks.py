"""What happens beside a trainer's steps: random numbers, patience, the metrics' file, the bar."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import TrainerCallback

from gistkit.common.files import Lines, write_text
from gistkit.train.metrics import METRICS, Record
from gistkit.train.resumable import Flow
from gistkit.train.sharding import gathers_kept_keys

EVAL = "eval_"


class StepFlow(Flow):
    """What a `CompressorTrainer` has besides: random numbers of each step's own, and patience."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        super().on_train_begin(args, state, control)
        self.trainer.begin_records()
        self.trainer.stack.enter_context(gathers_kept_keys(self.trainer.compressor))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Rows that are grouped by length are drawn now: the same in all processes, and in a run that continues.
        seeds = np.random.SeedSequence([args.data_seed, int(state.epoch or 0)])
        torch.manual_seed(int(seeds.generate_state(1)[0]))

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seed_step(args, state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        super().on_evaluate(args, state, control)
        if self.trainer.patience is not None and state.global_step:
            # The run may end with these weights.
            control.should_save = True
            control.should_training_stop |= waited(state) >= self.trainer.patience


def seed_step(args: Any, state: Any, *stream: int) -> None:
    """Sets what the next step draws, the same in a run that continues; each `stream` of numbers draws its own."""
    seeds = np.random.SeedSequence([args.seed, state.global_step, args.process_index, *stream])
    torch.manual_seed(int(seeds.generate_state(1)[0]))


def waited(state: Any) -> int:
    """The evaluations in a row that lowered no loss; the one before the first step does not count."""
    losses = [entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry and entry["step"]]
    return len(losses) - 1 - losses.index(min(losses)) if losses else 0


def record_of(entry: dict[str, Any]) -> Record | None:
    """The record of metrics.jsonl of what a trainer has logged; None: it has none."""
    # A checkpoint has sorted them too.
    entry = dict(sorted(entry.items()))
    held_out = {name.removeprefix(EVAL): value for name, value in entry.items() if name.startswith(EVAL)}
    if held_out:
        return {"step": entry["step"], "held_out": {"loss": held_out["loss"]} | held_out}
    if not {"loss", "learning_rate"} <= entry.keys():
        return None
    values = {name: value for name, value in entry.items() if name not in ("epoch", "learning_rate")}
    return {"step": entry["step"], "loss": entry["loss"], "lr": entry["learning_rate"]} | values


class MetricsFile(TrainerCallback):
    """Writes the records of a run to metrics.jsonl, each at once."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            # What an interrupted run wrote after its last checkpoint comes again.
            lines = [f"{json.dumps(record)}\n" for record in filter(None, map(record_of, state.log_history))]
            write_text(Path(args.output_dir) / METRICS, "".join(lines))

    def on_log(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        record = record_of(state.log_history[-1])
        if state.is_world_process_zero and record is not None:
            with closing(Lines(Path(args.output_dir) / METRICS)) as lines:
                lines.write(json.dumps(record))


class Bar(TrainerCallback):
    """A progress bar with the loss, the speed and the last held-out loss; it ends with `stack`."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        shown = state.is_local_process_zero
        bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", dynamic_ncols=True, disable=not shown)
        self._bar, self._held_out = self.stack.enter_context(bar), ""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._bar.update(state.global_step - self._bar.n)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        record = record_of({"step": state.global_step, **(logs or {})}) or {}
        if "held_out" in record:
            self._held_out = f", held-out {record['held_out']['loss']:.3f}"
        elif "loss" in record:
            text = f"loss {record['loss']:.3f}, {record['tokens_per_second']:.0f} tokens/s"
            self._bar.set_postfix_str(text + self._held_out)
