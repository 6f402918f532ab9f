"""What training reads, and its schedules."""

import dataclasses
import hashlib
import json
import pickle
import sys
import types
from pydoc_data.topics import topics

import pytest
import torch
import transformers

from gistkit.common.text_ids import filled_ids
from gistkit.compress import FiveHundredX, GistPool
from gistkit.compress.tokens import QUESTION
from gistkit.evaluate import Example, iter_questions
from gistkit.evaluate.data import prepare
from gistkit.train import PRESETS, Packed, Pretraining, QuestionAnswering, Recipe, command, load_corpus
from gistkit.train.batches import collate, for_losses, num_tokens, targets
from gistkit.train.losses import Losses
from gistkit.train.prepare import changed
from tests.helpers.models import byte_tokenizer, tiny_llama
from tests.helpers.train_worker import make_batches, make_model, make_questions
from tests.train.test_corpora import text_of


def test_files_of_a_folder_are_held_out_as_a_whole_and_joined(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_bytes(bytes(range(20)))
    (tmp_path / "b" / "c.md").write_bytes(bytes(range(100, 103)))
    (tmp_path / "b" / "d.md").write_bytes(bytes(range(200, 210)))
    (tmp_path / "b" / "empty.md").write_bytes(b"")
    (tmp_path / "b" / "picture.png").write_bytes(b"no text")
    corpus = load_corpus(tmp_path)
    assert bytes(corpus.train) == bytes(range(20)) + b"\n\n" + bytes(range(200, 210))
    assert bytes(corpus.held_out) == bytes(range(100, 103))
    assert load_corpus(tmp_path).digest == corpus.digest != load_corpus(tmp_path / "a.txt").digest
    assert load_corpus(tmp_path, limit=5).train.tolist() == list(range(5))
    assert load_corpus(tmp_path, limit=5).held_out.tolist() == [100, 101, 102]
    assert corpus.passages([0, 3], 2).tolist() == [[0, 1], [3, 4]]
    assert corpus.chunks(2).tolist() == [[100, 101]]
    assert corpus.chunks(2, stride=1, count=3).sort(0).values.tolist() == [[100, 101], [101, 102]]
    assert {name: part.tolist() for name, part in corpus.splits().items()} == {"held_out": [100], "test": [101, 102]}
    with pytest.raises(ValueError, match=r"at least 6 bytes in the held-out part of .*, got 3"):
        corpus.check(6)


@pytest.mark.parametrize("sizes", [[10] * 40, [7, 100, 3, 60, 9] * 12, [5, 5], [1, 1000], [1000, 1], [30, 1, 1]])
def test_about_a_tenth_of_a_folder_is_held_out(tmp_path, sizes):
    for index, size in enumerate(sizes):
        (tmp_path / f"{index:03}.txt").write_bytes(bytes([65 + index]) * size)
    corpus = load_corpus(tmp_path)
    train, held_out = (set(bytes(part.tolist())) - {10} for part in (corpus.train, corpus.held_out))
    assert train and held_out and not train & held_out and len(train | held_out) == len(sizes)
    if len(sizes) > 9:
        assert abs(sum(sizes[letter - 65] for letter in held_out) - sum(sizes) / 10) <= max(sizes) / 2
        # They are spread: each third of the folder has some.
        assert {(letter - 65) * 3 // len(sizes) for letter in held_out} == {0, 1, 2}


def test_one_document_and_the_topics_lose_their_ends(tmp_path):
    (tmp_path / "a.txt").write_bytes(bytes(range(20)))
    for path in (tmp_path, tmp_path / "a.txt"):
        corpus = load_corpus(path)
        assert (corpus.train.tolist(), corpus.held_out.tolist()) == ([*range(18)], [18, 19])
    corpus = load_corpus()
    contents = [topics[key].encode() for key in sorted(topics)]
    cuts = [int(len(content) * 0.9) for content in contents]
    starts = b"\n\n".join(content[:cut] for content, cut in zip(contents, cuts, strict=True))
    ends = b"\n\n".join(content[cut:] for content, cut in zip(contents, cuts, strict=True))
    assert (bytes(corpus.train.tolist()), bytes(corpus.held_out.tolist())) == (starts, ends)
    # Runs of this text that were begun before may go on, and figures keep their text.
    assert corpus.digest == hashlib.sha256(starts + b"\0" + ends).hexdigest()[:12]


def test_a_corpus_is_tokenised_by_any_function(tmp_path, monkeypatch):
    monkeypatch.setattr("gistkit.train.streams.PIECE", 7)
    text = "äb\ncdefghij\n" * 5 + 10 * "ä"
    (tmp_path / "a.txt").write_text(text, "utf-8")
    pieces = []

    def tokenizer(piece):
        pieces.append(piece)
        return [ord(letter) for letter in piece]

    corpus = load_corpus(tmp_path, tokenizer=tokenizer)
    # The last tenth of 85 bytes would begin inside the sixth of the last letters.
    assert "".join(map(chr, corpus.train)) == text[:66]
    assert "".join(map(chr, corpus.held_out)) == text[66:]
    assert "äb\n" in pieces and max(map(len, pieces)) <= 7
    assert corpus.unit == "tokens" and corpus.train.dtype == torch.int32
    with pytest.raises(TypeError, match="tokenizer: expected a list of integers for a string, got list"):
        load_corpus(tmp_path / "a.txt", tokenizer=list)
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"a\.txt: expected UTF-8 text, got byte 0xff in it"):
        load_corpus(tmp_path / "a.txt", tokenizer=lambda piece: [0])
    with pytest.raises(FileNotFoundError, match="expected a file or a folder"):
        load_corpus(tmp_path / "none.txt")
    (tmp_path / "none").mkdir()
    kinds = r"\.txt, \.md, \.rst, \.jsonl, \.ndjson, \.raw, \.tokens, \.parquet, \.json"
    with pytest.raises(FileNotFoundError, match=f"expected {kinds} files in"):
        load_corpus(tmp_path / "none")


def rows(splits):
    """Splits of a dataset as it may come: rows that can be read again, by the names of the splits."""
    return {split: [{"text": text, "id": row} for row, text in enumerate(texts)] for split, texts in splits.items()}


def test_a_dataset_is_loaded_by_its_name(monkeypatch):
    asked, letters = [], [letter * 20 for letter in "abcdefghijklmnopqrstuvwxyz"]

    def load_dataset(*arguments, **options):
        asked.append((arguments, options))
        return rows({"train": letters})

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    corpus = load_corpus(dataset="owner/name:small")
    assert (text_of(corpus.held_out), corpus.test) == ("\n\n".join(letters[:3]), None)
    assert text_of(corpus.train) == "\n\n".join(letters[3:])
    streamed = load_corpus(dataset="owner/name", limit=200, tokenizer=lambda text: list(text.encode()))
    assert text_of(streamed.held_out) == "\n\n".join(letters[:2])
    assert streamed.train.numel() == 200 and text_of(streamed.train).startswith("c" * 20)
    names = ("owner/name", "small"), ("owner/name", None)
    assert asked == [(name, {"streaming": streaming}) for name, streaming in zip(names, (False, True), strict=True)]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'gistkit\[datasets\]'"):
        load_corpus(dataset="owner/name")


def test_official_splits_are_taken_as_they_are():
    splits = {"train": ["train 0", "train 1"], "validation": ["choose 0", "choose 1"], "test": ["final 0", "final 1"]}
    corpus = load_corpus(dataset=rows(splits))
    found = [text_of(part) for part in (corpus.train, corpus.held_out, corpus.test)]
    assert found == ["\n\n".join(texts) for texts in splits.values()]
    assert [text_of(part)[:6] for part in corpus.splits().values()] == ["choose", "final "]
    short = load_corpus(dataset=rows(splits), limit=3)
    assert (text_of(short.train), text_of(short.held_out), text_of(short.test)) == ("tra", "choose 0", "final 0")
    assert len({corpus.digest, short.digest}) == 2
    del splits["validation"]
    corpus = load_corpus(dataset=rows(splits))
    assert text_of(corpus.held_out) == "final 0\n\nfinal 1" and corpus.test is None
    # One document is cut.
    corpus = load_corpus(dataset=rows({"train": ["x" * 20, " "]}))
    assert (text_of(corpus.train), text_of(corpus.held_out)) == ("x" * 18, "xx")


def test_rows_of_lines_are_joined_to_articles():
    def article(name):
        return [
            "",
            f" = {name} = \n",
            "",
            f" {name} starts . \n",
            " x \n",
            " = = Part = = \n",
            "",
            f" {name} ends . \n",
        ]

    # A formula looks like a title, but stands among lines.
    names = [f"A{number}" for number in range(12)]
    lines = [row for name in names for row in article(name)]
    lines[6 * 8 + 4] = " = 2.5 = \n"
    corpus = load_corpus(dataset=rows({"train": lines}))
    train, held_out = text_of(corpus.train), text_of(corpus.held_out)
    for name in names:
        part, other = (held_out, train) if name in ("A0", "A1") else (train, held_out)
        assert f" = {name} = \n\n {name} starts" in part and f" {name} ends" in part and f"{name} " not in other
    assert " = A6 = \n\n A6 starts . \n = 2.5 = \n = = Part = = \n\n A6 ends . \n\n = A7 = " in train
    # A context that is longer than a row is one of an article.
    assert " = A0 = \n\n A0 starts . \n x \n = = Part" in held_out


def test_rows_without_empty_ones_between_are_documents_whatever_they_look_like():
    lines = [f" = T{row} = \n" if row % 5 == 0 else f" line {row} . \n" for row in range(400)]
    corpus = load_corpus(dataset=rows({"train": lines}), limit=500)
    assert corpus.train.numel() + 20 >= 500 and corpus.held_out.numel() < 200


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


def test_tokens_are_counted_however_rows_are_shared():
    batches = make_batches()
    batch = batches(0)
    for size in (1, 2, 4):
        cut = [batches.collate([batches[row] for row in range(at, at + size)]) for at in range(0, 4, size)]
        assert all(torch.equal(torch.cat([part[name] for part in cut]), batch[name]) for name in batch)
    assert for_losses(batch, ("ae", "compression")).keys() == {"input_ids"}
    assert num_tokens(for_losses(batch, ("ae",))) == batch["input_ids"].numel()
    assert num_tokens(batch) == sum(tensor.numel() for tensor in batch.values())
    questions = make_questions()
    ragged, rows = questions(0), [questions.collate([questions[row]]) for row in range(4)]
    assert for_losses(ragged, ("qa",)).keys() == ragged.keys()
    counts = [targets(row, end_token=True) for row in rows]
    assert targets(ragged, end_token=True) == {name: sum(count[name] for count in counts) for name in counts[0]}
    assert sum(map(num_tokens, rows)) == num_tokens(ragged)


def test_a_rows_own_mask_stays_in_a_batch():
    padded = {"input_ids": [5, 6, 0, 0], "attention_mask": [1, 1, 0, 0]}
    left = {"input_ids": [9, 7, 8], "attention_mask": [0, 1, 1]}
    batch = collate([padded, left])
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [0, 1, 1, 0]]
    assert batch["input_ids"].tolist() == [[5, 6, 0, 0], [0, 7, 8, 0]]
    assert collate([padded] * 2)["attention_mask"].tolist() == [padded["attention_mask"]] * 2
    assert collate([{"input_ids": [1, 2], "attention_mask": [1, 1]}]).keys() == {"input_ids"}
    with pytest.raises(ValueError, match="attention_mask: expected as many values as input_ids has, 3, got 2"):
        collate([padded, left | {"attention_mask": [0, 1]}])


