"""Texts in the formats that corpora are published in, kept on disk where they are large, and packed into rows."""

import gzip
import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch

from gistkit.formats import read_questions
from gistkit.train import Packed, Pretraining, Windows, data, load_corpus
from tests.helpers.disks import zstd
from tests.helpers.models import byte_tokenizer
from tests.helpers.programs import printed


def text_of(ids):
    return bytes(ids.tolist()).decode()


def json_lines(path, texts, *, compress=bytes, **others):
    """JSON lines as the Pile has them, {"text", "meta"}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps({"text": text, "meta": {"pile_set_name": "Books"}} | others) + "\n" for text in texts)
    path.write_bytes(compress(content.encode()))
    return path


# Documents of many lines: a line is no document.
DOCUMENTS = [f"Title {number}\n\nThe {number} is here.\nIt ends ☃ {number}." for number in range(25)]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "ndjson"])
def test_of_json_lines_the_first_documents_are_held_out_as_a_whole(tmp_path, suffix):
    compress = gzip.compress if suffix.endswith("gz") else bytes
    path = json_lines(tmp_path / f"a.{suffix}", DOCUMENTS, compress=compress)
    corpus = load_corpus(path)
    assert text_of(corpus.held_out) == "\n\n".join(DOCUMENTS[:3])
    assert text_of(corpus.train) == "\n\n".join(DOCUMENTS[3:])
    assert corpus.test is None
    # A folder of the same lines in two files is the same text.
    json_lines(tmp_path / "folder" / "00.jsonl", DOCUMENTS[:7])
    json_lines(tmp_path / "folder" / "01.jsonl", DOCUMENTS[7:])
    (tmp_path / "folder" / "README.md").write_text("About it.")
    assert load_corpus(tmp_path / "folder").digest == corpus.digest
    limited = load_corpus(path, limit=100)
    assert text_of(limited.train) == "\n\n".join(DOCUMENTS[1:]).encode()[:100].decode()
    assert text_of(limited.held_out) == DOCUMENTS[0]
    # One document is cut.
    one = load_corpus(json_lines(tmp_path / f"one.{suffix}", ["x" * 18 + "yz", ""], compress=compress))
    assert (text_of(one.train), text_of(one.held_out)) == ("x" * 18, "yz")


def test_what_is_held_out_may_be_read_alone(tmp_path):
    path = json_lines(tmp_path / "a.jsonl", DOCUMENTS)
    with path.open("a") as file:
        file.write("this is no JSON\n")
    corpus = load_corpus(path, held_out_only=True)
    assert text_of(corpus.held_out) == "\n\n".join(DOCUMENTS[:3]) and corpus.train.numel() == 0
    assert torch.equal(load_corpus(held_out_only=True).held_out, load_corpus().held_out)
    with pytest.raises(ValueError, match="line 26: expected a JSON object"):
        load_corpus(path)


def test_the_piles_folders_are_its_splits_in_zstd(tmp_path):
    json_lines(tmp_path / "train" / "00.jsonl.zst", ["train a", "train b"], compress=zstd)
    json_lines(tmp_path / "train" / "01.jsonl.zst", ["train c"], compress=zstd)
    json_lines(tmp_path / "val.jsonl.zst", ["choose"], compress=zstd)
    json_lines(tmp_path / "test.jsonl.zst", ["final a", "final b"], compress=zstd)
    corpus = load_corpus(tmp_path)
    parts = [text_of(part) for part in (corpus.train, corpus.held_out, corpus.test)]
    assert parts == ["train a\n\ntrain b\n\ntrain c", "choose", "final a\n\nfinal b"]
    json_lines(tmp_path / "more.jsonl", ["more"])
    # Names that are no splits: nothing is held out by its name.
    assert load_corpus(tmp_path).test is None


def wikitext(name, articles):
    return "".join(
        f" \n = {name} {number} = \n \n {name} {number} begins . \n = = Part = = \n \n {name} {number} ends . \n"
        for number in range(articles)
    )


@pytest.mark.parametrize("suffix", ["raw", "tokens"])
def test_wikitexts_files_are_its_official_splits(tmp_path, suffix):
    for split, name, articles in (("train", "T", 5), ("valid", "V", 2), ("test", "F", 1)):
        (tmp_path / f"wiki.{split}.{suffix}").write_text(wikitext(name, articles))
    corpus = load_corpus(tmp_path)

    def article(name, number):
        return f" = {name} {number} = \n \n {name} {number} begins . \n = = Part = = \n \n {name} {number} ends . \n "

    expected = {"T": (corpus.train, 5), "V": (corpus.held_out, 2), "F": (corpus.test, 1)}
    for name, (ids, count) in expected.items():
        assert text_of(ids) == "\n\n".join(article(name, number) for number in range(count)).removesuffix("\n ")
    # One file alone: its first articles.
    alone = load_corpus(tmp_path / f"wiki.valid.{suffix}")
    assert "V 0 ends" in text_of(alone.held_out) and "V 1 begins" in text_of(alone.train)
    assert "V 0" not in text_of(alone.train)


def test_a_test_split_is_held_out_whole(tmp_path):
    texts = {split: "".join(f"{split} {line}\n" for line in range(9)) for split in ("train", "valid", "test")}
    for split, text in texts.items():
        (tmp_path / f"wiki.{split}.tokens").write_text(text)

    def words(ids):
        return text_of(ids).split()

    for path in (tmp_path, tmp_path / "wiki.test.tokens"):
        found = load_corpus(path, split="test")
        assert words(found.held_out) == texts["test"].split() and found.test is None
        assert words(found.train) == (texts["train"].split() if path == tmp_path else [])
        alone = load_corpus(path, split="test", held_out_only=True)
        assert torch.equal(alone.held_out, found.held_out) and not alone.train.numel()
    # Otherwise the first split is held out, or a part of the file.
    assert words(load_corpus(tmp_path).held_out) == texts["valid"].split()
    part = load_corpus(tmp_path / "wiki.test.tokens")
    assert 0 < part.held_out.numel() < part.train.numel()
    named = {"train": [{"text": "a"}], "validation": [{"text": "b"}], "test": [{"text": "c"}]}
    assert words(load_corpus(dataset=named, split="test").held_out) == ["c"]
    del named["test"]
    with pytest.raises(ValueError, match=r"split: expected validation, which .* has, got test"):
        load_corpus(dataset=named, split="test")


def test_texts_have_the_splits_that_their_names_show(tmp_path):
    for split in ("valid", "test"):
        (tmp_path / f"{split}.txt").write_text(f"{split} text")
    (tmp_path / "train.txt.gz").write_bytes(gzip.compress(b"train text"))
    (tmp_path / "README.md").write_text("About it.")
    corpus = load_corpus(tmp_path)
    parts = [text_of(part) for part in (corpus.train, corpus.held_out, corpus.test)]
    assert parts == ["train text", "valid text", "test text"]
    for path in (tmp_path, tmp_path / "test.txt"):
        found = load_corpus(path, split="test")
        assert (text_of(found.held_out), found.test) == ("test text", None)
        assert text_of(found.train) == ("train text" if path == tmp_path else "")
    (tmp_path / "valid.txt").unlink()
    (tmp_path / "en").mkdir()
    (tmp_path / "train.txt.gz").rename(tmp_path / "en" / "train.txt.gz")
    corpus = load_corpus(tmp_path)
    assert (text_of(corpus.train), text_of(corpus.held_out), corpus.test) == ("train text", "test text", None)
    # Names that are no splits: nothing is held out by its name.
    (tmp_path / "more.txt").write_text("more")
    assert "test text" in text_of(load_corpus(tmp_path).train)


@pytest.mark.parametrize("kind", ["file", "folder", "lines", "valid", "splits", "topics"])
def test_a_split_that_a_text_does_not_have_is_refused(tmp_path, kind):
    path = {"file": "a.txt", "lines": "a.jsonl", "valid": "wiki.valid.tokens"}.get(kind)
    json_lines(tmp_path / "a.jsonl", DOCUMENTS)
    for name in ("a.txt", "wiki.valid.tokens", "folder/a.txt", "folder/b.txt", "splits/train.txt", "splits/valid.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text " * 9)
    text = None if kind == "topics" else tmp_path / (path or kind)
    name = "pydoc_data.topics" if text is None else text.name
    expected = "validation, which splits has" if kind == "splits" else f"none of {name}, which has no splits"
    with pytest.raises(ValueError, match=f"split: expected {expected}, got test"):
        load_corpus(text, split="test")


@pytest.mark.parametrize("name", ["c4-train.00000-of-01024.json", "c4-train.00000-of-01024.json.gz", "array.json"])
def test_json_lines_of_c4s_names_are_rows(tmp_path, name):
    plain = load_corpus(json_lines(tmp_path / "a.jsonl", DOCUMENTS))
    path = tmp_path / "c4" / name
    json_lines(path, DOCUMENTS, compress=gzip.compress if name.endswith("gz") else bytes)
    if name == "array.json":
        path.write_text(json.dumps([{"text": text} for text in DOCUMENTS]))
    assert load_corpus(path).digest == load_corpus(path.parent).digest == plain.digest
    # Beside others such a file is about them.
    (tmp_path / "dataset_info.json").write_text("{}")
    assert load_corpus(tmp_path).digest == plain.digest
    path.write_text('{\n  "text": "a"\n}')
    with pytest.raises(ValueError, match="line 1: expected a JSON object, got text that is not JSON"):
        load_corpus(path)


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_a_byte_order_mark_is_none_of_the_text(tmp_path, compress):
    for name, text in (("a", "x" * 18 + "yz"), ("b", "")):
        (tmp_path / f"{name}.txt").write_bytes(compress(b"\xef\xbb\xbf" + text.encode()))
    corpus = load_corpus(tmp_path / "a.txt")
    assert (text_of(corpus.train), text_of(corpus.held_out)) == ("x" * 18, "yz")
    assert load_corpus(tmp_path / "b.txt").train.numel() == 0


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"text": "a"}\n{"content": "b"}\n', r"a\.jsonl, line 2, 'text': expected an object with a text, got None"),
        ('{"text": "a"}\n\n["b"]\n', r"a\.jsonl, line 3, 'text': expected an object with a text, got list"),
        ('{"text": 7}\n', r"a\.jsonl, line 1, 'text': expected an object with a text, got 7"),
        ('{"text": "a"}\n{"text": "b"\n', r"a\.jsonl, line 2: expected a JSON object, got text that is not JSON"),
        ('{"text": "a\\ud800"}\n', r"a\.jsonl, line 1, 'text': expected whole characters, got '\\ud800'"),
    ],
)
def test_bad_rows_are_named(tmp_path, lines, message):
    (tmp_path / "a.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=message):
        load_corpus(tmp_path / "a.jsonl")


def test_texts_beside_rows_are_refused(tmp_path):
    json_lines(tmp_path / "a.jsonl", ["a"])
    (tmp_path / "b.txt").write_text("b")
    with pytest.raises(ValueError, match=r"text: expected texts or rows in .*, got both, b\.txt and a\.jsonl"):
        load_corpus(tmp_path)


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
@pytest.mark.parametrize("piece", [1, 3, 5, 1000])
def test_a_file_is_the_same_in_pieces_of_any_size(tmp_path, monkeypatch, piece, compress):
    content = ("äb\n☃ 😀 cdefg\n" * 9 + "ä" * 10 + "z").encode()
    (tmp_path / "a.txt").write_bytes(compress(content))
    monkeypatch.setattr("gistkit.train.documents.BLOCK", piece)
    cut = int(len(content) * 0.9)
    corpus = load_corpus(tmp_path / "a.txt")
    assert (bytes(corpus.train), bytes(corpus.held_out)) == (content[:cut], content[cut:])
    # The last tenth begins inside a character, which belongs to what is trained on.
    whole = len(content[: cut + 1].decode())
    letters = load_corpus(tmp_path / "a.txt", tokenizer=lambda text: [ord(letter) for letter in text])
    assert "".join(map(chr, letters.train)) == content.decode()[:whole]
    assert "".join(map(chr, letters.held_out)) == content.decode()[whole:]
    assert letters.digest == corpus.digest


@pytest.fixture
def large(monkeypatch):
    """Every text is large."""
    monkeypatch.setattr(data, "LARGE", 1)


def test_a_large_corpus_is_written_once_and_mapped(tmp_path, large, monkeypatch):
    path, tokenizer = json_lines(tmp_path / "a.jsonl", DOCUMENTS), byte_tokenizer()
    plain, cache = load_corpus(path, tokenizer=tokenizer), tmp_path / "cache"
    kept = load_corpus(path, tokenizer=tokenizer, cache=cache)
    assert kept.digest == plain.digest and kept.train.dtype == plain.train.dtype == torch.int32
    assert torch.equal(kept.train, plain.train) and torch.equal(kept.held_out, plain.held_out) and kept.test is None
    (place,) = (file for file in cache.iterdir() if file.is_dir())
    written = {file.name: file.stat().st_mtime_ns for file in place.iterdir()}
    assert written.keys() == {"corpus.json", "train.bin", "held_out.bin", "test.bin"}

    def read(*_):
        raise AssertionError("the text was read again")

    with monkeypatch.context() as patch:
        patch.setattr(data._Reading, "read", read)
        again = load_corpus(path, tokenizer=tokenizer, cache=cache)
    assert torch.equal(again.train, plain.train) and again.digest == plain.digest
    batches = [Pretraining(corpus, 3, 8, 20, seed=2) for corpus in (plain, again)]
    assert batches[0].identity == batches[1].identity
    for step in (4, 0):
        first, second = (each(step) for each in batches)
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert {file.name: file.stat().st_mtime_ns for file in place.iterdir()} == written
    # Another limit or text, and files that are not whole, are read.
    assert load_corpus(path, tokenizer=tokenizer, cache=cache, limit=50).train.numel() == 50
    passages = load_corpus(path, tokenizer=tokenizer, cache=cache, windows=Windows(0, 12))
    assert passages.digest != plain.digest and passages.train.numel() % 12 == 0
    (place / "train.bin").write_bytes(b"x")
    assert torch.equal(load_corpus(path, tokenizer=tokenizer, cache=cache).train, plain.train)
    json_lines(path, DOCUMENTS[:9])
    assert load_corpus(path, tokenizer=tokenizer, cache=cache).digest == load_corpus(path).digest != plain.digest


def test_what_cannot_be_known_again_leaves_no_file(tmp_path, large):
    path, cache = json_lines(tmp_path / "a.jsonl", DOCUMENTS), tmp_path / "cache"
    corpus = load_corpus(path, tokenizer=lambda text: list(text.encode()), cache=cache)
    assert text_of(corpus.train) == "\n\n".join(DOCUMENTS[3:]) and list(cache.iterdir()) == []
    bad = json_lines(tmp_path / "b.jsonl", [*DOCUMENTS, 7])
    with pytest.raises(ValueError, match=r"b\.jsonl, line 26, 'text'"):
        load_corpus(bad, cache=cache)
    assert not [file for file in cache.iterdir() if file.is_dir()]


READ = """
import sys
from gistkit.train import data, load_corpus
data.LARGE = 1
corpus = load_corpus(sys.argv[1], cache=sys.argv[2])
print(corpus.digest, int(corpus.train.long().sum()))
"""


@pytest.mark.slow
def test_processes_that_read_at_once_agree(tmp_path):
    path, cache = json_lines(tmp_path / "a.jsonl", DOCUMENTS * 200), tmp_path / "cache"
    started = [
        subprocess.Popen([sys.executable, "-c", READ, path, cache], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert len({process.communicate(timeout=300)[0] for process in started}) == 1
    assert len([file for file in cache.iterdir() if file.is_dir()]) == 1


MEASURED = """
import sys
from gistkit.evaluate import iter_questions
from gistkit.train import Packed, Windows, load_corpus
from tests.helpers.memory import peak_bytes
kind, path, cache = sys.argv[1:]
def read():
    if kind == "questions":
        return print(sum(1 for _ in iter_questions(path)))
    corpus = load_corpus(path, cache=cache, windows=Windows(4096, 1024) if kind == "windows" else None)
    print(corpus.train.numel() + corpus.held_out.numel())
    Packed(corpus, 4, 512)(3)
