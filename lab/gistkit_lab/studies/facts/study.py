"""Study `facts`: a few keys with values lie among filler, every key is asked for, and Dodo keeps one token in eight.

Where few tokens matter, it pays to choose them. The gradient of a score goes through the states that the encoder makes
of a token: until these say more than the token itself, it may tell the scorer to drop what is worth most. So the arm
"learned" reads random nuggets first, then the scorer's at a ratio that grows, and "direct" the scorer's from the first
step (Dodo, Section 2.4; the paper starts from contexts of real text and a large model, and has no such stages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from gistkit.compress import AvgPool, Dodo
from gistkit.compress.methods.in_place import InPlace
from gistkit.hf.lora import lora_config
from gistkit.train.stages import Stage, growing
from gistkit_lab.studies.pairs.study import Recipe as PairsRecipe

# "rests" is "learned" with a scorer that rests in the last stage, and "direct" without stages; "oracle" keeps values.
SELECTIONS = ("full", "learned", "rests", "direct", "random", "strided", "frozen", "oracle")
STAGED = ("learned", "rests")


@dataclass(frozen=True)
class Recipe(PairsRecipe):
    """Everything that determines a run except its selection and seed.

    Args:
        rank: of the adapters that an arm trains. The model under them is frozen, so that the scorer reads the same
            states from the first step to the last.
        ratio, layer, scorer_norm: of `Dodo`.
        random_steps, ratios: the stages of the arms "learned" and "rests", see `growing`.
        pairs, pairs_steps, pairs_rate: contexts of so many pairs without filler come first in what the arms of a seed
            share; then `base_steps` at `base_rate` on contexts with filler.
        sign_contexts: from which the gradient of scores and the gain of swaps are measured.
    """

    steps: int = 1100
    batch: int = 32
    learning_rate: float = 2e-3
    eval_every: int = 100
    fewest: int = 8
    most: int = 8
    length: int = 64
    filler: int = 16
    gated: bool = True
    alone: bool = False
    base_steps: int = 300
    base_rate: float = 1e-3
    rank: int = 32
    ratio: int = 8
    layer: int = 1
    scorer_norm: bool = True
    random_steps: int = 600
    ratios: tuple[int, ...] = (2, 4, 8)
    pairs: int = 15
    pairs_steps: int = 1500
    pairs_rate: float = 2e-3
    sign_contexts: int = 256

    def stages(self, selection: str) -> tuple[Stage, ...]:
        """The stages of an arm."""
        if selection not in STAGED:
            return ()
        return growing(self.steps, self.random_steps, self.ratios, scorer_rests=selection == "rests")


PRESETS = {"quick": Recipe()}


@dataclass(frozen=True)
class Arm:
    """What stands for a context."""

    selection: str

    @property
    def name(self) -> str:
        """The selection's name."""
        return self.selection


def build_compressor(recipe: Recipe, arm: Arm, model: PreTrainedModel) -> InPlace:
    """The untrained compressor of an arm around `model`, with adapters on all maps."""
    lora = lora_config(model, recipe.rank, "all")
    if arm.selection == "full":
        return AvgPool(model, ratio=1, lora=lora, losses=("qa",))
    common: dict[str, Any] = {"ratio": recipe.ratio, "layer": recipe.layer, "lora": lora, "losses": ("qa",)}
    match arm.selection:
        case "random" | "strided":
            return Dodo(model, selection=arm.selection, **common)
        case "oracle":
            return Dodo(model, selection="delimiters", delimiters=list(range(recipe.keys, recipe.bos)), **common)
        case "learned" | "rests" | "direct" | "frozen":
            train_scorer = arm.selection != "frozen"
            return Dodo(model, train_scorer=train_scorer, scorer_norm=recipe.scorer_norm, **common)
    raise ValueError(f"selection: expected one of {', '.join(SELECTIONS)}, got {arm.selection!r}")


def arms(selections: Sequence[str] = SELECTIONS) -> list[Arm]:
    """The arms of these selections."""
    return [Arm(selection) for selection in selections]
