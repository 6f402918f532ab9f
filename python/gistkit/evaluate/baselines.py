"""The baselines without and with the whole context, on a compressor's model and with its interface."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gistkit import hf
from gistkit.common.files import read_tensors, write_tensors
from gistkit.common.messages import shown
from gistkit.compress import Compressor, Memory
from gistkit.compress.adapters import freeze_base
from gistkit.compress.config import Config, draw_like, setting
from gistkit.compress.memory import Task
from gistkit.compress.tokens import Rows
from gistkit.layouts import Plan

TASK_TOKENS = "task_tokens.safetensors"
_HEADER = "task tokens"


@dataclass(frozen=True, eq=False, repr=False)
class Prefix(Memory):
    """A memory of plain tokens: the keys and values of the model itself.

    Args:
        lead: the token of each row instead of the task token: the last one of the context, or the start token.
        tokens_read: tokens of each row's context that the model reads.
    """

    _numbers: ClassVar = (*Memory._numbers, "lead", "tokens_read")

    lead: tuple[int, ...] = ()
    tokens_read: tuple[int, ...] = ()


class BaselineInput(NamedTuple):
    """The tokens that the model reads for a batch. For each row: how many tokens have their keys kept, the token after
    them, which takes the place of the task token, and how many tokens of the context the model reads."""

    rows: Rows
    cached: tuple[int, ...]
    lead: tuple[int, ...]
    tokens_read: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class BaselineConfig(Config):
    """The arguments of a `Baseline`."""

    losses: Iterable[str] | Mapping[str, float] = setting(("ae", "lm"))
    end_token: int | None = None

    @property
    def chunk(self) -> int:
        return 1

    @property
    def of_memory(self) -> dict[str, Any]:  # type: ignore[override]
        """Its memories are never saved."""
        return {"layout": "epl"}


class Baseline(Compressor):
    """The plain model with positions 0, 1, ..: `encode` caches what it reads; everything else is as in a compressor.

    A compressor's LoRA adapter in the model is off, but weights that a compressor without LoRA has trained stay
    trained.

    Args:
        model: a transformers causal language model.
        task_tokens: whether there are learned [AE] and [LM] tokens before the text, which the papers train for these
            baselines; `trainable` and `save_pretrained` cover only these tokens. The model's own weights are then
            frozen, as beside LoRA; adapters in it are left as they are. Without them the text follows the context
            directly.
        losses, end_token: what `forward` returns and what ends a reconstruction, as in a compressor.
    """

    carrier = "kv"
    title: str

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        task_tokens: bool = False,
        losses: Iterable[str] | Mapping[str, float] = ("ae", "lm"),
        end_token: int | None = None,
    ) -> None:
        super().__init__(model, BaselineConfig(losses=losses, end_token=end_token))
        self.task_tokens = task_tokens
        if task_tokens:
            # A report may have it beside the plain one.
            self.title = f"{self.title} with task tokens"
            freeze_base(model)

    def install(self) -> None:
        self.task_embeddings = nn.ParameterDict({task: draw_like(self.embed, 1) for task in ("ae", "lm")})

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The task tokens by name, if there are any."""
        parameters = self.task_embeddings.named_parameters(prefix="task_embeddings")
        return iter(parameters if self.task_tokens else ())

    def save_pretrained(self, folder: str | Path, fingerprints: Any = None) -> None:
        """Writes the task tokens as safetensors; the model is unchanged and not written, nor are fingerprints."""
        if not self.task_tokens:
            raise ValueError("task_tokens: expected a baseline made with task_tokens=True, got one without")
        write_tensors(Path(folder) / TASK_TOKENS, dict(self.task_embeddings.items()), {"method": self.method})

    @torch.no_grad()
    def encode_rows(self, rows: Rows) -> tuple[Memory, Tensor]:
        """The keys and values of the tokens before the task token, and their hidden states."""
        inputs = self._input(rows)
        columns, width = inputs.rows.ids.shape[1], max(inputs.cached)
        plan = self.lm.causal_plan(columns)
        keep = hf.KeptKeys(slice(0, width))
        self.lm.check_positions("input_ids", columns - 1)
        out = self.lm.run(None, inputs_embeds=self.embed(inputs.rows.ids), plan=plan, keep=keep)
        hidden_states = out.last_hidden_state[:, :width]
        memory = Prefix(
            source=self.source,
            lengths=inputs.cached,
            context_lengths=rows.lengths,
            positions=torch.arange(width).repeat(rows.batch_size, 1),
            starts=inputs.cached,
            lead=inputs.lead,
            tokens_read=inputs.tokens_read,
            layers=keep.layers,
        )
        return memory, hidden_states

    def rotated_over(self, memory: Memory) -> int:
        """See `Compressor.rotated_over`; the token that is read again is one of the pass."""
        return max(cast(Prefix, memory).tokens_read)

    def reading_plan(self, memory: Memory, task: Task, texts: Sequence[Rows], name: str = "input_ids") -> Plan:
        """The plan of the text; positions continue from the tokens that were read, for every task."""
        if task not in ("ae", "lm", "qa"):
            raise ValueError(f"task: expected one of ae, lm, qa, got {task!r}")
        return super().reading_plan(memory, "lm", texts, name)

    def task_embedding(self, task: Task, memory: Memory) -> Tensor:
        """[B, 1, d]: the learned token of the task, or the token in its place."""
        if self.task_tokens:
            embedding = self.task_embeddings["ae" if task == "ae" else "lm"]
            return embedding.expand(memory.batch_size, 1, -1).to(self.embed.weight)
        return self.embed(torch.tensor(cast(Prefix, memory).lead, device=self.device))[:, None]

    @abstractmethod
    def _input(self, rows: Rows) -> BaselineInput:
        """The tokens that the model reads for the contexts."""


