"""Trained compressors beside selections: memories, bytes, answers, intervals, tables and the questions themselves."""

import math
import random
from dataclasses import replace
from itertools import product
from statistics import NormalDist

import numpy as np
import pytest
import torch

from gistkit.compress import AvgPool, FiveHundredX, Select
from gistkit.compress.methods.select import SHARES
from gistkit.compress.scores import SCORES
from gistkit.evaluate import QUESTION, Example, compare
from gistkit.evaluate.runner import evaluating
from gistkit_lab.presses import curves, facts, interval, pairs_table, parts_table, presses_table
from gistkit_lab.presses.comparison import (
    FULL,
    NONE,
    PLAIN,
    POOLED,
    Comparison,
    Entry,
    Outcome,
    against_presses,
    entries,
    kept,
    shown,
)
from gistkit_lab.presses.reader import PressReader
from tests.helpers.in_place_oracle import unsettle
from tests.helpers.models import byte_tokenizer, tiny, tiny_llama

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"vocab_size": 257, "bos_token_id": 1, "eos_token_id": 256}
CONTEXT = "The gate is red. Ada keeps the key of the mill. It opens at nine, and the ferry leaves at ten."
SETS = {
    "doors": [
        Example(CONTEXT, " It is late.", "Who?", ["Ada"]),
        Example(CONTEXT, None, "When does it open?", ["nine", "9"]),
        Example(CONTEXT[:31], None, "Who keeps it?", ["Ada"]),
    ],
    "ferries": [Example(CONTEXT, None, "And the ferry?", ["ten"])],
}


def adapted(model, std=0.2):
    """AvgPool with an adapter that changes what the model computes."""
    return unsettle(AvgPool(model, ratio=2, lora=2), std).eval()


def ids(text):
    return byte_tokenizer()(text)["input_ids"]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_memory_of_one_pass_is_what_select_makes_by_itself(family):
    model, context = tiny(family, **SIZES), ids(CONTEXT)[:40]
    reader = PressReader(model, byte_tokenizer(), {by: score() for by, score in SCORES.items()}, fit=True)
    with evaluating(reader.select):
        text = reader.read(context)
        for by, count, shares, fit in product(SCORES, (5, 20), ("equal", "all"), (False, True)):
            select = Select(model, budget=count, by=by, shares=shares, fit=fit).eval()
            select.tokenizer = byte_tokenizer()
            alone, mine = select.encode([context]), reader.scored(text, by, count, shares, fit)
            for one, other in zip(alone.tensors, mine.tensors, strict=True):
                assert torch.equal(one, other), by
            assert torch.equal(alone.key_bias, mine.key_bias) if fit else mine.key_bias is None
            assert torch.equal(alone.positions, mine.positions) and torch.equal(alone.ordinals, mine.ordinals)
            assert torch.equal(alone.last, mine.last) and alone.nbytes == mine.nbytes
            assert (alone.lengths, alone.starts) == (mine.lengths, mine.starts)


@pytest.mark.parametrize("by", ["snapkv", "kvzip"])
def test_a_memory_for_a_question_is_what_select_makes_for_it(by):
    model, context, question = tiny_llama(**SIZES), ids(CONTEXT), " Who has the key?"
    reader = PressReader(model, byte_tokenizer(), {by: SCORES[by]()})
    with evaluating(reader.select):
        text = reader.read(context)
        mine = reader.asked(text, by, ids(QUESTION.format(question=question)), 12)
        without = reader.scored(text, by, 12)
    select = Select(model, budget=12, by=by, question=question).eval()
    select.tokenizer = byte_tokenizer()
    alone = select.encode([context])
    for one, other in zip(alone.tensors, mine.tensors, strict=True):
        torch.testing.assert_close(one, other)
    assert any(not torch.equal(one, other) for one, other in zip(mine.tensors, without.tensors, strict=True))


