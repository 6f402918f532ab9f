"""Questions with options as ScienceQA and MMBench are published, in files written by hand."""

import base64
import json

import pytest

from gistkit.train.conversations import Conversation
from gistkit_lab.evaluate.choices import ASKED, choices, first, image_conversations

PROBLEMS = {
    "1": {"question": "Which?", "choices": ["cat", "dog"], "answer": 1, "hint": "", "image": "image.png",
          "split": "test", "lecture": "Long."},
    "2": {"question": "Who?", "choices": ["I", "we"], "answer": 0, "hint": "", "image": None, "split": "test"},
    "3": {"question": "Why?", "choices": ["so", "no"], "answer": 0, "hint": "", "image": "image.png",
          "split": "train"},
    "4": {"question": "Where?", "choices": ["in", "on", "at"], "answer": 2, "hint": "Look.", "image": "choice.png",
          "split": "test"},
}  # fmt: skip
HEAD = ("index", "question", "hint", "A", "B", "C", "D", "answer", "category", "image")


def encoded(content):
    return base64.b64encode(content).decode()


def write(path, rows):
    path.write_text("\n".join("\t".join(row) for row in (HEAD, *rows)) + "\n")
    return path


def test_scienceqas_test_questions_with_an_image(tmp_path):
    (tmp_path / "problems.json").write_text(json.dumps(PROBLEMS, indent=2))
    found = list(choices(tmp_path / "problems.json"))
    assert [(each.image, each.answer, each.group) for each in found] == [
        ("test/1/image.png", "B", "1"), ("test/4/choice.png", "C", "4")
    ]  # fmt: skip
    assert found[0].question == f"Which?\nA. cat\nB. dog\n{ASKED}"
    assert found[1].question == f"Look.\nWhere?\nA. in\nB. on\nC. at\n{ASKED}"
    # As conversations, whose images are looked for.
    with pytest.raises(FileNotFoundError, match=r"'1': expected the image .*test/1/image.png, found none"):
        image_conversations(tmp_path / "problems.json", tmp_path, tmp_path)
    for name in ("1/image.png", "4/choice.png"):
        (tmp_path / "test" / name).parent.mkdir(parents=True)
        (tmp_path / "test" / name).touch()
    one, other = image_conversations(tmp_path / "problems.json", tmp_path, tmp_path)
    assert one.images == (tmp_path / "test/1/image.png",) and one.turns == ((found[0].question, "B"),)
    assert other.group == "4"


def test_mmbenchs_questions_are_asked_in_every_order(tmp_path):
    rows = [
        ("7", "Which?", "", "cat", "dog", "cow", "", "B", "animals", encoded(b"seven")),
        ("9", "Who?", "Look.", "I", "we", "", "", "A", "people", encoded(b"nine")),
    ]
    found = list(choices(write(tmp_path / "dev.tsv", rows)))
    assert [(each.group, each.answer, each.image) for each in found] == [
        ("7", "B", b"seven"), ("7", "A", b"seven"), ("7", "C", b"seven"), ("9", "A", b"nine"), ("9", "B", b"nine")
    ]  # fmt: skip
    # As conversations, whose images are files then, each once.
    (tmp_path / "out").mkdir()
    made = image_conversations(tmp_path / "dev.tsv", tmp_path, tmp_path / "out")
    assert [each.images[0].read_bytes() for each in made] == [each.image for each in found]
    assert len(list((tmp_path / "out").iterdir())) == 2 and made[0].turns == ((found[0].question, "B"),)
    # Some questions, each in all of its orders; of a conversation some turns.
    assert [first(made, count) for count in (1, 2, 3)] == [made[:3], made, made]
    talk = Conversation(made[0].images, (("Who?", "I"), ("Where?", "here")), others=("there",))
    cut = Conversation(talk.images, talk.turns[:1])
    assert [first([talk, talk], count) for count in (1, 3)] == [[cut], [talk, cut]]
    # The letter is always that of the same option.
    for each, option in zip(found, ["dog"] * 3 + ["I"] * 2, strict=True):
        assert f"\n{each.answer}. {option}\n" in each.question
    orders = [[line[3:] for line in each.question.splitlines()[1:-1]] for each in found[:3]]
    assert orders == [["cat", "dog", "cow"], ["dog", "cow", "cat"], ["cow", "cat", "dog"]]
    assert found[3].question.startswith("Look.\nWho?\nA. I\nB. we\n")
    # A circular file has the orders itself, and names images of other rows.
    rows.insert(1, ("1000007", "Which?", "", "dog", "cow", "cat", "", "A", "animals", "7"))
    again = list(choices(write(tmp_path / "circular.tsv", rows)))
    assert [(each.group, each.answer, each.image) for each in again] == [
        ("7", "B", b"seven"), ("7", "A", b"seven"), ("9", "A", b"nine")
    ]  # fmt: skip
    assert again[1].question == found[1].question


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": 2}, r"problems.json, '1', 'answer': expected an index of 2 choices, got 2"),
        ({"choices": "ab"}, r"'1', 'choices': expected a list of texts, got 'ab'"),
        ({"question": ""}, r"'1', 'question': expected a text, got ''"),
        ({"choices": ["a"], "answer": 0}, r"'1': expected 2 to 8 options, got 1"),
    ],
)
def test_problems_that_are_none(tmp_path, change, message):
    (tmp_path / "problems.json").write_text(json.dumps({"1": PROBLEMS["1"] | change}))
    with pytest.raises(ValueError, match=message):
        list(choices(tmp_path / "problems.json"))


@pytest.mark.parametrize(
    ("column", "cell", "message"),
    [
        ("answer", "D", r"dev.tsv, line 2, 'answer': expected the letter of an option, got 'D'"),
        ("answer", "", r"line 2, 'answer': expected a text, got ''"),
        ("index", "x", r"line 2, 'index': expected a whole number, got 'x'"),
        ("image", "?", r"line 2, 'image': expected an image in base64, got '\?'"),
        ("image", "", r"line 2, 'image': expected a text, got ''"),
    ],
)
def test_rows_that_are_none(tmp_path, column, cell, message):
    row = dict(zip(HEAD, ("7", "Which?", "", "cat", "dog", "", "", "B", "animals", encoded(b"seven")), strict=True))
    with pytest.raises(ValueError, match=message):
        list(choices(write(tmp_path / "dev.tsv", [tuple((row | {column: cell}).values())])))


def test_answers_are_letters_of_options_that_are_there(tmp_path):
    row = ("7", "Which?", "", "cat", "", "cow", "", "C", "animals", encoded(b"seven"))
    first = next(iter(choices(write(tmp_path / "dev.tsv", [row]))))
    assert first.question.splitlines()[1:3] == ["A. cat", "B. cow"] and first.answer == "B"
    for answer in ("AB", "B", "a"):
        with pytest.raises(ValueError, match="'answer': expected the letter of an option, got"):
            list(choices(write(tmp_path / "dev.tsv", [(*row[:7], answer, *row[8:])])))
