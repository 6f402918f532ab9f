"""Which module imports which: no circles, whether at the top, inside a function or for types alone."""

import ast
import functools
from pathlib import Path

import pytest

import gistkit

PACKAGE = Path(gistkit.__file__).parent
REPOSITORY = Path(__file__).resolve().parents[2]
# The distributions beside the library, and what each may import of them and of this repository's other folders.
OTHERS = {"lab/gistkit_lab": "gistkit_lab", "apps/serve/gistkit_serve": "gistkit_serve"}
OTHERS |= {"apps/vllm/gistkit_vllm": "gistkit_vllm"}


def modules(root):
    """{module: file} of a package's folder, a package by its own name."""
    found = {}
    # Compiled modules by their stubs.
    for file in root.rglob("*.py*"):
        if file.suffix not in (".py", ".pyi"):
            continue
        parts = [root.name, *file.relative_to(root).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


@functools.cache
def tree(file):
    return ast.parse(file.read_text())


def imports(file, known):
    """The modules of `known` that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # What a package is asked for may be a module in it.
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside & known or {node.module}
            if not inside <= known:
                found.add(node.module)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return found & known


def circles(graph):
    """Each set of modules that reach each other, sorted."""

    def reached(start):
        seen, open_ = set(), [start]
        while open_:
            for other in graph[open_.pop()] - seen:
                seen.add(other)
                open_.append(other)
        return seen

    reach = {name: reached(name) for name in graph}
    return sorted({tuple(sorted(o for o in reach[n] if n in reach[o])) for n in graph if n in reach[n]})


def graph_of(root):
    """{module: modules it imports} of a folder."""
    files = modules(root)
    return {name: imports(file, set(files)) - {name} for name, file in files.items()}


# Nothing imports what stands to its right, and pictures are for commands only.
ORDER = (
    "_planner", "_compiled", "_gpu", "common", "inspect", "formats", "layouts", "ops", "gistkit", "info", "nn", "hf",
    "compress", "evaluate", "ask", "train", "options", "viz", "cli",
)  # fmt: skip
SEEN_BY_VIZ = {"common", "inspect", "layouts", "viz"}
# {who: what it imports against the order}, each only when it is used.
DOORS = {
    # Layout.draw: a layout shows itself, and what draws it has to know layouts.
    "gistkit.layouts.layout": {"gistkit.viz.layout"},
    # `import gistkit` is enough for gistkit.compress and the others.
    "gistkit": {f"gistkit.{name}" for name in ("nn", "hf", "compress", "evaluate", "ask", "train", "viz")},
}


def room_of(module):
    """The folder of a module, or the module itself where it is in none."""
    return module.split(".")[1] if "." in module else module


@functools.cache
def package_graph():
    """{module: modules it imports} of the package, without the doors."""
    graph = graph_of(PACKAGE)
    for who, what in DOORS.items():
        assert what <= graph[who]
        graph[who] -= what
    return graph


@pytest.mark.slow
def test_no_module_imports_what_imports_it():
    graph = package_graph()
    assert len(graph) > 200
    assert circles(graph) == []


def test_rooms_point_one_way():
    for who, others in package_graph().items():
        here = room_of(who)
        for what in others:
            there = room_of(what)
            assert ORDER.index(there) <= ORDER.index(here), f"{who} imports {what}"
            assert there != "viz" or here in ("viz", "cli"), f"{who} imports {what}"
            assert here != "viz" or there in SEEN_BY_VIZ, f"{who} imports {what}"


def names_imported(file):
    """All that a file imports, by full names."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_library_imports_nothing_of_the_lab_and_the_server_and_these_nothing_of_each_other():
    for folder, own in {**OTHERS, "python/gistkit": "gistkit"}.items():
        files = list((REPOSITORY / folder).rglob("*.py"))
        assert len(files) > 5
        foreign = {*OTHERS.values(), "tests", "benchmarks"} - {own}
        for file in files:
            assert not {name.split(".")[0] for name in names_imported(file)} & foreign, file


@pytest.mark.parametrize("folder", [*OTHERS, "lab/models"])
def test_what_the_lab_and_the_server_take_of_the_library_is_public(folder):
    for file in (REPOSITORY / folder).rglob("*.py"):
        taken = [name for name in names_imported(file) if name.startswith("gistkit.")]
        assert not [name for name in taken if any(part.startswith("_") for part in name.split("."))], file


@pytest.mark.parametrize("folder", OTHERS)
def test_the_lab_and_the_server_have_no_circles(folder):
    assert circles(graph_of(REPOSITORY / folder)) == []


@pytest.mark.parametrize("folder", ["python/gistkit", *OTHERS])
def test_every_import_finds_a_module(folder):
    own = modules(REPOSITORY / folder)
    known = {**modules(PACKAGE), **own}
    for file in own.values():
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gistkit"):
                assert node.module in known, f"{file} imports {node.module}"


def test_what_the_package_loads_late_is_typed():
    """What __getattr__ gives is also imported for types, so that checkers know `gistkit.compress` without a run."""
    body = tree(Path(gistkit.__file__)).body
    block = next(node for node in body if isinstance(node, ast.If) and node.test.id == "TYPE_CHECKING")
    typed = {alias.name: alias.asname for node in block.body for alias in node.names}
    assert typed.keys() == {*gistkit.__all__, *gistkit._PACKAGES} <= {*dir(gistkit)}
    # A name outside __all__ is exported by its alias.
    assert all(typed[name] == name for name in typed.keys() - {*gistkit.__all__})


def test_methods_are_a_few_classes_deep():
    from torch import nn

    from gistkit.compress import METHODS, Compressor

    for method in METHODS.values():
        depth = [each for each in method.__mro__ if issubclass(each, Compressor)]
        assert depth[-1] is Compressor and len(depth) <= 4, depth
        assert Compressor.__mro__[1] is nn.Module


@pytest.mark.parametrize("how", ["top", "typed", "lazy"])
def test_a_circle_is_found_wherever_the_import_stands(how, tmp_path):
    root = tmp_path / "house"
    root.mkdir()
    (root / "__init__.py").write_text("")
    (root / "leaf.py").write_text("import os\n")
    (root / "one.py").write_text("from house import leaf\nfrom house.two import second\n")
    body = {
        "top": "from house.one import first\n",
        "typed": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from house.one import first\n",
        "lazy": "def second():\n    from house import one\n",
    }
    (root / "two.py").write_text(body[how])
    assert circles(graph_of(root)) == [("house.one", "house.two")]
