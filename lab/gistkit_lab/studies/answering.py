"""How a compressor answers questions about contexts that it has compressed."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

from gistkit.compress import Compressor
from gistkit_lab.studies.needles import Needles


@torch.no_grad()
def evaluate(
    compressor: Compressor, data: Needles, split: str, count: int, device: str = "cpu"
) -> dict[str, dict[str, float]]:
    """{"loss", "exact"} over `count` questions of each kind, by kind, and their mean as "all".

    An answer is exact where each of its tokens is the likeliest behind those before it, so that greedy decoding gives
    it.
    """
    figures: dict[str, dict[str, float]] = {}
    for kind in data.kinds:
        loss = tokens = exact = 0.0
        for group in data.groups(split, count, kind):
            contexts = torch.tensor([question.context for question in group], device=device)
            texts = [[*question.question, *question.answer[:-1]] for question in group]
            hidden_states = compressor.decode(compressor.encode(contexts), "qa", texts)
            for states, question in zip(hidden_states, group, strict=True):
                start, answer = len(question.question), torch.tensor(question.answer, device=device)
                logits = compressor.logits(states[start : start + len(answer)])
                loss += float(cross_entropy(logits, answer, reduction="sum"))
                tokens += len(answer)
                exact += bool((logits.argmax(-1) == answer).all())
        figures[kind] = {"loss": loss / tokens, "exact": exact / count}
    # The kinds count alike, however many tokens their answers have.
    names = ("loss", "exact")
    figures["all"] = {name: sum(figures[kind][name] for kind in data.kinds) / len(data.kinds) for name in names}
    return figures