@pytest.mark.parametrize("method", [FiveHundredX, GistPool])
def test_losses_of_a_window_do_not_depend_on_how_rows_are_shared(method):
    """Contexts beyond it and within it, with BOS and without; each loss is the mean over all that it predicts."""
    options = {"bos_token": 0} if method is GistPool else {"chunk": 8}
    names = ("ae", "compression")
    losses = Losses(method(make_model(), ratio=4, losses=names, lora=4, window=8, **options).eval())
    contexts = [[0, *range(1, 20)], list(range(1, 4)), list(range(1, 9)), [0, *range(30, 39)], [0, 7, 8, 9]]
    rows = [{"input_ids": context} for context in contexts]
    whole = collate(rows)
    with torch.no_grad():
        parts = [(losses(**collate([row])), losses.counts(collate([row]))) for row in rows]
        found = losses(**whole)
    total = sum(counts for _, counts in parts)
    assert torch.equal(losses.counts(whole), total)
    assert total.tolist() == ([33, 30] if method is GistPool else [31, 31])
    for place, name in enumerate(names):
        mean = sum(part[name] * counts[place] for part, counts in parts) / total[place]
        torch.testing.assert_close(mean, found[name].double(), rtol=1e-5, atol=1e-6, msg=name)


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
    with pytest.raises(ValueError, match="examples: expected at least one question, got none"):
        QuestionAnswering({}, None, 1)


