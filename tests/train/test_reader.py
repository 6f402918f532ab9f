"""Training of the language models that read with a compressor: thresholds, resumption, sharing of rows, mistakes."""

import dataclasses
import json

import pytest
import torch

from gistkit.compress import Compressive, Compressor, Dodo, MixedResolution
from gistkit.train import checkpoints, read_metrics
from gistkit.train.batches import num_tokens, targets, texts
from gistkit.train.command import run
from tests.helpers.tiers import mostly_slow
from tests.helpers.train_worker import (
    RECIPE,
    Before,
    make_batches,
    make_compressive,
    make_model,
    make_questions,
    make_reader,
    numbers,
    train,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A plain run of a MixedResolution, and its metrics."""
    out = tmp_path_factory.mktemp("reader")
    torch.set_num_threads(1)
    result = train(out, make_reader())
    return out, result, read_metrics(out / "metrics.jsonl")


def passages(step):
    """The passages of a step as one text a row."""
    batch = make_batches()(step)
    return torch.cat([batch["input_ids"], batch["continuation_ids"]], 1)


def loaded(folder):
    """The reader with the compressor that a run left."""
    return MixedResolution(Compressor.from_pretrained(folder / "compressor", make_model()).eval(), tau=8, segment=4)


@pytest.mark.parametrize("make", mostly_slow([make_reader, make_compressive], make_reader))
def test_losses_and_weights_are_those_of_a_loop_by_hand(tmp_path, make):
    ours, reader = make(), make()
    train(tmp_path, ours)
    records = [record for record in read_metrics(tmp_path / "metrics.jsonl") if "lr" in record]
    its = reader.compressor
    optimizer = RECIPE.make_optimizer(its.parameter_groups(RECIPE.learning_rate, RECIPE.memory_factor))
    for step, record in enumerate(records):
        text = passages(step)
        if make is make_reader:
            reader.calibrate([text])
        for group in optimizer.param_groups:
            group["lr"] = RECIPE.learning_rate_at(step) * group["factor"]
        loss = reader(text)["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_([parameter for _, parameter in its.trainable()], RECIPE.clip)
        optimizer.step()
        optimizer.zero_grad()
        assert record["loss"] == pytest.approx(loss.item(), rel=1e-6)
    for (name, mine), (_, theirs) in zip(ours.compressor.trainable(), its.trainable(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6, msg=name)


def test_a_run_learns_and_its_compressor_reads_on(unbroken):
    out, result, records = unbroken
    held_out = [record["held_out"] for record in records if "held_out" in record]
    assert [set(found) for found in held_out] == [{"loss"}] * 3 and result.held_out == held_out[-1]
    assert held_out[-1]["loss"] < held_out[0]["loss"] - 0.05
    reader = loaded(out)
    # The held-out loss, with the threshold that was saved.
    total = count = 0
    with torch.no_grad():
        for batch in make_batches().held_out(10):
            text = texts(batch)
            total += reader(**text)["loss"].double() * num_tokens(text)
            count += num_tokens(text)
    assert float(total / count) == pytest.approx(result.held_out["loss"], rel=1e-6)
    # One in ratio tokens of the text it comes from is a nugget: as many rows as were held out, after the last step.
    rows = [reader.rows(passages(step)) for step in range(8, 11)]
    nuggets = sum(int(reader.nuggets(read).sum()) for read in rows)
    assert nuggets == round(sum(read.ids[:, 1:].numel() for read in rows) / 4)
    stream, text = reader.start(passages(0)[:, :20]), passages(0)
    wanted = reader.hidden(reader.rows(text[:, :21]))[:, -1]
    torch.testing.assert_close(stream.step(text[:, 20]), wanted, rtol=1e-4, atol=1e-5)
    assert reader.generate(text[:, :20], max_new_tokens=5).shape == (4, 5)


def test_a_run_that_stopped_goes_on_to_the_same_losses_and_threshold(unbroken, tmp_path):
    def stop(step):
        if step == 6:
            raise KeyboardInterrupt

    reader = make_reader()
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, reader, callbacks=[Before(stop)], save_every=3, eval_every=4, held_out=4)
    # A reader whose threshold has changed, as the one that stopped, is still that of the run.
    for again in (reader, make_reader()):
        train(tmp_path, again, save_every=3, eval_every=4, resume=True)
        ours = [record for record in read_metrics(tmp_path / "metrics.jsonl") if "lr" in record]
        assert numbers(ours) == numbers([record for record in unbroken[2] if "lr" in record])
        saved = (
            json.loads((folder / "compressor" / "compressor.json").read_text()) for folder in (tmp_path, unbroken[0])
        )
        assert len({each["settings"]["threshold"] for each in saved} | {again.compressor.threshold}) == 1
    with pytest.raises(ValueError, match="the saved run differs in tau; use the same settings"):
        train(tmp_path, make_reader(tau=12), resume=True)
    with pytest.raises(ValueError, match="the saved run differs in segment, tau; use the same settings"):
        train(tmp_path, make_reader().compressor, resume=True)


def test_rows_may_be_shared_among_passes(unbroken, tmp_path):
    for name, options in {"accumulated": {"accumulate": 2}, "checkpointed": {"gradient_checkpointing": True}}.items():
        train(tmp_path / name, make_reader(), **options)
        records = read_metrics(tmp_path / name / "metrics.jsonl")
        for record, other in zip(numbers(records), numbers(unbroken[2]), strict=True):
            assert record == {key: pytest.approx(value, rel=5e-6) for key, value in other.items()}, name


def test_a_rule_keeps_the_threshold_that_it_knows(tmp_path):
    reader = make_reader(selection="strided")
    train(tmp_path, reader, recipe=dataclasses.replace(RECIPE, steps=1))
    assert reader.compressor.threshold == 0.5 and reader.compressor.settings["threshold"] is None
    with pytest.raises(ValueError, match="the saved run differs in threshold"):
        train(tmp_path, make_reader(selection="strided", threshold=2.0), resume=True)


def test_texts_are_contexts_and_what_continues_them():
    batch = {
        "input_ids": torch.tensor([[0, 5, 6], [0, 0, 7]]),
        "attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]]),
        "continuation_ids": torch.tensor([[8, -100], [9, 4]]),
    }
    joined = texts(batch)
    assert joined["input_ids"].tolist() == [[0, 5, 6, 8, 0], [0, 7, 9, 4, 0]]
    assert joined["attention_mask"].tolist() == [[1, 1, 1, 1, 0]] * 2
    assert texts(joined).keys() == joined.keys() and torch.equal(texts(joined)["input_ids"], joined["input_ids"])
    # Nothing predicts a row's first token where it is BOS.
    assert targets(joined, bos_token=0)["loss"] == 6 and targets(joined, bos_token=7)["loss"] == 8
    rows = make_reader().rows(joined)
    assert rows.lengths == (4, 4) and not rows.ids[:, 0].any()


def test_mistakes_name_the_argument(tmp_path):
    with pytest.raises(ValueError, match="batches: expected only input_ids and continuation_ids for a language model"):
        train(tmp_path / "questions", make_reader(), make_questions())
    plain = {"cpu": True, "progress": False, "recipe": {"min_length": 30, "max_length": 40}}
    dodo = {"method": "dodo", "compressor": {"ratio": 4, "lora": 2, "layer": 1, "bos_token": 0}}
    for arguments, message in [
        ({"tau": 8}, "compressor: expected dodo or avgpool, which language models read with, got x500"),
        ({**dodo, "segment": 4}, "segment: not allowed without tau, got 4"),
        ({**dodo, "tau": 8}, "expected tau to be a multiple of segment, 32, got 8"),
        ({**dodo, "tau": 40, "segment": 4}, "tau: expected less than max_length, 40, .* got 40"),
        ({**dodo, "tau": 0, "segment": 4}, "expected tau >= 1, got 0"),
        ({**dodo, "tau": 8, "questions": "a.jsonl"}, "questions: not allowed with tau, .* got a.jsonl"),
        (
            {"method": "dodo", "compressor": {"losses": ("ae",)}, "tau": 8, "segment": 4},
            r"losses: not allowed with tau, .* got \('ae',\)",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            run(make_model(), None, tmp_path / "run", **plain | {"preset": "epl-finetune"} | arguments)
    assert not checkpoints.find(tmp_path / "run")


@pytest.mark.slow
def test_a_reader_goes_on_from_a_trained_compressor(tmp_path):
    recipe = {"steps": 2, "batch": 2, "min_length": 24, "max_length": 40}
    plain = {"recipe": recipe, "cpu": True, "progress": False, "eval_every": 2}
    shape = {"ratio": 4, "lora": 2, "layer": 1, "bos_token": 0, "losses": ("ae", "lm")}
    run(make_model(), None, tmp_path / "ae", method="dodo", compressor=shape, **plain)
    start = tmp_path / "ae" / "compressor"
    found = run(make_model(), None, tmp_path / "read", start=start, tau=8, segment=4, **plain)
    assert set(found.held_out) == {"loss"}
    dodo = Compressor.from_pretrained(found.folder / "compressor", make_model())
    assert isinstance(dodo, Dodo) and dodo.threshold is not None and dodo.loss_weights == {"ae": 1.0, "lm": 1.0}
    found = run(
        make_model(), None, tmp_path / "pool", method="avgpool", tau=8, segment=4,
        compressor={"ratio": 4, "lora": 2, "bos_token": 0}, **plain,
    )  # fmt: skip
    pool = Compressor.from_pretrained(found.folder / "compressor", make_model())
    assert Compressive(pool, tau=8, segment=4)(passages(0))["loss"].isfinite()
