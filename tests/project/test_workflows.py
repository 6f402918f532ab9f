"""The workflows of .github and the wheels they make: schemas, rights, the Makefile's build."""

import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from tools import check_wheel, smoke, unpack_sdist

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()
TOOL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]


def workflow(path: Path) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML, which transformers brings, is not installed")
    # YAML 1.1 reads the key `on` as a truth value.
    return {"on" if key is True else key: value for key, value in yaml.safe_load(path.read_text()).items()}


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    return workflow(path)["jobs"]


def schema_of(package: str, path: str) -> Any:
    """A validator by a schema that a package carries."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    if (spec := find_spec(package)) is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    schema = json.loads((Path(spec.origin).parent / path).read_text())
    return jsonschema.validators.validator_for(schema)(schema)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_workflows_obey_the_schema(path: Path) -> None:
    schema = schema_of("check_jsonschema", "builtin_schemas/vendor/github-workflows.json")
    assert not [error.message for error in schema.iter_errors(workflow(path))]
    broken = workflow(path)
    next(iter(broken["jobs"].values()))["steps"][0]["run"] = 3
    assert list(schema.iter_errors(broken))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_secrets_and_no_more_rights_than_needed(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"secrets\b|password|\btoken:(?! write)|api[-_]key", text)
    assert workflow(path)["permissions"] == {"contents": "read"}
    for name, job in jobs(path).items():
        allowed = {"deploy": {"pages", "id-token"}, "publish": {"id-token"}}.get(name, set())
        assert set(job.get("permissions", {})) == allowed, name
        # What anybody writes (a title, the name of a branch) never becomes part of a command.
        assert not any("${{" in step.get("run", "") for step in job["steps"]), name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_actions_are_pinned_by_digest(path: Path) -> None:
    """A tag may be moved to other code by whoever has the action's repository."""
    used = re.findall(r"\buses: (.*)", path.read_text())
    assert used and all(re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}  # v[\d.]+", action) for action in used), used


def test_only_a_tag_publishes_and_only_what_was_tested() -> None:
    wheels = workflow(ROOT / ".github/workflows/wheels.yml")
    assert set(wheels["on"]) == {"push", "workflow_dispatch"} and set(wheels["on"]["push"]) == {"tags"}
    publish = wheels["jobs"]["publish"]
    assert publish["if"] == "github.event_name == 'push'" and publish["needs"] == ["sdist", "cpu"]
    download = publish["steps"][0]["with"]["pattern"]
    uploads = {name: job["steps"][-1]["with"]["name"] for name, job in wheels["jobs"].items() if name != "publish"}
    matched = {name for name, upload in uploads.items() if re.match(download.replace("*", ""), upload)}
    assert matched == {"sdist", "cpu"}


def test_wheels_of_four_pythons_on_two_processors() -> None:
    schema = schema_of("cibuildwheel", "resources/cibuildwheel.schema.json")
    assert not [error.message for error in schema.iter_errors(TOOL)]
    code = [sys.executable, "-m", "cibuildwheel", "--platform", "linux", "--print-build-identifiers", "--archs"]
    shown = subprocess.run([*code, "x86_64,aarch64"], capture_output=True, text=True, cwd=ROOT, check=True)
    expected = {f"cp3{minor}-manylinux_{arch}" for minor in (11, 12, 13, 14) for arch in ("x86_64", "aarch64")}
    assert set(shown.stdout.split()) == expected


def test_the_build_is_that_of_the_makefile() -> None:
    torch, packages = re.search(r"^TORCH \?= (\S+)", MAKEFILE, re.MULTILINE), "scikit-build-core pybind11 cmake ninja"
    assert torch is not None and TOOL["before-build"] == f"pip install {torch[1]} {packages}"
    assert f"install -q {packages}\n" in MAKEFILE
    # The oldest torch of the stable ABI that CMake builds for.
    major, minor = re.search(r"TORCH_TARGET_VERSION=0x(\w\w)(\w\w)0", (ROOT / "CMakeLists.txt").read_text()).groups()
    assert TOOL["before-test"] == f"pip install torch=={int(major, 16)}.{int(minor, 16)}.0"
    linked = re.search(r"--no-as-needed ([\w ]+)\)", (ROOT / "CMakeLists.txt").read_text())[1].split()
    for command in (TOOL["linux"]["repair-wheel-command"], MAKEFILE):
        assert re.findall(r"--exclude lib(\w+)\.so", command) == linked