def test_full_and_no_context_are_the_model_with_the_adapter_merged_into_it(tmp_path):
    from peft import PeftModel

    model, plain = tiny_llama(**SIZES), tiny_llama(**SIZES)
    compressor = adapted(model)
    compressor.save_pretrained(tmp_path)
    (folder,) = (path.parent for path in tmp_path.glob("*/adapter_model.safetensors"))
    merged = PeftModel.from_pretrained(tiny_llama(**SIZES), folder).merge_and_unload()
    context, question = ids(CONTEXT), ids("Who?")
    for under, oracle in ((None, plain), (compressor, merged)):
        reader = PressReader(model, byte_tokenizer(), {}, under)
        with evaluating(reader.select), reader.select.folded():
            text = reader.read(context)
            for count, before in ((text.length, [1, *context]), (1, [1]), (7, [1, *context[:6]])):
                hidden = reader.select.decode(reader.first(text, count), "qa", [question])
                expected = oracle(torch.tensor([before + question])).logits[0, len(before) :].float()
                torch.testing.assert_close(reader.select.logits(hidden)[0, 1:], expected, atol=1e-4, rtol=1e-4)
    # The adapter does something.
    assert (merged(torch.tensor([context])).logits - plain(torch.tensor([context])).logits).abs().max() > 0.1


def test_a_reader_of_its_own_reads_full_contexts_as_it_reads_memories():
    model = tiny_llama(**SIZES)
    compressor = unsettle(Select(model, ratio=1, by="even", lora=2, own_reader=True), 0.2).eval()
    reader = PressReader(model, byte_tokenizer(), {}, compressor)
    with evaluating(reader.select), reader.select.folded():
        text = reader.read(ids(CONTEXT))
        found = reader.select.decode(reader.first(text, text.length), "qa", [ids("Who?")])
    torch.testing.assert_close(found, compressor.decode(compressor.encode([ids(CONTEXT)]), "qa", [ids("Who?")]))
    assert Entry("it", FULL, 1) in entries({"it": compressor})


def test_every_row_of_a_ratio_keeps_the_same_bytes_and_answers_as_one_by_one():
    model, tokenizer = tiny_llama(**SIZES), byte_tokenizer()
    compressor = adapted(model)
    rows = entries({"mine": compressor}, ratios=[2, 5], by=["even", "snapkv"])
    found = against_presses(model, tokenizer, SETS, trained={"mine": compressor}, rows=rows, max_new_tokens=4)
    assert found.sets == ["doors"] * 3 + ["ferries"] and found.contexts == [0, 0, 1, 0]
    lengths = [len(CONTEXT), 31]
    assert found.lengths == lengths
    outcomes = {one.entry: one for one in found.outcomes}
    assert {entry.reader for entry in outcomes} == {"mine", PLAIN}
    # Numbers that the cache holds for a token: two layers' keys and values of two heads of 12, in double precision.
    token = 2 * 2 * 2 * 12 * 8
    for entry, one in outcomes.items():
        tokens = {FULL: [n + 1 for n in lengths], NONE: [1, 1]}.get(
            entry.memory, [1 + math.ceil(n / (entry.ratio or 1)) for n in lengths]
        )
        assert one.tokens == tokens and one.bytes == [token * count for count in tokens], entry
        # Only rows that do not depend on the question have one continuation, less its first token.
        assert one.following_tokens == ([] if entry.aware else [len(" It is late.") - 1])
    assert Entry("mine", POOLED, 2) not in outcomes and Entry(PLAIN, POOLED, 2) in outcomes

    # One question at a time, by the other door.
    for name, example in zip((0, 1, 2, 3), [*SETS["doors"], *SETS["ferries"]], strict=True):
        budget = kept(len(example.context), 5)
        select = Select(model, budget=budget, by="even").eval()
        settings = {"tokenizer": tokenizer, "tasks": ["qa"], "max_new_tokens": 4, "progress": False}
        report = compare({"even": select, "it": compressor}, [example], **settings)
        one, other = report["even"].examples[0], outcomes[Entry(PLAIN, "even", 5)]
        assert other.nats[name] == pytest.approx(one.qa_nats, rel=1e-5) and other.answer_tokens[name] == one.qa_tokens
        scores = one.exact_match, one.contains_answer, one.token_f1
        assert (other.exact[name], other.within[name], other.f1[name]) == scores
        (trained,) = report["it"].examples
        assert outcomes[Entry("mine", "mine", 2)].nats[name] == pytest.approx(trained.qa_nats, rel=1e-5)


