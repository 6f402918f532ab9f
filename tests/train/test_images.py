"""Training a VoCo on questions about images: batches, resumption, and their division into passes."""

import pytest
import torch

from gistkit.compress import Compressor, VoCo
from gistkit.train import ImageQuestion, ImageQuestions, Recipe, Trainer, read_metrics
from gistkit.train.batches import num_tokens, targets
from gistkit.train.losses import Losses
from tests.helpers.vision import SIZES, Image, processed, tiny_vision

RECIPE = Recipe(steps=6, batch=2, learning_rate=2e-2, warmup=1, clip=1.0, min_length=2, max_length=64)
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:memory_tokens")]


def examples(family, count=12):
    """Questions about images of two sizes; the answer depends on the image."""
    rows = []
    for index in range(count):
        size = SIZES[family][index % 2]
        context = processed(family, [[1, *range(3, 3 + index % 3), Image(size, index % 4)]])
        rows.append(ImageQuestion(context, [10, 11][: 1 + index % 2], [20 + index % 4, 2]))
    return rows


def compressor(family="qwen2_5_vl", lora=2, **options):
    model = tiny_vision(family).float()
    torch.manual_seed(3)
    return VoCo(model, memory_tokens=2, lora=lora, train_projector=True, **options)


def train(out, steps=None, *, resume=False, family="qwen2_5_vl", **options):
    trained = compressor(family)
    recipe = RECIPE if steps is None else Recipe(**{**vars(RECIPE), "steps": steps})
    batches = ImageQuestions(examples(family), recipe.batch, "twelve", recipe.seed)
    trainer = Trainer(trained, batches, recipe, out, eval_every=3, save_every=2, progress=False, cpu=True, **options)
    return trainer.train(resume=resume), trained


def numbers(out):
    names = ("step", "loss", "qa", "grad_norm", "held_out")
    return [{name: record[name] for name in names if name in record} for record in read_metrics(out / "metrics.jsonl")]


def test_a_run_learns_and_resumes_bit_for_bit(tmp_path):
    result, trained = train(tmp_path / "whole")
    records = numbers(tmp_path / "whole")
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 6 and losses[-1] < losses[0] - 0.5 and result.held_out["qa"] > 0
    train(tmp_path / "parts", 4)
    again, _ = train(tmp_path / "parts", resume=True)
    assert numbers(tmp_path / "parts")[-3:] == records[-3:] and again.held_out == result.held_out
    # Evaluated in eval mode, and saved with its projector.
    loaded = Compressor.from_pretrained(tmp_path / "whole" / "compressor", tiny_vision("qwen2_5_vl").float()).eval()
    context = examples("qwen2_5_vl")[0].context
    trained.eval()
    for found, expected in zip(loaded.encode(context).tensors, trained.encode(context).tensors, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("family", SIZES)
def test_a_batch_is_divided_by_rows(family):
    # The losses of its parts, weighted by their answers' tokens, are those of the batch.
    model = compressor(family, separators=[50, 51, 52] if family in ("idefics3", "smolvlm") else ()).eval()
    batches = ImageQuestions(examples(family), 4, "twelve")
    batch = batches(0)
    losses, answers = Losses(model), targets(batch)["qa"]
    with torch.no_grad():
        parts = [batches.collate([batches[row]]) for row in range(4)]
        total = sum(losses(**part)["qa"] * targets(part)["qa"] for part in parts)
        torch.testing.assert_close(total / answers, losses(**batch)["qa"], rtol=1e-5, atol=1e-5)
    context = int(batch["attention_mask"].sum())
    assert num_tokens(batch) == context + answers + int((batch["question_ids"] >= 0).sum())


def test_batches_and_their_errors():
    rows = examples("llava")
    batches = ImageQuestions(rows, 4, "twelve", seed=1)
    seen = [int(batch["answer_ids"][row, 0]) for batch in map(batches, range(11)) for row in range(4)]
    assert sorted(seen) == sorted([row.answer[0] for row in rows[:11]] * 4)  # 11 of 12 are trained on, 4 epochs
    (held_out,) = batches.held_out(8)
    assert held_out["answer_ids"].tolist() == [list(rows[-1].answer)]
    assert torch.equal(held_out["pixel_values"], rows[-1].context["pixel_values"])
    # Which are held out determines a run; the last tenth by default.
    chosen = [ImageQuestions(rows, 4, "twelve", 1, held_out).identity for held_out in (None, [11], [0], [1])]
    assert chosen[:2] == [batches.identity] * 2 and batches.identity != chosen[2] != chosen[3]
    with pytest.raises(ValueError, match="examples: expected at least 2, one to hold out, got 1"):
        ImageQuestions(rows[:1], 2, "one")
    with pytest.raises(ValueError, match="context: expected a processor's output for one text, got 2 rows"):
        ImageQuestions([ImageQuestion(processed("llava", [[1, Image(None, 1)]] * 2), [3], [4])] * 2, 1, "x")(0)
    text = ImageQuestion({"input_ids": [1, 2]}, [3], [4])
    with pytest.raises(ValueError, match="context: expected pixel_values in every row, got other names in some"):
        ImageQuestions([rows[0], text, rows[1]], 2, "x")(0)
