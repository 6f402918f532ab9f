"""Dodo as a compressor of contexts, against the same written out on transformers' own attention."""

import pytest
import torch
from peft import LoraConfig
from torch.nn import functional as F

from gistkit.compress import Dodo, Memory
from gistkit.nn import Nuggets
from tests.helpers.dodo_oracle import best, read, scores_of
from tests.helpers.in_place_oracle import unsettle
from tests.helpers.models import TOLERANCE, same_gradients, tiny, tiny_llama, tokens

BOS = 1


def make(model=None, **options):
    model = tiny_llama() if model is None else model
    options = {"ratio": 3, "layer": 1, "bos_token": BOS, "lora": 2, **options}
    return unsettle(Dodo(model, **options).double())


@pytest.mark.parametrize(("scorer_norm", "layer"), [(True, 1), (False, 1), (True, 2), (False, 2)])
def test_the_scorer_reads_the_layers_states_as_they_are_or_behind_the_norm(scorer_norm, layer):
    model = tiny_llama()
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.2, 3)
    compressor = make(model, layer=layer, **({"scorer_norm": True} if scorer_norm else {}))
    rows = compressor.with_bos(compressor.contexts(tokens(1, 13)))
    wanted = scores_of(compressor, rows.ids[0].tolist())
    torch.testing.assert_close(compressor.whole_scores(rows)[0], wanted, **TOLERANCE)
    assert model.model.norm._forward_hooks == model.model._forward_hooks == {}


def test_a_model_with_a_table_of_positions():
    compressor = make(
        tiny("gpt2"), lora=LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True), separate=False
    )
    ids = tokens(1, 12)
    memory = compressor.encode(ids)
    assert memory.lengths == (5,)
    assert compressor.decode(memory, "lm", tokens(1, 4)).isfinite().all()


def test_the_scores_change_no_value_to_the_bit():
    compressor = make().float()
    ids, text = tokens(2, 13), tokens(2, 6)
    with torch.no_grad():
        plain = compressor.decode(compressor.encode(ids), "lm", text)
    memory, _, _ = compressor.compress_rows(compressor.contexts(ids))
    assert memory.straight_through is not None
    assert not memory.straight_through.any()
    assert torch.equal(compressor.decode(memory, "lm", text), plain)


@pytest.mark.parametrize(("family", "task"), [("llama", "ae"), ("gemma2", "lm")])
def test_a_score_has_the_gradient_of_its_logits_over_queries_heads_and_layers(family, task):
    compressor = make(tiny(family))
    ids = tokens(1, 13)
    memory, _, _ = compressor.compress_rows(compressor.contexts(ids))
    start = compressor.task_embeddings["ae"].double()[None] if task == "ae" else None
    whole = [BOS, *ids[0].tolist()]
    scores = scores_of(compressor, whole)
    kept = best(scores, 3)
    # Dense logits with a bias that has a value, so that autograd itself sums over queries, heads and layers.
    bias = (scores[kept] - scores[kept].detach()) * torch.tensor([0.0] + [1.0] * (len(kept) - 1))
    # An [AE] token that is not read may have a gradient of zeros.
    compressor.task_embeddings.requires_grad_(task == "ae")

    def loss(hidden):
        return F.cross_entropy(compressor.lm.head(hidden), ids[0])

    gradients = same_gradients(
        compressor,
        lambda: loss(compressor.decode(memory, task, ids[:, :-1])[0]),
        lambda: loss(read(compressor, whole, kept, ids[0, :-1].tolist(), bias, start)),
        rtol=1e-7,
        atol=1e-10,
    )
    assert gradients["scorer.up.weight"].abs().max() > 1e-6
    roles = {role for name in gradients if "lora" in name for role in ("memory", "text") if f"_{role}." in name}
    assert roles == {"memory", "text"}


