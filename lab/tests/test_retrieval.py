"""The study `retrieval`: its sequences and documents, its figures, its report and command."""

import dataclasses
import re

import pytest
import torch
from study_runs import TINY, session
from torch.nn.functional import cross_entropy

from gistkit import cli
from gistkit_lab.studies import documents, filler, length, shown
from gistkit_lab.studies.filler import Facts
from gistkit_lab.studies.pages import committed
from gistkit_lab.studies.positions import IGNORE, Student
from gistkit_lab.studies.registry import find, read
from gistkit_lab.studies.retrieval import STUDY

RECIPE = filler.Recipe(
    **TINY, steps=4, batch=3, eval_every=2, length=30, longest=2, digits=2, max_position=90, keys=6, values=7, filler=3,
    facts=5, questions=3, eval_rows=6, test_rows=5,
)  # fmt: skip


def sequences(inputs, labels):
    """Each row's places of facts, {key: value} and questions [(key, value)], read token by token."""
    for ids, wanted in zip(inputs.tolist(), labels.tolist(), strict=True):
        whole = [*ids, wanted[-1]]
        context, questions = whole[:-6], whole[-6:]
        places = [at for at, token in enumerate(context) if token >= 16]
        # Tokens: 7 values, 6 keys, 3 fillers, 6 x 7 facts.
        facts = {(context[at] - 16) // 7: (context[at] - 16) % 7 for at in places}
        assert len(facts) == len(places) and all(token >= 13 for token in context)
        # The labels are the answers, each behind its question.
        assert wanted == [IGNORE] * len(context) + [questions[at] if at % 2 else IGNORE for at in range(1, 6)]
        yield places, facts, [(question - 7, answer) for question, answer in zip(*[iter(questions)] * 2, strict=True)]


@pytest.mark.parametrize("size", [30, 60])
def test_each_question_asks_for_another_value_of_its_context(size):
    assert RECIPE.context(size) == size - 5 and RECIPE.vocabulary == 58
    inputs, labels = Facts(RECIPE, 0).split("held_out", size, 200)
    assert inputs.shape == labels.shape == (200, size)
    seen, about, fillers = set(), set(), set()
    for row, (places, facts, asked) in zip(inputs.tolist(), sequences(inputs, labels), strict=True):
        assert len(facts) == 5 and len(dict(asked)) == len(asked) == 3
        assert all(facts[key] == value for key, value in asked)
        seen |= set(places)
        about |= set(facts.items())
        fillers |= {token for token in row[: size - 5] if token < 16}
    assert seen == set(range(size - 5)) and len(about) == 42 and fillers == {13, 14, 15}


def test_sequences_are_of_their_seed_and_step_and_splits_of_neither():
    one, again, other = (Facts(RECIPE, seed) for seed in (0, 0, 1))
    same = lambda a, b: all(map(torch.equal, a, b))  # noqa: E731
    assert same(one(2), again(2)) and not same(one(2), one(3)) and not same(one(2), other(2))
    assert one(0)[0].shape == (3, 30)
    assert same(one.split("test", 30, 4), other.split("test", 30, 4))
    assert not same(one.split("test", 30, 4), one.split("held_out", 30, 4))


@pytest.mark.parametrize("name", ["alibi", "seqpe-bias"])
@pytest.mark.parametrize("size", [30, 60])
def test_figures_are_those_of_greedy_answers(name, size):
    student = Student(RECIPE, name, RECIPE.vocabulary, 0)
    data = Facts(RECIPE, 0)
    inputs, labels = data.split("held_out", size, 5)
    # The model's own answers in the first three rows, but for the last one of one row.
    whole = torch.cat([inputs, labels[:, -1:]], 1)
    starts = [at for at in range(size) if labels[0, at] != IGNORE]
    for at in starts:
        whole[:3, at + 1] = student.model.generate(whole[:3, : at + 1], 1)[:, -1]
    whole[2, -1] = whole[2, -1] % 7 + 1
    labels = torch.where(labels != IGNORE, whole[:, 1:], IGNORE)
    data.split = lambda split, length, rows: (whole[:, :-1], labels)
    found = filler.measure(student, data, "held_out", size, 5)
    with torch.no_grad():
        logits = torch.cat([student.model(row[None]) for row in whole[:, :-1]])
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    assert found["loss"] == pytest.approx(float(loss), rel=1e-5)
    right = 0
    for row in range(5):
        for at in starts:
            right += int(student.model.generate(whole[row : row + 1, : at + 1], 1)[0, -1] == whole[row, at + 1])
    assert found["exact"] == right / 15 and 8 / 15 <= found["exact"] < 1


def train(out, name="seqpe-bias", **changes):
    return STUDY.train(session(dataclasses.replace(RECIPE, **changes), name, out))


@pytest.mark.slow
def test_answers_come_from_the_context_soon(tmp_path):
    run = train(
        tmp_path, "rope-1e4", steps=150, batch=32, eval_every=150, learning_rate=5e-3, length=14, longest=1, keys=4,
        facts=4, questions=2, values=3, dim=32, weight_std=0.15, test_rows=64,
    )  # fmt: skip
    # By chance one answer in three is right, at a loss of log 3.
    assert run.test["14"]["exact"] > 0.7 and run.test["14"]["loss"] < 0.7


def test_the_smallest_length_is_all_facts_and_questions():
    recipe = dataclasses.replace(RECIPE, length=10, longest=1)
    (found,) = [len(places) for places, *_ in sequences(*Facts(recipe, 0).split("test", 10, 1))]
    assert found == recipe.context(10) == 5


BASE = length.Recipe(
    **TINY, steps=3, batch=3, eval_every=3, length=48, longest=2, max_position=99, digits=2, eval_tokens=96,
    test_tokens=96,
)  # fmt: skip
DOCUMENTS = documents.Recipe(
    steps=4, batch=5, warmup=2, eval_every=2, model=BASE, shortest=16, longest=2, letters=5, facts=4, questions=3,
    eval_rows=6, test_rows=5,
)  # fmt: skip


def check_document(inputs, labels, text, facts):
    """Reads a row byte by byte: text with `facts` facts, and questions about them."""
    whole = bytes([*inputs.tolist(), int(labels[-1])])
    document, _, questions = whole.rpartition(b"\n")
    asked = re.findall(rb"([A-E])(\d)", questions)
    assert b"".join(map(b"".join, asked)) == questions and len(dict(asked)) == len(asked) == min(facts, 3)
    # The labels are the answers, each behind its question.
    wanted = [IGNORE] * (len(document) + 1) + [byte if at % 2 else IGNORE for at, byte in enumerate(questions)]
    assert [IGNORE, *labels.tolist()] == wanted
    found = [byte - 128 for byte in document if byte >= 128]
    about = {b"%c" % (65 + fact // 10): b"%d" % (fact % 10) for fact in found}
    assert len(found) == len(about) == facts and all(about[letter] == digit for letter, digit in asked)
    # Without its facts it is a passage of the text, but for bytes that facts are written with.
    assert re.sub(rb"[\x80-\xff] ", b"", document) in re.sub(rb"[\x80-\xff]", b"?", text)


@pytest.mark.parametrize("size", [48, 96])
def test_documents_are_held_out_text_with_facts_that_are_asked_for(corpus, size):
    data, text = documents.Documents(corpus, DOCUMENTS, 0), bytes(corpus.splits()["held_out"].tolist())
    inputs, labels = data.split("held_out", size, 40)
    assert inputs.shape == labels.shape == (40, size)
    for row, wanted in zip(inputs, labels, strict=True):
        check_document(row, wanted, text, 4)
    assert not torch.equal(data.split("test", size, 40)[0], inputs)
    assert torch.equal(documents.Documents(corpus, DOCUMENTS, 1).split("held_out", size, 40)[0], inputs)


def test_documents_of_training_grow_with_the_steps_and_have_fewer_facts(corpus):
    recipe = dataclasses.replace(DOCUMENTS, steps=200)
    one, again, other = (documents.Documents(corpus, recipe, seed) for seed in (0, 0, 1))
    text = bytes(corpus.train.tolist())
    sizes = {step: one(step)[0].shape[1] for step in range(200)}
    assert sizes[0] == 16 and max(sizes[step] for step in range(50)) <= 32
    assert {min(sizes[step] for step in range(100, 200)), max(sizes.values())} <= {16, 17, 18, 47, 48}
    counts = set()
    for step in range(80, 120):
        inputs, labels = one(step)
        assert len(inputs) == 5 and all(map(torch.equal, again(step), (inputs, labels)))
        counts.add(int((labels[0] != IGNORE).sum()))
    assert counts == {1, 2, 3} and not torch.equal(other(0)[0], one(0)[0])
    inputs, labels = one(0)
    for row, wanted in zip(inputs, labels, strict=True):
        check_document(row, wanted, text, int((labels[0] != IGNORE).sum()))


def tune(corpus, out, name="seqpe-bias", *, resume=False, **changes):
    recipe = dataclasses.replace(DOCUMENTS, **changes)
    return STUDY.train(session(recipe, name, out, corpus, resume=resume))


def test_a_run_on_documents_of_other_facts_is_refused(corpus, tmp_path):
    run = tune(corpus, tmp_path, steps=2)
    assert list(run.held_out) == list(run.test) == ["48", "96"]
    with pytest.raises(ValueError, match=r"the saved run differs in data"):
        tune(corpus, tmp_path, resume=True, steps=2, facts=3)


def test_the_models_that_are_fine_tuned_are_those_of_the_study_length(corpus, tmp_path):
    length.train(session(BASE, "alibi", tmp_path / "length", corpus))
    *_, last = sorted((tmp_path / "length" / "alibi-0").rglob("trainable.safetensors"))
    before = last.read_bytes()
    run = tune(corpus, tmp_path, "alibi")
    assert last.read_bytes() == before
    base, _ = length.fit(session(BASE, "alibi", tmp_path / "length", corpus, resume=True))
    data = documents.Documents(corpus, DOCUMENTS, 0)
    found = filler.measure(base, data, "held_out", 48, 6)
    assert run.curve[0] == (0, found["loss"], found["exact"])
    untrained = Student(BASE, "alibi", 256, 0)
    assert filler.measure(untrained, data, "held_out", 48, 6)["loss"] != pytest.approx(found["loss"], rel=1e-5)
    # Where there is none it is trained first, to the same result.
    alone = tune(corpus, tmp_path / "alone", "alibi")
    assert (alone.curve, alone.test) == (run.curve, run.test)


@pytest.mark.slow
def test_documents_are_another_table_of_the_same_file(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(find("retrieval").presets, "short", dataclasses.replace(RECIPE, steps=1))
    monkeypatch.setitem(find("retrieval").presets, "documents", dataclasses.replace(DOCUMENTS, steps=1))
    for preset in ("short", "documents"):
        arguments = ["study", "retrieval", "--preset", preset, "--encodings", "nope", "--save", str(tmp_path)]
        assert cli.main([*arguments, "--out", str(tmp_path / preset)]) == 0
    assert "Documents with 4 facts, a byte each: fine-tuned on 48 bytes, tested at up to 96" in (
        capsys.readouterr().out
    )
    path = tmp_path / "retrieval-short.jsonl"
    assert [one.recipe for one in read(path)] == [dataclasses.replace(one, steps=1) for one in (RECIPE, DOCUMENTS)]
    assert set(shown.draw(path)) == {"retrieval", "documents-retrieval"}
    page = find("retrieval").page(committed(tmp_path, "retrieval"))
    assert (
        page.count("paper: RULER SQuAD") == 1 and "| documents, exact " in page and "| documents, perplexity " in page
    )
    assert "1 steps of 5 x 48 bytes at most, after 3 of the language model" in page
    (tmp_path / "a.txt").write_text("text")
    for preset, option in (("quick", "text"), ("quick", "dataset"), ("documents", "tokenizer"), ("short", "questions")):
        words = ["--preset", preset, f"--{option}", str(tmp_path / "a.txt"), "--out", str(tmp_path / "other")]
        assert cli.main(["study", "retrieval", *words]) == 2
        assert f"--{option}: expected none with --preset {preset}, got" in capsys.readouterr().err
    words = ["--preset", "documents", "--dataset", "some/rows", "--text", str(tmp_path / "a.txt")]
    assert cli.main(["study", "retrieval", *words]) == 2
    assert "dataset: not allowed with a text, got 'some/rows'" in capsys.readouterr().err
