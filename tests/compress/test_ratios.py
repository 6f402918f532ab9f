"""One set of weights at any ratio: against the method written out at that ratio, and what has one ratio only."""

import pytest
import torch

from gistkit.compress import ICAE, AvgPool, Compressor, Dodo, FiveHundredX, Gist, GistPool, Memory, NoContext, Select
from tests.helpers import dodo_oracle
from tests.helpers.in_place_oracle import states, unsettle
from tests.helpers.models import tiny_llama

BOS = 1
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
METHODS = {
    "gist": (Gist, {}),
    "separate gist": (Gist, {"offset": True, "separate": True, "separate_positions": True}),
    "avgpool": (AvgPool, {}),
    "gistpool": (GistPool, {"windows": 2}),
}


def made(name="gist", **options):
    method, own = METHODS[name]
    return unsettle(method(tiny_llama(), ratio=3, bos_token=BOS, lora=2, **own | options).double())


def tokens(*shape):
    return torch.randint(2, 50, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", METHODS)
def test_a_memory_at_another_ratio_is_the_method_written_out_at_it(name):
    compressor, ids, text = made(name), tokens(1, 13), tokens(1, 6)
    for ratio in (5, 2):
        memory = compressor.encode(ids, ratio=ratio)
        expected = states(compressor.at(ratio), ids[0].tolist(), text[0].tolist())
        torch.testing.assert_close(compressor.decode(memory, "lm", text)[0], expected, **TOLERANCE)
        spans = compressor.stands_for(memory)[0, 1:]
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
    select = Select(tiny_llama(), by="even", bos_token=BOS)
    assert select.encode(tokens(1, 12), ratio=2).lengths == (6,) and select.encode(tokens(1, 12)).lengths == (3,)


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
        (Select(model, budget=4, by="even", bos_token=BOS), "ratio: expected none beside the budget 4"),
    ]:
        with pytest.raises(ValueError, match=match):
            compressor.encode(ids, ratio=4)
        assert isinstance(compressor, Select) or compressor.at(compressor.ratio) is compressor
    gist = made(gists=4)
    for arguments, match in [
        ({"ratio": 0}, "ratio: expected a whole number >= 1"),
        ({"budget": 0}, "budget: expected a whole number >= 1"),
        ({"ratio": 2, "budget": 4}, "budget: expected none beside ratio 2"),
        ({"ratio": 2}, "expected contexts of at most 4 gists"),
    ]:
        with pytest.raises(ValueError, match=match):
            gist.encode(ids, **arguments)
    with pytest.raises(ValueError, match="losses: expected no 'compression' beside train_ratios"):
        made(train_ratios=(2, 4), losses=("compression", "lm"))
    with pytest.raises(ValueError, match="train_ratios: expected a whole number"):
        made(train_ratios=(2, 0))
