"""Memory files with random changes: each is refused by a ValueError that names it, or is a memory of bounded size."""

import json
import random
import struct

import pytest
import torch

from gistkit.compress import ICAE, FiveHundredX, Memory
from tests.helpers.fuzz import rounds
from tests.helpers.models import tiny_llama

pytestmark = [pytest.mark.fuzz, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

VALUES = [
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, 1.5, 1e308, "", "x", "\x1b[31m", "../../x", "\ud800", [], [[]], {},
    [-1], [2**40], ["x"], [None], {"x": 1},
]  # fmt: skip


def files(folder):
    """The bytes of a small memory file of each carrier, and the compressors."""
    for method in (ICAE, FiveHundredX):
        compressor = method(tiny_llama(), chunk=6, ratio=3, lora=None)
        with torch.no_grad():
            memory = compressor.encode([[5, 6, 7, 8, 9, 10, 11], [1, 2, 3]])
        memory.save(folder / "good.gist")
        yield compressor, (folder / "good.gist").read_bytes()


def split(data):
    """The header as JSON and the tensors' bytes."""
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def packed(header, tensors):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + tensors


def changed(value, draw):
    """A JSON value with one part replaced, removed or doubled."""
    if isinstance(value, dict | list) and value and draw.random() < 0.85:
        value = value.copy()
        key = draw.choice(list(value)) if isinstance(value, dict) else draw.randrange(len(value))
        kind = draw.random()
        if kind < 0.15:
            del value[key]
        elif kind < 0.25 and isinstance(value, list):
            value.insert(key, value[key])
        elif kind < 0.25:
            value[str(key) + "x"] = value[key]
        else:
            value[key] = changed(value[key], draw)
        return value
    return draw.choice(VALUES)


def mutated(data, draw):
    """A file with a few changes: of bits, of the length, or of what the header says."""
    kind = draw.randrange(4)
    if kind == 0:
        data = bytearray(data)
        for _ in range(draw.randint(1, 8)):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        return bytes(data)
    if kind == 1:
        at = draw.randrange(len(data))
        return data[:at] + draw.choice([b"", data[at:] * 2, draw.randbytes(draw.randint(1, 64))])
    header, tensors = split(data)
    if kind == 2:
        return packed(changed(header, draw), tensors)
    meta = header["__metadata__"]
    if "memory" in meta:
        content = json.loads(meta["memory"])
        for _ in range(draw.randint(1, 3)):
            content = changed(content, draw)
        meta["memory"] = json.dumps(content)
    return packed(header, tensors)


@pytest.mark.filterwarnings("ignore")
def test_changed_memory_files_are_refused_or_bounded(tmp_path):
    (tmp_path / "work").mkdir()
    path = tmp_path / "work" / "changed.gist"
    cases = list(files(tmp_path))
    seen = {"refused": 0, "loaded": 0}
    for seed in rounds(100):
        draw = random.Random(seed)
        compressor, data = cases[seed % 2]
        broken = mutated(data, draw)
        path.write_bytes(broken)
        try:
            # The checksum would hide from most changes what is behind it.
            memory = Memory.load(path, verify=seed % 8 == 0)
        except ValueError as error:
            assert str(error).startswith(f"{path}: expected "), (seed, error)
            seen["refused"] += 1
            continue
        seen["loaded"] += 1
        held = sum(tensor.numel() * tensor.element_size() for tensor in memory.tensors)
        assert held <= len(broken), seed
        # What loads is read, or refused in the same way.
        try:
            compressor.generate(memory, max_new_tokens=1)
        except ValueError as error:
            assert "expected" in str(error), (seed, error)
    assert [item.name for item in path.parent.iterdir()] == [path.name]
    assert seen["refused"] > seen["loaded"] > 0, seen


def test_the_changes_are_of_every_kind(tmp_path):
    data = next(files(tmp_path))[1]
    assert packed(*split(data)) != b"" and split(packed(*split(data))) == split(data)
    found = [mutated(data, random.Random(seed)) for seed in range(60)]
    assert len({len(each) for each in found}) > 20 and sum(len(each) == len(data) for each in found) > 5
