"""One passage of each long text: which texts, where in them, and the presets that train on them."""

import json

import numpy as np
import pytest
import torch

from gistkit.train import Packed, Pretraining, Trainer, Windows, load_corpus
from gistkit.train.command import run
from tests.helpers.train_worker import make_model
from tests.train.test_corpora import json_lines

pytestmark = pytest.mark.usefixtures("one_thread")
# A hand-written file: texts of more than 20 characters, but for those named.
SHORT, EXACT, SNOW = "Nothing to see.", "Twenty characters it", "☃☃☃☃☃☃☃☃☃☃☃☃☃☃☃☃☃☃☃☃"
TEXTS = [
    "The first text is held out, as a tenth of ten.",
    "The mill stood on the river, and it ground the grain.",
    SHORT,
    "It rained for a week; the well was full again.",
    EXACT,
    "One letter more than twenty: it is long enough, just so.",
    SNOW,
    "A year later nobody asked where the water came from.",
    "\n\n  Old, dry.\n\nEmpty lines are characters of a text too.",
    "☃ is one character in three bytes, and counts once.",
]
LONG = [text for text in TEXTS[1:] if text not in (SHORT, EXACT, SNOW)]


def encoded(text):
    """A tokenizer whose ids are bytes."""
    return list(text.encode())


@pytest.fixture
def path(tmp_path):
    return json_lines(tmp_path / "texts.jsonl", TEXTS)


@pytest.mark.parametrize("tokenizer", [None, encoded])
def test_each_long_text_has_one_passage_of_its_own(path, tokenizer):
    corpus = load_corpus(path, tokenizer=tokenizer, windows=Windows(20, 12, seed=4))
    rows = corpus.train.view(-1, 12)
    assert len(rows) == len(LONG) == 6 and corpus.held_out.numel() == 12
    for row, text in zip([*rows, corpus.held_out], [*LONG, TEXTS[0]], strict=True):
        assert bytes(row.tolist()) in text.strip("\n").encode()
    assert len({row.tolist()[0] for row in rows}) > 1
    again, other = (load_corpus(path, windows=Windows(20, 12, seed=seed)) for seed in (4, 5))
    assert again.digest == corpus.digest != other.digest != load_corpus(path).digest
    assert torch.equal(again.train.long(), corpus.train.long()) and not torch.equal(again.train, other.train)
    # Texts of fewer ids have none.
    whole = load_corpus(path, windows=Windows(0, 15)).train.view(-1, 15)
    assert [bytes(row.tolist()) for row in whole].count(SHORT.encode()) == 1 and len(whole) == 9


def test_short_texts_are_not_tokenised(path):
    read = []

    def tokenizer(text):
        read.append(text)
        return encoded(text)

    load_corpus(path, tokenizer=tokenizer, windows=Windows(20, 12))
    assert sorted(read) == sorted(text.strip("\n") for text in [TEXTS[0], *LONG])


def test_every_place_has_the_same_chance(tmp_path):
    """6 places for 5 ids in a text of 10: 400 of 2400 draws each, within 5 deviations."""
    corpus = load_corpus(json_lines(tmp_path / "a.jsonl", ["0123456789"] * 2667), windows=Windows(0, 5, seed=1))
    rows = corpus.train.view(-1, 5).numpy()
    assert len(rows) == 2400 and (np.diff(rows.astype(int)) == 1).all()
    counts = np.bincount(rows[:, 0] - ord("0"), minlength=6)
    assert len(counts) == 6 and abs(counts - 400).max() < 5 * np.sqrt(2400 / 6 * 5 / 6)
    # Draws of texts that follow each other are not alike.
    pairs = np.bincount(6 * (rows[:-1, 0] - ord("0")) + rows[1:, 0] - ord("0"), minlength=36)
    assert abs(pairs - 2399 / 36).max() < 5 * np.sqrt(2399 / 36)


