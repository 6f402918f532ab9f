"""Stages of a training: which nuggets a Dodo keeps in which steps, what a stage leaves alone, mistakes."""

import dataclasses

import pytest
import torch

from gistkit.compress import Dodo
from gistkit.train import Stage, Trainer, checkpoints, growing, read_metrics
from gistkit.train.command import run
from gistkit.train.stages import stage_at
from tests.helpers.train_worker import (
    RECIPE,
    make_batches,
    make_compressor,
    make_dodo,
    make_model,
    make_reader,
    numbers,
    train,
)

pytestmark = pytest.mark.usefixtures("one_thread")
# Of 8 steps: random ones, three of two stages that are longer ratios, and the rest at the compressor's 4.
STAGES = (Stage(3, rule="random"), Stage(2, ratio=2), Stage(1, ratio=3))


def watched(compressor, seen):
    """Notes the rule and the ratio of every selection in train mode."""
    select = compressor.nuggets

    def nuggets(rows, scores):
        if compressor.training:
            seen.append((compressor.rule, compressor.nugget_ratio))
        return select(rows, scores)

    compressor.nuggets = nuggets
    return compressor


def test_stages_grow_to_the_compressors_ratio():
    assert growing(1100, 600, (2, 4, 8)) == (Stage(600, "random"), Stage(125, ratio=2), Stage(125, ratio=4))
    assert growing(20, ratios=(2, 3, 4, 8)) == (Stage(3, ratio=2), Stage(3, ratio=3), Stage(4, ratio=4))
    rests = growing(11, 5, (2, 4), scorer_rests=True)
    assert rests == (Stage(5, "random"), Stage(3, ratio=2), Stage(3, scorer_rests=True))
    assert growing(9) == growing(9, ratios=(8,)) == () and growing(9, 8) == (Stage(8, "random"),)
    # As many steps as there are, however they are shared.
    for steps in range(12, 40):
        stages = growing(steps, 3, (2, 4, 5, 8))
        assert sum(stage.steps for stage in stages) == 3 + (steps - 3) // 2
    stages = [stage_at(STAGES, step) for step in range(8)]
    assert stages == [STAGES[0]] * 3 + [STAGES[1]] * 2 + [STAGES[2]] + [None] * 2


def test_each_step_has_the_nuggets_of_its_stage(tmp_path):
    seen = []
    compressor = watched(make_dodo(), seen)
    train(tmp_path / "staged", compressor, stages=STAGES)
    assert seen == [("random", 4)] * 3 + [("learned", 2)] * 2 + [("learned", 3)] + [("learned", 4)] * 2
    assert (compressor.rule, compressor.nugget_ratio, compressor.chunk) == ("learned", 4, 4)
    train(tmp_path / "plain", make_dodo())
    staged, plain = (
        [record for record in numbers(read_metrics(tmp_path / name / "metrics.jsonl")) if "held_out" in record]
        for name in ("staged", "plain")
    )
    # Evaluations are of the compressor as it is: before the first step they are the same.
    assert staged[0] == plain[0] and staged[-1] != plain[-1]
    for name in ("staged", "plain"):
        assert Dodo.from_pretrained(tmp_path / name / "compressor", make_model()).chunk == 4


@pytest.mark.slow
def test_random_nuggets_leave_the_scorer_as_it_was(tmp_path):
    compressor, fresh = make_dodo(), make_dodo()
    train(tmp_path, compressor, recipe=dataclasses.replace(RECIPE, steps=3), stages=STAGES)
    assert torch.equal(compressor.scorer.up.weight, fresh.scorer.up.weight)
    assert not torch.equal(compressor.task_embeddings["ae"], fresh.task_embeddings["ae"])
    train(tmp_path, compressor, recipe=dataclasses.replace(RECIPE, steps=4), stages=STAGES, resume=True)
    assert not torch.equal(compressor.scorer.up.weight, fresh.scorer.up.weight)


@pytest.mark.slow
@pytest.mark.parametrize("make", [make_dodo, make_reader])
def test_a_scorer_that_rests_selects_and_does_not_learn(tmp_path, make):
    stages, weights = (Stage(2), Stage(6, scorer_rests=True)), []
    for steps in (2, 6):
        trained = make()
        compressor = getattr(trained, "compressor", trained)
        train(tmp_path, trained, recipe=dataclasses.replace(RECIPE, steps=steps), stages=stages, resume=steps > 2)
        weights.append(
            [compressor.scorer.up.weight.clone(), next(value for _, value in compressor.trainable()).clone()]
        )
        assert compressor.scorer.up.weight.requires_grad and compressor.rule == "learned"
    assert torch.equal(weights[0][0], weights[1][0]) and not torch.equal(weights[0][1], weights[1][1])


