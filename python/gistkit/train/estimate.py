"""dry_run: what a run would train, how much it would read and hold in memory, without weights and data."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from gistkit.compress import Compressor, VoCo
from gistkit.evaluate.baselines import Baseline, NoContextBaseline
from gistkit.train.arguments import RunOptions
from gistkit.train.batches import ANSWERED
from gistkit.train.prepare import Prepared, prepare
from gistkit.train.presets import find_preset, notes
from gistkit.train.recipe import Recipe

# Bytes of a layer's activations for each token and channel in 16 bit, without attention's matrices, which the op does
# not keep: Korthikanti et al., arXiv 2205.05198, equation 1.
ACTIVATION_BYTES = 34
# What the parameters of a compressor's own are called, by the beginning of their names.
OWN = {
    "memory_embeddings": "memory tokens",
    "soft_prompt": "soft prompt",
    "task_embeddings": "task tokens",
    "compression_head": "compression head",
    "scorer": "scorer",
    "projector": "projector",
    "copies": "maps of the gists",
}


@dataclass(frozen=True)
class DryRun:
    """A run that was not made; printed, it is a page.

    Args:
        preset: its name.
        model: the base model's class and sizes.
        method: the method and its settings.
        frozen: number of parameters that do not train.
        trained: numbers of those that do, by group.
        recipe: the schedule.
        tokens: (mean, largest) number of tokens of a step, contexts and continuations together; of questions the
            largest number of tokens of only their contexts, and no mean.
        memory: bytes of a process by what they hold.
        operations: floating-point operations of a step's products with weights, forward and backward; of questions
            those of rows of the preset's mean length, or else of contexts of the largest. Attention's own
            products, and those of a vision tower, are not among them.
    """

    preset: str
    model: str
    method: str
    frozen: int
    trained: Mapping[str, int]
    recipe: Recipe
    tokens: tuple[int | None, int]
    memory: Mapping[str, int]
    operations: float

    def __str__(self) -> str:
        recipe, (mean, most) = self.recipe, self.tokens
        length = f"{recipe.steps:,}" if recipe.epochs is None else f"those of {recipe.epochs:g} epochs"
        if recipe.patience is not None:
            length += f", fewer where {recipe.patience} evaluations lower no loss"
        rate = f"{recipe.optimizer}, {recipe.learning_rate:g}, {recipe.schedule} after {recipe.warmup} steps of warm-up"
        read = "contexts of questions, at most" if mean is None else f"{mean:,} on average, at most"
        lines = {
            "model": self.model,
            "method": self.method,
            "frozen": f"{self.frozen:>16,}",
            "trained": f"{sum(self.trained.values()):>16,}",
            **{f"  {name}": f"{count:>16,}" for name, count in self.trained.items()},
            "steps": length,
            "rows a step": recipe.batch,
            "learning rate": rate,
            "tokens a step": f"{read} {most:,}",
            "operations a step": f"about {self.operations:.3g}, without attention's own",
            "memory of a process": f"about {_size(sum(self.memory.values()))}, without caches and fragments",
            **{f"  {name}": _size(size) for name, size in self.memory.items()},
        }
        return "\n".join([notes(self.preset), "", *(f"{name:<28} {value}" for name, value in lines.items())])


def dry_run(
    model: PreTrainedModel,
    *,
    preset: str = "epl-pretrain",
    compressor: Mapping[str, Any] | None = None,
    accumulate: int = 1,
    processes: int = 1,
    precision: str | None = None,
    gradient_checkpointing: bool = False,
    **choices: Any,
) -> DryRun:
    """What `run` would train with these arguments.

    Args:
        model: the base model; one on device "meta", made only from a configuration, needs no memory.
        preset, compressor: as in `run`.
        accumulate, precision, gradient_checkpointing: as in `Trainer`.
        processes: that share a step's rows.
        choices: method, layout, recipe, tau and segment, as in `run`.

    Raises:
        ValueError: as `run`, and if the rows cannot be divided among processes and passes.
    """
    losses = (compressor or {}).get("losses", find_preset(preset).compressor.get("losses", ()))
    questions = None if set(ANSWERED).isdisjoint(losses) else "questions"
    # New weights go where the model's are: without values there, no numbers are drawn.
    with torch.device(model.device):
        made = prepare(model, preset=preset, compressor=compressor, questions=questions, **choices)
    recipe, trained = made.recipe, made.compressor
    rows = RunOptions(accumulate=accumulate).rows(recipe, processes)
    parameters = [parameter for _, parameter in trained.trainable()]
    total = sum(parameter.numel() for parameter in trained.parameters())
    mean = None if questions else recipe.batch * (recipe.min_length + recipe.max_length) // 2
    longest = recipe.max_length
    row_length = min(made.preset.row_length or longest, longest) if mean is None else mean // recipe.batch
    config = trained.config
    return DryRun(
        preset,
        f"{type(model).__name__}, {config.num_hidden_layers} layers of {trained.lm.width}, {model.dtype}",
        _title(made),
        total - sum(parameter.numel() for parameter in parameters),
        groups_of(trained),
        recipe,
        (mean, recipe.batch * recipe.max_length),
        {
            "weights": sum(parameter.numel() * parameter.element_size() for parameter in trained.parameters()),
            "gradients": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
            "optimizer": sum(_state(parameter, recipe.optimizer) for parameter in parameters),
            "activations": activations(
                rows * sum(_tokens(made, recipe.max_length)[:2]),
                trained.lm.width,
                config.num_hidden_layers,
                2 if precision == "bf16" or model.dtype.itemsize == 2 else 4,
                gradient_checkpointing=gradient_checkpointing,
            ),
        },
        recipe.batch * operations(made, row_length),
    )


def groups_of(compressor: Compressor) -> dict[str, int]:
    """The numbers of trained parameters by what they are: LoRA of a role, scorer, memory tokens, ..."""
    groups: dict[str, int] = {}
    for name, parameter in compressor.trainable():
        group = _group(compressor, name)
        groups[group] = groups.get(group, 0) + parameter.numel()
    return groups


def _tokens(made: Prepared, length: int) -> tuple[int, int, int]:
    """Tokens of a row of that length that the encoder reads and that the losses read, and those that they predict."""
    if made.tau is not None:
        return 0, length, length
    compressor, losses = made.compressor, made.compressor.loss_weights
    # Answers are short.
    context = length if not set(ANSWERED).isdisjoint(losses) else made.recipe.context_of(length)
    predicted = {"ae": context, "lm": length - context, "compression": context}
    # The compression loss reads memory tokens as they are; the others have a pass each.
    passes = [name for name in losses if name != "compression"]
    read, asked = (sum(predicted.get(name, 0) for name in names) for names in (passes, losses))
    if compressor.method == NoContextBaseline.method:
        # The first token and the text.
        return 0, len(passes) + read, asked
    # A chunk of VoCo's is an image, of which there is one in a row here.
    chunks = 1 if isinstance(compressor, VoCo) else math.ceil(context / compressor.chunk)
    memory = chunks * compressor.memory_tokens
    # Means and nuggets have no tokens of their own, and kept keys and values are not read again as tokens.
    encoded = context + memory * (getattr(compressor, "memory_embeddings", None) is not None)
    return encoded, read + len(passes) * memory * (compressor.carrier == "embedding"), asked


def operations(made: Prepared, length: int) -> float:
    """Floating-point operations of a row of that length: two a weight and token each way, two more a trained weight."""
    compressor = made.compressor
    encoded, read, asked = _tokens(made, length)
    head = compressor.model.get_output_embeddings().weight
    products = [_products(compressor, model) for model in (compressor.encoder_lm.model, compressor.model)]
    return encoded * products[0] + read * products[1] + asked * 4.0 * head.numel()


def _products(compressor: Compressor, model: Any) -> float:
    """Operations of a token with the weights of one of a compressor's models."""
    apart = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    if isinstance(compressor, VoCo):
        # It reads pixels, and no tokens.
        apart.update(map(id, compressor.vision.tower.parameters()))
    weights = [each for each in model.parameters() if each.dim() > 1 and id(each) not in apart]
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    return 4.0 * sum(map(nn.Parameter.numel, weights)) + 2.0 * trained


