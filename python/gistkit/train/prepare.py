"""prepare: the recipe and the compressor of a run, from a preset and its changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from gistkit.common.messages import refuse
from gistkit.compress import METHODS, Compressor, VoCo
from gistkit.compress.losses import check_losses
from gistkit.evaluate.baselines import BASELINES, has_baseline, load_baseline
from gistkit.hf.chat import tile_separators
from gistkit.train.batches import ANSWERED
from gistkit.train.presets import Preset, find_preset
from gistkit.train.recipe import Recipe


@dataclass(frozen=True)
class Prepared:
    """What a run trains, and how; `tau` and `segment` are of the language model that reads with it, or None."""

    preset: Preset
    recipe: Recipe
    compressor: Compressor
    tau: int | None
    segment: int | None


def prepare(
    model: PreTrainedModel,
    tokenizer: Any = None,
    *,
    preset: str = "epl-pretrain",
    method: str | None = None,
    layout: str | None = None,
    recipe: Mapping[str, Any] | None = None,
    compressor: Mapping[str, Any] | None = None,
    start: str | Path | None = None,
    baseline: str | None = None,
    tau: int | None = None,
    segment: int | None = None,
    questions: str | None = None,
    images: bool = False,
) -> Prepared:
    """The recipe and the compressor; the arguments are `run`'s, `questions` a name of all of them."""
    found = find_preset(preset)
    schedule = changed(found.recipe, recipe or {})
    defaults, changes = dict(found.compressor), dict(compressor or {})
    if baseline is not None:
        if baseline not in BASELINES:
            raise ValueError(f"baseline: expected one of {', '.join(BASELINES)}, got {baseline!r}")
        others = {name: value for name, value in changes.items() if name not in ("losses", "end_token")}
        where = "with baseline, which trains only task tokens"
        refuse(where, {"tau": tau, "method": method, "layout": layout, "start": start} | others)
    method = found.method if method is None else method
    losses = changes.get("losses", defaults.pop("losses", None))
    if tau is None and found.tau is not None and losses is None:
        tau, segment = found.tau, found.segment if segment is None else segment
    if tau is not None:
        losses = None
        where = "with tau, which trains on whole passages"
        refuse(where, {"baseline": baseline, "losses": changes.get("losses"), "questions": questions})
        if tau >= schedule.max_length:
            raise ValueError(
                f"tau: expected less than max_length, {schedule.max_length}, so that a passage has a compressed past, "
                f"got {tau}"
            )
    else:
        refuse("without tau", {"segment": segment})
        weights = check_losses(losses)
        _check_questions(weights, losses, questions)
        defaults["losses"] = losses
        if "lm" in weights and schedule.context_of(schedule.min_length) == schedule.min_length:
            raise ValueError(
                f"context_share: expected a continuation of every passage for the loss lm, got {schedule.context_share}"
            )
    if start is not None and (unknown := sorted(changes.keys() - {"losses", "window", "encoder"})):
        raise ValueError(
            f"compressor: expected only losses, window and encoder with start, which has its own settings, got "
            f"{unknown}"
        )
    if images and questions is None:
        raise ValueError("images: not allowed without questions about them, got a folder")
    if method not in METHODS:
        raise ValueError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")
    # The same new weights in every process, whatever was drawn before.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(schedule.seed)
        if baseline is not None:
            end_token = changes.get("end_token")
            made: Compressor = BASELINES[baseline](model, task_tokens=True, losses=losses, end_token=end_token)
        elif start is None:
            if images and method == VoCo.method:
                changes.setdefault("separators", tile_separators(model, tokenizer))
            made = METHODS[method](model, **_method_arguments(method, layout, defaults, changes))
        else:
            made = _load_start(Path(start), model, losses, changes.get("encoder"))
            if "window" in changes:
                made.set_window(changes["window"])
    return Prepared(found, schedule, made, tau, segment)


def changed(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """A recipe with other values in some of its fields.

    Steps replace its epochs. If only max_length is given, min_length is at most that.
    """
    fields = {field.name for field in dataclasses.fields(recipe)}
    if unknown := sorted(set(changes) - fields):
        raise ValueError(f"recipe: expected some of {', '.join(sorted(fields))}, got {', '.join(unknown)}")
    if changes.get("epochs") is not None and "steps" in changes:
        raise ValueError(f"epochs: not allowed with steps, {changes['steps']}, got {changes['epochs']}")
    implied: dict[str, Any] = {"epochs": None} if "steps" in changes else {}
    if isinstance(longest := changes.get("max_length"), int) and longest >= 2:
        implied["min_length"] = min(recipe.min_length, longest)
    return dataclasses.replace(recipe, **implied | dict(changes))


def _check_questions(weights: Mapping[str, float], losses: Any, questions: str | None) -> None:
    if set(ANSWERED).isdisjoint(weights) != (questions is None):
        expectation = "a file for" if questions is None else "none without"
        answered = f"{', '.join(ANSWERED[:-1])} or {ANSWERED[-1]}"
        raise ValueError(
            f"questions: expected {expectation} the loss {answered}, got {questions} with the losses {losses}"
        )


def _load_start(folder: Path, model: PreTrainedModel, losses: Any, encoder: Any) -> Compressor:
    """A trained compressor or baseline with other losses; None: its own. Its second model may be named."""
    if has_baseline(folder):
        compressor: Compressor = load_baseline(folder, model)
    else:
        compressor = Compressor.from_pretrained(folder, model, encoder=encoder)
    if losses is not None:
        compressor.set_losses(losses)
    return compressor


def _method_arguments(
    method: str, layout: str | None, preset: Mapping[str, Any], changes: Mapping[str, Any]
) -> dict[str, Any]:
    """The method's arguments from a preset and its changes."""
    method_arguments = METHODS[method].config_class.names()
    arguments = dict(changes) if layout is None else {**changes, "layout": layout}
    if unknown := sorted(arguments.keys() - method_arguments):
        raise ValueError(
            f"{unknown[0]}: expected some of {', '.join(sorted(method_arguments))} for {method}, got {unknown[0]}"
        )
    found = {name: value for name, value in preset.items() if name in method_arguments} | arguments
    if isinstance(found.get("lora"), Mapping):
        from peft import LoraConfig

        try:
            found["lora"] = LoraConfig(**found["lora"])
        except TypeError as error:
            raise ValueError(f"lora: expected arguments of peft.LoraConfig, got {found['lora']}: {error}") from error
    return found
