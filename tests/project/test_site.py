"""The site of documentation: code of its pages runs, names and pages are all there, its directives refuse errors."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import gistkit

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CONTENTS = (DOCS / "contents.md").read_text()
METHODS = sorted(path.stem for path in (DOCS / "methods").glob("*.md") if path.stem != "index")
PACKAGES = [f"gistkit.{name}" for name in gistkit._PACKAGES if hasattr(import_module(f"gistkit.{name}"), "__all__")]
PACKAGES += ["gistkit_lab.tables", "gistkit_serve.server", "gistkit_serve.store"]
PAGES = {"gistkit_serve.server": "serve"}


# What a method's page says of itself before its title.
HEAD = re.compile(r"---\nreads: [^|]+\nlearns: [^|]+\n---\n\n# ")


def extension(name, monkeypatch):
    """A module of docs/extensions, or a skip without Sphinx."""
    pytest.importorskip("sphinx", reason="the docs extra is not installed")
    monkeypatch.syspath_prepend(str(DOCS / "extensions"))
    return import_module(name)


@pytest.mark.parametrize("name", METHODS)
def test_the_lines_of_a_method_run_and_print_what_they_say(name):
    pytest.importorskip("peft", reason="the hf extra is not installed")
    check_page((DOCS / "methods" / f"{name}.md").read_text())


def check_page(page):
    """Runs the Python of a method's page and compares what it prints with what it says that it prints."""
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    torch.manual_seed(0)
    shown: list = []
    names: dict = {"print": lambda *values: shown.append(" ".join(map(str, values)))}
    exec(code, names)
    said = re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)
    assert said and [line for line in shown if line in said] == said
    if isinstance(names.get("answer"), torch.Tensor):
        assert names["answer"].shape[-1] == 10


def test_the_overview_compresses_at_any_ratio_and_budget():
    pytest.importorskip("peft", reason="the hf extra is not installed")
    from gistkit.compress import Select
    from tests.helpers.models import byte_tokenizer, tiny_llama

    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "methods/index.md").read_text(), re.DOTALL)
    compressor = Select(tiny_llama(vocab_size=258, bos_token_id=257), ratio=4, by="key_norm")
    compressor.tokenizer = byte_tokenizer(start=True)
    for line, kept in ((code, 64), (code.replace("ratio=8", "budget=256"), 256)):
        names = {"compressor": compressor, "ids": torch.randint(0, 256, (1, 511))}
        exec(line, names)
        assert names["memory"].lengths == (kept,) and isinstance(names["answer"], str)


def test_every_method_has_a_page_that_says_what_it_is():
    pytest.importorskip("peft", reason="the hf extra is not installed")
    from gistkit.compress import METHODS as KINDS

    for name in KINDS.keys() - {"no_context"}:
        assert HEAD.match((DOCS / "methods" / f"{name}.md").read_text()), name


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(package):
    page = (DOCS / "api" / f"{PAGES.get(package, package.rpartition('.')[2])}.rst").read_text()
    blocks = rf"^\.\. api:: {re.escape(package)}\n(?:   :each: (\w+)\n)?\n((?:   .*\n)+)"
    described = []
    for mapping, block in re.findall(blocks, page, re.MULTILINE):
        each = getattr(import_module(package), mapping).values() if mapping else ()
        described += [value.__name__ for value in each] + [line.split(":")[0].strip() for line in block.splitlines()]
    assert len(described) == len(set(described))
    # A name that another package describes is mentioned, as :py:obj:`DigitTrie <gistkit.nn.DigitTrie>`.
    mentioned = set(re.findall(r":py:obj:`(\w+) <", page))
    modules = set(re.findall(r"automodule:: gistkit\.\w+\.(\w+)", page))
    names = set(import_module(package).__all__)
    assert set(described) <= names and names == (set(described) | mentioned | modules) & names


def test_every_page_is_in_the_contents():
    listed = set(re.findall(r"^(?:.* <)?([\w/*.-]+)>?$", CONTENTS, re.MULTILINE))
    paths = [*DOCS.glob("api/*"), *DOCS.glob("*.md")]
    pages = {str(path.relative_to(ROOT).with_suffix("")) for path in paths}
    assert pages - {"docs/contents"} <= listed and {"notebooks/*", "docs/methods/*"} <= listed
    for name in (name for name in listed if "*" not in name):
        assert any((ROOT / f"{name}{suffix}").exists() for suffix in (".md", ".rst")), name


PROSE = [*DOCS.glob("*.md"), *DOCS.glob("methods/*.md"), *ROOT.glob("*.md"), *ROOT.glob("*/README.md")]


