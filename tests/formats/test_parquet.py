"""Questions and texts in Parquet files, as the Hugging Face hub keeps data sets."""

import gzip
import json
import sys

import pytest

from gistkit.formats import question_sets, read_questions
from gistkit.train import load_corpus
from tests.train.test_corpora import DOCUMENTS, json_lines, text_of, wikitext

pyarrow = pytest.importorskip("pyarrow")

SQUAD = [
    {"id": str(number), "title": "Wells", "context": f"The well {number} is dry.", "question": "Which is dry?",
     "answers": {"text": [f"The well {number}", f"well {number}"], "answer_start": [0, 4]}}
    for number in range(2500)
]  # fmt: skip


def parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=1000)
    return path


@pytest.fixture(autouse=True, scope="module")
def _parquet_is_imported():
    __import__("pyarrow.parquet")


def test_questions_are_those_of_the_same_json_lines(tmp_path):
    path = parquet(tmp_path / "validation-00000-of-00001.parquet", SQUAD)
    lines = tmp_path / "same.jsonl.gz"
    lines.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in SQUAD).encode()))
    found, wanted = list(read_questions(path)), list(read_questions(lines))
    assert [each[1:] for each in found] == [each[1:] for each in wanted]
    assert found[-1] == (f"{path}, row 2499", "The well 2499 is dry.", "Which is dry?", ("The well 2499", "well 2499"))
    assert [each.name for each in question_sets([tmp_path])] == ["same", "validation-00000-of-00001"]


def test_errors_name_the_row_and_the_field(tmp_path):
    path = parquet(tmp_path / "a.parquet", [*SQUAD[:3], SQUAD[3] | {"question": None}])
    with pytest.raises(ValueError, match=r"a\.parquet, row 3, 'question': expected a text, got None"):
        list(read_questions(path))


@pytest.mark.parametrize("damage", ["end", "pages", "nothing", "text"])
def test_damaged_files_are_named(tmp_path, damage):
    path = parquet(tmp_path / "a.parquet", SQUAD)
    content = path.read_bytes()
    flipped = content[:4] + bytes(byte ^ 255 for byte in content[4:60]) + content[60:]
    path.write_bytes({"end": content[:-20], "pages": flipped, "nothing": b"", "text": b'{"a": 1}'}[damage])
    with pytest.raises(ValueError, match=r"a\.parquet: expected whole Parquet data, got damaged data"):
        list(read_questions(path))


def test_without_its_package(tmp_path, monkeypatch):
    path = parquet(tmp_path / "a.parquet", SQUAD[:1])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"a\.parquet: Parquet needs pyarrow; run pip install 'gistkit\[parquet\]'"):
        list(read_questions(path))


def test_texts_are_those_of_the_same_json_lines(tmp_path):
    rows = [{"text": text} for text in DOCUMENTS]
    corpus = load_corpus(parquet(tmp_path / "a.parquet", rows))
    same = load_corpus(json_lines(tmp_path / "b.jsonl", DOCUMENTS))
    assert text_of(corpus.train) == text_of(same.train) and text_of(corpus.held_out) == text_of(same.held_out)
    assert corpus.digest == same.digest
    with pytest.raises(ValueError, match=r"c\.parquet, row 0, 'text': expected an object with a text, got None"):
        load_corpus(parquet(tmp_path / "c.parquet", [{"body": "x"}]))


def test_the_hubs_files_are_its_official_splits(tmp_path):
    splits = {"train": ("T", 5), "validation": ("V", 2), "test": ("F", 1)}
    for split, (name, articles) in splits.items():
        lines = wikitext(name, articles).splitlines(keepends=True)
        parquet(tmp_path / f"{split}-00000-of-00001.parquet", [{"text": line} for line in lines])
    corpus = load_corpus(tmp_path)
    for ids, (name, articles) in zip((corpus.train, corpus.held_out, corpus.test), splits.values(), strict=True):
        assert text_of(ids).count(" begins .") == articles and f" = {name} 0 = " in text_of(ids)
