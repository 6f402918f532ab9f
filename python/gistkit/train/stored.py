"""Token ids that need not fit in memory: in a file that is mapped, and corpora of them that are written once."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from gistkit.common.files import remove_partials, replacing_files

# Changed when what is written does.
VERSION = 1
ABOUT = "corpus.json"


class IdStore:
    """Token ids one after another, all of one dtype: in memory, or in a file, which then holds them alone.

    Args:
        file: opened to write and read; None: memory.
    """

    def __init__(self, file: IO[bytes] | None = None) -> None:
        self.file = file
        self.count = 0
        self._arrays: list[np.ndarray] = []
        self._dtype: np.dtype[Any] = np.dtype(np.uint8)

    def append(self, ids: np.ndarray) -> None:
        """Adds ids [n]."""
        self._dtype = ids.dtype
        self.count += len(ids)
        if self.file is None:
            self._arrays.append(ids)
        else:
            self.file.write(ids.tobytes())

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of what was added."""
        return self._dtype

    def finish(self) -> np.ndarray:
        """All ids [count]; those of a file are mapped, and read when they are asked for."""
        if self.file is None:
            return np.concatenate(self._arrays) if self._arrays else np.empty(0, self._dtype)
        self.file.flush()
        return mapped(self.file, self._dtype, self.count)


def mapped(file: IO[bytes] | Path, dtype: np.dtype[Any], count: int) -> np.ndarray:
    """The ids of a file, read when they are asked for. Writing into them changes memory alone."""
    # "c" and not "r": torch warns of arrays that cannot be written.
    return np.memmap(file, dtype, "c", shape=(count,)) if count else np.empty(0, dtype)


# What there is to know of streams of ids, and the streams by name.
Parts = tuple[Mapping[str, Any], Mapping[str, np.ndarray]]


def tokenizer_key(tokenizer: Any) -> str | None:
    """What is equal only for tokenizers that give equal ids; None where nothing tells, as of a function."""
    if tokenizer is None:
        return "bytes"
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return None if backend is None else hashlib.sha256(backend.to_str().encode()).hexdigest()


def kept(
    folder: Path, values: object, names: tuple[str, ...], read: Callable[[Mapping[str, IO[bytes]]], Mapping[str, Any]]
) -> Parts:
    """Streams of ids that were written before, or else are written now; of several processes one writes them.

    Args:
        folder: of all that is kept; made if there is none.
        values: what the ids are made from, equal only for equal ids, with a `repr` that is the same in every process.
        names: of the streams.
        read: writes each stream into the file of its name, in an `IdStore`, and returns what there is to know of them:
            {"dtypes": {name: dtype}, "counts": {name: ids}, ...}, values of JSON.
    """
    place = folder / hashlib.sha256(repr((VERSION, values)).encode()).hexdigest()[:16]
    with _locked(place):
        if (found := _load(place, names)) is not None:
            return found
        remove_partials(folder)
        with replacing_files(place) as partial:
            with ExitStack() as stack:
                files = {name: stack.enter_context((partial / f"{name}.bin").open("w+b")) for name in names}
                about = read(files)
            (partial / ABOUT).write_text(json.dumps(about), encoding="utf-8")
        found = _load(place, names)
        if found is None:
            raise OSError(f"{place}: expected the token ids that were just written there, got other files")
        return found


def _load(place: Path, names: tuple[str, ...]) -> Parts | None:
    """What is kept in a folder; None if it is not all there."""
    try:
        about = json.loads((place / ABOUT).read_text(encoding="utf-8"))
        arrays = {}
        for name in names:
            dtype, count = np.dtype(about["dtypes"][name]), about["counts"][name]
            if (place / f"{name}.bin").stat().st_size != count * dtype.itemsize:
                return None
            arrays[name] = mapped(place / f"{name}.bin", dtype, count)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return about, arrays


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Waits for whoever else is writing there."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".lock").open("wb") as lock:
        # Some network disks have no locks: then each writes, and the last one's files stay.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