def test_a_compressor_whose_memory_is_read_without_an_adapter_stands_beside_the_plain_model():
    model = tiny_llama(**SIZES)
    compressor = FiveHundredX(model, chunk=20, ratio=5, lora=2).eval()
    rows = entries({"chunks": compressor}, ratios=[4], by=["even"])
    assert {entry.reader for entry in rows} == {PLAIN} and Entry(PLAIN, "chunks", 5.0) in rows
    found = against_presses(model, byte_tokenizer(), SETS, trained={"chunks": compressor}, rows=[rows[2]])
    assert found.outcomes[0].tokens == [math.ceil(len(CONTEXT) / 20) * 4, 8]


def test_a_trained_selection_has_a_row_at_each_ratio_that_reads_long_contexts_in_parts():
    model = tiny_llama(**SIZES)
    compressor = Select(model, ratio=4, by="key_norm", part=40, lora=2).eval()
    rows = [Entry("mine", "mine", ratio) for ratio in (2, 4)]
    assert [row for row in entries({"mine": compressor}, ratios=[2], by=["even"]) if row.memory == "mine"] == rows
    found = against_presses(model, byte_tokenizer(), SETS, trained={"mine": compressor}, rows=rows, max_new_tokens=2)
    for outcome, ratio in zip(found.outcomes, (2, 4), strict=True):
        select = Select(model, ratio=ratio, by="key_norm", part=40).eval()
        assert select.part_ends(ids(CONTEXT)) == [31, 62, 94]
        alone = [select.encode([ids(CONTEXT[:n])]) for n in (None, 31)]
        assert outcome.tokens == [memory.sizes[0] for memory in alone]
        assert outcome.bytes == [memory.nbytes for memory in alone]


def test_what_was_measured_is_kept_and_goes_on(tmp_path):
    model, calls = tiny_llama(**SIZES), []
    rows, settings = entries({}, ratios=[4], by=["even"]), {"max_new_tokens": 2}
    first = against_presses(model, byte_tokenizer(), SETS, rows=[Entry(PLAIN, FULL, 1)], **settings)
    again = Comparison.load(first.save(tmp_path / "found.jsonl"))
    assert again.outcomes[0].exact == first.outcomes[0].exact and again.settings == first.settings
    done = replace(again, settings=again.settings | {"machine": {"processor": "another"}})
    count = lambda found: calls.append(len(found.outcomes))  # noqa: E731
    whole = against_presses(model, byte_tokenizer(), SETS, rows=rows, done=done, on_outcome=count, **settings)
    assert calls == list(range(2, len(rows) + 1))
    assert whole.outcomes[0] == again.outcomes[0]
    assert whole.settings == again.settings | {"earlier": [{"processor": "another"}]}
    with pytest.raises(ValueError, match="done: expected a comparison of the same model, questions"):
        against_presses(model, byte_tokenizer(), {"ferries": SETS["ferries"]}, done=again, **settings)
    # Of one name, as every training's folder has, and yet another compressor.
    rows, no_digests = [Entry("mine", NONE)], {key: again.settings[key] for key in again.settings if key != "digests"}
    mine = against_presses(model, byte_tokenizer(), SETS, trained={"mine": adapted(model)}, rows=rows, **settings)
    edited = SETS | {"ferries": [replace(SETS["ferries"][0], answers=["nine"])]}
    for done, sets, trained, base, told in (
        (mine, SETS, {"mine": adapted(model, 0.1)}, model, "rows of the same compressor mine"),
        (again, edited, {}, model, "the same contexts, questions and answers"),
        (again, SETS, {}, tiny_llama(initializer_range=0.03, **SIZES), "the same model's weights"),
        (replace(again, settings=no_digests), SETS, {}, model, "with digests"),
    ):
        with pytest.raises(ValueError, match=f"done: expected .*{told}.*, got"):
            against_presses(base, byte_tokenizer(), sets, trained=trained, done=done, **settings)
    other = against_presses(model, byte_tokenizer(), SETS, rows=rows, trained={"other": adapted(model, 0.1)},
                            done=mine, **settings)  # fmt: skip
    assert {*other.settings["digests"]["compressors"]} == {"mine", "other"}
    (tmp_path / "other.jsonl").write_text('{"rows": 1}\n')
    with pytest.raises(ValueError, match=r"other\.jsonl: expected a comparison with presses"):
        Comparison.load(tmp_path / "other.jsonl")
    for wrong, told in (({"ratios": [0]}, "ratios: expected"), ({"by": ["best"]}, "by: expected some of kvzip")):
        with pytest.raises(ValueError, match=told):
            entries({}, **wrong)
    # A folder's name may be a score's.
    with pytest.raises(ValueError, match="trained: expected names that no other row has, got 'kvzip'"):
        against_presses(model, byte_tokenizer(), SETS, trained={"kvzip": adapted(model)})