load_corpus(limit=10)
print(peak_bytes(read) >> 20)
"""


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["jsonl", "text", "windows", "mrqa", "squad"])
def test_200_megabytes_are_never_whole_in_memory(tmp_path, kind):
    # Random words, which gzip makes a third of.
    words = np.array(["the", "mill", "well", "rained", "on", "dry", "was", "stood.", "It", "grain", "river", "old"])
    size, paragraph = 200 << 20, " ".join(np.random.default_rng(0).choice(words, 20_000).tolist())
    path = tmp_path / {"text": "a.txt", "mrqa": "a.jsonl.gz", "squad": "a.json"}.get(kind, "a.jsonl.gz")
    asked = [{"question": "What?", "answers": ["rain"] if kind == "mrqa" else [{"text": "rain", "answer_start": 0}]}]
    row = {
        "text": paragraph + "\n",
        "mrqa": json.dumps({"context": paragraph, "qas": asked}) + "\n",
        "squad": json.dumps({"title": "a", "paragraphs": [{"context": paragraph, "qas": asked}]}) + ",",
    }.get(kind, json.dumps({"text": paragraph}) + "\n").encode()
    count = size // len(row) + 1
    with gzip.open(path, "wb", 1) if path.suffix == ".gz" else path.open("wb") as file:
        file.write(b'{"version": "1.1", "data": [' if kind == "squad" else b"")
        for number in range(count):
            file.write(row[:-1] if kind == "squad" and number == count - 1 else row)
        file.write(b"]}" if kind == "squad" else b"")
    name = {"mrqa": "questions", "squad": "questions"}.get(kind, kind)
    found, mebibytes = map(int, printed(MEASURED, name, path, tmp_path / "cache").split())
    if name == "questions":
        assert found == count
    elif name == "windows":
        assert found == count * 1024
    else:
        assert abs(found - size) < 0.02 * size
    # Whole, it would be 200 at least; the digest waits for 64, for which the held-out part takes 20.
    assert mebibytes < 90


def test_packed_rows_are_the_text_cut_one_after_another(tmp_path):
    corpus = load_corpus(json_lines(tmp_path / "a.jsonl", DOCUMENTS * 3))
    length, size, seed = 13, 4, 5
    batches = Packed(corpus, size, length, seed)
    text = bytes(corpus.train.tolist())
    oracle = [text[start : start + length] for start in range(0, len(text) - length + 1, length)]
    seen = []
    for step in range(2 * len(oracle) // size + 1):
        batch = batches(step)
        assert batch["input_ids"].shape == (size, 6) and batch["continuation_ids"].shape == (size, 7)
        seen += [bytes(row) for row in torch.cat(list(batch.values()), 1).tolist()]
    first, second = seen[: len(oracle)], seen[len(oracle) : 2 * len(oracle)]
    assert Counter(first) == Counter(second) == Counter(oracle)
    assert first != second != oracle != first
    # Runs that were begun go on with the same rows in later versions.
    order = np.random.default_rng([seed, 0]).permutation(len(oracle))
    assert first == [oracle[place] for place in order]
    assert batches(7)["input_ids"].tolist() == Packed(corpus, size, length, seed)(7)["input_ids"].tolist()
    assert [len(batch["input_ids"]) for batch in batches.held_out(6)] == [4, 2]
    assert bytes(batches.held_out(1)[0]["input_ids"][0].tolist()) in bytes(corpus.held_out.tolist())
    others = [Packed(corpus, size, length), Packed(corpus, size, length + 1, seed), Packed(corpus, 5, length, seed)]
    assert all(other.identity != batches.identity for other in others)
    with pytest.raises(ValueError, match="length: expected a whole number >= 2, got 1"):
        Packed(corpus, size, 1)
    with pytest.raises(ValueError, match="at least 100000 bytes in the held-out part"):
        Packed(corpus, size, 100_000)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 20])
def test_the_package_datasets_reads_a_folder_of_its_own(tmp_path, monkeypatch, limit):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    json_lines(tmp_path / "texts" / "train.jsonl", DOCUMENTS)
    json_lines(tmp_path / "texts" / "test.jsonl", ["final"])
    corpus = load_corpus(dataset=str(tmp_path / "texts"), limit=limit)
    # Its only other split is what choices are made on.
    assert text_of(corpus.held_out) == "final" and corpus.test is None
    assert text_of(corpus.train) == "\n\n".join(DOCUMENTS)[:limit]
    asked = {"context": "A mill.", "question": "What?", "answers": {"text": ["A mill"], "answer_start": [0]}}
    (tmp_path / "asked").mkdir()
    (tmp_path / "asked" / "validation.jsonl").write_text(json.dumps(asked))
    (found,) = read_questions(f"hf:{tmp_path / 'asked'}", "validation")
    assert found[1:] == ("A mill.", "What?", ("A mill",)) and found.where.endswith("validation[0]")
