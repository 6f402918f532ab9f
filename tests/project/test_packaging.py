"""What is shipped, what an import needs, and what a broken installation says."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

import gistkit
from gistkit import info
from gistkit._compiled import INSTALL_AGAIN
from gistkit.ops import _library
from tools import cuda_home

ROOT = Path(__file__).resolve().parents[2]


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment, check=False
    )


def test_kernels_know_no_torch():
    for folder in ("common", "cpu", "cuda", "planner"):
        for path in (ROOT / "csrc" / folder).rglob("*.*"):
            assert not re.search(r"#include\s*[<\"](torch|ATen|c10|pybind11)/", path.read_text()), path.name


def test_packages_whose_next_version_breaks_have_a_bound():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {package for packages in extras.values() for package in packages}
    for name in ("transformers", "lm-eval"):
        (package,) = (each for each in named if each.startswith(f"{name}>="))
        assert re.fullmatch(r"[\w-]+>=[\d.]+,<[\d.]+", package), package


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.nightly if n != "generic" else ()) for n in _library.ISA_NAMES]
)
def test_instruction_set_can_be_chosen_by_the_environment(name):
    shown = run("import gistkit; print(gistkit.ops.cpu_isa())", GISTKIT_ISA=name)
    if _library.ISA_NAMES.index(name) > _library.ISA_NAMES.index(gistkit.ops.best_isa()):
        assert f"this processor offers at most {gistkit.ops.best_isa()!r}, got {name!r}" in shown.stderr
    else:
        assert shown.stdout.strip() == name, shown.stderr


@pytest.mark.slow
def test_an_empty_instruction_set_is_none_and_an_unknown_one_is_refused():
    assert not run("import gistkit; gistkit.ops", GISTKIT_ISA="").stderr
    assert (
        f"expected one of {', '.join(_library.ISA_NAMES)}, got 'mmx'"
        in run("import gistkit; gistkit.ops", GISTKIT_ISA="mmx").stderr
    )


def copy_of_package(tmp_path):
    """The installed package, Python files and libraries, in a folder of its own."""
    target = tmp_path / "gistkit"
    for folder in reversed(list(gistkit.__path__)):
        shutil.copytree(folder, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def from_copy(target, code):
    # An editable install's finder would win over the path.
    others = "[finder for finder in sys.meta_path if 'ScikitBuild' not in type(finder).__name__]"
    return run(f"import sys; sys.meta_path[:] = {others}; {code}", PYTHONPATH=str(target.parent))


def imported_from(target):
    return from_copy(target, "import gistkit; gistkit.Plan, gistkit.attention")


@pytest.mark.slow
def test_a_missing_library_says_how_to_build_it(tmp_path):
    target = copy_of_package(tmp_path)
    assert imported_from(target).returncode == 0
    (target / "libgistkit_ops.so").unlink()
    shown = imported_from(target)
    assert shown.returncode and "op library libgistkit_ops.so is missing" in shown.stderr
    assert INSTALL_AGAIN in shown.stderr
    next(target.glob("_planner*.so")).unlink()
    shown = imported_from(target)
    assert shown.returncode and "compiled planner is missing or could not be loaded" in shown.stderr
    assert "cannot import name '_planner'" in shown.stderr and INSTALL_AGAIN in shown.stderr


@pytest.mark.slow
def test_info_reports_what_does_not_load(tmp_path):
    target = copy_of_package(tmp_path)
    report = "from gistkit.cli import main; main(['info'])"
    (target / "libgistkit_ops.so").write_bytes(b"not a library")
    shown = from_copy(target, report).stdout
    assert re.search(r"^op library +FAILED: .*could not load it", shown, re.MULTILINE), shown
    assert re.search(r"^planner +/.*_planner.*\.so$", shown, re.MULTILINE), shown
    next(target.glob("_planner*.so")).unlink()
    shown = from_copy(target, report).stdout
    assert re.search(r"^planner +FAILED: .*missing or could not be loaded", shown, re.MULTILINE), shown


@pytest.mark.slow
def test_a_broken_library_keeps_its_cause(tmp_path):
    target = copy_of_package(tmp_path)
    (target / "libgistkit_ops.so").write_bytes(b"not a library")
    shown = imported_from(target)
    assert shown.returncode and "could not load it (libgistkit_ops.so, torch " in shown.stderr
    assert "OSError" in shown.stderr and INSTALL_AGAIN in shown.stderr


def test_libraries_need_neither_cuda_nor_unstable_torch():
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is not installed")
    library = _library.OPS_LIBRARY
    undefined = subprocess.run([nm, "-DCu", library], capture_output=True, text=True, check=True).stdout
    assert "aoti_torch_" in undefined
    assert not re.search(r"\b(at|c10|torch)::", undefined), "only the C functions of the stable ABI may be used"
    assert not re.search(r"\b(cuda[A-Z]|aoti_torch_get_current_cuda)", undefined), (
        "CUDA belongs in a library of its own"
    )


def test_messages_of_ops_hold_no_path_of_the_build():
    import torch

    with pytest.raises(RuntimeError, match=r"csrc/glue/rope\.cpp:\d+, gistkit::rope: expected tensors") as error:
        rows = torch.zeros(1, 1, 1)
        torch.ops.gistkit.rope(torch.zeros(2), torch.zeros(1, 1, 1, 2), rows, rows, 1.0, False, False)
    assert not re.search(r"(^|[\s,])/", str(error.value))
    # Nor in any other message: no source file is named from the root.
    libraries = [_library.OPS_LIBRARY, *Path(_library.OPS_LIBRARY).parent.glob("_planner*.so")]
    for library in libraries:
        names = re.findall(rb"[\x21-\x7e]+\.(?:cpp|cuh?|h|hpp)\x00", Path(library).read_bytes())
        assert not [name for name in names if name.startswith(b"/")], library


@pytest.mark.slow
def test_source_distribution_holds_what_a_build_needs(tmp_path, monkeypatch):
    build = pytest.importorskip("scikit_build_core.build", reason="scikit-build-core is not installed")
    monkeypatch.chdir(ROOT)
    with tarfile.open(tmp_path / build.build_sdist(str(tmp_path))) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for needed in (
        "CMakeLists.txt",
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "csrc/CMakeLists.txt",
        "csrc/cpu/isa.cpp",
        "python/gistkit/viz/browser/page.js",
    ):
        assert needed in names
    assert {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.is_file()} <= names
    assert {str(p.relative_to(ROOT)) for p in (ROOT / "python").rglob("*.py")} <= names
    assert not [name for name in names if name.startswith((".venv", "build/", "runs/", "benchmarks/results"))]


def test_nvccs_folder_of_pip_is_one_that_cmake_knows(tmp_path: Path) -> None:
    home = tmp_path / "nvidia/cu13"
    for name in ("bin/nvcc", "lib/libcudart.so.13"):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).touch()
    assert cuda_home.home(tmp_path) == home and cuda_home.home(tmp_path / "nvidia") is None
    assert (home / "lib64/libcudart.so").resolve() == home / "lib/libcudart.so.13"


def test_the_report_begins_with_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "_missing", lambda package: package in ("gguf", "accelerate"))
    found = {line[:16].strip(): line[17:] for line in info.lines()[: info.lines().index("")]}
    assert list(found)[2:] == list(info.TASKS)
    assert found["compress, ask"] == "yes" and found["train"] == "no: pip install 'gistkit[train]'"
    assert gistkit.ops.cpu_isa() in found["kernels, CPU"]
