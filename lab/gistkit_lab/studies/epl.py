"""Study `epl`: one small autoencoder under several position layouts, trained from scratch on bytes.

A Llama of 0.4M parameters compresses 80 bytes into 16 memory tokens (ICAE carrier) and reconstructs them. Only the
position IDs differ between the runs of a seed (Position IDs Matter, Tables 1-3 and the AE-loss curves).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, ClassVar

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gistkit.compress import ICAE, Compressor
from gistkit.layouts.positions import SCHEMES
from gistkit.train.data import Corpus
from gistkit_lab.studies import reconstruction
from gistkit_lab.studies.fitting import Session
from gistkit_lab.studies.pages import machine_caption
from gistkit_lab.studies.pages import seeds as seeds_of
from gistkit_lab.studies.reconstruction import GOAL, ReconstructionRecipe, Run
from gistkit_lab.studies.rows import SECONDS, Cell, Rows, figure_of, name_of, spread, tabulate
from gistkit_lab.studies.study import Names, Pictures, SavedRun, Study, StudyPlan

STUDIED = ("dpl", "upl", "epl")


@dataclass(frozen=True)
class Recipe(ReconstructionRecipe):
    """Everything that determines a run except its layout and seed."""

    hidden_size: int = 128
    intermediate_size: int = 352
    layers: int = 2
    heads: int = 4
    rope_theta: float = 1e4


def build_compressor(recipe: Recipe, layout: str, seed: int, losses: Sequence[str] = ("ae",)) -> Compressor:
    """The untrained model of a seed: the same weights whatever the layout."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_((2 * recipe.layers) ** -0.5)
    return ICAE(model, chunk=recipe.chunk, ratio=recipe.ratio, layout=layout, losses=losses, lora=None)


# Position IDs Matter, Llama-3.2-1B at 5x: autoencoding BLEU-4, continuation perplexity, out-of-domain QA F1.
PAPER = {
    "icae": {"dpl": (31.80, 12.18, 39.95), "upl": (72.35, 11.50, 43.67), "epl": (95.98, 11.42, 43.87)},
    "x500": {"dpl": (93.73, 11.22, 45.76), "upl": (95.86, 10.94, 46.83), "epl": (98.50, 10.80, 48.03)},
}

LIMITS = (
    "What this does not show: one small model trained from scratch, so encoder and decoder share all weights (the "
    "paper\nadapts a frozen language model); no run is trained to convergence, so the layouts differ in how soon they "
    "learn, not\nnecessarily in where they end."
)


def steps_to_goal(layout: str, runs: Sequence[Run]) -> str:
    """A column: the steps after which the held-out loss was at the goal, and how many runs reached it, if not all."""
    reached = [float(run.steps_to_goal) for run in runs if run.steps_to_goal is not None]
    if not reached:
        return "not reached"
    some = len(reached) < len(runs)
    return spread(reached, "{:.0f}") + (f", {len(reached)} of {len(runs)} runs" if some else "")


class Epl(Study):
    """Reconstruction under several position layouts."""

    name = "epl"
    run_type = Run
    recipe_type: ClassVar[Any] = Recipe
    arm_field = "layout"
    lists: ClassVar[Mapping[str, Names]] = {"layouts": Names(SCHEMES, STUDIED)}
    text = "text file to train on"
    last_layer = False
    build: ClassVar[Callable[..., Compressor]] = staticmethod(build_compressor)

    def about(self, recipe: Any, arms: Sequence[str], source: Corpus) -> str:
        return (
            f"Reconstructing {recipe.chunk} bytes from {recipe.chunk // recipe.ratio} memory tokens; text "
            f"{source.name} ({source.train.numel()} + {source.held_out.numel()} held-out bytes, {source.digest})"
        )

    def train(self, session: Session) -> Run:
        return reconstruction.train(session, self.build)

    def rows(self, runs: Sequence[Run], recipe: Any, split: str = "test", method: str = "icae") -> Rows:
        """`method`: whose figures of the paper come last."""
        columns: dict[str, Cell] = {
            "layout": name_of(str.upper),
            f"steps to loss {GOAL}": steps_to_goal,
            "AE loss": figure_of(lambda run: run.loss),
            "accuracy": figure_of(lambda run: run.accuracy),
            "greedy": figure_of(lambda run: run.greedy_accuracy),
            "training": SECONDS,
        }
        for index, heading in enumerate(("paper: AE BLEU-4", "LM PPL", "QA F1")):
            columns[heading] = name_of({layout: f"{paper[index]:.2f}" for layout, paper in PAPER[method].items()})
        return tabulate(self.by_arm(runs), columns)

    def report(self, runs: Sequence[Run], plan: StudyPlan) -> str:
        return "\n".join(
            [
                self.table(runs, plan.recipe),
                "\nOne held-out passage, reconstructed greedily:",
                self.passages(runs),
                f"\n{self.tracking(runs, plan.recipe)}",
                f"\n{LIMITS}",
            ]
        )

    def passages(self, runs: Sequence[Run]) -> str:
        """The same held-out passage as each layout reconstructs it (first seed), greedily."""
        first = {layout: found[0] for layout, found in self.by_arm(runs).items()}
        lines = [f"  {'text':>5}  {runs[0].passage['original']!r}"]
        lines += [f"  {layout.upper():>5}  {run.passage['reconstructed']!r}" for layout, run in first.items()]
        return "\n".join(lines)

    def tracking(self, runs: Sequence[Run], recipe: ReconstructionRecipe) -> str:
        """How the memory tokens' attention follows the context, last layer, mean over seeds."""
        lines = [f"  slope of the memory tokens' attention over the context (even coverage: 1/{recipe.ratio})"]
        for layout, found in self.by_arm(runs).items():
            slope, fit, own = (
                mean(run.tracking[-1][key] for run in found) for key in ("slope", "r_squared", "own_segment")
            )
            lines.append(
                f"  {layout.upper():>5}  slope 1/{slope:<6.2f} R^2 {fit:4.2f}   share in its own segment {own:4.2f}"
            )
        return "\n".join(lines)

    def page(self, groups: Sequence[Sequence[SavedRun]]) -> str:
        (group,) = groups
        recipe = group[0].recipe
        return (
            f"{self.table([saved.run for saved in group], recipe)}\n\nHeld-out, {recipe.steps} steps, "
            f"{seeds_of(group)}: mean (lowest-highest). {machine_caption(group)}."
        )

    def figures(self, runs: Sequence[Run], recipe: Any) -> Pictures:
        """Loss curves, and where the runs have them attention maps of all layers or the last."""
        from gistkit.viz import draw_memory_attention
        from gistkit_lab.viz import draw_loss_curves

        curves = {layout: [run.curve for run in found] for layout, found in self.by_arm(runs).items()}
        pictures = {"loss": draw_loss_curves(curves, goal=GOAL)}
        maps: dict[str, list[list[list[float]]]] = {}
        for run in runs:
            if run.attention:
                maps.setdefault(run.layout, run.attention[-1:] if self.last_layer else run.attention)
        if maps:
            first = len(runs[0].tracking) - 1 if self.last_layer else 0
            pictures["attention"] = draw_memory_attention(maps, recipe.ratio, first)
        return pictures


STUDY = Epl()
