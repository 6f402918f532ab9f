"""The preset `seqpe-squad` of the study `retrieval`: its prompts, its figures, its runs and its command."""

import dataclasses
import json

import pytest
import torch
from study_runs import TINY, session
from torch.nn.functional import cross_entropy, interpolate

from gistkit import cli
from gistkit.common.checks import IGNORE
from gistkit.nn import Learned
from gistkit.train import load_corpus
from gistkit_lab.studies import length, positions, squad
from gistkit_lab.studies.pages import committed
from gistkit_lab.studies.positions import Student
from gistkit_lab.studies.registry import find, read

BASE = length.Recipe(
    **TINY, steps=2, batch=2, eval_every=2, length=64, longest=2, max_position=1100, digits=4, eval_tokens=128,
    test_tokens=128,
)  # fmt: skip
RECIPE = squad.Recipe(
    steps=4, batch=2, warmup=2, eval_every=2, learning_rate=1e-2, model=BASE, length=512, longest=2, new_tokens=3,
    eval_rows=3, test_rows=4,
)  # fmt: skip
# SeqPE, Figure 4, with one document.
FIGURE_4 = """\
Answer the question based on the given documents. Only give me the answer and do not output any other words.

The following are given documents.

Document 1:
%s

Answer the question based on the given documents. Only give me the answer and do not output any other words.

Question: %s Answer:"""


def paragraph(index):
    return f"River {index} is {index} miles long. It ends in lake {index}."


def article(first, count):
    paragraphs = [
        {
            "context": paragraph(index),
            "qas": [
                {"question": f"How long is {index}?", "answers": [{"text": f"{index} miles"}, {"text": str(index)}]},
                {"question": f"Where to, {index}?", "answers": [{"text": f"lake {index}"}]},
            ],
        }
        for index in range(first, first + count)
    ]
    return {"version": "1.1", "data": [{"title": "rivers", "paragraphs": paragraphs}]}


def write(folder):
    """Files of questions to train and to test on."""
    folder.mkdir(exist_ok=True)
    paths = folder / "train.json", folder / "dev.json"
    for path, (first, count) in zip(paths, ((0, 24), (50, 8)), strict=True):
        path.write_text(json.dumps(article(first, count)))
    return paths


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write(tmp_path_factory.mktemp("squad"))


@pytest.fixture(scope="module")
def questions(files):
    return squad.Questions.load(load_corpus(), *files)


def texts(rows):
    """(prompt, answer without its end) of each row."""
    for row in rows:
        assert row.answer[-1] == 0 and 0 not in row.answer[:-1]
        yield bytes(row.prompt).decode(), bytes(row.answer[:-1]).decode()


def documents(prompt):
    """The paragraphs of a prompt, read back, which are numbered from 1."""
    middle = prompt.split("The following are given documents.\n\n")[1].split("\n\nAnswer the question")[0]
    parts = middle.split("\n\n")
    assert [part.split("\n")[0] for part in parts] == [f"Document {i}:" for i in range(1, len(parts) + 1)]
    return [part.split("\n", 1)[1] for part in parts]


def test_the_prompt_is_that_of_figure_4(questions):
    data = squad.Prompts(questions, RECIPE, 0)
    alone = data._row(questions.test[0], [questions.test[0].context], 512)
    ((prompt, answer),) = texts([alone])
    assert prompt == FIGURE_4 % (paragraph(50), "How long is 50?") and answer == " 50 miles"


@pytest.mark.parametrize("size", [512, 1024])
def test_contexts_hold_the_right_paragraph_among_as_many_others_as_fit(questions, size):
    data = squad.Prompts(questions, RECIPE, 0)
    places, asked = set(), []
    for row, (prompt, answer) in zip(data.split("test", size, 16), texts(data.split("test", size, 16)), strict=True):
        found = documents(prompt)
        index = int(prompt.split("Question: ")[1].split("?")[0].split()[-1])
        asked.append(prompt.split("Question: ")[1])
        assert answer.strip() in (f"{index} miles", f"lake {index}") and answer.strip() in row.right
        assert paragraph(index) in found and len(set(found)) == len(found)
        assert set(found) <= {paragraph(i) for i in range(50, 58)}
        used = len(row.prompt) + len(row.answer) - 1
        # A document takes some 57 bytes.
        assert used <= size and (size - used < 90 or len(found) == 8)
        places.add(found.index(paragraph(index)))
    assert len(places) > 1 and len(asked) == len(set(asked)) == 16
    same = [prompt.split("Question: ")[1] for prompt, _ in texts(data.split("test", 512, 16))]
    assert asked == same


