"""The model's own summary in place of a context, against the plain model that writes it and reads it."""

import math

import pytest
import torch

from gistkit.compress import ICAE
from gistkit.evaluate import Example, FullContext, Markers, compare
from gistkit_lab.evaluate.run import run
from gistkit_lab.evaluate.summary_context import SummaryContext
from tests.evaluate.test_baselines import check_baseline
from tests.helpers.models import byte_tokenizer, tiny, tiny_llama


def test_run_summarises_at_the_compressors_ratio():
    compressor = ICAE(tiny_llama(vocab_size=258, eos_token_id=256), chunk=8, ratio=4, lora=None)
    data = [Example("a b c d e f g h i", continuation="xyz")]
    settings = {"tasks": ("lm",), "markers": Markers("<", ">"), "progress": False}
    report = run(compressor, byte_tokenizer(), data, baselines=["full", "summary"], **settings)
    assert [row.method for row in report.rows] == ["ICAE EPL 4x", "SummaryContext 4x", "FullContext"]
    described = report.settings["methods"]
    assert described["SummaryContext 4x"]["ratio"] == 4 and "ratio" not in described["FullContext"]
    summary = SummaryContext(compressor.model, byte_tokenizer(), ratio=4, markers=Markers("<", ">"))
    alone = compare([summary], data, tokenizer=byte_tokenizer(), tasks=("lm",), progress=False).rows[0]
    assert report["SummaryContext 4x"].metrics == pytest.approx(alone.metrics)
    with pytest.raises(ValueError, match="tokenizer: expected one for the baseline 'summary', which writes text, got"):
        run(compressor, None, data, baselines=["summary"], progress=False)
    with pytest.raises(
        ValueError, match=r"judge: expected a function beside the task 'qa', got .* the tasks \('lm',\)"
    ):
        run(compressor, byte_tokenizer(), data, judge=print, **settings)


TEXTS = (
    "It rained in the night, and the river rose.",
    "One",
    "The old bridge had stood there for more than two hundred years before anyone thought of counting its arches, "
    "and nobody had agreed on their number since then.",
    "a b c d e",
)


