"""Gists that start as means of their windows: least squares in each layer, the model left as it was."""

import pytest
import torch
from peft import LoraConfig

from gistkit import hf
from gistkit.compress import AvgPool, Gist, GistPool, start_as_means
from tests.helpers.models import tiny, tiny_llama
from tests.helpers.tiers import tiers

RATIO = 3
ONE_WINDOW = {"ratio": RATIO, "windows": 1, "bos_token": 1}


def contexts(rows, generator, longest=31):
    lengths = torch.randint(RATIO, longest, (rows,), generator=generator).tolist()
    return [torch.randint(2, 50, (length,), generator=generator).tolist() for length in lengths]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def values(compressor, ids):
    """Values of the compressed tokens of whole contexts, by layer: positions, which AvgPool has others of, aside."""
    return [value[:, :, 1:] for _, value in compressor.encode(ids).layers]


@torch.no_grad()
def far(compressor, ids):
    """How far values are from those that AvgPool makes of the same model, in their variance, by layer."""
    pooled = values(AvgPool(tiny_llama().double(), ratio=RATIO, bos_token=1, lora=None), ids)
    pairs = zip(values(compressor, ids), pooled, strict=True)
    return [float((a - b).square().sum() / (b - b.mean((0, 2), keepdim=True)).square().sum()) for a, b in pairs]


@pytest.mark.parametrize("lora", tiers([4, None], [4]))
def test_memories_come_near_those_of_means_on_contexts_not_fitted(lora):
    compressor = GistPool(tiny_llama(), full_copy=True, lora=lora, **ONE_WINDOW).double()
    ids = torch.randint(2, 50, (8, 30), generator=generator(1))
    before, kept = far(compressor, ids), hf.fingerprint(compressor.model)
    errors = start_as_means(compressor, contexts(200, generator()))
    after = far(compressor, ids)
    assert all(a < 0.5 * b for a, b in zip(after, before, strict=True)), (before, after)
    assert len(errors) == len(after) and all(0 < error < 0.5 for error in errors)
    assert hf.fingerprint(compressor.model) == kept
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in compressor.modules())


