"""Every method against itself written out on transformers' own attention: states behind a memory, and gradients."""

from functools import partial

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.compress import test_dodo, test_icae, test_in_place, test_kv_distill, test_sac, test_separate_encoder
from tests.compress.test_embeddings_and_norms import PARTS, VARIANTS, exact_norm, make
from tests.helpers import dodo_oracle
from tests.helpers.in_place_oracle import maps_by_row, states
from tests.helpers.models import eager, tiny, tokens
from tests.helpers.tiers import slow, tiers

BOS = 1


def of_two_models(encoder, pool, layout, lora):
    return test_separate_encoder.made(encoder and test_separate_encoder.small(), pool=pool, layout=layout, lora=lora)


MAKERS = {
    **{name: partial(test_in_place.make, name) for name in test_in_place.VARIANTS},
    "dodo": test_dodo.make,
    "dodo, shared, of two layers": partial(test_dodo.make, separate=False, layer=2),
    "kv-distill": test_kv_distill.made,
    "sac": test_sac.made,
    **{", ".join(map(str, case)): partial(of_two_models, *case) for case in test_separate_encoder.CASES},
}
# With tables of embeddings and norms of each role; each method once, and others slowly.
QUICK = [*MAKERS, *(f"{name}, both" for name in ("icae", "x500", "gist", "avgpool", "gistpool", "dodo", "no_context"))]
MAKERS |= {f"{name}, both": partial(make, name, **PARTS["both"]) for name in VARIANTS if name != "voco"}
MAKERS |= {"icae, norms": partial(make, "icae", **PARTS["norms"])}
MAKERS |= {"gistpool, embeddings": partial(make, "gistpool", **PARTS["embeddings"])}
OWN = {name: partial(test_in_place.make, name, lora=None) for name in ("gist", "avgpool", "gistpool")}
OWN |= {"dodo": partial(test_dodo.make, lora=None, layer=2)}
OWN["dodo, shared"] = partial(test_dodo.make, lora=None, separate=False)
FAMILIES = [("gist", "gemma2"), ("avgpool", "gemma2"), ("separate offset gist", "mistral"), ("avgpool kv", "qwen3")]


def written_out(compressor, ids, text):
    """Hidden states [T + 1, d] after the memory of `ids` [1, N] and at each token of `text` [1, T]."""
    context, words, method = [BOS, *ids[0].tolist()], text[0].tolist(), compressor.method
    if method in ("icae", "x500"):
        return test_icae.plain_decode(compressor, ids, "lm", text, partial(maps_by_row, compressor, None))[0]
    if method == "sac":
        return test_sac.plain_decode(compressor, ids, text)[0]
    if method == "separate_encoder":
        pool, layout = compressor.settings["pool"], compressor.settings["layout"]
        return test_separate_encoder.plain_decode(compressor, ids, text, pool, layout)[0][0]
    if method in ("dodo", "kv_distill"):
        kept = compressor.encode(ids).positions[0].tolist()
        # What scores are written out of has no tables of its own.
        if compressor.settings.get("selection", "learned") == "learned" and not compressor.options.embedding_lora:
            assert kept == dodo_oracle.best(dodo_oracle.scores_of(compressor, context), compressor.chunk)
        return {"dodo": dodo_oracle.read, "kv_distill": test_kv_distill.read}[method](compressor, context, kept, words)
    if method == "no_context":
        with maps_by_row(compressor, None), eager(compressor.model):
            inputs = compressor.embed(torch.tensor([[BOS, *words]]))
            return compressor.model.get_decoder()(inputs_embeds=inputs, use_cache=False).last_hidden_state[0]
    return states(compressor, ids[0].tolist(), words)


@pytest.mark.parametrize("name", tiers(MAKERS, QUICK))
def test_values_and_gradients_of_adapters_and_tokens(name, monkeypatch):
    monkeypatch.setattr(LlamaRMSNorm, "forward", exact_norm)
    compressor, ids, text = MAKERS[name](), tokens(1, 13), tokens(1, 5)
    # What a task's token is read by and what a choice of tokens learns from are other tests'.
    named = {n: p for n, p in compressor.trainable() if not n.startswith(("task_embeddings", "scorer"))}
    ours = compressor.decode(compressor.encode(ids, gradient=True), "lm", text)[0]
    expected = written_out(compressor, ids, text)
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
    upstream = torch.randn(6, 48, dtype=torch.float64)
    found, right = (
        torch.autograd.grad((hidden * upstream).sum(), named.values(), allow_unused=True) for hidden in (ours, expected)
    )
    other = compressor.method in ("sac", "kv_distill", "separate_encoder")
    near = {"rtol": 1e-6, "atol": 1e-7} if other else {"rtol": 1e-9, "atol": 1e-9}
    for (parameter, weight), *both in zip(named.items(), found, right, strict=True):
        assert both[0] is not None or name not in test_in_place.VARIANTS, parameter
        both = (torch.zeros_like(weight) if gradient is None else gradient for gradient in both)
        torch.testing.assert_close(*both, msg=lambda m, p=parameter: f"{p}: {m}", **near)


@pytest.mark.parametrize("name", OWN)
def test_models_whose_own_weights_train(name):
    compressor, ids, text = OWN[name](), tokens(1, 13), tokens(1, 6)
    ours = compressor.decode(compressor.encode(ids), "lm", text)[0]
    torch.testing.assert_close(ours, written_out(compressor, ids, text), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("gistpool", "gemma3"),
        *slow(*FAMILIES),
        ("dodo", "gemma3"),
        *slow(*(("dodo", family) for family in ("qwen2", "qwen3", "gemma2", "mistral"))),
    ],
)
def test_families_with_norms_softcaps_and_sliding_windows(name, family):
    compressor, ids, text = MAKERS[name](tiny(family)), tokens(1, 15), tokens(1, 9)
    ours = compressor.decode(compressor.encode(ids), "qa", text)[0]
    torch.testing.assert_close(ours, written_out(compressor, ids, text), rtol=1e-9, atol=1e-9)
