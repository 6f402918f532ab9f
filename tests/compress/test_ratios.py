"""One set of weights at any ratio: against the method written out at that ratio, and what has one ratio only."""

import pytest
import torch

from gistkit.compress import (
    ICAE,
    SAC,
    AvgPool,
    Compressive,
    Compressor,
    Dodo,
    FiveHundredX,
    Gist,
    GistPool,
    Memory,
    MixedResolution,
    NoContext,
    Select,
)  # fmt: skip
from tests.helpers import dodo_oracle
from tests.helpers.in_place_oracle import states, unsettle
from tests.helpers.models import TOLERANCE, tiny_llama, tokens

BOS = 1
METHODS = {
    "gist": (Gist, {}),
    "separate gist": (Gist, {"offset": True, "separate": True, "separate_positions": True}),
    "avgpool": (AvgPool, {}),
    "gistpool": (GistPool, {"windows": 2}),
}


def made(name="gist", **options):
    method, own = METHODS[name]
    return unsettle(method(tiny_llama(), ratio=3, bos_token=BOS, lora=2, **own | options).double())


@pytest.mark.parametrize("name", METHODS)
def test_a_memory_at_another_ratio_is_the_method_written_out_at_it(name):
    compressor, ids, text = made(name), tokens(1, 13), tokens(1, 6)
    for ratio in (5, 2):
        memory = compressor.encode(ids, ratio=ratio)
        expected = states(compressor.at(ratio), ids[0].tolist(), text[0].tolist())
        torch.testing.assert_close(compressor.decode(memory, "lm", text)[0], expected, **TOLERANCE)
        spans = compressor.context_spans(memory)[0, 1:]
        assert spans.tolist() == [[start, min(start + ratio, 13)] for start in range(0, 13, ratio)]
        alone = compressor.at(ratio).generate(memory, text, task="qa", max_new_tokens=3)
        assert torch.equal(compressor.generate(memory, text, task="qa", max_new_tokens=3), alone)
    own = compressor.encode(ids)
    assert own.source.chunk == compressor.chunk == 3 and compressor.at(3) is compressor


def test_dodo_at_another_ratio_is_written_out_too():
    compressor = unsettle(Dodo(tiny_llama(), ratio=3, layer=1, bos_token=BOS, lora=2).double())
    ids, text = [BOS, *tokens(13).tolist()], tokens(1, 4)
    memory = compressor.encode([ids], ratio=6)
    kept = dodo_oracle.best(dodo_oracle.scores_of(compressor, ids), 6)
    assert memory.positions[0].tolist() == kept and len(kept) == 4
    expected = dodo_oracle.read(compressor, ids, kept, text[0].tolist())
    torch.testing.assert_close(compressor.decode(memory, "lm", text)[0], expected, **TOLERANCE)


def test_a_budget_is_the_least_ratio_that_keeps_to_it():
    compressor, rows = made("avgpool"), [tokens(13).tolist(), tokens(7).tolist()]
    for budget, ratio, lengths in [(13, 1, (14, 8)), (12, 2, (8, 5)), (4, 4, (5, 3)), (1, 13, (2, 2))]:
        memory = compressor.encode(rows, budget=budget)
        assert (memory.source.chunk, memory.lengths) == (ratio, lengths)
    # A BOS of the context's own is not one of its memory tokens.
    assert compressor.encode([[BOS, *rows[0]]], budget=13).source.chunk == 1
    select = Select(tiny_llama(), by="even", bos_token=BOS)
    assert select.encode(tokens(1, 12), ratio=2).lengths == (6,) and select.encode(tokens(1, 12)).lengths == (3,)
    # At 8x it would keep 3.
    assert select.encode(tokens(1, 30), budget=4).lengths == (4,)


