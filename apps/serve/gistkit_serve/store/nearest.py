"""The documents nearest to a text: an index in a store's folder, of their words or of vectors that a caller makes.

A document is divided into windows of words, and the nearest window counts for its document. The files of the index have
the windows of some documents each, as they are by themselves: how rare a word is among all documents is found when the
index is opened. So any number of processes may add files, and a later run adds what is new.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from gistkit.common.files import read_tensors, write_tensors
from gistkit.common.messages import shown

FORMAT, VERSION = "gistkit-index", "1"
# Words of a window: of 50, 100, 200 and whole documents the best in `benchmarks/lookup.py`.
WINDOW = 50
# Words are numbered by a hash below this.
TERMS = 2**20
# The CRC-32 of a text in the files of earlier releases, which have none.
UNKNOWN = -1
# Its vector says whether what embeds is what made an index: at most as far from it as rounding in half precision.
PROBE, FAR = "Who wrote this report, and when was it finished?", 0.2

# Vectors [N, D] of N texts, an array or what NumPy makes one of, such as `SentenceTransformer(...).encode`.
Embed = Callable[[list[str]], Any]


class File(NamedTuple):
    """A file of an index.

    Args:
        known: the name of each document, and the CRC-32 of its text or `UNKNOWN`.
        documents: [N], which of them each window is of.
        windows: a row each: the counts of their words, sparse, or vectors of length 1, [N, D].
        probe: the vector of PROBE; None: by words, or of a file without one.
    """

    known: list[tuple[str, int]]
    documents: np.ndarray
    windows: Any
    probe: np.ndarray | None


def windows(text: str) -> list[str]:
    """A text in parts of `WINDOW` words, at least one."""
    words = text.split()
    return [" ".join(words[start : start + WINDOW]) for start in range(0, max(len(words), 1), WINDOW)]


def word_tensors(texts: Sequence[str]) -> dict[str, Tensor]:
    """How often the hashed words of texts occur: row i has the terms and counts from starts[i] to starts[i + 1]."""
    counts = word_counter().transform(texts)
    return {
        "starts": torch.from_numpy(counts.indptr.astype(np.int64)),
        "terms": torch.from_numpy(counts.indices.astype(np.int32)),
        "counts": torch.from_numpy(np.minimum(counts.data, 255).astype(np.uint8)),
    }


def vector_tensors(texts: Sequence[str], embed: Embed) -> dict[str, Tensor]:
    """The vectors of texts, and of PROBE, of length 1."""
    vectors = unit_vectors(texts, embed)
    return {"vectors": torch.from_numpy(vectors), "probe": torch.from_numpy(unit_vectors([PROBE], embed)[0])}


def check_embed(embed: Embed, probes: Sequence[np.ndarray | None], folder: Path) -> None:
    """Compares what embeds documents with what made the vectors of an index, by the probes of its files.

    Raises:
        ValueError: if it is another.
    """
    kept = [probe for probe in probes if probe is not None]
    if not kept:
        return
    (found,) = unit_vectors([PROBE], embed)
    for probe in kept:
        if found.shape != probe.shape or np.linalg.norm(found - probe) > FAR:
            raise ValueError(
                f"embed: expected the model that made the vectors of {folder}, {len(probe)} numbers each, got another "
                f"({len(found)} numbers)"
            )


def unit_vectors(texts: Sequence[str], embed: Embed) -> np.ndarray:
    """What `embed` gives for texts, float32 [N, D], each of length 1, a vector of zeros as it is.

    Raises:
        ValueError: if it gives something else than a finite vector for each.
    """
    vectors = np.asarray(embed(list(texts)), np.float32)
    if vectors.ndim != 2 or len(vectors) != len(texts) or not vectors.shape[1]:
        raise ValueError(f"embed: expected a vector for each of {len(texts)} texts, got shape {vectors.shape}")
    if not np.isfinite(vectors).all():
        raise ValueError("embed: expected finite vectors, got a NaN or an infinity in them")
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)


def index_files(folder: Path, kind: str) -> list[Path]:
    """The files of an index, "words" or "vectors", in a store's folder."""
    return sorted(folder.glob(f"{kind}-*.safetensors"))


def write_file(
    folder: Path, kind: str, names: Mapping[str, int], documents: Tensor, tensors: Mapping[str, Tensor]
) -> None:
    """Adds a file to an index: the windows of documents, of which `documents` has the place among `names`.

    `names` have the CRC-32 of each text.
    """
    content = {**tensors, "documents": documents}
    listed, texts = json.dumps([*names]), json.dumps([*names.values()])
    header = {"format": FORMAT, "version": VERSION, "names": listed, "texts": texts}
    header["checksum"] = _checksum(header, content)
    # Who writes the same documents at a time writes the same file.
    write_tensors(folder / f"{kind}-{zlib.crc32(listed.encode()):08x}-{len(names)}.safetensors", content, header)


def read_file(path: Path, kind: str) -> File:
    """A file of an index of "words" or "vectors".

    Raises:
        ValueError: if it is damaged, of another version or of another kind.
        ImportError: if scikit-learn is needed and not installed.
    """
    header, tensors = read_tensors(path, "a file of a store's index", "one that is damaged")
    if (header.get("format"), header.get("version")) != (FORMAT, VERSION):
        found = f"{shown(header.get('format'))}, version {shown(header.get('version'))}"
        raise ValueError(f"{path}: expected format {FORMAT}, version {VERSION}, got {found}")
    if header.get("checksum") != _checksum(header, tensors):
        raise ValueError(f"{path}: expected contents of their checksum, got a file that is damaged; delete it")
    try:
        names, texts = json.loads(header["names"]), json.loads(header.get("texts", "null"))
        return _file(names, texts, {name: tensor.numpy() for name, tensor in tensors.items()}, kind)
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path}: expected windows of documents, got arrays that are none; delete it") from error


