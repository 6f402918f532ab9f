"""Images in ImageNet's layout, and what torchvision changes of them, in the study `resolution`."""

import dataclasses
import os
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from study_runs import TINY
from torch.nn.functional import cross_entropy

from gistkit import cli
from gistkit_lab.studies import resolution
from gistkit_lab.studies.batches import Augment
from gistkit_lab.studies.images import Files, load_images
from gistkit_lab.studies.registry import find, read
from gistkit_lab.studies.resolution import Classifier, Recipe

try:
    import torchvision.transforms.v2
except (ImportError, RuntimeError):
    torchvision = None
needs_torchvision = pytest.mark.skipif(torchvision is None, reason="torchvision is missing, or of another torch")

RECIPE = Recipe(
    **TINY, steps=2, batch=4, eval_every=2, max_position=12, grids=(2, 3), patch=4, eval_images=4, test_images=8
)


def gradient(width, height, blue=0):
    """Red tells the column and green the row."""
    pixels = np.full((height, width, 3), blue, np.uint8)
    pixels[..., 0], pixels[..., 1] = np.arange(width), np.arange(height)[:, None]
    return Image.fromarray(pixels)


def write(folder, train=9, test=4):
    """Three classes of images of any size, of which blue tells the class; PNG, as nothing is lost in it."""
    for split, count in (("train", train), ("val", test)):
        for number, name in enumerate(("n02", "n10", "n30")):
            (folder / split / name).mkdir(parents=True)
            for index in range(count):
                path = folder / split / name / f"{split}_{index}.{'PNG' if index else 'png'}"
                gradient(40 + index, 60 - index, 100 * number).save(path, "PNG")
    (folder / "train" / "n02" / "notes.txt").write_text("no image")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("imagenet"))


@pytest.fixture(scope="module")
def images(folder):
    return load_images(folder)


def test_a_folder_of_classes_is_a_set_of_images(folder, images):
    assert images.name == folder.name and images.classes == 3 and images.channels == 3 and images.side == 60
    assert (len(images.train), len(images.held_out), len(images.test)) == (23, 4, 12)
    of = lambda split: set(split.images.paths)  # noqa: E731
    assert len(of(images.train) | of(images.held_out)) == 27 and all("/val/" in path for path in of(images.test))
    for split in (images.train, images.held_out, images.test):
        blue = split.images.squares(8)[:, 2].flatten(1)
        assert torch.equal(blue, 100 * split.labels[:, None].to(torch.uint8).expand_as(blue))
    # Evaluations take the first: of several classes.
    assert len(set(images.held_out.labels.tolist())) > 1 and len(set(images.test[:6].labels.tolist())) > 1
    pixels = images.squares(images.test[:2].images, 8)
    expected = (images.test[:2].images.squares(8)[:, 2] / 255 - 0.406) / 0.225
    torch.testing.assert_close(pixels[:, 2], expected)


@pytest.mark.parametrize(("width", "height"), [(200, 120), (80, 160), (64, 64)])
def test_squares_are_the_middle(tmp_path, width, height):
    gradient(width, height).save(tmp_path / "a.png")
    (found,) = Files(np.array([str(tmp_path / "a.png")], object)).squares(16).double()
    side = min(width, height) * 224 / 256
    places = (torch.arange(16) + 0.5) / 16 * side - side / 2
    assert found.shape == (3, 16, 16)
    # Pixel x covers x to x + 1.
    assert (found[0] - (width / 2 + places - 0.5)).abs().max() < 1.5
    assert (found[1] - (height / 2 + places - 0.5)[:, None]).abs().max() < 1.5


@pytest.mark.slow
def test_crops_keep_area_and_shape_within_their_bounds(tmp_path):
    gradient(240, 180).save(tmp_path / "a.png")
    files = Files(np.array([str(tmp_path / "a.png")] * 300, object))
    crops = files.crops(16, 0.2, torch.arange(300), flip=True).double()
    assert torch.equal(crops[7:9], files[7:9].crops(16, 0.2, torch.tensor([7, 8]), flip=True).double())
    # From the first to the last pixel's middle are 15 sixteenths of a side.
    widths = (crops[:, 0, :, -1] - crops[:, 0, :, 0]).mean(-1) * 16 / 15
    heights = (crops[:, 1, -1] - crops[:, 1, 0]).mean(-1) * 16 / 15
    assert 100 < int((widths < 0).sum()) < 200 and (heights > 0).all()
    area, ratio = widths.abs() * heights / (240 * 180), widths.abs() / heights
    inside = (widths.abs() < 235) & (heights < 176)
    assert 0.18 < area.min() < 0.3 and 0.7 < area.max() <= 1.03
    assert 0.72 < ratio[inside].min() < 0.85 and 1.2 < ratio[inside].max() < 1.37
    assert len(crops.flatten(1).unique(dim=0)) == 300
    whole = files[:3].crops(16, 1.0, torch.arange(3))
    assert len(whole) == 3 and not torch.equal(whole[0], whole[1])


