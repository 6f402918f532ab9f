"""Images on the command line: a VoCo is trained, compresses and answers as the Python API does."""

import json
import re
import shutil
import struct
import zlib

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from gistkit import cli
from gistkit.compress import Compressor, Memory, VoCo
from gistkit.hf.chat import blank, image_prompt, tile_separators
from gistkit.options.models import new_compressor
from gistkit.train import read_metrics
from tests.helpers.vision import PROMPTS, processor, tiny_vision

PIL = pytest.importorskip("PIL.Image")
EXACT = ("--memory-dtype", "float32")
pytestmark = pytest.mark.usefixtures("one_thread")


def template(family):
    image = PROMPTS.get(family, "<image>")
    return (
        "{% for m in messages %}{{ m.role }} : {% for c in m.content %}"
        f"{{% if c.type == 'image' %}}{image} {{% else %}}{{{{ c.text }}}} {{% endif %}}{{% endfor %}}{{% endfor %}}"
        "{% if add_generation_prompt %}this :{% endif %}"
    )


def save(family, root):
    """A model and its processor as a user has them."""
    tiny_vision(family).float().save_pretrained(root)
    own = processor(family)
    own.chat_template = own.tokenizer.chat_template = template(family)
    own.save_pretrained(root)
    return root


@pytest.fixture(
    scope="module",
    params=["llava", pytest.param("idefics3", marks=pytest.mark.slow), pytest.param("gemma3", marks=pytest.mark.slow)],
)
def folder(request, tmp_path_factory):
    return save(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return save("llava", tmp_path_factory.mktemp("llava"))


def take(photos):
    photos.mkdir()
    for seed in range(4):
        pixels = np.random.default_rng(seed).integers(0, 255, (12, 20, 3), dtype=np.uint8)
        PIL.fromarray(pixels).save(photos / f"{seed}.png")
    return photos


@pytest.fixture
def photos(tmp_path):
    return take(tmp_path / "photos")


@pytest.fixture
def run(capsys):
    def call(model, command, *words):
        status = cli.main([command, *map(str, words), "--model", str(model), "--device", "cpu"])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return call


def load(folder):
    return AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)


@pytest.mark.filterwarnings("ignore:memory_tokens")
def test_an_untrained_compressor_answers_as_the_python_api(folder, photos, run):
    photo = photos / "0.png"
    status, shown, complaints = run(folder, "compress", photo, "--option", "memory_tokens=3", "--layout", "upl", *EXACT)
    assert status == 0 and "UNTRAINED" in complaints and "1 image: " in shown and photo.with_suffix(".gist").exists()
    model, own = load(folder)
    separators = tile_separators(model, own)
    compressor = new_compressor(model, "voco", memory_tokens=3, layout="upl", separators=separators)
    context, (text,) = compressor.split(image_prompt(own, [str(photo)], "what is this"))
    memory = compressor.encode(context)
    found = Memory.load(photo.with_suffix(".gist"))
    assert found.lengths == memory.lengths and found.source == memory.source
    for one, other in zip(found.tensors, memory.tensors, strict=True):
        torch.testing.assert_close(one, other)
    # The text behind an image does not depend on it.
    assert compressor.split(image_prompt(own, [blank()], "what is this"))[1] == [text]
    answer = compressor.generate(memory, [text], task="qa", max_new_tokens=5, stop_tokens=[2])
    status, shown, _ = run(folder, "ask", photo.with_suffix(".gist"), "what is this", "--max-new-tokens", 5)
    assert status == 0 and shown.strip() == own.tokenizer.decode(answer[0].tolist(), skip_special_tokens=True).strip()


@pytest.mark.slow
def test_a_question_that_would_be_cut_is_refused(photos, run, tmp_path):
    # What the processor of Gemma 3 makes of an image's mark; it checks no others than the mark itself.
    model, memory = save("gemma3", tmp_path / "gemma3"), photos / "0.gist"
    assert run(model, "compress", photos / "0.png", "--option", "memory_tokens=2")[0] == 0
    status, shown, complaints = run(model, "ask", memory, "what <image_soft_token> is")
    assert status == 2 and not shown and "QUESTION: expected a text without image tokens, in a chat" in complaints
    # A template that puts all text in front: what a memory's text would lack.
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{% for c in m.content if c.type == 'text' %}{{ c.text }} {% endfor %}"
        "<start_of_image> this{% endfor %}"
    )
    status, shown, complaints = run(model, "ask", memory, "what is")
    assert (
        status == 2
        and not shown
        and "in a chat template that puts it after the image and its gap, got 'what is'" in complaints
    )


