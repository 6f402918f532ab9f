"""What the gradient of a score says of a token, and what the token is worth, by the token's kind."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from gistkit.compress import Dodo
from gistkit.compress.tokens import Rows
from gistkit.hf import attach
from gistkit.nn import Nuggets
from gistkit_lab.studies.facts.study import Recipe
from gistkit_lab.studies.pairs.runs import logits
from gistkit_lab.studies.pairs.study import Pairs, draw

KINDS = ("key", "value", "after value", "filler")
# Contexts of a pass.
GROUP = 64


def kinds(contexts: Tensor, recipe: Recipe) -> Tensor:
    """int64 [B, N], the index in `KINDS` of each token; "after value" is filler that follows one."""
    is_value = (contexts >= recipe.keys) & (contexts < recipe.bos)
    follows = torch.cat([torch.zeros_like(is_value[:, :1]), is_value[:, :-1]], 1)
    found = torch.where(follows, KINDS.index("after value"), KINDS.index("filler"))
    found = torch.where(is_value, KINDS.index("value"), found)
    return torch.where(contexts < recipe.keys, KINDS.index("key"), found)


def measure_signs(compressor: Dodo, recipe: Recipe, ratio: int, seed: int = 0) -> dict[str, dict[str, float]]:
    """{kind: {"gradient", "swap"}} behind random nuggets of test contexts, in nats an answer of one context.

    "gradient": mean of dL/ds over the nuggets of the kind, where s is the nugget's score: below 0 the scorer learns to
    keep them. "swap": mean change of L when the nugget of the lowest score gives way to a token of the kind which is
    none: below 0 they are worth more than what they replace. The last token, always a nugget, counts in neither.
    """
    generator = torch.Generator().manual_seed(seed)
    sums: dict[str, list[float]] = {kind: [0.0] * 4 for kind in KINDS}
    with attach(compressor.model), compressor.selecting("random", ratio):
        for group, start in enumerate(range(0, recipe.sign_contexts, GROUP)):
            pairs = draw(recipe, "test", 1, group, rows=min(GROUP, recipe.sign_contexts - start))
            _add_group(compressor, recipe, pairs, generator, sums)
    return {
        kind: {"gradient": gradient / max(count, 1), "swap": change / max(swaps, 1)}
        for kind, (gradient, count, change, swaps) in sums.items()
    }


def _add_group(
    compressor: Dodo, recipe: Recipe, pairs: Pairs, generator: torch.Generator, sums: dict[str, list[float]]
) -> None:
    pairs = Pairs(*(tensor.to(compressor.device) for tensor in pairs))
    rows = compressor.contexts(pairs.contexts)
    dtype = torch.promote_types(compressor.embed.weight.dtype, torch.float32)
    scores = torch.rand(len(pairs.contexts), recipe.length + 1, generator=generator).to(compressor.device, dtype)
    nuggets = compressor.nuggets(compressor.with_bos(rows), scores)
    of_kind = torch.nn.functional.pad(kinds(pairs.contexts, recipe), (1, 0), value=-1)
    # BOS and the last token stay whatever their scores are.
    of_kind[:, -1] = -1
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, nuggets.index, True)
    with torch.enable_grad():
        scores.requires_grad_()
        before = _losses(compressor, recipe, pairs, rows, nuggets, scores)
        (gradient,) = torch.autograd.grad(before.sum(), scores)
    scores = scores.detach()
    worst = scores.masked_fill(~kept | (of_kind < 0), torch.inf).argmin(1, keepdim=True)
    for number, kind in enumerate(KINDS):
        chosen = kept & (of_kind == number)
        sums[kind][0] += float(gradient[chosen].sum())
        sums[kind][1] += float(chosen.sum())
        candidates = scores.masked_fill(kept | (of_kind != number), -torch.inf)
        best, place = candidates.max(1, keepdim=True)
        can = torch.isfinite(best[:, 0])
        swapped = kept.scatter(1, worst, False).scatter(1, place, True)
        index = torch.where(can[:, None], swapped, kept).nonzero()[:, 1].view(len(scores), -1)
        with torch.no_grad():
            after = _losses(compressor, recipe, pairs, rows, Nuggets(index, nuggets.counts), None)
        sums[kind][2] += float((after - before.detach())[can].sum())
        sums[kind][3] += float(can.sum())


def _losses(
    compressor: Dodo, recipe: Recipe, pairs: Pairs, rows: Rows, nuggets: Nuggets, scores: Tensor | None
) -> Tensor:
    """Nats an answer [B] of contexts behind these nuggets."""
    memory, _ = compressor.encode_nuggets(rows, nuggets, scores)
    found = logits(compressor, pairs, recipe, memory)
    return cross_entropy(found.transpose(1, 2), pairs.answers, reduction="none").mean(1)
