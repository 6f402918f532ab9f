"""The command `gistkit nuggets`: pages, pictures and the count of what a Dodo keeps."""

import re

import pytest
from transformers import AutoModelForCausalLM

from gistkit.options.models import new_compressor
from tests.cli.test_cli import TEXT, folder, run  # noqa: F401 - fixtures
from tests.helpers.models import byte_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("parts", [1, 3])
def test_the_tokens_that_dodo_keeps(run, folder, tmp_path, parts):  # noqa: F811
    model = AutoModelForCausalLM.from_pretrained(folder)
    dodo = new_compressor(model, "dodo", ratio=4, layer=1, lora=2, part=-(-len(TEXT) // parts)).eval()
    dodo.save_pretrained(tmp_path / "dodo")
    new_compressor(model, "avgpool", ratio=4, lora=2).save_pretrained(tmp_path / "avgpool")
    text_file = tmp_path / "a.txt"
    text_file.write_text(TEXT)
    status, shown, complaints = run("nuggets", text_file, "--compressor", tmp_path / "dodo")
    assert status == 0, complaints
    ids, count = byte_tokenizer()(TEXT)["input_ids"], -(-len(TEXT) // 4)
    kept = [TEXT[place - 1] for place in dodo.encode(ids).positions[0, 1:].tolist()]
    assert len(dodo.part_ends(ids)) >= parts and len(kept) == count
    assert f"{count} of {len(TEXT)} tokens kept, {len(TEXT) / count:.1f}x" in shown
    assert (tmp_path / "a.html").read_text().count("<mark") >= count
    assert (tmp_path / "a.html").read_text().startswith("<!DOCTYPE html>")
    # The table counts what the memory holds.
    first = shown.splitlines()[4].split("|")
    assert first[1].strip() == repr(max(kept, key=lambda it: (kept.count(it), TEXT.count(it))))
    assert float(first[2]) == pytest.approx(max(map(kept.count, kept)) / count, abs=5e-4)
    page = tmp_path / "c.html"
    run("nuggets", "-", "-o", page, "--compressor", tmp_path / "dodo", stdin="naïve 日本")
    part = page.read_text(encoding="utf-8").split("pre-wrap")[1]
    shown_text = re.sub(r"<[^>]*aria-hidden.*?</span>|<[^>]+>", "", part)
    assert "naïve 日本" in shown_text and "\ufffd" not in shown_text
    picture = tmp_path / "b.png"
    assert run("nuggets", "-", "-o", picture, "--compressor", tmp_path / "dodo", stdin=TEXT)[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    for words, message in (
        ((text_file, "--compressor", tmp_path / "avgpool"), "--compressor: expected a dodo compressor, .* got avgpool"),
        ((text_file, "-o", "a.txt", "--compressor", tmp_path / "dodo"), "-o: expected a file that ends in .html or"),
        (("-", "--compressor", tmp_path / "dodo"), "-o: expected a file name for the picture of standard input"),
    ):
        status, _, complaints = run("nuggets", *words, stdin=TEXT)
        assert status == 2 and re.search(message, complaints), complaints
