"""Study `facts`: a few keys with values lie among filler, every key is asked for, and Dodo keeps one token in eight.

Where few tokens matter, it pays to choose them. The gradient of a score goes through the states that the encoder makes
of a token: until these say more than the token itself, it may tell the scorer to drop what is worth most. So the arm
"learned" reads random nuggets first, then the scorer's at a ratio that grows, and "direct" the scorer's from the first
step (Dodo, Section 2.4; the paper starts from contexts of real text and a large model, and has no such stages).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from gistkit.compress import AvgPool, Dodo
from gistkit.compress.methods.in_place import InPlace
from gistkit.compress.tokens import Rows as TokenRows
from gistkit.hf import attach
from gistkit.hf.lora import lora_config
from gistkit.nn import Nuggets
from gistkit.train.stages import Stage, growing
from gistkit_lab.studies import fitting
from gistkit_lab.studies import pairs as lookups
from gistkit_lab.studies.fitting import Carried, Session
from gistkit_lab.studies.pages import machine_caption
from gistkit_lab.studies.pairs import Pairs, draw, fit, fresh_model, groups, logits
from gistkit_lab.studies.rows import SEEDS, Rows, name_of, of_split, spread, tabulate
from gistkit_lab.studies.study import Names, Pictures, SavedRun, Study

# "rests" is "learned" with a scorer that rests in the last stage, and "direct" without stages; "oracle" keeps values.
SELECTIONS = ("full", "learned", "rests", "direct", "random", "strided", "frozen", "oracle")
STAGED = ("learned", "rests")


@dataclass(frozen=True)
class Recipe(lookups.Recipe):
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
        if selection not in STAGED:
            return ()
        return growing(self.steps, self.random_steps, self.ratios, scorer_rests=selection == "rests")


PRESETS = {"quick": Recipe()}


def build_compressor(recipe: Recipe, selection: str, model: PreTrainedModel) -> InPlace:
    """The untrained compressor of an arm around `model`, with adapters on all maps."""
    lora = lora_config(model, recipe.rank, "all")
    if selection == "full":
        return AvgPool(model, ratio=1, lora=lora, losses=("qa",))
    common: dict[str, Any] = {"ratio": recipe.ratio, "layer": recipe.layer, "lora": lora, "losses": ("qa",)}
    if selection in ("random", "strided"):
        return Dodo(model, selection=selection, **common)
    if selection == "oracle":
        return Dodo(model, selection="delimiters", delimiters=list(range(recipe.keys, recipe.bos)), **common)
    return Dodo(model, train_scorer=selection != "frozen", scorer_norm=recipe.scorer_norm, **common)


@dataclass
class Run(fitting.Run):
    """Its figures are "loss" in nats an answer, "exact", the share of right answers, and "kept", the share of
    values that are nuggets, which `curve` does not have.

    `signs` of a staged run holds {step: {ratio: what `measure_signs` finds before it}} of the first step, and of the
    scorer's first after random nuggets.
    """

    selection: str
    signs: dict[str, dict[str, dict[str, dict[str, float]]]] = field(default_factory=dict)


def train(session: Session) -> Run:
    """Trains and measures one arm and seed, from a decoder that the arms of the seed share."""
    recipe, selection, seed = session.recipe, session.arm, session.seed
    model = _base(session)
    torch.manual_seed(seed)
    compressor = build_compressor(recipe, selection, model).to(session.device)
    signs: dict[str, Any] = {}

    def look(step: int) -> None:
        if selection == "learned" and isinstance(compressor, Dodo) and step in (0, recipe.random_steps):
            signs[str(step)] = {str(ratio): measure_signs(compressor, recipe, ratio) for ratio in recipe.ratios}

    progress = fit(
        session, compressor, part=1, stages=recipe.stages(selection), before=look,
        carried=Carried(lambda: signs, signs.update),
    )  # fmt: skip
    figures = lambda split: measure(compressor, recipe, split)  # noqa: E731
    run: Run = session.run(Run, {"selection": selection}, progress, compressor.trainable(), figures, signs=signs)
    return run


@torch.no_grad()
def measure(compressor: InPlace, recipe: Recipe, split: str) -> dict[str, float]:
    """{"loss", "exact", "kept"} of a trained model over the contexts of a split."""
    with attach(compressor.model):
        figures = lookups.measure(compressor, recipe, split, recipe.test_contexts)
        if not isinstance(compressor, Dodo):
            return figures | {"kept": 1.0}
        kept = count = 0
        for pairs in groups(recipe, split, recipe.test_contexts):
            contexts = pairs.contexts.to(compressor.device)
            rows = compressor.with_bos(compressor.contexts(contexts))
            index = compressor.nuggets(rows, compressor.whole_scores(rows)).index
            is_value = kinds(contexts, recipe) == KINDS.index("value")
            kept += int(is_value.gather(1, index - 1).sum())
            count += int(is_value.sum())
    return figures | {"kept": kept / count}


def _base(session: Session) -> PreTrainedModel:
    """The decoder that the arms of a seed start from: it looks values up, first among pairs alone."""
    recipe: Recipe = session.recipe
    model = fresh_model(recipe, session.seed)
    full = AvgPool(model, ratio=1, lora=None, losses=("qa",)).to(session.device)
    alone = {
        "steps": recipe.pairs_steps, "learning_rate": recipe.pairs_rate, "length": 0, "fewest": recipe.pairs,
        "most": recipe.pairs,
    }  # fmt: skip
    among = {"steps": recipe.base_steps, "learning_rate": recipe.base_rate}
    for name, part, changes in (("pairs", 0, alone), ("base", 2, among)):
        with session.shared(name, **changes) as shared:
            fit(shared, full, part=part)
    return model


KINDS = ("key", "value", "after value", "filler")
# Contexts of a pass.
GROUP = 64


def kinds(contexts: Tensor, recipe: Recipe) -> Tensor:
    """int64 [B, N], the index in `KINDS` of each token; "after value" is filler that follows one."""
    is_value = (contexts >= recipe.keys) & (contexts < recipe.bos)
    follows = torch.cat([torch.zeros_like(is_value[:, :1]), is_value[:, :-1]], 1)
    found = torch.where(follows, KINDS.index("after value"), KINDS.index("filler"))
    found = torch.where(is_value, KINDS.index("value"), found)
    return torch.where(contexts < recipe.keys, KINDS.index("key"), found)


def measure_signs(compressor: Dodo, recipe: Recipe, ratio: int) -> dict[str, dict[str, float]]:
    """{kind: {"gradient", "swap"}} behind random nuggets of test contexts, in nats an answer of one context.

    "gradient": mean of dL/ds over the nuggets of the kind, where s is the nugget's score: below 0 the scorer learns to
    keep them. "swap": mean change of L when the nugget of the lowest score gives way to a token of the kind which is
    none: below 0 they are worth more than what they replace. The last token, always a nugget, counts in neither.
    """
    generator = torch.Generator().manual_seed(0)
    sums: dict[str, list[float]] = {kind: [0.0] * 4 for kind in KINDS}
    with attach(compressor.model), compressor.selecting("random", ratio):
        for group, start in enumerate(range(0, recipe.sign_contexts, GROUP)):
            pairs = draw(recipe, "test", 1, group, rows=min(GROUP, recipe.sign_contexts - start))
            _add_group(compressor, recipe, pairs, generator, sums)
    return {
        kind: {"gradient": gradient / max(count, 1), "swap": change / max(swaps, 1)}
        for kind, (gradient, count, change, swaps) in sums.items()
    }


def _add_group(
    compressor: Dodo, recipe: Recipe, pairs: Pairs, generator: torch.Generator, sums: dict[str, list[float]]
) -> None:
    pairs = Pairs(*(tensor.to(compressor.device) for tensor in pairs))
    rows = compressor.contexts(pairs.contexts)
    dtype = torch.promote_types(compressor.embed.weight.dtype, torch.float32)
    scores = torch.rand(len(pairs.contexts), recipe.length + 1, generator=generator).to(compressor.device, dtype)
    nuggets = compressor.nuggets(compressor.with_bos(rows), scores)
    of_kind = torch.nn.functional.pad(kinds(pairs.contexts, recipe), (1, 0), value=-1)
    # BOS and the last token stay whatever their scores are.
    of_kind[:, -1] = -1
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, nuggets.index, True)
    with torch.enable_grad():
        scores.requires_grad_()
        before = _losses(compressor, recipe, pairs, rows, nuggets, scores)
        (gradient,) = torch.autograd.grad(before.sum(), scores)
    scores = scores.detach()
    worst = scores.masked_fill(~kept | (of_kind < 0), torch.inf).argmin(1, keepdim=True)
    for number, kind in enumerate(KINDS):
        chosen = kept & (of_kind == number)
        sums[kind][0] += float(gradient[chosen].sum())
        sums[kind][1] += float(chosen.sum())
        candidates = scores.masked_fill(kept | (of_kind != number), -torch.inf)
        best, place = candidates.max(1, keepdim=True)
        can = torch.isfinite(best[:, 0])
        swapped = kept.scatter(1, worst, False).scatter(1, place, True)
        index = torch.where(can[:, None], swapped, kept).nonzero()[:, 1].view(len(scores), -1)
        with torch.no_grad():
            after = _losses(compressor, recipe, pairs, rows, Nuggets(index, nuggets.counts), None)
        sums[kind][2] += float((after - before.detach())[can].sum())
        sums[kind][3] += float(can.sum())


def _losses(
    compressor: Dodo, recipe: Recipe, pairs: Pairs, rows: TokenRows, nuggets: Nuggets, scores: Tensor | None
) -> Tensor:
    """Nats an answer [B] of contexts behind these nuggets."""
    memory, _ = compressor.encode_nuggets(rows, nuggets, scores)
    found = logits(compressor, pairs, recipe, memory)
    return cross_entropy(found.transpose(1, 2), pairs.answers, reduction="none").mean(1)


TITLES = {
    "full": "Full context",
    "learned": "Dodo learned, in stages",
    "rests": "Dodo learned, at rest in the last",
    "direct": "Dodo learned, from the first step",
    "random": "Dodo random",
    "strided": "Dodo strided",
    "frozen": "Dodo frozen scorer",
    "oracle": "Dodo of values",
}


class FactsStudy(Study):
    """Which tokens Dodo keeps of a context in which few matter."""

    name = "facts"
    run_type = Run
    recipe_type = Recipe
    arm_field = "selection"
    lists: ClassVar[Mapping[str, Names]] = {"selections": Names(SELECTIONS, SELECTIONS)}
    presets = PRESETS
    sizes = "quick: contexts of 64 tokens with 8 keys and values, some 25 minutes of a core a seed"
    measured = ()
    train = staticmethod(train)

    def about(self, recipe: Recipe, arms: Sequence[str], source: None) -> str:
        return (
            f"Contexts of {recipe.length} tokens with {recipe.most} keys and values, {len(arms)} arms of "
            f"{recipe.steps} steps of {recipe.batch} after {recipe.pairs_steps} and {recipe.base_steps} on the full "
            "context"
        )

    def order(self, run: Run) -> int:
        return SELECTIONS.index(run.selection)

    def rows(self, runs: Sequence[Run], recipe: Recipe, split: str = "test") -> Rows:
        return tabulate(
            self.by_arm(runs),
            {
                "nuggets": name_of(TITLES),
                "held-out loss": of_split("held_out", "loss"),
                "test loss": of_split("test", "loss"),
                "test: right answers": of_split("test", "exact"),
                "values kept": of_split("test", "kept"),
                "seeds": SEEDS,
            },
        )

    def more_rows(self, runs: Sequence[Run], recipe: Recipe) -> Sequence[Rows]:
        """One row a number of random steps and a ratio: a score's gradient, and what a swap changes, by kind."""
        header = ["random steps before", "ratio"]
        rows = [[*header, *(f"{figure}: {kind}" for figure in ("gradient", "swap") for kind in KINDS), "seeds"]]
        signed = [run for run in sorted(runs, key=lambda run: run.seed) if run.signs]
        for step, ratio in [
            (step, ratio) for run in signed[:1] for step, found in run.signs.items() for ratio in found
        ]:
            cells = [
                spread([1000 * run.signs[step][ratio][kind][figure] for run in signed], "{:+.1f}")
                for figure in ("gradient", "swap")
                for kind in KINDS
            ]
            rows.append([step, f"{ratio}x", *cells, str(len(signed))])
        return [rows]

    def captions(self, group: Sequence[SavedRun]) -> Sequence[str]:
        recipe: Recipe = group[0].recipe
        return [
            f"Loss in nats an answer among {recipe.values}, on contexts of {recipe.length} tokens with {recipe.most} "
            f"keys and values, at {recipe.ratio}x; {recipe.steps} steps of {recipe.batch} after {recipe.pairs_steps} "
            f"and {recipe.base_steps} on the full context that the arms share; in stages: {recipe.random_steps} steps "
            f"with random nuggets, then {', '.join(f'{ratio}x' for ratio in recipe.ratios)}. {machine_caption(group)}.",
            "Thousandths of a nat an answer, behind random nuggets, before the scorer learns. Gradient: of a nugget's "
            "score; below 0 the scorer learns to keep such tokens. Swap: the change of the loss when a nugget gives "
            "way to such a token; below 0 such tokens are worth more.",
        ]

    def figures(self, runs: Sequence[Run], recipe: Recipe) -> Pictures:
        """Held-out loss against training steps, a line a selection."""
        from gistkit_lab.viz import draw_loss_curves

        curves = {TITLES[name]: [run.curve for run in selected] for name, selected in self.by_arm(runs).items()}
        figure = draw_loss_curves(curves, goal=round(math.log(recipe.values), 2), legend="nuggets")
        figure.axes[0].set_title("Looking facts up among filler", loc="left")
        return {"curves": figure}


STUDY = FactsStudy()
