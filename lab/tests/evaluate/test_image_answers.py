"""Questions about images: a report's figures against one question at a time, and VQA's accuracy by hand."""

import json

import pytest
import torch
from torch.nn import functional as F

from gistkit import cli
from gistkit.compress import VoCo
from gistkit.train import Conversation, ConversationQuestions, load_conversations
from gistkit_lab.evaluate.image_measures import choice_match, vqa_accuracy
from gistkit_lab.evaluate.images import evaluate_images
from tests.cli.test_images import llava, load, photos  # noqa: F401

pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("prediction", "answers", "score"),
    [
        # Ten people: with three who said so each of the other seven counts 1, and those three have two others each.
        ("yes", ["yes"] * 3 + ["no"] * 7, (7 * 1 + 3 * 2 / 3) / 10),
        ("yes", ["yes"] + ["no"] * 9, (9 / 3) / 10),
        ("yes", ["yes"] * 4 + ["no"] * 6, 1.0),
        ("maybe", ["yes"] * 10, 0.0),
        ("Two dogs.", ["2 dogs"] * 10, 1.0),
        ("the  red-car", ["a red car"] * 10, 1.0),
        ("dont know", ["don't know"] * 10, 1.0),
        ("1,000", ["1000"] * 10, 1.0),
        ("2.5", ["2.5 "] * 10, 1.0),
        ("none", ["0"] * 10, 1.0),
        ("b", ["b"], 1.0),
    ],
)
def test_accuracy_as_vqa_counts_it(prediction, answers, score):
    assert vqa_accuracy(prediction, answers) == pytest.approx(score, abs=1e-12)


@pytest.mark.parametrize(
    ("prediction", "letter"),
    [
        ("A", "A"), ("b", "B"), ("(C)", "C"), ("C. the dog", "C"), ("D: one", "D"), ("B, I think", "B"),
        ("The answer is A.", "A"), ("the correct answer is: (B)", "B"), (" A \n", "A"),
        ("", ""), ("the", ""), ("a cat", ""), ("An apple", ""), ("cat", ""), ("Absolutely", ""), ("1.", ""),
    ],
)  # fmt: skip
def test_an_option_is_named_by_its_letter(prediction, letter):
    for other in "ABCD":
        assert choice_match(prediction, other) == (other == letter)
    assert choice_match(prediction, ["X.", "A", "B"]) == (letter in "AB" and letter != "")


@pytest.fixture
def data(photos, tmp_path):  # noqa: F811
    """Photos, and two sets of questions: of one answer each, and of several people's."""
    questions = ("what is this", "who is this", "who")
    letters = [{"image": f"{n}.png", "question": questions[n], "answer": "this"} for n in range(3)]
    people = [{"image": f"{n}.png", "question": questions[n], "answers": ["who", "is", "is"]} for n in range(3)]
    for name, rows in (("sqa", letters), ("vqav2", people)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_figures_are_those_of_one_question_at_a_time(llava, data):  # noqa: F811
    model, own = load(llava)
    compressor = VoCo(model, memory_tokens=2, lora=None).eval()
    found = ConversationQuestions(load_conversations(data / "vqav2.jsonl", data / "photos"), compressor, own)
    (row,) = evaluate_images(compressor, own.tokenizer, found, batch_size=2, max_new_tokens=4, progress=False).rows
    nats = tokens = 0
    scores = []
    with torch.no_grad():
        for question in found:
            memory = compressor.encode(question.context)
            answer = [own.tokenizer.convert_tokens_to_ids("who")]
            ids = torch.tensor([[*question.question, *answer]])
            states = compressor.decode(memory, "qa", ids[:, :-1])
            logits = compressor.logits(states)[0, -len(answer) :]
            nats += F.cross_entropy(logits, torch.tensor(answer), reduction="sum").item()
            tokens += len(answer)
            made = compressor.generate(memory, [list(question.question)], task="qa", max_new_tokens=4, stop_tokens=[2])
            text = own.tokenizer.decode(made[0].tolist(), skip_special_tokens=True).strip()
            scores.append(vqa_accuracy(text.splitlines()[0] if text else "", ["who", "is", "is"]))
    assert row.metrics["qa_loss"] == pytest.approx(nats / tokens, rel=1e-4)
    assert row.metrics["qa_vqa"] == pytest.approx(100 * sum(scores) / len(scores))
    assert row.method == "VoCo EPL 2" and row.counts["qa_examples"] == 3


def test_choices_are_right_in_every_order(llava, data, monkeypatch):  # noqa: F811
    model, own = load(llava)
    compressor = VoCo(model, memory_tokens=2, lora=None).eval()
    # Three questions: one asked in two orders, of which one answer is wrong.
    found = [
        Conversation((data / "photos" / f"{image}.png",), (("which", letter),), group=group)
        for image, letter, group in ((0, "A", "7"), (0, "B", "7"), (1, "A", "8"), (2, "A", ""))
    ]
    answers = iter(("A", "A. the cat", "The answer is A", ""))
    monkeypatch.setattr("gistkit.evaluate.runner.words_of", lambda ids, tokenizer: next(answers))
    questions = ConversationQuestions(found, compressor, own)
    (row,) = evaluate_images(compressor, own.tokenizer, questions, batch_size=1, progress=False).rows
    assert row.metrics["qa_choice"] == pytest.approx(100 / 3) and row.counts["qa_choices"] == 3
    # An empty answer is not right, as SQuAD's exact match says.
    assert [each.exact_match for each in row.examples] == [1, 0, 0, 1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:memory_tokens")
def test_on_the_command_line(llava, data, capsys):  # noqa: F811
    words = ["evaluate", "--model", str(llava), "--device", "cpu", "--images", str(data / "photos")]
    words += ["--option", "memory_tokens=2", "--out", str(data / "report.json"), "--max-new-tokens", "3"]
    files = [str(data / "sqa.jsonl"), str(data / "vqav2.jsonl")]
    assert cli.main([*words, "--questions", *files]) == 0
    report = json.loads((data / "report.json").read_text())
    one, other = (each["rows"][0]["metrics"] for each in report["sets"])
    assert [each["name"] for each in report["sets"]] == ["sqa", "vqav2"]
    assert "qa_vqa" not in one and "qa_vqa" in other and one["qa_exact_match"] >= 0 and "qa_choice" not in one
    capsys.readouterr()
    for more, complaint in (
        ((), "--questions: expected files of questions about the images, got none"),
        (("--questions", files[0], files[0]), "--questions: expected files of different names, got sqa twice"),
        (("--questions", files[0], "--tasks", "qa"), "--tasks: not allowed with --images"),
        (("--questions", files[0], "--tau", "16"), "--questions: not allowed with --tau"),
        (("--tau", "16"), "--images: not allowed with --tau"),
    ):
        assert cli.main([*words, *more]) == 2
        assert complaint in capsys.readouterr().err


def test_answers_that_are_no_list_of_texts(data):
    path = data / "wrong.jsonl"
    for answers in ([], ["a", 3]):
        path.write_text(json.dumps({"image": "0.png", "question": "who", "answers": answers}))
        with pytest.raises(ValueError, match="'answers': expected a list of at least one text"):
            load_conversations(path, data / "photos")
    with pytest.raises(ValueError, match="answers: expected at least one, got none"):
        vqa_accuracy("yes", [])
