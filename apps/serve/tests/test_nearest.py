"""The nearest documents of a store: by words against tf-idf from its definition, by vectors against all cosines."""

import math
import re
import shutil
import sys
import zlib
from collections import Counter

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", reason="the index extra is not installed")

from gistkit.common.files import read_tensors, write_tensors
from gistkit_serve.store import Document, Store, compress_documents, index_documents
from gistkit_serve.store import indexing as building
from gistkit_serve.store import nearest as index
from tests.helpers.stores import documents, make_compressor, make_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
WORDS = ("river", "stone", "tower", "garden", "winter", "market", "letter", "copper", "violin", "harbor", "the", "a")


def texts(count=12, seed=0):
    """Texts of 1 to 120 words, the last two of the list common."""
    random = np.random.default_rng(seed)
    share = np.array([1] * 10 + [10] * 2) / 30
    return {f"{n}.txt": " ".join(random.choice(WORDS, random.integers(1, 121), p=share)) for n in range(count)}


TEXTS = texts() | {"a/march.md": "The committee met in March; they chose the copper violin over the stone garden."}


def write(folder, which=TEXTS):
    """A store of texts without an index."""
    compress_documents(make_compressor(), make_tokenizer(), documents(which), folder)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store with an index of words."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("stores") / "store"
    write(folder)
    assert index_documents(folder, documents(TEXTS)) == len(TEXTS)
    return folder


def scores(which, query):
    """{name: score} by the definition: cosines of (1 + log count) (1 + log((1 + N) / (1 + df))), the best window's."""
    words = lambda text: Counter(re.findall(r"\b\w\w+\b", text.lower()))  # noqa: E731
    rows = [
        (name, words(" ".join(text.split()[start : start + 50])))
        for name, text in which.items()
        for start in range(0, len(text.split()), 50)
    ]
    number = Counter(word for _, row in rows for word in row)

    def vector(row):
        found = {w: (1 + math.log(c)) * (1 + math.log((1 + len(rows)) / (1 + number[w]))) for w, c in row.items()}
        length = math.sqrt(sum(value**2 for value in found.values()))
        return {word: value / length for word, value in found.items()}

    asked, best = vector(words(query)), {}
    for name, row in rows:
        score = sum(value * asked.get(word, 0) for word, value in vector(row).items())
        best[name] = max(best.get(name, 0), score)
    return {name: score for name, score in best.items() if score}


@pytest.mark.parametrize("query", ["a copper violin", "river", "What did the committee choose in March?", "the the of"])
def test_the_nearest_by_words_are_those_of_the_definition(store, query):
    wanted, found = scores(TEXTS, query), Store(store).nearest(query, len(TEXTS))
    assert dict(found) == pytest.approx(wanted, rel=1e-4)
    assert [name for name, _ in found] == sorted(wanted, key=lambda name: (-dict(found)[name], name))
    assert Store(store).nearest(query) == found[:1] and Store(store).nearest(query, 3) == found[:3]


def test_who_has_no_word_of_the_text_is_left_out(store):
    assert Store(store).nearest("zebra", 5) == []
    assert [name for name, _ in Store(store).nearest("committee zebra", 5)] == ["a/march.md"]
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="k: expected a whole number >= 1"):
            Store(store).nearest("river", wrong)


def embed(rows):
    """How often each word is in a text, less a half."""
    return [[row.split().count(word) - 0.5 for word in WORDS] for row in rows]


