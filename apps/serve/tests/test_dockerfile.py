"""The Dockerfile: what it names is there, what it pins is what the project pins, and it builds where docker is."""

import fnmatch
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from gistkit.cli import parser

ROOT = Path(__file__).resolve().parents[3]
WHOLE = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = WHOLE["project"]


def of(word):
    """The arguments of each such instruction, continued lines joined."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
    return re.findall(rf"^{word} (.*)", text, re.MULTILINE)


def test_the_paths_and_packages_it_names_are_there():
    ignored = (ROOT / ".dockerignore").read_text().split()
    wheels = next(line for line in of("RUN") if "pip wheel" in line)
    local = re.findall(r"(?<= )\.\S*", wheels)
    for path in [*local, *(source for line in of("COPY") for source in line.split()[:-1])]:
        assert (ROOT / path).is_dir() and not any(fnmatch.fnmatch(Path(path).name, one) for one in ignored), path
    built = {tomllib.loads((ROOT / path / "pyproject.toml").read_text())["project"]["name"] for path in local}
    # By their files: an index may have others of these names.
    installed = re.findall(r"(?<= |\()/wheels/(\w+)-\*\.whl", wheels_into := of("RUN")[-2])
    assert {"gistkit", "gistkit_serve"} == {*installed} <= {name.replace("-", "_") for name in built}
    assert not re.search(r" [\"']?gistkit", wheels_into) and "--find-links" not in wheels_into
    (extra,) = re.findall(r"/gistkit-\*\.whl\)\[(\w+)\]", wheels_into)
    assert extra in PROJECT["optional-dependencies"]


def test_it_has_a_python_that_is_supported_the_torch_of_the_makefile_and_the_servers_port():
    """hadolint has its form and what its layers leave behind."""
    (version,) = {re.match(r"python:([\d.]+)-", line)[1] for line in of("FROM")}
    low = re.search(r"[\d.]+", PROJECT["requires-python"])[0]
    assert [*map(int, version.split("."))] >= [*map(int, low.split("."))]
    torch = re.search(r"^TORCH \?= (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert {*re.findall(r"torch==[\d.]+", " ".join(of("RUN")))} == {torch}
    assert of("EXPOSE") == [str(parser().parse_args(["serve"]).port)]
    assert of("USER")[-1:] not in ([], ["root"], ["0"])
    needed = WHOLE["build-system"]["requires"]
    tools = next(line for line in of("RUN") if "torch==" in line)
    for name in (re.match(r"[\w-]+", one)[0] for one in needed):
        assert re.search(rf"\b{name}\b", tools), name


@pytest.mark.nightly
def test_it_builds_and_runs_where_docker_is():
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("docker does not run here")
    subprocess.run(["docker", "build", "-t", "gistkit-test", str(ROOT)], check=True, timeout=3600)
    run = ["docker", "run", "--rm", "gistkit-test", "gistkit", "serve", "--help"]
    assert b"--api-key" in subprocess.run(run, check=True, capture_output=True, timeout=300).stdout