def test_an_interval_covers_the_mean_as_often_as_it_says():
    draw = np.random.default_rng(1)
    values = draw.random(400) < 0.3
    found, mean = interval(values, range(400)), values.mean()
    half = NormalDist().inv_cdf(0.975) * math.sqrt(mean * (1 - mean) / 400)
    assert found.mean == pytest.approx(mean)
    assert found.low == pytest.approx(mean - half, abs=0.006) and found.high == pytest.approx(mean + half, abs=0.006)
    # Contexts of four questions each, which are right or wrong together for the most part.
    hits = 0
    for _ in range(120):
        skill = np.repeat(draw.beta(0.6, 1.4, 50), 4)
        low, high = interval(draw.random(200) < skill, np.repeat(np.arange(50), 4))[1:]
        hits += low <= 0.3 <= high
    assert 0.88 <= hits / 120 <= 1


def test_questions_of_one_context_count_as_one_draw():
    values = [float(value) for value in np.random.default_rng(2).random(60) < 0.5]
    repeated, groups = [value for value in values for _ in range(9)], [n for n in range(60) for _ in range(9)]
    alone, grouped = interval(values, range(60)), interval(repeated, groups)
    pretended = interval(repeated, range(540))
    assert grouped == pytest.approx(alone)
    assert (grouped.high - grouped.low) / (pretended.high - pretended.low) == pytest.approx(3, abs=0.3)
    with pytest.raises(ValueError, match="values: expected at least one, with a group each, got 0"):
        interval([], [])


def outcome(reader, memory, ratio, exact, aware=False, shares="equal"):
    count = len(exact)
    tokens = [9.0 if ratio == 1 else 3.0] * 2
    entry, nats = Entry(reader, memory, ratio, aware, shares), [1.0] * count
    return Outcome(entry, tokens, tokens, exact, exact, exact, nats, [2] * count, [6.0], [3])


@pytest.fixture
def made_up():
    rows = [
        outcome("mine", "mine", 4, [1.0, 1, 0, 1]),
        outcome("mine", FULL, 1, [1.0, 1, 1, 1]),
        outcome("mine", "kvzip", 4, [0.0, 1, 1, 0]),
        outcome(PLAIN, "kvzip", 2, [0.0, 0, 0, 1], True),
        outcome(PLAIN, "kvzip", 2, [1.0, 0, 0, 1], shares="all"),
    ]
    return Comparison({}, ["a", "a", "b", "b"], [0, 0, 1, 1], [8, 600], rows)


def test_tables_have_intervals_and_differences_over_the_same_questions(made_up):
    full, mine, kvzip = [line for line in presses_table(made_up).splitlines() if line.startswith("| ")][1:4]
    cells = lambda line: [cell.strip() for cell in line.strip("|").split("|")]  # noqa: E731
    assert cells(full)[:3] == ["full context", "9", "100 (100-100)"] and cells(full)[-1] == "-"
    # Two contexts: both right, or one of two; differences of 0 and of -50.
    assert cells(mine)[:3] == ["mine 4x", "3", "75 (50-100)"] and cells(mine)[-1] == "-25 (-50 to +0)"
    assert cells(kvzip)[:3] == ["kvzip 4x", "3", "50 (50-50)"] and cells(kvzip)[6] == f"{math.exp(2):.2f}"
    assert cells(kvzip)[5] == f"{math.exp(0.5):.2f}" and "question known" in presses_table(made_up)
    (pair,) = [line for line in pairs_table(made_up).splitlines() if "kvzip" in line]
    assert cells(pair) == ["mine, less kvzip 4x", "+25 (+0 to +50)", "2", "1"]
    parts = [cells(line) for line in parts_table(made_up).splitlines()]
    assert parts[0] == ["exact, %", "a (2)", "b (2)", "to 128 tokens (2)", "to 1024 tokens (2)"]
    assert ["adapter + kvzip 4x", "50", "50", "50", "50"] in parts
    lines = curves(made_up)
    plain = lines["the model as it is"]
    assert plain["kvzip, question known"] == [pytest.approx((3 / 305, 25, 0, 50))]
    assert plain["kvzip, heads share"] == [pytest.approx((3 / 305, 50, 50, 50))]
    assert "| kvzip 2x, heads share " in presses_table(made_up)
    assert shown(Entry(PLAIN, "kvzip", 2, shares="heads")) == "kvzip 2x, heads of a layer share"
    assert len({shown(Entry(PLAIN, "kvzip", 2, shares=shares)) for shares in SHARES}) == len(SHARES)


