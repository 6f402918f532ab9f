"""Conversations about images: both forms of files, what a model reads of them, and errors that name the place."""

import json
import shutil

import numpy as np
import pytest
import torch

from gistkit.compress import VoCo
from gistkit.hf.chat import image_prompt, open_image
from gistkit.train import Conversation, ConversationQuestions, ImageQuestions, load_conversations
from tests.helpers.vision import IMAGE, processor, tiny_vision

PIL = pytest.importorskip("PIL.Image")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} : {% for c in m.content %}"
    "{% if c.type == 'image' %}<image> {% else %}{{ c.text }} {% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}this :{% endif %}"
)
PLAIN = {"image": "a.png", "question": "what is this", "answer": "who"}
LLAVA = {
    "id": 7,
    "image": "folder/b.png",
    "conversations": [
        {"from": "human", "value": "<image>\nwhat is this"},
        {"from": "gpt", "value": "who is"},
        {"from": "human", "value": "who"},
        {"from": "gpt", "value": "this"},
    ],
}


@pytest.fixture
def images(tmp_path):
    (tmp_path / "images" / "folder").mkdir(parents=True)
    for seed, name in enumerate(("a.png", "folder/b.png")):
        pixels = np.random.default_rng(seed).integers(0, 255, (12, 12, 3), dtype=np.uint8)
        PIL.fromarray(pixels).save(tmp_path / "images" / name)
    return tmp_path / "images"


def questions(conversations, end_token=2):
    compressor = VoCo(tiny_vision("llava").float(), memory_tokens=2, lora=2)
    own = processor("llava")
    own.chat_template = own.tokenizer.chat_template = TEMPLATE
    return ConversationQuestions(conversations, compressor, own, end_token), own


@pytest.mark.parametrize("form", ["lines", "array"])
def test_both_forms_are_read(form, images, tmp_path):
    path = tmp_path / "data.json"
    rows = [PLAIN, LLAVA]
    text = json.dumps(rows) if form == "array" else "\n\n".join(map(json.dumps, rows))
    # Some editors begin a file with a byte order mark.
    path.write_text(text, encoding="utf-8-sig" if form == "array" else "utf-8")
    found = load_conversations(path, images)
    assert [each.images for each in found] == [(images / "a.png",), (images / "folder/b.png",)]
    assert found[0].turns == (("what is this", "who"),)
    assert found[1].turns == (("<image>\nwhat is this", "who is"), ("who", "this"))


def test_llavas_conversations_without_an_image_are_left_out_and_counted(images, tmp_path):
    path = tmp_path / "data.json"
    text_only = {key: value for key, value in LLAVA.items() if key != "image"}
    path.write_text(json.dumps([text_only, PLAIN, LLAVA, text_only | {"image": None}]))
    with pytest.warns(UserWarning, match=r"data\.json: 2 of 4 conversations have no image and are left out"):
        found = load_conversations(path, images)
    assert [each.images for each in found] == [(images / "a.png",), (images / "folder/b.png",)]
    path.write_text(json.dumps([text_only]))
    with (
        pytest.warns(UserWarning, match="1 of 1 conversations"),
        pytest.raises(ValueError, match=r"data\.json: expected at least one conversation about an image, got none"),
    ):
        load_conversations(path, images)