def _file(names: Any, texts: Any, arrays: Mapping[str, np.ndarray], kind: str) -> File:
    documents, probe = arrays["documents"], arrays.get("probe")
    named = isinstance(names, list) and all(isinstance(name, str) for name in names)
    texts = [UNKNOWN] * len(names) if texts is None else [int(text) for text in texts]
    if not named or (documents.dtype, documents.ndim) != (np.int32, 1):
        raise ValueError("documents that have no name")
    if documents.min() < 0 or documents.max() >= len(names):
        raise ValueError("documents that have no name")
    if kind == "words":
        # Whether it is there.
        word_counter()
        from scipy.sparse import csr_matrix

        if arrays["counts"].dtype != np.uint8:
            raise ValueError("counts that are none")
        parts = arrays["counts"].astype(np.float32), arrays["terms"], arrays["starts"]
        windows = csr_matrix(parts, (len(documents), TERMS))
        windows.check_format(full_check=True)
    else:
        windows = arrays["vectors"]
        if windows.ndim != 2 or {windows.dtype, windows.dtype if probe is None else probe.dtype} != {np.dtype("f4")}:
            raise ValueError("vectors that are none")
    if windows.shape[0] != len(documents) or (probe is not None and probe.shape != windows.shape[1:]):
        raise ValueError("windows of no document")
    return File([*zip(names, texts, strict=True)], documents, windows, probe)


class Nearest:
    """An index of a store, in memory.

    Args:
        folder: of the store.
        kind: "words" or "vectors".

    `names`: of the documents in the index, sorted; `known`: with the CRC-32 of each text, or `UNKNOWN`.

    Raises:
        FileNotFoundError: if there is no such index.
        ValueError: if a file is damaged, or vectors have other sizes than those of another.
        ImportError: if scikit-learn is needed and not installed.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        paths = index_files(folder, kind)
        if not paths:
            raise FileNotFoundError(f"{folder}: expected an index of {kind}, got a store without one")
        files = [read_file(path, kind) for path in paths]
        self._folder, self._probes = folder, [file.probe for file in files]
        # Several files may have a document, of processes that ran at a time: it is the same in all.
        self.known = sorted({known for file in files for known in file.known})
        self.names = sorted({name for name, _ in self.known})
        places = {known: place for place, known in enumerate(self.known)}
        self._documents = np.concatenate(
            [np.array([places[known] for known in file.known])[file.documents] for file in files]
        )
        windows, self._weights = [file.windows for file in files], None
        if kind == "words":
            from scipy.sparse import vstack
            from sklearn.feature_extraction.text import TfidfTransformer

            # Log counts of words, rare words more; by terms, so that a search reads those of its text alone.
            self._weights = TfidfTransformer(sublinear_tf=True)
            self._windows = self._weights.fit_transform(vstack(windows, "csr")).T.tocsr()
            return
        for path, own in zip(paths, windows, strict=True):
            if own.shape[1] != windows[0].shape[1]:
                raise ValueError(
                    f"{path}: expected vectors of {windows[0].shape[1]} numbers as in {paths[0].name}, got "
                    f"{own.shape[1]}"
                )
        self._windows = np.concatenate(windows)

    def check(self, embed: Embed) -> None:
        """A ValueError if `embed`, of documents, is not what made the vectors."""
        check_embed(embed, self._probes, self._folder)

    def ranked(self, text: str, embed: Embed | None) -> Iterator[tuple[str, int, float]]:
        """Names of documents, CRC-32s of their texts and scores, best first; by words without those that have none."""
        places, scores = self._scores(text, embed)
        best = np.full(len(self.known), -np.inf, np.float32)
        np.maximum.at(best, self._documents[places], scores)
        for document in np.argsort(-best, kind="stable"):
            if best[document] > -np.inf:
                yield *self.known[document], float(best[document])

    def _scores(self, text: str, embed: Embed | None) -> tuple[Any, np.ndarray]:
        """The windows that have something of a text, and their cosines."""
        if self._weights is not None:
            scores = self._weights.transform(word_counter().transform([text]).astype(np.float32)) @ self._windows
            return scores.indices, scores.data
        (query,) = unit_vectors([text], cast(Embed, embed))
        if len(query) != self._windows.shape[1]:
            raise ValueError(
                f"embed: expected vectors of {self._windows.shape[1]} numbers, as in the index, got {len(query)}, from "
                "another model"
            )
        return slice(None), self._windows @ query


def word_counter() -> Any:
    """Counts the words of texts; an ImportError says what to install."""
    try:
        from sklearn.feature_extraction.text import HashingVectorizer
    except ImportError as error:
        raise ImportError("scikit-learn is missing; run pip install './apps/serve[index]'") from error
    return HashingVectorizer(n_features=TERMS, norm=None, alternate_sign=False)


def _checksum(header: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    check = zlib.crc32((header.get("names", "") + header.get("texts", "")).encode())
    for name in sorted(tensors):
        values: Any = tensors[name].flatten().view(torch.uint8).numpy()
        check = zlib.crc32(values, zlib.crc32(name.encode(), check))
    return f"crc32:{check:08x}"
