"""Several sets of questions in one report: each set's figures, and means that count every set the same."""

import json
import math

import pytest

from gistkit.compress import FiveHundredX
from gistkit.evaluate import Example, Report, Row, run
from gistkit_lab.evaluate.sets import SetReports, domain_of, run_sets
from tests.helpers.models import byte_tokenizer, tiny_llama


def report(f1, loss, examples, **more):
    """One of two methods, of which the second is 10 points better."""
    rows = (
        Row("NoContext", {"ae_loss": loss, "qa_token_f1": f1, **more}, {"examples": examples}, 1.0),
        Row("X", {"ae_loss": loss / 2, "qa_token_f1": f1 + 10}, {"examples": examples}, 2.0),
    )
    return Report(rows, {"tasks": ["qa"]}, {"cpu": "made up"})


SETS = {"SQuAD": (20.0, 4.0, 100), "NewsQA": (40.0, 2.0, 1), "DROP": (33.0, 1.0, 7), "ours": (1.0, 1.0, 5)}
DOMAINS = {"SQuAD": "in-domain", "NewsQA": "in-domain", "DROP": "out-of-domain"}


def test_means_count_every_set_the_same():
    reports = SetReports({name: report(*values) for name, values in SETS.items()}, DOMAINS)
    means = reports.means()
    # One set of no domain has no mean beside itself.
    names = {domain: names for domain, (names, _) in means.items()}
    assert names == {"in-domain": ("SQuAD", "NewsQA"), "out-of-domain": ("DROP",)}
    none, ours = means["in-domain"][1]
    assert none == Row("NoContext", {"ae_loss": 3.0, "qa_token_f1": 30.0}, {"examples": 101}, 2.0)
    assert ours == Row("X", {"ae_loss": 1.5, "qa_token_f1": 40.0}, {"examples": 101}, 4.0)
    assert means["out-of-domain"][1][0].metrics == {"ae_loss": 1.0, "qa_token_f1": 33.0}
    assert reports["DROP"]["X"].metrics["qa_token_f1"] == 43.0
    alike = SetReports({name: report(*SETS[name]) for name in ("SQuAD", "ours")})
    assert alike.means()["all"][1][0].metrics["qa_token_f1"] == 10.5


def test_a_figure_that_one_set_lacks_has_no_mean():
    reports = SetReports({"a": report(1.0, 1.0, 1, lm_loss=5.0), "b": report(3.0, 1.0, 1)})
    assert reports.means()["all"][1][0].metrics == {"ae_loss": 1.0, "qa_token_f1": 2.0}


def test_the_table_has_a_row_a_set_and_the_means(tmp_path):
    reports = SetReports({name: report(*values) for name, values in SETS.items()}, DOMAINS)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in str(reports).splitlines()]
    assert lines[0] == ["set", "method", "AE loss", "QA F1"]
    assert [line[0] for line in lines[2::2]] == [*SETS, "mean of 2 in-domain", "mean of 1 out-of-domain"]
    assert lines[2] == ["SQuAD", "NoContext", "4.000", "20.00"]
    assert lines[11] == ["mean of 2 in-domain", "X", "1.500", "40.00"]
    reports = SetReports({"a": report(1.0, math.inf, 1), "b": report(3.0, 1.0, 1)})
    content = json.loads(reports.save(tmp_path / "sets.json").read_text())
    losses = [(each["name"], each["domain"], each["rows"][0]["metrics"]["ae_loss"]) for each in content["sets"]]
    assert losses == [("a", None, None), ("b", None, 1.0)]
    (mean,) = content["means"]
    assert mean["sets"] == ["a", "b"] and mean["rows"][1]["metrics"]["qa_token_f1"] == 12.0


def test_each_set_is_measured_by_itself():
    tokenizer = byte_tokenizer()
    compressor = FiveHundredX(tiny_llama(vocab_size=257), chunk=16, ratio=4).double()

    def examples(name, count):
        return [Example(f"{name} is {n}.", question="Which?", answers=(f"{n}",)) for n in range(count)]

    settings = {"tasks": ["qa"], "baselines": ("none",), "max_new_tokens": 4, "progress": False}
    asked = []

    def read(name, count):
        asked.append(name)
        return examples(name, count)

    sets = {"a": lambda: read("a", 3), "b": lambda: read("b", 5)}
    found = run_sets(compressor, tokenizer, sets, domains={"a": "in-domain"}, **settings)
    assert asked == ["a", "b"] and list(found.means()) == ["in-domain"]
    for name, count in (("a", 3), ("b", 5)):
        alone = run(compressor, tokenizer, examples(name, count), **settings)
        assert [(row.method, row.metrics, row.counts) for row in found[name].rows] == [
            (row.method, row.metrics, row.counts) for row in alone.rows
        ]
    with pytest.raises(ValueError, match="sets: expected at least one, got none"):
        run_sets(compressor, tokenizer, {})


@pytest.mark.parametrize(
    ("names", "domain"),
    [
        (["SQuAD", "NewsQA", "TriviaQA-web", "SearchQA", "HotpotQA", "NaturalQuestionsShort"], "in-domain"),
        (["BioASQ", "DROP", "DuoRC.ParaphraseRC", "RACE", "RelationExtraction", "TextbookQA"], "out-of-domain"),
    ],
)
def test_the_sets_of_mrqa_have_domains(names, domain, tmp_path):
    for name in names:
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps({"header": {"dataset": name.split(".")[0], "split": "dev"}}) + "\n")
        assert domain_of(path) == domain
    # Of SQuAD's own file it is not known, nor of a folder.
    path = tmp_path / "dev-v1.1.json"
    path.write_text('{"data": []}')
    assert domain_of(path) is None and domain_of(tmp_path) is None
