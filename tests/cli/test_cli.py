"""The command `gistkit` on a small random model: compress, ask, and what is said of mistakes."""

import argparse
import io
import json
import os
import re
import shlex
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils.quantization_config import QuantizationMethod

import gistkit
from gistkit import cli
from gistkit.cli import overview
from gistkit.cli.compress import passes
from gistkit.compress import METHODS, Compressor, Memory, Select, language_model
from gistkit.compress.tokens import batches
from gistkit.evaluate.data import QUESTION
from gistkit.layouts.positions import SCHEMES
from gistkit.options import arguments
from gistkit.options.models import load_model, new_compressor
from gistkit.train import read_metrics
from gistkit_lab.studies.registry import purpose
from gistkit_serve.store import Store
from tests.helpers.models import byte_tokenizer
from tests.helpers.programs import printed

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = "Memory tokens stand for the text before them, and are asked in its place. " * 2


def small_llama(**changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": 257, "bos_token_id": None, "eos_token_id": 256}
    return LlamaForCausalLM(LlamaConfig(initializer_range=0.3, **sizes | tokens | changes))


def saved(root, model=None):
    """The folder of a small model and its tokenizer, as a user has them."""
    (model or small_llama()).save_pretrained(root)
    byte_tokenizer().save_pretrained(root)
    return root


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model and its tokenizer, and a compressor of each method around it."""
    root = saved(tmp_path_factory.mktemp("model"))
    model = AutoModelForCausalLM.from_pretrained(root)
    for method in ("x500", "icae"):
        compressor = new_compressor(model, method, chunk=20, ratio=5, layout="epl", lora=4)
        with torch.no_grad():
            for name, parameter in compressor.trainable():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
        compressor.save_pretrained(root / method)
    return root


@pytest.fixture
def run(folder, capsys, monkeypatch):
    """Runs a command on the small model; returns (status, standard output, standard error)."""

    def call(command, *words, stdin=None):
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        status = cli.main([command, *map(str, words), "--model", str(folder)])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return call


@pytest.fixture
def report(tmp_path):
    path = tmp_path / "report.txt"
    path.write_text(TEXT)
    return path


def load(folder, method="x500"):
    model = AutoModelForCausalLM.from_pretrained(folder)
    return Compressor.from_pretrained(folder / method, model).eval(), AutoTokenizer.from_pretrained(folder)


def expected(folder, prompt, *, method="x500", task="qa", text=TEXT, tokens=12, **settings):
    """The answer as the Python API gives it."""
    compressor, tokenizer = load(folder, method)
    ids = None if prompt is None else [tokenizer(prompt)["input_ids"]]
    memory = compressor.encode([tokenizer(text)["input_ids"]])
    answer = compressor.generate(memory, ids, task=task, max_new_tokens=tokens, stop_tokens=[256], **settings)
    return tokenizer.decode(answer[0].tolist(), skip_special_tokens=True)


@pytest.mark.parametrize("method", ["x500", pytest.param("icae", marks=pytest.mark.slow)])
def test_compress_then_ask_is_the_python_api(folder, run, report, method):
    memory = report.with_suffix(".gist")
    status, shown, complaints = run("compress", report, "-o", memory, "--compressor", folder / method)
    assert status == 0 and "UNTRAINED" not in complaints
    loaded = Memory.load(memory)
    tokens = len(TEXT)
    assert loaded.lengths == (-(-tokens // 20) * 4,) and loaded.context_lengths == (tokens,)
    assert f"{report} -> {memory}: {tokens} tokens to {loaded.lengths[0]} memory tokens" in shown
    made = load(folder, method)[0].encode([load(folder)[1](TEXT)["input_ids"]])
    assert all(map(torch.equal, loaded.tensors, made.to(dtype=torch.bfloat16).tensors))
    exact = report.with_name("exact.gist")
    run("compress", report, "-o", exact, "--compressor", folder / method, "--memory-dtype", "float32")
    assert all(map(torch.equal, Memory.load(exact).tensors, made.tensors))
    assert f"\nAsk it: gistkit ask {memory} --model {folder}, which is a conversation, " in shown
    assert f"{loaded.nbytes / 1e3:.3g} kB, the full cache has {loaded.full_cache_bytes / 1e3:.3g} kB" in shown

    words = ("--compressor", folder / method, "--max-new-tokens", 12)
    status, shown, _ = run("ask", memory, "Who asks?", *words)
    answer = expected(folder, QUESTION.format(question="Who asks?"), method=method)
    assert status == 0 and shown == answer + "\n" and answer.strip()
    _, shown, _ = run("ask", memory, "Who asks?", *words, "--template", "{question} - ")
    assert shown == expected(folder, "Who asks? - ", method=method) + "\n"
    _, shown, _ = run("ask", memory, "--task", "ae", *words)
    assert shown == expected(folder, None, method=method, task="ae") + "\n"


def test_questions_come_from_arguments_or_lines(folder, run, report):
    memory, words = report.with_suffix(".gist"), ("--compressor", folder / "x500", "--max-new-tokens", 6)
    run("compress", report, *words[:2])
    answers = [expected(folder, QUESTION.format(question=q), tokens=6) for q in ("Who?", "When?")]
    wanted = f"> Who?\n{answers[0]}\n> When?\n{answers[1]}\n"
    assert run("ask", memory, "Who?", "When?", *words)[1] == wanted
    assert run("ask", memory, "Who?", *words, "When?")[1] == run("ask", memory, *words, "Who?", "When?")[1] == wanted
    with pytest.raises(SystemExit):
        run("ask", memory, *words, "Who?", "--wrong")
    assert run("ask", memory, *words, stdin="Who?\n\n When?")[1] == wanted


def test_memories_in_place_of_different_ratios_are_refused_in_a_line(run, report, tmp_path):
    paths = [tmp_path / "3.gist", tmp_path / "5.gist"]
    for path, ratio in zip(paths, (3, 5), strict=True):
        assert run("compress", report, "-o", path, "--method", "avgpool", "--ratio", ratio)[0] == 0
    for words in (("Who?",), ("Who?", "--sources"), ("--task", "lm")):
        status, _, told = run("ask", paths[0], *words, "--with", paths[1])
        assert status == 2 and "Traceback" not in told
        assert told.splitlines()[-1] == "gistkit: memories: expected the same ratio in each, got 3 and 5"


@pytest.mark.slow
def test_several_memories_are_one_context(folder, run, tmp_path):
    words = ("--compressor", folder / "x500", "--max-new-tokens", 10)
    for name, text in (("a", TEXT), ("b", "Another text altogether, short.")):
        (tmp_path / f"{name}.txt").write_text(text)
    assert run("compress", tmp_path / "a.txt", tmp_path / "b.txt", *words[:2])[0] == 0
    paths = [tmp_path / "a.gist", tmp_path / "b.gist"]
    _, shown, _ = run("ask", paths[0], "--with", paths[1], "--task", "lm", *words)
    compressor, tokenizer = load(folder)
    joined = compressor.join([Memory.load(path) for path in paths])
    answer = compressor.generate(joined, task="lm", max_new_tokens=10, stop_tokens=[256])
    assert shown == tokenizer.decode(answer[0].tolist(), skip_special_tokens=True) + "\n"
    assert shown != run("ask", paths[0], "--task", "lm", *words)[1]


@pytest.mark.slow
def test_samples_depend_on_the_seed_alone(folder, run, report):
    words = ("--compressor", folder / "x500", "--task", "lm", "--max-new-tokens", 12)
    run("compress", report, *words[:2])
    sample = lambda *more: run("ask", report.with_suffix(".gist"), *words, *more)[1]  # noqa: E731
    greedy = sample()
    assert greedy == sample("--temperature", 0, "--seed", 1) == sample("--top-p", 1e-6)
    assert sample("--temperature", 2) == sample("--temperature", 2) != greedy
    assert sample("--temperature", 2) != sample("--temperature", 2, "--seed", 1)


def same(first, second):
    for name in ("source", "lengths", "context_lengths"):
        assert getattr(first, name) == getattr(second, name)
    for ours, theirs in zip(first.tensors, second.tensors, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["x500", "icae"])
def test_a_folder_in_batches_equals_one_by_one(folder, run, tmp_path, method):
    texts = tmp_path / "texts"
    (texts / "deep").mkdir(parents=True)
    for index, length in enumerate((7, 90, 40, 5, 130, 41)):
        (texts / ("deep" if index % 2 else ".") / f"{index}.txt").write_text((TEXT * 2)[index : index + length])
    (texts / "other.md").write_text("not asked for")
    words = ("--compressor", folder / method)
    exact = (*words, "--memory-dtype", "float32")
    status, shown, _ = run("compress", texts, "-o", tmp_path / "batched", *exact, "--batch-tokens", 200)
    assert status == 0 and f"7 documents in {tmp_path / 'batched'}, 7 of them new: 326 tokens to " in shown
    store = Store(tmp_path / "batched")
    assert {*store} == {"0.txt", "2.txt", "4.txt", "deep/1.txt", "deep/3.txt", "deep/5.txt", "other.md"}
    for name in store:
        run("compress", texts / name, *exact)
        same(store[name], Memory.load((texts / name).with_suffix(".gist")))
    question = ("Who?", *words, "--max-new-tokens", 4)
    answers = [
        run("ask", texts / "deep/5.gist", *question),
        run("ask", store.folder, "--document", "deep/5.txt", *question),
    ]
    assert answers[0][:2] == answers[1][:2] and answers[0][0] == 0
    (texts / "new.md").write_text("A note of today")
    assert (
        "8 documents" in (told := run("compress", texts, "-o", tmp_path / "batched", *words)[1])
        and "1 of them new" in told
    )
    assert {*Store(tmp_path / "batched")} == {*store, "new.md"}


def test_a_document_of_a_store_is_asked_for_by_name(folder, run, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "notes.txt").write_text(TEXT)
    store, memory = tmp_path / "notes.store", tmp_path / "texts" / "notes.gist"
    assert run("compress", tmp_path / "texts", "-o", store, "--compressor", folder / "x500")[0] == 0
    assert run("compress", tmp_path / "texts", "--compressor", folder / "x500")[0] == 0 and memory.is_file()
    index = "gistkit compress FOLDER -o STORE --index adds one"
    for words, told in (
        ([store], f"{store}: expected an index of its documents or a --document, got none; {index}"),
        ([store, "--document", "notes.txt", "--nearest", "2"], "--nearest: not allowed with --document, got 2"),
        ([store, "--document", "nots.txt"], f"--document: expected one of {store}, got 'nots.txt'; there is notes.txt"),
    ):
        status, _, complaints = run("ask", words[0], "Who?", *words[1:], "--compressor", folder / "x500")
        assert status == 2 and complaints == f"gistkit: {told}\n"
    status, _, complaints = run("ask", memory, "Who?", "--document", "notes.txt")
    assert status == 2 and "--document: not allowed with a memory file, got 'notes.txt'" in complaints


def test_batches_hold_every_row_once_within_the_limit():
    lengths = [5, 100, 30, 31, 2, 2, 400, 70]
    found = list(batches(lengths, 120))
    assert found == [[6], [1], [7], [3, 2, 0], [4, 5]]


def test_standard_input_and_untrained_compressors(run, tmp_path, report):
    memories = []
    for name in ("first", "second"):
        status, shown, complaints = run(
            *("compress", "-", "-o", tmp_path / f"{name}.gist", "--method", "x500"),
            *("--ratio", 4, "--chunk", 20, "--layout", "dpl"),
            stdin=TEXT,
        )
        assert status == 0 and "gistkit: warning: the compressor is UNTRAINED" in complaints
        assert "standard input -> " in shown
        memories.append(Memory.load(tmp_path / f"{name}.gist"))
    same(*memories)
    source = memories[0].source
    assert (source.method, source.layout, source.chunk, source.memory_tokens) == ("x500", "dpl", 20, 5)
    status, shown, complaints = run("ask", tmp_path / "first.gist", "Who?", "--max-new-tokens", 3)
    assert status == 0 and "UNTRAINED" in complaints and shown.strip()


def test_a_refined_memory_has_trained_for_its_text(run, tmp_path, report):
    exact = "--memory-dtype", "float32"
    status, shown, complaints = run("compress", report, *exact, "--refine", 1)
    assert status == 0 and "refine" in complaints
    steps, before, after = re.search(r"refined in (\d+) steps, (\S+) to (\S+) nats a token", shown).groups()
    assert int(steps) > 0 and float(after) < float(before)
    run("compress", report, "-o", tmp_path / "plain.gist", *exact)
    refined, plain = (Memory.load(path) for path in (report.with_suffix(".gist"), tmp_path / "plain.gist"))
    assert refined.positions.equal(plain.positions) and not refined.layers[0][0].equal(plain.layers[0][0])
    assert run("ask", report.with_suffix(".gist"), "Who?", "--max-new-tokens", 3)[0] == 0
    assert "--refine" in run("compress", tmp_path, "-o", tmp_path / "all.store", "--refine", 1)[2]


def test_a_compressor_of_a_method_in_place_takes_another_ratio(folder, run, tmp_path, report):
    model = AutoModelForCausalLM.from_pretrained(folder)
    new_compressor(model, "avgpool", ratio=4, lora=2).save_pretrained(tmp_path / "avgpool")
    words = "--compressor", tmp_path / "avgpool"
    assert run("compress", report, *words, "--ratio", 8)[0] == 0
    assert Memory.load(report.with_suffix(".gist")).source.chunk == 8
    assert run("ask", report.with_suffix(".gist"), "Who?", *words, "--max-new-tokens", 3)[0] == 0
    status, _, complaints = run("compress", report, "--compressor", folder / "x500", "--ratio", 8)
    assert status == 2 and "ratio: expected none for x500, which is trained for one ratio, got 8\n" in complaints


def test_a_model_without_a_trained_compressor_selects(folder, run, report):
    status, shown, complaints = run("compress", report)
    assert status == 0 and "warning" not in complaints
    tokens, memory = len(TEXT), report.with_suffix(".gist")
    assert f"{tokens} tokens to {(tokens + 1) // 4} memory tokens (Select kvzip 4x); " in shown
    tokenizer = AutoTokenizer.from_pretrained(folder)
    compressor = Select(AutoModelForCausalLM.from_pretrained(folder)).eval()
    compressor.tokenizer = tokenizer
    answer = compressor.ask(Memory.load(memory), "Who?", max_new_tokens=6)
    assert run("ask", memory, "Who?", "--max-new-tokens", 6)[:2] == (0, f"{answer}\n")
    assert run("ask", memory, "Who?", "--sources")[0] == 0
    chosen = ("--option", "by=snapkv", "--option", "budget=9")
    assert "to 9 memory tokens (Select snapkv 9)" in run("compress", report, *chosen)[1]
    assert "(Select kvzip 4x, fitted)" in run("compress", report, "--fit")[1]
    in_parts = run("compress", report, "--option", f"part={tokens - 1}")[1]
    assert f"{tokens} tokens to {(tokens + 1) // 4} memory tokens, read in 2 parts\n" in in_parts
    assert "(Select kvzip 4x, for a question)" in run("compress", report, "--question", "Who?")[1]
    assert run("ask", memory, "Who?", "--max-new-tokens", 3)[0] == 0
    assert Memory.load(memory).source.options["question"] == "Who?"


@pytest.mark.parametrize("method", [QuantizationMethod.GPTQ, QuantizationMethod.BITS_AND_BYTES])
def test_a_quantized_model_which_is_cast_to_no_dtype_answers_from_a_selection(run, report, monkeypatch, method):
    def quantized(*words):
        model, tokenizer = load_model(*words)
        model.quantization_method = method
        with pytest.raises(ValueError, match="You cannot cast"):
            model.to(model.dtype)
        return model, tokenizer

    run("compress", report)
    asked = ("ask", report.with_suffix(".gist"), "Who?", "--max-new-tokens", 6)
    answered = run(*asked)[:2]
    monkeypatch.setattr("gistkit.cli.ask.load_model", quantized)
    assert answered[0] == 0 and run(*asked)[:2] == answered
    # One that another compressor made is refused as such.
    memory = Memory.load(asked[1])
    replace(memory, maker="0" * 16).save(asked[1])
    status, _, complaints = run(*asked)
    assert status == 2 and "it has other weights than a new one" in complaints


def test_a_text_that_grows_is_told(folder, run, tmp_path):
    for name, text in (("short", "abc"), ("tiny", "ab"), ("long", TEXT)):
        (tmp_path / f"{name}.txt").write_text(text)
    words = ("--compressor", folder / "x500")
    status, shown, complaints = run("compress", tmp_path / "short.txt", *words)
    assert status == 0 and ": 3 tokens to 4 memory tokens, more than it has" in shown
    told = f"gistkit: warning: {tmp_path / 'short.txt'}: the memory has more tokens than the text; a chunk of up to 20 "
    assert complaints.splitlines()[-1] == told + "tokens has 4 memory tokens, so short texts grow"
    _, shown, complaints = run("compress", tmp_path, *words)
    assert shown.count("more than it has") == 2 and "short.txt and 1 more: the memory has more" in complaints
    _, shown, complaints = run("compress", tmp_path, "-o", tmp_path / "out", *words)
    assert "short.txt and 1 more: the memory has more" in complaints
    _, shown, complaints = run("compress", tmp_path / "long.txt", *words)
    assert "more than" not in shown + complaints


def test_a_text_of_which_too_little_is_kept_is_told(run, tmp_path):
    note, other, long = (tmp_path / "texts" / name for name in ("note.txt", "other.txt", "z.txt"))
    note.parent.mkdir()
    for path, count in ((note, 20), (other, 9), (long, 40)):
        path.write_text(TEXT[:count])
    few = "5 memory tokens are too few to answer from; gistkit compress --ratio 2 keeps more"
    for words, told in (
        (("compress", note), f"{note}: {few}"),
        (("ask", note, "Who?", "--max-new-tokens", 1), f"{note}: {few}"),
        (("compress", note.parent), f"{note} and 1 more: {few}"),
        (("compress", note.parent, "-o", tmp_path / "store"), f"note.txt and 1 more: {few}"),
        (
            ("compress", other),
            f"{other}: 2 memory tokens are too few to answer from; gistkit compress --ratio 1 keeps more",
        ),
        # As it says, and where the number is asked for.
        (("compress", note, "--ratio", 2), None),
        (("compress", other, "--ratio", 1), None),
        (("compress", long), None),
        (("compress", note, "--option", "budget=4"), None),
    ):
        status, _, complaints = run(*words)
        lines = [line for line in re.split(r"[\r\n]+", complaints) if line.startswith("gistkit")]
        assert status == 0 and lines == ([] if told is None else [f"gistkit: warning: {told}"]), (words, lines)


def test_a_bar_moves_with_each_part_of_a_text():
    compressor = Select(small_llama(), by="key_norm", part=9).eval()
    seen = []
    with passes(compressor, argparse.Namespace(update=seen.append)):
        compressor.encode([list(range(3, 33))])
    assert len(seen) == 4 and sum(seen) == 30
    compressor.encode([list(range(3, 33))])
    assert len(seen) == 4


def test_warnings_are_one_line(folder, run, report, monkeypatch):
    """Those of the package and of Python, wherever they are raised."""
    import warnings

    monkeypatch.setattr(
        "gistkit.compress.tokens.batches",
        lambda *_: [warnings.warn("two\nlines", stacklevel=2), warnings.warn("two\nlines", stacklevel=1)] and [[0]],
    )
    before = warnings.showwarning
    status, _, complaints = run("compress", report, "--compressor", folder / "x500")
    assert status == 0 and re.split(r"[\r\n]+", complaints).count("gistkit: warning: two lines") == 1
    assert "UserWarning" not in complaints and ".py" not in complaints and warnings.showwarning is before


def test_a_memory_of_another_model_or_compressor_is_refused(folder, run, report, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("gistkit.options.models.notes", lambda: tmp_path / "none" / "below")
    (tmp_path / "none").write_text("no folder")
    words = ("--compressor", folder / "x500")
    run("compress", report, *words)
    memory = report.with_suffix(".gist")
    other = saved(tmp_path / "other", small_llama(hidden_size=48))
    assert cli.main(["ask", str(memory), "Who?", "--model", str(other)]) == 2
    told = f"{memory}: expected one made with the model 'other', got one made with the model {folder.name!r}; pass that"
    assert one_line(capsys.readouterr().err.splitlines()[-1:], told)
    # Folders of one name, whose models differ in size or in weights alone.
    for place, changes, weights in (("a", {"hidden_size": 48}, 0), ("b", {}, 1)):
        model = small_llama(**changes)
        with torch.no_grad():
            model.lm_head.weight.add_(weights)
        same = saved(tmp_path / place / folder.name, model)
        told = f"{folder.name!r} with hidden_size 48, got one made with the model {folder.name!r} with hidden_size 32"
        assert cli.main(["ask", str(memory), "Who?", "--model", str(same)]) == 2
        found = capsys.readouterr().err.splitlines()[-1:]
        assert one_line(found, f"got one of {folder.name!r}: a model" if weights else told), found
        assert cli.main(["ask", str(memory), "Who?", "--model", str(same), "--compressor", str(folder / "x500")]) == 2
        found += capsys.readouterr().err.splitlines()[-1:]
        assert one_line(found[1:], f"{folder / 'x500'}, {folder.name!r}"), found
        assert not re.search("[0-9a-f]{16}", " ".join(found)), found
    status, _, complaints = run("ask", memory, "Who?", "--compressor", folder / "icae")
    told = f"{memory}: expected one made with method 'icae', got one made with method 'x500'"
    assert status == 2 and one_line(complaints.splitlines()[-1:], told)
    memory.write_bytes(memory.read_bytes()[:-9])
    status, _, complaints = run("ask", memory, "Who?", *words)
    assert status == 2 and one_line(complaints.splitlines(), f"{memory}: expected a memory file")


def one_line(lines, text):
    return len(lines) == 1 and lines[0].startswith("gistkit: ") and text in lines[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compress", "{tmp}/none.txt"], "none.txt: no such file or folder"),
        (["compress", "{tmp}/empty.txt"], "empty.txt: the text is empty"),
        (["compress", "{tmp}/latin.txt"], "latin.txt: expected UTF-8 text, got byte 0xe9 at 3"),
        (["compress", "{tmp}/bare"], "bare: no file matches '**/*.txt'; choose other files with --glob"),
        (["compress", "-"], "-o: expected a file name for the memory of standard input"),
        (["compress", "{tmp}/ok.txt", "-o", "{tmp}/ok.txt"], "-o: the memory would overwrite the text "),
        (["compress", "{tmp}/ok.txt", "{tmp}/ok.md"], "ok.md: its memory would overwrite that of "),
        (["compress", "{tmp}/ok.txt", "--compressor", "{tmp}/no"], "--compressor: expected a folder with a trained"),
        (["compress", "{tmp}/ok.txt", "--compressor", "{tmp}/bare"], "bare"),
        (["compress", "{tmp}/ok.txt", "--compressor", "{tmp}", "--chunk", "4"], "--chunk: not allowed with"),
        (["compress", "{tmp}/ok.txt", "--device", "tpu"], "--device: expected cpu or cuda, got 'tpu'"),
        (["ask", "{tmp}/none.gist", "Who?"], "MEMORY: {tmp}/none.gist: no such file or folder"),
        (["ask", "{tmp}/okk.txt", "Who?"], "okk.txt: no such file or folder; did you mean {tmp}/ok.txt?"),
        (["ask", "{tmp}/bare.gist", "Who?"], "bare.gist: expected a memory file, got "),
        (["compress", "{tmp}/ok.txt", "--method", "x5"], "--method: expected one of avgpool, "),
        (["ask", "{tmp}/ok.txt", "Who?", "--task", "ae"], "QUESTION: expected none with --task ae, got 'Who?'"),
        (["ask", "{tmp}/ok.txt", "Who?", " "], "QUESTION: expected a text, got ' '"),
        (["ask", "{tmp}/ok.txt", "Who?", "--template", "x"], "--template: expected a text with {question} in it"),
        (
            ["compress", "ok.txt", "--option", "losses=7"],
            "losses: expected some of ae, lm, compression, qa, kl, reverse_kl, hidden, got 7",
        ),
        (["compress", "-", "-o", "-"], "-o: expected a file, got -; this command does not write to standard output"),
        (["compress", "-", "-", "-o", "bare"], "TEXT: - (standard input) may be given only once"),
        (["compress", ""], "TEXT: expected a text file, a folder or -, got ''"),
        (["compress", "/dev/zero", "-o", "x"], "/dev/zero: expected a text file, got a device"),
        (["compress", "ok.txt", "--glob", "*.md"], "--glob: expected a folder to look in, got ok.txt"),
        (["demo", "--text", "bare", "--question", "Who?"], "bare: expected a text file, got a folder"),
        (["view", "attention", "--text", "bare"], "bare: expected a text file, got a folder"),
        (["ask", "ok.txt", "--task", "lm", "--chat"], "--chat: expected none with --task lm, which has no question"),
        (
            ["ask", "ok.txt", "Who?", "--temperature", "0", "--top-p", "0.5"],
            "--top-p: expected none with --temperature",
        ),
        (["ask", "ok.txt", "Who?", "--encoder", "none"], "--encoder: select does not have it; expected some of "),
        (["ask", "ok.txt", "\udcff"], r"QUESTION: expected UTF-8 text, got '\udcff'"),
        (["ask", "ok.txt", "Who?", "--template", "{question}\udcff"], "--template: expected UTF-8 text, got"),
    ],
)
def test_mistakes_end_in_one_line_and_status_2(run, tmp_path, words, message):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare.gist").write_bytes(b"")
    for name in ("ok.txt", "ok.md"):
        (tmp_path / name).write_text("text")
    status, shown, complaints = run(*(word.replace("{tmp}", str(tmp_path)) for word in words))
    assert (
        status == 2 and not shown and one_line(complaints.splitlines()[-1:], message.replace("{tmp}", str(tmp_path)))
    ), complaints
    assert [path.name for path in tmp_path.glob("*.gist")] == ["bare.gist"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compress", "x", "--ratio", "0.5"], "expected a number of at least 1, got '0.5'"),
        (["ask"], "required: memory;"),
        (["ask", "x", "--top-p", "1.5"], "expected a number from 0 to 1, got '1.5'"),
        (["ask", "x", "--temperature", "1e-40"], "expected 0 or a number of at least 0.001, got '1e-40'"),
        (["compress", "x", "--layout", "rope"], "invalid choice: 'rope'"),
        (["compress", "x", "--device", "cpu", "--dtype", "float61"], "'float16'); did you mean float16?"),
    ],
)
def test_wrong_values_are_told_by_the_parser(run, words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        run(*words)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_models_that_are_not_there(report, tmp_path, capsys):
    assert cli.main(["compress", str(report), "--model", str(tmp_path / "none")]) == 2
    assert one_line(capsys.readouterr().err.splitlines(), "--model: expected a folder with a model, found none at ")
    assert cli.main(["compress", str(report), "--model", str(tmp_path)]) == 2
    assert one_line(capsys.readouterr().err.splitlines(), "--model: expected smollm2, or a decoder model that ")


def test_a_missing_package_is_named_with_what_brings_it(monkeypatch, capsys):
    for module, told in (
        ("peft", "run pip install 'gistkit[hf]'"),
        ("text_to_num", "run pip install 'gistkit[evaluate]'"),
        ("nowhere", "run pip install nowhere"),
    ):

        def fail(_, name=module):
            raise ModuleNotFoundError(f"No module named {name!r}", name=f"{name}.part")

        monkeypatch.setattr("gistkit.cli.info._run", fail)
        assert cli.main(["info"]) == 2
        assert one_line(capsys.readouterr().err.splitlines(), f"{module} is missing; {told}")


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("peft", ["compress", "{report}"]),
        ("tqdm", ["compress", "{report}"]),
        ("sacrebleu", ["evaluate", "--text", "{report}"]),
        ("text_to_num", ["evaluate", "--text", "{report}"]),
    ],
)
def test_a_missing_package_is_named_before_a_model_is_loaded(module, words, report, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("gistkit.options.models.find_spec", lambda name: None if name == module else find_spec(name))
    words = [word.format(report=report) for word in words]
    assert cli.main([*words, "--model", str(tmp_path)]) == 2
    assert one_line(capsys.readouterr().err.splitlines(), f"{module} is missing; run pip install 'gistkit[")


def test_train_evaluate_compress_ask(run, tmp_path):
    book, out = tmp_path / "book.txt", tmp_path / "run"
    book.write_text(" ".join(f"{TEXT}{number}" for number in range(60)))
    schedule = ("--batch", 2, "--min-length", 40, "--max-length", 40, "--learning-rate", 1e-3, "--warmup", 0)
    size = ("--chunk", 20, "--ratio", 5, "--lora", 4, "--losses", "ae=1,compression=0.5", "--eval-every", 2)
    words = ("--text", book, "--out", out, "--device", "cpu", *schedule, *size)
    status, shown, _ = run("train", *words, "--steps", 3)
    assert status == 0 and "3 steps, " in shown and f"{out / 'metrics.jsonl'}, {out / 'compressor'}" in shown
    steps = [record["step"] for record in read_metrics(out / "metrics.jsonl") if "loss" in record]
    assert steps == [1, 2, 3]

    trained = ("--compressor", out / "compressor")
    measured = tmp_path / "found" / "evaluation.json"
    words = (*trained, "--text", book, "--examples", 3, "--max-new-tokens", 4, "--out", measured)
    status, shown, _ = run("evaluate", *words, "--continuation", 10, "--baselines", "full")
    report = json.loads(measured.read_text())
    assert status == 0 and [row["method"] for row in report["rows"]] == ["FiveHundredX EPL 5x", "FullContext"]
    counts = {"ae_examples": 3, "ae_tokens": 60, "lm_examples": 3, "lm_tokens": 30}
    assert report["rows"][0]["counts"] == {"examples": 3, **counts}
    assert f"{report['rows'][0]['metrics']['ae_loss']:.3f}" in shown and "| FullContext " in shown

    assert run("compress", book, *trained)[0] == 0
    assert run("ask", book.with_suffix(".gist"), "Who?", *trained, "--max-new-tokens", 3)[0] == 0


@pytest.mark.slow
def test_a_method_that_compresses_in_place_from_training_to_answers(run, tmp_path):
    questions, out, text = tmp_path / "questions.jsonl", tmp_path / "run", tmp_path / "a.txt"
    rows = [{"context": f"{TEXT} The {n}.", "question": "Which?", "answers": [str(n)]} for n in range(12)]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text.write_text(TEXT)
    words = ("--questions", questions, "--out", out, "--device", "cpu", "--preset", "epl-finetune")
    words += ("--method", "gistpool", "--ratio", 4, "--lora", 2, "--batch", 2, "--steps", 2, "--losses", "qa,kl")
    words += ("--option", "windows=1", "--embedding-lora", 3, "--train-norms")
    status, shown, complaints = run("train", *words)
    assert status == 0 and "2 steps, " in shown, complaints
    configs = [json.loads(path.read_text()) for path in (out / "compressor").glob("*/adapter_config.json")]
    config = next(config for config in configs if config["rank_pattern"])
    assert config["rank_pattern"] == {"model.embed_tokens": 3} and "model.norm" in config["modules_to_save"]
    trained = ("--compressor", out / "compressor")
    measured = tmp_path / "evaluation.json"
    status, shown, _ = run(
        "evaluate", *trained, "--questions", questions, "--examples", 2, "--baselines", "full", "--out", measured
    )
    rows = json.loads(measured.read_text())["rows"]
    assert status == 0 and [row["method"] for row in rows] == ["GistPool 4x", "FullContext"]
    assert run("compress", text, *trained)[0] == 0
    memory = Memory.load(text.with_suffix(".gist"))
    assert memory.source.method == "gistpool" and memory.source.options["windows"] == 1
    assert run("ask", text.with_suffix(".gist"), "Who?", *trained, "--max-new-tokens", 3)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("method", "options"), [("dodo", ("--option", "layer=1")), ("avgpool", ())])
def test_a_language_model_that_reads_with_a_compressor(run, folder, tmp_path, method, options):
    book, out = tmp_path / "book.txt", tmp_path / "run"
    book.write_text(" ".join(f"{TEXT}{number}" for number in range(60)))
    words = ("--text", book, "--out", out, "--device", "cpu", "--batch", 2, "--min-length", 30, "--max-length", 40)
    words += ("--method", method, "--ratio", 4, "--lora", 2, *options, "--tau", 8, "--segment", 4)
    status, shown, complaints = run("train", *words, "--steps", 1)
    assert status == 0 and re.search(r"1 steps, .* in nats a token: loss \d+\.\d{3} \(perplexity ", shown), complaints
    status, shown, complaints = run("train", *words, "--steps", 2, "--resume")
    assert status == 0 and "2 steps, " in shown, complaints
    model, prompt = AutoModelForCausalLM.from_pretrained(folder), byte_tokenizer()(TEXT)["input_ids"]
    reader = language_model(Compressor.from_pretrained(out / "compressor", model).eval(), tau=8, segment=4)
    assert reader([prompt])["loss"].isfinite()
    assert reader.generate([prompt], max_new_tokens=3).shape == (1, 3)
    title = {"dodo": "Dodo 4x", "avgpool": "Compressive 4x"}[method]
    measured = tmp_path / "measured.json"
    words = ("--text", book, "--tau", 8, "--segment", 4, "--context", 20, "--continuation", 6, "--examples", 3)
    for given in (("--compressor", out / "compressor"), ("--method", method, "--ratio", 4, *options)):
        status, shown, complaints = run("evaluate", *words, *given, "--device", "cpu", "--out", measured)
        names = [row["method"] for row in json.loads(measured.read_text())["rows"]]
        assert status == 0 and names[0] == f"{title}, tau 8" and names[2] == "FullContext", complaints
        assert re.fullmatch(r"last \d+ tokens", names[1]) and "| LM PPL " in shown and "| states a layer " in shown
    # From a trained compressor, whose settings are its own.
    words = ("--text", book, "--out", tmp_path / "on", "--device", "cpu", "--batch", 2, "--max-length", 40)
    words += ("--min-length", 30, "--compressor", out / "compressor", "--tau", 12, "--segment", 4, "--steps", 1)
    status, shown, complaints = run("train", *words)
    assert status == 0 and "1 steps, " in shown, complaints


@pytest.mark.slow
def test_untrained_methods_that_compress_in_place(run, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text(TEXT)
    status, _, complaints = run("compress", text, "--method", "gistpool", "--layout", "epl")
    assert status == 2 and "--layout: gistpool does not have it; expected some of bos_token, " in complaints
    with pytest.raises(SystemExit):
        run("compress", text, "--option", "window")
    for word, told in (
        ("share=all", "share: select does not have it; expected "),
        ("shares=al", "shares: expected one"),
    ):
        status, _, complaints = run("compress", text, "--option", word)
        assert status == 2 and f"gistkit: --option {told}" in complaints
    # Without a compressor one is made as the memory says, whatever the method.
    for method in ("avgpool", "gist", "dodo", "no_context"):
        options = () if method == "no_context" else ("--ratio", 2)
        options += ("--option", "layer=2") if method == "dodo" else ()
        assert run("compress", text, "--method", method, *options)[0] == 0
        assert run("ask", text.with_suffix(".gist"), "Who?", "--max-new-tokens", 2)[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["train", "--compressor", "{tmp}", "--chunk", "9"],
            "--chunk: not allowed with --compressor, which has its own",
        ),
        (["evaluate", "--split", "train"], "--split: expected validation or test without --questions"),
        (["train", "--text", "{tmp}/none"], "none"),
        (["train", "--random-steps", "9"], "--random-steps: expected none but for a dodo with learned nuggets, got 9"),
        (["train", "--questions", "{tmp}", "--limit", "9"], "--limit: not allowed with questions, got 9"),
        (["train", "--device", "meta"], "--device: expected cpu or cuda, got 'meta'"),
        (["evaluate", "--questions", "{tmp}", "--context", "9"], "--context: not allowed with --questions, got 9"),
        (["train", "--compressor", "{tmp}", "--train-norms"], "--train-norms: not allowed with --compressor"),
        (["evaluate", "--questions", "{tmp}/none"], "none"),
        pytest.param(
            ["evaluate", "--context", "900000"],
            "--context: expected at most the held-out part of pydoc_data.topics ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_mistakes_of_training_and_evaluation(run, tmp_path, words, message):
    words = [word.replace("{tmp}", str(tmp_path)) for word in words]
    status, shown, complaints = run(*words, "--out", tmp_path / "out")
    assert status == 2 and not shown and one_line(complaints.splitlines()[-1:], message), complaints


def fill(parser):
    """A parser with what is added to it at first use, if commands are."""
    if parser.prog == "gistkit view layout":
        parser.format_help()
    return parser


def commands(parser=None, path=()):
    """Every command, as the words that call it."""
    parser = parser or cli.parser()
    fill(parser)
    groups = [action for action in parser._actions if isinstance(action.choices, dict)]
    return [
        found for group in groups for name, sub in group.choices.items() for found in commands(sub, (*path, name))
    ] or [path]


def parsers(parser=None):
    """Every parser, those of groups of commands among them."""
    parser = parser or cli.parser()
    yield fill(parser)
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for child in action.choices.values():
                yield from parsers(child)


def test_every_parser_has_an_example_and_its_help_shows_it():
    found = list(parsers())
    assert {"gistkit", "gistkit study", "gistkit study epl", "gistkit ask"} <= {parser.prog for parser in found}
    for parser in found:
        assert f"example: {parser.prog}" in (parser.epilog or ""), parser.prog
        assert parser.prog in parser.format_help().split("example: ", 1)[1], parser.prog


@pytest.mark.parametrize("parser", [pytest.param(parser, id=parser.prog) for parser in parsers()])
def test_every_example_of_the_help_is_a_command(parser):
    lines = (parser.epilog or parser.format_help()).replace("\\\n", " ").splitlines()
    examples = [line for line in lines if re.match(r"(example:)? *(gistkit|accelerate launch|pdftotext) ", line)]
    assert examples
    for line in examples:
        # Of a pipe the last command, without a redirected input or a comment.
        words = shlex.split(line.split("|")[-1].split(" < ")[0], comments=True)
        start = next(index for index, word in enumerate(words) if word in ("gistkit", "gistkit.cli"))
        if "COMMAND" not in words:
            parsed = cli._parse(words[start + 1 :])
            assert parsed.run is not None and getattr(parsed, "method", None) in {None, *METHODS}, line


def test_help_begins_with_what_most_runs_need_and_breaks_no_name(capsys):
    for words, shown in (["train"], "most runs need"), (["view"], "--text 64 -o view.html\n"):
        with pytest.raises(SystemExit):
            cli.main([*words, "--help"])
        out = capsys.readouterr().out
        assert shown in out and not re.search(r"\w-$", out, re.MULTILINE)
        if words == ["train"]:
            first = re.findall(r"^  (--[a-z-]+)", out, re.MULTILINE)[:5]
            assert first == ["--model", "--text", "--method", "--ratio", "--out"]


def test_the_map_has_every_command_with_its_line(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert stop.value.code == 0 and max(map(len, shown.splitlines())) <= overview.WIDTH
    words = " ".join(shown.split())
    for path in commands():
        # What `gistkit view layout --help` lists is not repeated.
        assert (f"\n  {' '.join(path)} " in shown) == (len(path) < 3)
    assert f"study epl {purpose('epl')[0]}" in words and "info report what is installed and what is missing" in words
    headings = [line for line in shown.splitlines() if line in overview.GROUPS]
    assert headings == list(overview.GROUPS)
    firsts = [line.split()[0] for line in shown.splitlines() if re.match(r"  \w", line)]
    assert firsts[:3] == ["compress", "ask", "serve"]


def test_the_map_is_printed_without_a_command(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([])
    shown = capsys.readouterr()
    assert stop.value.code == 2 and not shown.out and shown.err == cli.parser().format_help()


def test_a_command_of_no_group_is_listed_last():
    root = argparse.ArgumentParser()
    added = root.add_subparsers()
    view = added.add_parser("other", help="something else").add_subparsers()
    view.add_parser("part", help="a part of it")
    added.add_parser("demo", help="try it")
    shown = overview.command_map(root)
    first, *_, last = overview.GROUPS
    assert shown == f"{first}\n  demo        try it\n\n{last}\n  other       something else\n  other part  a part of it"


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"gistkit {gistkit.__version__}\n"


def test_a_mistake_is_named_by_the_option_as_typed(run, report):
    words = ("--text", report, "--min-length", 20, "--max-length", 10, "--steps", 1, "--out", "runs/none")
    status, _, complaints = run("train", *words)
    assert status == 2 and complaints.endswith("gistkit: --max-length: expected at least --min-length, 20, got 10\n")


@pytest.mark.parametrize("compressor", ["x500", None])
def test_a_text_is_compressed_on_the_way(folder, run, report, compressor):
    chosen = () if compressor is None else ("--compressor", folder / compressor)
    memory = report.with_name("report.gist")
    run("compress", report, "-o", memory, "--memory-dtype", "float32", *chosen)
    asked = ("What?", "--max-new-tokens", 5, *chosen)
    _, answer, complaints = run("ask", memory, *asked)
    assert "compressed" not in complaints
    status, same, complaints = run("ask", report, *asked)
    assert status == 0 and same == answer, complaints
    kept = Memory.load(memory)
    words = f"{report}: {len(TEXT)} tokens compressed to {kept.lengths[0]} memory tokens"
    assert words in complaints and "gistkit compress, with the same options, keeps them" in complaints
    # Sources are of the text itself; a text goes beside a memory where the method joins memories.
    if compressor is not None:
        status, sources, _ = run("ask", report, "--sources", *asked)
        assert status == 0
        # A pipe, which is read once.
        read, write = os.pipe()
        os.write(write, TEXT.encode())
        os.close(write)
        piped = run("ask", f"/dev/fd/{read}", "--sources", *asked)
        os.close(read)
        assert piped[:2] == (0, sources), piped
        status, shown, complaints = run("ask", memory, "--with", report, *asked)
        assert status == 0 and shown == run("ask", memory, "--with", memory, *asked)[1], complaints


PATHS = {"existing": "report.txx", "typed": "report.txx", "trained_folder": "runs/x", "model_name": "./runs/x"}


@pytest.mark.parametrize(
    "command", ["ask", "compress", "demo", "evaluate", "train", "export", "serve", "view attention"]
)
def test_what_is_not_there_is_told_before_torch_is_imported(command):
    """Each argument that is read, in the first place, where nothing of the command has run, and a method beside it."""
    parser = next(each for each in parsers() if each.prog == f"gistkit {command}")
    parser.format_help()
    found = [action for action in parser._actions if getattr(action.type, "__name__", "") in PATHS]
    assert len(found) >= 2
    for action in found:
        options = argparse.Namespace(**{each.dest: None for each in parser._actions}, actions=parser._actions)
        setattr(options, action.dest, PATHS[action.type.__name__])
        options.method = "x500"
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "gistkit.compress.config", None)
            with pytest.raises(FileNotFoundError) as error:
                arguments.check_values(options)
        name = action.option_strings[-1] if action.option_strings else action.metavar or action.dest.upper()
        assert str(error.value).startswith(f"{name}: ")


def test_a_mistyped_path_imports_no_torch(tmp_path):
    (tmp_path / "ok.txt").write_text(TEXT)
    for words in (["ask", "reprot.txt", "Who?"], ["compress", "ok.txt", "--ratio", "2", "nofile.txt"]):
        heavy = "{'torch', 'transformers'} & {*sys.modules}"
        code = f"import sys; from gistkit import cli; print(cli.main({words!r}), {heavy})"
        assert printed(code) == "2 set()\n"


def test_a_path_in_a_folder_that_cannot_be_listed_is_named(monkeypatch, capsys):
    def listdir(folder):
        raise PermissionError(13, "Permission denied", folder)

    monkeypatch.setattr("os.listdir", listdir)
    assert cli.main(["ask", "reprot.txt"]) == 2
    assert capsys.readouterr().err == "gistkit: MEMORY: reprot.txt: no such file or folder\n"


@pytest.mark.parametrize(
    ("seen", "kernels", "found"), [(True, True, "cuda"), (True, False, "cpu"), (False, True, "cpu")]
)
def test_all_commands_have_one_default_device(seen, kernels, found, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen)
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *_: kernels)
    assert arguments.device(None) == found and arguments.device("cpu:0") == "cpu"
    having = [action for parser in parsers() for action in parser._actions if action.dest == "device"]
    assert len(having) >= 6 and {(action.default, action.help) for action in having} == {(None, having[0].help)}
    assert "(default: cuda if torch and gistkit support it, else cpu)" in having[0].help


def test_training_makes_its_gpu_the_current_one(run, tmp_path, monkeypatch):
    chosen = []
    monkeypatch.setattr("gistkit.cli.train.device", lambda text: text)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    # What comes next is another mistake.
    words = ("train", "--method", "voco", "--out", tmp_path / "out")
    assert run(*words, "--device", "cuda:1")[0] == run(*words, "--device", "cuda")[0] == 2
    assert chosen == ["cuda:1"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, _, complaints = run(*words, "--device", "cuda:1")
    expected = "--device: expected cpu or cuda with several processes, got 'cuda:1'"
    assert status == 2 and one_line(complaints.splitlines(), expected) and len(chosen) == 1


def test_names_are_those_of_the_package():
    assert arguments.LAYOUTS == SCHEMES


def test_a_memory_of_an_unknown_method_is_refused(run, report, tmp_path):
    assert run("compress", report, "-o", tmp_path / "a.gist")[0] == 0
    memory = Memory.load(tmp_path / "a.gist")
    replace(memory, source=replace(memory.source, method="other")).save(tmp_path / "b.gist")
    status, _, complaints = run("ask", tmp_path / "b.gist", "Who?")
    assert status == 2 and "MEMORY: expected one made by avgpool or " in complaints
    assert "got method 'other'" in complaints


def test_an_unknown_option_is_named_with_its_command_and_the_nearest_one(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["compress", "report.txt", "--ration", "4"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("gistkit compress: unknown: --ration 4; did you mean --ratio?; gistkit")


def test_other_files_than_texts_and_memories_are_named(run, tmp_path):
    (tmp_path / "noise.bin").write_bytes(b"\x00\xff" * 20)
    assert "noise.bin: expected UTF-8 text, got byte 0xff at 1" in run("ask", tmp_path / "noise.bin", "What?")[2]
    status, _, complaints = run("ask", tmp_path, "What?")
    assert status == 2 and f"{tmp_path}: expected a memory, a text or a store, got a folder" in complaints


def test_what_follows_two_hyphens_is_a_word_wherever_they_stand():
    for words in (["--", "-why"], ["--seed", "3", "--", "-why"], ["--seed", "3", "Who?", "--", "-why", "--not"]):
        questions = words[words.index("--") + 1 :]
        assert cli._parse(["ask", "a.gist", *words]).questions == ["Who?"] * ("Who?" in words) + questions


def test_a_closed_standard_input_is_an_empty_one(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    status, _, complaints = run("compress", "-", "-o", "m.gist")
    assert status == 2 and complaints == "gistkit: standard input: the text is empty\n"
