"""Stores: every document once and as by itself, whatever is killed, and errors for what is damaged."""

import json
import shutil
import time
import tracemalloc

import pytest
import torch

from gistkit.compress.memory_files import packed
from gistkit_serve.store import Store, StoreWriter, compress_documents, index_documents
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
    indexes = {path.name: path.read_bytes() for path in sorted(folder.glob("*.json*"))}
    opened, memories = Store(folder), {}
    for name in opened:
        tensors, header = packed(opened[name])
        memories[name] = header, {key: tensor.numpy().tobytes() for key, tensor in tensors.items()}
    return indexes, memories, sum(path.stat().st_size for path in folder.glob("*.gists"))


def right(folder, texts=TEXTS):
    """Whether a store has each document once, and its memory as the document alone has it."""
    opened, compressor, tokenizer = Store(folder), make_compressor(), make_tokenizer()
    names = [json.loads(line)["name"] for path in folder.glob("*.jsonl") for line in path.read_text().split("\n")[:-1]]
    assert sorted(names) == sorted(texts) == sorted(opened) and len(opened) == len(texts)
    for name, text in texts.items():
        memory, expected = opened[name], compressor.encode([tokenizer(text)["input_ids"]])
        assert (memory.lengths, memory.source) == (expected.lengths, expected.source)
        for ours, theirs in zip(memory.tensors, expected.tensors, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return True


def test_a_store_has_the_memory_of_each_document(store):
    assert right(store)
    entry = Store(store).entries["1/8.txt"]
    assert (entry.tokens, entry.memory_tokens) == (len(TEXTS["1/8.txt"]), Store(store)["1/8.txt"].lengths[0])
    assert repr(Store(store)) == f"Store({str(store)!r}: 25 documents)"
    with pytest.raises(KeyError):
        Store(store)["none"]


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
    assert right(tmp_path / "store") and len([*tmp_path.glob("store/*.gists")]) == parts
    write(tmp_path / "broken", part=1, parts=parts)
    assert write(tmp_path / "broken") == len(TEXTS) - counts[1] and right(tmp_path / "broken")


@pytest.mark.slow
@pytest.mark.parametrize(
    "stop", [("record", 1), ("record", 12), ("line", 1), ("line", 12), ("line", 25), ("sync", 1), ("sync", 3)]
)
def test_a_store_whose_writer_was_killed_goes_on_to_the_same_store(store, tmp_path, stop):
    launch(1, fill, str(tmp_path / "store"), TEXTS, 100, stop, logs=tmp_path, expected=-9)
    left = len(Store(tmp_path / "store"))
    if stop[0] == "line":
        assert left == stop[1] - 1, "what has a line is there"
    assert write(tmp_path / "store") == len(TEXTS) - left
    assert contents(tmp_path / "store") == contents(store)


def test_a_torn_end_is_passed_over_and_then_replaced(store, tmp_path):
    shutil.copytree(store, tmp_path / "store")
    shard, index = tmp_path / "store" / "shard-00000.gists", tmp_path / "store" / "shard-00000.jsonl"
    lines = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(b"".join(lines[:9]) + lines[9][:30])
    assert len(Store(tmp_path / "store")) == 9
    end = sum(json.loads(line)["nbytes"] for line in lines[:9])
    shard.write_bytes(shard.read_bytes()[: end + 17])
    assert len(Store(tmp_path / "store")) == 9 and write(tmp_path / "store") == 16
    assert contents(tmp_path / "store") == contents(store)


@pytest.mark.slow
def test_two_processes_fill_a_store_and_after_a_kill_one_goes_on(tmp_path):
    launch(2, fill, str(tmp_path / "store"), TEXTS, 100, logs=tmp_path)
    assert right(tmp_path / "store") and len([*tmp_path.glob("store/*.gists")]) == 2
    launch(2, fill, str(tmp_path / "killed"), TEXTS, 100, ("line", 5), logs=tmp_path, expected=-9)
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


def opening(folder):
    """Seconds of this process that opening a store takes, the least of three."""
    found = []
    for _ in range(3):
        start = time.process_time()
        Store(folder)
        found.append(time.process_time() - start)
    return min(found)


@pytest.mark.nightly
def test_ten_thousand_documents(tmp_path, monkeypatch):
    """A writer is killed in the middle and another goes on; then all are found, by name and by their words."""
    pytest.importorskip("sklearn", reason="the index extra is not installed")
    texts, compressor, folder = make_texts(10_000), make_compressor(), tmp_path / "store"
    launch(1, fill, str(folder), texts, 8192, ("line", 5_000), logs=tmp_path, expected=-9)
    before = Store(folder)
    kept = max(entry.offset + entry.nbytes for entry in before.entries.values())
    memories = (folder / "shard-00000.gists").read_bytes()[:kept]
    assert len(before) == 4_999
    assert write(folder, texts, compressor, batch_tokens=8192) == 5_001
    assert (folder / "shard-00000.gists").read_bytes()[:kept] == memories, "nothing is removed"
    assert index_documents(folder, documents(texts)) == 10_000
    assert len([*folder.iterdir()]) == 3 + 20, "few files"

    # Whatever is there is neither tokenized nor compressed again.
    monkeypatch.setattr(compressor, "encode", None)
    assert compress_documents(compressor, None, documents(texts), folder) == 0
    assert index_documents(folder, documents(texts)) == 0

    tracemalloc.start()
    opened = Store(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6 and sorted(opened) == sorted(texts)
    # Opening takes a time for each document, not for each pair of them.
    tenth = tmp_path / "tenth"
    tenth.mkdir()
    shutil.copy(folder / "store.json", tenth)
    lines = (folder / "shard-00000.jsonl").read_text().splitlines(keepends=True)
    (tenth / "shard-00000.jsonl").write_text("".join(lines[:1000]))
    assert len(Store(tenth)) == 1000 and opening(folder) < 30 * opening(tenth)
    for number in (8_123, 4_747, 9_996):
        name = f"{number % 7}/{number}.txt"
        assert opened.nearest(f"Which text is about {number}?")[0][0] == name
    assert opened._shards == {}, "no memory is read for it"
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


def test_a_store_opens_without_its_memories(store, tmp_path):
    shutil.copytree(store, tmp_path / "store")
    (tmp_path / "store" / "shard-00000.gists").unlink()
    opened = Store(tmp_path / "store")
    assert len(opened) == 25 and "1/1.txt" in opened
    with pytest.raises(ValueError, match=r"shard-00000.gists: expected the memories of its index, got No such file"):
        opened["1/1.txt"]


def change(folder, how):
    """Damages a store in one way."""
    index, header, shard = (folder / name for name in ("shard-00000.jsonl", "store.json", "shard-00000.gists"))
    lines = index.read_text().splitlines(keepends=True)
    if how == "no header":
        header.unlink()
    elif how == "version":
        header.write_text(header.read_text().replace('"version": 1', '"version": 7'))
    elif how == "line":
        index.write_text(lines[0] + lines[1].replace('"tokens": ', '"tokens": 1') + "".join(lines[2:]))
    elif how == "no JSON":
        index.write_text(lines[0] + "{]\n")
    elif how == "left out":
        index.write_text(lines[0] + "".join(lines[2:]))
    elif how == "twice":
        (folder / "shard-00001.jsonl").write_text(lines[0])
    elif how == "kind":
        index.write_text('{"name": 3}\n')
    elif how == "short":
        shard.write_bytes(shard.read_bytes()[:-5])


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("no header", "store.json: expected the header of a store, found none"),
        ("version", "store.json: expected format gistkit-store, version 1, got gistkit-store, version 7"),
        ("line", "shard-00000.jsonl, line 2: expected a document and its checksum, got a line that is damaged"),
        ("no JSON", "shard-00000.jsonl, line 2: expected a document as JSON, got {]"),
        ("left out", "shard-00000.jsonl, line 2: expected a memory at "),
        ("twice", "shard-00001.jsonl, line 1: expected each document once, got "),
        ("kind", "shard-00000.jsonl, line 1: expected a document and its checksum, got a line that is damaged"),
    ],
)
def test_a_damaged_store_is_refused(store, tmp_path, how, told):
    shutil.copytree(store, tmp_path / "store")
    change(tmp_path / "store", how)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        Store(tmp_path / "store")
    assert told in str(caught.value) and str(caught.value).startswith(str(tmp_path / "store"))