@torch.no_grad()
def written_by_hand(model, tokenizer, text, stops, *, ratio=10, slack=2, brackets=("[INST]\n", "\n[/INST]")):
    """The tokens of a summary, and the most there may be."""
    count = len(text.split(" "))
    words = -(-count // ratio)
    prompt = f"{brackets[0]}Please summarize the following text into {words} words: {text}{brackets[1]}"
    limit = math.ceil(slack * words * len(text.encode()) / count)
    made = model.generate(
        **tokenizer(prompt, return_tensors="pt", return_token_type_ids=False),
        max_new_tokens=limit,
        do_sample=False,
        eos_token_id=list(stops) or None,
        pad_token_id=0,
    )
    made = made[0, len(tokenizer(prompt)["input_ids"]) :].tolist()
    return made[:-1] if made[-1] in stops else made, limit


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_summary_is_what_the_plain_model_writes_and_then_reads(family):
    model, tokenizer = tiny(family, vocab_size=257), byte_tokenizer()
    # A token that ends some summaries early, and not all of them.
    whole = [set(written_by_hand(model, tokenizer, text, ())[0]) for text in TEXTS]
    stops = (min(set.union(*whole) - set.intersection(*whole)), 256)
    made = [written_by_hand(model, tokenizer, text, stops) for text in TEXTS]
    assert any(len(tokens) < limit for tokens, limit in made) and any(len(tokens) == limit for tokens, limit in made)
    summaries = [tokenizer.decode(tokens).strip() for tokens, _ in made]
    reader = SummaryContext(model, tokenizer, stop_tokens=stops)
    contexts = [tokenizer(text)["input_ids"] for text in TEXTS]
    assert reader.summaries(contexts) == summaries
    data = [
        Example(ids, continuation=[8, 9, 10 + index], question=[1] * (1 + index), answers=[[2]])
        for index, ids in enumerate(contexts)
    ]
    read = {tuple(ids): tokenizer(text)["input_ids"] for ids, text in zip(contexts, summaries, strict=True)}
    row = check_baseline(model, reader, data, lambda context: read[tuple(context)])
    assert [result.tokens_read for result in row.examples] == [len(read[tuple(ids)]) for ids in contexts]
    assert len(set(map(len, read.values()))) > 1
    if family == "llama":
        # Two layers of two key-value heads of 12, keys and values, in double precision.
        assert row.examples[2].cache_bytes == len(read[tuple(contexts[2])]) * 2 * 2 * 2 * 12 * 8


def test_a_summary_leaves_the_first_token_and_the_opening_marker_in_place():
    model, tokenizer, brackets = tiny_llama(vocab_size=258), byte_tokenizer(start=True), Markers("<user>", "<model>")
    reader = SummaryContext(model, tokenizer, ratio=4, slack=1.5, markers=brackets, stop_tokens=())
    settings = {"ratio": 4, "slack": 1.5, "brackets": brackets}

    def tokens_of(first, second, third):
        last = tokenizer(third, add_special_tokens=False)["input_ids"]
        return [tokenizer(first)["input_ids"], tokenizer("<user>" + second)["input_ids"], last]

    rows = tokens_of(TEXTS[0], TEXTS[2], TEXTS[3])
    made = [written_by_hand(model, tokenizer, TEXTS[index], (), **settings)[0] for index in (0, 2, 3)]
    texts = [tokenizer.decode(tokens).strip() for tokens in made]
    assert reader.summaries(rows) == texts
    read = tokens_of(*texts)
    assert [ids[0] == 257 for ids in read] == [True, True, False]
    ours, plain = reader.encode(rows), FullContext(model).encode(read)
    assert ours.lengths == plain.lengths and ours.context_lengths == tuple(map(len, rows))
    for mine, theirs in zip(ours.tensors, plain.tensors, strict=True):
        torch.testing.assert_close(mine, theirs)
    # A task token follows what is read, and has no part in the writing.
    reader = SummaryContext(model, tokenizer, ratio=4, slack=1.5, markers=brackets, stop_tokens=(), task_tokens=True)
    assert reader.encode(rows).lengths == tuple(map(len, read)) and len(dict(reader.trainable())) == 2


def test_a_marker_may_begin_with_the_first_token():
    model, tokenizer = tiny_llama(vocab_size=258), byte_tokenizer(start=True)
    reader = SummaryContext(model, tokenizer, markers=Markers("<start>user\n", "<end>"), stop_tokens=())
    rows = [tokenizer("<start>user\n" + TEXTS[3], add_special_tokens=False)["input_ids"]]
    memory, (summary,) = reader.encode(rows), reader.summaries(rows)
    (read,) = FullContext(model).encode(tokenizer("<start>user\n" + summary, add_special_tokens=False)).context_lengths
    assert memory.tokens_read == (read,) and rows[0][0] == 257


def test_of_an_empty_summary_the_first_token_is_read():
    model, tokenizer = tiny_llama(vocab_size=257), byte_tokenizer()
    reader = SummaryContext(model, tokenizer, stop_tokens=range(257))
    rows = [tokenizer(text)["input_ids"] for text in TEXTS]
    assert reader.summaries(rows) == [""] * 4
    memory = reader.encode(rows)
    assert memory.tokens_read == (1,) * 4 and memory.lead == tuple(row[0] for row in rows)


def test_a_summary_needs_a_tokenizer_and_sensible_numbers():
    model = tiny_llama(vocab_size=257, eos_token_id=[250, 251])
    with pytest.raises(ValueError, match="tokenizer: expected one that makes and reads the text of contexts, got None"):
        SummaryContext(model, None)
    for name, value in (("ratio", 0.5), ("slack", 0), ("ratio", math.inf), ("slack", math.nan)):
        with pytest.raises(ValueError, match=f"{name}: expected a number of at least 1, got {value}"):
            SummaryContext(model, byte_tokenizer(), **{name: value})
    reader = SummaryContext(model, byte_tokenizer(), ratio=7.5)
    assert reader.stop_tokens == (250, 251, 256)
    assert (reader.ratio, reader.title) == (7.5, "SummaryContext 7.5x")
    assert len(dict(reader.named_parameters())) == len(dict(FullContext(model).named_parameters()))