def test_a_method_of_one_ratio_keeps_to_a_budget_or_refuses_it():
    rows = [tokens(13).tolist(), tokens(7).tolist()]
    for compressor, least in [
        (FiveHundredX(tiny_llama(), chunk=6, ratio=3, lora=2), 6),
        (ICAE(tiny_llama(), chunk=6, ratio=3, lora=2, window=12), 4),
        (SAC(tiny_llama(), chunk=6, ratio=3, lora=2), 5),
        (Select(tiny_llama(), budget=4, by="even", bos_token=BOS), 4),
    ]:
        assert compressor.encode(rows, budget=least).lengths[0] == least
        with pytest.raises(ValueError, match=f"budget: expected at least {least}, the memory tokens of .*, got 3"):
            compressor.encode(rows, budget=3)
    assert NoContext(tiny_llama(), bos_token=BOS, lora=2).encode(rows, budget=1).lengths == (1, 1)


def test_parts_keep_to_a_budget_together():
    select = Select(tiny_llama(), by="even", part=4, bos_token=BOS).eval()
    for budget in (10, 11, 13, 20, 39):
        assert 10 <= select.encode(tokens(1, 40), budget=budget).lengths[0] <= budget
    # 14 parts of unequal lengths.
    assert select.encode(tokens(1, 53), budget=14).lengths == (14,)
    with pytest.raises(ValueError, match=r"budget: expected at least 10, .*, got 9"):
        select.encode(tokens(1, 40), budget=9)


def test_a_window_names_the_ratios_that_it_is_too_small_for():
    compressor, ids = made("separate gist", window=4), tokens(1, 12)
    memory = made("separate gist").encode(ids, ratio=8)
    # Reading cuts nothing.
    assert compressor.context_spans(memory)[0].tolist() == [[0, 0], [0, 8], [8, 12]]
    assert compressor.decode(memory, "lm", ids).isfinite().all()
    for action, match in [
        (lambda: compressor.encode(ids, ratio=8), "ratio: expected at most the window, 4 tokens, got 8"),
        (lambda: made(window=4, train_ratios=(2, 8)), "window: expected at least the largest of train_ratios, 8 tok"),
        (lambda: made(train_ratios=(2, 8)).set_window(4), "window: expected at least the largest of train_ratios"),
        (lambda: Select(tiny_llama(), budget=4, train_ratios=(2,)), "train_ratios: expected none with the budget 4"),
    ]:
        with pytest.raises(ValueError, match=match):
            action()


def test_language_models_do_not_train_at_several_ratios():
    dodo = Dodo(tiny_llama(), ratio=3, layer=1, bos_token=BOS, lora=2, selection="strided", train_ratios=(2, 4))
    for language_model in (MixedResolution(dodo, tau=4, segment=2), Compressive(made("avgpool", train_ratios=(2,)))):
        assert language_model.compressor.eval() and language_model(tokens(1, 12))["loss"].isfinite()
        language_model.compressor.train()
        with pytest.raises(ValueError, match="train_ratios: expected none to train a language model"):
            language_model(tokens(1, 12))


def test_dodo_at_another_ratio_selects_at_it_and_has_no_threshold():
    compressor, ids = Dodo(tiny_llama(), ratio=3, layer=1, bos_token=BOS, lora=2, threshold=0.2), tokens(1, 24)
    with pytest.raises(ValueError, match="threshold: expected one"):
        _ = compressor.at(6).threshold
    assert compressor.at(3).threshold == 0.2
    with compressor.selecting(ratio=6):
        found = {ratio: compressor.encode(ids, ratio=ratio) for ratio in (2, 3, None)}
        other = compressor.at(3)
    assert {ratio: (m.source.chunk, m.lengths) for ratio, m in found.items()} == {
        2: (2, (13,)), 3: (3, (9,)), None: (6, (5,)),
    }  # fmt: skip
    assert other.encode(ids).lengths == (9,) and compressor.encode(ids).source.chunk == 3


