"""The study `voco`: its mosaics and questions, its arms, training, pictures, report and command."""

import dataclasses

import numpy as np
import pytest
import torch
from study_runs import session
from torch.nn.functional import cross_entropy

from gistkit import cli
from gistkit.hf import attach
from gistkit.train import checkpoints
from gistkit_lab.studies import voco
from gistkit_lab.studies.images import Images, Split
from gistkit_lab.studies.mosaics import Mosaics, Words
from gistkit_lab.studies.voco import METHODS, PRESETS, STUDY, Arm, Compressed, arms, fresh_model, means
from tests.helpers.tiers import mostly_slow

RECIPE = dataclasses.replace(
    PRESETS["quick"], steps=4, batch=3, warmup=2, eval_every=2, side=3, patches=2, questions=8, tower_steps=3,
    tower_batch=3, base_steps=3, dim=16, layers=2, heads=2, vision_layers=1, eval_mosaics=6, test_mosaics=7,
)  # fmt: skip
CLASSES = 5


def part(first, count):
    """Images of 4 x 4 pixels, each its own shade in steps of 1, so that a pixel says which image it is of."""
    shades = torch.arange(first, first + count)
    return Split(shades[:, None, None].expand(-1, 4, 4).to(torch.uint8).contiguous(), shades % CLASSES)


IMAGES = Images("shades", part(0, 120), part(120, 50), part(170, 60), torch.zeros(1), torch.ones(1), "digest")


@pytest.fixture
def images():
    return IMAGES


def shown_items(images, batch, recipe):
    """int64 [B, side, side], the image in each cell by its shade, all of whose pixels are asked."""
    cell = recipe.patches * recipe.patch(images)
    shades = (batch.pixels[:, 0] * 255).round().long()
    assert shades.shape[1:] == (recipe.side * cell, recipe.side * cell)
    found = shades[:, ::cell, ::cell]
    assert torch.equal(found.repeat_interleave(cell, 1).repeat_interleave(cell, 2), shades)
    return found


def test_answers_are_those_of_a_recount(images):
    mosaics, asked = Mosaics(images, RECIPE, 0), {"at": 0, "count": 0, "left": 0}
    assert torch.equal(mosaics.split("test", 3).labels, mosaics.split("test", 3).labels)
    for batch in (mosaics(0, 5, 20), mosaics.split("held_out", 20), mosaics.split("test", 20)):
        classes = (shown_items(images, batch, RECIPE) % CLASSES).numpy()
        np.testing.assert_array_equal(classes.reshape(20, 9), batch.labels.numpy())
        # 5 tokens of their own, 3 kinds, 5 items, 9 cells, numbers from 0 to 9.
        item, cell, number = 8, 13, 22
        assert batch.text.shape == (20, 4 * RECIPE.questions) and Words(CLASSES, 9).size == 32
        for rows, text in zip(classes, batch.text.view(20, -1, 4).tolist(), strict=True):
            assert len({tuple(question) for question in text}) == RECIPE.questions
            for question, kind, what, answer in text:
                assert question == 4
                if kind == 5:
                    asked["at"] += 1
                    assert answer - item == rows[divmod(what - cell, 3)]
                elif kind == 6:
                    asked["count"] += 1
                    assert answer - number == (rows == what - item).sum()
                else:
                    asked["left"] += 1
                    ((row, column),) = np.argwhere(rows == what - item)
                    assert kind == 7 and column > 0 and answer - item == rows[row, column - 1]
    assert min(asked.values()) > 40


def test_no_item_is_in_two_splits(images):
    mosaics = Mosaics(images, RECIPE, 0)
    seen = [mosaics(0, 0, 30), mosaics.split("held_out", 30), mosaics.split("test", 30)]
    train, held_out, test = (set(shown_items(images, batch, RECIPE).flatten().tolist()) for batch in seen)
    assert train <= set(range(120)) and held_out <= set(range(120, 170)) and test <= set(range(170, 230))
    assert min(map(len, (train, held_out, test))) > 30


def test_mosaics_are_of_their_seed_stage_and_step(images):
    one, again, other = (Mosaics(images, RECIPE, seed) for seed in (0, 0, 1))
    first = one(0, 2, 3)
    assert all(map(torch.equal, first, again(0, 2, 3)))
    for changed in (one(0, 3, 3), one(1, 2, 3), other(0, 2, 3)):
        assert not torch.equal(first.labels, changed.labels)
    assert all(map(torch.equal, one.split("test", 3), other.split("test", 3)))
    with pytest.raises(ValueError, match="questions: expected at most 14, each once a mosaic, got 15"):
        Mosaics(images, dataclasses.replace(RECIPE, questions=15), 0)