def test_files_of_a_folder_are_texts_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("gistkit.train.documents.BLOCK", 7)
    monkeypatch.setattr("gistkit.train.streams.PIECE", 5)
    for name, text in zip("abcdefghij", TEXTS, strict=True):
        (tmp_path / f"{name}.txt").write_text(text)
    for tokenizer in (None, encoded):
        corpus = load_corpus(tmp_path, tokenizer=tokenizer, windows=Windows(20, 12))
        rows = [bytes(row.tolist()) for row in [*corpus.train.view(-1, 12), *corpus.held_out.view(-1, 12)]]
        assert len(rows) == len(LONG) + 1
        for row in rows:
            assert sum(row in text.encode() for text in TEXTS) == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"text": "a"}', '{"text": "\\ud800"}'], r"a\.jsonl, line 2, 'text': expected whole characters"),
        (
            [json.dumps({"text": text}) for text in TEXTS],
            r"longer_than: expected documents of more than 49 characters and at least 12 bytes in both parts of "
            r"a\.jsonl, got 5 to train on and 0 held out",
        ),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, lines, message):
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=message):
        load_corpus(tmp_path / "a.jsonl", windows=Windows(49, 12))
    for arguments, complaint in [((-1, 12), "longer_than: expected a whole number >= 0, got -1"), ((1, "0"), "length")]:
        with pytest.raises(ValueError, match=complaint):
            Windows(*arguments)


def test_the_compression_losss_preset_trains_on_passages_of_long_texts(tmp_path, monkeypatch):
    """Of more than 4096 characters, 1020 bytes each; half of them are the context (Section 3)."""
    monkeypatch.setattr(Trainer, "train", lambda self, resume: self.batches)
    # The held-out tenth, and then those of 4100 characters on.
    texts = [f"{number:04} " * (820 if number < 3 else 800 + number) for number in range(30)]
    path = json_lines(tmp_path / "a.jsonl", texts)
    shape = {"recipe": {"batch": 2}, "compressor": {"lora": 2, "chunk": 510, "losses": ("ae", "lm")}}
    shape |= {"cpu": True, "progress": False}
    batches = run(make_model(), None, tmp_path / "out", preset="cl-llama2", text=path, **shape)
    assert isinstance(batches, Packed) and batches.rows == 10 and batches.corpus.held_out.numel() == 3 * 1020
    seen = set()
    for step in range(5):
        batch = batches(step)
        for context, continuation in zip(batch["input_ids"], batch["continuation_ids"], strict=True):
            row = bytes([*context.tolist(), *continuation.tolist()]).decode()
            assert len(context) == len(continuation) == 510
            (number,) = {int(word) for word in row.split() if len(word) == 4}
            assert row in texts[number] and len(texts[number]) > 4096
            seen.add(number)
    assert seen == set(range(20, 30))
    # Other options take the place of the preset's.
    shape["recipe"] |= {"min_length": 1020}
    assert run(make_model(), None, tmp_path / "out", preset="cl-llama2", text=path, packed=True, **shape).rows > 10
    options = {"text": path, "longer_than": 0, **shape}
    assert isinstance(run(make_model(), None, tmp_path / "out", preset="cl-llama2", **options), Pretraining)
    options = {"text": path, "longer_than": 4110, "compressor": {"lora": 2, "chunk": 8, "ratio": 4, "losses": ("ae",)}}
    options |= {"recipe": {"max_length": 512, "batch": 2}, "cpu": True, "progress": False}
    with pytest.raises(
        ValueError, match=r"longer_than: expected documents of more than 4110 .* got 7 to .* 0 held out"
    ):
        run(make_model(), None, tmp_path / "out", **options)
    for options, message in [
        ({"packed": True, "longer_than": 9}, "longer_than: not allowed with packed rows, got 9"),
        (
            {"questions": path, "compressor": {"losses": ("qa",)}, "longer_than": 9},
            "longer_than: not allowed with questions, got 9",
        ),
        ({"longer_than": -1}, "longer_than: expected a whole number >= 0, got -1"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(make_model(), None, tmp_path / "out", **options)


def test_limits_hold_out_as_many_ids_as_make_a_tenth(tmp_path):
    path = json_lines(tmp_path / "a.jsonl", [f"{number:03} " * 30 for number in range(100)])
    whole, limited = (load_corpus(path, windows=Windows(50, 20), limit=limit) for limit in (None, 400))
    assert whole.held_out.numel() == 10 * 20 and whole.train.numel() == 90 * 20
    assert limited.train.numel() == 400 and limited.held_out.numel() == 3 * 20
    assert torch.equal(limited.held_out, whole.held_out[:60]) and b"003" in bytes(limited.train[:20].tolist())
