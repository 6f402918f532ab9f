"""Study `in-place`: a decoder answers from a context that each method compresses in place, at several ratios.

The context is real text with codes between its sentences. A question asks for a code, or for the continuation of a
passage. All arms have the same model, steps, batches and held-out questions (Long Context In-Context Compression by
Getting to the Gist of Gisting (GistPool), Figure 2 and Table 3; there the model is Gemma2 2B and the questions are
SQuAD's and others).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from gistkit import compress
from gistkit.compress.methods.in_place import InPlace
from gistkit_lab.studies import models
from gistkit_lab.studies.fitting import StudyRecipe


@dataclass(frozen=True)
class Recipe(StudyRecipe):
    """Everything that determines a run except its arm and seed.

    Args:
        model: "smollm2" (SmolLM2-135M, with LoRA of rank `rank`) or "small" (a Llama of 0.6M parameters on bytes, all
            of whose weights train, after `base_steps` steps that the arms of a seed share: answers from the full
            context, as a language model every token of context, question and answer, and random bytes that come again).
        min_length, max_length, lines, cue, answer: of the questions, see `Needles`.
        memory_factor, copy_factor: the learning rate of what memory tokens alone have, in `learning_rate`; the second
            of whole maps beside LoRA.
        start_gists: fewest gists that `start_as_means` fits, for the arm whose gists start as means.
        eval_questions: held-out questions of each kind at every evaluation.
        final_questions: questions of each kind at the end, held-out ones and as many of the test split.
    """

    steps: int = 100
    batch: int = 4
    learning_rate: float = 1e-3
    warmup: int = 10
    weight_decay: float = 0.0
    model: str = "smollm2"
    rank: int = 64
    base_steps: int = 0
    min_length: int = 96
    max_length: int = 128
    lines: int = 3
    cue: int = 8
    answer: int = 8
    memory_factor: float = 3.0
    copy_factor: float = 0.1
    start_gists: int = 5000
    eval_questions: int = 16
    final_questions: int = 48


QUICK = Recipe(
    model="small", steps=300, base_steps=3000, batch=16, learning_rate=2e-3, warmup=30, weight_decay=0.1,
    min_length=40, max_length=80, lines=0, cue=6, eval_every=50, eval_questions=64, final_questions=256,
)  # fmt: skip
PRESETS = {
    # A model trained from scratch: minutes for the base of a seed and for each of its arms.
    "quick": QUICK,
    # The same with enough steps for gists to learn to pool; some ten minutes of a core an arm.
    "long": replace(QUICK, steps=4000, eval_every=250),
    # A few minutes a run on two cores.
    "short": Recipe(),
    # Contexts of SQuAD's size, for a GPU.
    "paper": Recipe(
        steps=10_000, batch=16, learning_rate=2e-4, warmup=300, rank=128, min_length=128, max_length=512, lines=8,
        eval_every=500, eval_questions=256, final_questions=1000,
    ),
}  # fmt: skip

# The methods of the paper's Figure 2, and GistPool with gists that start as means; then the others of its Table 3.
METHODS = ("no", "full", "gist", "offset-gist", "sep-offset-gist", "avgpool", "gistpool", "gistpool-means")
OTHER_METHODS = ("sep-gist", "gist-pool", "sep-gist-pool", "offset-gist-pool")
RATIOS = (1, 2, 5, 10)


@dataclass(frozen=True)
class Arm:
    """A method at a compression ratio; 1 for full context, and for no context, which has none."""

    method: str
    ratio: int = 1

    @property
    def name(self) -> str:
        """Such as gistpool-5x."""
        return self.method if self.method in ("no", "full") else f"{self.method}-{self.ratio}x"


def arms(methods: Sequence[str] = METHODS, ratios: Sequence[int] = RATIOS) -> list[Arm]:
    """The arms of these methods; AvgPool at 1x is full context and left out."""
    return [
        Arm(method, ratio)
        for method in methods
        for ratio in ((1,) if method in ("no", "full") else ratios)
        if (method, ratio) != ("avgpool", 1)
    ]


def build_compressor(recipe: Recipe, arm: Arm, model: PreTrainedModel) -> InPlace:
    """The untrained compressor of an arm of a recipe around `model`."""
    return arm_compressor(arm, model, recipe.rank if recipe.model == "smollm2" else None)


def arm_compressor(arm: Arm, model: PreTrainedModel, lora: int | None) -> InPlace:
    """The untrained compressor of an arm around `model`, with LoRA of a rank, or None: all weights train."""
    common: dict[str, Any] = {"lora": lora, "losses": ("qa",)}
    gist = common | {"ratio": arm.ratio}
    match arm.method:
        case "no":
            return compress.NoContext(model, **common)
        case "full" | "avgpool":
            return compress.AvgPool(model, **gist)
        case "gist":
            return compress.Gist(model, **gist)
        case "offset-gist":
            return compress.Gist(model, offset=True, **gist)
        case "sep-offset-gist":
            return compress.Gist(model, offset=True, separate=True, **gist)
        case "sep-gist":
            return compress.Gist(model, separate=True, **gist)
        case "gistpool":
            return compress.GistPool(model, **gist)
        case "gist-pool":
            return compress.GistPool(model, offset=False, separate=False, **gist)
        case "sep-gist-pool":
            return compress.GistPool(model, offset=False, **gist)
        case "offset-gist-pool":
            return compress.GistPool(model, separate=False, **gist)
        case "gistpool-means":
            return compress.GistPool(model, windows=1, full_copy=True, **gist)
    raise ValueError(f"method: expected one of {', '.join(METHODS + OTHER_METHODS)}, got {arm.method!r}")


def fresh_model(recipe: Recipe, seed: int) -> PreTrainedModel:
    """A copy of the pretrained model, or a small one with the random weights of a seed."""
    # These decide whether so small a model learns to look things up.
    return models.fresh_model(recipe, seed, initializer_range=0.09, rope_theta=1e3)
