"""What training reads, and its schedules."""

import dataclasses
import sys
import types

import pytest
import torch

from gistkit.evaluate import Example
from gistkit.train import PRESETS, Pretraining, QuestionAnswering, Recipe, load_corpus
from gistkit.train.batches import for_losses, num_tokens, split, targets
from tests.helpers.train_worker import make_batches, make_questions


def test_a_corpus_splits_each_document_and_joins_them(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_bytes(bytes(range(10)))
    (tmp_path / "b" / "c.md").write_bytes(bytes(range(100, 120)))
    (tmp_path / "b" / "picture.png").write_bytes(b"no text")
    corpus = load_corpus(tmp_path)
    assert bytes(corpus.train) == bytes(range(9)) + b"\n\n" + bytes(range(100, 118))
    assert bytes(corpus.held_out) == bytes([9]) + b"\n\n" + bytes([118, 119])
    assert load_corpus(tmp_path).digest == corpus.digest != load_corpus(tmp_path / "a.txt").digest
    assert load_corpus(tmp_path, limit=5).train.tolist() == list(range(5))
    assert corpus.passages([0, 3], 2).tolist() == [[0, 1], [3, 4]]
    assert corpus.chunks(2).sort(0).values.tolist() == [[9, 10], [10, 118]]
    assert corpus.chunks(2, stride=1, count=3).shape == (3, 2)
    with pytest.raises(ValueError, match=r"at least 6 bytes in the held-out tenth of .*, got 5"):
        corpus.check(6)


def test_a_corpus_is_tokenised_by_any_function(tmp_path, monkeypatch):
    monkeypatch.setattr("gistkit.train.data.PIECE", 7)
    text = "äb\ncdefghij\n" * 5 + 10 * "ä"
    (tmp_path / "a.txt").write_text(text, "utf-8")
    (tmp_path / "b.txt").write_text("0123456789")
    pieces = []

    def tokenizer(piece):
        pieces.append(piece)
        return [ord(letter) for letter in piece]

    corpus = load_corpus(tmp_path, tokenizer=tokenizer)
    # The last tenth of 85 bytes would begin inside the sixth of the last letters.
    assert "".join(map(chr, corpus.train)) == text[:66] + "\n\n012345678"
    assert "".join(map(chr, corpus.held_out)) == text[66:] + "\n\n9"
    assert "äb\n" in pieces and max(map(len, pieces)) <= 7
    assert corpus.unit == "tokens" and corpus.train.dtype == torch.int32
    with pytest.raises(TypeError, match="tokenizer: expected a list of integers for a string, got list"):
        load_corpus(tmp_path / "a.txt", tokenizer=list)
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"a\.txt: expected UTF-8 text, got byte 0xff in it"):
        load_corpus(tmp_path / "a.txt", tokenizer=lambda piece: [0])
    with pytest.raises(FileNotFoundError, match="expected a file or a folder"):
        load_corpus(tmp_path / "none.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"expected \.txt, \.md, \.rst files in"):
        load_corpus(tmp_path / "empty")


def test_a_dataset_by_name(monkeypatch):
    class Rows(list):
        column_names = ("text", "id")

    asked = []

    def load_dataset(path, configuration, *, split, streaming):
        asked.append((path, configuration, split, streaming))
        return Rows({"text": "x" * 20, "id": row} for row in range(3))

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert load_corpus(dataset="owner/name:small").train.numel() == 3 * 18 + 2 * 2
    assert load_corpus(dataset="owner/name", limit=20).train.numel() == 20
    assert asked == [("owner/name", "small", "train", False), ("owner/name", None, "train", True)]
    Rows.column_names = ("content",)
    with pytest.raises(ValueError, match="expected a column 'text' in owner/name, got content"):
        load_corpus(dataset="owner/name")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match="pip install datasets"):
        load_corpus(dataset="owner/name")