@pytest.mark.filterwarnings("ignore:memory_tokens")
def test_an_image_that_grows_is_told_as_an_image(llava, photos, run):
    _, _, complaints = run(llava, "compress", photos / "0.png", "--option", "memory_tokens=12")
    last = complaints.strip().splitlines()[-1]
    assert "0.png: the memory has more tokens than the image; an image has 12 memory tokens" in last
    assert "text" not in last and "chunk" not in last


@pytest.mark.slow
def test_the_tiles_of_an_image_are_joined(tmp_path):
    model, own = load(save("idefics3", tmp_path))
    separators = tile_separators(model, own)
    # <fake_token_around_image>, <global-img> and the places of tiles, but not of the first, before which none is.
    assert {50, 51, 42, 43, 44} <= set(separators) and not {41, 55} & set(separators)
    large = PIL.fromarray(np.zeros((32, 32, 3), dtype=np.uint8))
    compressor = VoCo(model, memory_tokens=2, lora=None, separators=separators)
    context, _ = compressor.split(image_prompt(own, [large]))
    before = context["input_ids"][0].index(55)
    assert compressor.encode(context).lengths == (before + 2,)
    assert tile_separators(tiny_vision("llava"), None) == []


@pytest.mark.slow
def test_train_compress_ask(llava, photos, run, tmp_path):
    data, out = tmp_path / "data.jsonl", tmp_path / "run"
    rows = [
        {"image": f"{number}.png", "question": question, "answer": ["who", "is", "this", "what"][number]}
        for number in range(4)
        for question in ("what is this", "who is this")
    ]
    data.write_text("\n".join(map(json.dumps, rows)))
    schedule = ("--batch", 2, "--warmup", 0, "--learning-rate", 1e-2, "--eval-every", 2, "--preset", "epl-finetune")
    words = ("--questions", data, "--images", photos, "--out", out, "--lora", 2, "--option", "memory_tokens=2")
    status, shown, _ = run(llava, "train", *words, *schedule, "--layout", "dpl", "--steps", 3)
    assert status == 0 and "3 steps, " in shown
    status, shown, _ = run(llava, "train", *words, *schedule, "--layout", "dpl", "--steps", 4, "--resume")
    steps = [record["step"] for record in read_metrics(out / "metrics.jsonl") if "loss" in record]
    assert status == 0 and steps == [1, 2, 3, 4]

    trained = ("--compressor", out / "compressor")
    memories = tmp_path / "memories"
    status, shown, complaints = run(llava, "compress", photos, "--glob", "*.png", "-o", memories, *trained)
    assert status == 0 and "4 images: " in shown and "UNTRAINED" not in complaints
    model, own = load(llava)
    compressor = Compressor.from_pretrained(out / "compressor", model).eval()
    context, texts = compressor.split(image_prompt(own, [str(photos / "1.png")], "who is this"))
    answer = compressor.generate(compressor.encode(context), texts, task="qa", max_new_tokens=4, stop_tokens=[2])
    status, shown, _ = run(llava, "ask", memories / "1.gist", "who is this", *trained, "--max-new-tokens", 4)
    assert status == 0 and shown.strip() == own.tokenizer.decode(answer[0].tolist(), skip_special_tokens=True).strip()
    # The paper's preset trains the language model itself, and the projector.
    preset = ("--preset", "voco-llama", "--option", "memory_tokens=2", "--batch", 2, "--steps", 1)
    status, shown, complaints = run(llava, "train", *words[:4], *preset, "--out", tmp_path / "own")
    assert status == 0 and "1 steps, " in shown and "voco-llama follows Position IDs Matter" in complaints
    own_weights = VoCo.from_pretrained(tmp_path / "own" / "compressor", load(llava)[0])
    assert own_weights.adapters is None and own_weights.options.layout == "epl"
    # Training goes on from a compressor.
    status, shown, _ = run(llava, "train", *words[:4], *schedule, *trained, "--out", tmp_path / "on", "--steps", 1)
    assert status == 0 and "1 steps, " in shown


def empty_png(side):
    """A file that says it has so many pixels on a side, and has none."""
    parts = ((b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(b"")))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )


@pytest.fixture(scope="module")
def mistakes(llava, tmp_path_factory):
    place = tmp_path_factory.mktemp("mistakes")
    photos = take(place / "photos")
    (place / "text.txt").write_text("what is this")
    (place / "broken.png").write_bytes(b"\x89PNG nothing")
    (place / "huge.png").write_bytes(empty_png(30000))
    (place / "huge.jsonl").write_text(
        "\n".join(
            json.dumps({"image": f"{name}.png", "question": "what", "answer": "who"}) for name in ("huge", "photo")
        )
    )
    shutil.copy(photos / "0.png", place / "photo.png")
    (place / "data.jsonl").write_text(json.dumps({"image": "0.png", "question": "what", "answer": "who"}))
    words = ("compress", photos / "0.png", "-o", place / "photo.gist", "--option", "memory_tokens=2")
    assert cli.main([*map(str, words), "--model", str(llava), "--device", "cpu"]) == 0
    return {"photo": photos / "0.png", "photos": photos, "tmp": place}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ask {tmp}/photo.gist is<image>", r"QUESTION: expected a text without special tokens .*, got 'is<image>'"),
        (
            "train --questions {tmp}/huge.jsonl --preset epl-finetune --images {tmp} --end-token",
            r"--end-token: expected none with --images, because those answers already have one",
        ),
        ("compress {photo} {tmp}/text.txt", r"TEXT: expected only texts or only images, got .*0.png and .*text.txt"),
        ("compress {tmp}/broken.png", r"broken.png: expected an image, got a file that cannot be read as one: "),
        ("compress {tmp}/huge.png", r"huge.png: expected an image, got .*900000000 pixels"),
        ("compress {photo} --option gap=9 --option memory_tokens=2", r"0.png: gap: expected at least 9 tokens after"),
        pytest.param(
            "train --preset epl-finetune --questions {tmp}/huge.jsonl --images {tmp} --steps 1 "
            "--option memory_tokens=2",
            r"huge.png: expected an image, got .*900000000 pixels",
            marks=pytest.mark.slow,
        ),
        ("compress {photo} --ratio 4", r"--ratio: voco does not have it; expected some of .*memory_tokens"),
        ("compress {photo} --method x500", r"--method: expected one for images, voco, got x500"),
        (
            "ask {tmp}/photo.gist what --template {{question}}",
            r"--template: expected none for .*photo.gist, a memory of",
        ),
        ("ask {tmp}/photo.gist --task ae", r"task: expected lm or qa for voco, which compresses images, got 'ae'"),
        ("ask {tmp}/photo.gist what --with {tmp}/photo.gist", r"memories: expected those of a method that compresses"),
        ("train --images {photos}", r"images: not allowed without questions about them"),
        (
            "train --preset voco-llama --questions {tmp}/data.jsonl",
            r"--images: expected a folder with the images of --questions for voco, got none",
        ),
        (
            "train --questions {tmp}/data.jsonl --preset epl-finetune --images {photos} --method icae",
            r"images: expected none for icae, got .*photos",
        ),
        (
            "train --questions {tmp}/data.jsonl --preset epl-finetune --images {tmp}/no",
            r"--images: .*no: no such file or folder",
        ),
        (
            "train --questions {tmp}/data.jsonl --preset epl-finetune --images {photos}",
            r"conversations: expected at least 2 that share no image, one to hold out, got 1",
        ),
    ],
)
def test_mistakes_are_told_in_a_line(mistakes, llava, run, words, message, tmp_path):
    words = [word.format(**mistakes) for word in words.split()]
    out = ("--out", tmp_path / "run") if words[0] == "train" else ()
    status, _, complaints = run(llava, *words, *out)
    last = complaints.strip().splitlines()[-1]
    assert status == 2 and last.startswith("gistkit: ") and re.search(message, last), complaints


@pytest.mark.slow
def test_a_text_model_has_no_images(llava, photos, run, tmp_path):
    text = tmp_path / "text"
    shutil.copytree(llava, text)
    config = json.loads((text / "config.json").read_text())["text_config"]
    (text / "config.json").write_text(json.dumps(config))
    status, _, complaints = run(text, "compress", photos / "0.png")
    assert status == 2 and "--model: expected a vision-language model for images that transformers can" in complaints
    status, _, complaints = run("smollm2", "compress", photos / "0.png")
    assert status == 2 and "--model: expected a vision-language model for images" in complaints


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (
            None,
            r"--model: expected a vision-language model .*: processor: expected one with a chat template, got Llava",
        ),
        pytest.param(
            "{% for m in messages %}{{ m.role + ' : ' + m.content }}{% endfor %}",
            r"processor: expected one whose chat template takes messages of images and texts, got LlavaProcessor, ",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "{{ raise_exception('no images') }}",
            r"takes messages of images and texts, .*: no images",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_chat_template_of_texts_alone_is_refused(llava, photos, run, tmp_path, written, message):
    model = tmp_path / "model"
    shutil.copytree(llava, model)
    (model / "chat_template.jinja").write_text(written or "")
    if written is None:
        (model / "chat_template.jinja").unlink()
    words = (photos / "0.png", "--option", "memory_tokens=2")
    status, _, complaints = run(model, "compress", *words)
    assert status == 2 and re.search(message, complaints.strip().splitlines()[-1]), complaints
    assert run(llava, "compress", *words)[0] == 0
    status, _, complaints = run(model, "ask", photos / "0.gist", "what")
    assert status == 2 and re.search(message, complaints.strip().splitlines()[-1]), complaints