def test_no_other_weights_of_the_last_maps_are_nearer():
    model, ridge = tiny_llama(), 1e-6
    compressor = GistPool(model, full_copy=True, **ONE_WINDOW).double()
    ids = contexts(40, generator(2))
    start_as_means(compressor, ids, ridge=ridge)
    seen = {}
    maps, layer = compressor.copies.maps, model.model.layers[0]
    handles = [
        maps[f"layers/0/{name}"].register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0]}))
        for name in ("self_attn/o_proj", "mlp/down_proj")
    ]
    handles.append(layer.register_forward_pre_hook(lambda _, args: seen.update(before=args[0])))
    with torch.no_grad():
        compressor.encode(ids)
    for handle in handles:
        handle.remove()
    rows = [(row, gist) for row, each in enumerate(ids) for gist in range(-(-len(each) // RATIO))]
    longest = max(map(len, ids))
    take = lambda name: torch.stack([seen[name][row, gist] for row, gist in rows])  # noqa: E731
    gists = torch.stack([seen["before"][row, 1 + longest + gist] for row, gist in rows])
    ends = [1 + min(RATIO * (gist + 1), len(ids[row])) for row, gist in rows]
    means = torch.stack(
        [seen["before"][row, 1 + RATIO * gist : end].mean(0) for (row, gist), end in zip(rows, ends, strict=True)]
    )
    square = means.square().mean(-1, keepdim=True)
    share = (square + 1e-6 * square.mean()).rsqrt()
    left = means - gists
    for name in ("self_attn/o_proj", "mlp/down_proj"):
        given = take(name) * share
        weight = maps[f"layers/0/{name}"].weight.detach().clone().requires_grad_()
        penalty = ridge * given.square().sum(0).mean()
        loss = (left * share - given @ weight.T).square().sum() + penalty * weight.square().sum()
        (gradient,) = torch.autograd.grad(loss, weight)
        # Of that at zero.
        assert gradient.norm() < 1e-6 * (2 * (left * share).T @ given).norm()
        left = left - take(name) @ weight.detach().T
    assert not maps["layers/0/self_attn/q_proj"].weight.any()


def copied(compressor):
    return {name: tensor.clone() for name, tensor in compressor.copies.state_dict().items()}


def test_a_second_start_is_the_first_again():
    compressor = GistPool(tiny_llama(num_hidden_layers=3), full_copy=True, **ONE_WINDOW).double()
    ids = contexts(60, generator(3))
    first = start_as_means(compressor, ids), copied(compressor)
    assert start_as_means(compressor, ids) == first[0]
    for name, tensor in copied(compressor).items():
        assert torch.equal(tensor, first[1][name]), name


def test_a_start_that_fails_changes_nothing(monkeypatch):
    compressor = GistPool(tiny_llama(num_hidden_layers=3), full_copy=True, **ONE_WINDOW).train()
    before, solve, left = copied(compressor), torch.linalg.solve, [3]

    def fails(*arguments):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return solve(*arguments)

    monkeypatch.setattr(torch.linalg, "solve", fails)
    with pytest.raises(KeyboardInterrupt):
        start_as_means(compressor, contexts(40, generator()))
    assert all(torch.equal(tensor, before[name]) for name, tensor in copied(compressor).items())
    assert all(module.training for module in compressor.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in compressor.modules())


def test_dropout_and_what_no_window_holds_play_no_part():
    ids = contexts(40, generator(4))
    plain, dropping = (
        GistPool(tiny_llama(), lora=LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=dropout), full_copy=True,
                 window=window, **ONE_WINDOW)
        for dropout, window in ((0, None), (0.5, 6))
    )  # fmt: skip
    dropping.train()
    for compressor in (plain, dropping):
        for layer in compressor.model.modules():
            if hasattr(layer, "lora_B"):
                torch.nn.init.constant_(layer.lora_B["gistkit_0_text"].weight, 0.1)
                torch.nn.init.constant_(layer.lora_A["gistkit_0_text"].weight, 0.1)
        compressor.memory_embeddings.data.fill_(0.02)
    cut = start_as_means(plain, [row[:6] for row in ids])
    assert start_as_means(dropping, ids) == pytest.approx(cut)
    assert all(torch.equal(tensor, plain.copies.state_dict()[name]) for name, tensor in copied(dropping).items())


def test_a_window_that_is_zero_spoils_nothing():
    model = tiny_llama()
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0
    compressor = GistPool(model, full_copy=True, **ONE_WINDOW)
    errors = start_as_means(compressor, [[0, 0, 0, 5, 6, 7], *contexts(40, generator())])
    assert all(0 < error < 1 for error in errors)


def test_other_compressors_and_models_are_refused():
    ids = [[2, 3, 4, 5]]
    for wrong, error, message in [
        (GistPool(tiny("qwen3"), lora=None, **ONE_WINDOW), TypeError, "without norms of queries, got qwen3's"),
        (GistPool(tiny_llama(), ratio=3, bos_token=1, full_copy=True), ValueError, "with windows=1, got windows=5"),
        (GistPool(tiny_llama(), **ONE_WINDOW), ValueError, "full_copy=True or lora=None, got adapters for gists"),
        (GistPool(tiny_llama(), lora=None, offset=False, **ONE_WINDOW), ValueError, "with offset=True, got offset=Fa"),
        (Gist(tiny_llama(), ratio=3, bos_token=1), TypeError, "compressor: expected a GistPool, got Gist"),
        (GistPool(tiny("gemma2"), lora=None, **ONE_WINDOW), TypeError, "layers that add up as Llama's, of input_la"),
    ]:
        with pytest.raises(error, match=message):
            start_as_means(wrong, ids)
    fine = GistPool(tiny_llama(), lora=None, **ONE_WINDOW)
    with pytest.raises(ValueError, match="input_ids: expected contexts of at least 2 gists, got 1 gist"):
        start_as_means(fine, [[2, 3, 4]])
    for ridge in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="ridge: expected above 0"):
            start_as_means(fine, ids, ridge=ridge)