def activations(tokens: int, width: int, layers: int, size: int, *, gradient_checkpointing: bool) -> int:
    """Bytes that a pass of so many tokens keeps for its gradient, in numbers of `size` bytes."""
    layer = tokens * width * ACTIVATION_BYTES * size // 2
    return layer + layers * tokens * width * size if gradient_checkpointing else layers * layer


def _group(compressor: Compressor, name: str) -> str:
    if isinstance(compressor, VoCo):
        family = compressor.vision.family
        # The tower may hold the projector.
        for part, group in ((family.projector, "projector"), (family.tower, "vision tower")):
            if f".{part}." in name:
                return group
    adapters = compressor.adapters
    if adapters is not None and adapters.owns(name):
        role = next(role for role, adapter in adapters.names.items() if adapter in name.split("."))
        if "lora_" not in name:
            return f"{_part(name)} of the {role}"
        return f"LoRA of the {role}{', embeddings' if 'lora_embedding_' in name else ''}"
    whose = "encoder" if name.startswith("encoder.") else "model"
    return OWN.get(name.partition(".")[0], f"the {whose}'s {_part(name)}")


def _part(name: str) -> str:
    if re.search(r"norm|\bln_", name):
        return "norms"
    return "embeddings" if re.search(r"embed|\bwte\b|\bwpe\b|lm_head", name) else "maps"


def _title(made: Prepared) -> str:
    compressor = made.compressor
    losses = ", ".join(compressor.loss_weights)
    if isinstance(compressor, Baseline):
        return f"{compressor.title}, the model itself, losses {losses}"
    if isinstance(compressor, VoCo):
        tokens, layout = compressor.memory_tokens, compressor.options.layout
        return f"{compressor.method}, {tokens} VoCo tokens an image in layout {layout}, losses {losses}"
    chunk = "" if compressor.memory_tokens == 1 else f", chunks of {compressor.chunk} in layout {compressor.layout}"
    if made.tau is not None:
        return f"{compressor.method} at {compressor.ratio:g}x, streaming, the last {made.tau} tokens in full"
    return f"{compressor.method} at {compressor.ratio:g}x{chunk}, losses {losses}"


def _state(parameter: nn.Parameter, optimizer: str) -> int:
    """Bytes of Adam's two moments, or of Adafactor's mean of each row and column, or of each number of a vector."""
    numbers = parameter.numel()
    if optimizer != "adafactor":
        numbers *= 2
    elif parameter.dim() > 1:
        *rest, rows, columns = parameter.shape
        numbers = math.prod(rest) * (rows + columns)
    return numbers * parameter.element_size()


def _size(number: int) -> str:
    return f"{number / 2**30:.2f} GiB"
