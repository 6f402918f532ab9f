"""Study `nuggets`: which tokens should stand for a text, and does learning to choose them pay?

Two tasks of the Dodo paper on one model: a context is reconstructed from its nuggets (Section 4), and a text is
continued from nuggets of its past and its recent tokens (Section 5, Table 1), beside other ways of keeping as many
states. All arms of a task have the same model, steps, batches and held-out text. The language model's scorer begins as
the reconstruction's ends (Section 2.2), and its threshold is found again as it changes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from peft import LoraConfig
from transformers import PreTrainedModel

from gistkit.compress import AvgPool, Compressive, Dodo, MixedResolution
from gistkit.compress.reading.language import LanguageModel
from gistkit.hf.lora import lora_config
from gistkit.train.stages import Stage, growing
from gistkit_lab.studies import models
from gistkit_lab.studies.fitting import StudyRecipe


@dataclass(frozen=True)
class Recipe(StudyRecipe):
    """Everything that determines a run except its arm and seed; adapters of rank `rank` train, and scorers.

    Args:
        model: "smollm2" (SmolLM2-135M), or "small" (a Llama of 0.6M parameters on bytes, trained before for
            `base_steps` steps as a language model; the arms of a seed share it).
        layer: whose hidden states are scored.
        context: tokens of a context that is reconstructed.
        length: tokens of a text for the language model; the loss of its last `asked` tokens is measured.
        lm_batch: rows of a step of the language model.
        ratio, tau, segment: of the language model; see `MixedResolution`.
        calibrate_every: steps between thresholds of the language model.
        random_steps, lower_ratios: the stages of a scorer that learns to reconstruct: steps with random nuggets, and
            ratios on the way to an arm's own; see `growing`.
        eval_texts: held-out contexts or texts at every evaluation.
        final_texts: held-out contexts or texts at the end, and as many test texts, on which no choice is based.
    """

    steps: int = 100
    batch: int = 4
    learning_rate: float = 1e-3
    warmup: int = 10
    weight_decay: float = 0.0
    eval_every: int = 25
    model: str = "smollm2"
    rank: int = 32
    base_steps: int = 0
    layer: int = 3
    context: int = 64
    length: int = 256
    asked: int = 32
    lm_batch: int = 2
    ratio: int = 8
    tau: int = 32
    segment: int = 8
    calibrate_every: int = 10
    random_steps: int = 0
    lower_ratios: tuple[int, ...] = ()
    eval_texts: int = 16
    final_texts: int = 96

    @property
    def budget(self) -> int:
        """Number of recent tokens equal to the average number of nuggets and recent tokens together."""
        recent = self.tau - (self.segment - 1) / 2
        return round(recent + (self.length - self.asked / 2 - recent) / self.ratio)

    def stages(self, arm: Arm) -> tuple[Stage, ...]:
        """The stages of an arm."""
        if (arm.task, arm.method) != ("ae", "learned"):
            return ()
        lower = [ratio for ratio in self.lower_ratios if ratio < arm.ratio]
        return growing(self.steps, self.random_steps, [*lower, arm.ratio])


PRESETS = {
    # A model trained from scratch: minutes for the base of a seed and for each of its arms.
    "quick": Recipe(
        model="small", steps=150, base_steps=900, batch=16, lm_batch=16, learning_rate=1e-3, rank=16, layer=1,
        context=80, length=192, asked=48, ratio=8, tau=16, segment=8, eval_every=50, eval_texts=64, final_texts=256,
    ),
    # Some minutes a run on two cores.
    "short": Recipe(),
    # The paper's sizes (320 compressed and 32 recent tokens; contexts of up to 512), for a GPU.
    "paper": Recipe(
        steps=20_000, batch=32, lm_batch=32, learning_rate=1e-4, warmup=2000, context=500, length=352, ratio=10, tau=40,
        segment=10, eval_every=500, eval_texts=128, final_texts=500,
    ),
}  # fmt: skip

SELECTIONS = ("learned", "strided", "random", "delimiters", "frozen")
# "full" reads everything, as a bound.
LM_ARMS = ("full", "sliding", "truncated", "none", "compressive", *SELECTIONS)
TASKS = ("ae", "lm")


@dataclass(frozen=True)
class Arm:
    """A task, a way of keeping states, and the compression ratio."""

    task: str
    method: str
    ratio: int

    @property
    def name(self) -> str:
        """Such as ae-learned-8x."""
        plain = self.method in ("full", "sliding", "truncated", "none")
        return f"{self.task}-{self.method}" + ("" if plain else f"-{self.ratio}x")


def arms(recipe: Recipe, tasks: Sequence[str], methods: Sequence[str], ratios: Sequence[int]) -> list[Arm]:
    """The arms of these methods: of reconstruction at each of the ratios, of the language model at the recipe's."""
    study_arms = []
    if "ae" in tasks:
        study_arms += [Arm("ae", method, ratio) for ratio in ratios for method in methods if method in SELECTIONS]
    if "lm" in tasks:
        study_arms += [Arm("lm", method, recipe.ratio) for method in methods if method in LM_ARMS]
    return study_arms


def build_compressor(recipe: Recipe, arm: Arm, model: PreTrainedModel) -> Dodo | AvgPool:
    """The untrained compressor of an arm around `model`."""
    lora = adapter(recipe, model)
    if arm.method == "compressive":
        return AvgPool(model, ratio=arm.ratio, pool="hidden", soft_prompt=True, lora=lora)
    options: dict[str, Any] = {"ratio": arm.ratio, "layer": recipe.layer, "lora": lora}
    if arm.method == "delimiters":
        options["delimiters"] = delimiters(recipe)
    if arm.method in ("learned", "frozen"):
        return Dodo(model, train_scorer=arm.method == "learned", **options)
    rule: Any = "none" if arm.method in ("full", "sliding", "truncated") else arm.method
    return Dodo(model, selection=rule, **options)


def build_reader(recipe: Recipe, arm: Arm, compressor: Dodo | AvgPool) -> LanguageModel:
    """The language model of an arm."""
    if isinstance(compressor, AvgPool):
        return Compressive(compressor, tau=recipe.tau, segment=recipe.segment)
    if arm.method in ("full", "truncated"):
        return MixedResolution(compressor, tau=recipe.length + 1, segment=1)
    if arm.method == "sliding":
        return MixedResolution(compressor, tau=recipe.budget, segment=1)
    return MixedResolution(compressor, tau=recipe.tau, segment=recipe.segment)


def adapter(recipe: Recipe, model: PreTrainedModel) -> LoraConfig:
    """The LoRA configuration of every arm: the paper's maps of a large model, and all maps of a small one."""
    return lora_config(model, recipe.rank, "query_key_value" if recipe.model == "smollm2" else "all")


def delimiters(recipe: Recipe) -> list[int]:
    """Tokens that end a clause: punctuation marks and line ends (Section 4.3)."""
    recipe_tokenizer = models.tokenizer(recipe)
    if recipe_tokenizer is None:
        return sorted(b".,;:!?\n")
    ends = re.compile(r"[.,;:!?)\"']*[.,;:!?][\"')]*\s*|\s*\n\s*")
    return [token for token in range(len(recipe_tokenizer)) if ends.fullmatch(recipe_tokenizer.decode([token]))]


def fresh_model(recipe: Recipe, seed: int) -> PreTrainedModel:
    """A copy of the pretrained model, or a small one with the random weights of a seed."""
    return models.fresh_model(recipe, seed, initializer_range=0.05, rope_theta=1e4)
