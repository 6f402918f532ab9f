"""`gistkit ask STORE QUESTION`: the documents nearest to each question answer, and standard error says which."""

import re
import shutil
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("sklearn", reason="the index extra is not installed")

from transformers import AutoModel, AutoTokenizer

from gistkit import cli
from gistkit.cli import ask
from gistkit.options.models import load_compressor, load_model
from gistkit_serve.cli.stores import NearestMemories
from gistkit_serve.store import Store
from gistkit_serve.store.nearest import index_files
from tests.cli import test_cli

pytestmark = pytest.mark.usefixtures("one_thread")
folder, run = test_cli.folder, test_cli.run
TEXTS = {
    "2026/march.md": "In March the committee chose a new violin for the town's orchestra.",
    "garden.txt": "The garden has a stone wall, two old pear trees and a well behind the wall.",
    "harbor.txt": "Ships of copper and tin leave the harbor in winter, when the river is high.",
}
VIOLIN, PEARS = "Which violin was chosen in March?", "Where are the pear trees and the well?"


@pytest.fixture
def words(folder):
    """What follows the store and the question."""
    return ("--compressor", folder / "x500", "--max-new-tokens", 5)


@pytest.fixture(scope="module")
def made(folder, tmp_path_factory):
    """Three texts, and a store of them with its index."""
    place = tmp_path_factory.mktemp("made")
    for name, text in TEXTS.items():
        (place / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "texts" / name).write_text(text)
    words = ("compress", place / "texts", "-o", place / "store", "--index", "--compressor", folder / "x500")
    assert cli.main([*map(str, words), "--model", str(folder)]) == 0
    return place


@pytest.fixture
def store(made, tmp_path):
    """A copy of the store, beside one of its texts, for a test to change."""
    return shutil.copytree(made, tmp_path, dirs_exist_ok=True) / "store"


def named(store, run, words, question, *names):
    """What the documents of these names answer."""
    status, shown, _ = run("ask", store, question, *(w for name in names for w in ("--document", name)), *words)
    assert status == 0
    return shown


def test_each_question_is_asked_of_its_nearest_document(store, run, words):
    status, shown, told = run("ask", store, VIOLIN, *words)
    assert status == 0 and shown == named(store, run, words, VIOLIN, "2026/march.md")
    ((name, score),) = Store(store).nearest(VIOLIN)
    assert f"nearest: {name} ({score:.2f})\n" in told and name == "2026/march.md"
    status, shown, told = run("ask", store, *words, stdin=f"{VIOLIN}\n\n{PEARS}\n")
    answers = [named(store, run, words, VIOLIN, "2026/march.md"), named(store, run, words, PEARS, "garden.txt")]
    assert shown == f"> {VIOLIN}\n{answers[0]}> {PEARS}\n{answers[1]}"
    assert re.findall(r"nearest: (\S+) ", told) == ["2026/march.md", "garden.txt"]


@pytest.mark.slow
def test_several_are_read_as_one_context_the_nearest_first(store, run, words, tmp_path):
    found = [name for name, _ in Store(store).nearest(PEARS, 2)]
    assert found[0] == "garden.txt"
    status, shown, told = run("ask", store, PEARS, "--nearest", 2, "--sources", *words)
    assert status == 0 and re.search(r"nearest: garden.txt \(0.\d\d\), (\S+) \(0.\d\d\)", told)[1] == found[1]
    ours, theirs = shown.splitlines()[0], named(store, run, words, PEARS, *found).splitlines()[0]
    assert ours == theirs and f"{store}, garden.txt, tokens " in shown
    # More than there are, and a memory that is read after them.
    run("compress", tmp_path / "texts" / "harbor.txt", "-o", tmp_path / "other.gist", *words[:2])
    status, shown, told = run("ask", store, PEARS, "--nearest", 9, "--with", tmp_path / "other.gist", *words)
    assert status == 0 and len(re.findall(r"\(0.\d\d\)", told)) == 3


