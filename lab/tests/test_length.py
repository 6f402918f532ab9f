"""The study `length`, and what it shares with `retrieval`: models, training, figures, report and command."""

import dataclasses

import pytest
import torch
from study_runs import TINY, check_arms_share_their_model, check_step, session
from torch.nn.functional import cross_entropy

from gistkit import cli
from gistkit_lab.studies import length, positions
from gistkit_lab.studies.fitting import Progress
from gistkit_lab.studies.length import PAPER, STUDY
from gistkit_lab.studies.positions import ABLATIONS, ARMS, TITLES, Student
from tests.helpers.tiers import mostly_slow

RECIPE = length.Recipe(
    **TINY, steps=4, batch=3, eval_every=2, length=8, longest=4, digits=2, max_position=60, eval_tokens=64,
    test_tokens=128,
)  # fmt: skip

# Losses are of logits in float32 whatever the model's precision: eight of its steps.
LOGITS = 8 * torch.finfo(torch.float32).eps


# Figures are compared in double precision.
pytestmark = pytest.mark.usefixtures("double")


def student(name, seed=0, **changes):
    return Student(dataclasses.replace(RECIPE, **changes), name, 256, seed)


def test_rows_are_of_their_seed_and_step_and_labels_the_next_tokens(corpus):
    texts, again, other = (length.LengthTexts(corpus, RECIPE, seed) for seed in (0, 0, 1))
    inputs, labels = texts(3)
    assert inputs.shape == labels.shape == (3, 8) and torch.equal(inputs[:, 1:], labels[:, :-1])
    assert all(map(torch.equal, again(3), (inputs, labels)))
    assert not torch.equal(texts(4)[0], inputs) and not torch.equal(other(3)[0], inputs)
    train = bytes(corpus.train.tolist())
    assert all(bytes([*row.tolist(), int(end[-1])]) in train for row, end in zip(inputs, labels, strict=True))
    assert torch.equal(torch.cat(list(texts.splits.values())), corpus.held_out)


@pytest.mark.parametrize("weight_std", [0.02, 0.1])
@pytest.mark.parametrize("name", ["sinusoidal", "learned"])
def test_added_positions_are_as_large_as_tokens(name, weight_std):
    model = student(name, weight_std=weight_std, dim=64, length=32, max_position=128, digits=3).model
    tokens = model.tokens(torch.arange(32))[None]
    added = (model.position.embed(tokens, torch.arange(32)) - tokens).detach()
    assert float(tokens.detach().std()) == pytest.approx(weight_std, rel=0.1)
    assert float(added.square().mean().sqrt()) == pytest.approx(weight_std, rel=0.1)


def test_a_text_too_short_for_the_longest_length_is_named(corpus):
    short = dataclasses.replace(corpus, held_out=corpus.held_out[:64])
    with pytest.raises(ValueError, match=r"text: expected at least 33 bytes in the held-out part of .*, got 32"):
        length.LengthTexts(short, RECIPE, 0)


@pytest.mark.parametrize("name", ["nope", "learned", "alibi", "seqpe-bias", "seqpe-mul"])
def test_losses_are_those_of_single_chunks_and_all_lengths_read_the_same_tokens(corpus, name):
    one = student(name)
    text = corpus.held_out[:100]
    found = length.losses(one, text, RECIPE.lengths, 75)
    assert list(found) == [8, 16, 32]
    for size, loss in found.items():
        total = 0.0
        for start in range(0, 64, size):
            with torch.no_grad():
                logits = one.model(text[None, start : start + size].long())[0]
            total += float(cross_entropy(logits, text[start + 1 : start + size + 1].long(), reduction="sum"))
        assert loss == pytest.approx(total / 64, rel=LOGITS)
    assert list(length.losses(one, text, (8, 32), 3)) == [8, 32]


LEARNERS = ["rope-1e4", "seqpe-mul", *ABLATIONS]


@pytest.mark.parametrize("name", mostly_slow(LEARNERS, "rope-1e4", "seqpe-mul", *[*ABLATIONS][-1:]))
def test_the_loss_of_a_step_is_that_of_the_task_and_of_its_positions(corpus, name):
    one = student(name, shift_rate=0.6)
    batch = length.LengthTexts(corpus, RECIPE, 0)(1)
    task = lambda logits, labels: cross_entropy(logits.flatten(0, 1), labels.flatten())  # noqa: E731
    main = check_step(one, lambda step: one.loss(step, *batch), lambda step: batch, task, rel=LOGITS)
    if one.regularizer is not None:
        assert main.shape == (3, 8) and len({int(row[0]) for row in main}) > 1


