"""`gistkit train`: early stopping, passages of long texts, trackers."""

import re

import pytest
from transformers import AutoTokenizer

from gistkit.train import Packed, Trainer, growing, read_metrics
from tests.cli.test_cli import folder, run  # noqa: F401
from tests.helpers.models import tiny
from tests.helpers.train_worker import evaluations
from tests.train.test_corpora import json_lines

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def words(tmp_path):
    texts = json_lines(tmp_path / "a.jsonl", [f"{number} is the number of this text. " * (number % 3 + 1)
                                              for number in range(20, 50)])  # fmt: skip
    shape = ("--max-length", 40, "--min-length", 40, "--losses", "ae", "--lora", 2, "--chunk", 16, "--ratio", 4)
    return "--text", texts, "--out", tmp_path / "run", "--device", "cpu", "--batch", 2, *shape


def test_the_weights_of_the_lowest_loss_are_reported(run, folder, words):  # noqa: F811
    patience = ("--steps", 9, "--patience", 2, "--eval-every", 1)
    with evaluations({0: 5.0, 1: 4.0, 2: 6.0, 3: 6.0}):
        status, shown, complaints = run("train", *words, *patience)
    assert status == 0 and "options that are not given are those of --preset epl-pretrain" in complaints
    assert re.search(
        r"^3 steps, .* a token of step 1, whose weights are kept: loss 4\.000, ae 4\.000$", shown, re.MULTILINE
    )
    with evaluations({0: 5.0, 1: 4.0, 2: 6.0, 3: 3.0, 4: 2.0}):
        status, shown, _ = run("train", *words, *patience[2:], "--steps", 4, "--resume", "--patience", 3)
    assert status == 0 and re.search(r"^4 steps, .* in nats a token: loss 2\.000, ae 2\.000$", shown, re.MULTILINE)


def test_a_baseline_trains_its_task_tokens_alone(run, folder, words):  # noqa: F811
    words, out = words[: words.index("--lora")], words[3]
    small = ("--steps", 2, "--baseline", "full")
    status, _, complaints = run("train", *words, *small)
    assert status == 0, complaints
    assert [path.name for path in (out / "compressor").iterdir()] == ["task_tokens.safetensors"]
    # Without a checkpoint of its weights the model is known by its values.
    run("train", *words, *small, "--resume", "--steps", 3)
    assert [record["step"] for record in read_metrics(out / "metrics.jsonl") if "seconds" in record] == [1, 2, 3]
    for more, complaint in (
        (("--method", "icae"), "method: not allowed with baseline"),
        (("--ratio", 4), "ratio: not allowed with baseline"),
        (("--tau", 16), "tau: not allowed with baseline, which trains only task tokens, got 16"),
        (("--compressor", out / "compressor"), "--baseline: not allowed with --compressor"),
    ):
        status, _, complaints = run("train", *words, *small, "--out", out.parent / "b", *more)
        assert status == 2 and complaint in complaints
    status, shown, complaints = run("train", "--dry-run", "--baseline", "none")
    assert status == 0 and "NoContext with task tokens, the model itself, losses ae, lm" in shown, complaints


def test_an_encoder_of_its_own_trains_and_is_named_again_where_the_hub_does_not_have_it(run, folder, words, tmp_path):  # noqa: F811
    encoder, out = tmp_path / "small", words[3]
    model = tiny("gpt2", vocab_size=300, hidden_size=32, num_hidden_layers=1).float()
    model.save_pretrained(encoder)
    AutoTokenizer.from_pretrained(folder).save_pretrained(encoder)
    new = ("--method", "separate_encoder", "--option", f"encoder={encoder}", "--option", "segment=16", "--steps", 2)
    status, _, complaints = run("train", *words[: words.index("--chunk")], "--ratio", 4, *new)
    assert status == 0, complaints
    trained = ("--compressor", out / "compressor")
    (report := tmp_path / "report.txt").write_text("a text of forty bytes, of which few help")
    status, _, complaints = run("compress", report, *trained)
    assert status == 2 and "not on the hub; pass the model, or its folder" in complaints
    status, shown, complaints = run("compress", report, *trained, "--encoder", encoder)
    assert status == 0 and "40 tokens to 10 memory tokens" in shown, complaints
    words = ("--max-new-tokens", 3, "--encoder", encoder)
    status, _, complaints = run("ask", report.with_suffix(".gist"), "Who?", *trained, *words)
    assert status == 0, complaints
    status, _, complaints = run("compress", report, "--compressor", folder / "x500", "--encoder", encoder)
    assert status == 2 and "encoder: expected none for" in complaints


def test_passages_of_long_texts_and_stages(run, folder, words, monkeypatch):  # noqa: F811
    seen = []
    monkeypatch.setattr(Trainer, "training_step", lambda self, *_, **__: seen.append(self) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("train", *words, "--longer-than", 60)
    # Of 30 texts of one, two and three sentences of 33 letters three are held out.
    batches = seen[0].batches
    assert isinstance(batches, Packed) and batches.rows == 18 and batches.length == 40
    dodo = ("--steps", 6, "--method", "dodo", "--option", "layer=1", "--out", words[3].parent / "dodo", "--ratio", 4)
    with pytest.raises(ZeroDivisionError):
        run("train", *words[:-4], *dodo, "--random-steps", 2, "--ratios", "2,4", "--scorer-rests")
    assert seen[1].stages == growing(6, 2, (2, 4), scorer_rests=True)
    status, _, complaints = run("train", *words, "--out", words[3].parent / "b", "--longer-than", 500)
    assert status == 2 and "--longer-than: expected documents of more than 500 characters" in complaints