def test_a_document_behind_the_window_is_read_last(folder, store, monkeypatch, capsys):
    opened, question = Store(store), "the river, the garden and the violin"
    best, second, third = (name for name, _ in opened.nearest(question, 3))
    kept = {name: opened[name] for name in opened}
    compressor = load_compressor(folder / "x500", load_model(str(folder), None, "cpu")[0])

    def with_rest(*names):
        """Which documents are read where these have two tokens behind the window."""
        rest = {name: replace(kept[name], rest=((1, 2),)) for name in names}
        monkeypatch.setattr(Store, "__getitem__", lambda self, name: (kept | rest)[name])
        read, memories = NearestMemories(opened, 3, ([], [])).of(question, compressor)
        assert len(read) == len(memories)
        return [name.removeprefix(f"{store}, ") for name in read]

    assert with_rest() == [best, second, third]
    assert with_rest(best) == [second, third, best]
    assert "--nearest" not in capsys.readouterr().err
    assert with_rest(best, third) == [best], "they cannot be joined"
    told = capsys.readouterr().err
    assert "--nearest: 3 documents cannot be read as one context (memories: expected tokens after" in told
    assert told.splitlines()[-1].startswith(f"nearest: {best} (")


@pytest.mark.slow
def test_the_index_follows_the_store(store, run, words, tmp_path):
    (tmp_path / "texts" / "new.txt").write_text("A zebra slept beside the well.")
    assert run("compress", tmp_path / "texts", "-o", store, *words[:2])[0] == 0
    status, _, told = run("ask", store, "Where is the well?", *words)
    assert status == 0 and f"{store}: 1 of 4 documents are not in its index" in told
    status, _, complaint = run("ask", store, "zebra", *words)
    assert status == 2 and complaint.endswith("QUESTION: expected one with a word of some document, got 'zebra'\n")
    assert run("compress", tmp_path / "texts", "-o", store, "--index", *words[:2])[0] == 0
    assert len(index_files(store, "words")) == 2
    status, _, told = run("ask", store, "zebra", *words)
    assert status == 0 and "nearest: new.txt (" in told and "not in its index" not in told
    # Another text of the name is not what was indexed.
    (store / "new.txt.gist").unlink()
    (tmp_path / "texts" / "new.txt").write_text("A giraffe slept beside the well.")
    assert run("compress", tmp_path / "texts", "-o", store, *words[:2])[0] == 0
    assert f"{store}: 1 of 4 documents are not in its index" in run("ask", store, "Where is the well?", *words)[2]


def refused(run, told, *words):
    """A command says what is wrong, in a line."""
    status, _, complaint = run(*words)
    last = complaint.splitlines()[-1]
    assert status == 2 and last.startswith("gistkit: ") and told in last, complaint


def test_what_needs_a_name_says_so(store, run):
    told = f"--document: expected one of the 3 documents of {store} for "
    refused(run, f"{told}--task lm, got none", "ask", store, "--task", "lm")
    refused(run, f"{told}--text, got none", "ask", store, "Who?", "--sources", "--text", __file__)


def test_a_conversation_needs_a_name(store, run, monkeypatch):
    monkeypatch.setattr(ask.sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(ask.sys.stdout, "isatty", lambda: True, raising=False)
    status, _, complaint = run("ask", store)
    assert status == 2 and f"expected one of the 3 documents of {store} for a conversation, got none" in complaint


def test_an_index_is_of_a_store(run, folder, tmp_path):
    (tmp_path / "one.txt").write_text("one text")
    call = ("compress", tmp_path / "one.txt", "--compressor", folder / "x500")
    refused(run, "--index: expected a folder of texts and -o for a store of them, got other", *call, "--index")
    assert run(*call)[0] == 0
    told = "--nearest: not allowed with a memory file, got 2"
    refused(run, told, "ask", tmp_path / "one.gist", "Who?", "--nearest", 2)


def test_a_damaged_index_is_a_line(store, run, words):
    (path,) = index_files(store, "words")
    path.write_bytes(path.read_bytes()[:-1])
    refused(run, str(path), "ask", store, VIOLIN, *words)


ASKED = "asked: "


def save_embedding(folder, out):
    """A model of sentence-transformers that averages hidden states, and puts words before a question."""
    library = pytest.importorskip("sentence_transformers", reason="the embed extra is not installed")
    parts = pytest.importorskip("sentence_transformers.sentence_transformer.modules", reason="of release 6 or later")
    states = parts.Transformer(str(folder))
    means = parts.Pooling(states.get_embedding_dimension(), "mean")
    library.SentenceTransformer(modules=[states, means], prompts={"query": ASKED}).save(str(out))
    return out


@pytest.fixture
def embedding(folder, tmp_path):
    """What follows `--embed`."""
    return save_embedding(folder, tmp_path / "embedding")


@torch.no_grad()
def means(folder, texts):
    """Means over tokens of the last hidden states, of length 1."""
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    rows = [model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0].mean(0) for text in texts]
    return torch.nn.functional.normalize(torch.stack(rows), dim=-1)


