"""Stores: every document once and as by itself, whatever is killed, and errors for what is damaged."""

import errno
import os
import shutil
import tracemalloc

import pytest
import torch

from gistkit.common.files import replacing, write_tensors
from gistkit.compress import Memory
from gistkit.compress.memory_files import packed
from gistkit_serve.store import Store, compress_documents, index_documents
from tests.helpers.launched import command, fill, launch
from tests.helpers.models import byte_tokenizer
from tests.helpers.stores import documents, make_compressor, make_texts, make_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = make_texts(25)


def write(folder, texts=TEXTS, compressor=None, **options):
    """A store of some texts; the number of new ones."""
    options = {"batch_tokens": 100} | options
    return compress_documents(compressor or make_compressor(), make_tokenizer(), documents(texts), folder, **options)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store of all texts, made without a break."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("stores") / "whole"
    assert write(folder) == len(TEXTS)
    return folder


def contents(folder):
    """All of a store, to the bit; safetensors writes the parts of a header in any order."""
    opened, found = Store(folder), [(folder / "store.json").read_text()]
    for name, entry in opened.entries.items():
        tensors, header = packed(opened[name])
        found.append((entry, header, {key: tensor.numpy().tobytes() for key, tensor in tensors.items()}))
    return found


def right(folder, texts=TEXTS):
    """Whether a store has each document once, and its memory as the document alone has it."""
    opened, compressor, tokenizer = Store(folder), make_compressor(), make_tokenizer()
    assert sorted(texts) == list(opened) == list(opened.entries) and len(opened) == len(texts)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {"store.json", *(f"{name}.gist" for name in texts)}
    for name, text in texts.items():
        memory, expected = opened[name], compressor.encode([tokenizer(text)["input_ids"]])
        assert (memory.lengths, memory.source) == (expected.lengths, expected.source)
        for ours, theirs in zip(memory.tensors, expected.tensors, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return True


def test_a_store_has_the_memory_of_each_document(store):
    assert right(store)
    entry, opened = Store(store).entries["1/8.txt"], Store(store)
    assert (entry.tokens, entry.memory_tokens) == (len(TEXTS["1/8.txt"]), opened["1/8.txt"].lengths[0])
    # A memory of a store is a file of its own.
    file = store / "1/8.txt.gist"
    assert Memory.load(file).maker == opened["1/8.txt"].maker and entry.nbytes == file.stat().st_size
    assert repr(opened) == f"Store({str(store)!r}: 25 documents)"
    with pytest.raises(KeyError):
        opened["none"]


def test_documents_of_like_lengths_are_encoded_together(tmp_path, monkeypatch):
    compressor, shapes = make_compressor(), []
    encode = compressor.encode
    monkeypatch.setattr(compressor, "encode", lambda rows: shapes.append([len(row) for row in rows]) or encode(rows))
    write(tmp_path / "store", compressor=compressor)
    assert sum(map(len, shapes)) == len(TEXTS) and len(shapes) < 10
    flat = [length for batch in shapes for length in batch]
    assert flat == sorted(flat, reverse=True)
    assert all(len(batch) * batch[0] <= 100 for batch in shapes)


def test_a_store_goes_on_where_it_ended(store, tmp_path):
    shutil.copytree(store, tmp_path / "store")
    assert write(tmp_path / "store") == 0 and contents(tmp_path / "store") == contents(store)
    more = TEXTS | {"new.txt": "a new one"}
    assert write(tmp_path / "store", more) == 1 and right(tmp_path / "store", more)


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_hold_each_document_once(tmp_path, parts):
    """Each after the other, and a run that was broken off goes on with another number of parts."""
    counts = [write(tmp_path / "store", part=part, parts=parts) for part in range(parts)]
    assert sum(counts) == len(TEXTS) and max(counts) - min(counts) <= 1
    assert right(tmp_path / "store")
    write(tmp_path / "broken", part=1, parts=parts)
    assert write(tmp_path / "broken") == len(TEXTS) - counts[1] and right(tmp_path / "broken")


@pytest.mark.slow
@pytest.mark.parametrize("stop", [("before", 1), ("before", 12), ("after", 12), ("after", 25)])
def test_a_store_whose_writer_was_killed_goes_on_to_the_same_store(store, tmp_path, stop):
    launch(1, fill, str(tmp_path / "store"), TEXTS, 100, stop, logs=tmp_path, expected=-9)
    left = len(Store(tmp_path / "store"))
    assert left == stop[1] - (stop[0] == "before"), "what is in its place is there"
    assert write(tmp_path / "store") == len(TEXTS) - left
    assert contents(tmp_path / "store") == contents(store)


@pytest.mark.slow
def test_two_processes_fill_a_store_and_after_a_kill_one_goes_on(tmp_path):
    launch(2, fill, str(tmp_path / "store"), TEXTS, 100, logs=tmp_path)
    assert right(tmp_path / "store")
    launch(2, fill, str(tmp_path / "killed"), TEXTS, 100, ("before", 5), logs=tmp_path, expected=-9)
    assert len(Store(tmp_path / "killed")) == 8
    assert write(tmp_path / "killed") == 17 and right(tmp_path / "killed")


@pytest.mark.slow
def test_the_command_shares_a_folder_among_processes(tmp_path):
    pytest.importorskip("sklearn", reason="the index extra is not installed")
    from transformers import LlamaForCausalLM

    model = make_compressor().model
    assert isinstance(model, LlamaForCausalLM)
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    for name, text in TEXTS.items():
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    words = ("compress", str(tmp_path / "texts"), "-o", str(tmp_path / "store"), "--model", str(tmp_path / "model"))
    launch(2, command, *words, "--chunk", "6", "--ratio", "3", "--index", logs=tmp_path)
    assert sorted(Store(tmp_path / "store")) == sorted(TEXTS)
    assert Store(tmp_path / "store").index().names == sorted(TEXTS)
    told = [(tmp_path / f"process-{rank}.log").read_text() for rank in range(2)]
    assert "process 0 of 2: 13 documents in " in told[0] and "process 1 of 2: 12 documents in " in told[1]
    assert "document/s" in told[0] and "document/s" not in told[1], "one bar for all"


@pytest.mark.nightly
def test_ten_thousand_documents(tmp_path, monkeypatch):
    """A writer is killed in the middle and another goes on; then all are found, by name and by their words."""
    pytest.importorskip("sklearn", reason="the index extra is not installed")
    texts, compressor, folder = make_texts(10_000), make_compressor(), tmp_path / "store"
    launch(1, fill, str(folder), texts, 8192, ("before", 5_000), logs=tmp_path, expected=-9)
    kept = {path: path.stat().st_mtime_ns for path in folder.rglob("*.gist") if len(path.parent.name) == 1}
    assert len(Store(folder)) == len(kept) == 4_999
    assert write(folder, texts, compressor, batch_tokens=8192) == 5_001
    assert all(path.stat().st_mtime_ns == then for path, then in kept.items()), "nothing is written again"
    assert index_documents(folder, documents(texts)) == 10_000

    # Whatever is there is neither tokenized nor compressed again.
    monkeypatch.setattr(compressor, "encode", None)
    assert compress_documents(compressor, None, documents(texts), folder) == 0
    assert index_documents(folder, documents(texts)) == 0

    tracemalloc.start()
    opened = Store(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6 and list(opened) == sorted(texts)
    monkeypatch.setattr(Memory, "load", None)
    for number in (8_123, 4_747, 9_996):
        name = f"{number % 7}/{number}.txt"
        # No memory is read for it.
        assert opened.nearest(f"Which text is about {number}?")[0][0] == name
    monkeypatch.undo()
    (row,) = make_tokenizer()([texts[name]])["input_ids"]
    for ours, theirs in zip(opened[name].tensors, compressor.encode([row]).tensors, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_there_is_no_part_beyond_the_last(tmp_path):
    for part, parts, told in (
        (2, 2, "part: expected a number below parts, 2, got 2"),
        (-1, 2, "part: expected a whole number >= 0, got -1"),
        (0, 0, "parts: expected a whole number >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match=told):
            write(tmp_path / "store", part=part, parts=parts)
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"version": 2', '"version": 7', "format gistkit-store, version 2, got gistkit-store, version 7"),
        ('"version": 2', '"version": 1', "version 2, got 1 of an earlier gistkit; compress the texts again"),
        ('"maker"', '"made"', "the header of a store, got none for maker"),
    ],
)
def test_a_damaged_header_is_refused(store, tmp_path, old, new, told):
    header = tmp_path / "store.json"
    header.write_text((store / "store.json").read_text().replace(old, new))
    with pytest.raises(ValueError) as caught:
        Store(tmp_path)
    assert str(caught.value) == f"{header}: expected {told}"
    header.unlink()
    with pytest.raises(FileNotFoundError, match=r"store.json: expected the header of a store, found none"):
        Store(tmp_path)


def test_a_damaged_memory_is_refused_and_the_others_are_read(store, tmp_path):
    shutil.copytree(store, tmp_path / "store")
    name, cut, plain, *_, last = Store(store)
    files = [tmp_path / "store" / f"{each}.gist" for each in (name, cut, plain)]
    content = bytearray(files[0].read_bytes())
    content[-3] ^= 4
    files[0].write_bytes(content)
    files[1].write_bytes(files[1].read_bytes()[:-5])
    opened = Store(tmp_path / "store")
    with pytest.raises(ValueError, match=rf"{name}.gist: expected contents of the checksum crc32:"):
        opened[name]
    assert Store(tmp_path / "store", verify=False)[name].lengths == Store(store)[name].lengths
    with pytest.raises(ValueError, match=rf"{cut}.gist: expected a memory file, got"):
        opened[cut]
    assert opened[last].lengths == Store(store)[last].lengths
    with pytest.raises(ValueError, match=rf"{cut}.gist: expected the memory of a document, got "):
        write(tmp_path / "store")
    # A memory that no document is known of, one of a document that is none, and one that is elsewhere.
    files[1].unlink()
    tensors, header = packed(Store(store)[plain])
    for about in ({}, {"document": '{"tokens": Infinity, "memory_tokens": 1, "text": 1}'}):
        write_tensors(files[2], tensors, header | about)
        with pytest.raises(ValueError, match=rf"{plain}.gist: expected the memory of a document, got "):
            write(tmp_path / "store")
    files[2].unlink()
    files[2].symlink_to(store / f"{plain}.gist")
    assert plain not in Store(tmp_path / "store")


def test_what_is_no_document_or_being_written_is_passed_over(store, tmp_path, monkeypatch):
    """A writer that runs keeps its folder, which may go while the store is read; what a killed one left goes."""
    folder = tmp_path / "store"
    shutil.copytree(store, folder)
    for place in (folder, folder / "1", folder / "empty"):
        (place / "folder.gist").mkdir(parents=True)
        (place / ".gist").touch()
        (place / ".gistkit-killed.partial" / "files").mkdir(parents=True)
        (place / ".gistkit-killed.partial" / "files" / "a.gist").touch()
    scandir = os.scandir

    def gone(path="."):
        if ".gistkit-" in str(path):
            raise FileNotFoundError(path)
        return scandir(path)

    with monkeypatch.context() as patch, replacing(folder / "empty" / "a.gist") as partial:
        patch.setattr(os, "scandir", gone)
        assert list(Store(folder)) == sorted(TEXTS)
        patch.undo()
        assert list(Store.of(folder, make_compressor())) == sorted(TEXTS)
        assert partial.parent.is_dir() and [*folder.rglob("*.partial")] == [partial.parent.parent]


def test_a_folder_that_cannot_be_read_is_no_empty_one(store, monkeypatch):
    def denied(path):
        raise PermissionError(errno.EACCES, "denied", path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(PermissionError, match="denied"):
        Store(store)


def test_what_cannot_go_on_is_refused(store, tmp_path):
    shutil.copytree(store, tmp_path / "store")
    with pytest.raises(
        ValueError, match=r"expected a store of this compressor, got another \(maker differs\); use a new"
    ):
        write(tmp_path / "store", compressor=make_compressor(seed=1))
    with pytest.raises(ValueError, match=r"1/8.txt: expected the text that the store has under this name, got another"):
        write(tmp_path / "store", TEXTS | {"1/8.txt": "changed"})
    opened, memory = Store.of(tmp_path / "store", make_compressor()), make_compressor().encode([[1, 2, 3]])
    with pytest.raises(ValueError, match=r"name: expected none that is in the store, got 1/8.txt"):
        opened.add("1/8.txt", "text", 3, memory)
    whole = make_compressor()
    whole.encode = None
    paths = ("../one", "/one", ".one", "a/.b/one", "a//one", "a/./one", "", "https://x.org/a")
    for name in (*paths, "\u00e4" * 126, "a\0", "a\udce9"):
        with pytest.raises(ValueError, match="name: expected a relative path without hidden folders, of parts of at "):
            opened.add(name, "text", 3, memory)
        # Before anything is encoded, though the name is the last and another process's.
        with pytest.raises(ValueError, match="name: expected a relative path without hidden folders, of parts of at "):
            write(tmp_path / "names", {"long.txt": "text" * 9, name: "t"}, whole, parts=2)
    for names, told in ((("a", "a.gist/b"), "a.gist, the file of another"), (("store.json/a",), "the store's header")):
        with pytest.raises(ValueError, match=f"name: expected no document in a folder .*{told}"):
            write(tmp_path / "names", dict.fromkeys(names, "text"), whole)
    assert not (tmp_path / "names").exists()
    assert write(tmp_path / "names", {"x" * 250: "text", f"{'y' * 250}/b": "text"}) == 2
    assert contents(tmp_path / "store") == contents(store)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("no store")
    with pytest.raises(ValueError, match=r"other: expected a store or a new folder, got one with notes.txt in it"):
        write(tmp_path / "other")
    twice = [*documents({"a": "one"}), *documents({"a": "two"})]
    with pytest.raises(ValueError, match="documents: expected names that differ, got a 2 times"):
        compress_documents(make_compressor(), make_tokenizer(), twice, tmp_path / "new")
    with pytest.raises(ValueError, match=r"^empty.txt: "):
        write(tmp_path / "new", {"empty.txt": ""})