def test_a_model_reads_the_turns_so_far(images, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, [PLAIN, LLAVA])))
    examples, own = questions(load_conversations(path, images))
    assert len(examples) == 3 and len(examples[1:]) == 2
    ids = {word: own.tokenizer.convert_tokens_to_ids(word) for word in ("user", ":", "what", "is", "this", "who")}
    spoken = lambda text: [ids[word] for word in text.split()]  # noqa: E731
    unknown = own.tokenizer.pad_token_id
    first, second, third = examples
    # No word of the tiny tokenizer is "assistant".
    for example in (first, second, third):
        assert example.context["input_ids"] == [[*spoken("user :"), *[IMAGE] * 9]]
    assert first.question == second.question == spoken("what is this this :")
    assert list(first.answer) == [*spoken("who"), 2] and list(second.answer) == [*spoken("who is"), 2]
    assert third.question == [
        *spoken("what is this"), unknown, *spoken(": who is user : who this :")
    ]  # fmt: skip
    assert list(third.answer) == [*spoken("this"), 2]
    pixels = own(images=[PIL.open(images / "a.png")], text=["<image>"], return_tensors="pt")["pixel_values"]
    assert torch.equal(first.context["pixel_values"], pixels) and not torch.equal(
        second.context["pixel_values"], pixels
    )
    loss = examples.compressor(**ImageQuestions(examples, 2, "three")(0))["loss"]
    loss.backward()
    assert loss.isfinite() and examples.compressor.memory_embeddings.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1], r"data\.jsonl, \[0\]: expected a JSON object, got int"),
        (
            {"question": "what", "answer": "who"},
            r"data\.jsonl, line 1: expected image, a file's name or several, got None",
        ),
        (PLAIN | {"image": "c.png"}, r"line 1: expected the image .*c\.png, found none"),
        (PLAIN | {"image": "../data.jsonl"}, r"line 1: expected an image inside .*images, got '\.\./data\.jsonl'"),
        (PLAIN | {"answer": " "}, r"line 1, 'answer': expected a text that is not empty, got ' '"),
        (PLAIN | {"question": "<image> <image> what"}, r"line 1: expected 1 <image> in the first question, .* got 2"),
        (
            LLAVA | {"conversations": LLAVA["conversations"][:3]},
            "line 1, 'conversations': expected questions and answers in turn",
        ),
        (
            LLAVA | {"conversations": LLAVA["conversations"][1:3]},
            r"line 1, 'conversations'\[0\], 'from': expected human or user, got 'gpt'",
        ),
        (
            LLAVA | {"conversations": [LLAVA["conversations"][0], {"from": "gpt", "value": " "}]},
            "line 1: expected answers of some text and no <image>, got ' '",
        ),
        (
            LLAVA | {"conversations": [{"from": ["human"], "value": "what"}] * 2},
            r"line 1, 'conversations'\[0\], 'from': expected human or user, got \['human'\]",
        ),
        (PLAIN | {"image": "a\0.png"}, r"line 1: expected an image inside .*images, got 'a\\x00\.png'"),
        (PLAIN | {"answer": "who \ud800"}, r"line 1: expected text of whole characters, got 'who \\ud800'"),
        (PLAIN | {"answer": "an <image>"}, r"line 1: expected answers of some text and no <image>, got 'an <image>'"),
        (b"\xff", r"data\.jsonl, line 1: expected UTF-8 text, got byte 0xff at 0"),
        ("{", "line 1: expected a JSON object, got text that is not JSON"),
        ("", "expected at least one conversation about an image, got none"),
    ],
)
def test_a_broken_file_is_told_with_its_place(row, message, images, tmp_path):
    path = tmp_path / "data.jsonl"
    content = row if isinstance(row, str | bytes) else json.dumps(row)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_conversations(path, images)


@pytest.mark.parametrize(
    ("name", "content"),
    [("problems.json", '{"1": {"question": "Which?"}}'), ("dev.tsv", "index\tquestion\n7\tWho?\n")],
)
def test_questions_with_options_are_the_labs(name, content, images, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name}: .* gistkit evaluate --images reads these with pip install \./lab"):
        load_conversations(tmp_path / name, images)