def test_arms_of_a_seed_start_from_the_same_model():
    models = {name: student(name).model for name in ARMS}
    own = {name: [*model.position.parameters()] for name, model in models.items()}
    assert not own["nope"] and own["learned"] and own["seqpe-sum"]
    check_arms_share_their_model(models, student("nope", 1).model)


def test_the_learning_rate_warms_up_and_falls():
    recipe = dataclasses.replace(RECIPE, steps=100, warmup=10, learning_rate=1.0, final=0.1)
    rates = [recipe.learning_rate_at(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == rates[9] and rates[50] == pytest.approx(0.55)
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[99] == pytest.approx(0.1, abs=1e-3)
    line = dataclasses.replace(recipe, decay="linear", final=0.0, warmup=0)
    assert [line.learning_rate_at(step) for step in (0, 25, 100)] == pytest.approx([1, 0.75, 0])


def test_positions_are_clipped_by_themselves_and_do_not_decay(corpus, tmp_path, monkeypatch):
    seen = {}

    def watch(own, named, *rest, optimizer, **options):
        seen.update(options, groups=optimizer.param_groups, named=dict(named))
        return Progress([], 0.0)

    monkeypatch.setattr(positions, "optimise", watch)
    one = student("seqpe-bias", position_rate=0.5, position_clip=7.0)
    one.train(session(RECIPE, one.arm, tmp_path), length.LengthTexts(corpus, RECIPE, 0), lambda: (0.0,))
    of_positions = {id(parameter) for parameter in one.model.position.parameters()}
    (others, clip), (own, its) = seen["clips"]
    assert (
        {id(x) for x in own} == of_positions
        and (clip, its) == (1.0, 7.0)
        and not of_positions & {id(x) for x in others}
    )
    assert len(own) + len(others) == len(seen["named"])
    for group in seen["groups"]:
        inside = {id(x) for x in group["params"]}
        matrices = all(x.dim() >= 2 for x in group["params"]) and not inside & of_positions
        assert group["weight_decay"] == (0.1 if matrices else 0.0)
        assert group["factor"] == (0.5 if inside & of_positions else 1.0) and (
            inside <= of_positions or not inside & of_positions
        )


def train(corpus, out, name="seqpe-bias", **changes):
    return STUDY.train(session(dataclasses.replace(RECIPE, **changes), name, out, corpus))


def test_arms_that_the_paper_lacks_are_drawn_by_themselves():
    run = positions.Run("pope", seed=0, held_out={"4": 1.5, "8": 1.6}, test={"4": 1.5, "8": 1.6})
    assert [len(figure.axes) for figure in STUDY.figures([run], RECIPE).values()] == [1]


@pytest.mark.parametrize("name", ["rope-1e4", "seqpe-bias"])
def test_bfloat16_changes_figures_a_little(corpus, tmp_path, name):
    torch.set_default_dtype(torch.float32)
    exact, rounded = (train(corpus, tmp_path, name, steps=2, bfloat16=wanted) for wanted in (False, True))
    assert rounded.test != exact.test and rounded.test == pytest.approx(exact.test, rel=5e-3)


@pytest.mark.slow
def test_the_papers_preset_takes_its_text_and_says_what_it_follows(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(length.PRESETS, "seqpe-wikitext", dataclasses.replace(RECIPE, steps=1))
    asked = []

    def load(text, **options):
        asked.append((text, options["dataset"], options["tokenizer"]))
        return corpus

    monkeypatch.setattr(positions, "load_corpus", load)
    monkeypatch.setattr(positions, "_tokenizer", str)
    arguments = ["study", "length", "--preset", "seqpe-wikitext", "--encodings", "nope", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    assert length.NOTES["seqpe-wikitext"] in capsys.readouterr().out
    assert cli.main([*arguments, "--text", str(tmp_path), "--tokenizer", "own", "--overwrite"]) == 0
    assert asked == [
        (None, "Salesforce/wikitext:wikitext-103-raw-v1", "openai-community/gpt2"),
        (tmp_path, None, "own"),
    ]


def test_every_arm_has_a_title_and_a_line():
    assert tuple(TITLES) == ARMS and set(PAPER) <= set(ARMS)
    assert set(TITLES.values()) <= set(positions.STYLE)
