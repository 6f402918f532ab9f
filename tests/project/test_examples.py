"""The scripts in examples/: each runs with small settings, and prints what it promises."""

import io
import json
import re
import runpy
import sys
from contextlib import redirect_stdout
from importlib.resources import files
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the hf extra is not installed")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples"


def run(script, *arguments):
    """What a script prints."""
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(shown):
        patch.setattr(sys, "argv", [script, *map(str, arguments)])
        runpy.run_path(str(FOLDER / script), run_name="__main__")
    return shown.getvalue()


def number(pattern, text):
    (found,) = re.findall(pattern, text)
    return float(found)


def test_the_list_is_complete_and_each_script_says_how_to_run_it():
    scripts = sorted(path.name for path in FOLDER.glob("*.py"))
    listed = re.findall(r"^\| \[(\w+\.py)\]\(\1\)", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert scripts and sorted(listed) == scripts
    for name in scripts:
        text = (FOLDER / name).read_text()
        assert f"python examples/{name}" in text.split('"""')[1], name
    stars = set(re.findall(r"^\| \[(\w+\.py)\]\S+ \*", (FOLDER / "README.md").read_text(), re.MULTILINE))
    assert stars == {name for name in scripts if "load_smollm2" in (FOLDER / name).read_text()}
    tests = Path(__file__).read_text()
    assert all(f'run("{name}"' in tests for name in scripts), "a script needs a test of what it prints"


@pytest.mark.nightly
def test_a_text_is_asked(cached_smollm2):
    shown = run("ask_a_text.py")
    tokens, memory = map(int, re.search(r"(\d+) tokens -> (\d+) memory tokens", shown).groups())
    assert tokens == 146 and memory <= tokens / 4 + 1
    assert "> Who started the survey?\nInes Moreau\n" in shown


@pytest.mark.nightly
def test_a_conversation_names_its_sources(cached_smollm2):
    shown = run("conversation.py")
    assert re.search(r"> Who started the survey\?\nInes Moreau\n  from: .*Ines Moreau", shown)
    assert shown.endswith("of memory\n") and "2 turns" in shown


@pytest.mark.nightly
def test_a_folder_is_asked_by_name(cached_smollm2):
    shown = run("ask_a_folder.py")
    assert "3 documents" in shown and "museum.txt> Who is the director of the museum?\nMarta Silva\n" in shown


@pytest.mark.nightly
def test_a_memory_is_a_cache_of_transformers(cached_smollm2):
    shown = run("generate_with_transformers.py")
    assert "146 tokens -> a cache of 74 states" in shown and "\nInes Moreau\n" in shown
    assert "{'answers': ['14 March']}" in shown


@pytest.mark.nightly
def test_a_memory_answers_more_than_no_context(cached_smollm2, tmp_path):
    context = files("gistkit.cli").joinpath("demo.txt").read_text("utf-8")
    row = {"context": context, "question": "Who started the survey?", "answers": ["Ines Moreau"]}
    (tmp_path / "dev.jsonl").write_text(json.dumps(row))
    shown = run("evaluate_on_questions.py", tmp_path / "dev.jsonl")
    losses = [number(rf"{name} *: .* loss (\S+) nats", shown) for name in ("memory", "no context")]
    assert "1 questions" in shown and losses[0] < losses[1]
    caches = [number(rf"{name} *: .* cache (\S+) MiB", shown) for name in ("memory", "full context")]
    assert caches[0] < caches[1]


@pytest.mark.nightly
def test_a_training_learns_and_goes_on(tmp_path):
    (tmp_path / "book.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    shown = run("train_on_your_text.py", tmp_path / "book.txt", 12)
    assert "step 0 of 6" in shown and "step 6 of 12" in shown and "12 steps" in shown
    losses = [float(loss) for loss in re.findall(r"held-out loss (\S+) nats", shown)]
    assert losses[-1] < losses[0] - 1
    assert "40 bytes -> 8 memory tokens" in shown


@pytest.mark.nightly
@pytest.mark.parametrize("arguments", [(), ("icae",)])
def test_ones_own_model_learns(arguments):
    shown = run("your_own_model.py", *arguments)
    first, last = (number(rf"step {step}: .* loss (\S+)\n", shown) for step in (" 1", "30"))
    assert last < first - 0.2 and "saved and loaded: 64 tokens -> " in shown
    trained, whole = (int(count.replace(",", "")) for count in re.search(r"(\S+) of (\S+) parameters", shown).groups())
    assert trained < whole / 2


@pytest.mark.slow
def test_epl_puts_memory_tokens_where_their_tokens_are(tmp_path):
    shown = run("position_layouts.py", tmp_path / "pictures")
    assert "EPL: context 1..20, memory tokens at [3, 8, 13, 18]" in shown
    assert "DPL: context 0..19, memory tokens at [20, 21, 22, 23]" in shown
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {"layouts-dpl.png", "layouts-epl.png"}


def test_the_fused_op_is_the_line_of_torch():
    shown = run("fused_attention.py", 512)
    assert number(r"largest difference: (\S+)", shown) < 1e-5 and re.search(r"plan: \S+ ms, \S+ times as fast", shown)


@pytest.mark.nightly
def test_a_stream_holds_few_states():
    shown = run("long_stream.py", 800)
    held = [int(states) for states in re.findall(r"850 tokens read: +(\d+) states", shown)]
    # BOS, up to 159 recent tokens, and an eighth of those before them.
    assert len(held) == 2 and all(states < 1 + 159 + 850 / 8 + 50 for states in held)
    assert "the plain model's cache: 851 states" in shown
