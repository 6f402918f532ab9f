"""What holds for every study: a run that is cut resumes to the bit, its seed and recipe decide it, its file is read."""

import dataclasses
import json
from argparse import ArgumentParser
from typing import Any, NamedTuple

import pytest
import test_compression_loss
import test_epl
import test_facts
import test_in_place
import test_length
import test_nuggets
import test_pairs
import test_pooling
import test_resolution
import test_retrieval
import test_squad
import test_voco
import torch
from safetensors.torch import load_file
from study_runs import Bar, outcome, session

from gistkit import cli
from gistkit.train import load_corpus
from gistkit_lab.studies import facts, pairs, resolution, results, smollm2, squad
from gistkit_lab.studies.images import load_images
from gistkit_lab.studies.in_place import Arm as InPlaceArm
from gistkit_lab.studies.nuggets import Arm as NuggetArm
from gistkit_lab.studies.pooling import Setting
from gistkit_lab.studies.registry import STUDIES, find, read
from gistkit_lab.studies.voco import Arm as VoCoArm
from tests.helpers.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")


class Case(NamedTuple):
    """A study at a few steps.

    Args:
        recipe, arm: of its run.
        cuts: steps after which the run and what resumes it are interrupted, each in another stage where there are
            several; a stage that was cut begins again with its last evaluation.
        source: a function of a folder, that makes what the study reads.
        words: of its command, which ask for the arm; "": the command has a test of its own.
    """

    recipe: Any
    arm: Any
    cuts: tuple[int, ...]
    words: str = ""
    source: Any = lambda folder: load_corpus()


def images(folder):
    test_resolution.write(folder)
    return load_images(folder)


def questions(folder):
    return squad.Questions.load(load_corpus(), *test_squad.write(folder))


nothing = lambda folder: None  # noqa: E731
curves = lambda run: getattr(run, "curves", None) or {"": run.curve}  # noqa: E731
drawn = lambda path: path.read_bytes().startswith(b"\x89PNG")  # noqa: E731
GISTPOOL, SEQPE = InPlaceArm("gistpool", 5), "seqpe-bias"
CASES = {
    # Pretraining, at its end, in either fine-tuning, and behind an evaluation.
    "compression-loss": Case(
        test_compression_loss.RECIPE, "without-ae", (1, 4, 1, 4, 2), "--settings without-ae"
    ),
    "epl": Case(test_epl.RECIPE, "epl", (1, 5), "--layouts epl"),
    # The language model that all arms begin with, then the arm.
    "in-place": Case(test_in_place.RECIPE, GISTPOOL, (1, 4, 3), "--methods gistpool --ratios 5"),
    "pairs": Case(
        test_pairs.RECIPE, InPlaceArm("gistpool", 2), (1, 3), "--methods gistpool --ratios 2", nothing
    ),
    # The scorer that reconstructs, then the reader.
    "nuggets": Case(
        dataclasses.replace(test_nuggets.RECIPE, base_steps=0), NuggetArm("lm", "learned", 8), (1, 5),
        "--tasks lm --methods learned",
    ),
    "facts": Case(test_facts.RECIPE, "learned", (1, 2, 1, 5), "--selections learned", nothing),
    "pooling": Case(test_pooling.TINY, Setting(length=8, context="variable"), (1, 4, 1), source=nothing),
    "length": Case(test_length.RECIPE, SEQPE, (1, 3), "--encodings seqpe-bias"),
    "retrieval": Case(test_retrieval.RECIPE, SEQPE, (1, 3), "--encodings seqpe-bias", nothing),
    "retrieval, documents": Case(test_retrieval.DOCUMENTS, SEQPE, (1, 4, 3), "--encodings seqpe-bias"),
    "retrieval, squad": Case(test_squad.RECIPE, SEQPE, (1, 3, 3), source=questions),
    "resolution": Case(
        test_resolution.RECIPE, "seqpe-mul", (1, 3), "--encodings seqpe-mul --data SOURCE", images
    ),
    # The tower, the whole model, and the arm.
    "voco": Case(
        test_voco.RECIPE, VoCoArm("epl", 4.5), (1, 4, 3), "--methods full --layouts epl --ratios 4.5",
        lambda folder: test_voco.IMAGES,
    ),
}  # fmt: skip