def test_training_questions_are_of_their_seed_and_step_and_no_paragraph_is_held_out_too(questions):
    one, again, other = (squad.Prompts(questions, RECIPE, seed) for seed in (0, 0, 1))
    assert all(map(torch.equal, one(2), again(2))) and not torch.equal(one(2)[0], one(3)[0])
    assert not torch.equal(one(2)[0], other(2)[0])
    held_out = {text for prompt, _ in texts(one.split("held_out", 512, 99)) for text in documents(prompt)}
    assert held_out == {paragraph(9), paragraph(19)}
    for step in range(5):
        inputs, labels = one(step)
        for ids, wanted in zip(inputs.tolist(), labels.tolist(), strict=True):
            marked = [at for at, label in enumerate(wanted) if label != IGNORE]
            assert marked == list(range(marked[0], marked[-1] + 1)) and wanted[marked[-1]] == 0
            whole = bytes([*ids[: marked[-1] + 1], 0]).decode()
            prompt, answer = whole[: marked[0] + 1], whole[marked[0] + 1 :]
            assert prompt.endswith("? Answer:") and bytes(wanted[marked[0] : marked[-1] + 1]).decode() == answer
            assert held_out.isdisjoint(documents(prompt)) and not any(ids[marked[-1] + 1 :])


@pytest.mark.parametrize("name", ["rope-1e4", "learned", "seqpe-bias"])
def test_figures_are_those_of_rows_one_by_one(questions, name, monkeypatch):
    student, data = Student(RECIPE.schedule, name, 256, 0), squad.Prompts(questions, RECIPE, 0)
    rows = data.split("test", 1024, 4)
    losses = []
    with torch.no_grad():
        for row in rows:
            logits = student.model.eval()(torch.tensor([row.prompt + row.answer[:-1]]))[0, len(row.prompt) - 1 :]
            losses += cross_entropy(logits, torch.tensor(row.answer), reduction="none").tolist()
    found = squad.measure(student, data, "test", 1024, 4)
    if name != "learned":
        # A table is stretched to the longest sequence that it is measured on.
        assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
        assert found["exact"] == 0.0
    answers = iter([rows[0].right[-1].upper(), f"{rows[1].right[0]}\0 and", f"In {rows[2].right[0]}.", "nothing"])

    def generate(ids, new_tokens):
        assert new_tokens == 3 and bytes(ids[0].tolist()).endswith(b"Answer:")
        return torch.cat([ids, torch.tensor([list(f" {next(answers)}".encode())])], 1)

    monkeypatch.setattr(student.model, "generate", generate)
    assert squad.answered(student, data, rows) == {"exact": 0.5, "contains": 0.75}


def tune(questions, out, name="seqpe-bias", *, resume=False, **changes):
    recipe = dataclasses.replace(RECIPE, **changes)
    return squad.train(session(recipe, name, out, questions, resume=resume))


@pytest.mark.slow
def test_a_run_is_measured_at_every_length_and_of_its_questions(questions, tmp_path):
    run = tune(questions, tmp_path, steps=1)
    assert list(run.held_out) == list(run.test) == ["512", "1024"]
    assert run.test["512"].keys() == {"loss", "exact", "contains"}
    with pytest.raises(ValueError, match=r"the saved run differs in data"):
        fewer = dataclasses.replace(questions, train=questions.train[2:])
        tune(fewer, tmp_path, resume=True, steps=1)


def test_the_model_of_the_lowest_held_out_loss_is_measured(questions, tmp_path):
    # A rate at which the loss rises at once.
    run = tune(questions, tmp_path, "alibi", learning_rate=3.0, warmup=0)
    losses = [loss for _, loss, _ in run.curve]
    assert min(losses) == losses[0] < losses[-1] - 0.5
    data = squad.Prompts(questions, RECIPE, 0)
    base, _ = length.fit(session(BASE, "alibi", tmp_path / "length", questions.corpus, resume=True))
    for split in ("held_out", "test"):
        assert getattr(run, split)["1024"] == squad.measure(base, data, split, 1024, 4)


