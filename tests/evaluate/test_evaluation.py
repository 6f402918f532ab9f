"""Evaluation: of a reader whose figures are known by hand, and of real compressors against one example at a time."""

import json
import math

import pytest
import torch

from gistkit.compress import ICAE, Dodo
from gistkit.evaluate import Example, FullContext, Report, compare, evaluate
from gistkit.evaluate.report import Row
from gistkit.evaluate.runner import end_tokens
from tests.helpers.models import byte_tokenizer, tiny_llama

VOCABULARY, SURE = 50, 0.9


class Known:
    """A reader that gives the right token probability 0.9, or, where that is a multiple of 5, the token after it."""

    title = "known"
    end_token = None

    def __init__(self):
        self.model = tiny_llama()
        self.batches = []

    def encode(self, rows):
        self.batches.append(list(map(len, rows)))
        return KnownMemory(rows)

    def decode(self, memory, task, ids, mask):
        # Which token comes next, the reader knows from the context: the continuation counts up from its last token.
        width = ids.shape[1] + 1
        guesses = torch.zeros(len(memory.rows), width, dtype=torch.long)
        for row, context in enumerate(memory.rows):
            right = context if task == "ae" else [context[-1] + 1 + i for i in range(width)]
            for place, token in enumerate(right[:width]):
                guesses[row, place] = self.guess(token)
            assert mask[row].sum() < width
        return torch.nn.functional.one_hot(guesses, VOCABULARY).double()

    @staticmethod
    def guess(token):
        return token + 1 if token % 5 == 0 else token

    def logits(self, hidden):
        # In double precision: two numbers alone would give the default's.
        sure, other = (torch.full_like(hidden, math.log(p)) for p in (SURE, (1 - SURE) / (VOCABULARY - 1)))
        return torch.where(hidden > 0, sure, other)

    def generate(self, memory, prompts=None, mask=None, *, task, max_new_tokens, stop_tokens, pad_token):
        made = torch.full((len(memory.rows), max_new_tokens), pad_token)
        for row, context in enumerate(memory.rows):
            tokens = [self.guess(token) for token in context] + [7] * max_new_tokens
            if task == "qa":
                # The question's last token, twice the row's context length, then the end.
                tokens = [int(prompts[row][mask[row]][-1]), 2 * len(context), *stop_tokens, 3, 3]
            made[row, : min(len(tokens), max_new_tokens)] = torch.tensor(tokens[:max_new_tokens])
        return made


