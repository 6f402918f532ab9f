"""Trained compressors that come with gistkit: by name, and as the default of the commands that compress and ask."""

import shlex
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from gistkit import cli
from gistkit.common import trained as places
from gistkit.compress import METHODS, Compressor, Memory, trained
from gistkit.evaluate.data import QUESTION
from gistkit.options import models
from gistkit.options.models import makers_of, new_compressor
from tests.cli.test_cli import expected, folder, load, report, run  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_thread")

NAME = "tiny-x500-5x"


@pytest.fixture
def place(folder, tmp_path, monkeypatch):  # noqa: F811
    """A folder of trained compressors with one in it, the default of the small model."""
    place = tmp_path / "trained"
    shutil.copytree(folder / "x500", place / NAME)
    (place / "not-one").mkdir()
    monkeypatch.setattr(places, "PLACES", (tmp_path / "none", place))
    monkeypatch.setattr(places, "DEFAULTS", {str(folder): NAME})
    return place


def shifted(compressor, by=0.3):
    """A compressor with another adapter than a new one has."""
    with torch.no_grad():
        for name, parameter in compressor.trainable():
            parameter.add_(by * ("lora_B" in name))
    return compressor


def test_names_stand_for_folders(folder, place):  # noqa: F811
    assert trained() == {NAME: place / NAME}
    model = load(folder)[0].model
    assert Compressor.from_pretrained(NAME, model).own_fingerprint() == load(folder)[0].own_fingerprint()
    with pytest.raises(FileNotFoundError, match="other: expected a folder with compressor"):
        Compressor.from_pretrained("other", model)


def test_a_folder_comes_before_a_name(folder, place):  # noqa: F811
    shutil.copytree(folder / "icae", NAME)
    assert Compressor.from_pretrained(NAME, load(folder)[0].model).method == "icae"


def test_commands_take_it_without_being_told(folder, place, run, report):  # noqa: F811
    memory = report.with_suffix(".gist")
    status, _, complaints = run("compress", report)
    assert status == 0 and "UNTRAINED" not in complaints
    maker = load(folder)[0]
    assert Memory.load(memory).maker == maker.own_fingerprint()
    status, shown, complaints = run("ask", memory, "Who asks?", "--max-new-tokens", 12)
    answer = expected(folder, QUESTION.format(question="Who asks?"))
    assert status == 0 and shown == answer + "\n" and "warning" not in complaints
    # By its name too.
    assert run("ask", memory, "Who asks?", "--max-new-tokens", 12, "--compressor", NAME)[1] == shown


@pytest.mark.slow
def test_ask_takes_the_one_that_made_the_memory(folder, place, run, report, tmp_path):  # noqa: F811
    shutil.copytree(folder / "icae", place / "an-icae")
    # In place: its options are in the memory's layout.
    METHODS["avgpool"](load(folder)[0].model, ratio=2, lora=2).save_pretrained(place / "means-2x")
    memory = report.with_suffix(".gist")
    for name in ("an-icae", "means-2x", NAME):
        assert run("compress", report, "--compressor", name)[0] == 0
        told = run("ask", memory, "Who asks?", "--max-new-tokens", 4, "--compressor", name)
        assert told[0] == 0
        status, shown, complaints = run("ask", memory, "Who asks?", "--max-new-tokens", 4)
        assert status == 0 and shown == told[1] and "UNTRAINED" not in complaints
        assert makers_of(Memory.load(memory)) == [name]
    # None of them is of another model.
    made = Memory.load(memory)
    assert makers_of(replace(made, source=replace(made.source, structure="another"))) == []
    assert makers_of(replace(made, fingerprint="another")) == []


@pytest.mark.slow
def test_a_selection_with_an_adapter_and_one_without_are_told_apart(folder, place, run, report):  # noqa: F811
    settings = {"ratio": 4, "by": "kvzip", "shares": "all"}
    shifted(METHODS["select"](load(folder)[0].model, lora=2, **settings)).save_pretrained(place / "select-4x")
    memory, questions = report.with_suffix(".gist"), ("Who asks?", "--max-new-tokens", 4)
    shares = ("--method", "select", "--option", "shares=all")
    for words in (("--compressor", "select-4x"), shares, shares[:2], (*shares, "--option", "part=90")):
        assert run("compress", report, *words)[0] == 0
        status, shown, complaints = run("ask", memory, *questions)
        assert status == 0 and "gistkit:" not in complaints, (words, complaints)
        # One that does not name its maker has all of its settings.
        made = Memory.load(memory)
        assert makers_of(made) == ["select-4x"]
        assert makers_of(replace(made, maker=None)) == ([] if words == shares[:2] else ["select-4x"])
        if words[0] == "--compressor":
            assert shown == run("ask", memory, *questions, *words)[1]