def test_the_nearest_by_vectors_are_those_of_all_cosines(tmp_path):
    write(tmp_path / "store")
    assert index_documents(tmp_path / "store", documents(TEXTS), embed=embed) == len(TEXTS)
    query = np.array(embed(["river tower"]))[0]
    wanted = {}
    for name, text in TEXTS.items():
        rows = np.array(embed(index.windows(text)))
        cosines = rows @ query / np.linalg.norm(rows, axis=1) / np.linalg.norm(query)
        wanted[name] = max(cosines)
    opened = Store(tmp_path / "store")
    for k in (1, 4, 100):
        found = opened.nearest("river tower", k, embed=embed)
        names = sorted(wanted, key=lambda name: -wanted[name])[:k]
        assert [name for name, _ in found] == names
        assert [score for _, score in found] == pytest.approx([wanted[name] for name in names], abs=1e-5)
    with pytest.raises(FileNotFoundError, match="store: expected an index of words, got a store without one"):
        opened.nearest("river")
    with pytest.raises(ValueError, match="embed: expected vectors of 12 numbers, as in the index, got 2"):
        opened.nearest("river", embed=lambda rows: np.ones((len(rows), 2)))
    index_documents(tmp_path / "store", documents(TEXTS))
    assert Store(tmp_path / "store").nearest("committee")[0][0] == "a/march.md", "both are there"


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda rows: np.ones(len(rows)), r"embed: expected a vector for each of \d+ texts, got shape \(\d+,\)"),
        (lambda rows: np.ones((2, 3)), r"embed: expected a vector for each of \d+ texts, got shape \(2, 3\)"),
        (lambda rows: np.full((len(rows), 3), np.nan), "embed: expected finite vectors, got a NaN"),
    ],
)
def test_what_is_no_vector_is_refused(store, wrong, told):
    with pytest.raises(ValueError, match=told):
        index_documents(store, documents(TEXTS), embed=wrong)
    assert index.index_files(store, "vectors") == []


def test_an_index_goes_on_and_reads_only_what_it_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(building, "DOCUMENTS", 4)
    write(tmp_path / "store")
    read, told = [], []

    def counted(which):
        return [
            Document(name, len(text), lambda name=name, text=text: read.append(name) or text)
            for name, text in which.items()
        ]

    def stop(count):
        told.append(count)
        if len(told) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index_documents(tmp_path / "store", counted(TEXTS), on_file=stop)
    assert told == [0, 4, 4] and len(read) == 8
    assert index_documents(tmp_path / "store", counted(TEXTS)) == 5 and sorted(read) == sorted(TEXTS)
    assert index_documents(tmp_path / "store", counted(TEXTS)) == 0 and len(read) == len(TEXTS)
    more = TEXTS | {"new.txt": "a zebra in the garden"}
    write(tmp_path / "store", more)
    assert index_documents(tmp_path / "store", counted(more)) == 1
    assert dict(Store(tmp_path / "store").nearest("zebra garden", 99)) == pytest.approx(
        scores(more, "zebra garden"), rel=1e-4
    )


def test_an_index_finds_what_the_store_has_now(store, tmp_path):
    """Not a document that has gone, nor by the old words of one that was compressed again with another text."""
    folder = tmp_path / "store"
    shutil.copytree(store, folder)
    (folder / "a/march.md.gist").unlink()
    assert Store(folder).nearest("committee") == [] != Store(folder).nearest("the stone", 2)
    changed = TEXTS | {"a/march.md": "a zebra in the garden"}
    write(folder, changed)
    assert Store(folder).nearest("committee") == Store(folder).nearest("zebra") == []
    assert [index_documents(folder, documents(changed)) for _ in range(2)] == [1, 0]
    assert Store(folder).nearest("committee") == [] and Store(folder).nearest("zebra")[0][0] == "a/march.md"


def test_an_index_of_an_earlier_release_is_read(store, tmp_path):
    """Its files say nothing of the texts."""
    shutil.copytree(store, tmp_path / "store")
    (path,) = index.index_files(tmp_path / "store", "words")
    header, tensors = read_tensors(path, "an index")
    del header["texts"]
    write_tensors(path, tensors, header | {"checksum": index._checksum(header, tensors)})
    assert index_documents(tmp_path / "store", documents(TEXTS)) == 0
    assert Store(tmp_path / "store").nearest("river", 9) == Store(store).nearest("river", 9)