@pytest.mark.slow
def test_a_classifier_learns_from_a_folder(images):
    one, again = (Classifier(RECIPE, "seqpe-mul", images, 0) for _ in range(2))
    pixels, labels = one.batch(3)
    assert pixels.shape == (4, 3, 8, 8) and all(map(torch.equal, again.batch(3), (pixels, labels)))
    assert not torch.equal(one.batch(4)[0], pixels)
    blue = (pixels[:, 2] * 0.225 + 0.406) * 255
    torch.testing.assert_close(blue, 100.0 * labels.view(-1, 1, 1).expand_as(blue), rtol=0, atol=0.01)
    optimizer = torch.optim.Adam(one.model.parameters(), 3e-3)
    for step in range(40):
        optimizer.zero_grad()
        one.loss(step).backward()
        optimizer.step()
    assert one.measure(images.test, 2)[1] == 1.0
    # Without a patch it is as large as the set's images.
    assert dataclasses.replace(RECIPE, patch=0).fitted(images).patch == 30


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"rand_augment": 9, "mixup": 0.8, "erasing": 0.5}])
def test_batches_do_not_depend_on_the_number_of_processes_that_read_them(images, changes):
    """Steps in their order, again, and with a leap; each image's crop is up to its own seed."""
    if changes and torchvision is None:
        pytest.skip("torchvision is missing, or of another torch")
    recipe = dataclasses.replace(RECIPE, steps=8, **changes)
    found = []
    for workers in (0, 1, 2):
        one = Classifier(recipe, "nope", dataclasses.replace(images, workers=workers), 0)
        found.append([one.batch(step) for step in (0, 1, 2, 5, 6, 0, 9)])
        processes = getattr(one.files._items, "_workers", [])
        assert len(processes) == workers and all(process.pid != os.getpid() for process in processes)
    for batches in found:
        assert all(map(torch.equal, batches[0], batches[5])) and not torch.equal(batches[0][0], batches[1][0])
        for mine, its in zip(batches, found[0], strict=True):
            assert all(map(torch.equal, mine, its))


def test_broken_folders_are_named(tmp_path):
    (tmp_path / "train").mkdir()
    with pytest.raises(ValueError, match=r"data: expected a folder for each class in .*train, .* found none"):
        load_images(tmp_path)
    folder = write(tmp_path / "set")
    (folder / "val" / "n99").mkdir()
    with pytest.raises(ValueError, match=r"data: expected the classes of .*train, got .*n99"):
        load_images(folder)
    (folder / "val" / "n99").rename(folder / "train" / "n99")
    with pytest.raises(ValueError, match=r"data: expected images \(.jpeg, .*\) in .*train/n99, found none"):
        load_images(folder)
    (folder / "train" / "n99").rmdir()
    before = load_images(folder)
    (folder / "train" / "n10" / "train_3.PNG").rename(folder / "train" / "n10" / "other.PNG")
    images = load_images(folder)
    assert images.digest != before.digest
    (folder / "train" / "n10" / "other.PNG").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"data: expected an image in .*other.PNG, got a file that cannot be read"):
        images.train.images.squares(8)


def test_without_torchvision_the_extra_is_named(images, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "torchvision.transforms", None)
    with pytest.raises(ImportError, match=r"need torchvision, built for this torch: pip install 'gistkit\[images\]'"):
        Classifier(dataclasses.replace(RECIPE, mixup=0.8), "nope", images, 0)
    assert Classifier(RECIPE, "nope", images, 0).augment is None