def test_every_study_that_trains_is_among_them():
    # smollm2 trains as epl does.
    assert {name.partition(",")[0] for name in CASES} == {*STUDIES} - {"greedy", "smollm2"}


@pytest.mark.parametrize(
    ("name", "words", "field", "value"),
    [
        ("smollm2", "--method icae", "method", "icae"),
        ("smollm2", "--preset staged --no-match-embeddings", "match_embeddings", False),
        ("smollm2", "--dtype bfloat16", "dtype", "bfloat16"),
        ("smollm2", "--learning-rate 0.25", "learning_rate", 0.25),
        ("nuggets", "--random-steps 7", "random_steps", 7),
        ("nuggets", "--lower-ratios 2,3", "lower_ratios", (2, 3)),
    ],
)
def test_options_that_are_fields_change_these_of_the_recipe(name, words, field, value):
    study, parser = find(name), ArgumentParser()
    study.add_options(parser)
    options = parser.parse_args(words.split())
    preset = study.presets[options.preset]
    assert getattr(preset, field) != value
    assert study.recipe_for(options) == dataclasses.replace(preset, **{field: value})


def test_every_option_that_is_a_field_is_among_these():
    (cases,) = (mark.args[1] for mark in test_options_that_are_fields_change_these_of_the_recipe.pytestmark)
    assert [(name, field) for name, _, field, _ in cases] == [
        (name, each) for name in STUDIES for each in find(name).changes
    ]


LENGTH, IMAGES = test_length.RECIPE, test_resolution.RECIPE
FACTS, DOCUMENTS, SQUAD = test_retrieval.RECIPE, test_retrieval.DOCUMENTS, test_squad.RECIPE
SMOLLM2, PAIRS, FILLER = smollm2.recipe("short"), pairs.Recipe(), facts.Recipe()