def test_facts_are_in_their_passages_and_what_is_not_asked_is_not():
    tokenizer = byte_tokenizer()
    text = "".join(f"Line {number} of the manual says little. " for number in range(900))
    found = facts.fact_questions(tokenizer(text)["input_ids"], tokenizer, {600: 3, 1500: 2}, continuation=30)
    assert set(found) == set(facts.KINDS)
    contexts = {example.context for examples in found.values() for example in examples}
    assert sorted(len(context) for context in contexts) == [600] * 3 + [1500] * 2
    for kind, examples in found.items():
        for example in examples:
            said = example.question.partition("### Question:\n")[2].partition("\n")[0]
            thing = next(thing for thing in facts._THINGS if f"the {thing}" in said)
            assert (f"he {thing}" in example.context) == (kind != facts.KINDS[-1]), (kind, said)
            if kind in ("dates", "numbers", "names"):
                assert example.answers[0] in example.context and example.answers[0] not in said
    yes = {example.answers for example in found["yes or no"]}
    assert yes <= {("yes",), ("no",)}
    # Each passage has one continuation: the text's own.
    following = [tokenizer.decode(e.continuation) for es in found.values() for e in es if e.continuation is not None]
    assert len(following) == 5 and all(len(part) == 30 and part in text for part in following)
    assert found == facts.fact_questions(tokenizer(text)["input_ids"], tokenizer, {600: 3, 1500: 2}, continuation=30)
    with pytest.raises(ValueError, match="tokens: expected a text of at least one passage"):
        facts.fact_questions([5] * 10, tokenizer)


def test_sentences_stand_behind_sentences_as_far_apart_as_they_can():
    draw = random.Random(0)
    found = facts.plant("One. Two. Three.", ["A fact.", "Another."], draw)
    assert found.replace(" A fact.", "").replace(" Another.", "") == "One. Two. Three."
    assert facts.plant("No end", ["A fact.", "Another."], draw) == "No end A fact. Another."


def test_figures_with_presses_are_lines_with_intervals(made_up):
    pytest.importorskip("matplotlib")
    from gistkit_lab.viz.presses import draw_presses

    figure = draw_presses(curves(made_up), marked=["mine"])
    first, second = figure.axes
    (line,) = [c for c in first.containers if c.get_label() == "kvzip"]
    assert list(line[0].get_ydata()) == [50] and line[0].get_color() != "#D55E00"
    (line,) = [c for c in first.containers if c.get_label() == "mine"]
    low, high = line[2][0].get_segments()[0][:, 1]
    assert (low, high) == (50, 100) and line[0].get_color() == "#D55E00"
    assert second.get_title(loc="left") == "the model as it is"
    # Eight scores, with and without a fit and shared in two ways, are more than the styles of lines.
    shares = {f"score {index}": [(0.5, 40.0, 30.0, 50.0)] for index in range(32)}
    lines = [line[0] for line in draw_presses({"plain": shares}).axes[0].containers]
    assert (
        len({(line.get_color(), line.get_linestyle(), line.get_marker(), line.get_fillstyle()) for line in lines}) == 32
    )
    with pytest.raises(ValueError, match="curves: expected at least one panel"):
        draw_presses({})