def test_the_default_compresses_at_another_ratio(folder, place, run, report, monkeypatch):  # noqa: F811
    select = METHODS["select"](load(folder)[0].model, ratio=4, lora=2)
    select.save_pretrained(place / "select-4x")
    monkeypatch.setattr(places, "DEFAULTS", {str(folder): "select-4x"})
    memory = report.with_suffix(".gist")
    for words in (("--ratio", 8), ("--ratio", 8, "--compressor", "select-4x")):
        assert run("compress", report, *words)[0] == 0
        made = Memory.load(memory)
        assert made.source.chunk == 8 and made.maker == select.own_fingerprint()
        status, _, complaints = run("ask", memory, "Who asks?", "--max-new-tokens", 4)
        assert status == 0 and "gistkit:" not in complaints


def test_the_default_keeps_its_adapter_at_other_settings(folder, place, run, report, monkeypatch):  # noqa: F811
    select = shifted(METHODS["select"](load(folder)[0].model, ratio=4, lora=2, by="kvzip", shares="all", fit=True))
    select.save_pretrained(place / "select-4x")
    monkeypatch.setattr(places, "DEFAULTS", {str(folder): "select-4x"})
    memory, own = report.with_suffix(".gist"), ("--compressor", "select-4x")
    for words, title in (
        (("--fit",), "kvzip 4x, shared by layers and heads, fitted"),
        (("--question", "Who?"), "kvzip 4x, shared by layers and heads, fitted, for a question"),
        (("--option", "shares=equal", "--option", "fit=false", "--ratio", 8), "kvzip 8x"),
        (("--option", "budget=9", "--option", "positions=closed"), "kvzip 9, shared by layers and heads, fitted"),
    ):
        for more in ((), own):
            status, shown, complaints = run("compress", report, *words, *more)
            assert status == 0 and f"(select-4x: Select {title}); " in shown and "gistkit:" not in complaints
            assert Memory.load(memory).maker == select.own_fingerprint()
        status, answer, complaints = run("ask", memory, "Who?", "--max-new-tokens", 4)
        assert status == 0 and "gistkit:" not in complaints
        assert run("ask", memory, "Who?", "--max-new-tokens", 4, *own)[:2] == (0, answer)
    status, shown, complaints = run("compress", report, "--option", "window=50")
    assert status == 0 and "--window: using an untrained select, because select-4x was" in complaints
    assert "(Select kvzip 4x)" in shown
    assert "--window: not allowed with --compressor" in run("compress", report, "--option", "window=50", *own)[2]
    assert "the compressor's budget 9, got 8" in run("compress", report, "--option", "budget=9", "--ratio", 8)[2]


def test_ask_tells_the_ones_of_a_method_by_their_weights(folder, place, run, report):  # noqa: F811
    model = load(folder)[0].model
    for ratio in (2, 4):
        shifted(METHODS["avgpool"](model, ratio=ratio, lora=2), 0.1 * ratio).save_pretrained(place / f"means-{ratio}x")
    memory, question = report.with_suffix(".gist"), ("Who asks?", "--max-new-tokens", 4)
    own = ("--compressor", "means-4x")
    for words in ((*own, "--ratio", 2), (*own, "--ratio", 8), own):
        assert run("compress", report, *words)[0] == 0
        status, shown, complaints = run("ask", memory, *question)
        assert status == 0 and "gistkit:" not in complaints and "expected one" not in complaints
        assert shown == run("ask", memory, *question, *own)[1]
    assert makers_of(Memory.load(memory)) == ["means-4x", "means-2x"]
    # One that was not trained is none of them.
    assert run("compress", report, "--method", "avgpool", "--ratio", 4)[0] == 0
    status, _, complaints = run("ask", memory, *question)
    assert status == 0 and "UNTRAINED" in complaints and "expected one" not in complaints


@pytest.mark.slow
def test_what_is_asked_for_is_not_replaced(folder, place, run, report):  # noqa: F811
    memory = report.with_suffix(".gist")
    status, _, complaints = run("compress", report, "--ratio", 4, "--chunk", 20)
    assert status == 0 and "UNTRAINED" in complaints
    # An untrained one of other sizes made the memory: it is made again.
    status, _, complaints = run("ask", memory, "Who asks?", "--max-new-tokens", 2)
    assert status == 0 and "UNTRAINED" in complaints
    # One of the same sizes might have: its weights tell.
    assert run("compress", report, "--ratio", 5, "--chunk", 20, "--method", "x500")[0] == 0
    status, _, complaints = run("ask", memory, "Who asks?", "--max-new-tokens", 2)
    assert status == 0 and "UNTRAINED" in complaints and "expected one" not in complaints