def test_training_draws_a_ratio_a_step_and_learns_all_of_them():
    torch.manual_seed(0)
    compressor = Gist(tiny_llama(), ratio=2, train_ratios=[2, 4, 8], bos_token=BOS, lora=8, losses=("ae",)).double()
    optimizer = torch.optim.Adam([parameter for _, parameter in compressor.trainable()], 2e-2)
    ids, drawn = tokens(4, 8), set()
    at = lambda ratio: float(compressor.eval().at(ratio)(ids)["loss"].detach())  # noqa: E731
    before = [at(ratio) for ratio in (2, 4, 8)]
    compressor.train()
    encode = Gist.encode_rows

    def seen(self, rows):
        drawn.add(self.chunk)
        return encode(self, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gist, "encode_rows", seen)
        for _ in range(40):
            compressor(ids)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    assert drawn == {2, 4, 8} and compressor.trained_length == 8
    assert all(at(ratio) < first / 2 for ratio, first in zip((2, 4, 8), before, strict=True))


def test_files_know_the_ratios_and_read_each_other(tmp_path):
    compressor = made(train_ratios=(2, 4))
    memory = compressor.encode(tokens(1, 12), ratio=4)
    memory.save(tmp_path / "memory.gist")
    compressor.save_pretrained(tmp_path / "compressor")
    loaded = Compressor.from_pretrained(tmp_path / "compressor", tiny_llama())
    assert loaded.options.train_ratios == (2, 4) and loaded.chunk == 3
    text = tokens(1, 3)
    ours = loaded.decode(Memory.load(tmp_path / "memory.gist"), "lm", text)
    torch.testing.assert_close(ours, compressor.decode(memory, "lm", text), **TOLERANCE)


def test_a_compression_head_is_trained_and_saved_at_its_own_ratio(tmp_path):
    compressor, ids = made(losses=("compression", "lm")), tokens(1, 12)
    other = compressor.at(2)
    compressor.decode(other.encode(ids), "lm", ids)
    for action in (lambda: other(ids, continuation_ids=ids), lambda: other.save_pretrained(tmp_path / "other")):
        with pytest.raises(ValueError, match=r"ratio: expected 3 to train or save, that of the head .*, got 2"):
            action()
    assert not (tmp_path / "other").exists()
    other.set_losses(("lm",))
    assert other(ids, continuation_ids=ids)["loss"].isfinite()
    compressor.save_pretrained(tmp_path / "own")


def test_what_has_one_ratio_is_refused_by_name():
    ids, model = tokens(1, 12), tiny_llama()
    for compressor, match in [
        (FiveHundredX(model, chunk=6, ratio=3, lora=2), "ratio: expected none for x500"),
        (ICAE(model, chunk=6, ratio=3, lora=2), "ratio: expected none for icae"),
        (NoContext(model, bos_token=BOS, lora=2), "ratio: expected none for no_context"),
        (Select(model, budget=4, by="even", bos_token=BOS), "ratio: expected none with the compressor's budget 4"),
    ]:
        with pytest.raises(ValueError, match=match):
            compressor.encode(ids, ratio=4)
        assert isinstance(compressor, Select) or compressor.at(compressor.ratio) is compressor
    gist = made(gists=4)
    for arguments, match in [
        ({"ratio": 0}, "ratio: expected a whole number >= 1"),
        ({"budget": 0}, "budget: expected a whole number >= 1"),
        ({"ratio": 2, "budget": 4}, "budget: expected none with ratio 2"),
        ({"ratio": 2}, "expected contexts of at most 4 gists"),
    ]:
        with pytest.raises(ValueError, match=match):
            gist.encode(ids, **arguments)
    with pytest.raises(ValueError, match="losses: expected no 'compression' with train_ratios"):
        made(train_ratios=(2, 4), losses=("compression", "lm"))
    with pytest.raises(ValueError, match="train_ratios: expected a whole number"):
        made(train_ratios=(2, 0))
