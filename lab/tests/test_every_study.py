"""What holds for every study: a run that is cut resumes to the bit, its seed and recipe decide it, its file is read."""

import dataclasses
import json
from typing import Any, NamedTuple

import pytest
import test_compression_loss
import test_epl
import test_facts
import test_in_place
import test_length
import test_pairs
import test_pooling
import test_resolution
import test_retrieval
import test_squad
import test_voco
import torch
from safetensors.torch import load_file
from study_runs import Bar, outcome

from gistkit.train import load_corpus
from gistkit_lab.studies import results
from gistkit_lab.studies.in_place.study import Arm as InPlaceArm
from gistkit_lab.studies.pooling.layer import Setting
from gistkit_lab.studies.registry import STUDIES, find, read
from gistkit_lab.studies.resolution.images import load_images
from gistkit_lab.studies.resolution.study import Arm as GridArm
from gistkit_lab.studies.retrieval import squad
from gistkit_lab.studies.study import Job, StudyPlan
from gistkit_lab.studies.voco.study import Arm as VoCoArm
from tests.helpers.tiers import mostly_slow

pytestmark = pytest.mark.usefixtures("one_thread")


class Case(NamedTuple):
    """A study at a few steps.

    Args:
        recipe, arm: of its run.
        cuts: steps after which the run and what resumes it are interrupted, each in another stage where there are
            several; a stage that was cut begins again with its last evaluation.
        source: a function of a folder, that makes what the study reads.
    """

    recipe: Any
    arm: Any
    cuts: tuple[int, ...]
    source: Any = lambda folder: load_corpus()


def images(folder):
    test_resolution.write(folder)
    return load_images(folder)


def questions(folder):
    return squad.Questions.load(load_corpus(), *test_squad.write(folder))


nothing = lambda folder: None  # noqa: E731
GISTPOOL, SEQPE = InPlaceArm("gistpool", 5), GridArm("seqpe-bias")
CASES = {
    # Pretraining, at its end, in either fine-tuning, and behind an evaluation.
    "compression-loss": Case(test_compression_loss.RECIPE, "without-ae", (1, 4, 1, 4, 2)),
    "epl": Case(test_epl.RECIPE, "epl", (1, 5)),
    # The language model that all arms begin with, then the arm.
    "in-place": Case(test_in_place.RECIPE, GISTPOOL, (1, 4, 3)),
    "pairs": Case(test_pairs.RECIPE, InPlaceArm("gistpool", 2), (1, 3), nothing),
    "facts": Case(test_facts.RECIPE, test_facts.Arm("learned"), (1, 2, 1, 5), nothing),
    "pooling": Case(test_pooling.TINY, Setting(length=8, context="variable"), (1, 4, 1), nothing),
    "length": Case(test_length.RECIPE, SEQPE, (1, 3)),
    "retrieval": Case(test_retrieval.RECIPE, SEQPE, (1, 3), nothing),
    "retrieval, documents": Case(test_retrieval.DOCUMENTS, SEQPE, (1, 4, 3)),
    "retrieval, squad": Case(test_squad.RECIPE, SEQPE, (1, 3, 3), questions),
    "resolution": Case(test_resolution.RECIPE, GridArm("seqpe-mul"), (1, 3), images),
    # The tower, the whole model, and the arm.
    "voco": Case(test_voco.RECIPE, VoCoArm("epl", 4.0), (1, 4, 3), lambda folder: test_voco.IMAGES),
}


def test_every_study_that_trains_is_among_them():
    # nuggets carries a threshold, and has a test of its own; smollm2 trains as epl does.
    assert {name.partition(",")[0] for name in CASES} == {*STUDIES} - {"greedy", "nuggets", "smollm2"}


# Two that differ: a whole model that trains, and a compressor behind a model that is trained first.
@pytest.mark.parametrize("name", mostly_slow(CASES, "length", "pairs"))
def test_a_run_that_is_cut_resumes_bit_for_bit_and_its_seed_and_recipe_decide_it(name, tmp_path):
    study, case = find(name.partition(",")[0]), CASES[name]
    source = case.source(tmp_path / "source")

    def train(out, *, seed=0, resume=False, bar=None, **changes):
        plan = StudyPlan(dataclasses.replace(case.recipe, **changes), [], source=source)
        arm = dataclasses.replace(case.arm, seed=seed) if hasattr(case.arm, "seed") else case.arm
        (tmp_path / out).mkdir(exist_ok=True)
        return study.train(plan, Job(arm, seed), tmp_path / out, device="cpu", resume=resume, bar=bar or Bar())

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

    curves = lambda run: getattr(run, "curves", None) or {"": run.curve}  # noqa: E731
    assert curves(train("other", seed=1)) != curves(whole)
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
    for picture in results.save(tmp_path, study.figures([again.run], again.recipe)):
        assert picture.read_bytes().startswith(b"\x89PNG")
    assert study.table([again.run], again.recipe).count("\n") >= 2