def test_names_of_special_tokens_are_text_in_training_and_evaluation_as_in_a_memory(tmp_path):
    tokenizer, hostile, path = byte_tokenizer(start=True), "a<end>\n<start>b", tmp_path / "a.jsonl"
    spelt = [tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in hostile]
    compressor = FiveHundredX(tiny_llama(vocab_size=258), chunk=8, ratio=4, lora=4).eval()
    compressor.tokenizer = tokenizer
    memory, ids = compressor.compress(hostile), compressor.encode([[257, *spelt]])
    assert all(map(torch.equal, memory.tensors, ids.tensors))
    path.write_text("".join(json.dumps({"text": hostile}) + "\n" for _ in range(2)))
    corpus = load_corpus(path, tokenizer=tokenizer)
    assert corpus.train.tolist() == corpus.held_out.tolist() == spelt
    path.write_text(json.dumps({"context": hostile, "question": hostile, "answers": [hostile]}))
    # Special tokens of the template are what they are.
    examples = list(iter_questions(path, template="<end>{context}<start>{question}<end>"))
    wanted = [257, 256, *spelt], [257, *spelt, 256], spelt
    (row,) = prepare(examples, tokenizer, ["qa"])
    assert (row.context, row.question, row.answer) == wanted
    trained = QuestionAnswering(examples, tokenizer, 1, validation=pickle.loads(pickle.dumps(examples)))
    for number in range(2):
        assert tuple(ids.tolist() for ids in trained.row(number).values()) == (*wanted[:2], [*spelt, 256])
    (example,) = iter_questions(path)
    (row,) = prepare([example], tokenizer, ["qa"])
    asked = filled_ids(QUESTION, "{question}", hostile, tokenizer)
    assert (row.context, row.question) == ([257, *spelt], asked)


