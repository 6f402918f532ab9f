"""Compressor: what ICAE and 500xCompressor share. Chunks in, memory out, and a decoder that reads it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from gistkit.compress.losses import CompressionHead, segment_targets, token_loss
from gistkit.compress.memory import Memory
from gistkit.compress.plans import decoder_plan, encoder_plan
from gistkit.hf import attach
from gistkit.hf.attention import Recorder
from gistkit.layouts import Plan

Task = Literal["ae", "lm", "qa"]
TASKS = ("ae", "lm", "qa")
LOSSES = ("ae", "lm", "compression")


def _draw_like(table: Tensor, rows: int) -> nn.Parameter:
    """New embeddings [rows, d] with the mean and spread of those of the vocabulary."""
    return nn.Parameter(table.mean(0) + table.std() * torch.randn(rows, table.shape[1]).to(table))


def _check_rows(name: str, ids: Tensor, memory: Memory) -> None:
    if ids.shape[0] != memory.batch_size:
        raise ValueError(f"{name}: expected {memory.batch_size} rows as the memory has, got {ids.shape[0]}")


class Compressor(nn.Module, ABC):
    """Compresses chunks of a context into memory tokens that the same model reads in their place.

    A context of p tokens is cut into k = ceil(p / chunk) chunks; each is followed by M = ceil(chunk / ratio) learned
    memory tokens and encoded by itself. What the memory tokens leave behind depends on the method (its carrier).
    The decoder reads [memory][task token][tokens]. Position ids follow the layout (Position IDs Matter, Tables 1-3).

    Args:
        model: a transformers causal language model (Llama); shared by encoder and decoder, not copied.
        chunk: chunk size L in tokens.
        ratio: compression ratio r >= 1, context tokens a memory token stands for.
        layout: "dpl", "upl", "epl" or "cpl" (the decoder half of EPL alone).
        losses: which of "ae" (reconstruct the context), "lm" (continue it) and "compression" (each memory token
            predicts its own segment) `forward` returns.

    Raises:
        ValueError: if an argument is out of range.
    """

    carrier: ClassVar[str]

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        chunk: int = 510,
        ratio: float = 5,
        layout: str = "epl",
        losses: Iterable[str] = ("ae",),
    ) -> None:
        super().__init__()
        if chunk < 1:
            raise ValueError(f"chunk: expected at least 1 token, got {chunk}")
        if not ratio >= 1:
            raise ValueError(f"ratio: expected a number >= 1, got {ratio}")
        self.loss_names = tuple(losses)
        if not self.loss_names or not set(self.loss_names) <= set(LOSSES):
            raise ValueError(f"losses: expected some of {', '.join(LOSSES)}, got {self.loss_names}")
        self.model = model
        self.chunk = chunk
        self.memory_tokens = -int(-chunk // ratio)
        self.layout = layout
        encoder_plan(chunk, chunk, self.memory_tokens, layout, "cpu")  # an unknown layout is refused here

        table = self._embed.weight.detach().float()
        self.memory_embeddings = _draw_like(table, self.memory_tokens)
        self.task_embeddings = nn.ParameterDict({"ae": _draw_like(table, 1), "lm": _draw_like(table, 1)})
        self.compression_head = None
        if "compression" in self.loss_names:
            self.compression_head = CompressionHead(table.shape[1], -(-chunk // self.memory_tokens)).to(table.device)

    @abstractmethod
    def _memory(self, hidden: Tensor, cache: DynamicCache | None, context: int, tokens: int) -> Memory:
        """The memory left by an encoder pass whose last `tokens` rows are the memory tokens."""

    @abstractmethod
    def _prefix(self, memory: Memory) -> tuple[Tensor | None, DynamicCache | None]:
        """How the decoder receives the memory: embeddings to put before its input, or a filled cache."""

    def encode(self, input_ids: Tensor, *, recorder: Recorder | None = None) -> Memory:
        """Compresses a batch of contexts, input_ids int64 [B, p] with p >= 1, in one pass over all chunks."""
        if input_ids.dim() != 2 or input_ids.shape[1] < 1:
            raise ValueError(f"input_ids: expected [B, p] with p >= 1, got shape {tuple(input_ids.shape)}")
        if (
            self.training
            and torch.is_grad_enabled()
            and any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules())
        ):
            raise ValueError(
                "model: expected gradient checkpointing to be off, which the compressors do not support yet, got on"
            )
        batch, context = input_ids.shape
        plan = encoder_plan(context, self.chunk, self.memory_tokens, self.layout, str(input_ids.device))
        embeddings = self._embed(input_ids)
        tokens = plan.num_queries - context
        memory = self.memory_embeddings.repeat(tokens // self.memory_tokens, 1).expand(batch, -1, -1)
        with attach(self.model):
            out = self._decoder(
                inputs_embeds=torch.cat([embeddings, memory.to(embeddings.dtype)], 1),
                plan=plan,
                recorder=recorder,
                use_cache=self.carrier == "kv",
            )
        return self._memory(out.last_hidden_state, out.past_key_values, context, tokens)

    def decode(self, memory: Memory, task: Task, input_ids: Tensor, *, recorder: Recorder | None = None) -> Tensor:
        """Hidden states [B, 1 + T, d] at the task token and at input_ids [B, T], which follow it."""
        _check_rows("input_ids", input_ids, memory)
        plan = self._decoder_plan(memory, task, input_ids.shape[1])
        inputs = torch.cat([self._task_embedding(task, memory), self._embed(input_ids)], 1)
        hidden, _ = self._read(memory, inputs, plan, recorder)
        return hidden

    def forward(self, input_ids: Tensor, continuation_ids: Tensor | None = None) -> dict[str, Tensor]:
        """The losses asked for at construction, from one shared compression, and their mean as "loss".

        Args:
            input_ids: int64 [B, p], the context.
            continuation_ids: int64 [B, t], the tokens after it; needed for the "lm" loss alone.

        Returns:
            {"ae", "lm", "compression", "loss"}: fp32 scalars, nats a token.
        """
        if "lm" in self.loss_names and continuation_ids is None:
            raise ValueError("continuation_ids: expected int64 [B, t] for the lm loss, got None")
        with attach(self.model):
            memory = self.encode(input_ids)
            weight = self._head.weight
            losses = {}
            for name, targets in (("ae", input_ids), ("lm", continuation_ids)):
                if name in self.loss_names and targets is not None:
                    losses[name] = token_loss(self.decode(memory, name, targets[:, :-1]), weight, targets)  # type: ignore[arg-type]
            if self.compression_head is not None:
                targets = segment_targets(input_ids, self.chunk, self.memory_tokens)
                losses["compression"] = self.compression_head(memory.hidden, weight, targets)
        losses["loss"] = torch.stack(list(losses.values())).mean()
        return losses

    @torch.no_grad()
    def generate(
        self, memory: Memory, max_new_tokens: int, *, task: Task = "ae", prompt_ids: Tensor | None = None
    ) -> Tensor:
        """Greedy continuation of [memory][task token][prompt], int64 [B, max_new_tokens]; memory is not changed.

        Args:
            memory: what `encode` returned.
            max_new_tokens: tokens to generate, at least 1.
            task: "ae" reconstructs the context, "lm" continues it, "qa" answers the prompt.
            prompt_ids: int64 [B, T], tokens between the task token and the answer; none by default.
        """
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
        if prompt_ids is None:
            prompt_ids = torch.empty(memory.batch_size, 0, dtype=torch.int64, device=memory.hidden.device)
        _check_rows("prompt_ids", prompt_ids, memory)
        embed, head = self._embed, self._head
        # The last new token is not fed.
        plan = self._decoder_plan(memory, task, prompt_ids.shape[1] + max_new_tokens - 1)
        skip = plan.num_keys - plan.num_queries
        inputs = torch.cat([self._task_embedding(task, memory), embed(prompt_ids)], 1)
        rows = plan.num_queries - (max_new_tokens - 1)
        with attach(self.model):
            first = plan.rows(0, rows, num_keys=skip + rows)
            hidden, cache = self._read(memory, inputs, first, None, keep_cache=True)
            answer = [head(hidden[:, -1:]).argmax(-1)]
            for row in range(rows, plan.num_queries):
                step = plan.rows(row, row + 1, num_keys=skip + row + 1)
                out = self._decoder(inputs_embeds=embed(answer[-1]), plan=step, past_key_values=cache, use_cache=True)
                answer.append(head(out.last_hidden_state).argmax(-1))
        return torch.cat(answer, 1)

    @property
    def source(self) -> tuple[str, int, int, str]:
        """What a memory must share to be readable: carrier, chunk size, memory tokens a chunk, layout."""
        return self.carrier, self.chunk, self.memory_tokens, self.layout

    @property
    def _decoder(self) -> nn.Module:
        return cast(Any, self.model).get_decoder()

    @property
    def _embed(self) -> nn.Embedding:
        return cast(Any, self.model).get_input_embeddings()

    @property
    def _head(self) -> nn.Linear:
        return cast(Any, self.model).get_output_embeddings()

    def _decoder_plan(self, memory: Memory, task: Task, text: int) -> Plan:
        """The decoder's plan for `text` tokens, a row for each token that is fed; memory as a cache has none."""
        if task not in TASKS:
            raise ValueError(f"task: expected one of {', '.join(TASKS)}, got {task!r}")
        if memory.source != self.source:
            raise ValueError(
                "memory: expected one made with (carrier, chunk, memory tokens, layout) = "
                f"{self.source}, got one made with {memory.source}"
            )
        plan = decoder_plan(
            memory.context_length,
            self.chunk,
            self.memory_tokens,
            self.layout,
            task,
            self.carrier,
            text,
            str(memory.hidden.device),
        )
        return plan if self.carrier == "embedding" else plan.rows(memory.num_tokens, plan.num_queries)

    def _task_embedding(self, task: Task, memory: Memory) -> Tensor:
        embedding = self.task_embeddings["ae" if task == "ae" else "lm"]
        return embedding.expand(memory.batch_size, 1, -1).to(memory.hidden.dtype)

    def _read(
        self, memory: Memory, inputs: Tensor, plan: Plan, recorder: Recorder | None, keep_cache: bool = False
    ) -> tuple[Tensor, DynamicCache | None]:
        """Hidden states at `inputs` after the memory, and the cache if it is wanted for more tokens."""
        prefix, cache = self._prefix(memory)
        if prefix is not None:
            inputs = torch.cat([prefix, inputs], 1)
        with attach(self.model):
            out = self._decoder(
                inputs_embeds=inputs,
                plan=plan,
                recorder=recorder,
                past_key_values=cache,
                use_cache=keep_cache or cache is not None,
            )
        hidden = out.last_hidden_state
        return (hidden if prefix is None else hidden[:, prefix.shape[1] :]), out.past_key_values
