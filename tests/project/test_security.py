"""What SECURITY.md says of files: nothing that the package reads can run code."""

import ast
import pickle
from pathlib import Path

import pytest
import torch

import gistkit
import gistkit_lab
import gistkit_serve
import gistkit_vllm
from gistkit.compress import Memory
from gistkit.train import checkpoints
from gistkit_lab.studies.results import load as load_results

PACKAGE = Path(gistkit.__file__).parent
# Between the processes of one study, over a pipe that only they have.
PIPES = {"studies/runner.py"}


def called(node):
    """The dotted name of a call."""
    parts, place = [], node.func
    while isinstance(place, ast.Attribute):
        parts.append(place.attr)
        place = place.value
    return ".".join(reversed([*parts, getattr(place, "id", "")]))


def test_no_file_of_the_package_reads_pickles_or_runs_texts():
    found = set()
    packages = [PACKAGE, *(Path(other.__file__).parent for other in (gistkit_lab, gistkit_serve, gistkit_vllm))]
    for file in (file for package in packages for file in package.rglob("*.py")):
        name = "/".join(file.parts[-2:])
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                for keyword in node.keywords:
                    if keyword.arg in ("trust_remote_code", "allow_pickle"):
                        assert isinstance(keyword.value, ast.Constant) and keyword.value.value is False, name
                if called(node) in ("eval", "exec", "compile", "torch.load", "os.system") or "pickle." in called(node):
                    found.add(name)
    assert found == PIPES


class Trap:
    def __reduce__(self):
        return (open, ("sprung", "w"))


@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_a_pickle_is_not_opened(how, tmp_path):
    path = tmp_path / checkpoints.WEIGHTS
    if how == "pickle":
        path.write_bytes(pickle.dumps(Trap()))
    else:
        torch.save({"positions": Trap()}, path)
    for read in (Memory.load, load_results, lambda path: checkpoints.restore(path.parent, [])):
        with pytest.raises(ValueError, match=r"expected|utf-8"):
            read(path)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    # It would have been.
    pickle.loads(pickle.dumps(Trap()))
    assert (tmp_path / "sprung").exists()