class FullContext(Baseline):
    """The model reads the whole context, uncompressed. See `Baseline`."""

    title = "FullContext"
    method = "full_context"

    def _input(self, rows: Rows) -> BaselineInput:
        cached = rows.lengths if self.task_tokens else tuple(length - 1 for length in rows.lengths)
        return BaselineInput(rows, cached, tuple(row[-1] for row in rows.lists()), rows.lengths)


class NoContextBaseline(Baseline):
    """The model reads only the text, or the question, and nothing of the context. See `Baseline`.

    Args:
        start_token: id before the text, from which its first token is predicted; None: the first token or else the end
            token of the model's configuration. Not used with task tokens.

    Raises:
        ValueError: if the token is not in the vocabulary, or the configuration names none.
    """

    title = "NoContext"
    method = "no_context"

    def __init__(self, model: PreTrainedModel, *, start_token: int | None = None, **settings: Any) -> None:
        super().__init__(model, **settings)
        if start_token is not None or not self.task_tokens:
            start_token = self.lm.first_token("start_token", start_token)
        self.start_token = start_token or 0

    def _input(self, rows: Rows) -> BaselineInput:
        count = rows.batch_size
        start, nothing = torch.full((count, 1), self.start_token, device=self.device), (0,) * count
        return BaselineInput(Rows(start, (1,) * count), nothing, (self.start_token,) * count, nothing)


BASELINES: Mapping[str, type[Baseline]] = {"none": NoContextBaseline, "full": FullContext}


def has_baseline(folder: str | Path) -> bool:
    """Whether a folder has the task tokens of a baseline."""
    return (Path(folder) / TASK_TOKENS).is_file()


def load_baseline(folder: str | Path, model: PreTrainedModel) -> Baseline:
    """The baseline whose task tokens are in a folder, around its model, in eval mode.

    Args:
        folder: what `Baseline.save_pretrained` wrote, or `gistkit train --baseline`.
        model: the same as in training.

    Raises:
        FileNotFoundError: if the folder has none.
        ValueError: if they are of no baseline, or of another width.
    """
    path = Path(folder) / TASK_TOKENS
    header, tokens = read_tensors(path, _HEADER)
    method = header.get("method")
    kinds = {kind.method: kind for kind in BASELINES.values()}
    if method not in kinds:
        raise ValueError(f"{path}: expected task tokens of {' or '.join(kinds)}, got those of {shown(method)}")
    baseline = kinds[method](model, task_tokens=True).eval().to(model.device)
    expected = {name: tuple(token.shape) for name, token in baseline.task_embeddings.items()}
    shapes = {name: tuple(token.shape) for name, token in tokens.items()}
    if shapes != expected:
        raise ValueError(f"{path}: expected task tokens with shapes {expected}, got {shapes}")
    with torch.no_grad():
        for name, token in baseline.task_embeddings.items():
            token.copy_(tokens[name])
    return baseline