def test_arms_and_how_many_tokens_they_leave():
    found = arms(METHODS, ["dpl", "epl"], [4.5, 16.0])
    names = ["avgpool-4.5x", "voco-dpl-4.5x", "voco-epl-4.5x", "avgpool-16x", "voco-dpl-16x", "voco-epl-16x"]
    assert [arm.name for arm in found] == ["full", "none", *names]
    assert [arm.tokens(PRESETS["quick"]) for arm in found] == [144, 0, 32, 32, 32, 9, 9, 9]
    assert [Arm("epl", ratio).tokens(PRESETS["short"]) for ratio in (72, 144)] == [2, 1]
    assert [Arm("epl", ratio).tokens(PRESETS["paper"]) for ratio in (4.5, 16, 72, 288)] == [128, 36, 8, 2]
    for ratio in (288.0, 5.0):
        with pytest.raises(ValueError, match=rf"ratio: expected .* of the 144 vision tokens, got {ratio:g}"):
            Arm("epl", ratio).tokens(PRESETS["quick"])


def test_the_rate_rises_stays_and_falls():
    recipe = dataclasses.replace(RECIPE, steps=100, warmup=10, decay=0.2, learning_rate=1.0)
    assert [recipe.learning_rate_at(step) for step in (0, 9, 80, 90, 99)] == pytest.approx([0.1, 1, 1, 0.5, 0.05])


def test_means_are_of_windows_of_the_grid():
    features = torch.arange(36.0).repeat(2, 1)[..., None] * torch.tensor([1.0, 2.0])
    grid = features[0, :, 0].view(6, 6)
    squares = [grid[row : row + 3, column : column + 3].mean() for row in (0, 3) for column in (0, 3)]
    torch.testing.assert_close(means(features, 4)[1, :, 1], 2 * torch.stack(squares))
    halves = torch.stack([grid[:, :3].mean(), grid[:, 3:].mean()])
    torch.testing.assert_close(means(features, 2)[0, :, 0], halves)
    assert torch.equal(means(features, 36), features)


