"""Evaluation of real compressors and of the plain model, against one example at a time and transformers' own model."""

import pytest
import torch
from torch.nn import functional as F

from gistkit.compress import ICAE, Compressor, FiveHundredX
from gistkit.evaluate import (
    Example,
    FullContext,
    NoContext,
    evaluate,
    load_baseline,
    run,
)
from tests.helpers.models import tiny, tiny_llama

START = 3


def examples(count=5):
    """Contexts of different lengths; the first has no continuation, the second no question."""
    made = []
    for index in range(count):
        length = 5 + 3 * index
        ids = torch.randint(0, 50, (2 * length,)).tolist()
        made.append(
            Example(
                ids[:length],
                continuation=ids[length : 2 * length - index] if index else None,
                question=None if index == 1 else ids[: 2 + index % 3],
                answers=[ids[4:6], ids[2:3]],
            )
        )
    return made


def own_loss(model, rows):
    """Mean nats a token of the plain model over [(tokens before, tokens predicted)]."""
    total = count = 0
    for before, tokens in rows:
        ids = torch.tensor([[*before, *tokens]])
        logits = model(ids).logits[0, len(before) - 1 : -1]
        total += F.cross_entropy(logits, torch.tensor(tokens), reduction="sum").item()
        count += len(tokens)
    return total / count


@torch.no_grad()
def check_baseline(model, reader, data, before):
    """The reader's row is the plain model's own, where `before(context)` is what stands before the text."""
    row = evaluate(reader, data, batch_size=4, max_new_tokens=6, progress=False).rows[0]
    lm = [(before(e.context), e.continuation) for e in data if e.continuation]
    assert row.metrics["lm_loss"] == pytest.approx(own_loss(model, lm), rel=1e-5)
    ae = [(before(e.context), e.context) for e in data]
    assert row.metrics["ae_loss"] == pytest.approx(own_loss(model, ae), rel=1e-5)
    for example, result in zip(data, row.examples, strict=True):
        for prompt, made in ((example.question, result.prediction), ([], result.reconstruction)):
            if prompt is not None:
                ids = torch.tensor([[*before(example.context), *prompt]])
                new = min(6, len(example.context)) if prompt == [] else 6
                expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
                assert made == " ".join(map(str, expected[0, ids.shape[1] :].tolist()))
    return row


REST = [pytest.param(family, marks=pytest.mark.slow) for family in ("mistral", "qwen2", "gemma2")]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", *REST])
def test_full_context_is_the_plain_model(family):
    # The contexts are longer than the sliding windows of these models, and one is a single token.
    model, data = tiny(family), [*examples(3), Example([7], continuation=[8, 9], question=[1], answers=[[2]])]
    row = check_baseline(model, FullContext(model), data, lambda context: list(context))
    assert [result.tokens_read for result in row.examples] == [len(example.context) for example in data]
    if family == "llama":
        # Two layers of two key-value heads of 12, keys and values, in double precision.
        assert row.examples[0].cache_bytes == 5 * 2 * 2 * 2 * 12 * 8


def test_no_context_is_the_plain_model_without_the_context():
    model, data = tiny_llama(), examples()
    row = check_baseline(model, NoContext(model, start_token=START), data, lambda context: [START])
    assert row.metrics["tokens_read"] == row.metrics["cache_bytes"] == 0


def test_the_start_token_of_no_context():
    assert NoContext(tiny_llama(bos_token_id=4, eos_token_id=5)).start_token == 4
    assert NoContext(tiny_llama(eos_token_id=[6, 7])).start_token == 6
    assert NoContext(tiny_llama(bos_token_id=0)).start_token == 0
    with pytest.raises(ValueError, match="start_token: expected a token id, because the model's configuration has no"):
        NoContext(tiny_llama())
    with pytest.raises(ValueError, match=r"start_token: expected a token id in \[0, 50\), got 50"):
        NoContext(tiny_llama(), start_token=50)
    NoContext(tiny_llama(), task_tokens=True)