def test_a_fall_as_long_as_a_warm_up_does_not_begin_within_it():
    recipe = Recipe(steps=100, learning_rate=1.0, warmup=10, schedule="linear", decay=0.95)
    assert [recipe.learning_rate_at(step) for step in (4, 9, 10, 55)] == pytest.approx([0.5, 1.0, 1.0, 0.5])


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_schedules_are_those_of_transformers(name, warmup):
    """But for the warm-up, which begins at its first step in place of 0: theirs is one step behind there."""
    recipe = Recipe(steps=30, learning_rate=0.5, warmup=warmup, schedule=name)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    theirs = transformers.get_scheduler(
        "constant_with_warmup" if name == "constant" else name, optimizer, warmup, num_training_steps=30
    )
    rates = []
    for _ in range(31):
        rates.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    ours = [recipe.learning_rate_at(step) for step in range(31)]
    assert ours[warmup:] == pytest.approx(rates[warmup:], abs=1e-15)
    assert ours[:warmup] == pytest.approx(rates[1 : warmup + 1], abs=1e-15)


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_a_fall_at_the_end_is_that_of_transformers(name):
    """Their warmup_stable_decay takes the lengths of its parts."""
    recipe = Recipe(steps=40, learning_rate=0.5, warmup=4, schedule=name, decay=0.3)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    theirs = transformers.get_wsd_schedule(
        optimizer, num_warmup_steps=4, num_decay_steps=12, num_stable_steps=24, decay_type=name
    )
    for step in range(41):
        if step >= 4:
            assert recipe.learning_rate_at(step) == pytest.approx(theirs.get_last_lr()[0], abs=1e-15), step
        optimizer.step()
        theirs.step()


