"""CONTRIBUTING.md and docs/your-own-method.md: the example method passes its tests; files that they name exist."""

import inspect
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gistkit
from gistkit import cli, layouts
from gistkit.cli import view_layout
from gistkit.layouts.builders import EXAMPLES
from tests.helpers import rules
from tests.layouts import test_builders as builders
from tests.project import test_site

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
METHOD = (ROOT / "docs/your-own-method.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", METHOD, re.DOTALL)


def block(beginning: str) -> str:
    (found,) = (block for block in BLOCKS if block.startswith(beginning))
    return found


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The example layout with its rule, which are registered for one test."""
    for registry in (layouts.BUILDERS, EXAMPLES, rules.RULES, rules.CASES):
        monkeypatch.setitem(registry, "Relay" if registry is EXAMPLES else "relay", None)
    names: dict = {}
    exec(block('"""Relay: each window'), names)
    exec(block("@rule("), dict(vars(rules)))
    monkeypatch.setattr(layouts, "relay", names["relay"], raising=False)
    return names["relay"]


def test_the_example_layout(example: Callable[..., Any]) -> None:
    builders.test_a_builder_follows_its_rule("relay")
    builders.test_an_argument_below_what_the_docstring_says_is_named("Relay")
    assert len(rules.CASES["relay"]) == 4


def test_the_example_layout_is_in_the_picture_of_all_methods(example: Callable[..., Any]) -> None:
    pytest.importorskip("matplotlib", reason="the viz extra is not installed")
    from gistkit.viz.gallery import all_methods

    assert all_methods()["Relay"].positions.tolist() == [*range(20)]


def test_the_example_command_takes_what_the_example_layout_takes(example: Callable[..., Any]) -> None:
    words = view_layout.example("relay").split()
    given = vars(cli.parser().parse_args(["view", "layout", "relay", *words]))
    assert [given[argument] for argument in inspect.signature(example).parameters] == [12, 4, 4]


@pytest.fixture
def relay(example: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> type:
    """The example compressor, which is registered for one test."""
    pytest.importorskip("peft", reason="the hf extra is not installed")
    from gistkit.compress.config import REGISTRY

    compressor = {"__name__": __name__}
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


def test_the_example_compressor_is_its_rule(relay: type) -> None:
    from tests.helpers.in_place_oracle import states, unsettle
    from tests.helpers.models import tiny_llama

    made = unsettle(relay(tiny_llama(), ratio=3, bos_token=1, lora=2).double())
    ids, text = torch.randint(2, 50, (1, 13)), torch.randint(2, 50, (1, 6))
    ours = made.decode(made.encode(ids), "lm", text)[0]
    torch.testing.assert_close(ours, states(made, ids[0].tolist(), text[0].tolist()), rtol=1e-9, atol=1e-9)


def test_the_example_page(relay: type, monkeypatch: pytest.MonkeyPatch) -> None:
    import gistkit.compress

    monkeypatch.setattr(gistkit.compress, "Relay", relay, raising=False)
    (page,) = re.findall(r"````markdown\n(.*?)````", METHOD, re.DOTALL)
    test_site.check_page(page)
    assert test_site.HEAD.match(page)


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
    """Those of the README and of the workflows too."""
    rules, others = (ROOT / "Makefile").read_text(), [ROOT / "README.md", *ROOT.glob(".github/workflows/*.yml")]
    texts = "\n".join([PAGE, METHOD, *(path.read_text() for path in others)])
    for target in set(re.findall(r"\bmake ([a-z][\w-]*)", texts)):
        assert re.search(rf"^{target}:", rules, re.MULTILINE), target


def test_the_citation_is_of_this_package() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML, which transformers brings, is not installed")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(cited["version"]) == gistkit.__version__ and cited["license"] == project["license"]
    assert cited["title"] == project["name"] and len(cited["references"]) == 5
