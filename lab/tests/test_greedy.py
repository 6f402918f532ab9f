"""The greedy search for nuggets, against a plain double loop that encodes and reads every selection by itself."""

import math

import pytest
import torch
from peft import LoraConfig
from torch.nn import functional as F

from gistkit import cli
from gistkit.compress import Compressor, Dodo, Gist
from gistkit.nn import Nuggets
from gistkit_lab import digests
from gistkit_lab.studies import greedy, registry
from gistkit_lab.studies.greedy import STUDY, Recipe, Run, SwapSearch, improve, passages, study
from gistkit_lab.studies.results import load
from tests.cli.test_cli import byte_tokenizer, small_llama
from tests.helpers.dodo_oracle import best, read, scores_of
from tests.helpers.in_place_oracle import unsettle
from tests.helpers.models import tiny, tiny_llama

pytestmark = pytest.mark.slow

BOS = 1


def make(model=None, **options):
    model = tiny_llama() if model is None else model
    options = {"ratio": 3, "layer": 1, "bos_token": BOS, "lora": 2, **options}
    return unsettle(Dodo(model, **options).double()).eval()


def tokens(count):
    return torch.randint(2, 50, (count,)).tolist()


@torch.no_grad()
def loss_of(compressor, context, chosen, text, asked, rest=()):
    """The loss behind nuggets of one's own choice, from a pass of their own through encoder and decoder."""
    rows = compressor.contexts([context])
    memory, _ = compressor.encode_nuggets(rows, Nuggets(torch.tensor([sorted(chosen)]), (len(chosen),)))
    hidden = compressor.decode(memory, "lm", [[*rest, *text[:-1]]])[0]
    return F.cross_entropy(compressor.logits(hidden[-asked:]), torch.tensor(text[-asked:])).item()


def algorithm_1(loss, chosen, rounds=1):
    """The pseudo-code on sets, one selection at a time; the last token is not replaced."""
    last, lowest = max(chosen), loss(chosen)
    for _ in range(rounds):
        for nugget in sorted(chosen - {last}):
            for other in sorted(set(range(1, last + 1)) - chosen):
                candidate = chosen - {nugget} | {other}
                found = loss(candidate)
                if found < lowest:
                    lowest, chosen, nugget = found, candidate, other
    return chosen, lowest


def own_nuggets(compressor, context):
    return set(best(scores_of(compressor, [BOS, *context]), compressor.chunk)[1:])


@pytest.mark.parametrize(("family", "batch_size"), [("llama", 3), ("gemma2", 32)])
def test_the_search_is_algorithm_1_one_selection_at_a_time(family, batch_size):
    compressor = make(tiny(family))
    context, text = tokens(13), tokens(9)
    first = own_nuggets(compressor, context)
    loss = lambda chosen: loss_of(compressor, context, chosen, text, 5)  # noqa: E731
    chosen, lowest = algorithm_1(loss, first)
    found = improve(compressor, context, text, 5, batch_size=batch_size, progress=False)
    assert found.before == tuple(sorted(first))
    assert found.after == tuple(sorted(chosen))
    assert found.after != found.before
    assert found.tried == 4 * 8
    torch.testing.assert_close([found.loss_before, found.loss_after], [loss(first), lowest], rtol=1e-6, atol=0)


@pytest.mark.parametrize("asked", [1, 7])
def test_the_losses_are_those_on_transformers_own_attention(asked):
    compressor = make()
    context, text = tokens(12), tokens(7)
    found = improve(compressor, context, text, asked, progress=False)
    for chosen, ours in ((found.before, found.loss_before), (found.after, found.loss_after)):
        with torch.no_grad():
            hidden = read(compressor, [BOS, *context], [0, *chosen], text[:-1])
            logits = compressor.lm.head(hidden[-asked:])
        assert ours == pytest.approx(F.cross_entropy(logits, torch.tensor(text[-asked:])).item(), rel=1e-6)