def test_epochs_become_steps():
    assert Recipe(epochs=3, batch=16).for_rows(100).steps == 19
    assert Recipe(epochs=0.5, batch=10).for_rows(100) == Recipe(steps=5, batch=10)
    assert Recipe(steps=7).for_rows(None).steps == 7
    with pytest.raises(ValueError, match=r"epochs: expected steps for rows drawn at random, .*, got 2"):
        Recipe(epochs=2).for_rows(None)
    corpus = load_corpus(limit=4000)
    assert Packed(corpus, 2, 32).rows == corpus.train.numel() // 32 and Pretraining(corpus, 2, 16, 32).rows is None
    examples = [Example(f"Number {n}", question="And?", answers=(str(n),)) for n in range(40)]
    assert QuestionAnswering(examples, None, 4).rows == 36


def test_a_share_of_each_passage_is_its_context():
    corpus = load_corpus(limit=4000)
    halves = Pretraining(corpus, 2, 21, 21)
    assert halves(0)["input_ids"].shape == (2, 10)
    for batches in (Pretraining(corpus, 2, 20, 20, context_share=0.8), Packed(corpus, 2, 20, context_share=0.8)):
        for batch in (batches(0), batches.held_out(2)[0]):
            assert batch["input_ids"].shape == (2, 16) and batch["continuation_ids"].shape == (2, 4)
        assert batches.identity["context_share"] == 0.8
    whole = Pretraining(corpus, 2, 20, 20, context_share=1.0)(0)
    assert whole["input_ids"].shape == (2, 20) and whole["continuation_ids"].shape == (2, 0)
    assert Pretraining(corpus, 2, 2, 2, context_share=0.1)(0)["input_ids"].shape == (2, 1)
    with pytest.raises(ValueError, match="context_share: expected a share above 0, at most 1, got 0"):
        Packed(corpus, 2, 20, context_share=0)


def test_schedules_are_the_papers():
    recipe = Recipe()
    assert [recipe.learning_rate_at(step) for step in (0, 149, 299, 300, 19_999)] == pytest.approx(
        [1e-4 / 300, 5e-5, 1e-4, 1e-4, 1e-4]
    )
    assert (recipe.batch, recipe.steps, recipe.clip) == (16, 20_000, 2.0)
    assert (recipe.min_length, recipe.max_length) == (510, 2040)
    assert PRESETS["epl-finetune"].recipe == dataclasses.replace(recipe, learning_rate=5e-5)
    assert PRESETS["smollm2-small"].compressor == {"chunk": 64, "ratio": 4, "lora": 64, "losses": ("ae",)}
    assert PRESETS["smollm2-small"].recipe.learning_rate_at(4) == pytest.approx(5e-4)
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    groups = recipe.make_optimizer([matrix, vector]).param_groups
    assert [(group["weight_decay"], group["betas"]) for group in groups] == [(0.1, (0.9, 0.95)), (0.0, (0.9, 0.95))]
    assert changed(recipe, {"max_length": 120}) == dataclasses.replace(recipe, min_length=120, max_length=120)
    assert changed(recipe, {"max_length": 600}) == dataclasses.replace(recipe, max_length=600)


