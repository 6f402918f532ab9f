"""The documents nearest to a text: an index in a store's folder, of their words or of vectors that a caller makes.

A document is divided into windows of words, and the nearest window counts for its document. The files of the index have
the windows of some documents each, as they are by themselves: how rare a word is among all documents is found when the
index is opened. So any number of processes may add files, and a later run adds what is new.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

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
# Its vector says whether what embeds is what made an index: at most as far from it as rounding in half precision.
PROBE, FAR = "Who wrote this report, and when was it finished?", 0.2
INSTALL = "run pip install './apps/serve[index]'"

# Vectors [N, D] of N texts, an array or what NumPy makes one of, such as `SentenceTransformer(...).encode`.
Embed = Callable[[list[str]], Any]


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


def check_embed(embed: Embed, files: Sequence[Mapping[str, np.ndarray]], folder: Path) -> None:
    """Compares what embeds documents with what made the files of an index; those without a probe have any.

    Raises:
        ValueError: if it is another.
    """
    probes = [file["probe"] for file in files if "probe" in file]
    if not probes:
        return
    (found,) = unit_vectors([PROBE], embed)
    for probe in probes:
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


def write_file(folder: Path, kind: str, names: Sequence[str], documents: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Adds a file to an index: the windows of documents, of which `documents` has the place among `names`."""
    content = {**tensors, "documents": documents}
    listed = json.dumps(list(names))
    header = {"format": FORMAT, "version": VERSION, "names": listed, "checksum": _checksum(listed, content)}
    # Who writes the same documents at a time writes the same file.
    write_tensors(folder / f"{kind}-{zlib.crc32(listed.encode()):08x}-{len(names)}.safetensors", content, header)


def read_file(path: Path) -> tuple[list[str], dict[str, np.ndarray]]:
    """The names and the arrays of a file of an index.

    Raises:
        ValueError: if it is damaged or of another version.
    """
    header, tensors = read_tensors(path, "a file of a store's index", "one that is damaged")
    if (header.get("format"), header.get("version")) != (FORMAT, VERSION):
        found = f"{shown(header.get('format'))}, version {shown(header.get('version'))}"
        raise ValueError(f"{path}: expected format {FORMAT}, version {VERSION}, got {found}")
    if header.get("checksum") != _checksum(header.get("names", ""), tensors):
        raise ValueError(f"{path}: expected contents of their checksum, got a file that is damaged; delete it")
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    try:
        names = json.loads(header["names"])
        right = _is_right(names, arrays)
    except (ValueError, LookupError, TypeError, RecursionError):
        right = False
    if not right:
        raise ValueError(f"{path}: expected windows of documents, got arrays that are none; delete it")
    return names, arrays


class Nearest:
    """An index of a store, in memory.

    Args:
        folder: of the store.
        kind: "words" or "vectors".

    `names`: of the documents in the index, sorted.

    Raises:
        FileNotFoundError: if there is no such index.
        ValueError: if a file is damaged, or vectors have other sizes than those of another.
        ImportError: if scikit-learn, or FAISS for vectors, is not installed.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        paths = index_files(folder, kind)
        if not paths:
            raise FileNotFoundError(f"{folder}: expected an index of {kind}, got a store without one")
        parts = [read_file(path) for path in paths]
        for path, (_, arrays) in zip(paths, parts, strict=True):
            if ("vectors" in arrays) != (kind == "vectors"):
                raise ValueError(f"{path}: expected {kind}, got a file of another index")
        # Several files may have a document, of processes that ran at a time: it is the same in all.
        listed = np.array([name for names, _ in parts for name in names], object)
        unique, places = np.unique(listed, return_inverse=True)
        self.names: list[str] = unique.tolist()
        starts = np.cumsum([0, *(len(names) for names, _ in parts)])
        self._documents = places[
            np.concatenate([arrays["documents"] + start for (_, arrays), start in zip(parts, starts, strict=False)])
        ]
        files = [arrays for _, arrays in parts]
        self._search = _word_search(files) if kind == "words" else _vector_search(paths, files)
        self._probes = [{"probe": arrays["probe"]} for arrays in files if "probe" in arrays]
        self._folder = folder

    def check(self, embed: Embed) -> None:
        """A ValueError if `embed`, of documents, is not what made the vectors."""
        check_embed(embed, self._probes, self._folder)

    def nearest(self, text: str, k: int, embed: Embed | None) -> list[tuple[str, float]]:
        """At most k documents and their scores, best first; those of words leave out who has none of the text's."""
        rows = min(4 * k, len(self._documents))
        while True:
            found, scores = self._search(text, embed, rows)
            best: dict[int, float] = {}
            for document, score in zip(self._documents[found].tolist(), scores.tolist(), strict=True):
                best[document] = max(best.get(document, score), score)
            # Other windows of the same documents may have come first.
            if len(best) >= k or len(found) < rows or rows == len(self._documents):
                break
            rows = min(4 * rows, len(self._documents))
        ranked = sorted(best, key=lambda document: (-best[document], document))[:k]
        return [(self.names[document], best[document]) for document in ranked]


