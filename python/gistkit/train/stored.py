"""Token ids in files that are mapped, so that they need not fit in memory; those of large texts are written once."""

from __future__ import annotations

import fcntl
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from io import BytesIO
from os import SEEK_END
from pathlib import Path
from typing import IO, Any

import numpy as np

from gistkit.common.files import remove_partials, replacing_files

# Changed when what is written does.
VERSION = 2
ABOUT = "corpus.json"


# What there is to know of streams of ids, and the streams by name.
Parts = tuple[Mapping[str, Any], Mapping[str, np.ndarray]]


def tokenizer_key(tokenizer: Any) -> str | None:
    """What is equal only for tokenizers that give equal ids; None if they cannot be compared, as of a function."""
    if tokenizer is None:
        return "bytes"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return None if backend is None else hashlib.sha256(backend.to_str().encode()).hexdigest()


def kept(
    folder: Path | None,
    values: object,
    names: tuple[str, ...],
    read: Callable[[Mapping[str, IO[bytes]]], Mapping[str, Any]],
) -> Parts:
    """Streams of ids that were written before, or else are written now; of several processes one writes them.

    Args:
        folder: of all that is kept, made if there is none; None: memory.
        values: what the ids are made from, equal only for equal ids, with a `repr` that is the same in every process.
            None: not comparable; the files then have no name, and are removed when nothing maps them.
        names: of the streams.
        read: writes each stream into the file of its name, and returns what there is to know of them:
            {"dtypes": {name: dtype}, "counts": {name: ids}, ...}, values of JSON.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    if folder is None or values is None:
        with ExitStack() as stack:
            files: dict[str, IO[bytes]] = {
                name: BytesIO() if folder is None else stack.enter_context(tempfile.TemporaryFile(dir=folder))
                for name in names
            }
            about = read(files)
            return about, {name: _mapped(file, about, name) for name, file in files.items()}
    place = folder / hashlib.sha256(repr((VERSION, values)).encode()).hexdigest()[:16]
    with _locked(place):
        if (found := _load(place, names)) is not None:
            return found
        remove_partials(folder)
        with replacing_files(place) as partial:
            with ExitStack() as stack:
                about = read({name: stack.enter_context((partial / f"{name}.bin").open("w+b")) for name in names})
            (partial / ABOUT).write_text(json.dumps(about), encoding="utf-8")
        found = _load(place, names)
        if found is None:
            raise OSError(f"{place}: expected the token ids that were just written there, got other files")
        return found


def _mapped(file: IO[bytes] | Path, about: Mapping[str, Any], name: str) -> np.ndarray:
    """The ids of a file, read when they are asked for. Writing into them changes only memory."""
    dtype, count = np.dtype(about["dtypes"][name]), about["counts"][name]
    size = file.stat().st_size if isinstance(file, Path) else file.seek(0, SEEK_END)
    if size != count * dtype.itemsize:
        raise ValueError(f"{file}: expected {count} token ids, got {size} bytes")
    if count and isinstance(file, BytesIO):
        return np.frombuffer(file.getbuffer(), dtype)
    # "c" and not "r": torch warns of arrays that cannot be written.
    return np.memmap(file, dtype, "c", shape=(count,)) if count else np.empty(0, dtype)


def _load(place: Path, names: tuple[str, ...]) -> Parts | None:
    """What is kept in a folder; None if it is not all there."""
    try:
        about = json.loads((place / ABOUT).read_text(encoding="utf-8"))
        arrays = {name: _mapped(place / f"{name}.bin", about, name) for name in names}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return about, arrays


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Waits for whoever else is writing there."""
    with place.with_suffix(".lock").open("wb") as lock:
        # Some network disks have no locks: then each writes, and the last one's files stay.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
