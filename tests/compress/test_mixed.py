"""Dodo as a language model of mixed resolution: one pass against the dense form, and reading on token by token."""

import math
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig
from torch.nn import functional as F

from gistkit.compress import AvgPool, Dodo, MixedResolution
from gistkit.nn.nuggets import rule_scores
from tests.helpers.dodo_oracle import mixed, mixed_mask, scores_of
from tests.helpers.in_place_oracle import unsettle
from tests.helpers.models import TOLERANCE, same_gradients, tiny, tiny_llama, tokens
from tests.helpers.streams import read_on
from tests.helpers.tiers import slow

BOS = 1


def make(model=None, tau=6, segment=3, **options):
    model = tiny_llama() if model is None else model
    options = {"ratio": 3, "layer": 1, "bos_token": BOS, "lora": 2, **options}
    compressor = unsettle(Dodo(model, **options).double())
    reader = MixedResolution(compressor, tau=tau, segment=segment)
    if options.get("selection", "learned") in ("learned", "delimiters"):
        reader.calibrate([torch.randint(2, 50, (4, 40))])
    return reader


def behind_bos(ids):
    return [BOS, *ids.tolist()]


def chosen_of(reader, ids):
    """Scores and nuggets of `ids`, which begin with BOS, written out."""
    nobody = torch.zeros(len(ids), dtype=torch.bool)
    scores = scores_of(reader.compressor, ids, mixed_mask(nobody, reader.tau, reader.segment))
    chosen = scores.detach() > reader.compressor.threshold
    chosen[0] = False
    return scores, chosen


@pytest.mark.parametrize(
    ("family", "tau", "segment", "options"),
    [
        ("llama", 6, 3, {}),
        ("llama", 4, 1, {"lora": None}),
        ("llama", 5, 5, {"separate": False}),
        ("llama", 64, 32, {}),
        ("llama", 1, 1, {"lora": None, "separate": False}),
        # Norms, soft caps and sliding windows.
        ("gemma3", 6, 2, {}),
        *slow(*((family, 6, 2, {}) for family in ("qwen2", "qwen3", "gemma2", "mistral"))),
    ],
)
def test_one_pass_equals_the_dense_form(family, tau, segment, options):
    reader = make(tiny(family), tau=tau, segment=segment, **options)
    ids = tokens(2, 19)
    ours = reader.hidden(reader.rows(ids))
    for row in range(2):
        whole = behind_bos(ids[row])
        _, chosen = chosen_of(reader, whole)
        assert chosen.any()
        torch.testing.assert_close(ours[row], mixed(reader.compressor, whole, chosen, tau, segment), **TOLERANCE)


# Grouped heads; norms of queries and keys; soft caps, and a window of 5 that cuts between recent tokens and nuggets.
@pytest.mark.parametrize(
    ("family", "tau", "segment"),
    [("llama", 6, 3), ("gemma2", 4, 1), *slow(("qwen3", 2, 2))],
)
def test_all_gradients_are_those_of_the_dense_form(family, tau, segment):
    reader = make(tiny(family), tau=tau, segment=segment)
    whole = behind_bos(tokens(23))
    scores, chosen = chosen_of(reader, whole)
    bias = (scores - scores.detach()) * chosen

    def loss(hidden):
        return F.cross_entropy(reader.compressor.lm.head(hidden[:-1]), torch.tensor(whole[1:]))

    gradients = same_gradients(
        reader.compressor,
        lambda: loss(reader.hidden(reader.rows([whole]))[0]),
        lambda: loss(mixed(reader.compressor, whole, chosen, tau, segment, bias)),
        rtol=1e-7,
        atol=1e-10,
    )
    assert gradients["scorer.up.weight"].abs().max() > 1e-6


