"""One run of kernels and emulator under the address sanitizer, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_emulator_checks import is_right

CASES = ["test_emulator_checks.py::test_bank_conflicts_of_matrices", "test_rope_kernels.py::test_inverse_undoes_it"]
CASES += ["test_rope_kernels.py::test_angle_gradients", "test_tile_lists.py::test_causal_and_full"]
# Comes last: it writes out of bounds, so that the sanitizer ends the process.
FATAL = "test_sanitized.py::test_out_of_bounds"


@pytest.mark.skipif("GISTKIT_EMULATOR_SANITIZE" in os.environ, reason="this run is sanitized already")
def test_kernels_under_the_address_sanitizer() -> None:
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, "-print-file-name=libasan.so"]
    runtime = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    settings = {"GISTKIT_EMULATOR_SANITIZE": "address", "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0"}
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-xvvs", "-p", "no:cacheprovider", "-k", "not checked", *CASES, FATAL],
        cwd=Path(__file__).parent,
        env={**os.environ, **settings, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
    )
    before, _, last = result.stdout.partition(FATAL)
    assert before.count("PASSED") >= len(CASES) and "ERROR" not in before, result.stdout
    assert "AddressSanitizer" in last and "fault_kernel" in last, result.stdout


@pytest.mark.skipif("GISTKIT_EMULATOR_SANITIZE" not in os.environ, reason="ends the process: run by the test above")
def test_out_of_bounds() -> None:
    is_right("global bound", "forward", False)
