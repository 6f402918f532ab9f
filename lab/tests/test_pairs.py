"""Study `pairs`: contexts of keys and values, answers behind a compressed context, runs that resume."""

import math
from dataclasses import replace

import pytest
import torch

from gistkit.hf import attach
from gistkit_lab.studies import pairs as study
from gistkit_lab.studies.in_place import Arm, arm_compressor
from gistkit_lab.studies.pairs import Recipe, draw, fresh_model

RECIPE = Recipe(
    steps=4, batch=4, warmup=1, eval_every=2, keys=6, values=3, fewest=3, most=4, base_steps=3, dim=16, heads=2,
    eval_contexts=8, test_contexts=12,
)  # fmt: skip
pytestmark = pytest.mark.usefixtures("one_thread")


def test_contexts_hold_each_key_once_with_its_answer():
    pairs = draw(RECIPE, "train", 0, 1, 5, rows=50)
    assert torch.equal(pairs.contexts, draw(RECIPE, "train", 0, 1, 5, rows=50).contexts)
    assert not torch.equal(pairs.contexts, draw(RECIPE, "held_out", 0, 1, 5, rows=50).contexts)
    lengths = {draw(RECIPE, "train", step, rows=1).keys.shape[1] for step in range(30)}
    assert lengths == {3, 4}
    for context, keys, answers in zip(
        pairs.contexts.tolist(), pairs.keys.tolist(), pairs.answers.tolist(), strict=True
    ):
        told = dict(zip(context[::2], context[1::2], strict=True))
        assert len(told) == len(keys) and sorted(told) == sorted(keys) and set(keys) <= set(range(6))
        assert [told[key] - 6 for key in keys] == answers and set(answers) <= {0, 1, 2}


def test_the_full_context_is_that_of_plain_transformers():
    model = fresh_model(RECIPE, 0).eval()
    pairs = draw(RECIPE, "test", 0, rows=5)
    bos = torch.full((5, 1), RECIPE.bos)
    with torch.no_grad():
        before = torch.cat([bos, pairs.contexts], 1)
        plain = [model(torch.cat([before, key], 1)).logits[:, -1:, 6:9] for key in pairs.keys.split(1, 1)]
        compressor = arm_compressor(Arm("full"), model, lora=None)
        with attach(model):
            found = study.logits(compressor, pairs, RECIPE)
    torch.testing.assert_close(found, torch.cat(plain, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["gist", *study.SUCCESSORS])
def test_keys_asked_together_are_answered_as_each_alone(method):
    pairs = draw(RECIPE, "test", 1, rows=3)
    recipe = replace(RECIPE, fewest=pairs.keys.shape[1], most=pairs.keys.shape[1])
    compressor = study.build_compressor(recipe, Arm(method, 2), fresh_model(recipe, 0)).eval()
    with torch.no_grad(), attach(compressor.model):
        found = study.logits(compressor, pairs, recipe)
        memory = compressor.encode(pairs.contexts)
        states = [compressor.decode(memory, "qa", key)[:, 1:] for key in pairs.keys.split(1, 1)]
    expected = compressor.logits(torch.cat(states, 1))[..., recipe.keys : recipe.bos]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_figures_are_of_all_answers(monkeypatch):
    right = iter([True] * 2 + [False] * 2)

    def logits(compressor, pairs, recipe):
        shown = torch.nn.functional.one_hot(pairs.answers, 3).float()
        return shown * math.log(2) if next(right) else -shown * math.log(2)

    monkeypatch.setattr(study, "logits", logits)
    recipe = Recipe(keys=6, values=3, fewest=4, most=4)
    compressor = torch.nn.Linear(1, 1)
    compressor.device = "cpu"
    # Groups of 32, 32, 32 and 24 contexts.
    figures = study.measure(compressor, recipe, "test", 120)
    assert figures["exact"] == pytest.approx(64 / 120)
    losses = -math.log(2 / 4), -math.log(0.5 / 2.5)
    assert figures["loss"] == pytest.approx((64 * losses[0] + 56 * losses[1]) / 120)
