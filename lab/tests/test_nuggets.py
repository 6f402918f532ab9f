"""The study `nuggets`: its texts, its runs and its report."""

import dataclasses
import math

import pytest
import torch
from study_runs import session
from torch.nn.functional import cross_entropy

from gistkit import cli
from gistkit.compress import Compressive, Dodo, MixedResolution
from gistkit.train import Stage
from gistkit_lab.studies import nuggets
from gistkit_lab.studies.nuggets import PRESETS, STUDY, Arm
from tests.helpers.tiers import mostly_slow

RECIPE = dataclasses.replace(
    PRESETS["quick"], steps=4, base_steps=3, batch=4, lm_batch=3, eval_every=2, eval_texts=4, final_texts=6, context=24,
    length=64, asked=16, calibrate_every=2,
)  # fmt: skip


def test_the_held_out_splits_are_halves_and_each_token_is_asked_for_once(corpus):
    texts = nuggets.TextPassages(corpus, 64, 3, 0, 10_000, 16)
    held_out, test = texts.splits["held_out"], texts.splits["test"]
    half = corpus.held_out.numel() // 2
    for rows, part in ((held_out, corpus.held_out[:half]), (test, corpus.held_out[half:])):
        asked = [tuple(row[-16:].tolist()) for row in rows]
        wanted = part[48 : 48 + 16 * len(rows)].view(-1, 16)
        assert sorted(asked) == sorted(tuple(row.tolist()) for row in wanted)
        assert len(rows) == (part.numel() - 64) // 16 + 1


def test_texts_are_of_their_seed_and_step(corpus):
    one, again, other = (nuggets.TextPassages(corpus, 64, 3, seed, 4, 16) for seed in (0, 0, 1))
    assert one(2).shape == (3, 64)
    assert torch.equal(one(2), again(2))
    assert not torch.equal(one(2), one(3))
    assert not torch.equal(one(2), other(2))
    short = dataclasses.replace(corpus, held_out=corpus.held_out[:100])
    with pytest.raises(ValueError, match=r"text: expected at least 64 bytes in the held-out part of .*, got 50"):
        nuggets.TextPassages(short, 64, 3, 0, 4, 16)


def test_arms_and_how_they_read(corpus):
    found = nuggets.arms(RECIPE, nuggets.TASKS, nuggets.LM_ARMS, [4, 8])
    assert len({arm.name for arm in found}) == len(found) == 2 * 5 + 10
    assert {arm.method for arm in found if arm.task == "ae"} == set(nuggets.SELECTIONS)
    assert set(nuggets.TITLES) == set(nuggets.LM_ARMS)
    for arm in nuggets.arms(RECIPE, ["lm"], nuggets.LM_ARMS, []):
        compressor = nuggets.build_compressor(RECIPE, arm, nuggets.fresh_model(RECIPE, 0))
        reader = nuggets.build_reader(RECIPE, arm, compressor)
        assert isinstance(reader, Compressive if arm.method == "compressive" else MixedResolution)
        if isinstance(compressor, Dodo):
            learned = [name for name, _ in compressor.trainable() if name.startswith("scorer")]
            assert bool(learned) == (arm.method == "learned")
    recipe = dataclasses.replace(RECIPE, steps=5, random_steps=1, lower_ratios=(2, 8))
    assert recipe.stages(Arm("ae", "learned", 4)) == (Stage(1, "random"), Stage(2, ratio=2))
    assert recipe.stages(Arm("ae", "strided", 4)) == recipe.stages(Arm("lm", "learned", 4)) == ()


