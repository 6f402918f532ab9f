"""The documents that --documents takes, of files, rows and articles."""

import json

import pytest

from gistkit_lab.evaluate.command import whole_documents


def test_whole_documents_are_those_of_the_files_and_none_is_held_out(tmp_path):
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "train.jsonl").write_text("".join(json.dumps({"text": f"Document {n}."}) + "\n" for n in range(3)))
    (rows / "test.jsonl").write_text(json.dumps({"text": "Last\nlines."}) + "\n")
    assert list(whole_documents(rows)) == ["Last\nlines.", *(f"Document {n}." for n in range(3))]
    wiki = tmp_path / "wiki.test.tokens"
    wiki.write_text(" \n = One = \n \n text one \n \n = Two = \n \n text two \n")
    assert [document.split() for document in whole_documents(wiki)] == [
        ["=", name, "=", "text", name.lower()] for name in ("One", "Two")
    ]
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in ("b", "a"):
        (texts / f"{name}.txt").write_text(f"{name} and more")
    assert list(whole_documents(texts)) == ["a and more", "b and more"]
    with pytest.raises(FileNotFoundError, match=r"text: expected a file or a folder, got .*none"):
        list(whole_documents(tmp_path / "none"))
