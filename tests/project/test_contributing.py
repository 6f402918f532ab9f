"""CONTRIBUTING.md and docs/your-own-method.md: the example method passes its tests; files that they name exist."""

import inspect
import re
import tomllib
from pathlib import Path

import pytest
import torch

import gistkit
from gistkit import cli, layouts
from gistkit.cli import view_layout
from tests.layouts import test_builders as builders

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
METHOD = (ROOT / "docs/your-own-method.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", METHOD, re.DOTALL)


def block(beginning: str) -> str:
    (found,) = (block for block in BLOCKS if block.startswith(beginning))
    return found


def test_the_example_method(monkeypatch: pytest.MonkeyPatch) -> None:
    example: dict = {}
    exec(block('"""Relay: each window'), example)
    monkeypatch.setattr(layouts, "relay", example["relay"], raising=False)
    # Its test, as it stands at the end of test_layout_builders.py.
    test = dict(vars(builders))
    exec(block("@pytest.mark.parametrize"), test)
    for case in test["test_relay"].pytestmark[0].args[1]:
        test["test_relay"](*case)
    with pytest.raises(ValueError, match="relay: expected ratio >= 1, got 0"):
        example["relay"](3, 0)


@pytest.fixture
def relay(monkeypatch: pytest.MonkeyPatch) -> type:
    """The example compressor, which is registered for one test."""
    pytest.importorskip("peft", reason="the hf extra is not installed")
    from gistkit.compress.config import REGISTRY

    layout, compressor = {}, {"__name__": __name__}
    exec(block('"""Relay: each window'), layout)
    monkeypatch.setattr(layouts, "relay", layout["relay"], raising=False)
    monkeypatch.setitem(REGISTRY, "relay", None)
    exec(block('"""Relay: windows'), compressor)
    return compressor["Relay"]


def test_the_example_compressor(relay: type, tmp_path: Path) -> None:
    from gistkit.compress import Compressor
    from tests.helpers.models import tiny_llama

    assert issubclass(relay, Compressor) and relay.method == "relay"
    assert {"ratio", "offset", "separate", "gists", "losses", "lora"} <= relay.config_class.names()
    made, ids = relay(tiny_llama(), ratio=3, bos_token=1, lora=2), torch.randint(2, 50, (1, 13))
    made.save_pretrained(tmp_path)
    read = Compressor.from_pretrained(tmp_path, tiny_llama())
    assert type(read) is relay and read.settings == made.settings
    torch.testing.assert_close(read.encode(ids).tensors, made.encode(ids).tensors)


def test_the_example_oracle_is_the_example_compressor(relay: type) -> None:
    from tests.helpers.models import tiny_llama

    oracle: dict = {}
    source, ending = (ROOT / "tests/helpers/in_place_oracle.py").read_text(), "    return ctx, memory, text, mask\n"
    assert source.count(ending) == 1
    exec(source.replace(ending, block("    if method ==") + ending), oracle)
    made = oracle["unsettle"](relay(tiny_llama(), ratio=3, bos_token=1, lora=2).double())
    ids, text = torch.randint(2, 50, (1, 13)), torch.randint(2, 50, (1, 6))
    ours = made.decode(made.encode(ids), "lm", text)[0]
    torch.testing.assert_close(ours, oracle["states"](made, ids[0].tolist(), text[0].tolist()), rtol=1e-9, atol=1e-9)


def test_the_example_command_takes_what_the_example_method_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    example: dict = {}
    exec(block('"""Relay: each window'), example)
    (line,) = eval("{" + block('    "relay":') + "}").items()
    name, words = line
    monkeypatch.setattr(layouts, name, example[name], raising=False)
    monkeypatch.setitem(view_layout.BUILDERS, *line)
    given = vars(cli.parser().parse_args(["view", "layout", name, *words.split()]))
    assert [given[argument] for argument in inspect.signature(example[name]).parameters] == [64, 8, 16]


def test_files_that_are_named_are_there() -> None:
    named = set(re.findall(r"`((?:python|tests|csrc|docs)/[\w/.]+\.\w+)`", PAGE + METHOD))
    assert len(named) > 9 and not [path for path in named if not (ROOT / path).exists() and "relay" not in path]


def test_the_tree_is_true() -> None:
    """Its folders are there, and it leaves out none of the package, of csrc or of the tests."""
    tree: dict[str, set[str]] = {}
    above: list[str] = []
    for line in PAGE.split("## The tree\n\n```\n")[1].split("\n```")[0].split("\n"):
        name = line.split()[0].rstrip("/")
        above[(len(line) - len(line.lstrip())) // 2 :] = [name]
        assert (ROOT / "/".join(above)).is_dir(), line
        tree.setdefault("/".join(above[:-1]), set()).add(name)
    for folder in ("python/gistkit", "python/gistkit/nn", "python/gistkit/compress", "csrc"):
        sources = [
            path.relative_to(ROOT / folder) for end in ("py", "h", "cpp") for path in (ROOT / folder).rglob(f"*.{end}")
        ]
        assert tree[folder] == {path.parts[0] for path in sources if len(path.parts) > 1}
    tests = {path.parent.name for path in (ROOT / "tests").glob("*/*.py")}
    assert tree["tests"] <= tests <= tree["tests"] | tree["python/gistkit"]


def test_commands_of_make_are_there() -> None:
    rules = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"make ([a-z]+)\b", PAGE + METHOD)):
        assert re.search(rf"^{target}:", rules, re.MULTILINE), target


def test_the_citation_is_of_this_package() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML, which transformers brings, is not installed")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(cited["version"]) == gistkit.__version__ and cited["license"] == project["license"]
    assert cited["title"] == project["name"] and len(cited["references"]) == 5