@pytest.mark.slow
def test_the_arms_keep_about_as_many_states(corpus):
    texts = nuggets.TextPassages(corpus, RECIPE.length, 3, 0, 6, RECIPE.asked).splits["test"]
    states = {}
    for method in ("sliding", "truncated", "compressive", "strided", "none", "full"):
        arm = Arm("lm", method, RECIPE.ratio)
        compressor = nuggets.build_compressor(RECIPE, arm, nuggets.fresh_model(RECIPE, 0)).eval()
        reader = nuggets.build_reader(RECIPE, arm, compressor)
        _, states[method] = nuggets.continue_texts(reader, RECIPE, arm, texts)
    assert max(states[name] for name in ("sliding", "truncated", "compressive", "strided")) < states["full"] / 2
    for name in ("truncated", "compressive", "strided"):
        assert states[name] == pytest.approx(states["sliding"], abs=1.5)
    assert states["none"] < states["strided"] - 3
    # Before position p stand BOS and p - 1 tokens.
    assert states["full"] == sum(range(RECIPE.length - RECIPE.asked + 1, RECIPE.length + 1)) / RECIPE.asked


@pytest.mark.parametrize("method", mostly_slow(["learned", "truncated", "compressive"], "learned"))
def test_the_loss_is_that_of_the_asked_tokens(corpus, method):
    # A last block of three tokens.
    recipe = dataclasses.replace(RECIPE, asked=2 * RECIPE.segment + 3)
    arm = Arm("lm", method, recipe.ratio)
    torch.manual_seed(0)
    compressor = nuggets.build_compressor(recipe, arm, nuggets.fresh_model(recipe, 0)).eval()
    reader = nuggets.build_reader(recipe, arm, compressor)
    if method == "learned":
        reader.calibrate([corpus.passages([0, 500], 64)])
    texts = nuggets.TextPassages(corpus, recipe.length, 3, 0, 4, recipe.asked).splits["test"]
    found, _ = nuggets.continue_texts(reader, recipe, arm, texts, batch=3)
    nats = []
    with torch.no_grad():
        for row in texts:
            for at in range(recipe.length - recipe.asked, recipe.length):
                # A text that is cut begins anew with every block of asked tokens.
                block = (at - (recipe.length - recipe.asked)) // recipe.segment * recipe.segment
                first = recipe.length - recipe.asked + block - (recipe.budget - recipe.segment // 2)
                rows = reader.rows(row[None, first if method == "truncated" else 0 : at])
                logits = compressor.logits(reader.hidden(rows)[:, -1])
                nats.append(cross_entropy(logits, row[at : at + 1]))
    assert found == pytest.approx(float(torch.stack(nats).mean()), rel=1e-4)


@pytest.mark.slow
def test_a_reader_has_the_scorer_of_a_run_that_reconstructs(corpus, tmp_path):
    recipe = dataclasses.replace(RECIPE, base_steps=0)
    run = STUDY.train(session(recipe, Arm("lm", "learned", RECIPE.ratio), tmp_path, corpus))
    assert list(tmp_path.glob("ae-learned-8x-0/checkpoint-*"))
    assert 0 < run.chosen["rate"] < 0.5 and run.chosen["selected"] == round(run.chosen["rate"] * run.chosen["tokens"])


def test_arms_that_no_task_has_are_refused(tmp_path, capsys):
    words = ["study", "nuggets", "--out", str(tmp_path), "--device", "cpu", "--tasks", "ae", "--methods", "sliding"]
    assert cli.main(words) == 2
    assert "--methods: expected some of learned" in capsys.readouterr().err


def test_the_tables_stand_beside_the_papers():
    runs = [
        nuggets.Run("lm", method, 8, seed=0, test={"loss": 2.0, "states": 30.0}, held_out={"loss": 1.0, "states": 31.0})
        for method in ("strided", "learned", "sliding", "compressive")
    ]
    rows = STUDY.rows(runs, RECIPE)
    assert [row[0] for row in rows[1:]] == ["Full (sliding)", "Compressive", "Dodo learned", "Dodo strided"]
    assert rows[1][1:7] == ["31.0", "2.72", "30.0", f"{math.exp(2):.2f}", "-", "1"]
    assert [row[-1] for row in rows[1:]] == ["-", "7.64 / 7.09 / 6.88", "6.91 / 6.58 / 6.30", "-"]
