"""Results files, a run a line with everything that determined it; pictures as files.

A line is a JSON object: "study", "machine", the source as "text" or "images" {"name", "digest"}, "recipe" and "run".
Each line is complete, so that lines can be added, removed and merged. Attention maps are in FILE.npz beside FILE.jsonl,
in steps of 1e-5; a run's "attention" is then the name of its array.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np

from gistkit.common.files import Lines, replacing, write_picture
from gistkit.common.messages import one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Line = dict[str, Any]
# Attention weights are kept in these steps.
STEPS = 100_000


def line(study: str, run: Any, recipe: Any, source: Any, machine: Mapping[str, object], kind: str = "text") -> Line:
    """A run as a line of a file; run and recipe are dataclasses or mappings, and kind is "text" or "images"."""
    source_fields = {} if source is None else {kind: {"name": source.name, "digest": source.digest}}
    return {"study": study, "machine": dict(machine), **source_fields, "recipe": _values(recipe), "run": _values(run)}


def write(path: Path, lines: Sequence[Line]) -> None:
    """Writes a file; the previous one stays until the new one is complete."""
    arrays: dict[str, Any] = {}
    texts = [_encode_line(line, arrays) for line in lines]
    # Both are on the disk before one of them is in its place, first the arrays, which lines name.
    with replacing(path) as partial:
        partial.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        if arrays:
            _write_arrays(path.with_suffix(".npz"), arrays)
    if not arrays:
        path.with_suffix(".npz").unlink(missing_ok=True)


def append(path: Path, line: Line) -> None:
    """Adds a line; several processes may add lines to one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays_path = path.with_suffix(".npz")
    with closing(Lines(path)) as lines, _alone(lines.file):
        arrays = _arrays(arrays_path)
        before = len(arrays)
        text = _encode_line(line, arrays)
        if len(arrays) > before:
            _write_arrays(arrays_path, arrays)
        lines.write(text)


def load(path: Path) -> list[Line]:
    """The lines of a file, with their attention maps; a ValueError if it holds something else."""
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: expected a study's results, JSON lines; line {number}: {error}") from error
        if not isinstance(line, dict) or not isinstance(line.get("study"), str):
            raise ValueError(f"{path}: expected a study's results, got no field study in line {number}")
        lines.append(line)
    if any(isinstance(_attention(line), str) for line in lines):
        arrays = _arrays(path.with_suffix(".npz"))
        for line in lines:
            if isinstance(name := _attention(line), str):
                if name not in arrays:
                    raise ValueError(f"{path.with_suffix('.npz')}: expected the array {name}, as {path.name} has it")
                line["run"]["attention"] = (arrays[name] / STEPS).tolist()
    return lines


def save(folder: Path, figures: Mapping[str, Figure]) -> list[Path]:
    """Writes each figure as the PNG file of its name in `folder`."""
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.png")
        write_picture(paths[-1], figure, dpi=150)
    return paths


def _values(record: Any) -> dict[str, Any]:
    return asdict(record) if is_dataclass(record) and not isinstance(record, type) else dict(record)


def _attention(line: Line) -> object:
    run = line.get("run")
    return run.get("attention") if isinstance(run, dict) else None


@contextmanager
def _alone(file: Any) -> Iterator[None]:
    """Inside, no other process adds to the file."""
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _encode_line(line: Line, arrays: dict[str, Any]) -> str:
    """The text of a line; its attention map is added to `arrays`."""
    if weights := _attention(line):
        name = f"attention-{len(arrays)}"
        arrays[name] = np.rint(np.asarray(weights, dtype=np.float64) * STEPS).astype(np.uint32)
        line = line | {"run": line["run"] | {"attention": name}}
    return json.dumps(line, separators=(",", ":"), ensure_ascii=False)


def _arrays(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        with np.load(path) as arrays:
            return dict(arrays)
    except (ValueError, MemoryError, EOFError, NotImplementedError, BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path}: expected arrays of attention maps, got a file that cannot be read ({one_line(error)})"
        ) from error


def _write_arrays(path: Path, arrays: Mapping[str, Any]) -> None:
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez_compressed(file, **arrays)


def commit(folder: Path) -> str:
    """The commit of the sources around `folder`, with a mark if they differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        except OSError:
            return ""

    root = git("rev-parse", "--show-toplevel")
    sources = [f"{root}/{name}" for name in ("csrc", "python", "lab", "benchmarks/*.py")]
    changed = "+changes" if root and git("status", "--porcelain", "--", *sources) else ""
    return (git("rev-parse", "--short=10", "HEAD") or "unknown") + changed


def environment(folder: Path) -> dict[str, object]:
    """The machine, and the commit of the sources around `folder`."""
    import torch

    from gistkit.info import machine

    return {
        **machine(),
        "torch_isa": torch.backends.cpu.get_cpu_capability().lower(),
        "cores": os.cpu_count() or 0,
        "commit": commit(folder),
    }
