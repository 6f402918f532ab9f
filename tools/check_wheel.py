"""Tries a wheel in a folder of its own: it holds the files of this tree and the libraries, and those work.

example: python tools/check_wheel.py dist/*.whl
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[1]
# Of models/ what CMakeLists.txt installs.
TRAINED = (".json", ".safetensors", ".md")
COMPILED = r"gistkit/(_planner\.cpython-\d+-\w+-linux-gnu\.so|libgistkit_(ops|cuda)\.so|cuda_build\.txt)"


def expected(root: Path) -> dict[str, bytes]:
    """The wheel's files that are not compiled, by name, as the tree has them."""
    sources = {path.relative_to(root / "python"): path for path in (root / "python/gistkit").rglob("*")}
    models = {"gistkit/trained" / path.relative_to(root / "models"): path for path in (root / "models").rglob("*")}
    shipped = {**sources, **{name: path for name, path in models.items() if path.suffix in TRAINED}}
    held = {
        str(name): path.read_bytes()
        for name, path in sorted(shipped.items())
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }
    # An adapter that several have is there once.
    first: dict[bytes, str] = {}
    for name in [name for name in held if name.endswith("/adapter_model.safetensors")]:
        if (one := first.setdefault(held[name], name)) != name:
            del held[name]
            _, _, compressor, adapter, _ = one.split("/")
            digest = sha256(held[one]).hexdigest()
            same = f'{{"compressor": "{compressor}", "adapter": "{adapter}", "sha256": "{digest}"}}\n'
            held[name.replace(".safetensors", ".same.json")] = same.encode()
    return held


def faults(wheel: Path, root: Path = ROOT) -> list[str]:
    """What is wrong with the files of a wheel, a line each; none if it is what the tree builds."""
    with ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith("/")]
        held = {name: archive.read(name) for name in names}
    wanted = expected(root)
    compiled = {name for name in held if re.fullmatch(COMPILED, name)}
    found = [f"{name} is missing" for name in sorted(wanted.keys() - held)]
    found += [f"{name} is not in the tree" for name in sorted(held.keys() - wanted - compiled)]
    found += [f"{name} differs from the tree's" for name in sorted(wanted.keys() & held) if wanted[name] != held[name]]
    for name in ("_planner.", "libgistkit_ops.so", "cuda_build.txt"):
        if not any(path.startswith(f"gistkit/{name}") for path in compiled):
            found.append(f"gistkit/{name} is missing")
    if "-manylinux_" not in wheel.name:
        found.append(f"expected a tag of manylinux, got {wheel.name}")
    return found


def run(wheel: Path) -> None:
    """Installs the wheel into a fresh folder and tests it there."""
    with tempfile.TemporaryDirectory() as folder:
        install = [*("-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"), "--target", folder]
        subprocess.run([sys.executable, *install, str(wheel)], check=True)
        # Of this tree nothing may be found.
        environment = {**os.environ, "PYTHONPATH": folder}
        smoke = [sys.executable, str(ROOT / "tools/smoke.py"), folder]
        subprocess.run(smoke, check=True, cwd=folder, env=environment)
        command = [sys.executable, f"{folder}/bin/gistkit", "--help"]
        subprocess.run(command, check=True, cwd=folder, env=environment, stdout=subprocess.DEVNULL)


def main(wheels: list[str]) -> None:
    """Checks each wheel; ends with status 1 at the first that is not right."""
    if not wheels:
        sys.exit(f"usage: {sys.argv[0]} WHEEL...")
    for wheel in map(Path, wheels):
        if found := faults(wheel):
            sys.exit("\n".join([f"{wheel}:", *found]))
        run(wheel)
        print(f"{wheel} is right")


if __name__ == "__main__":
    main(sys.argv[1:])
