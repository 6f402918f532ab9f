"""Memory files with random changes: each is refused by a ValueError that names it, or is a memory of bounded size."""

import random

import pytest
import torch

from gistkit.compress import ICAE, FiveHundredX, Memory
from tests.helpers.fuzz import rounds
from tests.helpers.hostile import changed_tensors
from tests.helpers.models import tiny_llama

pytestmark = [pytest.mark.fuzz, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.mark.filterwarnings("ignore")
def test_changed_memory_files_are_refused_or_bounded(tmp_path):
    compressors = [method(tiny_llama(), chunk=6, ratio=3, lora=None) for method in (ICAE, FiveHundredX)]
    with torch.no_grad():
        memories = [compressor.encode([[5, 6, 7, 8, 9, 10, 11], [1, 2, 3]]) for compressor in compressors]
    path, seen = tmp_path / "changed.gist", {"refused": 0, "loaded": 0}
    for seed in rounds(100):
        compressor = compressors[seed % 2]
        memories[seed % 2].save(path)
        what = changed_tensors(path, random.Random(seed))
        try:
            # The checksum would hide from most changes what is behind it.
            memory = Memory.load(path, verify=seed % 8 == 0)
        except ValueError as error:
            assert str(error).startswith(f"{path}: expected "), (seed, what, error)
            seen["refused"] += 1
            continue
        seen["loaded"] += 1
        held = sum(tensor.numel() * tensor.element_size() for tensor in memory.tensors)
        assert held <= path.stat().st_size, (seed, what)
        # What loads is read, or refused in the same way.
        try:
            compressor.generate(memory, max_new_tokens=1)
        except ValueError as error:
            assert "expected" in str(error), (seed, what, error)
    assert [item.name for item in tmp_path.iterdir()] == [path.name]
    assert seen["refused"] > seen["loaded"] > 0, seen