def test_wheels_run_the_tests_of_ops() -> None:
    smoke_test, tests = TOOL["test-command"].split(" && ")
    assert smoke_test == "python {project}/tools/smoke.py" and tests == "python -m pytest {project}/tests/ops"
    recipe = re.search(r"^wheel-test:\n((\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe is not None and "dist/*.whl" in recipe[1] and "pytest tests/ops" in recipe[1]
    assert " ".join(f'"{package}"' for package in TOOL["test-requires"]) in recipe[1]
    # Of this tree nothing but the tests may be found: no package that is a folder of the root.
    assert "PYTHONPATH" not in recipe[1] and not (ROOT / "gistkit").exists()
    runs = [step.get("run") for step in jobs(ROOT / ".github/workflows/wheels.yml")["sdist"]["steps"]]
    assert runs.index("make wheel-test") == runs.index("make wheel") + 1


def test_the_smoke_test_passes_and_knows_its_package(tmp_path: Path) -> None:
    smoke.main()
    with pytest.raises(SystemExit, match=f"expected gistkit from {tmp_path}, got the one in "):
        smoke.main(str(tmp_path))


def wheel(folder: Path, changed: dict[str, bytes | None], tag: str = "manylinux_2_28_x86_64") -> Path:
    """A wheel of this tree without code in its libraries; `changed`: other files, None for one that is left out."""
    path = folder / f"gistkit-0-cp311-cp311-{tag}.whl"
    compiled = ("_planner.cpython-311-x86_64-linux-gnu.so", "libgistkit_ops.so", "cuda_build.txt")
    files = {**check_wheel.expected(ROOT), **{f"gistkit/{name}": b"" for name in compiled}, **changed}
    with ZipFile(path, "w") as archive:
        for name, content in {**files, "gistkit/": b"", "gistkit-0.dist-info/RECORD": b""}.items():
            if content is not None:
                archive.writestr(name, content)
    return path


def test_a_wheel_with_other_files_is_refused(tmp_path: Path) -> None:
    assert check_wheel.faults(wheel(tmp_path, {})) == []
    assert "gistkit/trained/smollm2-avgpool-2x/compressor.safetensors" in check_wheel.expected(ROOT)
    changed = {"gistkit/info.py": b"", "gistkit/viz/browser/page.js": None, "gistkit/x.o": b""}
    assert check_wheel.faults(wheel(tmp_path, changed)) == [
        "gistkit/viz/browser/page.js is missing",
        "gistkit/x.o is not in the tree",
        "gistkit/info.py differs from the tree's",
    ]
    assert check_wheel.faults(wheel(tmp_path, {"gistkit/libgistkit_ops.so": None}, "linux_x86_64")) == [
        "gistkit/libgistkit_ops.so is missing",
        "expected a tag of manylinux, got gistkit-0-cp311-cp311-linux_x86_64.whl",
    ]


def test_an_sdist_is_unpacked_over_an_earlier_one_and_what_is_the_same_keeps_its_time(tmp_path: Path) -> None:
    sdist, folder = tmp_path / "gistkit-0.tar.gz", tmp_path / "sdist"

    def packed(**files: str) -> None:
        with tarfile.open(sdist, "w:gz") as archive:
            for name, content in files.items():
                member = tarfile.TarInfo(f"gistkit-0/csrc/{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content.encode()))
        unpack_sdist.unpack(sdist, folder)
        assert {path.name: path.read_text() for path in (folder / "csrc").iterdir()} == files

    packed(same="1", changed="2", gone="3")
    (folder / "build").mkdir()
    (folder / "build/object.o").write_text("kept")
    for path in (folder / "csrc").iterdir():
        os.utime(path, (1, 1))
    packed(same="1", changed="4", new="5")
    times = {path.name: path.stat().st_mtime == 1 for path in (folder / "csrc").iterdir()}
    assert times == {"same": True, "changed": False, "new": False}
    assert (folder / "build/object.o").read_text() == "kept"