@pytest.mark.slow
def test_vectors_of_a_model_find_the_documents(store, run, words, folder, embedding, tmp_path):
    made = run("compress", tmp_path / "texts", "-o", store, "--embed", embedding, *words[:2])
    assert made[0] == 0 and len(index_files(store, "vectors")) == len(index_files(store, "words")) == 1
    cosines = (means(folder, list(TEXTS.values())) @ means(folder, [ASKED + PEARS]).T)[:, 0]
    wanted = sorted(zip(cosines.tolist(), TEXTS, strict=True), reverse=True)
    question = (store, PEARS, "--embed", embedding, *words)
    for count in (1, 3):
        status, _, told = run("ask", *question, "--nearest", count)
        found = re.findall(r"(\S+\.\w+) \((-?\d\.\d\d)\)", told.split("nearest: ")[1])
        assert status == 0 and [name for name, _ in found] == [name for _, name in wanted[:count]]
        assert [float(score) for _, score in found] == pytest.approx([one for one, _ in wanted[:count]], abs=0.006)
    # By words as before.
    assert "nearest: garden.txt (" in run("ask", store, PEARS, *words)[2]
    # A later run adds what is new, by the same model.
    (tmp_path / "texts" / "new.txt").write_text("A zebra slept beside the well.")
    assert run("compress", tmp_path / "texts", "-o", store, *words[:2])[0] == 0
    assert "1 of 4 documents are not in its index" in run("ask", *question)[2]
    assert run("compress", tmp_path / "texts", "-o", store, "--embed", embedding, *words[:2])[0] == 0
    assert len(index_files(store, "vectors")) == 2 and "not in its index" not in run("ask", *question)[2]


@pytest.mark.slow
def test_another_model_than_that_of_the_vectors_is_told(store, run, words, embedding, tmp_path):
    assert run("compress", tmp_path / "texts", "-o", store, "--embed", embedding, *words[:2])[0] == 0
    for other, size in (("same", 32), ("narrow", 16)):
        torch.manual_seed(1)
        test_cli.small_llama(hidden_size=size, num_hidden_layers=1).save_pretrained(tmp_path / "model")
        AutoTokenizer.from_pretrained(embedding).save_pretrained(tmp_path / "model")
        save_embedding(tmp_path / "model", tmp_path / other)
        for call in (("ask", store, PEARS), ("compress", tmp_path / "texts", "-o", store)):
            told = f"embed: expected the model that made the vectors of {store}, 32 numbers each, got another ({size}"
            refused(run, told, *call, "--embed", tmp_path / other, *words[:2])


@pytest.mark.slow
def test_what_embeds_needs_a_store_and_a_model(store, run, words, embedding):
    ask, text = ("ask", store, "Who?", *words[:2], "--embed"), store.with_name("texts") / "garden.txt"
    refused(run, "expected an index of vectors of its documents or a --document", *ask, embedding)
    refused(run, "--embed: expected a folder with a model, found none at", *ask, embedding / "none")
    refused(run, "--embed: expected a model that sentence-transformers loads", *ask, store)
    refused(run, "--embed: not allowed with --document, got", *ask, embedding, "--document", "garden.txt")
    refused(run, "--embed: expected a folder of texts and -o for a store", "compress", text, "--embed", embedding)


def test_without_sentence_transformers_it_is_named(store, run, words, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    status, _, complaint = run("ask", store, "Who?", "--embed", folder, *words)
    assert status != 0 and "sentence-transformers is missing; run pip install './apps/serve[embed]'" in complaint