@pytest.mark.parametrize("lengths", [(9,), (13, 9, 1)])
def test_every_nuggets_score_has_a_gradient_the_last_ones_too_and_no_other(lengths):
    compressor = make()
    rows = compressor.contexts([tokens(n).tolist() for n in lengths])
    input_rows = compressor.with_bos(rows)
    scores = torch.randn(input_rows.ids.shape, dtype=torch.float64, requires_grad=True)
    nuggets = compressor.nuggets(input_rows, scores)
    memory, _ = compressor.encode_nuggets(rows, nuggets, scores)
    compressor.decode(memory, "lm", tokens(len(lengths), 6)).sin().sum().backward()
    for row, length in enumerate(lengths):
        chosen = set(nuggets.index[row, : nuggets.counts[row]].tolist())
        assert length in chosen
        assert set(scores.grad[row].nonzero().flatten().tolist()) == chosen


def test_rows_taken_stacked_and_repeated_pass_the_gradient_of_the_scores_on():
    compressor = make()
    contexts, text = [tokens(13).tolist(), tokens(5).tolist()], tokens(2, 6)
    weight = torch.randn(48, dtype=torch.float64)
    memory, _, _ = compressor.compress_rows(compressor.contexts(contexts))
    # Another form of the same memory, its texts, and which of the two rows reads each.
    forms = [
        (memory, text, (0, 1)),
        (Memory.stack([memory[1], memory[0]]), text.flip(0), (1, 0)),
        (memory[1].repeat(3), text[[1, 1, 1]], (1, 1, 1)),
    ]
    of_row = []
    for row in (0, 1):
        loss = compressor.decode(memory, "lm", text)[row] @ weight
        of_row.append(torch.autograd.grad(loss.sum(), compressor.scorer.up.weight, retain_graph=True)[0])
        assert of_row[row].abs().max() > 1e-6
    for form, texts, rows in forms:
        loss = compressor.decode(form, "lm", texts) @ weight
        (found,) = torch.autograd.grad(loss.sum(), compressor.scorer.up.weight, retain_graph=True)
        torch.testing.assert_close(found, sum(of_row[row] for row in rows), **TOLERANCE)


def test_a_frozen_scorer_gets_no_gradient_and_no_bias():
    compressor = make(train_scorer=False)
    memory, _, _ = compressor.compress_rows(compressor.contexts(tokens(1, 9)))
    assert memory.straight_through is None
    assert not any(name.startswith("scorer") for name, _ in compressor.trainable())
    assert any(name.startswith("scorer") for name, _ in make().trainable())


def test_strided_random_and_delimiter_nuggets():
    ids = tokens(1, 20)
    places = make(selection="strided").encode(ids).positions[0].tolist()
    assert places == [0, 3, 6, 9, 12, 15, 18, 20]
    # As many, others, the same ones again.
    once, again = (make(selection="random").encode(ids).positions[0].tolist() for _ in range(2))
    assert once == again
    assert len(once) == len(places)
    assert once != places
    delimiters = sorted(set(ids[0, [2, 5, 11]].tolist()))
    among = make(selection="delimiters", delimiters=delimiters).encode(ids).positions[0].tolist()
    wanted = {place for place, token in enumerate(ids[0].tolist(), 1) if token in delimiters}
    assert wanted <= set(among) if len(wanted) < 7 else set(among[1:-1]) <= wanted
    assert make(selection="none").encode([ids[0].tolist(), [3, 4]]).positions.tolist() == [[0, 20], [0, 2]]


def test_random_nuggets_are_spread_over_the_text():
    ids = torch.randint(2, 50, (4, 400))
    positions = make(selection="random", ratio=10).encode(ids).positions
    assert positions.shape == (4, 41)
    assert (positions[:, 1:-1].float().mean(1) - 200).abs().max() < 80
    assert len({tuple(row.tolist()) for row in positions}) == 4
    # Of one token repeated too.
    assert make(selection="random", ratio=10).encode(torch.full((1, 400), 7)).positions[0, 1:-1].max() > 200