@pytest.mark.parametrize("path", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_is_narrow_enough_for_the_site(path):
    """Blocks, fenced or indented, have at most 84 columns; those of directives are not shown. Prose has 120."""
    fence, wide = None, []
    written = re.sub(r"<!-- (\w+) table.*?<!-- end of \1 table -->", "", path.read_text(), flags=re.DOTALL)
    for line in written.splitlines():
        if line.startswith("```"):
            fence = None if fence is not None else line[3:]
        elif fence is None and line.startswith("    "):
            wide += [line] * (len(line) > 88)
        elif fence is not None and not fence.startswith("{"):
            wide += [line] * (len(line) > 84)
        elif fence is None:
            wide += [line] * (len(line) > 120 and not line.startswith("|"))
    assert not wide


def test_a_docstring_means_in_the_reference_what_it_says(monkeypatch):
    docstrings = extension("docstrings", monkeypatch)
    lines = [
        "A mask of 2**24 tiles; see `Layout`s, `count` and `Plan.to`, x_ too.",
        "",
        "    plan = compile(*layouts)",
        "",
        "Args:",
        "    count: at least 1, of",
        "        `windows(count)`.",
        "    low, high: bounds | ends.",
        "",
        "Returns:",
        "    out: a tensor.",
    ]
    assert docstrings.convert(lines, "gistkit.layouts", own=["count"]) == [
        r"A mask of 2\*\*24 tiles; see :py:obj:`Layout <gistkit.layouts.Layout>`\ s, ``count`` and "
        r":py:obj:`Plan.to <gistkit.layouts.Plan.to>`, x\_ too.",
        "",
        *("::", "", "    plan = compile(*layouts)", "", ""),
        *("", ":Parameters:", "    - **count**: at least 1, of", "      ``windows(count)``."),
        *(r"    - **low**, **high**: bounds \| ends.", "", ""),
        *("", ":Returns:", "    out: a tensor.", ""),
    ]


def test_a_signature_names_arrays_as_the_source_does(monkeypatch):
    short = extension("docstrings", monkeypatch).short
    array = "~numpy.ndarray[tuple[~typing.Any, ...], ~numpy.dtype[~numpy.uint8]]"
    assert short(f"(roles: {array}, names: list[str] = <factory>)") == (
        "(roles: ~numpy.typing.NDArray[~numpy.uint8], names: list[str] = ...)"
    )
    assert short("(x: int | TypeAliasForwardRef('numpy.typing.ArrayLike'))") == "(x: int | ~numpy.typing.ArrayLike)"


def test_a_name_is_found_where_it_is_described_and_a_wrong_one_is_not(monkeypatch):
    names = extension("names", monkeypatch)
    assert names.resolve("gistkit.layouts.layout.Layout", "gistkit.viz") == "gistkit.layouts.Layout"
    assert names.resolve("DigitTrie", "gistkit.layouts") == "gistkit.nn.DigitTrie"
    assert names.resolve("Conversation", "gistkit.ask") == "gistkit.ask.Conversation"
    assert names.resolve("Conversation", "gistkit.train") == "gistkit.train.Conversation"
    assert names.resolve("encode", "gistkit.compress", "gistkit.compress.Dodo") == "gistkit.compress.Dodo.encode"
    assert names.resolve("Layout.colour", "gistkit.layouts") is names.resolve("torch.Tensor", "gistkit.ops") is None


def test_results_are_rows_of_the_page_and_a_missing_one_is_refused(monkeypatch):
    results = extension("results", monkeypatch)
    page = (
        "<!-- some table -->\n\n| arm | loss |\n|---|---|\n| A 1x | 1 |\n| Ab | 2 |\n\nFirst.\n\n"
        "| arm | exact | loss |\n|---|---|---|\n| A | 3 | 4 |\n\nSecond one.\n\n<!-- end of some table -->"
    )
    assert results.choose(page, "some", "arm", "", ["A"], []) == ([["arm", "loss"], ["A 1x", "1"]], "First.")
    assert results.choose(page, "some", "arm", "Second", [], ["loss"]) == ([["arm", "loss"], ["A", "4"]], "Second one.")
    for name, first, rows, columns, message in (
        ("other", "arm", [], [], "expected a table of 'other'"),
        ("some", "seed", [], [], "begins with 'seed'"),
        ("some", "arm", ["C"], [], "expected a row that begins with 'C'"),
        ("some", "arm", [], ["time"], "expected a column that begins with 'time'"),
    ):
        with pytest.raises(ValueError, match=message):
            results.choose(page, name, first, "", rows, columns)


def test_the_table_of_methods_has_what_their_pages_say(monkeypatch, tmp_path):
    methods = extension("methods", monkeypatch)
    monkeypatch.setattr(methods, "FOLDER", tmp_path)
    (tmp_path / "icae.md").write_text("---\nreads: outputs\nlearns: slowly\n---\n\n# ICAE: chunks\n")
    (tmp_path / "gist.md").write_text("---\nreads: gists\nlearns: yes\n---\n\n# Gist\n")
    gist, icae = methods.rows()
    assert gist == ("[Gist](gist.md)", "gists", "yes", "yes") and icae == ("[ICAE](icae.md)", "outputs", "slowly", "no")
    (tmp_path / "dodo.md").write_text("# Dodo\n")
    with pytest.raises(ValueError, match=r"dodo\.md: expected lines `reads` and `learns` before its title, got none"):
        methods.rows()


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    (tmp_path / "index.html").write_text('<a href="sub/a.html#here">a</a> <a href="https://example.org/x">b</a>')
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a.html").write_text('<p id="here"><a href="#here">x</a><a href="../index.html?q=1">y</a></p>')
    run = [sys.executable, str(ROOT / "tools/links.py"), str(tmp_path)]
    assert subprocess.run(run, check=False).returncode == 0
    (tmp_path / "sub/a.html").write_text('<p id="there"><img src="lost.png"></p>')
    found = subprocess.run(run, check=False, capture_output=True, text=True)
    assert found.returncode == 1
    assert found.stderr.splitlines()[1:] == ["index.html: sub/a.html#here", "sub/a.html: lost.png"]