def test_scores_get_no_gradient_where_all_tokens_are_recent():
    reader = make(tau=24, segment=8)
    ids = tokens(2, 16)  # Position 16 sees all from 0 on.
    scores = reader.scores(reader.rows(ids)).detach().requires_grad_()
    reader.scores = lambda rows: scores
    nobody = torch.zeros(2, 17, dtype=torch.bool)
    everybody = ~nobody
    everybody[:, 0] = False
    with torch.no_grad():
        # A nugget's own parameters aside, selection changes nothing.
        options = reader.compressor.options
        reader.compressor.options = replace(options, separate=False)
        states = [reader.hidden(reader.rows(ids), chosen) for chosen in (nobody, everybody)]
        reader.compressor.options = options
    torch.testing.assert_close(*states, **TOLERANCE)
    reader(ids)["loss"].backward()
    assert reader.nuggets(reader.rows(ids)).any()
    assert scores.grad.abs().max() == 0


def test_a_rows_scores_get_the_gradient_that_they_get_alone():
    reader = make(tau=4, segment=2)
    rows = [tokens(n).tolist() for n in (21, 3, 12)]
    scores = reader.scores(reader.rows(rows)).detach()

    def gradients(rows, scores):
        scores = scores.clone().requires_grad_()
        reader.scores = lambda rows: scores
        read = reader.rows(rows)
        hidden = reader.hidden(read)
        hidden[read.valid].sin().sum().backward()
        return scores.grad

    together = gradients(rows, scores)
    assert together[0].abs().max() > 1e-6
    for row, ids in enumerate(rows):
        count = len(ids) + 1
        alone = gradients([ids], scores[row : row + 1, :count])[0]
        torch.testing.assert_close(together[row, :count], alone, **TOLERANCE)
        assert not together[row, count:].any()


def test_the_loss_is_that_of_every_token_after_bos():
    reader = make()
    rows = [tokens(14), tokens(9)]
    loss = reader([row.tolist() for row in rows])["loss"]
    nats = []
    for row in rows:
        hidden = reader.hidden(reader.rows(row[None]))[0]
        nats.append(F.cross_entropy(reader.compressor.logits(hidden[:-1]), row, reduction="none"))
    torch.testing.assert_close(loss, torch.cat(nats).mean(), rtol=1e-5, atol=1e-6)


def test_as_many_nuggets_as_the_ratio_says_on_the_text_it_was_calibrated_on():
    reader = make()
    # Padding counts for nothing, and is no nugget.
    texts = [tokens(4, 40), [tokens(75).tolist(), tokens(3).tolist(), tokens(42).tolist()]]
    reader.calibrate(texts)
    chosen = [reader.nuggets(reader.rows(text)) for text in texts]
    assert sum(int(row.sum()) for row in chosen) == round(280 / 3)
    assert not chosen[1][1, 4:].any()
    assert reader.calibrate(texts, ratio=1) == -math.inf
    assert reader.nuggets(reader.rows(texts[0])).sum() == 160


def test_states_are_the_tokens_seen():
    reader = make()
    whole = behind_bos(tokens(19))
    _, chosen = chosen_of(reader, whole)
    assert reader.states(reader.rows([whole]))[0].tolist() == mixed_mask(chosen, 6, 3).sum(1).tolist()


def test_without_nuggets_it_is_a_sliding_window_beside_bos():
    ids, nobody = tokens(1, 15), torch.zeros(16, dtype=torch.bool)
    none, beyond_all_scores = make(selection="none", tau=4, segment=1), make(tau=4, segment=1)
    beyond_all_scores.compressor.threshold = math.inf
    for reader in (none, beyond_all_scores):
        assert reader.states(reader.rows(ids))[0].tolist() == [1, 2, 3, 4, *[5] * 12]
        wanted = mixed(reader.compressor, behind_bos(ids[0]), nobody, 4, 1)
        torch.testing.assert_close(reader.hidden(reader.rows(ids))[0], wanted, **TOLERANCE)