def test_a_learned_table_is_stretched(questions):
    base, student = Student(BASE, "learned", 256, 0), Student(RECIPE.schedule, "learned", 256, 1)
    squad.start_from(student, base)
    tables = base.model.position.table.detach(), student.model.position.table.detach()
    assert isinstance(base.model.position, Learned) and [len(table) for table in tables] == [64, 512]
    expected = interpolate(tables[0].T[None], size=512, mode="linear", align_corners=True)[0].T
    torch.testing.assert_close(tables[1], expected)
    assert torch.equal(tables[1][-1], tables[0][-1])
    assert torch.equal(student.model.tokens.weight, base.model.tokens.weight)


class Words:
    """A tokenizer of words, which are numbered as they come."""

    eos_token_id = 0

    def __init__(self):
        self.words = ["<end>"]

    def __len__(self):
        return len(self.words)

    def __call__(self, text):
        for word in text.split():
            if word not in self.words:
                self.words.append(word)
        return [self.words.index(word) for word in text.split()]

    def decode(self, ids):
        return " ".join(self.words[index] for index in ids)


def test_a_tokenizer_has_its_own_end(questions):
    words = Words()
    corpus = dataclasses.replace(questions.corpus, tokenizer=words)
    data = squad.Prompts(dataclasses.replace(questions, corpus=corpus), RECIPE, 0)
    (row,) = data.split("test", 512, 1)
    assert data.text(row.answer) in row.right and row.answer[-1] == 0
    corpus = dataclasses.replace(questions.corpus, tokenizer=str.split)
    with pytest.raises(ValueError, match="tokenizer: expected one with an end-of-text token"):
        squad.Prompts(dataclasses.replace(questions, corpus=corpus), RECIPE, 0)


def test_what_does_not_fit_is_named(questions):
    short = dataclasses.replace(RECIPE, length=300, longest=2)
    with pytest.raises(ValueError, match=r"length: expected room for the prompt, .* in training, got 300 tokens"):
        squad.Prompts(questions, short, 0)(0)
    with pytest.raises(ValueError, match="of the split 'test', got 300"):
        squad.Prompts(questions, short, 0).split("test", 300, 1)
    few = dataclasses.replace(questions, train=questions.train[:4])
    with pytest.raises(ValueError, match=r"expected some about 10 paragraphs at least, .* got 2 paragraphs"):
        squad.Prompts(few, RECIPE, 0)


@pytest.mark.slow
def test_the_command_says_what_the_preset_follows(files, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(find("retrieval").presets, "seqpe-squad", dataclasses.replace(RECIPE, steps=1))
    monkeypatch.setattr(positions, "_tokenizer", lambda name: None)
    (tmp_path / "text.txt").write_text("Rivers are long and lakes are deep. " * 400)
    arguments = ["study", "retrieval", "--preset", "seqpe-squad", "--text", str(tmp_path / "text.txt")]
    arguments += ["--encodings", "nope", "--out", str(tmp_path / "out"), "--questions", str(files[0])]
    assert cli.main(arguments) == 2
    assert "--test-questions: expected a file of questions, got none" in capsys.readouterr().err
    arguments += ["--test-questions", str(files[1])]
    assert cli.main([*arguments, "--save", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "48 questions of train.json, fine-tuned on contexts of 512 bytes, and 16 of dev.json" in shown
    assert squad.NOTES["seqpe-squad"] in shown and "paper: RULER SQuAD" in shown
    path = tmp_path / "retrieval-seqpe-squad.jsonl"
    assert [one.recipe for one in read(path)] == [dataclasses.replace(RECIPE, steps=1)]
    page = find("retrieval").page(committed(tmp_path, "retrieval"))
    assert "| squad, exact " in page and "1 steps of 2 x 512 tokens at most, after 2 of the language model" in page


def test_the_preset_has_the_papers_numbers():
    recipe = squad.PRESETS["seqpe-squad"]
    assert (recipe.steps, recipe.warmup, recipe.learning_rate, recipe.new_tokens) == (10_000, 100, 5e-5, 16)
    assert recipe.lengths == (1024, 2048, 4096, 8192)
    schedule = recipe.schedule
    assert schedule.dropout == 0.1 and schedule.bfloat16 and schedule.decay == "linear" and schedule.length == 1024