@needs_torchvision
@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_mixtures_have_the_shares_of_their_images_as_labels(kind):
    augment = Augment(4, **{kind: 0.8})
    labels = torch.tensor([0, 3, 1, 2, 3])
    # An image of class c is c everywhere.
    pixels = labels.float().view(-1, 1, 1, 1).expand(-1, 3, 16, 16)
    seen = set()
    for step in range(8):
        mixed, shares = augment.batch(pixels, labels, step, torch.arange(5))
        again, _ = augment.batch(pixels, labels, step, torch.arange(5))
        assert torch.equal(mixed, again) and shares.shape == (5, 4)
        torch.testing.assert_close(shares.sum(1), torch.ones(5))
        torch.testing.assert_close(mixed.mean((1, 2, 3)), shares @ torch.arange(4.0), rtol=1e-4, atol=1e-4)
        assert (mixed.flatten(1).std(1).max() > 0.1) == (kind == "cutmix" and float(shares.max(1).values.min()) < 1)
        seen.add(round(float(shares.max()), 4))
    assert len(seen) > 1


@needs_torchvision
def test_each_image_has_operations_of_its_own_and_torch_s_numbers_stay(folder):
    augment, seeds = Augment(3, rand_augment=9, erasing=0.5), torch.arange(200)
    same = Files(np.array([str(folder / "train" / "n10" / "train_1.PNG")] * 24, object)).squares(16)
    before = torch.get_rng_state()
    changed = augment.images(same, seeds[:24])
    assert changed.dtype == torch.uint8 and changed.shape == same.shape
    assert len(changed.flatten(1).unique(dim=0)) > 12
    assert torch.equal(changed[5:9], augment.images(same[5:9], seeds[5:9]))
    pixels = torch.ones(200, 3, 16, 16)
    erased, labels = augment.batch(pixels, torch.zeros(200, dtype=torch.int64), 0, seeds)
    assert 60 < int((erased == 0).flatten(1).any(1).sum()) < 140 and labels.dtype == torch.int64
    assert torch.equal(torch.get_rng_state(), before)


@needs_torchvision
@pytest.mark.parametrize("name", ["nope", "seqpe-mul"])
def test_a_step_with_mixtures_has_the_loss_of_their_shares(images, name):
    recipe = dataclasses.replace(RECIPE, rand_augment=9, mixup=0.8, cutmix=1.0, erasing=0.25, smoothing=0.1)
    one = Classifier(recipe, name, images, 0)
    pixels, shares = one.batch(1)
    assert shares.shape == (4, 3) and all(map(torch.equal, one.batch(1), (pixels, shares)))
    positions, embeddings, regularizer = one.place(4, 1)
    log_shares = one.model(pixels, positions, embeddings=embeddings).log_softmax(-1)
    smoothed = 0.9 * shares + 0.1 / 3
    task = -(smoothed * log_shares).sum(-1).mean()
    assert float(one.loss(1).detach()) == pytest.approx(float((task + regularizer).detach()), rel=1e-5)
    hard = cross_entropy(log_shares, shares.argmax(1))
    assert float(task.detach()) != pytest.approx(float(hard.detach()), rel=1e-3)


@pytest.mark.slow
def test_the_command_says_what_the_preset_follows(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(resolution.PRESETS, "seqpe-imagenet", RECIPE)
    arguments = ["study", "resolution", "--preset", "seqpe-imagenet", "--data", str(folder), "--encodings", "nope"]
    assert cli.main([*arguments, "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert resolution.NOTES["seqpe-imagenet"] in shown and "23 training images" in shown
    assert [one.recipe for one in read(tmp_path / "results.jsonl")] == [RECIPE]
    assert cli.main(["study", "voco", "--preset", "quick", "--data", str(folder), "--out", str(tmp_path / "v")]) == 2
    assert "--data: expected digits, fashion-mnist or a folder of IDX files, got" in capsys.readouterr().err


def test_presets_have_the_papers_sizes():
    for study, name in (("length", "seqpe-wikitext"), ("resolution", "seqpe-imagenet")):
        recipe = find(study).presets[name]
        sizes = recipe.pivots, recipe.candidates, recipe.windows, recipe.window_positions, recipe.encoder_layers
        assert sizes == (32, 32, 32, 32, 2)
        assert (recipe.contrastive_weight, recipe.ood_weight, recipe.shift_rate, recipe.base) == (0.1, 0.1, 0.1, 10)
    assert find("length").presets["seqpe-wikitext"].lengths == (512, 1024, 2048, 4096, 8192, 16384)
    assert recipe.drop_path == 0.1
    assert [16 * grid for grid in recipe.grids] == [224, 320, 384, 448, 512, 640, 672]
