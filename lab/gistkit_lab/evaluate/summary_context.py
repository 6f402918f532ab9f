"""SummaryContext: the model reads its own summary of a context, the baseline in words for compressors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from transformers import PreTrainedModel

from gistkit.common.text_ids import filled_ids, text_ids
from gistkit.compress.tokens import Rows, pad
from gistkit.evaluate.baselines import BaselineInput, FullContext
from gistkit.evaluate.prompts import CONTEXT, INST, Markers
from gistkit.evaluate.runner import end_tokens, greedy_rows
from gistkit_lab.evaluate.prompts import word_summary_prompt


class SummaryContext(FullContext):
    """The model reads, instead of the context, a summary that it has written: LMSumm of Dodo, Section 6.

    A context of n words, counted by spaces, is summarised greedily into ceil(n / ratio) words with the prompt of
    Appendix D.1. (The paper writes n * r there, for an r of 10% and a ratio of 10.) The summary ends at an end token,
    or at `slack` times the tokens that as many words of the context have. If it is empty, the model reads only the
    first token of the context. Everything else is as in `Baseline`.

    Args:
        model: a transformers causal language model, tuned for instructions.
        tokenizer: of the model.
        ratio: words of a context for each word of its summary, at least 1.
        slack: most tokens of a summary, as a multiple of the expected number, at least 1.
        markers: of the user's message that requests the summary. If a context starts with the opening marker, as in
            `question_prompt`, the marker is not summarised and precedes the summary too.
        stop_tokens: ids that end a summary; None: the ends of sequence of the tokenizer and the model.
        settings: task_tokens, losses and end_token, as in `Baseline`.

    Raises:
        ValueError: if there is no tokenizer, or a number is out of range.
    """

    method = "summary_context"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        ratio: float = 10.0,
        slack: float = 2.0,
        markers: Markers = INST,
        stop_tokens: Iterable[int] | None = None,
        **settings: Any,
    ) -> None:
        if tokenizer is None:
            raise ValueError("tokenizer: expected one that makes and reads the text of contexts, got None")
        for name, value in (("ratio", ratio), ("slack", slack)):
            if not 1 <= value < math.inf:
                raise ValueError(f"{name}: expected a number of at least 1, got {value}")
        super().__init__(model, **settings)
        self.tokenizer, self.slack, self.markers = tokenizer, slack, markers
        self.stop_tokens = tuple(end_tokens(model, tokenizer) if stop_tokens is None else stop_tokens)
        self.title = f"SummaryContext {ratio:g}x"
        self._ratio = ratio
        # In a tuple, so that the model is not registered a second time.
        self._writer = (FullContext(model),)

    @property
    def ratio(self) -> float:
        """Words of a context for each word of its summary."""
        return self._ratio

    @torch.no_grad()
    def summaries(self, input_ids: Any, attention_mask: Any = None) -> list[str]:
        """The summary of each context; arguments as in `encode`."""
        rows = self.contexts(input_ids, attention_mask)
        return self._summaries([self._divided(row)[-1] for row in rows.lists()])

    def _input(self, rows: Rows) -> BaselineInput:
        contexts = rows.lists()
        parts = [self._divided(row) for row in contexts]
        summaries = self._summaries([text for *_, text in parts])
        summarised = [
            (first + filled_ids(opened + CONTEXT, CONTEXT, summary, self.tokenizer)) or row[:1]
            for row, (first, opened, _), summary in zip(contexts, parts, summaries, strict=True)
        ]
        return super()._input(pad(summarised, self.device))

    def _divided(self, row: list[int]) -> tuple[list[int], str, str]:
        """A context's first token, where it is the tokenizer's own; its opening marker, if any; its text."""
        start, name = getattr(self.tokenizer, "bos_token_id", None), getattr(self.tokenizer, "bos_token", None)
        # A marker that begins with that token is searched in the text.
        first = row[:1] if row[0] == start and not self.markers.open.startswith(name or "") else []
        text = str(self.tokenizer.decode(row[len(first) :], skip_special_tokens=False))
        opened = self.markers.open if text.startswith(self.markers.open) else ""
        return first, opened, text[len(opened) :]

    def _summaries(self, texts: list[str]) -> list[str]:
        prompts, limits = [], []
        for text in texts:
            words = max(1, len(text.split()))
            word_count = math.ceil(words / self.ratio)
            template = "".join(word_summary_prompt(CONTEXT, word_count, self.markers))
            prompts.append(filled_ids(template, CONTEXT, text, self.tokenizer, special_tokens=True))
            tokens = max(1, len(text_ids(text, self.tokenizer, special_tokens=False)))
            limits.append(math.ceil(self.slack * word_count * tokens / words))
        (writer,) = self._writer
        memory, _ = writer.encode_rows(pad(prompts, self.device))
        generated = greedy_rows(writer, memory, "lm", None, max(limits), self.stop_tokens)
        return [
            str(self.tokenizer.decode(row[:limit], skip_special_tokens=True)).strip()
            for row, limit in zip(generated, limits, strict=True)
        ]