def test_ask_finds_the_folder_that_compress_was_given(folder, run, report, tmp_path):  # noqa: F811
    memory, own = report.with_suffix(".gist"), tmp_path / "own"
    shutil.copytree(folder / "x500", own)
    assert run("compress", report, "--compressor", own)[0] == 0
    question = ("Who asks?", "--max-new-tokens", 6)
    _, answer, complaints = run("ask", memory, *question, "--compressor", own)
    assert "own" not in complaints
    status, shown, complaints = run("ask", memory, *question)
    assert status == 0 and shown == answer and f"{memory}: its compressor was in {own}\n" in complaints
    assert "UNTRAINED" not in complaints and str(tmp_path).encode() not in memory.read_bytes()
    # Another one there, none there, and nothing known.
    told = f"gistkit: --compressor: expected the folder of the x500 that made {memory}, got none"
    new_compressor(load(folder)[0].model, "x500", chunk=20, ratio=5, lora=2).save_pretrained(tmp_path / "new")
    for name, reason in (("new", f", which is no longer in {own}"), (None, f", which is no longer in {own}")):
        shutil.rmtree(own)
        if name is not None:
            shutil.copytree(tmp_path / name, own)
        status, shown, complaints = run("ask", memory, *question)
        assert status == 2 and not shown and complaints.splitlines()[-1] == told + reason
    shutil.rmtree(models.notes())
    status, shown, complaints = run("ask", memory, *question)
    assert status == 2 and not shown and "UNTRAINED" not in complaints
    reason = "it has other weights than a new one: it has trained, or was made with another --dtype or --option"
    assert complaints.splitlines()[-1] == f"{told}: {reason}"
    # ask too notes the folder that it is given.
    shutil.copytree(folder / "x500", own)
    assert run("ask", memory, *question, "--compressor", own)[:2] == (0, answer)
    assert run("ask", memory, *question)[:2] == (0, answer)


def test_a_folder_that_cannot_be_noted_ends_no_command(folder, run, report, monkeypatch):  # noqa: F811
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(models, "notes", no_home)
    memory, own = report.with_suffix(".gist"), ("--compressor", folder / "x500")
    assert run("compress", report, *own)[0] == 0
    assert run("ask", memory, "Who asks?", "--max-new-tokens", 2, *own)[0] == 0
    status, _, complaints = run("ask", memory, "Who asks?")
    assert status == 2 and "gistkit: --compressor: expected the folder of the x500 that made " in complaints


def test_a_note_of_weights_of_its_own_is_not_of_new_ones(folder, run, report, tmp_path):  # noqa: F811
    """Without adapters the base model is what trained, and the compressor's other weights are as they were."""
    memory, own = report.with_suffix(".gist"), tmp_path / "own"
    means = METHODS["avgpool"](AutoModelForCausalLM.from_pretrained(folder), ratio=5, lora=None)
    means.model.lm_head.weight.data.add_(0.1)
    means.identity.forget()
    means.save_pretrained(own)
    assert (own / "model").is_dir() and run("compress", report, "--compressor", own)[0] == 0
    status, _, complaints = run("ask", memory, "Who asks?", "--max-new-tokens", 2)
    assert status == 0 and f"its compressor was in {own}\n" in complaints
    assert run("compress", report, "--method", "avgpool", "--option", "lora=null")[0] == 0
    status, _, complaints = run("ask", memory, "Who asks?", "--max-new-tokens", 2)
    assert status == 0 and "its compressor was in" not in complaints


@pytest.mark.parametrize(
    "words",
    [
        ("x500", "--dtype", "bfloat16"),
        ("gist", "--dtype", "bfloat16"),
        ("avgpool", "--option", "bos_token=1", "--option", "lora=null"),
        ("icae", "--dtype", "bfloat16", "--memory-dtype", "float32"),
    ],
    ids=" ".join,
)
def test_a_new_one_of_another_dtype_or_without_lora_is_made_again(run, report, words):  # noqa: F811
    status, shown, _ = run("compress", report, "--method", *words)
    words = shlex.split(shown.split("Ask it: gistkit ask ")[1].split(", which")[0])
    assert status == 0 and ("bfloat16" in words) == ("bfloat16" in shown)
    memory, dtype = words[0], words[-2:] if "--dtype" in words else []
    for given in (dtype, [] if Memory.load(memory).dtype == torch.bfloat16 else dtype):
        status, _, complaints = run("ask", memory, "Who asks?", "--max-new-tokens", 2, *given)
        assert status == 0 and "expected one" not in complaints, complaints


def test_a_new_one_with_an_encoder_is_made_again_as_compress_says(folder, run, report):  # noqa: F811
    method = ("--method", "separate_encoder", "--ratio", 4)
    status, shown, _ = run("compress", report, *method, "--encoder", folder)
    words = shlex.split(shown.split("Ask it: gistkit ask ")[1].split(", which")[0])
    assert status == 0 and words[-2:] == ["--encoder", str(folder)]
    status, answer, complaints = run("ask", *words[:1], "Who asks?", "--max-new-tokens", 2, *words[-2:])
    assert status == 0 and answer, complaints
    assert run("compress", report)[0] == 0
    told = f"gistkit: --encoder: expected none for a memory made by select, got {folder}\n"
    assert run("ask", words[0], "Who asks?", *words[-2:])[2].endswith(told)


def test_a_name_that_is_none(folder, place, report, capsys):  # noqa: F811
    assert cli.main(["compress", str(report), "--model", str(folder), "--compressor", "other"]) == 2
    assert f"--compressor: expected a folder with a trained compressor or {NAME}, got other" in capsys.readouterr().err
