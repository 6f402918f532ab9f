"""What README, guide and results claim: code runs and does what it says, tables are those of committed results."""

import io
import re
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import gistkit
from gistkit import cli
from gistkit.compress import AvgPool, Compressor, Memory
from gistkit.hf import attach
from tests.helpers.models import byte_tokenizer, tiny_llama
from tests.helpers.train_worker import evaluations, train

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    name: (ROOT / name).read_text()
    for name in ("README.md", "docs/quickstart.md", "docs/guide.md", "benchmarks/results/README.md")
}
README = PAGES["README.md"]
DOCS = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")} - {*PAGES, "docs/contents.md"}
BLOCKS = [block for page in PAGES.values() for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]


def example(words):
    """The one example with these words."""
    (found,) = (block for block in BLOCKS if words in block)
    return found


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_first_example_compresses_any_model(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.txt").write_text("The budget of the repair is 8200 dollars. " * 8)
    tokenizer, model = byte_tokenizer(start=True), tiny_llama(vocab_size=258, bos_token_id=257)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda name: model)
    monkeypatch.setattr(Compressor, "tokenizer", tokenizer)
    shown = []
    exec(re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)[0], {"print": shown.append})
    memory = Memory.load("report.gist")
    assert memory.full_cache_bytes >= 3.5 * memory.nbytes and len(shown) == 1 and isinstance(shown[0], str)


def test_the_kernel_example_equals_dense_attention():
    names = {}
    exec(example("gk.rope"), names)
    torch.testing.assert_close(names["out"], names["same"], rtol=1e-4, atol=1e-5)
    assert names["layout"].dense_mask().shape == (names["plan"].num_keys,) * 2


def test_the_compressor_example_runs():
    names = {}
    exec(example('losses=("ae", "lm", "compression")'), names)
    assert names["answer"].shape == (2, 10) and names["memory"].num_tokens == 60


def test_the_in_place_example_runs_and_ratio_1_is_the_whole_context():
    names = {}
    exec(example("GistPool(model, ratio=5, losses"), names)
    compressor, memory = names["compressor"], names["memory"]
    assert names["answer"].shape == (2, 10) and memory.lengths == (51, 51)
    assert [group["lr"] for group in names["optimizer"].param_groups] == pytest.approx([1e-4, 3e-4])
    assert set(compressor.adapters.names) == {"text", "memory"}
    model, text = names["LlamaForCausalLM"](names["model"].config).double(), names["text"]
    whole = AvgPool(model, ratio=1)
    ours = whole.decode(whole.encode(text[:, :200]), "lm", text[:, 200:])
    with attach(model), whole.using(None):
        ids = torch.cat([torch.full((2, 1), whole.bos_token), text], 1)
        expected = model.get_decoder()(ids).last_hidden_state[:, 200:]
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


def test_the_start_of_gists_example_comes_near_the_means():
    names = {}
    exec(example("start_as_means("), names)
    assert len(names["errors"]) == 2 and all(0 < error < 0.5 for error in names["errors"])
    assert [group["lr"] for group in names["optimizer"].param_groups] == pytest.approx([1e-3, 1e-4])
    assert list(names["compressor"].adapters.names) == ["text"] and names["compressor"].copies is not None


def test_the_dodo_example_keeps_nuggets_and_reads_on():
    names = {}
    exec(example("MixedResolution("), names)
    compressor, reader, text = (names[name] for name in ("compressor", "reader", "text"))
    assert names["answer"].shape == (2, 10)
    assert names["memory"].lengths == (26, 26)
    assert all(parameter.grad.abs().max() > 0 for parameter in compressor.scorer.parameters())
    nuggets = reader.nuggets(reader.rows(text))
    assert int(nuggets.sum()) == 50
    whole = reader.hidden(reader.rows(text))
    torch.testing.assert_close(names["hidden"], whole[:, 201], rtol=1e-4, atol=1e-4)
    # BOS, nuggets before the recent tokens, and these: of token 201 those from 144 on.
    held = (1 + nuggets[:, 1:144].sum(1) + 58).tolist()
    assert list(names["stream"].states) == held