@pytest.mark.slow
def test_another_selection_for_a_while():
    compressor, ids = make(), tokens(2, 12)
    before = compressor.encode(ids).positions
    with compressor.selecting("strided", 2):
        assert torch.equal(compressor.encode(ids).positions, make(selection="strided", ratio=2).encode(ids).positions)
        with compressor.selecting(ratio=4.0):
            inner = compressor.encode(ids)
            assert torch.equal(inner.positions, make(selection="strided", ratio=4).encode(ids).positions)
        assert (compressor.rule, compressor.nugget_ratio) == ("strided", 2)
    # Random ones are drawn anew: each token but the last, which always stays, in 1 of 4 draws and not the same ones.
    with compressor.selecting("random", 4):
        drawn = [compressor.encode(ids).positions for _ in range(300)]
    counts = torch.stack(drawn).flatten().bincount(minlength=13)
    assert len(set(map(str, drawn))) > 100 and counts[12] == 600 and (counts[1:12] - 600 * 2 / 11).abs().max() < 45
    # A memory of another ratio is read like any other.
    assert compressor.generate(inner, prompt_ids=ids[:, :2], task="qa", max_new_tokens=2).shape == (2, 2)
    with pytest.raises(RuntimeError), compressor.selecting("strided", scorer_rests=True):
        assert not compressor.scores(compressor.with_bos(compressor.contexts(ids)), None).requires_grad
        raise RuntimeError
    assert torch.equal(compressor.encode(ids).positions, before)
    with compressor.selecting(scorer_rests=True):
        assert torch.equal(compressor.encode(ids).positions, before)
        assert compressor.compress_rows(compressor.contexts(ids))[0].straight_through is None
    assert compressor.compress_rows(compressor.contexts(ids))[0].straight_through.requires_grad
    for found, arguments, message in [
        (compressor, {"rule": "best"}, "rule: expected one of learned, .*, got 'best'"),
        (compressor, {"ratio": 0}, "ratio: expected a whole number >= 1, got 0"),
        (compressor, {"rule": "delimiters"}, "rule: expected one without delimiters, as the compressor has none, got"),
        (make(selection="strided"), {"rule": "learned"}, "rule: expected one without a scorer, as selection is 'stri"),
    ]:
        with pytest.raises(ValueError, match=message), found.selecting(**arguments):
            pass


@pytest.mark.parametrize("bos", [(), (BOS,)])
def test_nuggets_of_joined_documents_stand_for_their_own_tokens(bos):
    compressor = make()
    documents = [[*bos, *tokens(count).tolist()] for count in (10, 7)]
    memories = [compressor.encode([ids]) for ids in documents]
    joined = compressor.join(memories)
    assert joined.starts == (18,) and joined.positions[0, 5:].tolist() == (memories[1].positions[0, 1:] + 10).tolist()
    first, second = (compressor.context_spans(memory)[0] for memory in memories)
    expected = torch.cat([first, second[1:] + len(documents[0])])
    assert torch.equal(compressor.context_spans(joined)[0], expected)


def test_nuggets_of_ones_own_choice():
    compressor = make()
    ids, text = tokens(1, 9), tokens(1, 4)
    rows = compressor.contexts(ids)
    chosen = Nuggets(torch.tensor([[2, 7, 9]]), (3,))
    memory, _ = compressor.encode_nuggets(rows, chosen)
    ours = compressor.decode(memory, "lm", text)[0]
    torch.testing.assert_close(
        ours, read(compressor, [BOS, *ids[0].tolist()], [0, 2, 7, 9], text[0].tolist()), **TOLERANCE
    )


def test_nan_scores_are_named():
    compressor = make()
    with torch.no_grad():
        compressor.scorer.down.bias.fill_(float("nan"))
    with pytest.raises(ValueError, match="scores: expected numbers, got NaN at token 0 of row 0"):
        compressor.encode(tokens(1, 9))