@pytest.mark.parametrize(
    ("recipe", "changes", "message"),
    [
        (LENGTH, {"longest": 3}, r"longest: expected a power of two, got 3"),
        (LENGTH, {"longest": 8}, r"longest: expected at most 60 positions, got 8 x 8"),
        (LENGTH, {"digits": 1}, r"longest: expected at most 10 positions, got 4 x 8"),
        (IMAGES, {"grids": (3, 3)}, r"grids: expected ascending sizes .*, got \(3, 3\)"),
        (IMAGES, {"grids": ()}, r"grids: expected ascending sizes .*, got \(\)"),
        (IMAGES, {"grids": (3, 13)}, r"grids: expected at most 12 patches on a side, got 13"),
        (IMAGES, {"digits": 1, "grids": (3, 11)}, r"grids: expected at most 10 patches"),
        (IMAGES, {"object_grid": 4}, r"object_grid: expected at most 3 patches .*, got 4"),
        (IMAGES, {"crop": 0.0}, r"crop: expected above 0 and at most 1, got 0.0"),
        (IMAGES, {"rand_augment": 31}, r"rand_augment: expected a magnitude from 0 to 30, got 31"),
        (IMAGES, {"mixup": -1.0}, r"mixup: expected an alpha of at least 0, got -1\.0"),
        (IMAGES, {"cutmix": float("nan")}, r"cutmix: expected an alpha of at least 0, got nan"),
        (IMAGES, {"erasing": 1.5}, r"erasing: expected a share from 0 to 1, got 1\.5"),
        (FACTS, {"facts": 7}, r"facts: expected at least 3 questions and at most 6 keys, got 7"),
        (FACTS, {"facts": 2}, r"facts: expected at least 3 questions and at most 6 keys, got 2"),
        (FACTS, {"length": 9, "longest": 1}, r"length: expected at least 10 tokens, .* got 9"),
        (FACTS, {"questions": 0}, r"questions: expected a whole number >= 1, got 0"),
        (DOCUMENTS, {"facts": 6}, r"facts: expected at least 3 questions and at most 5 letters, got 6"),
        (DOCUMENTS, {"letters": 13}, r"letters: expected at most 12, got 13"),
        (DOCUMENTS, {"shortest": 5}, r"shortest: expected room for a fact, and for 4 in the 48 bytes of model, got 5"),
        (DOCUMENTS, {"letters": 12, "facts": 12}, r"shortest: expected room .*, and for 12 in the 48 bytes .*, got 16"),
        (SQUAD, {"eval_rows": 0}, r"eval_rows: expected a whole number >= 1, got 0"),
        (SQUAD, {"longest": 4}, r"longest: expected at most 1100 positions, got 4 x 512"),
        (PAIRS, {"decay": 1.5}, r"decay: expected a share from 0 to 1, got 1\.5"),
        (PAIRS, {"fewest": 0}, r"fewest, most: expected 1 <= fewest <= most <= keys, got"),
        (PAIRS, {"most": 33}, r"fewest, most: expected 1 <= fewest <= most <= keys, got"),
        (PAIRS, {"fewest": 16}, r"fewest, most: expected 1 <= fewest <= most <= keys, got"),
        (FILLER, {"length": 15}, r"length, filler: expected at least the tokens of 8 pairs .*, got 15 and 16"),
        (SMOLLM2, {"lengths": (16, 32)}, r"lengths: expected ascending numbers up to chunk, 64, got \(16, 32\)"),
        (SMOLLM2, {"lengths": (32, 16, 64)}, r"lengths: expected ascending"),
        (SMOLLM2, {"lengths": (0, 64)}, r"lengths: expected ascending"),
        (SMOLLM2, {"match_embeddings": True}, r"match_embeddings: expected it with method icae alone, got method x500"),
        (SMOLLM2, {"dtype": "float16"}, r"dtype: expected one of float32, bfloat16, got .float16."),
        (Setting(), {"inputs": "text"}, r"inputs: expected one of sphere, vocabulary, sphere\+common, got 'text'"),
        (Setting(), {"mask": "none"}, r"mask: expected one of pool, standard, got 'none'"),
        (Setting(), {"context": "long"}, r"context: expected one of fixed, variable, at-zero, got 'long'"),
        (Setting(), {"ratio": 11, "context": "variable"}, r"ratio: expected 1 to the shortest context, 10, got 11"),
        (Setting(), {"ratio": 0}, r"ratio: expected 1 to the shortest context, 20, got 0"),
        (Setting(), {"heads": 3, "kv_heads": 2}, r"heads: expected a multiple of the key heads, got 3/2"),
        (Setting(), {"learning_rate": 0.0}, r"learning_rate: expected a number above 0, got 0.0"),
        (VoCoArm("epl", 4.5), {"method": "icae"}, r"method: expected one of full, none, avgpool, .*, got 'icae'"),
    ],
)
def test_recipes_and_arms_that_cannot_be_are_named(recipe, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(recipe, **changes)


def test_encodings_that_are_none_are_named():
    for make in (lambda name: test_length.student(name), lambda name: resolution.build_position(IMAGES, name)):
        with pytest.raises(ValueError, match=r"name: expected one of nope, .*seqpe-bias.*, got 'seqpe'"):
            make("seqpe")


def made(name, folder):
    """A case, its study and its source, and what trains it in folders of this one, with changes of its recipe."""
    study, case = find(name.partition(",")[0]), CASES[name]
    source = case.source(folder / "source")

    def train(out, *, seed=0, resume=False, bar=None, **changes):
        arm = dataclasses.replace(case.arm, seed=seed) if hasattr(case.arm, "seed") else case.arm
        (folder / out).mkdir(exist_ok=True)
        recipe = dataclasses.replace(case.recipe, **changes)
        return study.train(session(recipe, arm, folder / out, source, seed=seed, resume=resume, bar=bar))

    return case, study, source, train


# Two that differ: a whole model, and a compressor. All are trained by one loop.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("length", "epl") else pytest.mark.nightly) for name in CASES]
)
def test_a_run_that_is_cut_resumes_bit_for_bit_and_its_seed_and_recipe_decide_it(name, tmp_path):
    case, study, _, train = made(name, tmp_path)
    whole = train("whole")
    for number, steps in enumerate(case.cuts):
        with pytest.raises(KeyboardInterrupt):
            train("cut", resume=number > 0, bar=Bar(steps))
    with pytest.raises(ValueError, match="the saved run differs in recipe; use the same settings, or another --out"):
        train("cut", resume=True, warmup=3)
    assert outcome(train("cut", resume=True)) == outcome(whole)
    states = list((tmp_path / "whole").rglob("*.safetensors"))
    assert bool(states) == (study.name != "pooling"), "pooling keeps no checkpoint of a run that has ended"
    for path in states:
        ours, theirs = map(load_file, (path, tmp_path / "cut" / path.relative_to(tmp_path / "whole")))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert curves(train("other", seed=1)) != curves(whole)