def test_sets_of_questions_are_a_mixture_and_each_has_its_own_held_out_part():
    def examples(name, count):
        return (
            Example(f"{name} {number // 2}.", question=f"Which {number}?", answers=(f"{name}", "other"))
            for number in range(count)
        )

    sets = {"a": 40, "b": 24}
    plain = QuestionAnswering({name: examples(name, count) for name, count in sets.items()}, None, 4, seed=1)

    def contexts(batches):
        return [bytes(token for token in row if token) for batch in batches for row in batch["input_ids"].tolist()]

    # Of 20 contexts 2, and of 12 one, with both their questions; the sets take turns.
    held_out = [b"a 18.", b"b 11.", b"a 18.", b"b 11.", b"a 19.", b"a 19."]
    assert contexts(plain.held_out(99)) == held_out
    epoch = contexts(plain(step) for step in range(58 // 4 + 1))[:58]
    expected = [f"{name} {number // 2}.".encode() for name, count in sets.items() for number in range(count)]
    assert sorted(epoch) == sorted(each for each in expected if each not in held_out)
    with pytest.raises(ValueError, match="b: expected at least 2 different contexts, one to hold out, got 1"):
        QuestionAnswering({"a": examples("a", 9), "b": examples("b", 2)}, None, 4)
    with pytest.raises(ValueError, match=r"b\[0\]: expected a question with an answer, got none"):
        QuestionAnswering({"a": examples("a", 9), "b": [Example("x")]}, None, 4)


def test_questions_that_are_held_out_may_have_files_of_their_own():
    def examples(name, count):
        return [Example(f"{name} {number}.", question="Which?", answers=(f"{number}",)) for number in range(count)]

    batches = QuestionAnswering(
        {"a": examples("a", 7)}, None, 2, validation={"a": examples("v", 3), "b": examples("w", 2)}
    )
    shown = [bytes(row) for batch in batches.held_out(9) for row in batch["input_ids"].tolist()]
    assert shown == [b"v 0.", b"w 0.", b"v 1.", b"w 1.", b"v 2."]
    epoch = [bytes(row) for step in range(7) for row in batches(step)["input_ids"].tolist()]
    assert sorted(epoch[:7]) == sorted(epoch[7:]) == [f"a {number}.".encode() for number in range(7)]
    # One context is enough, as all are trained on; the same rows divided in another way are other data.
    other = QuestionAnswering(examples("a", 7) + examples("v", 3), None, 2, validation=examples("w", 2))
    assert other.identity != batches.identity
    assert QuestionAnswering(examples("a", 1), None, 1, validation=examples("v", 1))(5)["input_ids"].shape == (1, 4)
    with pytest.raises(ValueError, match="validation: expected at least 1 question, got none"):
        QuestionAnswering(examples("a", 7), None, 2, validation=[])
    with pytest.raises(ValueError, match="examples: expected at least 1 question, got none"):
        QuestionAnswering([], None, 2, validation=examples("v", 3))


def test_a_run_takes_the_split_of_a_folder_that_it_trains_on(tmp_path):
    for name in ("train-v1.1", "dev-v1.1"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"context": name, "question": "q", "answers": ["a"]}))
    sets = {split: command._examples("questions", [tmp_path], split) for split in ("train", "validation")}
    found = {split: [example.context for each in few.values() for example in each] for split, few in sets.items()}
    assert found == {"train": ["train-v1.1"], "validation": ["dev-v1.1"]}
