"""KVzip: the attention of a model that repeats the text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gistkit import hf
from gistkit.common.text_ids import text_ids
from gistkit.compress.matching import References
from gistkit.compress.scores.score import Score, wide
from gistkit.hf.keep import Layers

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with"
# Tokens of the part before, which a later part is announced with.
LEAD = 8


@dataclass(frozen=True)
class KVzip(Score):
    """Keys are kept that the model reads when it repeats the text (Kim et al., arXiv 2505.23416).

    After the text the model reads a request to repeat it and, in parts, the text once more: two to three times the work
    of a pass. What matters then matters for most questions.

    For a `question` of `Select` keys are kept that the model reads when it reads the question and answers it. (Answers
    that are drafted from the whole cache to see what is read: Lookahead Q-Cache, Wang et al., arXiv 2505.20334.)

    Args:
        chunk: tokens of a part.
        sinks: first tokens, which are kept.
    """

    name = "kvzip"
    reads_again = True
    reads_question = True
    chunk: int = 2048
    sinks: int = 4

    def __post_init__(self) -> None:
        self.check(chunk=1, sinks=0)

    def repetitions(self, ids: list[int], tokenizer: Any) -> Iterator[tuple[slice, list[int]]]:
        """The parts of a text, as places of its tokens, and what is read after the text to score them.

        Args:
            ids: of the text.
            tokenizer: of the model; what ends a user's message in its chat template follows the request.
        """
        close = "\n"
        if getattr(tokenizer, "chat_template", None):
            message = [{"role": "user", "content": FIRST}]
            close = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            close = close.rpartition(FIRST.strip())[2]
        for start in range(0, len(ids), self.chunk):
            part = slice(start, min(start + self.chunk, len(ids)))
            request = text_ids(LATER if start else FIRST, tokenizer, special_tokens=False)
            lead = ids[max(start - LEAD, 0) : start]
            end = text_ids(close, tokenizer, special_tokens=False, control_tokens=True)
            yield part, request + lead + end + ids[part]


class Repetition(hf.Keeper):
    """Scores a part of a text in a pass that repeats it: a key's highest weight among these queries.

    Args:
        layers: keys and values [1, Hk, n, D] of the text.
        part: its places in the text.
        sinks: first tokens, which share the weights with the part and the repetition.
        queries: how many queries of a key head are kept at most, evenly spaced; 0: none.
    """

    def __init__(self, layers: Layers, part: slice, sinks: int, queries: int = 0) -> None:
        super().__init__()
        self.layers_read, self.part, self.sinks = layers, part, slice(0, min(sinks, part.start))
        self.queries = queries
        self.scores: dict[int, Tensor] = {}
        self.references: dict[int, References] = {}

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> None:
        """Computes the weights of the repetition [1, Hq, T, D] over sinks, part and itself."""
        own, read = wide(key)[0], self.layers_read[layer_idx][0][0]
        keys = torch.cat([wide(read[:, self.sinks]), wide(read[:, self.part]), own], 1)
        grouped = wide(query)[0].unflatten(0, (len(keys), -1))
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        logits = grouped @ keys[:, None].mT * scale
        length = own.shape[1]
        hidden = torch.ones(length, keys.shape[1], dtype=torch.bool, device=keys.device)
        logits = logits.masked_fill(hidden.triu(keys.shape[1] - length + 1), -torch.inf)
        if self.queries and window is None:
            count = min(length, max(1, self.queries // grouped.shape[1]))
            places = torch.linspace(0, length - 1, count).round().long().to(keys.device)
            heads = query[0].unflatten(0, (len(keys), -1))[:, :, places]
            behind = logits[:, :, places, -length:].logsumexp(-1)
            self.references[layer_idx] = References(heads.flatten(1, 2), behind.flatten(1, 2), scale)
        weights = logits.softmax(-1)
        first = self.sinks.stop
        self.scores[layer_idx] = weights[..., first : first + self.part.stop - self.part.start].amax((1, 2))