@pytest.mark.parametrize("method", [ICAE, pytest.param(FiveHundredX, marks=pytest.mark.slow)])
@torch.no_grad()
def test_evaluation_equals_one_example_at_a_time(method):
    compressor, data = method(tiny_llama(), chunk=8, ratio=4, lora=2, end_token=49), examples()
    row = evaluate(compressor, data, batch_size=2, max_new_tokens=6, stop_tokens=(7, 8), progress=False).rows[0]
    totals = {"ae": [0.0, 0, 0], "lm": [0.0, 0, 0]}
    compressor.eval()
    for example, result in zip(data, row.examples, strict=True):
        memory = compressor.encode(torch.tensor([example.context]))
        for task, tokens in (("ae", example.context), ("lm", example.continuation)):
            if tokens:
                targets = torch.tensor(tokens)
                logits = compressor.logits(compressor.decode(memory, task, targets[None, :-1]))[0]
                sums = (
                    F.cross_entropy(logits, targets, reduction="sum"),
                    len(targets),
                    (logits.argmax(-1) == targets).sum(),
                )
                totals[task] = [a + float(b) for a, b in zip(totals[task], sums, strict=True)]
        made = compressor.generate(memory, task="ae", max_new_tokens=min(6, len(example.context)))[0].tolist()
        assert result.reconstruction == " ".join(map(str, made[: made.index(49)] if 49 in made else made))
        if example.question:
            prompt = torch.tensor([example.question])
            made = compressor.generate(memory, prompt, task="qa", max_new_tokens=6)[0].tolist()
            end = next((place for place, token in enumerate(made) if token in (7, 8)), 6)
            assert result.prediction == " ".join(map(str, made[:end]))
        assert result.tokens_read == 2 * -(-len(example.context) // 8)
    for task, (nats, tokens, correct) in totals.items():
        assert row.metrics[f"{task}_loss"] == pytest.approx(nats / tokens, rel=1e-6)
        assert row.counts[f"{task}_tokens"] == tokens
        if task == "ae":
            assert row.metrics["ae_accuracy"] == correct / tokens


def test_baselines_run_without_the_adapter():
    model, data = tiny_llama(bos_token_id=START), examples()
    before = evaluate(FullContext(model), data, tasks=("ae", "lm"), max_new_tokens=2, progress=False).rows[0]
    compressor = FiveHundredX(model, chunk=8, ratio=4, lora=2)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    report = run(compressor, None, data, tasks=("ae", "lm"), max_new_tokens=2, progress=False)
    assert report["FullContext"].metrics == pytest.approx(before.metrics, rel=1e-9)
    assert [row.method for row in report.rows] == ["NoContext", "FiveHundredX EPL 4x", "FullContext"]
    described = report.settings["methods"]
    assert described["NoContext"]["start_token"] == START and "chunk" not in described["FullContext"]
    assert (described["FiveHundredX EPL 4x"]["chunk"], described["FiveHundredX EPL 4x"]["layout"]) == (8, "epl")


def test_run_takes_the_tasks_that_there_is_data_for():
    compressor = ICAE(tiny_llama(eos_token_id=9), chunk=8, ratio=4, lora=None)
    report = run(compressor, None, [Example([1] * 9, continuation=[2, 3])], baselines=("full",), progress=False)
    assert report.settings["tasks"] == ["ae", "lm"]
    assert [row.method for row in report.rows] == ["ICAE EPL 4x", "FullContext"]
    assert "| FullContext | " in report.table()
    with pytest.raises(ValueError, match="baselines: expected some of none, full, got 'full'"):
        run(compressor, None, examples(), baselines="full", progress=False)
    with pytest.raises(ValueError, match="method: expected a name that no other row has, got 'FullContext'"):
        run(compressor, None, examples(), method="FullContext", progress=False)


@pytest.mark.parametrize("method", [NoContext, FullContext])
def test_a_trained_baseline_has_a_row_beside_the_plain_one(method):
    trained = method(tiny_llama(bos_token_id=START), task_tokens=True)
    report = run(trained, None, examples(), tasks=("lm",), progress=False)
    names = [row.method for row in report.rows]
    assert names == ["NoContext", f"{method.title} with task tokens", "FullContext"]
    described = report.settings["methods"]
    assert [described[name].get("task_tokens") for name in names] == [False, True, False]
    assert report.rows[1].metrics["lm_loss"] != report[method.title].metrics["lm_loss"]


def test_task_tokens_stand_between_context_and_text_and_train_alone():
    model = tiny_llama()
    baseline = FullContext(model, task_tokens=True).double()
    token, embed = baseline.task_embeddings["lm"], model.get_input_embeddings()
    contexts, text = [[11, 12, 13, 14, 15], [6, 7, 8]], torch.randint(3, 50, (2, 5))
    found = baseline.decode(baseline.encode(contexts, gradient=True), "lm", text)
    # The same by transformers alone, which takes its angles in float32.
    expected = []
    for row, ids in enumerate(contexts):
        inputs = torch.cat([embed(torch.tensor(ids)), token, embed(text[row])])[None]
        expected.append(model.model(inputs_embeds=inputs).last_hidden_state[0, len(ids) :])
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-5)
    ours, theirs = (torch.autograd.grad(states.sin().sum(), token)[0] for states in (found, torch.stack(expected)))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_baseline_with_task_tokens_leaves_an_adapter_trainable():
    model = tiny_llama()
    compressor = FiveHundredX(model, chunk=8, ratio=2, lora=2)
    trained = [name for name, _ in compressor.trainable()]
    FullContext(model, task_tokens=True)
    assert [name for name, _ in compressor.trainable()] == trained
    assert any("lora_A" in name for name in trained)


