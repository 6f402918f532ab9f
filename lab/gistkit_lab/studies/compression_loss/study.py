"""Study `compression-loss`: whether a compression loss can stand in for the autoencoding loss in pretraining.

The demo's small model is pretrained under each setting, with the continuation loss in all of them. Copies of it are
then fine-tuned alike, on the autoencoding loss alone and on questions (More Effective LLM Compressed Tokens, Table 2,
whose model is Llama-2-7B at 15x, fine-tuned on PwC). All weights train; encoder and decoder share them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from gistkit.compress import Compressor
from gistkit_lab.studies.epl import study as epl


class Setting(NamedTuple):
    """What a setting is called in tables, and what it pretrains with: losses and position layout."""

    title: str
    losses: tuple[str, ...]
    layout: str = "epl"


SETTINGS = {
    "full": Setting("full", ("ae", "lm", "compression")),
    "without-cl": Setting("without CL", ("ae", "lm")),
    "without-ae": Setting("without AE", ("lm", "compression")),
    "without-ae-cl": Setting("without AE and CL", ("lm",)),
    "without-pi": Setting("without PI", ("ae", "lm", "compression"), "dpl"),
    "without-cl-pi": Setting("without CL and PI", ("ae", "lm"), "dpl"),
}
# The losses of fine-tuning, each alone.
TASKS = ("ae", "qa")


@dataclass(frozen=True)
class Recipe(epl.Recipe):
    """Everything that determines a run except its setting and seed; `steps` are those of pretraining.

    Args:
        tuning_steps, tuning_eval_every: of each fine-tuning, which starts with the warm-up anew.
        cue, answer: bytes of a question's passage, see `Needles`; its context is a chunk.
        eval_questions: held-out questions at every evaluation.
        final_questions: questions at the end, held-out ones and as many of the test split.
    """

    continuation: int = 80
    tuning_steps: int = 200
    tuning_eval_every: int = 10
    cue: int = 6
    answer: int = 8
    eval_questions: int = 64
    final_questions: int = 256

    @property
    def tuning(self) -> Recipe:
        """The schedule of a fine-tuning."""
        return replace(self, steps=self.tuning_steps, eval_every=self.tuning_eval_every)


def build_compressor(recipe: Recipe, setting: str, seed: int) -> Compressor:
    """The untrained model of a seed under one of `SETTINGS`."""
    _, losses, layout = SETTINGS[setting]
    return epl.build_compressor(recipe, layout, seed, losses)