class KnownMemory:
    full_cache_bytes = property(lambda self: 10 * sum(map(len, self.rows)))
    context_lengths = property(lambda self: [len(row) for row in self.rows])
    lengths = property(lambda self: [len(row) // 2 for row in self.rows])

    def __init__(self, rows):
        self.rows = rows
        self.rest = [()] * len(rows)

    def __getitem__(self, rows):
        return KnownMemory([self.rows[row] for row in rows])


DATA = [
    Example([1, 2, 3, 4], continuation=[5, 6], question=[9, 11], answers=[[11, 8]]),
    Example([5, 6, 7, 8, 9, 10, 11, 12], question=[13], answers=[[2], [13, 17]]),
    Example([21, 22], continuation=[23]),
]


def nats(right, wrong):
    return -right * math.log(SURE) - wrong * math.log((1 - SURE) / (VOCABULARY - 1))


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_figures_by_hand(batch_size):
    reader = Known()
    report = evaluate(reader, DATA, batch_size=batch_size, stop_tokens=(40,), progress=False)
    row = report["known"]
    expected = {
        "ae_loss": nats(12, 2) / 14,
        "ae_accuracy": 12 / 14,
        "lm_loss": nats(2, 1) / 3,
        # After the questions 7 and 8 are guessed where 11 and 8 are right, and 14 where 2 is.
        "qa_loss": nats(1, 2) / 3,
        # No three words on end are there at all.
        "qa_bleu4": 0.0,
        "qa_exact_match": 50.0,
        "qa_token_f1": 100 * (1 + 0.5) / 2,
        "qa_rouge1_f1": 100 * (1 + 0.5) / 2,
        "qa_rouge2_f1": 50.0,
        "qa_rougel_f1": 100 * (1 + 0.5) / 2,
        "qa_contains_answer": 50.0,
        "tokens_read": 7 / 3,
        "cache_bytes": 70 / 3,
    }
    expected["ae_perplexity"] = math.exp(expected["ae_loss"])
    expected["lm_perplexity"] = math.exp(expected["lm_loss"])
    expected["qa_perplexity"] = math.exp(expected["qa_loss"])
    # Of 14 words, 11 pairs, 8 triples and 6 fours; 5 and 10 are wrong in "5 6 7 8 9 10 11 12".
    matches = (12 / 14) * (8 / 11) * (4 / 8) * (2 / 6)
    expected["ae_bleu4"] = 100 * matches**0.25
    assert row.metrics == pytest.approx(expected, rel=1e-6)
    counts = {"ae_examples": 3, "ae_tokens": 14, "lm_examples": 2, "lm_tokens": 3, "qa_examples": 2, "qa_tokens": 3}
    assert row.counts == {"examples": 3, **counts}
    # The longest first, in batches; the results in the order of the data.
    assert [length for batch in reader.batches for length in batch] == [8, 4, 2]
    assert max(map(len, reader.batches)) <= batch_size
    assert [result.original for result in row.examples] == ["1 2 3 4", "5 6 7 8 9 10 11 12", "21 22"]
    assert [result.reconstruction for result in row.examples] == ["1 2 3 4", "6 6 7 8 9 11 11 12", "21 22"]
    assert [result.prediction for result in row.examples] == ["11 8", "13 16", None]
    assert [result.tokens_read for result in row.examples] == [2, 4, 1]


def test_continuations_are_measured_from_their_second_token_where_an_encoder_predicts_the_first():
    class InPlace(Known):
        encoder_predicts_first = True

    report = compare({"in place": InPlace(), "known": Known()}, DATA, tasks=["lm"], progress=False)
    for row in report.rows:
        # Of 5 6 and 23: 6 alone.
        assert (row.counts["lm_examples"], row.counts["lm_tokens"]) == (1, 1)
        assert row.metrics["lm_loss"] == pytest.approx(nats(1, 0), rel=1e-6)
    with pytest.raises(ValueError, match="data: expected a continuation of at least 2 tokens for a method in place"):
        evaluate(InPlace(), DATA[1:], tasks=["lm"], progress=False)
    assert Dodo.encoder_predicts_first and not ICAE.encoder_predicts_first


def plain_nats(model, ids):
    """The loss of every token but the first, by transformers alone."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none").tolist()


def test_the_loss_of_answers_is_the_plain_models():
    tokenizer, model = byte_tokenizer(), tiny_llama(vocab_size=260)
    data = [
        Example("It rained in Rome.", question=" Where? ", answers=["Rome", "in Rome"]),
        Example("One and two.", question=" Who was it? ", answers=["two"]),
        Example("Nothing is asked of this."),
    ]
    row = compare([FullContext(model)], data, tokenizer=tokenizer, tasks=["qa"], max_new_tokens=2, progress=False)
    total = count = 0
    for example in data[:2]:
        before = tokenizer(example.context + example.question)["input_ids"]
        answer = tokenizer(example.answers[0])["input_ids"]
        total += sum(plain_nats(model, before + answer)[-len(answer) :])
        count += len(answer)
    metrics, counts = row.rows[0].metrics, row.rows[0].counts
    assert metrics["qa_loss"] == pytest.approx(total / count, rel=1e-6)
    assert metrics["qa_perplexity"] == pytest.approx(math.exp(total / count), rel=1e-6)
    assert (counts["qa_tokens"], counts["qa_examples"]) == (7, 2)


def test_the_loss_of_answers_is_a_compressors_own():
    compressor = ICAE(tiny_llama(), chunk=8, ratio=4, lora=2, losses=("qa",)).eval()
    context, question, answer = list(range(3, 14)), [20, 21], [22, 23, 24]
    with torch.no_grad():
        loss = compressor([context], question_ids=torch.tensor([question]), answer_ids=torch.tensor([answer]))["qa"]
    data = [Example(context, question=question, answers=[answer])]
    row = evaluate(compressor, data, tasks=["qa"], max_new_tokens=2, progress=False).rows[0]
    assert row.metrics["qa_loss"] == pytest.approx(float(loss), rel=1e-5)


def test_tasks_and_limits():
    row = evaluate(Known(), DATA, tasks=("ae",), max_new_tokens=3, progress=False)["known"]
    assert [result.reconstruction for result in row.examples] == ["1 2 3", "6 6 7", "21 22"]
    assert [result.original for result in row.examples] == ["1 2 3", "5 6 7", "21 22"]
    assert row.counts["ae_tokens"] == 14
    assert not any(name.startswith(("lm", "qa")) for name in row.metrics)


def test_an_end_token_ends_the_reconstruction():
    reader = Known()
    reader.end_token = 8
    row = evaluate(reader, DATA, tasks=("ae",), progress=False)["known"]
    assert row.examples[1].reconstruction == "6 6 7"
    assert row.examples[1].original == "5 6 7 8 9 10 11 12"


class Letters:
    """A tokenizer of single letters, with options of transformers; id 1 is put before a text, id 2 ends one."""

    eos_token_id, add_special_tokens = 2, None

    def __call__(self, text, add_special_tokens=True, **_):
        return {"input_ids": [1] * add_special_tokens + [ord(letter) - 94 for letter in text]}

    def decode(self, ids, skip_special_tokens=False):
        return "".join(chr(token + 94) for token in ids if token > 2)


def test_examples_of_text_and_of_ids_give_the_same():
    tokenizer, reader = Letters(), Known()
    text = [Example("bcd", continuation="ef", question="pq", answers=["q"])]
    ids = [Example([1, 4, 5, 6], continuation=torch.tensor([7, 8]), question=[18, 19], answers=[[19]])]
    one = evaluate(reader, text, tokenizer=tokenizer, progress=False)["known"]
    two = evaluate(reader, ids, tokenizer=tokenizer, progress=False)["known"]
    assert one.metrics == two.metrics and one.examples == two.examples
    assert one.examples[0].original == "bcd"
    assert one.examples[0].reconstruction == "bdd"
    # "q", then a token of 2 * 4 = 8, "f", then the tokenizer's end token.
    assert (one.examples[0].prediction, one.examples[0].answers) == ("qf", ("q",))


class Verbose(Known):
    """A method that answers in three lines, whatever it is asked."""

    def decode(self, memory, task, ids, mask):
        return torch.zeros(len(memory.rows), ids.shape[1] + 1, 256)

    def generate(self, memory, *_, max_new_tokens, **__):
        tokens = byte_tokenizer()("the answer\nis\nParis")["input_ids"]
        return torch.tensor(tokens[:max_new_tokens]).repeat(len(memory.rows), 1)


def test_answers_of_several_lines_are_compared_with_the_whole_output():
    answers = [["the answer\nis\nParis"], ["rome", "the answer\nwas\nParis"], ["the answer\n"]]
    data = [Example("bcd", question="q", answers=each) for each in answers]
    settings = {"tokenizer": byte_tokenizer(), "tasks": ("qa",), "progress": False}
    results = evaluate(Verbose(), data, **settings)["known"].examples
    whole = "the answer\nis\nParis"
    assert [result.prediction for result in results] == [whole, whole, "the answer"]
    assert [result.rouge1_f1 for result in results] == [1, 0.75, 1]
    assert [result.exact_match for result in results] == [1, 0, 1]


def test_accuracy_is_of_the_whole_output_and_the_other_scores_of_its_first_line():
    data = [Example("bcd", question="q", answers=["paris"]), Example("b", question="q", answers=["the answer"])]
    settings = {"tokenizer": byte_tokenizer(), "tasks": ("qa",), "progress": False}
    row = evaluate(Verbose(), data, **settings)["known"]
    assert [result.output for result in row.examples] == ["the answer\nis\nParis"] * 2
    assert [result.prediction for result in row.examples] == ["the answer"] * 2
    assert [result.contains_answer for result in row.examples] == [1, 1]
    assert [result.exact_match for result in row.examples] == [0, 1]
    short = evaluate(Verbose(), data, max_new_tokens=17, **settings)["known"]
    assert short.examples[0].output == "the answer\nis\nPar" and short.metrics["qa_contains_answer"] == 50


def test_end_tokens_are_all_ends_of_sequence():
    model = tiny_llama()
    assert end_tokens(model, None) == [] and end_tokens(model, Letters()) == [2]
    model.generation_config.eos_token_id = [7, 2]
    assert end_tokens(model, Letters()) == [2, 7]
    model.generation_config.eos_token_id = 9
    assert end_tokens(model, Letters()) == [2, 9]


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        ([], {}, "data: expected at least one example, got none"),
        ([[1, 2]], {}, r"data\[0\]: expected an Example, got list"),
        (DATA, {"tasks": ("ae", "sum")}, r"tasks: expected some of ae, lm, qa, got \('ae', 'sum'\)"),
        (DATA, {"tasks": "ae"}, "tasks: expected some of ae, lm, qa, got 'ae'"),
        (DATA, {"tasks": ()}, r"tasks: expected some of ae, lm, qa, got \(\)"),
        (DATA, {"batch_size": 0}, "batch_size: expected a whole number >= 1, got 0"),
        (DATA, {"batch_size": 2.5}, "batch_size: expected a whole number >= 1, got 2.5"),
        (DATA, {"max_new_tokens": 0}, "max_new_tokens: expected a whole number >= 1, got 0"),
        ([Example([1]), Example([])], {}, r"data\[1\]\.context: expected at least one token, got none"),
        ([Example("text")], {}, r"data\[0\]\.context: expected token ids where there is no tokenizer, got text"),
        ([Example([1.5])], {}, r"data\[0\]\.context: expected whole numbers, got 1\.5"),
        ([Example(torch.ones(2, 2))], {}, r"data\[0\]\.context: expected int64 \[n\], got torch\.float32 of shape"),
        ([Example([1])], {"tasks": ("lm",)}, "data: expected an example with a continuation for the task 'lm', got 1"),
        ([Example([1])], {"tasks": ("qa",)}, "data: expected an example with a question for the task 'qa'"),
        ([Example([1], question=[])], {}, r"data\[0\]\.question: expected at least one token, got none"),
        ([Example([1], continuation="")], {}, r"data\[0\]\.continuation: expected token ids where there is no"),
        ([Example([1], continuation=[])], {}, r"data\[0\]\.continuation: expected at least one token, got none"),
        ([Example([1], question=[1])], {}, r"data\[0\]\.answers: expected at least one answer to its"),
        (
            [Example([1], question=[1], answers="ab")],
            {},
            r"data\[0\]\.answers: expected a sequence of answers",
        ),
        ([Example([1], question=[1], answers=["ab"])], {}, r"data\[0\]\.answers: expected token ids where there is no"),
    ],
)
def test_errors_say_what_was_expected(data, settings, message):
    with pytest.raises(ValueError, match=message):
        evaluate(Known(), data, progress=False, **settings)


def test_methods_have_different_names():
    with pytest.raises(ValueError, match="methods: expected different names, got two called 'known'"):
        compare([Known(), Known()], DATA, progress=False)
    with pytest.raises(ValueError, match="methods: expected at least one, got none"):
        compare([], DATA, progress=False)
    report = compare({"one": Known(), "two": Known()}, DATA, progress=False)
    assert [row.method for row in report.rows] == ["one", "two"]
    with pytest.raises(KeyError, match="method: expected one of one, two, got 'three'"):
        report["three"]


def test_modes_are_put_back():
    reader = Known()
    reader.model.train()
    reader.model.lm_head.eval()
    evaluate(reader, DATA, tasks=("lm",), progress=False)
    assert reader.model.training and reader.model.model.training and not reader.model.lm_head.training


def test_a_progress_bar_counts_examples_and_tasks(capsys):
    evaluate(Known(), DATA, progress=True)
    assert "known: 100%" in (shown := capsys.readouterr().err) and "7/7" in shown


def test_report_round_trip(tmp_path):
    report = compare([Known()], DATA, stop_tokens=(40,), progress=False)
    assert Report.load(report.save(tmp_path / "all.json", examples=True)) == report
    # Of an earlier release, which measured words too.
    older = json.loads((tmp_path / "all.json").read_text())
    older["rows"][0]["examples"][0] |= {"lm_word_nats": 1.5, "lm_words": 2, "lm_excluded_words": 0}
    (tmp_path / "older.json").write_text(json.dumps(older))
    assert Report.load(tmp_path / "older.json") == report
    path = report.save(tmp_path / "figures.json")
    content = json.loads(path.read_text())
    assert content["rows"][0]["counts"]["ae_tokens"] == 14
    assert content["settings"]["stop_tokens"] == [40]
    assert content["settings"]["methods"]["known"]["model"] == "LlamaForCausalLM"
    assert {"processor", "torch", "gistkit"} <= set(content["machine"])
    assert "examples" not in content["rows"][0]
    assert Report.load(path)["known"].metrics == report["known"].metrics
    (tmp_path / "other.json").write_text('{"rows": [1]}')
    with pytest.raises(ValueError, match=r"other\.json: expected the report of an evaluation, got another file"):
        Report.load(tmp_path / "other.json")


def test_table():
    rows = (
        Row("a", {"lm_loss": 2.0, "lm_perplexity": math.inf, "cache_bytes": 2048.0}, {}, 1.0),
        Row("longer name", {"lm_loss": 10.5, "lm_perplexity": 3.0, "ae_bleu4": 12.345, "cache_bytes": 0.0}, {}, 1.0),
    )
    report = Report(rows, {})
    assert report.table().splitlines() == [
        "| method      | AE BLEU-4 | LM loss | LM PPL | cache KiB |",
        "|-------------|-----------|---------|--------|-----------|",
        "| a           | -         | 2.000   | inf    | 2.0       |",
        "| longer name | 12.35     | 10.500  | 3.00   | 0.0       |",
    ]
    assert json.loads(json.dumps(report.as_dict(), allow_nan=True))["rows"][0]["method"] == "a"


def test_an_infinite_perplexity_is_saved_as_null(tmp_path):
    report = Report((Row("a", {"lm_loss": 1e4, "lm_perplexity": math.inf}, {}, 1.0),), {})
    path = report.save(tmp_path / "report.json")
    assert json.loads(path.read_text())["rows"][0]["metrics"]["lm_perplexity"] is None
    assert Report.load(path)["a"].metrics["lm_perplexity"] == math.inf
