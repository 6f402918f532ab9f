"""Which module imports which: no circles, whether at the top, inside a function or for types alone."""

import ast
from pathlib import Path

import pytest

import gistkit

PACKAGE = Path(gistkit.__file__).parent


def modules(root):
    """{module: file} of a package's folder, a package by its own name."""
    found = {}
    for file in root.rglob("*.py"):
        parts = [root.name, *file.relative_to(root).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(file, known):
    """The modules of `known` that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # What a package is asked for may be a module in it.
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside & known or {node.module}
            if not inside <= known:
                found.add(node.module)
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


def test_no_module_of_compress_imports_what_imports_it():
    graph = graph_of(PACKAGE)
    part = {name: others for name, others in graph.items() if name.startswith("gistkit.compress")}
    inside = {name: {other for other in others if other in part} for name, others in part.items()}
    assert len(inside) > 15
    assert circles(inside) == []
    # Nor by way of another room.
    assert not [circle for circle in circles(graph) if any(name in part for name in circle)]


def test_every_import_of_the_package_finds_a_module():
    files = modules(PACKAGE)
    for name, file in files.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gistkit."):
                # The compiled planner is none of the sources.
                assert node.module in files or node.module == "gistkit._planner", f"{name} imports {node.module}"


def test_compress_has_few_files_in_its_rooms():
    files = sorted(file.relative_to(PACKAGE).as_posix() for file in (PACKAGE / "compress").rglob("*.py"))
    assert len(files) <= 24, files
    assert {Path(file).parent.as_posix() for file in files} == {"compress", "compress/methods", "compress/reading"}


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
