"""The study `in-place`: its questions, its runs and its report."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch
from study_runs import Bar, session

from gistkit.compress import GistPool
from gistkit.hf import attach
from gistkit_lab.studies import in_place, pairs
from gistkit_lab.studies.fitting import Session
from gistkit_lab.studies.in_place import PRESETS, STUDY, STYLE, Arm
from gistkit_lab.studies.needles import Needles, as_batch
from tests.helpers.tiers import mostly_slow

RECIPE = dataclasses.replace(
    PRESETS["quick"],
    steps=4,
    base_steps=3,
    batch=4,
    eval_every=2,
    eval_questions=4,
    final_questions=6,
    min_length=20,
    max_length=20,
    start_gists=60,
)
NUMBERS = dict(min_length=300, max_length=400)


def text(ids):
    return bytes(ids).decode()


def plain(part):
    return " ".join(bytes(part.tolist()).decode("utf-8", "replace").split())


def test_the_answer_to_a_code_stands_in_the_context_once(corpus):
    data = Needles(corpus, None, 6, **NUMBERS, lines=3)
    for group in data.groups("held_out", 40, "code"):
        assert len({len(question.context) for question in group}) == 1
        for question in group:
            assert 300 <= len(question.context) <= 400
            (name,) = re.fullmatch(r"\nWhat is the code of (\w+)\? It is", text(question.question)).groups()
            context = text(question.context)
            assert context.count(" The code of ") == 3
            assert context.count(f" The code of {name} is{text(question.answer)}") == 1
            assert re.fullmatch(r" [a-z]+-\d\d\.", text(question.answer))


def test_a_passage_goes_on_as_the_context_does(corpus):
    data = Needles(corpus, None, 6, **NUMBERS, lines=3, cue=7, answer=9)
    for group in data.groups("test", 40, "passage"):
        for question in group:
            assert question.question[:4] == tuple(b"\n...")
            cue = question.question[4:]
            assert (len(cue), len(question.answer)) == (7, 9)
            at = bytes(question.context).find(bytes(cue))
            assert question.context[at + 7 : at + 16] == question.answer
            lines = re.finditer(rb" The code of \w+ is [a-z]+-\d\d\.", bytes(question.context))
            codes = [line.span() for line in lines]
            assert len(codes) == 3 and all(at + 16 <= start or end <= at for start, end in codes)


def test_splits_share_no_sentence(corpus):
    data = Needles(corpus, None, 4, **NUMBERS, lines=0)
    sentences = {split: set(found) for split, found in data._sentences.items()}
    assert not sentences["train"] & sentences["held_out"] and not sentences["test"] & (
        sentences["train"] | sentences["held_out"]
    )
    train, rest = plain(corpus.train), plain(corpus.held_out)
    assert all(text(row.tolist()).strip() in train for row in data(0)["input_ids"])
    for split in ("held_out", "test"):
        for group in data.groups(split, 30):
            for question in group:
                pieces = re.split(r"(?<=[.!?])\s+", text(question.context).strip())
                assert all(piece in rest for piece in pieces)


def test_batches_are_of_their_seed_and_step_and_held_out_questions_of_neither(corpus):
    data, again, other = (Needles(corpus, None, 4, **NUMBERS, seed=seed) for seed in (0, 0, 1))
    same = lambda one, two: all(torch.equal(one[name], two[name]) for name in one)  # noqa: E731
    assert same(data(3), again(3)) and not same(data(3), data(4)) and not same(data(3), other(3))
    assert data.identity == again.identity != other.identity
    found = data.groups("held_out", 10, size=4)
    assert found == other.groups("held_out", 10, size=4) and [len(group) for group in found] == [4, 4, 2]
    assert data.groups("held_out", 8) != data.groups("test", 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_length": 10, "cue": 6}, r"cue \+ answer <= min <= max, got 6 \+ 8, 10 and 400"),
        ({"min_length": 500}, r"got 8 \+ 8, 500 and 400"),
        ({"max_length": 10**7}, r"corpus: expected at least 10000000 tokens in the split train, got \d+"),
    ],
)
def test_bad_sizes_are_named(corpus, changes, message):
    with pytest.raises(ValueError, match=message):
        Needles(corpus, None, **({"size": 2} | NUMBERS | changes))
    with pytest.raises(ValueError, match="corpus: expected one of bytes, got one that a tokenizer has made"):
        Needles(dataclasses.replace(corpus, tokenizer=object()), None, 2, **NUMBERS)


def test_contexts_too_short_for_their_codes_are_named(corpus):
    with pytest.raises(ValueError, match=r"min_length: expected more tokens than the codes take, got -\d+ left"):
        Needles(corpus, None, 2, 40, 40, lines=3)(0)


def test_arms():
    names = [arm.name for arm in in_place.arms()]
    assert len(names) == len(set(names)) == 2 + 5 * 4 + 3
    assert names[:3] == ["no", "full", "gist-1x"] and "avgpool-1x" not in names
    assert [arm.name for arm in in_place.arms(["full", "gistpool"], [2])] == ["full", "gistpool-2x"]
    known = [*in_place.METHODS, *in_place.OTHER_METHODS]
    assert set(known) == set(in_place.PAPER) == set(in_place.CLASSES)
    assert [*known, *pairs.SUCCESSORS] == list(in_place.TITLES)
    assert set(in_place.TITLES.values()) == set(STYLE)


@pytest.mark.parametrize(
    ("method", "pooled", "offset", "separate"),
    [
        ("gist", False, False, False),
        pytest.param("offset-gist", False, True, False, marks=pytest.mark.slow),
        pytest.param("sep-gist", False, False, True, marks=pytest.mark.slow),
        pytest.param("sep-offset-gist", False, True, True, marks=pytest.mark.slow),
        pytest.param("gist-pool", True, False, False, marks=pytest.mark.slow),
        pytest.param("offset-gist-pool", True, True, False, marks=pytest.mark.slow),
        pytest.param("sep-gist-pool", True, False, True, marks=pytest.mark.slow),
        ("gistpool", True, True, True),
    ],
)
def test_arms_of_the_paper_are_a_mask_an_offset_and_parameters(corpus, method, pooled, offset, separate):
    recipe = dataclasses.replace(RECIPE, model="small")
    compressor = in_place.build_compressor(recipe, Arm(method, 2), in_place.fresh_model(recipe, 0))
    assert (type(compressor).__name__, compressor.ratio) == ("GistPool" if pooled else "Gist", 2)
    assert (compressor.options.offset, compressor.copies is not None) == (offset, separate)
    loss = compressor(**Needles(corpus, None, 2, 20, 20, lines=0, cue=5, answer=3)(0))["loss"]
    loss.backward()
    learns = {name for name, parameter in compressor.trainable() if parameter.grad is not None}
    assert any("gist" in name or "memory" in name for name in learns)


def test_an_unknown_arm_names_all():
    recipe = dataclasses.replace(RECIPE, model="small")
    with pytest.raises(ValueError, match=r"method: expected one of no, .*offset-gist-pool, got 'pool'"):
        in_place.build_compressor(recipe, Arm("pool", 2), in_place.fresh_model(recipe, 0))


@pytest.mark.parametrize("method", ["gistpool", "no"])
def test_figures_are_those_of_the_losses_and_of_greedy_answers(corpus, method):
    compressor = in_place.build_compressor(RECIPE, Arm(method, 5), in_place.fresh_model(RECIPE, 0)).eval()
    asked = Needles(corpus, None, 4, 20, 20, lines=0, cue=5, answer=3).groups("test", 6, size=2)
    # Questions that are answered right, but for the last token of one in each group.
    groups = []
    for group in asked:
        given = in_place.answers(compressor, group)
        wrong = (*given[0][:-1], (given[0][-1] + 1) % 256)
        pair = [question._replace(answer=answer) for question, answer in zip(group, given, strict=True)]
        groups.append([pair[0]._replace(answer=wrong), pair[1]])
    groups[0][1] = groups[0][1]._replace(answer=groups[0][1].answer[:1])
    data = SimpleNamespace(
        kinds=("code", "passage"), groups=lambda split, count, kind: groups if kind == "code" else groups[1:]
    )
    counts = [sum(len(question.answer) for question in group) for group in groups]
    assert counts == [4, 6, 6]
    with torch.no_grad():
        losses = [float(compressor(**as_batch(group))["qa"]) for group in groups]
    found = in_place.evaluate(compressor, data, "test", 6)
    mean = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    assert found["code"] == pytest.approx({"loss": mean, "exact": 3 / 6}, rel=1e-5)
    assert found["passage"] == pytest.approx({"loss": sum(losses[1:]) / 2, "exact": 2 / 6}, rel=1e-5)
    for name, value in found["all"].items():
        assert value == pytest.approx((found["code"][name] + found["passage"][name]) / 2)


def train(corpus, out, method="gistpool", *, seed=0, resume=False, bar=None):
    arm = Arm(method, 5)
    return STUDY.train(session(RECIPE, arm, out, corpus, seed=seed, resume=resume, bar=bar))


@pytest.mark.slow
def test_gists_that_start_as_means_resume_without_starting_again(corpus, tmp_path, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        train(corpus, tmp_path, "gistpool-means", bar=Bar(6))
    monkeypatch.setattr(in_place, "start", lambda *arguments: pytest.fail("started again"))
    train(corpus, tmp_path, "gistpool-means", resume=True)


def test_arms_of_a_seed_share_their_base_model_and_batches(corpus, tmp_path):
    arm = Arm("gistpool", 5)
    data = in_place.questions(session(RECIPE, arm, tmp_path, corpus))
    in_place.base(session(RECIPE, arm, tmp_path, corpus), data)
    (weights,) = tmp_path.glob("base-0/*/trainable.safetensors")
    base = weights.read_bytes()
    # Found again, not trained again: a bar that would stop its first step is never asked.
    model = in_place.base(session(RECIPE, arm, tmp_path, corpus, bar=Bar(0)), data)
    assert weights.read_bytes() == base
    fresh = in_place.fresh_model(RECIPE, 0)
    assert not torch.equal(model.lm_head.weight, fresh.lm_head.weight)


def test_the_language_loss_is_the_models_own(corpus):
    model = in_place.fresh_model(RECIPE, 0)
    batch = in_place.questions(session(RECIPE, Arm("full"), None, corpus))(0)
    bos = torch.full((len(batch["input_ids"]), 1), 256)
    whole = torch.cat([bos, batch["input_ids"], batch["question_ids"], batch["answer_ids"]], 1)
    with torch.no_grad():
        own = model(input_ids=whole, labels=whole).loss
        compressor = in_place.build_compressor(RECIPE, Arm("full"), model)
        with attach(compressor.model):
            found = in_place.language_loss(compressor, batch)
    torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-5)


def test_the_repetition_loss_is_that_of_what_comes_again():
    model = in_place.fresh_model(RECIPE, 0)
    compressor = in_place.build_compressor(RECIPE, Arm("full"), model)
    batch = {"input_ids": torch.zeros(3, 20, dtype=torch.long)}
    seen = []
    hook = model.register_forward_hook(
        lambda module, args, kwargs, out: seen.append(kwargs["input_ids"]), with_kwargs=True
    )
    with torch.no_grad(), attach(model):
        found = in_place.repetition_loss(compressor, batch, torch.Generator().manual_seed(3))
        hook.remove()
        again = seen[0][:, 21:]
        count = again.shape[1]
        assert seen[0].shape[0] == 3 and (seen[0][:, 0] == 256).all() and 10 <= count < 20
        first = seen[0][:, 1:21]
        assert torch.equal(first[:, 20 - count - 1 : -1], again) and first.min() >= 32 and first.max() < 127
        logits = model(input_ids=seen[0]).logits[:, 21:]
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), first[:, 20 - count :].flatten())
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


# Those of the others differ in options, which the test of masks, offsets and parameters has.
@pytest.mark.parametrize("arm", mostly_slow(in_place.arms(["no", "avgpool", "gistpool-means"], [5]), "no"))
def test_arms_of_each_kind_train(corpus, tmp_path, arm):
    recipe = dataclasses.replace(RECIPE, steps=2, base_steps=0, eval_questions=2, final_questions=2)
    run = STUDY.train(session(recipe, arm, tmp_path, corpus))
    assert (run.method, run.ratio) == (arm.method, arm.ratio)
    assert [step for step, *_ in run.curve] == [0, 2] and run.curve[1][1] < run.curve[0][1]
    assert len(run.examples) == 4 and all(one["question"].startswith("\n...") for one in run.examples)
    # Of the ratio that is nearest to 5, and in full.
    runs = [dataclasses.replace(run, ratio=1 if run.method == "no" else ratio) for ratio in (8, 20)]
    assert STUDY.examples(runs).count(f"  {in_place.TITLES[run.method]:>14}  ") == 2


@pytest.mark.slow
def test_own_parameters_of_memory_learn_at_their_own_rate(corpus, tmp_path, monkeypatch):
    seen = []
    fit = Session.fit

    def watch(*arguments, optimizer, **options):
        optimizer.register_step_pre_hook(lambda *_: seen.append({group["lr"] for group in optimizer.param_groups}))
        return fit(*arguments, optimizer=optimizer, **options)

    monkeypatch.setattr(Session, "fit", watch)
    train(corpus, tmp_path)
    rate = RECIPE.learning_rate * RECIPE.steps / RECIPE.warmup
    assert sorted(seen[-1]) == pytest.approx([rate, 3 * rate])


def test_whole_maps_beside_lora_learn_more_slowly():
    for lora, rate in ((2, RECIPE.copy_factor), (None, RECIPE.memory_factor)):
        compressor = GistPool(in_place.fresh_model(RECIPE, 0), ratio=5, full_copy=True, lora=lora)
        assert in_place.memory_factor(RECIPE, compressor) == rate


def test_gists_that_start_as_means_have_read_as_many_as_the_recipe_says(corpus, monkeypatch):
    read = []
    monkeypatch.setattr(in_place, "start_as_means", lambda compressor, contexts: read.append(contexts) or [])
    compressor = in_place.build_compressor(RECIPE, Arm("gistpool-means", 5), in_place.fresh_model(RECIPE, 0))
    data = in_place.questions(session(RECIPE, Arm("full"), None, corpus))
    in_place.start(RECIPE, compressor, data)
    assert read == [[row for step in range(4) for row in data(step)["input_ids"].tolist()]]
    assert sum(len(row) // 5 for row in read[0]) >= 60 > sum(len(row) // 5 for row in read[0][:-4])
