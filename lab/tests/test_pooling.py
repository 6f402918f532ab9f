"""The study `pooling`: its targets, its measure and its masks against plain loops, its layer against transformers'."""

import argparse
import dataclasses

import numpy as np
import pytest
import torch
from study_runs import session

from gistkit import cli
from gistkit.hf import attach
from gistkit_lab.studies import pooling, results
from gistkit_lab.studies.pooling import CONTEXTS, MASKS, STUDY, PoolingLayer, Recipe, Setting, make_inputs

TINY = Recipe(steps=6, batch=4, width=16, mlp=32, warmup=2, eval_every=2, eval_batches=1, final_batches=1)
# Learns in seconds.
SMALL = Recipe(steps=150, batch=32, width=32, mlp=64, warmup=10, init_std=0.1, eval_every=25, final_batches=4)


def plain_mask(mask, context, ratio):
    """Who sees whom in [context][gists], written out."""
    gists = -(-context // ratio)
    seen = np.zeros((context + gists, context + gists), bool)
    for query in range(context + gists):
        for key in range(context + gists):
            if mask == "standard" or query < context:
                seen[query, key] = key <= query
            else:
                own = (query - context) * ratio <= key < min((query - context + 1) * ratio, context)
                seen[query, key] = own or key == query
    return seen


@pytest.mark.parametrize(("length", "ratio"), [(8, 2), (7, 3), (5, 1), (6, 6), (9, 8)])
def test_targets_are_the_means_of_windows(length, ratio):
    context = torch.randn(3, length, 4, dtype=torch.float64)
    means = pooling.window_means(context, ratio)
    assert means.shape == (3, -(-length // ratio), 4)
    for row in range(3):
        for window in range(means.shape[1]):
            inside = [context[row, at] for at in range(length) if at // ratio == window]
            torch.testing.assert_close(means[row, window], sum(inside) / len(inside))


def test_share_right_is_that_of_a_loop():
    means = torch.randn(6, 5, 3)
    predicted = means + 0.7 * torch.randn(6, 5, 3)
    right = 0
    for row in range(6):
        for index in range(5):
            distances = [float(((predicted[row, index] - mean) ** 2).sum()) for mean in means[row]]
            right += distances.index(min(distances)) == index
    assert 0 < right < 30
    assert pooling.share_right(predicted, means) == pytest.approx(right / 30)
    assert pooling.share_right(means, means) == 1
    # Nearest among the windows of the same sequence, not of the batch.
    assert pooling.share_right(means, means.roll(1, 1)) == 0


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("length", "ratio"), [(8, 2), (7, 3), (4, 1), (5, 5)])
@pytest.mark.parametrize("at_zero", [False, True])
def test_masks_and_positions_are_those_written_out(mask, length, ratio, at_zero):
    layout = pooling.build_layout(mask, length, ratio, at_zero)
    expected = plain_mask(mask, length, ratio)
    assert (layout.dense_mask("physical") == expected).all()
    plan = layout.compile()
    gists = -(-length // ratio)
    assert plan.positions.tolist() == [*range(length), *([0] * gists if at_zero else range(length, length + gists))]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2)])
def test_the_layer_is_gemma2s_with_the_dense_mask(mask, heads, kv_heads):
    setting = Setting(mask=mask, context="at-zero", ratio=3, length=8, heads=heads, kv_heads=kv_heads)
    layer = PoolingLayer(Recipe(width=16, mlp=32, init_std=0.5), setting).double()
    torch.nn.init.normal_(layer.model.layers[0].post_attention_layernorm.weight)
    context = torch.randn(2, 8, 16, dtype=torch.float64)
    with attach(layer.model), torch.no_grad():
        ours = layer(context)
        attention = pooling.attention_of_gists(layer, context)

    theirs = layer.model
    theirs.set_attn_implementation("eager")
    hidden = []
    theirs.layers[0].register_forward_hook(lambda module, args, out: hidden.append(out))
    unseen = torch.zeros(11, 11, dtype=torch.float64).masked_fill(~torch.from_numpy(plain_mask(mask, 8, 3)), -1e30)
    with torch.no_grad():
        out = theirs(
            inputs_embeds=torch.cat([context, layer.gists.expand(2, -1, -1)], 1),
            position_ids=torch.tensor([[*range(8), 0, 0, 0]]),
            attention_mask={"full_attention": unseen[None, None]},
            output_attentions=True,
        )
    # The layer's own output, which no norm follows. The eager softmax is in float32, and the norms behind it scale
    # small outputs up: 32 steps.
    torch.testing.assert_close(ours, hidden[0][:, 8:], rtol=1e-5, atol=32 * torch.finfo(torch.float32).eps)
    torch.testing.assert_close(
        attention, out.attentions[0][:, :, 8:, :8].mean((0, 1)).double(), rtol=1e-4, atol=1e-6, check_dtype=False
    )


def test_the_share_of_attention_in_a_window():
    attention = torch.zeros(3, 5)
    attention[0, :2] = 0.25
    attention[1, 2] = attention[1, 4] = 0.1
    attention[2] = 0.2
    assert pooling.share_in_window(attention, 2) == pytest.approx((1 + 0.5 + 0.2) / 3)


@pytest.mark.slow
def test_the_pool_mask_learns_and_an_untrained_layer_guesses(tmp_path):
    cell = {"inputs": "sphere+common", "context": "variable", "length": 12, "learning_rate": 5e-3}
    pool = STUDY.train(session(SMALL, Setting(mask="pool", **cell), tmp_path / "pool"))
    assert pool.share > 0.95 and pool.error < 0.5 and pool.in_window == pytest.approx(1)
    assert pool.curve[0][2] < 0.35
    standard = STUDY.train(session(SMALL, Setting(mask="standard", **cell), tmp_path / "standard"))
    assert standard.share < 0.6 and standard.in_window < 0.5
    untrained = STUDY.train(session(dataclasses.replace(SMALL, steps=0), Setting(**cell), tmp_path / "none"))
    assert untrained.share == pytest.approx(pooling.chance(SMALL, untrained.setting), abs=0.1)
    # Training ends where nothing is left to learn.
    assert pool.curve[-1][0] <= SMALL.steps
    assert all(share < SMALL.enough for _, _, share in pool.curve[:-1])


def test_chance_is_that_of_guessing_on_what_is_measured(tmp_path, monkeypatch):
    recipe = dataclasses.replace(TINY, steps=0, batch=64, final_batches=8)
    assert pooling.chance(recipe, Setting(length=20)) == pytest.approx(0.1)
    setting = Setting(context="at-zero", length=8)
    guess = lambda predicted, means: float((torch.randint(means.shape[1], means.shape[:2]) == 0).float().mean())  # noqa: E731
    monkeypatch.setattr(pooling, "share_right", guess)
    shares = [STUDY.train(session(recipe, setting, tmp_path / "state")).share for _ in range(4)]
    assert sum(shares) / 4 == pytest.approx(pooling.chance(recipe, setting), abs=0.02)


@pytest.mark.parametrize("context", CONTEXTS)
def test_contexts_have_the_lengths_of_their_setting(context):
    setting = Setting(context=context, length=10)
    drawn = [pooling.draw(make_inputs("sphere", 4), setting, 2, seed) for seed in range(100)]
    assert {one.shape[1] for one in drawn} == ({10} if context == "fixed" else set(range(5, 11)))
    again = pooling.draw(make_inputs("sphere", 4), setting, 2, 0)
    assert torch.equal(again, drawn[0]) and not torch.equal(drawn[0][:, :5], drawn[1][:, :5])


def test_inputs_have_the_norms_they_promise(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    sphere = make_inputs("sphere", 16).draw(8, 100, generator)
    torch.testing.assert_close(sphere.norm(dim=-1), torch.full((8, 100), 4.0))
    common = make_inputs("sphere+common", 16).draw(80, 100, generator)
    assert float(common.mean((0, 1)).norm()) == pytest.approx(4, rel=0.05)

    table = torch.randn(500, 24) + 0.3
    rows = pooling.project(table, 16)
    assert rows.shape == (500, 16) and float(rows.square().sum(-1).mean()) == pytest.approx(16, rel=1e-4)
    # At full width a projection is a rotation: angles stay.
    turned = pooling.project(table, 24)
    torch.testing.assert_close(turned @ turned.T / 24, table @ table.T / table.square().sum(-1).mean())

    model = torch.nn.Module()
    model.get_input_embeddings = lambda: torch.nn.Embedding.from_pretrained(table)
    monkeypatch.setattr(pooling, "load_smollm2", lambda: (model, None))
    make_inputs.cache_clear()
    drawn = make_inputs("vocabulary", 16).draw(2, 5, generator).flatten(0, 1)
    make_inputs.cache_clear()
    assert (drawn[:, None] == rows).all(-1).any(-1).all()
    with pytest.raises(ValueError, match=r"inputs: expected one of sphere, vocabulary, sphere\+common, got 'text'"):
        make_inputs("text", 16)


def test_heads_share_the_width():
    with pytest.raises(ValueError, match="heads: expected a divisor of the width 16, got 3"):
        PoolingLayer(TINY, Setting(heads=3, kv_heads=3))


def test_a_grid_has_a_setting_for_each_combination():
    settings = pooling.grid(seeds=2, mask=MASKS, heads=[(2, 1)], length=[8])
    assert [(s.mask, s.heads, s.kv_heads, s.seed) for s in settings] == [
        ("pool", 2, 1, 0), ("pool", 2, 1, 1), ("standard", 2, 1, 0), ("standard", 2, 1, 1),
    ]  # fmt: skip


def test_the_table_shows_best_and_median_beside_the_paper():
    runs = [
        pooling.Run(Setting(mask=mask, context="variable", seed=seed), share=share)
        for mask, seed, share in [("pool", 0, 1.0), ("pool", 1, 0.5), ("standard", 0, 0.2)]
    ]
    runs.append(pooling.Run(Setting(inputs="sphere+common", heads=8, kv_heads=4), share=0.25))
    header, paper, sphere, common = STUDY.rows(runs, Recipe())
    assert header[5] == "pool, variable" and header[8] == "standard, variable" and header[10:] == ["chance", "runs"]
    assert paper[0] == "paper: sphere" and paper[5] == "near perfect" and paper[8] == "much reduced"
    assert sphere == ["sphere", "1/1", "2", "20", "-", "1.00 (0.75)", "-", "-", "0.20", "-", "0.10 / 0.13", "1-2"]
    assert common[:5] == ["sphere+common", "8/4", "2", "20", "0.25"] and common[-1] == "1"


@pytest.mark.slow
def test_the_command_leaves_results_and_pictures(tmp_path, capsys, monkeypatch):
    words = ["study", "pooling", "--quick", "--steps", "2", "--batch", "2", "--lengths", "8", "--inputs", "sphere"]
    words += ["--contexts", "at-zero", "--heads", "1/1,8/4", "--out", str(tmp_path)]
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert "| paper: sphere" in shown and "8/4" in shown and "results.jsonl" in shown
    lines = results.load(tmp_path / "results.jsonl")
    assert len(lines) == 4 and lines[0]["recipe"]["steps"] == 2 and lines[0]["machine"]["torch"]
    assert np.array(lines[0]["run"]["attention"]).shape == (4, 8)
    assert [path.name for path in tmp_path.glob("*.png")] == ["attention-sphere.png"]
    assert (tmp_path / "attention-sphere.png").read_bytes().startswith(b"\x89PNG")


def test_the_commands_mistakes(capsys):
    for wrong, message in [
        (["--heads", "8"], "expected heads/key heads such as 8/4, got '8'"),
        (["--ratios", "2,2"], "expected each value once, got '2,2'"),
        (["--ratios", "2,,4"], "expected a whole number of at least 1, got ''"),
        (["--inputs", "text"], "expected some of sphere,vocabulary,sphere+common, each once, got 'text'"),
        (["--learning-rates", "0"], "expected a number from 1e-09 to 1, got '0'"),
    ]:
        with pytest.raises(SystemExit):
            cli.main(["study", "pooling", *wrong])
        assert message in capsys.readouterr().err
    assert cli.main(["study", "pooling", "--ratios", "30"]) == 2
    assert "ratio: expected 1 to the shortest context" in capsys.readouterr().err


def test_the_papers_settings_and_what_its_text_lacks(tmp_path, capsys):
    from gistkit_lab.studies.registry import find

    study, parser = find("pooling"), argparse.ArgumentParser()
    study.add_options(parser)
    plan = study.plan(parser.parse_args(["--paper", "--inputs", "sphere"]))
    assert (plan.recipe.steps, plan.recipe.batch, plan.recipe.eval_every) == (50_000, 64, 500)
    settings = [job.arm for job in plan.jobs]
    assert {(each.heads, each.kv_heads) for each in settings} == {(1, 1), (8, 8), (8, 4)}
    assert {each.ratio for each in settings} == {1, 2, 5} and {each.seed for each in settings} == {0, 1, 2}
    # Masks, contexts, heads, ratios, learning rates and seeds.
    assert len(settings) == 2 * 3 * 3 * 3 * 3 * 3
    assert "ratios: 1, and two that" in plan.about and "Table 11" in plan.about
    small = study.plan(
        parser.parse_args(["--paper", "--inputs", "sphere", "--ratios", "4", "--steps", "6", "--seeds", "1"])
    )
    assert small.recipe.steps == 6 and small.recipe.batch == 64 and small.recipe.eval_every == 50
    assert {each.ratio for each in (job.arm for job in small.jobs)} == {4}
    assert cli.main(["study", "paper-table", "gistpool-11", "--dry-run"]) == 2
    assert "gistpool-11, which gistkit study pooling --paper prints" in capsys.readouterr().err
