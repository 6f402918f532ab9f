"""The study `resolution`: its images, classifiers, training, figures, report and command."""

import dataclasses
import gzip
import struct
from functools import partial

import numpy as np
import pytest
import torch
from study_runs import TINY, check_arms_share_their_model, check_step, session
from torch.nn.functional import cross_entropy, interpolate

from gistkit import cli
from gistkit.nn import grid_positions
from gistkit_lab.studies import images as image_sets
from gistkit_lab.studies import resolution, shown
from gistkit_lab.studies.images import PARTS, load_images, on_canvas, random_crops, resize
from gistkit_lab.studies.pages import committed
from gistkit_lab.studies.registry import find, read
from gistkit_lab.studies.resolution import ABLATIONS, ARMS, PAPER, PAPER_GRIDS, STUDY, TITLES, Classifier
from tests.helpers.tiers import mostly_slow

RECIPE = resolution.Recipe(
    **TINY, steps=4, batch=6, eval_every=2, grids=(3, 4, 6), patch=2, max_position=12, eval_images=7, test_images=11
)


def idx(array):
    """A file in IDX format: two zeros, the code of unsigned bytes, axes, sizes, bytes."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write(folder, *, channels=(), packed=False, train=60, test=20, size=(6, 6)):
    """Dark images of class 0, bright ones of class 1, and of class 2 those whose right half is bright."""
    random, arrays = np.random.default_rng(0), {}
    for split, count in (("train", train), ("test", test)):
        labels = random.integers(0, 3, count)
        half = np.arange(size[1]) >= size[1] // 2
        bright = (labels == 1)[:, None, None] | ((labels == 2)[:, None, None] & half)
        shades = 200 * np.broadcast_to(bright, (count, *size)) + random.integers(0, 50, (count, *size))
        arrays[f"{split}_images"] = np.stack([shades // (1 + k) for k in range(*channels)], -1) if channels else shades
        arrays[f"{split}_labels"] = labels
    folder.mkdir(exist_ok=True)
    for part, array in arrays.items():
        content = idx(array)
        name = folder / (PARTS[part] + ".gz" * packed)
        name.write_bytes(gzip.compress(content) if packed else content)
    return {part: array.astype(np.uint8) for part, array in arrays.items()}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    write(folder)
    return load_images(folder)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("channels", [(), (3,)])
def test_idx_files_are_read(tmp_path, packed, channels):
    arrays = write(tmp_path / "set", channels=channels, packed=packed)
    found = load_images(tmp_path / "set")
    assert (found.name, len(found.train), len(found.held_out), len(found.test)) == ("set", 50, 10, 20)
    assert found.channels == (3 if channels else 1) and found.classes == 3
    whole = torch.cat([found.train.images, found.held_out.images])
    np.testing.assert_array_equal(whole.numpy(), arrays["train_images"])
    np.testing.assert_array_equal(found.test.images.numpy(), arrays["test_images"])
    labels = torch.cat([found.train.labels, found.held_out.labels, found.test.labels])
    np.testing.assert_array_equal(labels.numpy(), np.concatenate([arrays["train_labels"], arrays["test_labels"]]))
    pixels = found.standard(found.train.images)
    assert pixels.shape == (50, found.channels, 6, 6)
    for plane in range(found.channels):
        values = pixels[:, plane].double()
        assert abs(values.mean()) < 1e-5 and abs(values.std() - 1) < 1e-5
        stored = arrays["train_images"][:50, ..., plane] if channels else arrays["train_images"][:50]
        assert np.corrcoef(values.flatten().numpy(), stored.flatten())[0, 1] == pytest.approx(1)


def test_other_images_have_another_digest(tmp_path):
    write(tmp_path / "one")
    write(tmp_path / "two", train=61)
    assert load_images(tmp_path / "one").digest != load_images(tmp_path / "two").digest


def broken(folder, part, change):
    path = folder / PARTS[part]
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("train_images", lambda old: b"\0\0\x0d" + old[3:], r"an IDX file of unsigned bytes, got another header in"),
        ("train_images", lambda old: b"", r"an IDX file of unsigned bytes, got another header in .*train-images"),
        ("test_labels", lambda old: old[:-1], r"expected 20 bytes for the shape \(20,\) of .*t10k-labels.*, got 19"),
        ("test_labels", lambda old: idx(np.zeros(19)), r"test images .* got shapes \(20, 6, 6\) and \(19,\)"),
        ("test_images", lambda old: idx(np.zeros((20, 5, 6))), r"training and test images of one size in"),
    ],
)
def test_broken_files_are_named(tmp_path, part, change, message):
    write(tmp_path)
    broken(tmp_path, part, change)
    with pytest.raises(ValueError, match=message):
        load_images(tmp_path)


def test_missing_images_say_how_to_get_them(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"expected digits, fashion-mnist or a folder .*, got 'mnist'"):
        load_images("mnist")
    write(tmp_path)
    (tmp_path / PARTS["test_images"]).unlink()
    with pytest.raises(FileNotFoundError, match=r"expected .*t10k-images-idx3-ubyte or .*\.gz beside it"):
        load_images(tmp_path)
    monkeypatch.setattr(image_sets, "FASHION", tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"`apt install dataset-fashion-mnist`"):
        load_images("fashion-mnist")


@pytest.mark.slow
def test_digits_are_scikit_learns():
    datasets = pytest.importorskip("sklearn.datasets")
    found, expected = load_images(), datasets.load_digits()
    parts = (found.train, found.held_out, found.test)
    assert [len(part) for part in parts] == [1097, 350, 350] and found.classes == 10 and found.channels == 1
    shades = np.concatenate([part.images.numpy() for part in parts]) * (16 / 255)
    assert np.abs(shades - shades.round()).max() < 0.05
    rows = lambda shades, labels: sorted(  # noqa: E731
        (int(label), *np.rint(shade).astype(int).flatten()) for shade, label in zip(shades, labels, strict=True)
    )
    assert rows(shades, torch.cat([part.labels for part in parts])) == rows(expected.images, expected.target)
    assert all(part.labels.bincount().min() > 20 for part in parts)


def test_crops_are_parts_of_their_images():
    # Shades that grow to the right and, ten times as fast, downwards: bilinear crops of these are ramps again.
    ramp = torch.arange(32.0)[None, :] + 10 * torch.arange(32.0)[:, None]
    pictures = torch.stack([ramp, ramp + 5000])[:, None].repeat(100, 1, 1, 1).double()
    crops = random_crops(pictures, 16, 0.2, torch.Generator().manual_seed(0))
    assert crops.shape == (200, 1, 16, 16)
    inner = crops[:, 0, 1:-1, 1:-1]  # edges are repeated outside of an image
    across, down = inner.diff(dim=2), inner.diff(dim=1) / 10
    for steps in (across, down):
        assert float((steps - steps.mean((1, 2), keepdim=True)).abs().max()) < 1e-3
    width, height = across.mean((1, 2)) / 2, down.mean((1, 2)) / 2
    area = width * height
    assert 0.19 < area.min() < 0.3 and 0.9 < area.max() <= 1.001 and 0.5 < area.mean() < 0.7
    assert (width / height).max() < 1.34 and (width / height).min() > 0.74 and (width / height).std() > 0.05
    low, high = crops.amin((1, 2, 3)), crops.amax((1, 2, 3))
    assert (low[::2] >= 0).all() and (high[::2] <= 341).all() and (low[1::2] >= 5000).all()
    again = random_crops(pictures, 16, 0.2, torch.Generator().manual_seed(0))
    assert torch.equal(again, crops) and low[::2].unique().numel() > 90


def test_whole_images_and_mirrored_ones():
    pictures = torch.rand(40, 2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(random_crops(pictures, 8, 1.0, torch.Generator().manual_seed(1)), pictures)
    mirrored = random_crops(pictures, 8, 1.0, torch.Generator().manual_seed(1), flip=True)
    same = [bool(torch.isclose(one, other).all()) for one, other in zip(mirrored, pictures, strict=True)]
    turned = [bool(torch.isclose(one.flip(-1), other).all()) for one, other in zip(mirrored, pictures, strict=True)]
    assert [one != other for one, other in zip(same, turned, strict=True)] == [True] * 40 and 10 < sum(same) < 30


def test_resized_images_keep_what_is_where():
    ramp = torch.arange(8.0)[None, None, None, :].expand(1, 1, 8, 8)
    large = resize(ramp, 16)
    assert large.shape == (1, 1, 16, 16) and torch.allclose(large[0, 0, 3, 1:-1].diff(), torch.full((13,), 0.5))
    assert torch.equal(resize(ramp, 8), ramp)
    assert resize(torch.eye(8)[None, None], 4).sum() * 4 == pytest.approx(8, rel=0.1)


def test_images_keep_their_size_where_they_are_put():
    pictures = torch.rand(3, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    corners, blank = torch.tensor([[0, 0], [3, 1], [2, 3]]), torch.tensor([-1.0, -2.0])
    canvas = on_canvas(pictures, 7, corners, blank)
    assert canvas.shape == (3, 2, 7, 7)
    for picture, found, (row, column) in zip(pictures, canvas, corners.tolist(), strict=True):
        expected = blank.view(2, 1, 1).repeat(1, 7, 7)
        expected[:, row : row + 4, column : column + 4] = picture
        assert torch.equal(found, expected)


def classifier(images, name, seed=0, **changes):
    return Classifier(dataclasses.replace(RECIPE, **changes), name, images, seed)


def test_batches_are_of_their_seed_and_step(images):
    one, again, other = (classifier(images, "nope", seed) for seed in (0, 0, 1))
    pixels, labels = one.batch(3)
    assert pixels.shape == (6, 1, 6, 6) and labels.shape == (6,)
    assert all(map(torch.equal, again.batch(3), (pixels, labels)))
    assert not torch.equal(one.batch(4)[0], pixels) and not torch.equal(other.batch(3)[0], pixels)
    whole, labels = classifier(images, "nope", crop=1.0).batch(3)
    known = images.standard(images.train.images)
    for picture, label in zip(whole, labels, strict=True):
        distances = (known - picture).abs().amax((1, 2, 3))
        assert distances.min() < 1e-4 and images.train.labels[distances.argmin()] == label


def test_on_a_canvas_images_are_whole_and_somewhere(images):
    one = classifier(images, "nope", object_grid=2, grids=(3, 4, 6), patch=3, crop=1.0, batch=40)
    pixels, labels = one.batch(3)
    assert all(map(torch.equal, one.batch(3), (pixels, labels)))
    # In whole patches, of which one is free.
    corners = torch.tensor([(0, 0), (0, 3), (3, 0), (3, 3)])
    known = images.standard(images.train.images)
    placed = on_canvas(known.repeat(4, 1, 1, 1), 9, corners.repeat_interleave(len(known), 0), images.blank)
    apart = (pixels[:, None] - placed).abs().amax((2, 3, 4))
    assert pixels.shape == (40, 1, 9, 9) and apart.amin(1).max() < 1e-4
    found = apart.argmin(1)
    assert torch.equal(images.train.labels[found % len(known)], labels) and len((found // len(known)).unique()) == 4


def test_figures_on_a_canvas_are_those_of_single_images_at_the_same_places(images):
    one, other = (
        classifier(images, name, seed, object_grid=2, patch=3) for seed, name in enumerate(("nope", "learned-2d"))
    )
    seen = []
    for learner in (one, other):
        learner.place_images = lambda pixels, grid, corners, own=learner.place_images: (
            seen.append((grid, corners)) or own(pixels, grid, corners)
        )
    for grid in (3, 6):
        loss = 0.0
        found = one.measure(images.test, grid)
        corners = torch.cat([corners for _, corners in seen])
        seen.clear()
        assert len(corners.unique(dim=0)) >= min(9, (grid - 1) ** 2) and corners.max() == 3 * grid - 6
        assert not (corners % 3).any()
        for picture, label, (row, column) in zip(images.test.images, images.test.labels, corners.tolist(), strict=True):
            canvas = images.blank.view(1, 1, 1, 1).repeat(1, 1, 3 * grid, 3 * grid)
            canvas[..., row : row + 6, column : column + 6] = images.standard(picture[None])
            with torch.no_grad():
                loss += float(cross_entropy(one.model.eval()(canvas), label[None]))
        assert found[0] == pytest.approx(loss / 20, abs=1e-5)
        other.measure(images.test, grid)
        assert torch.equal(torch.cat([places for _, places in seen]), corners)
        seen.clear()


@pytest.mark.parametrize("name", ["learned-2d", "seqpe-bias"])
def test_figures_are_those_of_single_images(images, name):
    one = classifier(images, name)
    for grid in RECIPE.grids:
        loss = right = 0.0
        for picture, label in zip(images.test.images, images.test.labels, strict=True):
            pixels = interpolate(images.standard(picture[None]), size=(2 * grid, 2 * grid), mode="bilinear")
            with torch.no_grad():
                logits = one.model.eval()(pixels)
            loss += float(cross_entropy(logits, label[None]))
            right += bool(logits.argmax() == label)
        assert one.measure(images.test, grid) == pytest.approx((loss / 20, right / 20), abs=1e-5)


LEARNERS = ["rope-2d", "seqpe-bias", *ABLATIONS]


@pytest.mark.parametrize("name", mostly_slow(LEARNERS, "rope-2d", "seqpe-bias", *[*ABLATIONS][-1:]))
def test_the_loss_of_a_step_is_that_of_the_classes_and_of_its_positions(images, name):
    one = classifier(images, name, shift_rate=0.5, smoothing=0.1)
    main = check_step(one, one.loss, one.batch, partial(cross_entropy, label_smoothing=0.1), abs=1e-5)
    if one.regularizer is not None:
        corners = {tuple(rows[0].tolist()) for rows in main}
        assert main.shape == (6, 9, 2) and len(corners) == 3 and (0, 0) in corners
        assert all(torch.equal(rows - rows[0], grid_positions(3, 3)) for rows in main)


def test_arms_of_a_seed_start_from_the_same_model(images):
    models = {name: classifier(images, name).model for name in ARMS}
    check_arms_share_their_model(models, classifier(images, "nope", 1).model)


def train(images, out, name="seqpe-mul", **changes):
    recipe = dataclasses.replace(RECIPE, **changes)
    return STUDY.train(session(recipe, name, out, images))


@pytest.mark.parametrize("name", mostly_slow(["rope-2d-mix", "learned-2d", "seqpe-mul"], "seqpe-mul"))
def test_arms_of_each_kind_learn(images, tmp_path, name):
    run = train(images, tmp_path, name, steps=25, eval_every=25, learning_rate=1e-2, test_images=20)
    assert run.arm == name and run.curve[1][1] < run.curve[0][1]
    assert run.test["3"] == pytest.approx(round(20 * run.test["3"]) / 20) and run.test["3"] > 0.5


def test_a_patch_fits_the_images(images, tmp_path):
    bare = dataclasses.replace(RECIPE, patch=0)
    assert bare.fitted(images).patch == 2 and RECIPE.fitted(images) is RECIPE
    write(tmp_path, size=(6, 28))
    assert bare.fitted(load_images(tmp_path)).patch == 10
    assert dataclasses.replace(bare, grids=(8, 10)).fitted(images).size == 16
    small = dataclasses.replace(bare, grids=(8, 10), object_grid=2).fitted(images)
    assert (small.patch, small.size, small.image_size(8), small.image_size(10)) == (3, 24, 6, 6)


@pytest.mark.slow
def test_embeddings_are_those_of_the_trained_weights(images, tmp_path, monkeypatch):
    from gistkit_lab.viz import grids

    seen, states = {}, {}
    for name in ("learned-2d", "seqpe-mul"):
        train(images, tmp_path, name)
        states[name] = tmp_path / f"{name}-0"
    draw = grids.draw_grid_similarity
    monkeypatch.setattr(grids, "draw_grid_similarity", lambda shown: seen.update(shown) or draw(shown))
    assert resolution.draw_embeddings(tmp_path / "maps.png", RECIPE, states).read_bytes()[:4] == b"\x89PNG"
    one = classifier(images, "seqpe-mul")
    from safetensors.torch import load_file

    (state,) = tmp_path.glob(f"seqpe-mul-0/checkpoint-{RECIPE.steps}/trainable.safetensors")
    weights = load_file(state)
    assert not torch.equal(weights["cls"], one.model.cls)
    one.model.load_state_dict(weights)
    expected = one.encoder.plain(grid_positions(3, 3)).view(3, 3, -1)
    torch.testing.assert_close(seen["SeqPE AttnMul"], expected.detach(), atol=1e-5, rtol=1e-4)
    assert seen["Learned"].shape == (3, 3, 16)
    with pytest.raises(ValueError, match=r"arms with an embedding of each position, got 'nope'"):
        train(images, tmp_path, "nope")
        resolution.draw_embeddings(tmp_path / "maps.png", RECIPE, {"nope": tmp_path / "nope-0"})


@pytest.mark.slow
def test_a_canvas_is_another_table_of_the_same_file_without_the_papers(tmp_path, capsys, monkeypatch):
    write(tmp_path / "set")
    for name, preset in (("short", RECIPE), ("canvas", dataclasses.replace(RECIPE, object_grid=2))):
        monkeypatch.setitem(resolution.PRESETS, name, dataclasses.replace(preset, steps=1, patch=3))
        arguments = ["study", "resolution", "--preset", name, "--data", str(tmp_path / "set"), "--encodings", "nope"]
        assert cli.main([*arguments, "--out", str(tmp_path / name), "--save", str(tmp_path)]) == 0
        printed = capsys.readouterr().out
        assert ("paper: ViT-S on ImageNet" in printed) == (name == "short")
    path = tmp_path / "resolution-set-short.jsonl"
    assert [one.recipe.object_grid for one in read(path)] == [0, 2]
    assert set(shown.draw(path)) == {"resolution", "canvas-resolution"}
    groups = committed(tmp_path, "resolution")
    page = find("resolution").page(groups)
    assert page.count("paper: ViT-S on ImageNet") == 1 and "set on a canvas (ours)" in page
    assert "in which 6 x 6 are the image's at every size" in page


def test_every_arm_has_a_title():
    assert tuple(TITLES) == ARMS and set(PAPER) == set(ARMS)
    assert {len(row) for row in PAPER.values()} <= {4, len(PAPER_GRIDS)}