@pytest.mark.parametrize("name", ["full", "none", "dpl"])
def test_answers_read_what_the_arm_leaves(images, name):
    mosaics = Mosaics(images, RECIPE, 0)
    batch, model = mosaics.split("test", 2), fresh_model(RECIPE, images, 0).eval()
    reader = voco.build_reader(RECIPE, Arm(name, 4.0 if name == "dpl" else 1.0), model)
    with torch.no_grad(), attach(model):
        found = reader.answers(batch.pixels, batch.text)
    image = [[1] + [3] * 36 * (name != "none")] * 2
    ids = torch.cat([torch.tensor(image), batch.text], 1)
    with torch.no_grad():
        if name == "dpl":
            before = len(image[0])
            assert isinstance(reader, Compressed)
            memory = reader.compressor.encode({"input_ids": ids[:, :before], "pixel_values": batch.pixels})
            assert memory.positions[0].tolist() == [0, *range(before, before + 9)]
            hidden = reader.compressor.decode(memory, "lm", batch.text)
            expected = torch.stack([reader.compressor.logits(hidden[:, at]) for at in range(3, 32, 4)], 1)
        else:
            pixels = None if name == "none" else batch.pixels
            logits = model(input_ids=ids, pixel_values=pixels).logits
            first = ids.shape[1] - 4 * RECIPE.questions
            expected = torch.stack([logits[:, first + at] for at in range(2, 32, 4)], 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad(), attach(model):
        figures = voco.measure(reader, batch, at_once=1)
    answers = batch.text[:, 3::4]
    right, kinds = expected.argmax(-1) == answers, batch.text[:, 1::4]
    assert figures["loss"] == pytest.approx(float(cross_entropy(expected.flatten(0, 1), answers.flatten())), rel=1e-4)
    assert figures["at"] == pytest.approx(float(right[kinds == 5].float().mean()))
    assert figures["count"] == pytest.approx(float(right[kinds == 6].float().mean()))


@pytest.mark.parametrize("name", mostly_slow(["none", "avgpool", "epl"], "epl"))
def test_the_tower_stays_as_it_was(images, tmp_path, name):
    arm = Arm(name, 4.0 if name in ("avgpool", "epl") else 1.0)
    assert STUDY.train(session(RECIPE, arm, tmp_path, images)).parameters > 0
    model = fresh_model(RECIPE, images, 0)
    checkpoints.restore(checkpoints.last_whole(tmp_path / "base-0", remove=False), model.named_parameters())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    reader = voco.build_reader(RECIPE, arm, model)
    checkpoints.restore(checkpoints.last_whole(tmp_path / f"{arm.name}-0", remove=False), reader.trained())
    changed = {key for key, value in reader.model.state_dict().items() if not torch.equal(value, before[key])}
    assert not any("vision_tower" in key for key in changed)
    assert any("projector" in key for key in changed) == (name != "none")
    assert any("language_model.layers" in key for key in changed)


@pytest.mark.slow
def test_all_vision_tokens_are_where_means_begin(images, tmp_path):
    runs = [STUDY.train(session(RECIPE, Arm(name), tmp_path, images)) for name in ("full", "avgpool")]
    assert runs[0].curve == runs[1].curve


@pytest.mark.slow
def test_where_voco_tokens_look(images, tmp_path):
    batch, arm = Mosaics(images, RECIPE, 0).split("held_out", 1), Arm("epl", 4.0)
    STUDY.train(session(RECIPE, arm, tmp_path, images))
    maps = voco.sight(voco.trained_reader(RECIPE, arm, 0, images, tmp_path), RECIPE, batch)
    assert maps.shape == (9, 6, 6) and (maps > 0).all()
    # The rest is on BOS and on the VoCo tokens up to their own.
    assert (maps.sum((1, 2)) < 1).all() and (maps.sum((1, 2)) > 0.5).all()
    path = voco.draw_sight(tmp_path / "sight.png", RECIPE, images, [arm], tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_tables_and_their_pictures():
    def run(method, ratio, seed, share):
        figures = {"loss": 1.0, "at": share, "count": 0.5, "left": 0.25}
        curve = [(0, 2.0, 0.1, 0.1, 0.1), (4, 1.0, share, 0.5, 0.25)]
        return voco.Run(method, ratio, seed=seed, curve=curve, held_out=figures, test=figures)

    runs = [run("epl", 4.5, 1, 0.9), run("epl", 4.5, 0, 0.8), run("dpl", 4.5, 0, 0.7), run("dpl", 4.5, 1, 0.5)]
    runs += [run("none", 1.0, 0, 0.1), run("avgpool", 16.0, 0, 0.3), run("epl", 16.0, 0, 0.3)]
    rows = STUDY.rows(runs, PRESETS["quick"])
    assert [row[:4] for row in rows[1:]] == [
        ["no image", "-", "0", "10.0"],
        ["VoCo DPL", "4.5x", "32", "60.0 (50.0-70.0)"],
        ["VoCo EPL", "4.5x", "32", "85.0 (80.0-90.0)"],
        ["means of vision tokens", "16x", "9", "30.0"],
        ["VoCo EPL", "16x", "9", "30.0"],
    ]
    assert STUDY.more_rows(runs, PRESETS["quick"])[0][1:] == [
        ["4.5x", "+25.0 (+10.0 to +40.0)", "+0.0 (+0.0 to +0.0)", "+0.0 (+0.0 to +0.0)", "2"]
    ]
    assert ["EPL", "4.5x", "128", "66.5", "64.6", "78.4"] in STUDY.paper_rows(PRESETS["quick"])[0]
    assert ["DPL*", "288x", "2", "-", "60.1", "73.5"] in STUDY.paper_rows(PRESETS["quick"])[0]
    assert set(STUDY.figures(runs, PRESETS["quick"])) == {"accuracy", "curves"}
    assert set(STUDY.figures([run("none", 1.0, 0, 0.1)], PRESETS["quick"])) == {"accuracy"}


def test_ratios_that_leave_no_whole_number_are_refused(tmp_path, capsys):
    pytest.importorskip("sklearn")
    assert cli.main(["study", "voco", "--out", str(tmp_path), "--device", "cpu", "--ratios", "288"]) == 2
    assert "--ratios: ratio: expected one that leaves a whole number" in capsys.readouterr().err