def test_a_batch_is_a_function_of_seed_and_step_alone():
    corpus = load_corpus()
    batches, again = Pretraining(corpus, 4, 16, 40, seed=3), Pretraining(corpus, 4, 16, 40, seed=3)
    forward = [batches(step) for step in range(50)]
    for step in reversed(range(50)):
        batch = again(step)
        assert all(torch.equal(batch[name], forward[step][name]) for name in batch)
    lengths = [sum(tensor.shape[1] for tensor in batch.values()) for batch in forward]
    assert min(lengths) < 20 and max(lengths) > 36 and set(lengths) <= set(range(16, 41))
    assert all(batch["input_ids"].shape == (4, length // 2) for batch, length in zip(forward, lengths, strict=True))
    whole = torch.cat([forward[0]["input_ids"], forward[0]["continuation_ids"]], 1)
    assert bytes(whole[2].tolist()) in bytes(corpus.train)
    assert not torch.equal(Pretraining(corpus, 4, 16, 16, seed=4)(0)["input_ids"][0], forward[0]["input_ids"][0][:8])
    held_out = batches.held_out(6)
    assert [len(batch["input_ids"]) for batch in held_out] == [4, 2]
    assert bytes(held_out[0]["input_ids"][0].tolist()) in bytes(corpus.held_out)


def test_the_rows_of_a_step_do_not_depend_on_how_they_are_shared():
    batch = make_batches()(0)
    for parts in (1, 2, 4):
        cut = split(batch, parts)
        assert all(torch.equal(torch.cat([part[name] for part in cut]), batch[name]) for name in batch)
    with pytest.raises(ValueError, match="expected a multiple of 3 rows"):
        split(batch, 3)
    assert for_losses(batch, ("ae", "compression")).keys() == {"input_ids"}
    assert num_tokens(for_losses(batch, ("ae",))) == batch["input_ids"].numel()
    assert num_tokens(batch) == sum(tensor.numel() for tensor in batch.values())
    ragged = make_questions()(0)
    assert for_losses(ragged, ("qa",)).keys() == ragged.keys()
    counts = [targets(part, end_token=True) for part in split(ragged, 4)]
    assert targets(ragged, end_token=True) == {name: sum(count[name] for count in counts) for name in counts[0]}
    assert sum(num_tokens(part) for part in split(ragged, 4)) == num_tokens(ragged)


def test_questions_pad_and_go_round():
    batches = make_questions()
    seen = torch.cat([batches(step)["answer_ids"][:, 6:8].flatten() for step in range(9)])
    assert len(seen) == 72 and batches.identity == make_questions().identity
    rows = [tuple(row) for step in range(9) for row in batches(step)["input_ids"].tolist()]
    stripped = {tuple(token for token in row if token) for row in rows}
    assert len(stripped) == 36, "an epoch shows every question once"
    batch = batches(0)
    assert ((batch["input_ids"] != 0) == batch["attention_mask"].bool()).all()
    assert (batch["answer_ids"][:, 0] == ord("I")).all() and (batch["answer_ids"] == -100).any()
    held_out = [
        tuple(token for token in row if token) for part in batches.held_out(99) for row in part["input_ids"].tolist()
    ]
    assert len(held_out) == 4 and not stripped & set(held_out)
    with pytest.raises(ValueError, match="at least 2 different contexts, one to hold out, got 1"):
        QuestionAnswering([Example("a", question="b", answers=("c",))], None, 1)
    with pytest.raises(ValueError, match=r"examples\[0\]: expected a question with an answer"):
        QuestionAnswering([Example("a")], None, 1)


def test_schedules_are_the_papers():
    recipe = Recipe()
    assert [recipe.learning_rate_at(step) for step in (0, 149, 299, 300, 19_999)] == pytest.approx(
        [1e-4 / 300, 5e-5, 1e-4, 1e-4, 1e-4]
    )
    assert (recipe.batch, recipe.steps, recipe.clip) == (16, 20_000, 2.0)
    assert (recipe.min_length, recipe.max_length) == (510, 2040)
    assert PRESETS["finetune"].recipe == dataclasses.replace(recipe, learning_rate=5e-5)
    assert PRESETS["smollm2-small"].compressor == {"chunk": 64, "ratio": 4, "lora": 64, "losses": ("ae",)}
    assert PRESETS["smollm2-small"].recipe.learning_rate_at(4) == pytest.approx(5e-4)
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    groups = recipe.optimizer([matrix, vector]).param_groups
    assert [(group["weight_decay"], group["betas"]) for group in groups] == [(0.1, (0.9, 0.95)), (0.0, (0.9, 0.95))]
    for change, message in [
        ({"steps": 0}, "steps: expected at least 1, got 0"),
        ({"learning_rate": float("nan")}, "learning_rate: expected a number above 0, got nan"),
        ({"max_length": 5}, "max_length: expected at least min_length, 510, got 5"),
    ]:
        with pytest.raises(ValueError, match=message):
            Recipe(**change)