def test_parts_make_the_index_of_one(store, tmp_path):
    for parts in (2, 3):
        folder = tmp_path / str(parts)
        write(folder)
        counts = [index_documents(folder, documents(TEXTS), part=part, parts=parts) for part in range(parts)]
        assert sum(counts) == len(TEXTS) and max(counts) - min(counts) <= 1
        for query in ("river copper", "the committee"):
            found, whole = Store(folder).nearest(query, 99), Store(store).nearest(query, 99)
            assert [*map(tuple, found)] == [(name, pytest.approx(score, rel=1e-5)) for name, score in whole]
    # A process that ran beside others with other parts.
    for path in index.index_files(tmp_path / "2", "words"):
        shutil.copy(path, tmp_path / "3")
    found = [name for name, _ in Store(tmp_path / "3").nearest("committee the", 99)]
    assert found[0] == "a/march.md" and sorted(found) == sorted({*found}), "no document twice"


def test_what_does_not_belong_to_the_store_is_refused(store, tmp_path):
    other = documents({"none.txt": "not compressed"})
    with pytest.raises(ValueError, match=r"none.txt: expected a document of the store .*, got none of this name"):
        index_documents(store, other)
    write(tmp_path / "store")
    with pytest.raises(ValueError, match=r"0.txt: expected the text that the store has under this name, got another"):
        index_documents(tmp_path / "store", documents(TEXTS | {"0.txt": "changed"}))
    with pytest.raises(FileNotFoundError, match=r"store.json: expected the header of a store, found none"):
        index_documents(tmp_path / "nothing", other)


def damage(path, how):
    """Spoils a file of an index; all but `flip` and `short` with a right checksum."""
    content = bytearray(path.read_bytes())
    if how in ("flip", "short"):
        content[-3] ^= 1
        path.write_bytes(content if how == "flip" else content[:-5])
        return
    header, tensors = read_tensors(path, "an index")
    if how == "version":
        header["version"] = "9"
    elif how == "names":
        header["names"] = "{}"
    elif how == "texts":
        header["texts"] = "[Infinity]"
    elif how == "terms":
        tensors["terms"][0] = -1
    elif how == "starts":
        tensors["starts"][1] = 10**9
    elif how == "documents":
        tensors["documents"][0] = 99
    elif how == "counts":
        tensors["counts"] = tensors["counts"].to(torch.bfloat16)
    elif how == "column":
        tensors["documents"] = tensors["documents"][:, None]
    elif how == "missing":
        del tensors["counts"]
    elif how == "kind":
        tensors = {"documents": tensors["documents"], "vectors": torch.ones(len(tensors["documents"]), 3)}
    elif how == "fewer":
        tensors["documents"] = tensors["documents"][:-1]
    header["checksum"] = index._checksum(header, tensors)
    write_tensors(path, tensors, header)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("flip", "expected contents of their checksum, got a file that is damaged; delete it"),
        ("short", "expected a file of a store's index, got one that is damaged"),
        ("version", "expected format gistkit-index, version 1, got gistkit-index, version 9"),
        *((how, "expected windows of documents, got arrays") for how in ("names", "texts", "terms", "starts")),
        *((how, "expected windows of documents, got arrays") for how in ("documents", "counts", "missing", "kind")),
        *((how, "expected windows of documents, got arrays") for how in ("fewer", "column")),
    ],
)
def test_a_damaged_index_is_refused_and_made_again_once_deleted(store, tmp_path, how, told):
    shutil.copytree(store, tmp_path / "store")
    (path,) = index.index_files(tmp_path / "store", "words")
    damage(path, how)
    with pytest.raises(ValueError, match=re.escape(told)) as caught:
        Store(tmp_path / "store").nearest("river")
    assert str(caught.value).startswith(str(path))
    path.unlink()
    index_documents(tmp_path / "store", documents(TEXTS))
    assert Store(tmp_path / "store").nearest("river", 9) == Store(store).nearest("river", 9)


def test_names_of_files_follow_their_documents(store):
    (path,) = index.index_files(store, "words")
    header, _ = read_tensors(path, "an index")
    assert path.name == f"words-{zlib.crc32(header['names'].encode()):08x}-{len(TEXTS)}.safetensors"


def test_a_missing_package_is_named(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.feature_extraction.text", None)
    with pytest.raises(ImportError, match=r"scikit-learn is missing; run pip install '\./apps/serve\[index\]'"):
        Store(store).nearest("river")
