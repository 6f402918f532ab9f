"""What makes the trained compressors: pages, passages with facts, sittings that go on, cards."""

import json
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("inscriptis", reason="the models extra is not installed")
pytest.importorskip("sacrebleu", reason="the evaluate extra is not installed")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))

import adapter
import card
import long_questions
import make
import manual_questions
import measure
import reader
import refined
import selection
import text
import texts
from passages import Passages
from questions import ABSENT, KINDS, NAMES, draw_fact, draw_facts, plant
from safetensors.torch import load_file

from gistkit.common.signals import Interrupted
from gistkit.compress import AvgPool, Compressor
from gistkit.evaluate import Example
from gistkit.train import Corpus, Trainer
from gistkit_lab.presses import Comparison, Entry, Outcome
from tests.cli.test_cli import small_llama
from tests.helpers.in_place_oracle import unsettle
from tests.helpers.models import byte_tokenizer

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

MACHINE = {"processor": "some", "threads": 1, "instruction_set": "avx2", "commit": "0"}
SENTENCE = "The scheduler keeps every task in its queue until a worker asks for one. "


@pytest.fixture(scope="module")
def corpus():
    """Bytes as token ids."""
    words = "".join(SENTENCE.replace("task", f"task {number}") for number in range(200))
    ids = torch.tensor(byte_tokenizer()(words)["input_ids"], dtype=torch.int32)
    return Corpus("made up", ids[: len(ids) // 2], ids[len(ids) // 2 :], "0123", byte_tokenizer())


def test_refined_goes_on_with_results_of_the_same_settings_alone(tmp_path):
    settings = {"steps": 100, "documents": "ab", "machine": {"processor": "some"}}
    assert refined.continued(tmp_path / "none.jsonl", settings) is None
    path = Comparison(settings, ["dates"], [0], [8], []).save(tmp_path / "found.jsonl")
    assert refined.continued(path, settings | {"machine": {}}).lengths == [8]
    with pytest.raises(ValueError, match=r"--out: expected results with .*'steps': 50.*, got .*'steps': 100"):
        refined.continued(path, settings | {"steps": 50})


def test_a_page_is_its_own_text():
    paragraphs = "".join(f"<p>Paragraph {number} is about the queue of tasks and how a worker takes one.</p>" * 3
                         for number in range(9))  # fmt: skip
    body = f"<nav>Home, next, previous</nav><div class='body'><h1>Queues</h1>{paragraphs}<script>x = 1</script></div>"
    page = f"<html><head><title>t</title></head><body><p>Aside.</p>{body}<div class='footer'>2020</div></body></html>"
    found = text.page_text(page.encode())
    assert found.splitlines()[0].strip() == "Queues" and found.count("Paragraph") == 27
    for other in ("Home", "Aside", "x = 1", "2020"):
        assert other not in found
    # Too short, and hardly words.
    assert text.page_text(b"<html><body><p>Little.</p></body></html>") == ""
    assert text.page_text(f"<html><body>{'<p>0x12 == 44 --</p>' * 200}</body></html>".encode()) == ""
    assert text.page_text(b"") == ""


def test_a_package_that_is_missing_is_named():
    # Where there is no dpkg, that says so itself.
    with pytest.raises(FileNotFoundError, match=r"no-such-package: expected Debian's package|dpkg-query"):
        list(text.pages("no-such-package", ".*"))


def test_facts_have_their_answers_in_them():
    random = np.random.default_rng(0)
    facts = [draw_fact(random) for _ in range(300)]
    assert len({fact.question.split()[0] for fact in facts}) >= 4 and len(set(facts)) > 250
    for fact in facts:
        assert fact.answer in fact.sentence and fact.answer not in fact.question and fact.question.endswith("?")


def test_facts_of_several_kinds_are_about_other_things_and_held_out_ones_have_other_names():
    random, seen = np.random.default_rng(0), {}
    for held_out in (False, True):
        drawn = [draw_facts(8, random, held_out) for _ in range(60)]
        facts = [(kind, fact) for found in drawn for kind, each in found.items() for fact in each]
        assert {kind for kind, _ in facts} == set(KINDS)
        for kind, fact in facts:
            assert fact.question.endswith("?")
            if kind == ABSENT:
                assert (fact.sentence, fact.answer) == ("", "not in the text")
            elif kind == "yes or no":
                assert fact.answer == ("no" if {"no", "not"} & set(fact.sentence.split()) else "yes")
            else:
                assert fact.answer in fact.sentence and fact.answer not in fact.question
        seen[held_out] = {name for name in NAMES for _, fact in facts if name in fact.sentence.split()}
        questions = [{fact.question for each in found.values() for fact in each} for found in drawn]
        assert {*map(len, questions)} == {7 if held_out else 8}
    assert seen[False] and seen[True] and not seen[False] & seen[True]


def test_a_sentence_is_put_behind_a_sentence():
    random = np.random.default_rng(0)
    passage = [5, 6, 0, 7, 8, 0, 9]
    found = {tuple(plant(passage, [1, 2], {0}, random)) for _ in range(50)}
    assert found == {(5, 6, 0, 1, 2, 7, 8, 0, 9), (5, 6, 0, 7, 8, 0, 1, 2, 9)}
    # Without an end of a sentence at either end.
    assert {tuple(plant([5, 6], [1], {0}, random)) for _ in range(50)} == {(1, 5, 6), (5, 6, 1)}


def test_passages_are_a_context_with_a_fact_what_follows_and_a_question(corpus):
    batches = Passages(corpus, 100, 140, 30, 3, 7)
    decode = lambda row: corpus.tokenizer.decode([token for token in row if 0 <= token < 256])  # noqa: E731
    whole = decode(corpus.train.tolist())
    lengths = set()
    for step in range(12):
        batch = batches(step)
        lengths.add(batch["input_ids"].shape[1])
        for row in zip(*(tensor.tolist() for tensor in batch.values()), strict=True):
            context, after, question, answer = map(decode, row)
            # Taken out again, the fact leaves a passage of the text that goes on with the continuation.
            places = [
                (start, end)
                for start in range(len(context))
                for end in range(start + 15, min(start + 80, len(context)) + 1)
                if answer in context[start:end] and context[:start] + context[end:] + after in whole
            ]
            assert places, (context, after)
            asked = question.partition("### Question:\n")[2].partition("\n")[0]
            assert asked.endswith("?") and len(after) == 30
    assert lengths <= set(range(100, 141)) and len(lengths) > 5
    again = Passages(corpus, 100, 140, 30, 3, 7)(5)
    assert all(torch.equal(tensor, batches(5)[name]) for name, tensor in again.items())
    assert batches.identity != Passages(corpus, 100, 140, 30, 3, 8).identity
    held_out = batches.held_out(5)
    assert [len(batch["input_ids"]) for batch in held_out] == [3, 2]
    assert all(batch["input_ids"].shape[1] == 140 for batch in held_out)


def test_the_stages_of_a_sitting():
    first, second = make.Stage(10, {"ae": 1.0}, 8, 16), make.Stage(20, {"lm": 1.0}, 8, 16)
    assert make.parts((first, second), 0, 5) == [(first, 5)]
    assert make.parts((first, second), 5, 15) == [(first, 5), (second, 5)]
    # The last stage goes on.
    assert make.parts((first, second), 25, 100) == [(second, 75)]


@pytest.fixture
def place(corpus, tmp_path, monkeypatch):
    """A folder for models with one of the small model's in it, in two stages of 4 steps each."""
    stages = make.Stage(4, {"ae": 1.0}, 70, 90, 10), make.Stage(4, {"ae": 1.0, "lm": 0.5, "qa": 0.5}, 70, 90, 10)
    settings = {"chunk": 30, "ratio": 5, "layout": "epl"}
    model = make.Model("x500", settings, stages, rank=2, batch=2, warmup=1, precision="no")
    monkeypatch.setattr(make, "MODELS", {"tiny": model, "cut": model})
    monkeypatch.setattr(make, "FOLDER", tmp_path / "models")
    monkeypatch.setattr(make, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(make, "manuals", lambda: corpus)
    monkeypatch.setattr(make, "load_smollm2", lambda: (small_llama(), byte_tokenizer()))
    held_out = Passages.held_out_rows
    monkeypatch.setattr(Passages, "held_out_rows", lambda self, rows: held_out(self, min(rows, 4)))
    (tmp_path / "models" / "tiny").parent.mkdir()
    found = {"packages": {"some-doc": "1.0"}, "pages": {"some-doc": 2}, "bytes": {"some-doc": 10**6}}
    (tmp_path / "text.json").write_text(json.dumps(found))
    monkeypatch.setattr(card, "TEXT", tmp_path)
    return tmp_path


@pytest.fixture
def untrained(place):
    """The small model's compressor as it begins."""
    return make.new_compressor(make.MODELS["tiny"]).eval()


@pytest.fixture
def gets(monkeypatch):
    """`gets(number, count)`: the process gets a signal in the count-th step from now on."""
    step, left = Trainer.training_step, []

    def counted(self, *args, **options):
        if left:
            left[1] -= 1
            if not left[1]:
                signal.raise_signal(left[0])
        return step(self, *args, **options)

    monkeypatch.setattr(Trainer, "training_step", counted)
    return lambda number, count: left.__setitem__(slice(None), [number, count])


def weights(name):
    compressor = Compressor.from_pretrained(make.FOLDER / name, small_llama())
    return {name: parameter.detach().clone() for name, parameter in compressor.trainable()}


def test_sittings_go_on_and_cut_ones_end_as_whole_ones(place, gets, monkeypatch):
    first = make.sit("tiny", 3, 0)
    assert (first.first, first.last, first.until) == (0, 3, 3) and set(first.held_out) == {"loss", "ae"}
    gets(signal.SIGTERM, 2)
    with pytest.raises(Interrupted):
        make.sit("cut", 3, 0)
    assert [(line.first, line.last, line.until) for line in make.history(place / "models" / "cut")] == [(0, 2, 3)]
    # The length of the interrupted sitting counts.
    again = make.sit("cut", 99, 0)
    assert (again.first, again.last, again.until) == (0, 3, 3) and again.held_out == first.held_out
    before = weights("tiny")
    assert all(map(torch.equal, before.values(), weights("cut").values()))

    # Through the end of the first stage; the time of the other one is over before it begins.
    second = make.sit("tiny", 3, 0)
    assert (second.first, second.last) == (3, 6) and set(second.held_out) == {"loss", "ae", "lm", "qa"}
    assert second.tokens > 0 and second.seconds > 0
    paused = make.sit("cut", 3, 0, deadline=0)
    assert (paused.first, paused.last, paused.until) == (3, 5, 6) and set(paused.held_out) == {"loss", "ae"}
    again = make.sit("cut", 99, 0, deadline=1e12)
    assert (again.first, again.last, again.until) == (3, 6, 6) and again.held_out == second.held_out
    assert again.tokens > 0 and again.seconds > 0 and len(make.history(place / "models" / "cut")) == 2
    after = weights("tiny")
    assert all(map(torch.equal, after.values(), weights("cut").values()))

    assert before.keys() == after.keys() and any(not torch.equal(before[name], after[name]) for name in before)
    # In bfloat16, as saved.
    assert all(torch.equal(tensor, tensor.bfloat16().to(tensor.dtype)) for tensor in after.values())
    folder = place / "models" / "tiny"
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [(line["first"], line["last"]) for line in lines] == [(0, 3), (3, 6)]
    page = (folder / "README.md").read_text()
    assert "some-doc 1.0" in page and "| 0 to 3" in page and "| 3 to 6" in page
    # On another machine there are no checkpoints: a cut sitting goes on from its weights.
    make.write_history(folder, [replace(line, until=10) for line in make.history(folder)[:1]])
    (place / "runs").rename(place / "elsewhere")
    found = make.sit("tiny", 1, 0)
    assert (found.first, found.last, found.until) == (3, 4, 4) and len(make.history(folder)) == 2
    # What there was goes when all is written.
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.setattr(make, "write_card", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make.sit("tiny", 1, 0)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_sitting_of_a_compressor_in_place_with_more_contexts_a_step(place, monkeypatch):
    model = make.MODELS["tiny"]
    model = replace(model, method="avgpool", settings={"ratio": 2}, stages=model.stages[1:])
    monkeypatch.setattr(make, "MODELS", {"means": model})
    few = make.sit("means", 2, 0)
    assert few.batch == 2 and set(few.held_out) == {"loss", "ae", "lm", "qa"}
    assert make.sit("means", 2, 0, batch=6, deadline=0).last == 3
    # A sitting that goes on keeps its own.
    many = make.sit("means", 2, 0)
    assert (many.first, many.last, many.batch) == (2, 4, 6) and many.tokens > 2 * few.tokens
    page = (place / "models" / "means" / "README.md").read_text()
    assert "--compressor means" in page
    sittings = [line.split("|") for line in page.splitlines() if line.startswith(("| 0 to 2", "| 2 to 4"))]
    assert [cells[2].strip() for cells in sittings] == ["2", "6"]


@pytest.fixture
def ignored():
    """SIGINT is ignored, as where a shell starts a command in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ignored")
def test_the_command_pauses_without_a_complaint_and_says_where_the_weights_are(place, gets, monkeypatch, capsys):
    command, folder = ["make.py", "tiny", "--steps", "3", "--contexts", "0"], place / "models" / "tiny"
    monkeypatch.setattr(sys, "argv", [*command, "--minutes", "0"])
    assert make.main() == 0
    told = "Paused after step 1 of 3, as 0 minutes are over; the same command goes on. The weights are in"
    assert f"{told} {folder}" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", command)
    gets(signal.SIGTERM, 1)
    assert make.main() == 128 + signal.SIGTERM
    assert f"SIGTERM after step 2 of 3; {place / 'runs'}" in (told := capsys.readouterr().err)
    assert f"the weights are in {folder}" in told
    assert make.main() == 0 and [line.last for line in make.history(folder)] == [3]
    assert '"first": 0, "last": 3, "until": 3' in capsys.readouterr().out


def test_questions_of_the_files_are_short_and_none_is_there_twice():
    asked, learned = manual_questions.read(), manual_questions.read(reader.FILE)
    assert len(asked) == 150 and len(learned) > 300 and not {one.page for one in asked} & {one.page for one in learned}
    assert len({(one.page, one.question) for one in [*asked, *learned]}) == len(asked) + len(learned)
    for one in [*asked, *learned]:
        package = one.page.partition("/")[0]
        assert package in text.PACKAGES and one.at >= 0
        assert one.question.endswith("?") and one.answer not in one.question and len(one.answer) <= 40


def test_the_answer_nearest_to_its_place_counts():
    assert [manual_questions.nearest("1 of 11", "1", at) for at in (0, 4, 99)] == [0, 5, 6]
    assert manual_questions.nearest("1 of 11", "2", 0) is None


def written(folder, lines):
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def pages_of_text(folder, monkeypatch):
    """Twenty pages, every tenth of which is held out, and where it is."""
    (folder / "manuals" / "some-doc").mkdir(parents=True)
    for number in range(20):
        words = f"{SENTENCE * 4}The port of page {number} is {4000 + number}. {SENTENCE * 4}"
        (folder / "manuals" / "some-doc" / f"{number:04}-page-{number}.txt").write_text(words)
    monkeypatch.setattr(texts, "TEXT", folder)
    return texts.held_out_pages()


def test_questions_are_about_the_part_of_a_held_out_page_with_the_answer(tmp_path, monkeypatch):
    held_out = pages_of_text(tmp_path, monkeypatch)
    assert len(held_out) == 2
    number = int(held_out[0].stem.rpartition("-")[2])
    other = next(index for index in range(20) if all(path.stem != f"{index:04}-page-{index}" for path in held_out))
    lines = [
        {"page": f"some-doc/page-{number}", "question": "Which port?", "answer": str(4000 + number), "at": 0},
        # Trained on; not there; no such answer.
        {"page": f"some-doc/page-{other}", "question": "Which port?", "answer": str(4000 + other), "at": 0},
        {"page": "some-doc/none", "question": "Which port?", "answer": "1", "at": 0},
        {"page": f"some-doc/page-{number}", "question": "Which port?", "answer": "7777777", "at": 0},
    ]
    path, tokenizer = written(tmp_path, lines), byte_tokenizer()
    (found,) = manual_questions.examples(tokenizer, 60, path)
    assert found.answers == [str(4000 + number)] and len(found.context) == 60
    read = tokenizer.decode(found.context)
    assert read in held_out[0].read_text() and read.index(found.answers[0]) == 30
    assert "Which port?" in tokenizer.decode(found.question)
    # And those for training about one that is not held out, together.
    lines[0] = lines[1] | {"question": "What keeps every task?", "answer": "scheduler"}
    written(tmp_path, lines)
    (found,) = manual_questions.together(tokenizer, 500, path)
    assert [one.question for one in found.asked] == ["What keeps every task?", "Which port?"]
    assert len(found.context) == 500 and str(4000 + other) in tokenizer.decode(found.context)


def test_long_questions_are_about_the_first_tokens_of_held_out_pages_and_of_the_sky(tmp_path, monkeypatch):
    held_out = pages_of_text(tmp_path, monkeypatch)
    (tmp_path / "sky" / "stars").mkdir(parents=True)
    (tmp_path / "sky" / "stars" / "0000-maya.txt").write_text("The turtle is three stars. " * 9)
    number = int(held_out[0].stem.rpartition("-")[2])
    lines = [
        {"page": f"some-doc/page-{number}", "tokens": 900, "question": "Which port?", "answer": str(4000 + number)},
        # Beyond its tokens; another page.
        {"page": f"some-doc/page-{number}", "tokens": 9, "question": "Which port?", "answer": str(4000 + number)},
        {"page": "some-doc/none", "tokens": 900, "question": "Which port?", "answer": "1"},
        {"page": "stars/maya", "tokens": 50, "question": "What is of three stars?", "answer": "turtle"},
    ]
    monkeypatch.setattr(long_questions, "FILE", written(tmp_path, lines))
    monkeypatch.setattr(long_questions, "TEXT", tmp_path)
    found = long_questions.lines(byte_tokenizer())
    answers = {kind: [one["answers"] for one in asked] for kind, asked in found.items()}
    assert answers == {"manuals": [[str(4000 + number)]], "sky": [["turtle"]]}
    assert found["sky"][0]["context"] == ("The turtle is three stars. " * 9)[:50]


def test_long_questions_are_distinct_and_short():
    lines = [json.loads(line) for line in Path(long_questions.__file__).with_name("long_questions.jsonl").open()]
    known = {one.page for one in [*manual_questions.read(), *manual_questions.read(reader.FILE)]}
    assert len(lines) == len({(one["page"], one["question"]) for one in lines}) == 195
    assert {one["tokens"] for one in lines} == {1024, 2048, 4096} and not known & {one["page"] for one in lines}
    assert all(len(one["answer"]) <= 60 and one["answer"] not in one["question"] for one in lines)


@pytest.fixture
def with_adapter():
    """AvgPool with an adapter that changes what the model reads."""
    return unsettle(AvgPool(small_llama(), ratio=2, lora=2), 0.3).eval()


def test_questions_are_measured_beside_no_and_full_context_with_and_without_the_adapter(
    untrained, with_adapter, corpus
):
    ids = corpus.tokenizer
    example = Example(ids(SENTENCE)["input_ids"], question=ids("Who?")["input_ids"], answers=["a worker"])
    for compressor, reads in ((with_adapter, set(card.READ)), (untrained, {"none", "full", "kvzip", "memory"})):
        figures = measure.asked(compressor, [example] * 3, ids, progress=False)
        expected = {"count"} | {f"{read}{kind}" for read in reads for kind in ("", "_within", "_f1")}
        assert figures["count"] == 3 and set(figures) == expected
        assert all(0 <= figures[name] <= 100 for name in figures)
        page = card._figures({"questions": {**figures, "full": 61.0}})
        assert "3 questions written by hand" in page and "61" in page
        assert sum(line.startswith("| ") for line in page.splitlines()) == 1 + len(reads)
        assert ("full context, with the adapter" in page) == (compressor is with_adapter)


def test_what_is_measured(untrained, with_adapter, place, corpus, monkeypatch):
    monkeypatch.setattr(measure, "CONTEXT", 90)
    monkeypatch.setattr(measure, "FOLLOWING", 20)
    for compressor, own in ((untrained, ""), (with_adapter, "adapter_")):
        figures = measure.measure(compressor, corpus, 4, progress=False)
        names = {name for name in card.READ if own or not name.startswith("adapter")}
        assert set(figures) == {"bleu4", "accuracy", "way"} | names | {f"{name}_facts" for name in names}
        none, memory, full = (figures[name] for name in (f"{own}none", "memory", f"{own}full"))
        assert figures["way"] == pytest.approx((none - memory) / (none - full)) and min(none, memory, full) > 1
        assert 0 <= figures["bleu4"] <= 100 and 0 <= figures["accuracy"] <= 1
        assert own == "" or figures["adapter_full"] != figures["full"]
        sitting = make.Sitting(0, 2, 2, measured={"manuals": figures}, machine=MACHINE)
        card.write_card(place / "models", "tiny", make.Model("x500", {"chunk": 30}, ()), [sitting])
        page = (place / "models" / "README.md").read_text()
        assert f"{figures['memory']:.3g}" in page and ("both with the adapter" in page) == bool(own)
        assert "| KVzip" in page and f"{figures['way']:.2f} of the way" in page


def test_a_card_has_what_was_read_with_its_adapter_in_a_comparison(tmp_path, monkeypatch):
    monkeypatch.setattr(card, "RESULTS", tmp_path)
    assert card.beside("mine") == ""
    figures = [9.0], [9.0], [1.0], [1.0], [1.0], [1.0], [2]
    rows = [Outcome(Entry(reader, "full context", 1), *figures) for reader in ("mine", "other")]
    Comparison({"dtype": "bfloat16"}, ["doors"], [0], [8], rows).save(tmp_path / "presses-some.jsonl")
    page = card.beside("mine")
    assert "| with the adapter of mine" in page and "other" not in page
    assert "1 questions (doors) about 1 contexts" in page


@pytest.mark.parametrize(("last", "stage", "answers"), [(1, 1, False), (2, 1, False), (3, 2, True), (9, 2, True)])
def test_the_card_says_what_has_been_learned(place, last, stage, answers):
    stages = (make.Stage(2, {"ae": 1.0}, 8, 16), make.Stage(100, {"ae": 1.0, "qa": 0.5}, 8, 16))
    made, sitting = make.Model("x500", {"chunk": 30}, stages), make.Sitting(0, last, last, machine=MACHINE)
    card.write_card(place / "models", "staged", made, [sitting])
    page = (place / "models" / "README.md").read_text()
    assert f"The training is in stage {stage} of 2." in page
    assert ("has not learned to answer" not in page) is answers


@pytest.fixture
def means(place, monkeypatch):
    """`means(name, settings)`: a trained AvgPool, and a selection of this name around its adapter."""
    model = make.Model("avgpool", {"ratio": 2}, make.MODELS["tiny"].stages, rank=2, precision="no")
    load = lambda dtype=torch.float32: (small_llama().to(dtype), byte_tokenizer())  # noqa: E731
    for module in (make, selection, reader):
        monkeypatch.setattr(module, "MODELS", {"means": model})
        monkeypatch.setattr(module, "load_smollm2", load)
        monkeypatch.setattr(module, "FOLDER", make.FOLDER)
    trained = unsettle(make.new_compressor(model), 0.02)
    trained.trained_length = 77
    make.save(trained, make.FOLDER / "means")

    def around(name, settings):
        for module in (selection, reader):
            monkeypatch.setattr(module, "SELECTIONS", {name: selection.Selection("means", settings, parts=2)})

    return around


def test_a_selection_has_the_adapter_of_a_trained_one_byte_for_byte(means):
    means("chosen", {"ratio": 8, "by": "kvzip", "shares": "all"})
    folder = selection.build("chosen")
    selection.write_card("chosen")
    own, other = ((path / "gistkit_0_text").iterdir() for path in (folder, make.FOLDER / "means"))
    assert {path.name: path.read_bytes() for path in own} == {path.name: path.read_bytes() for path in other}
    made = Compressor.from_pretrained(folder, small_llama())
    assert (made.method, made.ratio, made.shares) == ("select", 8, "all")
    assert (made.trained_length, made.languages) == (77, ("en",))
    page = (folder / "README.md").read_text()
    assert "# chosen\n" in page and "1/8 of the context's own keys" in page and "--compressor chosen" in page
    assert "These weights have not been measured" in page and "51% exactly" not in page


@pytest.fixture
def eagle(monkeypatch):
    """Texts of a size for bytes as tokens, and the one with a question by hand."""
    for name, value in {"SHORTEST": 600, "LONGEST": 700}.items():
        monkeypatch.setattr(reader, name, value)
    monkeypatch.setattr(reader, "draw_facts", lambda count, random, held_out: draw_facts(2, random, held_out))
    question = manual_questions.Question("package/page", "What is it called?", "Eagle", 0)
    context = reader.ids_of(byte_tokenizer(), "an Eagle it is")
    monkeypatch.setattr(reader, "together", lambda *given: [manual_questions.Together(context, [question])])
    return context


@pytest.mark.usefixtures("eagle")
def test_a_reader_learns_from_what_a_selection_keeps_and_goes_on(place, means, corpus, monkeypatch):
    means("read", {"ratio": 8, "by": "kvzip", "shares": "all", "own_reader": True})
    for name, value in {"RUNS": place / "runs", "manuals": lambda: corpus, "HELD_OUT": 2}.items():
        monkeypatch.setattr(reader, name, value)
    tokenizer, texts = byte_tokenizer(), place / "runs" / "read" / "texts"
    for seed in range(5):
        context, asked = reader.facts_about(seed, tokenizer, corpus)
        assert 500 < len(context) < 800 and {one.kind for one in asked} > {reader.WORDS}
    with monkeypatch.context() as clock:
        clock.setattr(reader.time, "monotonic", iter(range(0, 600, 60)).__next__)
        reader.write_texts("read", torch.bfloat16, 5.5, 0, 1)
    assert sorted(path.name for path in texts.iterdir()) == [f"{seed:05}" for seed in range(5)]
    read = reader.loaded(texts / "00002")
    assert [memory.sizes[0] for memory in read.memories] == [5, 3, 2] and read.memories[0].key_bias is not None
    assert [(one.kind, tokenizer.decode(one.answer[:-1])) for one in read.asked] == [(reader.HAND, "Eagle")]

    # Of texts that are joined, what several are asked has no one answer.
    select, other = reader.new_reader("read", torch.bfloat16)[1].select, reader.loaded(texts / "00003")
    memory, asked = reader.joined(select, [read, other, read], 2)
    assert memory.context_lengths == (sum(one.memories[2].context_lengths[0] for one in (read, other, read)),)
    assert list(map(len, asked)) == [0, len(other.asked), 0]

    learn = lambda steps: reader.train("read", torch.bfloat16, steps, 1e-2, 2, 3, every=2)  # noqa: E731
    history = place / "runs" / "read" / "history.jsonl"
    steps_of = lambda: [json.loads(line)["step"] for line in history.read_text().splitlines()]  # noqa: E731
    learn(4)
    whole = torch.load(place / "runs" / "read" / "checkpoint.pt", weights_only=True)
    lines = [json.loads(line) for line in history.read_text().splitlines()]
    assert steps_of() == [0, 2, 4] and lines[0]["8x"] != lines[-1]["8x"]
    folder = reader.save("read")
    loaded = Compressor.from_pretrained(folder, small_llama())
    assert (loaded.reader, loaded.ratio) == ("reader", 8)
    source = make.FOLDER / "means" / "gistkit_0_text" / "adapter_model.safetensors"
    assert (folder / "gistkit_0_text" / "adapter_model.safetensors").read_bytes() == source.read_bytes()
    own = load_file(folder / "gistkit_0_reader" / "adapter_model.safetensors")
    assert own.keys() == whole["weights"].keys()
    assert all(torch.equal(tensor, whole["weights"][name].bfloat16()) for name, tensor in own.items())

    # A reader that models/ has is trained further.
    checkpoint = place / "runs" / "read" / "checkpoint.pt"
    checkpoint.unlink()
    history.write_text("")
    learn(7)
    assert steps_of() == [0, 2, 4, 4, 6, 7]
    found = [json.loads(line) for line in history.read_text().splitlines()]
    assert found[3]["8x"]["nats"] == pytest.approx(found[2]["8x"]["nats"], rel=0.05)
    # Losses are means of the steps since the line before, however few.
    assert found[5]["qa"] == pytest.approx(found[4]["qa"], rel=0.2)

    # It goes on from a checkpoint, as if it had never paused.
    shutil.rmtree(folder)
    checkpoint.unlink()
    held_out, calls = reader.held_out, []

    def cut(*given):
        calls.append(given)
        return held_out(*given) if len(calls) < 3 else pytest.fail("cut")

    monkeypatch.setattr(reader, "held_out", cut)
    with pytest.raises(pytest.fail.Exception, match="cut"):
        learn(4)
    monkeypatch.setattr(reader, "held_out", held_out)
    learn(4)
    again = torch.load(checkpoint, weights_only=True)
    assert all(torch.equal(tensor, whole["weights"][name]) for name, tensor in again["weights"].items())


def test_an_adapter_learns_to_answer_from_whole_contexts(corpus, eagle, monkeypatch, capsys):
    tokenizer = byte_tokenizer()
    monkeypatch.setattr(adapter, "manuals", lambda tokenizer: corpus)
    known = reader.by_hand(tokenizer, 512)
    assert [(ids, one.kind) for ids, (one,) in known] == [(eagle, reader.HAND)]
    model = small_llama()
    made = adapter.train(model, tokenizer, known, steps=20, size=2, most=3, rate=1e-2)
    nats = [json.loads(line)["nats"] for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert len(nats) == 2 and nats[1] < nats[0]
    assert (made.by.name, made.ratio, made.trained_length, made.reader) == ("kvzip", 4, 1024, "text")
    assert all(parameter.any() for name, parameter in made.named_parameters() if "lora_B" in name)


def test_the_selections_in_models_are_those_that_are_made(tmp_path):
    from gistkit.common.trained import DEFAULTS

    assert set(DEFAULTS.values()) <= set(selection.SELECTIONS)
    for name, one in selection.SELECTIONS.items():
        # A wheel has the adapter once.
        folder, source = selection.FOLDER / name, selection.FOLDER / one.adapter
        written = json.loads((folder / "compressor.json").read_text())
        assert one.settings.items() <= written["settings"].items() and written["languages"] == ["en"]
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            assert (folder / "gistkit_0_text" / file).read_bytes() == (source / "gistkit_0_text" / file).read_bytes()
        page = (folder / "README.md").read_text()
        assert card.beside(one.adapter) in page and selection.digest(folder) == selection.MEASURED
        # What is written by hand is kept.
        copy = shutil.copytree(folder, tmp_path / name)
        selection.write_card(name, copy)
        assert (copy / "README.md").read_text() == page
