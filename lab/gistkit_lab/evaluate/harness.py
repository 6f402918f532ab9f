"""CompressorLM: lm_eval drives a compressor (`pip install 'gistkit[lm-eval]'`), as `gistkit lm-eval` does.

from gistkit_lab.evaluate.harness import CompressorLM

lm_eval.simple_evaluate(CompressorLM(compressor, tokenizer, marker="Question:"), tasks=["sciq"])
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from gistkit.common.checks import at_least
from gistkit.compress import Compressor
from gistkit.compress.memory import Task
from gistkit.evaluate.runner import end_tokens, evaluating, greedy_rows, scored_tokens

KEEP, MAX_NEW_TOKENS = 64, 256


class Split(NamedTuple):
    """A context in two parts: ids that are compressed, at least one, and ids that are read after their memory."""

    compressed: tuple[int, ...]
    kept: tuple[int, ...]


class CompressorLM(TemplateLM):
    """A language model for lm_eval whose contexts are compressed, but for their end.

    Compressed is all of a context but its last `keep` tokens, and at least its first token; or, with a `marker`, what
    stands before the last occurrence of that text, such as "Question:". A context without the marker, or that begins
    with it, is split by `keep`. The tokens after the split, the continuation and what is generated are read
    uncompressed after the memory (task "qa").

    `loglikelihood_rolling` predicts `stride` tokens of a text at a time: those before them are their context, split by
    `keep` (task "lm"). Every token is predicted once, the first ones from the tokenizer's first or end token.

    Contexts have the tokenizer's special tokens. A context is cut at its beginning so that it and its continuation, or
    the most tokens that are generated, are at most `max_length`. A context that several continuations share is encoded
    once in a batch.

    Args:
        compressor: a Compressor, or a baseline such as `FullContext`, which reads everything.
        tokenizer: of transformers.
        keep: tokens at the end of a context that are not compressed, at least 1.
        marker: a text that begins the part that is not compressed; None: none.
        stride: tokens that `loglikelihood_rolling` predicts at a time, at least 1.
        max_length: tokens of context and continuation together, at least 2; None: those of the model's configuration.
        batch_size: contexts at a time.

    Raises:
        ValueError: if an argument is out of range, or neither tokenizer nor model has a first or end token.
    """

    def __init__(
        self,
        compressor: Compressor,
        tokenizer: Any,
        *,
        keep: int = KEEP,
        marker: str | None = None,
        stride: int = 256,
        max_length: int | None = None,
        batch_size: int = 8,
    ) -> None:
        super().__init__()
        self.compressor, self.tokenizer = compressor, tokenizer
        self.keep = at_least("CompressorLM", "keep", keep, 1)
        self.stride = at_least("CompressorLM", "stride", stride, 1)
        self.batch_size = at_least("CompressorLM", "batch_size", batch_size, 1)
        if marker is not None and (not isinstance(marker, str) or not marker):
            raise ValueError(f"marker: expected a text that is not empty, got {marker!r}")
        self.marker = marker
        most = getattr(compressor.model.config, "max_position_embeddings", None) if max_length is None else max_length
        if most is None:
            raise ValueError("max_length: expected one for a model whose configuration names none, got None")
        self.max_length = at_least("CompressorLM", "max_length", most, 2)
        config, ends = compressor.model.config, end_tokens(compressor.model, tokenizer)
        first = [tokenizer.bos_token_id, config.bos_token_id, *ends]
        prefix = next((token for token in first if token is not None), None)
        if prefix is None:
            raise ValueError("tokenizer: expected one with a first or end token, which texts are predicted from")
        self._prefix, self._ends = int(prefix), tuple(ends)
        self._device = compressor.model.device

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text, or, without one, that which begins it."""
        return self._ends[0] if self._ends else self._prefix

    @property
    def prefix_token_id(self) -> int:
        """The id that a text without context is predicted from."""
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name, by which lm_eval tells its cached requests apart."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; None: with the tokenizer's special tokens, but a first one that the text has already."""
        ids = list(self.tokenizer(string, add_special_tokens=add_special_tokens is not False)["input_ids"])
        begins = self.tokenizer.bos_token
        if add_special_tokens is None and begins and string.startswith(begins) and ids[:1] == ids[1:2]:
            return ids[1:]
        return ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as text, by the tokenizer's chat template."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def split(self, context: str, ids: Sequence[int], room: int) -> Split:
        """Where a context, a text and its `ids`, is split if `room` tokens are to follow it."""
        if room >= self.max_length:
            raise ValueError(f"max_length: expected more than the {room} tokens after a context, got {self.max_length}")
        at = len(ids) - self.keep
        before = context.rpartition(self.marker)[0] if self.marker is not None else ""
        if before:
            # A token may have the end of that part and the marker's beginning.
            same = [one == other for one, other in zip(ids, self.tok_encode(before), strict=False)]
            at = [*same, False].index(False)
        cut = max(0, len(ids) - (self.max_length - room))
        at = min(max(at, cut + 1), len(ids))
        return Split(tuple(ids[cut:at]), tuple(ids[at:]))

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        asked = [(self.split(texts[0], context, len(target)), tuple(target)) for texts, context, target in requests]
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(asked)
        for batch, found in self._scored("qa", asked, disable_tqdm):
            for index, answer in zip(batch, found, strict=True):
                answers[index] = answer
                self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log probability of each whole text, in nats."""
        asked, owners = [], []
        for owner, request in enumerate(requests):
            ids = [self.prefix_token_id, *self.tok_encode(request.args[0], add_special_tokens=False)]
            for start in range(1, len(ids), self.stride):
                target = tuple(ids[start : start + self.stride])
                asked.append((self.split("", ids[:start], len(target)), target))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for batch, found in self._scored("lm", asked, disable_tqdm):
            for index, (log_probability, _) in zip(batch, found, strict=True):
                totals[owners[index]] += log_probability
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What follows each context, up to the first of its stop texts; greedy, as most tasks ask."""
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(index)
        texts = [""] * len(requests)
        with tqdm(total=len(requests), desc="generating", unit="text", disable=disable_tqdm) as bar:
            for members in groups.values():
                until, most = _generation(requests[members[0]].args[1])
                splits: dict[int, Split] = {}
                for index in members:
                    context = requests[index].args[0]
                    splits[index] = self.split(context, self.tok_encode(context) or [self.prefix_token_id], most)
                lengths = {index: sum(map(len, split)) for index, split in splits.items()}
                for batch in self._batches(lengths):
                    rows = self._generated([splits[index] for index in batch], most)
                    for index, row in zip(batch, rows, strict=True):
                        text = self.tokenizer.decode(row, skip_special_tokens=True)
                        texts[index] = text[: min((text.find(stop) for stop in until if stop in text), default=None)]
                        self.cache_hook.add_partial("generate_until", requests[index].args, texts[index])
                    bar.update(len(batch))
        return texts

    def _generated(self, splits: Sequence[Split], most: int) -> list[list[int]]:
        with evaluating(self.compressor):
            memory = self._encoded(splits)
            return greedy_rows(self.compressor, memory, "qa", [list(split.kept) for split in splits], most, self._ends)

    def _encoded(self, splits: Sequence[Split]) -> Any:
        """The memory of each row's compressed part, each different one encoded once."""
        places = {part: place for place, part in enumerate(dict.fromkeys(split.compressed for split in splits))}
        memory = self.compressor.encode([list(part) for part in places])
        return memory if len(places) == len(splits) else memory[[places[split.compressed] for split in splits]]

    def _batches(self, lengths: Mapping[int, int]) -> Iterator[list[int]]:
        # The longest first: a batch that does not fit in memory fails at once.
        order = sorted(lengths, key=lambda index: -lengths[index])
        for start in range(0, len(order), self.batch_size):
            yield order[start : start + self.batch_size]

    @torch.no_grad()
    def _scored(
        self, task: Task, asked: Sequence[tuple[Split, tuple[int, ...]]], quiet: bool
    ) -> Iterator[tuple[list[int], list[tuple[float, bool]]]]:
        """Indices of a batch, and of each the log probability of its target and whether that is the greedy one."""
        lengths = {index: sum(map(len, split)) for index, (split, target) in enumerate(asked) if target}
        with tqdm(total=len(lengths), desc="scoring", unit="text", disable=quiet) as bar, evaluating(self.compressor):
            for batch in self._batches(lengths):
                memory = self._encoded([asked[index][0] for index in batch])
                rows = [[*asked[index][0].kept, *asked[index][1]] for index in batch]
                found = []
                for index, (nats, correct) in zip(
                    batch, scored_tokens(self.compressor, memory, task, rows), strict=True
                ):
                    count = len(asked[index][1])
                    found.append((-float(nats[-count:].sum()), bool(correct[-count:].all())))
                yield batch, found
                bar.update(len(batch))


def _generation(settings: dict[str, Any]) -> tuple[list[str], int]:
    """The stop texts and the most tokens of a task's arguments of generation."""
    known = normalize_gen_kwargs(settings, MAX_NEW_TOKENS)
    until, most = known.pop("until"), known.pop("max_gen_toks")
    if known.pop("do_sample", False) or known.pop("temperature", 0):
        raise ValueError(f"generation_kwargs: expected greedy generation, got {settings}")
    if unknown := sorted(known):
        raise ValueError(f"generation_kwargs: expected only until and max_gen_toks, got {', '.join(unknown)} too")
    return [stop for stop in until if stop], at_least("generation_kwargs", "max_gen_toks", most, 1)