@pytest.mark.parametrize("name", mostly_slow(CASES, "length", "epl"))
def test_a_run_is_evaluated_on_time_and_its_file_is_read(name, tmp_path, monkeypatch, capsys):
    case, study, source, train = made(name, tmp_path)
    whole = train("whole")
    for curve in curves(whole).values():
        steps = [step for step, *_ in curve]
        assert steps[:-1] == list(range(0, steps[-1], case.recipe.eval_every)) and len(steps) > 2
    # A split that no choice was made on is another one.
    assert not hasattr(whole, "test") or whole.held_out != whole.test

    path = tmp_path / "results.jsonl"
    results.write(path, [results.line(study.name, whole, case.recipe, source, {"processor": "some"}, study.kind)])
    (again,) = read(path)
    plain = lambda record: json.dumps(dataclasses.asdict(record))  # noqa: E731
    assert plain(again.run) == plain(whole) and plain(again.recipe) == plain(case.recipe)
    assert again.source == ("" if source is None else source.name)
    assert study.table([again.run], again.recipe).count("\n") >= 2
    if case.words:
        words = [word.replace("SOURCE", str(tmp_path / "source")) for word in case.words.split()]
        check_command(study, case.recipe, whole, words, tmp_path / "command", monkeypatch, capsys)
    else:
        assert all(map(drawn, results.save(tmp_path, study.figures([again.run], again.recipe))))


def check_command(study, recipe, run, words, out, monkeypatch, capsys):
    """Its command makes the runs that are missing and shows all, whoever made them."""
    asked = []
    # One piece of code writes all pictures.
    if study.name not in ("epl", "length"):
        monkeypatch.setattr(results, "write_picture", lambda path, figure, dpi: path.write_bytes(b"\x89PNG"))
    monkeypatch.setattr(type(study), "recipe_for", lambda self, options: recipe)
    monkeypatch.setattr(type(study), "train", lambda self, session: asked.append(session.name) or run)
    arms = type(study).arms
    named = lambda arm: getattr(arm, "name", arm) == study.arm_name(run)  # noqa: E731
    monkeypatch.setattr(type(study), "arms", lambda *given: list(filter(named, arms(*given))))
    words = ["study", study.name, "--device", "cpu", "--processes", "1", "--out", str(out), *words]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    assert asked == [study.arm_name(run)] and f"Written: {out / 'results.jsonl'}" in printed
    assert [one.recipe for one in read(out / "results.jsonl")] == [recipe]
    assert {path.stem for path in filter(drawn, out.glob("*.png"))} == set(study.figures([run], recipe))
