"""The benchmark of asking about a long document: who answers, what is measured, and the table and picture of it."""

import sys
from types import SimpleNamespace

import asking
import picture
import pytest
import suites
import torch

from gistkit.compress import AvgPool
from tests.helpers.models import tiny_llama

BOS, END = 1, 3


def model():
    torch.manual_seed(0)
    return tiny_llama(bos_token_id=BOS, num_hidden_layers=3).float().eval()


def test_the_full_context_answers_as_generate_does_however_often_it_is_asked():
    plain = model()
    ids, questions = torch.randint(4, 50, (90,)).tolist(), [[5, 6, 7], [8, 9]]
    reader = asking.read_all(plain, ids, {END})
    for question in (*questions, questions[0]):
        prompt = torch.tensor([ids + question])
        wanted = plain.generate(prompt, max_new_tokens=asking.ANSWER, do_sample=False, eos_token_id=END)
        assert reader.ask(question) == wanted[0, prompt.shape[1] :].tolist()
    config = plain.config
    assert reader.nbytes == 90 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4


def test_a_memory_answers_as_generate_does_however_often_it_is_asked():
    compressor = AvgPool(model(), ratio=2, losses=("qa",)).eval()
    ids, questions = torch.randint(4, 50, (90,)).tolist(), [[5, 6, 7], [8, 9]]
    reader = asking.compress(compressor, ids, {END})
    memory = compressor.encode(torch.tensor([ids]))
    for question in (*questions, questions[0]):
        wanted = compressor.generate(memory, question, max_new_tokens=asking.ANSWER, stop_tokens=[END])
        assert reader.ask(question) == wanted[0].tolist()
    assert reader.nbytes == memory.nbytes


class Words:
    """A tokenizer of words, a full stop one of them."""

    def __init__(self):
        self.words = []

    def __call__(self, text, add_special_tokens=False):
        found = text.replace(".", " .").split()
        self.words += [word for word in found if word not in self.words]
        return {"input_ids": [self.words.index(word) for word in found]}

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(self.words[index] for index in ids)

    def __len__(self):
        return len(self.words)


def test_every_fact_stands_in_the_document_in_a_part_of_its_own(monkeypatch):
    tokenizer = Words()
    tokenizer("Some text.")
    monkeypatch.setattr(asking, "docstrings", lambda: "Some text, some.\n\n" * 1000)
    ids, facts = asking.document(tokenizer, 1000, 10)
    text = tokenizer.decode(ids)
    assert len(ids) == 1000 and len({fact.question for fact in facts}) == 10
    places = [text.index(fact.sentence.removesuffix(".") + " .") / len(text) for fact in facts]
    assert places == pytest.approx([(index + 0.5) / 10 for index in range(10)], abs=0.02)
    # Paragraphs that are longer than the distance of two facts, and than a short document.
    monkeypatch.setattr(asking, "docstrings", lambda: f"{'Some text, some. ' * 60}\n\n" * 100)
    for tokens in (1000, 500, 200):
        ids, facts = asking.document(tokenizer, tokens, 10)
        text = tokenizer.decode(ids)
        assert len(ids) == tokens and all(fact.sentence.removesuffix(".") in text for fact in facts)
    with pytest.raises(ValueError, match="tokens: expected enough for 10 facts, got 50"):
        asking.document(tokenizer, 50, 10)


def results(monkeypatch):
    """What asking.py writes, of two contenders on a clock that stands still but for them."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(asking, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def reader(reading, answering, nbytes, answers):
        def ask(question):
            clock.now += answering
            return answers[question[0]]

        def read():
            clock.now += reading
            return asking.Reader(ask, nbytes)

        return read

    readers = {
        "gistkit, some": reader(4.0, 0.5, 2 << 20, [[0], [1, 2]]),
        asking.FULL: reader(6.0, 1.0, 4 << 20, [[3, 0], [3]]),
    }
    facts = [asking.Fact("", "", answer) for answer in ("red", "Oslo")]
    tokenizer = SimpleNamespace(
        decode=lambda ids, skip_special_tokens: " ".join(("red", "not", "Oslo", "maybe")[index] for index in ids)
    )
    told = []
    found = asking.take_turns(readers, [[0], [1]], lambda: told.append(0))
    assert len(told) == 2 * 3
    rows = [asking.row(name, [times, times], nbytes, facts, tokenizer) for name, (times, nbytes) in found.items()]
    machine = {"processor": "some", "threads": 2, "instruction_set": "avx2", "torch": "2", "commit": "abc"}
    facts = [fact._asdict() for fact in facts]
    sizes = {"dtype": "float32", "tokens": 8000, "rounds": 2}
    return {"suite": "asking", "machine": machine, **sizes, "facts": facts, "rows": rows}


def test_rows_have_the_seconds_and_the_right_answers(monkeypatch):
    ours, theirs = results(monkeypatch)["rows"]
    assert (ours["first"], ours["later"], ours["mib"]) == (4.5, 0.5, 2)
    assert (theirs["first"], theirs["later"], theirs["mib"]) == (7.0, 1.0, 4)
    assert ours["token"] == pytest.approx(1000 / 3) and theirs["token"] == pytest.approx(2000 / 3)
    assert (ours["exact"], ours["within"]) == (50, 100) and (theirs["exact"], theirs["within"]) == (0, 50)
    assert ours["seconds"] == [4.5, 5.0] and theirs["seconds"] == [7.0, 8.0]
    assert ours["answers"] == ["red", "not Oslo"]


def test_the_picture_shows_each_contender(monkeypatch, tmp_path):
    content = results(monkeypatch)
    suites.write(tmp_path / "figures.json", "asking", content)
    assert picture.draw(tmp_path / "figures.json", "asking").read_bytes().startswith(b"\x89PNG")
    time, kept = picture.draw_asking(content).axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in time.lines}
    assert drawn == {"gistkit, some": [[1, 4.5], [2, 5]], asking.FULL: [[1, 7], [2, 8]]}
    assert [patch.get_width() for patch in kept.patches] == [2, 4]


def test_without_a_trained_compressor_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(asking, "trained", dict)
    monkeypatch.setattr(sys, "argv", ["asking.py"])
    with pytest.raises(SystemExit):
        asking.main()
    assert "--compressor: expected a trained compressor's name or folder, got none" in capsys.readouterr().err