# The rows nearest to a text, by what embeds it, at most so many, and their scores.
_Search = Callable[[str, "Embed | None", int], tuple[np.ndarray, np.ndarray]]


def _word_search(files: Sequence[Mapping[str, np.ndarray]]) -> _Search:
    """Cosines of tf-idf: log counts of words, rare words more, as scikit-learn has them."""
    counter = word_counter()
    from scipy.sparse import csr_matrix, vstack
    from sklearn.feature_extraction.text import TfidfTransformer

    counts = vstack(
        [
            csr_matrix(
                (file["counts"].astype(np.float32), file["terms"], file["starts"]),
                shape=(len(file["documents"]), TERMS),
            )
            for file in files
        ],
        "csr",
    )
    weights = TfidfTransformer(sublinear_tf=True)
    # By terms, so that a search reads those of its text alone.
    by_term = weights.fit_transform(counts).T.tocsr()

    def search(text: str, embed: Embed | None, most: int) -> tuple[np.ndarray, np.ndarray]:
        scores = weights.transform(counter.transform([text]).astype(np.float32)) @ by_term
        order = np.lexsort((scores.indices, -scores.data))[:most]
        return scores.indices[order], scores.data[order]

    return search


def _vector_search(paths: Sequence[Path], files: Sequence[Mapping[str, np.ndarray]]) -> _Search:
    """Cosines of vectors, all compared: 100,000 of 384 take some 40 ms."""
    try:
        import faiss
    except ImportError as error:
        raise ImportError(f"faiss is missing; {INSTALL}") from error
    width = files[0]["vectors"].shape[1]
    index = faiss.IndexFlatIP(width)
    for path, file in zip(paths, files, strict=True):
        if file["vectors"].shape[1] != width:
            raise ValueError(
                f"{path}: expected vectors of {width} numbers as in {paths[0].name}, got {file['vectors'].shape[1]}"
            )
        index.add(np.ascontiguousarray(file["vectors"]))

    def search(text: str, embed: Embed | None, most: int) -> tuple[np.ndarray, np.ndarray]:
        query = unit_vectors([text], cast(Embed, embed))
        if query.shape[1] != width:
            raise ValueError(
                f"embed: expected vectors of {width} numbers, as in the index, got {query.shape[1]}, from another model"
            )
        # FAISS has an OpenMP of its own, which knows nothing of torch's threads.
        faiss.omp_set_num_threads(torch.get_num_threads())
        scores, found = index.search(query, most)
        return found[0], scores[0]

    return search


def word_counter() -> Any:
    """Counts the words of texts; an ImportError says what to install."""
    try:
        from sklearn.feature_extraction.text import HashingVectorizer
    except ImportError as error:
        raise ImportError(f"scikit-learn is missing; {INSTALL}") from error
    return HashingVectorizer(n_features=TERMS, norm=None, alternate_sign=False)


def _checksum(names: str, tensors: Mapping[str, Tensor]) -> str:
    check = zlib.crc32(names.encode())
    for name in sorted(tensors):
        check = zlib.crc32(tensors[name].contiguous().numpy().tobytes(), zlib.crc32(name.encode(), check))
    return f"crc32:{check:08x}"


def _is_right(names: Any, arrays: Mapping[str, np.ndarray]) -> bool:
    """Whether the arrays of a file are windows of the named documents."""
    documents = arrays["documents"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return False
    if documents.dtype != np.int32 or documents.ndim != 1 or not len(documents):
        return False
    if documents.min() < 0 or documents.max() >= len(names):
        return False
    if "vectors" in arrays:
        if not {"documents", "vectors"} <= arrays.keys() <= {"documents", "vectors", "probe"}:
            return False
        vectors, probe = arrays["vectors"], arrays.get("probe", arrays["vectors"][:1].reshape(-1))
        shapes = vectors.ndim == 2 and len(vectors) == len(documents) and probe.shape == vectors.shape[1:]
        return shapes and vectors.dtype == probe.dtype == np.float32
    starts, terms, counts = (arrays[name] for name in ("starts", "terms", "counts"))
    kinds = (starts.dtype, terms.dtype, counts.dtype) == (np.int64, np.int32, np.uint8)
    shapes = starts.shape == (len(documents) + 1,) and terms.shape == counts.shape == (starts[-1],)
    ordered = shapes and starts[0] == 0 and bool((np.diff(starts) >= 0).all())
    return kinds and ordered and bool(((terms >= 0) & (terms < TERMS)).all())