def test_a_damaged_memory_is_refused_and_the_others_are_read(store, tmp_path):
    shutil.copytree(store, tmp_path / "store")
    shard = tmp_path / "store" / "shard-00000.gists"
    content = bytearray(shard.read_bytes())
    first, second, *_, last = Store(store).entries.values()
    content[second.offset - 3] ^= 4
    shard.write_bytes(content[:-5])
    opened = Store(tmp_path / "store")
    with pytest.raises(ValueError, match=rf"shard-00000.gists, {first.name}: expected contents of the checksum crc32:"):
        opened[first.name]
    with pytest.raises(
        ValueError, match=rf"{last.name}: expected a memory of {last.nbytes} bytes, got {last.nbytes - 5}"
    ):
        opened[last.name]
    assert Store(tmp_path / "store", verify=False)[first.name].lengths == Store(store)[first.name].lengths
    assert opened[second.name].lengths == Store(store)[second.name].lengths
    with pytest.raises(ValueError, match=r"shard-00000.gists: expected the \d+ bytes that its index names, got \d+"):
        write(tmp_path / "store")


def test_what_cannot_go_on_is_refused(store, tmp_path):
    shutil.copytree(store, tmp_path / "store")
    with pytest.raises(
        ValueError, match=r"expected a store of this compressor, got another \(maker differs\); use a new"
    ):
        write(tmp_path / "store", compressor=make_compressor(seed=1))
    with pytest.raises(ValueError, match=r"1/8.txt: expected the text that the store has under this name, got another"):
        write(tmp_path / "store", TEXTS | {"1/8.txt": "changed"})
    with StoreWriter(tmp_path / "store", make_compressor()) as writer:
        with pytest.raises(ValueError, match=r"shard-00000.jsonl: expected one process that writes here, got another"):
            StoreWriter(tmp_path / "store", make_compressor())
        memory = make_compressor().encode([[1, 2, 3]])
        with pytest.raises(ValueError, match=r"documents: expected none that is in the store, got 1/8.txt"):
            writer.add([("1/8.txt", "text", 3)], memory)
    assert contents(tmp_path / "store") == contents(store)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("no store")
    with pytest.raises(ValueError, match=r"other: expected a store or a new folder, got one with notes.txt in it"):
        write(tmp_path / "other")
    with pytest.raises(ValueError, match=r"^empty.txt: "):
        write(tmp_path / "new", {"empty.txt": ""})