@pytest.mark.slow
@pytest.mark.parametrize(("make", "broken"), [(make_dodo, 4), (make_reader, 2)])
def test_a_staged_run_resumes_bit_for_bit(tmp_path, make, broken):
    train(tmp_path / "whole", make(), stages=STAGES)
    train(tmp_path / "cut", make(), recipe=dataclasses.replace(RECIPE, steps=broken), stages=STAGES)
    train(tmp_path / "cut", make(), stages=STAGES, resume=True)
    weights = []
    for name in ("whole", "cut"):
        compressor = make()
        compressor = getattr(compressor, "compressor", compressor)
        checkpoints.restore(checkpoints.find(tmp_path / name)[-1], compressor.trainable())
        weights.append(dict(compressor.trainable()))
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    with pytest.raises(ValueError, match="the saved run differs in stages"):
        train(tmp_path / "cut", make(), resume=True)


def test_a_reader_has_as_many_nuggets_as_its_stage_says(tmp_path):
    reader, rates = make_reader(), []
    select = reader.nuggets

    def nuggets(rows, scores=None):
        is_nugget = select(rows, scores)
        if reader.compressor.training:
            rates.append(float(is_nugget[:, 1:][rows.valid[:, 1:]].float().mean()))
        return is_nugget

    reader.nuggets = nuggets
    train(tmp_path, reader, stages=STAGES)
    assert rates[3:] == pytest.approx([1 / 2] * 2 + [1 / 3] + [1 / 4] * 2, abs=0.03)
    # Drawn anew behind a threshold that an earlier draw gave, of some 100 tokens.
    assert rates[:3] == pytest.approx([1 / 4] * 3, abs=0.15) and len(set(rates[:3])) > 1


def test_mistakes_name_the_argument(tmp_path):
    for arguments, message in [
        ((8, 8), "random_steps: expected less than steps, 8, got 8"),
        ((8, -1), "random_steps: expected a whole number >= 0, got -1"),
        ((8, 0, (4, 2)), "ratios: expected each above the one before, got 4,2"),
        ((8, 0, (0, 2)), "ratios: expected a whole number >= 1, got 0"),
        ((8, 0, (4,), True), "scorer_rests: expected at least 2 ratios with it, got 1"),
        ((8, 6, (2, 4, 8)), "ratios: expected at most 2 for 2 steps of the scorer, got 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            growing(*arguments[:3], scorer_rests=bool(arguments[3:]))
    for stage, message in [
        ({"steps": 0}, "steps: expected a whole number >= 1, got 0"),
        ({"steps": 1, "rule": "best"}, "rule: expected one of learned, .*, got 'best'"),
        ({"steps": 1, "ratio": 0}, "ratio: expected a whole number >= 1, got 0"),
    ]:
        with pytest.raises(ValueError, match=message):
            Stage(**stage)
    strided = Dodo(make_model(), ratio=4, layer=1, lora=4, bos_token=0, selection="strided")
    for compressor, stages, message in [
        (make_compressor(), STAGES, "stages: expected none but for a Dodo with a scorer, got some for FiveHundredX"),
        (strided, STAGES, "stages: expected none but for a Dodo with a scorer, got some for Dodo 4x, strided"),
        (make_dodo(), (Stage(1, rule="delimiters"),), "rule: expected one without delimiters"),
    ]:
        with pytest.raises(ValueError, match=message):
            Trainer(compressor, make_batches(), RECIPE, tmp_path, cpu=True, stages=stages)
    own = {"ratio": 4, "layer": 1, "lora": 2, "bos_token": 0, "losses": ("ae",)}
    for arguments, message in [
        ({"random_steps": 3}, "random_steps: expected none but for a dodo with learned nuggets, got 3 with x500"),
        ({"scorer_rests": True}, "scorer_rests: expected none but for a dodo with learned nuggets, got True with x500"),
        ({"ratios": (2, 4)}, "ratios: expected none but for a dodo with learned nuggets, got 2,4 with x500"),
        (
            {"method": "dodo", "compressor": own | {"selection": "random"}, "ratios": (2, 4)},
            "ratios: expected none but for a dodo with learned nuggets, got 2,4 with Dodo 4x, random",
        ),
        (
            {"method": "dodo", "compressor": own, "random_steps": 3, "ratios": (2, 8)},
            "ratios: expected the compressor's, 4, as the last one, got 2,8",
        ),
        ({"method": "dodo", "compressor": own, "random_steps": 8}, "random_steps: expected less than steps, 8, got 8"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(make_model(), None, tmp_path, recipe=dataclasses.asdict(RECIPE), **arguments)