@pytest.mark.parametrize("method", [NoContext, FullContext])
def test_task_tokens_are_all_that_trains(method, tmp_path):
    model = tiny_llama()
    baseline = method(model, task_tokens=True)
    named = dict(baseline.trainable())
    assert sorted(named) == ["task_embeddings.ae", "task_embeddings.lm"]
    assert not list(method(model, **({"start_token": 1} if method is NoContext else {})).trainable())
    context, after = torch.randint(0, 50, (3, 9)), torch.randint(0, 50, (3, 4))
    with torch.no_grad():
        for token in named.values():
            token.add_(torch.randn_like(token))
    baseline.save_pretrained(tmp_path)
    loaded = load_baseline(tmp_path, model)
    assert type(loaded) is method and not loaded.training
    assert loaded(context, continuation_ids=after)["loss"] == baseline(context, continuation_ids=after)["loss"]
    with pytest.raises(ValueError, match=r"shapes .*'ae': \(1, 32\).* got .*'ae': \(1, 48\)"):
        load_baseline(tmp_path, tiny_llama(hidden_size=32))
    with pytest.raises(FileNotFoundError, match=r"task_tokens\.safetensors: expected task tokens, found none"):
        load_baseline(tmp_path / "none", model)
    (tmp_path / "task_tokens.safetensors").write_bytes(b"not this")
    with pytest.raises(ValueError, match="expected task tokens, got a file that cannot be read"):
        load_baseline(tmp_path, model)


def test_baselines_are_no_methods_that_a_saved_compressor_names(tmp_path):
    model = tiny_llama()
    FiveHundredX(model, chunk=8, ratio=4, lora=2).save_pretrained(tmp_path)
    assert type(Compressor.from_pretrained(tmp_path, tiny_llama())) is FiveHundredX
    with pytest.raises(
        ValueError, match="task_tokens: expected a baseline made with task_tokens=True, got one without"
    ):
        FullContext(model).save_pretrained(tmp_path)


@torch.no_grad()
def test_a_window_leaves_the_rest_out_of_the_reconstruction():
    compressor = FiveHundredX(tiny_llama(), chunk=8, ratio=4, lora=None, window=10)
    data = [Example(list(range(25)), continuation=[4, 5]), Example(list(range(8)), continuation=[6])]
    row = evaluate(compressor, data, tasks=("ae", "lm"), progress=False).rows[0]
    assert row.counts["ae_tokens"] == 18
    assert row.examples[0].original == " ".join(map(str, range(10)))
    # Two chunks of two memory tokens and 15 tokens as they are; one chunk.
    assert [result.tokens_read for result in row.examples] == [19, 2]
    memory = compressor.encode([data[0].context])
    logits = compressor.logits(compressor.decode(memory, "lm", torch.tensor([[4]])))[0]
    expected = F.cross_entropy(logits, torch.tensor([4, 5]), reduction="sum").item()
    assert row.examples[0].lm_nats == pytest.approx(expected, rel=1e-6)
