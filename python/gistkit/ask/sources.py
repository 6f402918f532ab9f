"""sources: the passages of a document that an answer attended to, through the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from gistkit.ask.conversation import Conversation
from gistkit.common.checks import check_int


@dataclass(frozen=True)
class Passage:
    """Some tokens of a document, and how much an answer attended to them.

    Args:
        document: index of the memory in the conversation.
        start, end: the tokens [start, end) of its text.
        share: of the attention to all documents.
    """

    document: int
    start: int
    end: int
    share: float


def sources(conversation: Conversation, count: int = 3, length: int = 64) -> list[Passage]:
    """The passages that the last answer of a conversation attended to most, the first one most.

    Attention to a memory token is spread evenly over the context tokens that it represents
    (`Compressor.context_spans`); attention to BOS, the task token, questions and answers is ignored. It is summed over
    the answer's tokens and averaged over all heads and layers. Attention shows what was read, which is not necessarily
    what determined the answer.

    Args:
        conversation: with at least one answer, about memories of texts.
        count: passages at most.
        length: tokens of a passage; a shorter document is one.

    Raises:
        ValueError: if there is no answer, or a memory is not of a text.
    """
    return best_passages(context_attention(conversation), count, length)


def context_attention(conversation: Conversation) -> list[Tensor]:
    """Attention of the last answer to each token of each document, float64 [tokens], see `sources`."""
    memory, context_spans = conversation.memory, conversation.compressor.context_spans
    each = [context_spans(one)[0] for one in conversation.memories]
    by_head = each[0].dim() == 3
    if by_head or sum(map(len, each)) != memory.num_tokens:
        # Heads have different numbers of keys, or documents have one BOS in common.
        spans = context_spans(memory)[0]
    else:
        before = accumulate((one.context_lengths[0] for one in conversation.memories[:-1]), initial=0)
        spans = torch.cat([own + tokens for own, tokens in zip(each, before, strict=True)])
    attention = conversation.attention(by_head=by_head)
    attention = attention if by_head else attention[:, None]
    start, end = (bound.reshape(len(spans), -1) for bound in spans.unbind(-1))
    size = (end - start).clamp(min=1)
    share = (attention[: len(size)] / size * (end > start)).flatten()
    change = torch.zeros(memory.context_lengths[0] + 1, dtype=torch.float64)
    change.index_add_(0, start.flatten(), share).index_add_(0, end.flatten(), -share)
    together = change.cumsum(0)[:-1].clamp(min=0)
    found = list(together.split([one.context_lengths[0] for one in conversation.memories]))
    # What came after the compressor's window is read as it is.
    rest = conversation.rest
    found[-1] = torch.cat([found[-1], attention[rest].sum(-1)])
    return found


def best_passages(weights: Sequence[Tensor], count: int = 3, length: int = 64) -> list[Passage]:
    """The windows of `length` tokens with the greatest sums, which do not overlap; the greatest first.

    Args:
        weights: [tokens] of each document, at least 0.
        count, length: as in `sources`.
    """
    check_int("count", count)
    check_int("length", length)
    total = sum(float(document.sum()) for document in weights)
    widths = [min(length, len(document)) for document in weights]
    sums = [document.double().unfold(0, width, 1).sum(-1) for document, width in zip(weights, widths, strict=True)]
    passages: list[Passage] = []
    while sums and len(passages) < count:
        best = max(range(len(sums)), key=lambda document: float(sums[document].max()))
        start = int(sums[best].argmax())
        weight = float(sums[best][start])
        # Of spreading and summing, rounding is left.
        if not weight > 1e-9 * total:
            break
        passages.append(Passage(best, start, start + widths[best], weight / total))
        sums[best][max(0, start - widths[best] + 1) : start + widths[best]] = 0
    return passages