def test_rounds_never_raise_the_loss_and_end_where_no_swap_helps():
    compressor = make()
    # A context in which the third round is the last that swaps.
    torch.manual_seed(0)
    context, text = tokens(14), tokens(8)
    rounds = [improve(compressor, context, text, 6, rounds=count, progress=False) for count in (1, 2, 30)]
    losses = [rounds[0].loss_before, *(found.loss_after for found in rounds)]
    assert losses[0] > losses[1] > losses[2] > losses[3]
    loss = lambda chosen: loss_of(compressor, context, chosen, text, 6)  # noqa: E731
    assert rounds[1].after == tuple(sorted(algorithm_1(loss, set(rounds[0].before), rounds=2)[0]))
    end = set(rounds[2].after)
    others = set(range(1, 15)) - end
    neighbours = [end - {nugget} | {other} for nugget in end - {14} for other in others]
    assert all(loss(one) > rounds[2].loss_after for one in neighbours)
    # All nuggets but the last by all other tokens in a round, and a last round without a swap.
    assert [found.tried for found in rounds] == [4 * 9, 2 * 4 * 9, 4 * 4 * 9]


def test_the_last_token_and_as_many_nuggets_stay():
    compressor = make()
    for length in (4, 9, 16):
        context = tokens(length)
        found = improve(compressor, context, tokens(6), 4, progress=False)
        assert found.before[-1] == found.after[-1] == length
        assert len(set(found.after)) == len(found.before) == -(-length // 3)
        assert found.after[0] >= 1


def test_one_nugget_and_nuggets_alone_have_nothing_to_swap():
    one = improve(make(), tokens(3), tokens(5), 4, progress=False)
    assert (one.before, one.after, one.tried, one.overlap, one.overlap_but_last) == ((3,), (3,), 0, 1.0, None)
    every = improve(make(ratio=1), tokens(6), tokens(5), 4, progress=False)
    assert every.before == every.after == (1, 2, 3, 4, 5, 6)
    assert (every.tried, every.overlap, every.overlap_but_last) == (0, 1.0, 1.0)
    for found in (one, every):
        assert found.loss_before == found.loss_after > 0


def test_bos_in_the_context_and_tokens_beyond_the_window():
    compressor = make()
    context, text = tokens(12), tokens(6)
    plain = improve(compressor, context, text, 4, progress=False)
    assert improve(compressor, [BOS, *context], text, 4, progress=False) == plain
    # Tokens beyond the window are read as they are, so they may as well be the text's.
    longer = improve(make(window=12), [*context, *text[:2]], text[2:], 4, progress=False)
    assert (longer.before, longer.after) == (plain.before, plain.after)
    assert longer.loss_after == pytest.approx(plain.loss_after, rel=1e-6)


def test_the_compressor_stays_in_its_mode_and_gets_no_gradient():
    compressor = make(lora=LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.5))
    context, text = tokens(12), tokens(6)
    plain = improve(compressor, context, text, 4, progress=False)
    compressor.train()
    assert improve(compressor, context, text, 4, progress=False) == plain
    assert compressor.training and compressor.model.training
    assert all(parameter.grad is None for parameter in compressor.parameters())


def test_any_rule_of_selection_is_where_the_search_starts():
    found = improve(make(selection="strided"), tokens(12), tokens(6), 4, progress=False)
    assert found.before == (3, 6, 9, 12)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"compressor": None}, TypeError, "compressor: expected a Dodo, got NoneType"),
        ({"context": [[2, 3], [4, 5]]}, ValueError, "context: expected one row, got 2"),
        ({"context": [BOS]}, ValueError, "context: expected at least 1 token beside the first token, got none"),
        ({"context": [[]]}, ValueError, "context: expected at least 1 token, got 0 in row 0"),
        ({"context": [70]}, ValueError, r"context: expected token ids in \[0, 50\), got 70"),
        ({"text": "words"}, TypeError, "text: expected token ids as a tensor or lists of integers, got str"),
        ({"text": [[2, 3], [4, 5]]}, ValueError, "text: expected one row, got 2"),
        ({"asked": 0}, ValueError, "asked: expected a whole number >= 1, got 0"),
        ({"asked": 5}, ValueError, "asked: expected at most the 4 tokens of the text, got 5"),
        ({"batch_size": 2.0}, ValueError, "batch_size: expected a whole number >= 1, got 2.0"),
        ({"rounds": True}, ValueError, "rounds: expected a whole number >= 1, got True"),
    ],
)
def test_bad_input_is_named(changes, error, message):
    given = {"compressor": make(), "context": [2, 3, 4, 5], "text": [6, 7, 8, 9], "asked": 2} | changes
    with pytest.raises(error, match=message):
        improve(**given, progress=False)


