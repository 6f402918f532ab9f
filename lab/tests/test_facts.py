"""Study `facts`: contexts with filler, kinds of tokens, the gradient of scores and swaps, runs that resume."""

import dataclasses

import pytest
import torch
from study_runs import session
from torch.nn.functional import cross_entropy

from gistkit.hf import attach
from gistkit.nn import Nuggets
from gistkit.train import Stage
from gistkit_lab.studies.facts import (
    KINDS,
    PRESETS,
    SELECTIONS,
    STUDY,
    Recipe,
    build_compressor,
    draw,
    fresh_model,
    kinds,
    logits,
    measure_signs,
)  # fmt: skip

RECIPE = Recipe(
    steps=6, batch=4, warmup=1, eval_every=2, keys=6, values=3, fewest=3, most=3, length=12, filler=4, base_steps=2,
    pairs=2, pairs_steps=2, dim=16, heads=2, rank=2, ratio=4, random_steps=2, ratios=(2, 4), eval_contexts=8,
    test_contexts=40, sign_contexts=6,
)  # fmt: skip
pytestmark = pytest.mark.usefixtures("one_thread")


def test_contexts_hold_whole_pairs_anywhere_among_filler():
    pairs = draw(RECIPE, "train", 0, 1, 5, rows=60)
    assert pairs.contexts.shape == (60, 12) and int(pairs.contexts.max()) < RECIPE.vocabulary == 14
    places = set()
    for context, keys, answers in zip(
        pairs.contexts.tolist(), pairs.keys.tolist(), pairs.answers.tolist(), strict=True
    ):
        at = [place for place, token in enumerate(context) if token < 6]
        assert {context[place]: context[place + 1] - 6 for place in at} == dict(zip(keys, answers, strict=True))
        assert all(token >= 10 for place, token in enumerate(context) if {place, place - 1}.isdisjoint(at))
        places |= set(at)
    assert places == set(range(11))
    # Without filler the contexts are those of the study `pairs`.
    alone = dataclasses.replace(RECIPE, length=0)
    assert draw(alone, "train", 0, 1, 5, rows=3).contexts.shape == (3, 6)


def test_the_kinds_of_tokens():
    context = torch.tensor([[0, 7, 10, 11, 2, 6, 1, 8]])
    names = [KINDS[kind] for kind in kinds(context, RECIPE)[0].tolist()]
    assert names == ["key", "value", "after value", "filler", "key", "value", "key", "value"]


def test_gradients_and_swaps_are_those_of_a_loop_by_hand():
    """A context at a time, each nugget's gradient by moving its attention logits, each swap by reading again."""
    model = fresh_model(RECIPE, 0).double()
    torch.manual_seed(1)
    compressor = build_compressor(RECIPE, "learned", model)
    found = measure_signs(compressor, RECIPE, 3)
    pairs = draw(RECIPE, "test", 1, 0, rows=6)
    scores = torch.rand(6, 13, generator=torch.Generator().manual_seed(0)).double()
    rows = compressor.contexts(pairs.contexts)
    sums = {kind: {"gradient": [], "swap": []} for kind in KINDS}
    with attach(model), compressor.selecting(ratio=3), torch.no_grad():
        chosen = compressor.nuggets(compressor.with_bos(rows), scores)

        def loss(index, biases=None):
            memory, _ = compressor.encode_nuggets(rows, Nuggets(index, (index.shape[1],) * 6))
            if biases is not None:
                memory = dataclasses.replace(memory, straight_through=biases)
            with torch.enable_grad():
                answers = logits(compressor, pairs, RECIPE, memory)
            losses = cross_entropy(answers.transpose(1, 2), pairs.answers, reduction="none").mean(1)
            return losses.detach()

        before, kind_of = loss(chosen.index), kinds(pairs.contexts, RECIPE)
        for row in range(6):
            kept = chosen.index[row].tolist()
            for slot, place in enumerate(kept[:-1]):
                bias = torch.zeros(6, 5, dtype=torch.float64)
                bias[row, slot + 1] = 0.02
                slope = float((loss(chosen.index, bias) - loss(chosen.index, -bias))[row]) / 0.04
                sums[KINDS[kind_of[row, place - 1]]]["gradient"].append(slope)
            worst = min(kept[:-1], key=lambda place: scores[row, place])
            for number, kind in enumerate(KINDS):
                free = [place for place in range(1, 12) if place not in kept and kind_of[row, place - 1] == number]
                if not free:
                    continue
                best = max(free, key=lambda place: scores[row, place])
                index = chosen.index.clone()
                index[row] = torch.tensor(sorted({*kept, best} - {worst}))
                sums[kind]["swap"].append(float((loss(index) - before)[row]))
    for kind, figures in sums.items():
        for figure, values in figures.items():
            expected = sum(values) / max(len(values), 1)
            assert found[kind][figure] == pytest.approx(expected, rel=3e-3, abs=1e-5), (kind, figure)
    assert compressor.rule == "learned" and compressor.nugget_ratio == 4


@pytest.mark.nightly
def test_each_arm_trains_and_is_measured(tmp_path):
    runs = {selection: STUDY.train(session(RECIPE, selection, tmp_path)) for selection in SELECTIONS}
    for selection, found in runs.items():
        assert [step for step, _, _ in found.curve] == [0, 2, 4, 6]
        assert set(found.held_out) == set(found.test) == {"loss", "exact", "kept"}
        assert set(found.signs) == ({"0", "2"} if selection == "learned" else set())
    assert {tuple(ratios) for ratios in runs["learned"].signs.values()} == {("2", "4")}
    # Of three nuggets the last token is one; the oracle's others are values.
    assert runs["full"].test["kept"] == 1 and 2 / 3 <= runs["oracle"].test["kept"] <= 1
    assert max(runs[name].test["kept"] for name in ("random", "strided", "frozen")) < 2 / 3
    # The arms begin alike; in its first stage the scorer's arm reads other nuggets than without stages.
    assert runs["learned"].curve[0] == runs["direct"].curve[0] == runs["frozen"].curve[0]
    assert runs["learned"].curve[1] != runs["direct"].curve[1]
    # They part where one scorer rests, behind step 4.
    assert runs["learned"].curve[:3] == runs["rests"].curve[:3] and runs["learned"].curve[3] != runs["rests"].curve[3]
    table = STUDY.table(list(runs.values()), RECIPE)
    assert table.count("\n") == (1 + 8) + 2 + (1 + 4)
    assert set(STUDY.figures(list(runs.values()), RECIPE)) == {"curves"}


def test_the_stages_of_the_arms():
    recipe = PRESETS["quick"]
    stages = recipe.stages("learned")
    assert stages[0] == Stage(recipe.random_steps, rule="random") and [stage.ratio for stage in stages[1:]] == [2, 4]
    assert recipe.ratios[-1] == recipe.ratio == 8 and recipe.stages("direct") == ()
    assert recipe.stages("rests") == (*stages, Stage(250, scorer_rests=True))