def test_what_is_missing_is_told(images, tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a file of conversations about images, found none"):
        load_conversations(tmp_path / "none.jsonl", images)
    (tmp_path / "data.jsonl").write_text(json.dumps(PLAIN))
    with pytest.raises(FileNotFoundError, match="images: expected the folder of the images"):
        load_conversations(tmp_path / "data.jsonl", tmp_path / "none")
    with pytest.raises(ValueError, match="processor: expected one with a chat template, got LlavaProcessor without"):
        ConversationQuestions([], VoCo(tiny_vision("llava"), memory_tokens=2, lora=2), processor("llava"))
    with pytest.raises(ValueError, match=r"processor: expected the model's own, with a tokenizer, got .*Tokenizer"):
        image_prompt(processor("llava").tokenizer, [images / "a.png"])


def test_images_are_opened_upright_in_rgb_or_told_by_their_file(images, tmp_path):
    picture = PIL.fromarray(np.arange(8, dtype=np.uint8).reshape(2, 4))
    turned = PIL.Exif()
    turned[0x0112] = 6
    picture.save(tmp_path / "turned.png", exif=turned)
    found = open_image(tmp_path / "turned.png")
    assert found.mode == "RGB" and np.array_equal(np.asarray(found)[..., 0], np.rot90(np.asarray(picture), -1))
    _, own = questions([])
    by_path, by_image = (
        image_prompt(own, [image], "what") for image in (images / "a.png", open_image(images / "a.png"))
    )
    assert torch.equal(by_path["pixel_values"], by_image["pixel_values"])
    whole = (images / "a.png").read_bytes()
    for broken in (b"", whole[:40], whole[: len(whole) // 2]):
        (tmp_path / "broken.png").write_bytes(broken)
        with pytest.raises(
            ValueError, match=r"broken\.png: expected an image, got a file that cannot be read as one: "
        ):
            open_image(tmp_path / "broken.png")
    with pytest.raises(FileNotFoundError, match="none"):
        open_image(tmp_path / "none.png")


@pytest.mark.parametrize("place", ["question", "answer"])
def test_names_of_special_tokens_are_no_part_of_a_conversation(images, place):
    turns = [["what is this", "who"], ["who", "this"]]
    turns[0][place == "answer"] += "<pad>"
    examples, own = questions([Conversation((images / "a.png",), tuple(map(tuple, turns)))])
    own.tokenizer.backend_tokenizer.model.unk_token = "what"
    with pytest.raises(ValueError, match=r"conversations: expected texts without special tokens .*, got '.*<pad>'"):
        examples[1]


def test_all_questions_about_held_out_images_are_held_out(images, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, [LLAVA, PLAIN, LLAVA, PLAIN | {"question": "who is"}])))
    examples, _ = questions(load_conversations(path, images))
    assert len(examples) == 6 and examples.held_out == [2, 5]
    batches = ImageQuestions(examples, 2, examples.digest, held_out=examples.held_out)
    asked = [row for batch in map(batches, range(4)) for row in batch["pixel_values"].flatten(1)]
    (held_out,) = batches.held_out(9)
    assert len(held_out["input_ids"]) == 2 and not any(
        torch.equal(row, held_out["pixel_values"][0].flatten()) for row in asked
    )
    other, _ = questions(load_conversations(path, images)[:3])
    assert other.digest != examples.digest
    with pytest.raises(
        ValueError, match="conversations: expected at least 2 that share no image, one to hold out, got 1"
    ):
        _ = questions([other.conversations[0]])[0].held_out
    for wrong in ([], [6], range(6)):
        with pytest.raises(ValueError, match="held_out: expected some of the indices 0 to 5, and not all, got"):
            ImageQuestions(examples, 2, "six", held_out=wrong)


def test_no_held_out_image_is_trained_on_where_conversations_share_some(images, tmp_path):
    for name in "cde":
        shutil.copy(images / "a.png", images / f"{name}.png")
    (images / "link.png").symlink_to(images / "c.png")
    # "link.png" is "c.png", and ties the last conversation to the second by way of the third.
    asked = ["a.png", ["d.png", "c.png"], ["link.png", "e.png"], "folder/b.png", "e.png"]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(PLAIN | {"image": name}) for name in asked))
    examples, _ = questions(load_conversations(path, images))
    assert examples.held_out == [3]
    path.write_text("\n".join(json.dumps(PLAIN | {"image": name}) for name in [*asked[:3], asked[4]]))
    assert questions(load_conversations(path, images))[0].held_out == [1, 2, 3]
    path.write_text("\n".join(json.dumps(PLAIN | {"image": name}) for name in asked[1:3]))
    with pytest.raises(ValueError, match=r"conversations: expected at least 2 that share no image, .* got 1"):
        _ = questions(load_conversations(path, images))[0].held_out


def test_other_images_of_the_same_names_are_other_data(images, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(images, other)
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(PLAIN))
    first, _ = questions(load_conversations(path, images))
    assert questions(load_conversations(path, other))[0].digest == first.digest
    PIL.new("RGB", (40, 40)).save(other / "a.png")
    assert questions(load_conversations(path, other))[0].digest != first.digest
