"""Folders of files that are changed at random, as hostile or broken ones are: the same change for the same seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NUMBERS = [0, 1, -1, 2, 7, 2**31 - 1, 2**31, 10**9, 20_000_000, 2**63, 10**400, -(10**30), 0.5, 1.5, 1e308, -1e308]
NUMBERS += [float("nan"), float("inf"), float("-inf"), True, False, None]
TEXTS = ["", "x", ".", "..", "../..", "/etc/passwd", "a/b", "a" * 2**20, "(a+)+$", ".*", "a\nb", "\x00", "all-linear"]
TEXTS += ["icae", "x500", "dodo", "cpl", "compression", "float64", "meta", "é"]
NESTED: list[Any] = [[], {}, [[[[]]]], {"a": {"b": {"c": 1}}}, [1, 2, 3], ["q_proj"], [None], list(range(10_000))]
NESTED += [[["a"]] * 300, {"q_proj": 20_000_000}, {"(a+)+$": 4}, {"lm": 1.0}, {"ae": 10**400}, [0.5, "x"]]
DTYPES = ["F64", "F32", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "F4", "C64", "X", 3, None]


def changed(folder: Path, seed: int) -> str:
    """Changes a folder's files in one way or several; what was done, in words."""
    generator = random.Random(seed)
    count = generator.choice([1, 1, 1, 1, 2, 3])
    return "; ".join(_change(folder, generator) for _ in range(count))


def _change(folder: Path, generator: random.Random) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix in (".json", ".safetensors"))
    if not files:
        return "nothing left"
    path = generator.choice(files)
    if generator.random() < 0.1:
        return _whole_file(path, files, generator)
    return changed_json(path, generator) if path.suffix == ".json" else changed_tensors(path, generator)


def _whole_file(path: Path, files: list[Path], generator: random.Random) -> str:
    kind = generator.choice(["remove", "swap", "empty", "link", "folder"])
    other = generator.choice(files)
    if kind == "swap" and other != path:
        first, second = path.read_bytes(), other.read_bytes()
        path.write_bytes(second)
        other.write_bytes(first)
        return f"{path.name} and {other} swapped"
    content = path.read_bytes()
    path.unlink()
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "link":
        outside = path.parent.parent / f"outside-{generator.random()}"
        outside.write_bytes(content)
        path.symlink_to(generator.choice([outside, Path("/dev/zero"), path]))
    elif kind == "folder":
        path.mkdir()
    return f"{path.name}: {kind}"


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where there are values inside a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*place, key)
        yield from _places(part, (*place, key))


def changed_json(path: Path, generator: random.Random) -> str:
    """Changes one value of a JSON file, or the text of it."""
    text = path.read_bytes()
    if generator.random() < 0.1:
        part = text[: generator.randrange(len(text) + 1)]
        raw = generator.choice([part, b"[" * 100_000, b"\xff" + text, b"{}", b"1" * 5000, b'{"a"' * 99])
        path.write_bytes(raw)
        return f"{path.name} is {raw[:20]!r}"
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return f"{path.name} cannot be read already"
    places = list(_places(content)) if isinstance(content, dict | list) else []
    if not places:
        return f"{path.name} is empty"
    place = generator.choice(places)
    holder = content
    for key in place[:-1]:
        holder = holder[key]
    value = generator.choice(generator.choice([NUMBERS, TEXTS, NESTED]))
    kind = generator.choice(["replace"] * 6 + ["remove", "add"])
    if kind == "remove":
        del holder[place[-1]]
    elif kind == "add" and isinstance(holder, dict):
        holder[generator.choice(TEXTS)] = value
    else:
        holder[place[-1]] = value
    path.write_text(json.dumps(content))
    return f"{path.name}: {kind} {place} {str(value)[:40]!r}"


def changed_tensors(path: Path, generator: random.Random) -> str:
    """Changes bits, the length or the header of a safetensors file."""
    data = bytearray(path.read_bytes())
    if len(data) < 9:
        return f"{path.name} is too short"
    length = int.from_bytes(data[:8], "little")
    kind = generator.choice(["flip", "flip header", "cut", "claim", "claim", "claim"])
    if kind == "cut":
        path.write_bytes(data[: generator.randrange(len(data))])
    elif kind == "claim" and 8 + length <= len(data):
        try:
            header = json.loads(bytes(data[8 : 8 + length]))
        except ValueError:
            return f"{path.name} cannot be read already"
        path.write_bytes(_claim(header, generator) + data[8 + length :])
    else:
        end = min(8 + length, len(data)) if kind == "flip header" else len(data)
        for _ in range(generator.choice([1, 1, 8])):
            data[generator.randrange(end)] ^= 1 << generator.randrange(8)
        path.write_bytes(data)
    return f"{path.name}: {kind}"


def _claim(header: Any, generator: random.Random) -> bytes:
    """A header whose tensors claim something else than their bytes are."""
    names = [name for name in header if name != "__metadata__"] if isinstance(header, dict) else []
    if names:
        name = generator.choice(names)
        entry = header[name]
        kind = generator.choice(["shape", "shape", "shape", "dtype", "offsets", "rename", "remove", "more"])
        if kind == "shape" and isinstance(entry, dict):
            empty = [[20_000_000, 0], [0, 10**9], [0], [2**62, 0]]
            entry["shape"] = generator.choice([*empty, [10**9], [-1, 4], [], list(reversed(entry["shape"])), NUMBERS])
            if entry["shape"] in empty:
                entry["data_offsets"] = [entry["data_offsets"][0]] * 2
        elif kind == "dtype" and isinstance(entry, dict):
            entry["dtype"] = generator.choice(DTYPES)
        elif kind == "offsets" and isinstance(entry, dict):
            entry["data_offsets"] = generator.choice([[0, 10**12], [0, 0], [5, 1], [0, 2**64], "x", []])
        elif kind == "rename":
            header[generator.choice(TEXTS)] = header.pop(name)
        elif kind == "remove":
            del header[name]
        else:
            header["more"] = {"dtype": "F32", "shape": [2**40, 0], "data_offsets": [0, 0]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text