def test_a_loss_that_is_no_number_is_named():
    compressor = make()
    with torch.no_grad():
        compressor.lm.head.weight[0] = math.nan
    with pytest.raises(ValueError, match="compressor: expected one that gives the text a finite loss, got nan"):
        improve(compressor, tokens(6), tokens(4), 2, progress=False)


def test_a_study_is_the_search_in_each_text(capsys):
    compressor, recipe = make(), Recipe(context=9, read=3, asked=4)
    texts = [tokens(16), tokens(20)]
    found = study(compressor, texts, recipe, batch_size=5)
    assert "texts: 100%" in capsys.readouterr().err
    assert found == [improve(compressor, one[:9], one[9:16], 4, batch_size=5, progress=False) for one in texts]
    assert capsys.readouterr().err == ""
    with pytest.raises(ValueError, match="texts: expected at least 16 tokens, got 15 in text 1"):
        study(compressor, [tokens(16), tokens(15)], recipe)
    with pytest.raises(ValueError, match="texts: expected at least one, got none"):
        study(compressor, [], recipe)
    with pytest.raises(ValueError, match="read: expected a whole number >= 0, got -1"):
        Recipe(read=-1)


def test_passages_are_all_pieces_of_the_texts_once():
    texts = [list(range(23)), list(range(100, 109)), list(range(200, 210))]
    found = passages(texts, 10)
    assert sorted(found) == [list(range(10)), list(range(10, 20)), list(range(200, 210))]
    assert passages(texts, 10, 2) == found[:2]
    assert passages(texts, 30) == []


