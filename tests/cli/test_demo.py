"""gistkit demo: answers from a memory, beside those of the same model that reads the whole text."""

import logging
import re

import pytest

from gistkit.cli import main
from gistkit.cli.demo import FULL, MEMORY, Measured, _answers
from gistkit.compress import Memory
from tests.cli.test_cli import small_llama
from tests.helpers.models import byte_tokenizer

QUESTIONS = ["--question", "Who signed it?", "--question", "When?"]


@pytest.fixture
def asked(tmp_path):
    """The options of a small model, and of a text of 300 bytes."""
    model = small_llama(vocab_size=258, bos_token_id=257, hidden_size=64)
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer(start=True).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("The lease was signed by Ada Moe on 3 May. "[:30] * 10)
    files = {"text": "text.txt", "model": "model", "out": "out"}
    return ["demo", *(word for option, name in files.items() for word in (f"--{option}", str(tmp_path / name)))]


def test_answers_sizes_and_a_picture(asked, tmp_path, capsys, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assert main([*asked, *QUESTIONS]) == 0
    shown = capsys.readouterr().out
    assert "deprecated" not in caplog.text and "wrong" not in shown
    memory = Memory.load(tmp_path / "out" / "report.gist")
    assert memory.context_lengths == (301,) and f"301 tokens -> {memory.lengths[0]} memory tokens" in shown
    assert shown.count("> Who signed it?\n") == shown.count("> When?\n") == 1
    # 2 x layers x tokens x width x 4 bytes, and in memory what the selection keeps of them.
    whole = 2 * 2 * 301 * 64 * 4
    rows = dict(re.findall(r"^\| (\w[\w ,]*?) +\| \d+ +\| ([\d.]+) MB", shown, re.MULTILINE))
    assert float(rows["full text"]) == float(rows["full text, KV cache kept"]) == pytest.approx(whole / 1e6, abs=0.05)
    assert memory.nbytes <= 0.3 * whole and float(rows["memory"]) <= 0.1
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_tokens_after_the_window_are_in_all_sizes(asked, capsys):
    """Of 301 tokens 101 are compressed to 26, BOS among both, and 200 are read by every way to answer."""
    words = ("--method", "avgpool", "--ratio", "4", "--option", "window=100")
    assert main([*asked, *QUESTIONS[:2], *words]) == 0
    shown = capsys.readouterr().out
    assert "301 tokens -> 26 memory tokens and 200 kept as they are (" in shown
    rows = dict(re.findall(r"^\| (\w[\w ,]*?) +\| (\d+ +\| [\d.]+) MB", shown, re.MULTILINE))
    (whole, full), (kept, memory) = (map(float, rows[name].split("|")) for name in ("full text", "memory"))
    assert (whole, kept) == (301, 226) and memory == pytest.approx(full * 226 / 301, abs=0.06)


@pytest.mark.slow
def test_heads_that_share_take_what_they_keep(asked, tmp_path, capsys):
    assert main([*asked, *QUESTIONS, "--option", "shares=all", "--option", "by=snapkv"]) == 0
    shown = capsys.readouterr().out
    memory = Memory.load(tmp_path / "out" / "report.gist")
    assert "301 tokens -> 75 memory tokens" in shown and memory.lengths[0] > 75
    # 2 x layers x tokens x width, in the file's bfloat16.
    assert sum(tensor.nbytes for tensor in memory.tensors) == memory.nbytes == 2 * 2 * 75 * 64 * 2


def test_a_wrong_answer_about_the_demo_s_report_is_named():
    right = {"Who?": "Ines Moreau", "When?": "6 May", "How much?": "8200"}
    text = Measured(["Ines Moreau", "not in the text", "8200"], 1.0, 1)
    ways = {FULL: text, MEMORY: Measured(["Ines Moreau", "2 March", "8200 dollars"], 1.0, 1)}
    assert _answers(right, ways).splitlines() == [
        "> Who?",
        "Ines Moreau",
        "> When?",
        "2 March    (wrong: 6 May; from the full text: not in the text)",
        "> How much?",
        "8200 dollars    (from the full text: 8200)",
        "",
        "2 of 3 answers are right; a larger model makes fewer mistakes",
    ]


def test_own_text_and_own_questions_come_together(asked, capsys):
    assert main(asked) == 2
    assert "--question: expected it with --text and only then" in capsys.readouterr().err