@pytest.mark.parametrize(
    ("family", "tau", "segment"),
    [("llama", 6, 3), ("gemma3", 3, 1), *slow(("llama", 64, 32), ("qwen3", 4, 4), ("gemma2", 6, 3))],
)
def test_reading_token_by_token_equals_one_pass(family, tau, segment):
    reader = make(tiny(family), tau=tau, segment=segment)
    for stream, seen in read_on(reader, tokens(3, 31), (12, 5, 1)):
        # The cache holds what the token saw, and nothing else.
        assert list(stream.states) == seen


@pytest.mark.parametrize(
    "options",
    [{"lora": None}, {"selection": "strided"}, *slow(({"separate": False},), ({"selection": "none"},))],
)
def test_reading_on_with_other_parameters_and_rules(options):
    reader = make(**options)
    ids = tokens(2, 26)
    wanted = reader.hidden(reader.rows(ids))
    stream = reader.start(ids[:, :7])
    for at in range(7, 26):
        # It goes on as it began.
        with reader.compressor.selecting("random", ratio=2):
            torch.testing.assert_close(stream.step(ids[:, at]), wanted[:, at + 1], **TOLERANCE)
    with pytest.raises(ValueError, match="rule: expected one that learns nothing, got 'learned'"):
        rule_scores("learned", ids, ids, 3, ())


def test_reading_on_in_training_mode_with_gradient_checkpointing():
    reader = make()
    ids = tokens(2, 20)
    wanted = reader.hidden(reader.rows(ids))
    reader.compressor.gradient_checkpointing_enable()
    stream = reader.start(ids[:, :7])
    reader.compressor.train()
    for at in range(7, 20):
        torch.testing.assert_close(stream.step(ids[:, at]), wanted[:, at + 1], **TOLERANCE)
    assert any(getattr(module, "gradient_checkpointing", False) for module in reader.compressor.model.modules())


def test_position_ids_beyond_the_models_are_told_of():
    model = tiny("gpt2", max_position_embeddings=16)
    lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    reader = make(model, lora=lora, separate=False, selection="strided")
    with pytest.raises(ValueError, match=r"input_ids: expected position IDs below 16, .* got 20"):
        reader(tokens(1, 20))
    stream = reader.start(tokens(1, 15))
    with pytest.raises(ValueError, match=r"tokens: expected position IDs below 16, .* got 16"):
        stream.step(tokens(1))
    with pytest.warns(UserWarning, match="position IDs reach 20, beyond the model's max_position_embeddings of 16"):
        make(tiny_llama(max_position_embeddings=16), selection="strided")(tokens(1, 20))


def test_bad_input_is_named():
    compressor, reader = make().compressor, make()
    rows, stream = reader.rows(tokens(2, 9)), reader.start(tokens(2, 5))
    without = MixedResolution(make().compressor)
    without.compressor.threshold = None
    for match, call in [
        ("compressor: expected a Dodo, got AvgPool",
         lambda: MixedResolution(AvgPool(tiny_llama(), lora=None, bos_token=BOS))),
        ("expected tau >= 1, got 0", lambda: MixedResolution(compressor, tau=0)),
        ("expected tau to be a multiple of segment, 32, got 100", lambda: MixedResolution(compressor, tau=100)),
        ("texts: expected at least one batch, got none", lambda: reader.calibrate([])),
        ("threshold: expected one for this selection", lambda: without(tokens(1, 9))),
        (r"tokens: expected one for each of 2 rows, got shape \(3,\)", lambda: stream.step(tokens(3))),
        ("tokens: expected one for each of 2 rows, got list", lambda: stream.step([3, 4])),
        (r"tokens: expected token ids in \[0, 50\), got 50", lambda: stream.step(torch.tensor([3, 50]))),
        ("tokens: expected integer token ids, got dtype torch.float32", lambda: stream.step(torch.tensor([3.0, 4.0]))),
        (r"is_nugget: expected bool \[2, 10\], got shape \(2, 8\)", lambda: reader.hidden(rows, torch.ones(2, 8) > 1)),
        (r"is_nugget: .*, got shape \(2, 12\)", lambda: reader.hidden(rows, torch.ones(2, 12) > 1)),
    ]:  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=match):
            call()
