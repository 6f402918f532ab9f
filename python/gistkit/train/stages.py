"""Stages of a training: for some of its steps a Dodo selects nuggets by another rule, or at another ratio."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gistkit.common.checks import POSITIONS, check_int
from gistkit.compress.methods.dodo import RULES, Dodo, Rule


@dataclass(frozen=True)
class Stage:
    """How nuggets are selected for some steps of a training; after the last stage, as the compressor says.

    Args:
        steps: how many, following those of the stage before.
        rule: instead of the compressor's `selection`; a stage without the scorer does not train it. None: no other.
        ratio: instead of the compressor's. None: no other.
        scorer_rests: the scorer selects, but does not learn.
    """

    steps: int
    rule: Rule | None = None
    ratio: int | None = None
    scorer_rests: bool = False

    def __post_init__(self) -> None:
        check_int("steps", self.steps, high=POSITIONS)
        if self.rule is not None and self.rule not in RULES:
            raise ValueError(f"rule: expected one of {', '.join(RULES)}, or None, got {self.rule!r}")
        if self.ratio is not None:
            check_int("ratio", self.ratio, high=POSITIONS)


def growing(
    steps: int, random_steps: int = 0, ratios: Sequence[int] = (), *, scorer_rests: bool = False
) -> tuple[Stage, ...]:
    """The stages in which a scorer learns: random nuggets first, then its own at ratios that grow.

    Before the encoder has learned to put into a token's states what is read there, the gradient of a score may make
    the scorer drop the most useful tokens.

    Args:
        steps: of the whole training.
        random_steps: at the beginning, in which nuggets are random and the scorer does not learn; less than `steps`.
        ratios: after them, ascending. The last one, the compressor's, has half of these steps, and the others have
            equal shares of the other half. (): the compressor's from the beginning.
        scorer_rests: at the last of several ratios the scorer no longer learns, and only what reads its nuggets does.
    """
    check_int("steps", steps, high=POSITIONS)
    check_int("random_steps", random_steps, 0, POSITIONS)
    if random_steps >= steps:
        raise ValueError(f"random_steps: expected less than steps, {steps}, got {random_steps}")
    for ratio in ratios:
        check_int("ratios", ratio, high=POSITIONS)
    if any(later <= earlier for earlier, later in pairwise(ratios)):
        raise ValueError(f"ratios: expected each above the one before, got {','.join(map(str, ratios))}")
    stages = [Stage(random_steps, rule="random")] if random_steps else []
    if scorer_rests and len(ratios) < 2:
        raise ValueError(f"scorer_rests: expected at least 2 ratios with it, got {len(ratios)}")
    few, half = len(ratios) - 1, (steps - random_steps) // 2
    if few > half:
        raise ValueError(
            f"ratios: expected at most {half + 1} for {steps - random_steps} steps of the scorer, got {len(ratios)}"
        )
    for index, ratio in enumerate(ratios[:-1]):
        stages.append(Stage(half * (index + 1) // few - half * index // few, ratio=ratio))
    if scorer_rests:
        stages.append(Stage(steps - random_steps - half, scorer_rests=True))
    return tuple(stages)


def check_stages(compressor: Any, stages: Sequence[Stage]) -> None:
    """Refuses stages of a compressor that has no scorer, or that cannot select by their rules."""
    if not stages:
        return
    if not isinstance(compressor, Dodo) or compressor.scorer is None:
        title = compressor.title if isinstance(compressor, Dodo) else type(compressor).__name__
        raise ValueError(f"stages: expected none but for a Dodo with a scorer, got some for {title}")
    for stage in stages:
        if stage.rule is not None:
            compressor.check_rule(stage.rule)


def stage_at(stages: Sequence[Stage], step: int) -> Stage | None:
    """The stage of step 0, 1, ...; None after the last one."""
    for stage in stages:
        if step < stage.steps:
            return stage
        step -= stage.steps
    return None


@contextmanager
def selecting_at(compressor: Any, stages: Sequence[Stage], step: int) -> Iterator[None]:
    """Inside, `compressor` selects nuggets as the stage of `step` says; afterwards, as before."""
    stage = stage_at(stages, step)
    if stage is None:
        yield
        return
    with compressor.selecting(stage.rule, stage.ratio, scorer_rests=stage.scorer_rests):
        yield