def test_figures_are_means_over_texts_and_perplexity_over_tokens():
    found = [
        SwapSearch((2, 5, 9, 12), (2, 6, 7, 12), math.log(8.0), math.log(4.0), 24),
        SwapSearch((4, 12), (4, 12), math.log(2.0), math.log(1.0), 10),
        SwapSearch((3,), (3,), math.log(4.0), math.log(2.0), 0),
    ]
    assert (found[0].overlap, found[0].overlap_but_last) == (0.5, 1 / 3)
    figures = greedy.summary(found)
    wanted = {"overlap": 2.5 / 3, "overlap_but_last": 2 / 3, "perplexity_before": 4, "perplexity_after": 2}
    assert figures == pytest.approx({**wanted, "texts": 3, "tried": 34})
    rows = STUDY.rows([Run("Dodo 3x", {}, found)], None)
    assert rows[1] == ["Dodo 3x", "83.3% (66.7%)", "4.00", "2.00", "50.0%", "3"]
    assert rows[2] == ["paper: Dodo 10x", "75.3%", "7.74", "7.13", "7.9%", "1000"]
    assert "overlap_but_last" not in greedy.summary(found[2:])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with its tokenizer, and a Dodo and a Gist around it."""
    root = tmp_path_factory.mktemp("greedy")
    small_llama().save_pretrained(root)
    byte_tokenizer().save_pretrained(root)
    unsettle(Dodo(small_llama(), ratio=4, layer=1, lora=2)).save_pretrained(root / "dodo")
    Gist(small_llama(), ratio=4, lora=2).save_pretrained(root / "gist")
    (root / "texts").mkdir()
    (root / "texts" / "a.txt").write_text("Some tokens stand for the others, and are asked in their place.")
    (root / "texts" / "b.txt").write_text("A text of its own.")
    (root / "texts" / "c.md").write_text("Not asked for.")
    return root


def command(folder, *words, compressor="dodo"):
    given = ["--model", folder, "--compressor", folder / compressor, *words]
    return cli.main(["study", "greedy", *map(str, given)])


def test_the_command_is_the_python_api(folder, tmp_path, capsys):
    sizes = ("--context", 12, "--read", 2, "--asked", 3, "--batch-size", 8)
    assert command(folder, "--texts", folder / "texts", *sizes, "--passages", 3, "--out", tmp_path) == 0
    shown = capsys.readouterr()
    assert "UNTRAINED" not in shown.err
    (line,) = load(tmp_path / "results.jsonl")
    assert line["recipe"] == {"context": 12, "read": 2, "asked": 3, "rounds": 1}
    assert line["run"]["settings"]["ratio"] == 4 and line["run"]["title"] == "Dodo 4x"
    texts = [list((folder / "texts" / name).read_bytes()) for name in ("a.txt", "b.txt")]
    tokenizer = byte_tokenizer()
    ids = [tokenizer(bytes(text).decode())["input_ids"] for text in texts]
    compressor = Compressor.from_pretrained(folder / "dodo", small_llama()).eval()
    found = study(compressor, passages(ids, 17, 3), Recipe(12, 2, 3), batch_size=8, progress=False)
    assert len(found) == 3
    wanted = [{"before": list(one.before), "after": list(one.after), "tried": 2 * 9} for one in found]
    assert [{name: one[name] for name in wanted[0]} for one in line["run"]["texts"]] == wanted
    (again,) = registry.read(tmp_path / "results.jsonl")
    summary = greedy.summary(again.run.texts)
    assert summary == pytest.approx(greedy.summary(found), rel=1e-5)
    assert "Dodo 4x: 3 passages, 12 tokens compressed, 2 read, 3 asked" in shown.out
    assert f"| Dodo 4x         | {summary['overlap']:.1%} (" in shown.out
    assert "| paper: Dodo 10x | 75.3% " in shown.out
    assert f"Written: {tmp_path / 'results.jsonl'}" in shown.out
    # Another Dodo has that title too.
    retrained = Dodo(small_llama(), ratio=4, layer=1, lora=2)
    retrained.save_pretrained(tmp_path / "dodo")
    words = ("--texts", folder / "texts", *sizes, "--passages", 3, "--out", tmp_path, "--resume")
    for other in (folder / "dodo", tmp_path / "dodo"):
        assert command(folder, *words, compressor=other) == 0
    lines = load(tmp_path / "results.jsonl")
    assert lines[0] == line and [one["run"]["title"] for one in lines[1:]] == ["Dodo 4x"]
    assert lines[1]["run"]["digest"] == digests.of_compressor(retrained)


@pytest.mark.parametrize(
    ("words", "compressor", "message"),
    [
        (["--texts", "{root}/texts"], "dodo", "--texts: expected one of at least 256 tokens, those of --context, "),
        (["--texts", "{root}/texts"], "gist", "--compressor: expected a Dodo, got a Gist"),
        (["--texts", "{root}/texts"], "none", "--compressor: expected a folder with a trained compressor"),
        (["--texts", "{root}/none.txt"], "dodo", "none.txt: no such file or folder"),
        (["--texts", "{root}/texts", "--glob", "*.rst"], "dodo", "texts: no file matches '*.rst'"),
        (["--texts", "{root}/texts", "--device", "tpu"], "dodo", "--device: expected cpu or cuda, got 'tpu'"),
    ],
)
def test_mistakes_end_in_one_line(folder, tmp_path, capsys, words, compressor, message):
    words = [word.replace("{root}", str(folder)) for word in words]
    assert command(folder, *words, "--out", tmp_path / "out", compressor=compressor) == 2
    shown = capsys.readouterr()
    assert not shown.out and message in shown.err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_the_defaults_are_the_papers():
    assert greedy.Recipe() == Recipe(context=128, read=64, asked=64, rounds=1)
    parsed = cli.parser().parse_args(["study", "greedy", "--model", "m", "--compressor", "c", "--texts", "t"])
    assert (parsed.context, parsed.read, parsed.asked, parsed.rounds) == (128, 64, 64, 1)
