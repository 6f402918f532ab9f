"""The benchmark of finding documents: its pages, its ranks, a store's own, and the guide's table."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", reason="the index extra is not installed")
ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import lookup  # noqa: E402
from test_nearest import texts, write  # noqa: E402

from gistkit_serve.store import Store, index_documents  # noqa: E402
from gistkit_serve.store.nearest import WINDOW  # noqa: E402
from tests.helpers.models import byte_tokenizer, tiny_llama  # noqa: E402
from tests.helpers.stores import documents  # noqa: E402

pytestmark = pytest.mark.slow


def test_ranks_count_the_documents_that_come_before():
    scores = np.array([[0.1, 0.9, 0.5, 0.2], [0.4, 0.4, 0.4, 0.9]])
    # The nearest window counts for its document; who is equally near comes before.
    assert lookup.ranks(scores, np.array([0, 0, 1, 2]), [1, 0]).tolist() == [1, 2]


def test_windows_have_every_word_once():
    parts, owners = lookup.windows(["a b c d e", "f", "g h"], 2)
    assert parts == ["a b", "c d", "e", "f", "g h"] and owners.tolist() == [0, 0, 0, 1, 2]
    assert lookup.windows(["a b c", "d"], 0)[0] == ["a b c", "d"]


def test_every_question_is_about_its_page(tmp_path):
    lines = (ROOT / "lab/models/manual_questions.jsonl").read_text().splitlines()[:50]
    names = sorted({json.loads(line)["page"] for line in lines}) + [f"some/page-{n}" for n in range(40)]
    for number, name in enumerate(names):
        path = tmp_path / Path(name).parent / f"{number:04}-{Path(name).name}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"This is {name}. It has sentences. " * 9)
    pages = lookup.Pages(tmp_path, 50, 200)
    assert len(pages.texts) == 50 and pages.by_hand == len(lines)
    for line, (question, page) in zip(lines, pages.questions, strict=False):
        assert question == json.loads(line)["question"] and json.loads(line)["page"] in pages.texts[page]
    facts = pages.questions[pages.by_hand :]
    assert len({page for _, page in facts}) == len(facts) == 50
    for question, page in facts:
        subject = re.search(r"the ([a-z ]+?)(?: started| take place| end)?\?$", question)[1]
        assert subject in pages.texts[page]


def test_it_measures_what_a_store_does(tmp_path):
    which = texts(12)
    write(tmp_path / "store", which)
    index_documents(tmp_path / "store", documents(which))
    parts, owners = lookup.windows([*which.values()], WINDOW)
    (scores,) = lookup.words()(parts, ["the copper river"])
    best = {name: max(scores[owners == number]) for number, name in enumerate(which)}
    found = dict(Store(tmp_path / "store").nearest("the copper river", 99))
    assert found == pytest.approx({name: score for name, score in best.items() if score}, rel=1e-4)


def test_the_table_of_the_guide_is_that_of_the_results():
    rows = [json.loads(line) for line in (ROOT / "benchmarks/results/lookup.jsonl").read_text().splitlines()]
    measured = {row["form"]: row for row in rows if row["pages"] == 800}
    guide = (ROOT / "docs/guide.md").read_text()
    lines = guide.split("| by | by hand")[1].split("\n\n")[0].splitlines()[2:]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(table) == 6
    for form, *cells in table:
        row = measured[form.removesuffix(" (the index)")]
        assert cells == [f"{row[key]:.0f}" for key in ("hand@1", "hand@5", "facts@1", "facts@5")]
        assert row["questions"] == [50, 170] and row["characters"] == 6000
    few = {row["form"]: row for row in rows if row["pages"] == 200}
    plain = " ".join(guide.split())
    for form, *said in (
        (
            "last hidden states of SmolLM2, windows of 100",
            "find the page of {}% of",
            "by hand ({}% among",
            "and of {}% of",
            "({}%). The",
        ),
        (f"words, tf-idf, windows of {WINDOW}", "words finds {}%", "({}%)", "and {}%", "({}%). `--embed`"),
    ):
        figures = (few[form][key] for key in ("hand@1", "hand@5", "facts@1", "facts@5"))
        found = [words.format(f"{figure:.0f}") for words, figure in zip(said, figures, strict=True)]
        assert re.search(".*?".join(map(re.escape, found)), plain), found
        assert few[form]["questions"] == [50, 170] and few[form]["characters"] == 2000
    assert f"windows of {WINDOW} (the index)" in guide


@pytest.mark.parametrize("hidden", [False, True])
def test_embeddings_are_weighted_means_over_tokens(hidden):
    torch.manual_seed(0)
    model, tokenizer = tiny_llama(vocab_size=257).float().eval(), byte_tokenizer()
    parts, question = ["the river", "a tower of stone"], "a river"
    rows = [tokenizer(text)["input_ids"] for text in (*parts, question)]
    seen = [*rows[0], *rows[1]]
    means = []
    for row in rows:
        states = model.get_input_embeddings()(torch.tensor([row]))
        if hidden:
            states = model.model(torch.tensor([row])).last_hidden_state
        weights = torch.tensor([1 / (1 + seen.count(token) / len(seen) / lookup.SIF) for token in row])
        means.append((weights[:, None] * states[0]).sum(0).detach())
    wanted = [float(torch.cosine_similarity(means[2], mean, 0)) for mean in means[:2]]
    assert lookup.embeddings(model, tokenizer, hidden)(parts, [question])[0].tolist() == pytest.approx(wanted, abs=1e-5)