def test_the_image_example_answers_two_questions():
    names = {}
    exec(example("VoCo("), names)
    compressor, memory = names["compressor"], names["memory"]
    assert names["question"] == [[30, 31, 32]] and names["answers"].shape == (2, 10)
    assert memory.lengths == (6,) and memory.context_lengths == (18,)
    assert compressor.memory_embeddings.grad.abs().max() > 0
    assert not [name for name, _ in compressor.trainable() if "vision_tower" in name or "projector" in name]


def test_the_seqpe_example_trains_and_is_equal_to_the_plain_form():
    names = {}
    exec(example("SeqPE"), names)
    torch.testing.assert_close(names["encoded"], names["same"], rtol=1e-4, atol=1e-5)
    assert all(parameter.grad is not None for parameter in names["model"].parameters())
    assert names["longer"].shape == (8, 240)


def test_the_conversation_example_reads_on_and_names_passages():
    names = {}
    exec(example("Conversation"), names)
    conversation, first, second = (names[name] for name in ("conversation", "first", "second"))
    assert conversation.turns == 2 and len(conversation.text) == 9 + 7 + len(first) + len(second)
    passages = names["passages"]
    assert len(passages) == 3 and all(passage.end - passage.start == 40 for passage in passages)
    assert passages[0].share >= passages[1].share >= passages[2].share > 0


def test_the_callback_example_ends_a_run_at_a_loss(tmp_path):
    names = {}
    exec(example("GoodEnough"), names)
    with evaluations({0: 5.0, 1: 1.6, 2: 1.4}):
        assert train(tmp_path, callbacks=[names["GoodEnough"]()], eval_every=1).steps == 2


def test_every_example_is_covered():
    assert len(BLOCKS) == 11, "a new example needs a test of what it claims"


@pytest.mark.slow
def test_tables_and_pictures_are_those_of_the_committed_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.setattr(sys, "argv", ["readme.py", "--check"])
    assert import_module("readme").main() == 0, "run: python benchmarks/readme.py"


@pytest.mark.parametrize("name", [*PAGES, *sorted(DOCS), "benchmarks/README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_lead_somewhere(name):
    page = (ROOT / name).read_text()
    for picture, path in re.findall(r"(!?)\[[^\]]*\]\(([^)]*)\)", page):
        if path.startswith("https://"):
            continue
        path, _, section = path.partition("#")
        target = ((ROOT / name).parent / path) if path else ROOT / name
        assert target.exists(), path
        assert not picture or target.read_bytes().startswith(b"\x89PNG"), path
        if section:
            titles = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert section in anchors, section


@pytest.mark.slow
def test_every_folder_of_the_table_is_an_attribute_of_the_package():
    page = (ROOT / "docs" / "packages.md").read_text()
    rows = [row.split("|")[1] for row in page.splitlines() if row.startswith("| `gistkit.")]
    named = {name for row in rows for name in re.findall(r"`gistkit\.(\w+)`", row)}
    assert {"compress", "viz", "train"} <= named <= set(dir(gistkit))
    code = "import sys, gistkit as gk; before = set(sys.modules)\n"
    code += f"for name in {sorted(named)}: assert getattr(gk, name) is sys.modules[f'gistkit.{{name}}']\n"
    code += "print(*sorted(name for name in before if name.count('.') == 1 and name.startswith('gistkit.')))\n"
    code += "print([name for name in dir(gk) if not hasattr(gk, name)])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    # `import gistkit` by itself loads none of them, and each name that dir() has is there.
    assert shown.stdout == "\n[]\n", shown.stdout + shown.stderr


@cache
def help_of(*command):
    """What `gistkit COMMAND --help` prints."""
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(out), suppress(SystemExit):
        cli.main([*command, "--help"])
    return out.getvalue()


@pytest.mark.parametrize("name", [*PAGES, *sorted(DOCS), "CONTRIBUTING.md"])
def test_commands_have_the_options_that_a_page_names(name):
    page = (ROOT / name).read_text().replace(" \\\n", " ")
    for command, rest in re.findall(r"gistkit ((?:view |study )?[a-z-]+)((?: [^`\n]*)?)", page):
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", rest):
            assert re.search(rf"{option}(?![\w-])", help_of(*command.split())), f"gistkit {command} {option}"


def test_the_readme_is_one_page():
    assert len(README.encode()) <= 7000
