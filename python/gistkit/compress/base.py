"""Compressor: the losses, and the one interface of all methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gistkit import hf
from gistkit.compress.checks import check_losses
from gistkit.compress.codec import Codec, Task
from gistkit.compress.losses import CompressionHead, JointHead, segment_targets, token_loss
from gistkit.compress.memory import Memory
from gistkit.compress.tokens import IGNORE, Rows, join_rows, label_rows, pad

if TYPE_CHECKING:
    from peft import LoraConfig


class Compressor(Codec):
    """Compresses chunks of a context into memory tokens that the same model reads in their place.

    A context of p tokens is cut into k = ceil(p / chunk) chunks; each is followed by M = chunk / ratio learned memory
    tokens and encoded by itself. What the memory tokens leave behind depends on the method (its carrier). The decoder
    reads [memory][task token][tokens]. Position ids follow the layout (Position IDs Matter, Tables 1-3 and 12-15).

    Args:
        model: a transformers causal language model; encoder and decoder share its one copy of the weights.
        chunk: chunk size L in tokens.
        ratio: compression ratio r >= 1, context tokens a memory token stands for; chunk / ratio must be whole.
        layout: "dpl", "upl", "epl" or "cpl" (the decoder half of EPL alone).
        losses: what `forward` returns, names or {name: weight}: "ae" (reconstruct the context), "lm" (continue it),
            "compression" (each memory token predicts its own segment), "qa" (answer a question about it).
        lora: rank of a PEFT LoRA on the encoder's query and value projections (alpha is twice the rank), or a
            peft.LoraConfig; the base weights are frozen and the decoder runs without the adapter. None: the model's own
            weights train, in encoder and decoder.
        window: a longer context is compressed in its first `window` tokens, and the decoder reads the others as they
            are, after [LM] (More Effective LLM Compressed Tokens, section 2.2). None: all of it is compressed.
        end_token: token id that ends the reconstruction of a context, such as the tokenizer's eos. None: none does.
        joint_head: the compression loss has one map to all logits of a segment in place of one map an offset.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        chunk: int = 510,
        ratio: float = 5,
        layout: str = "epl",
        losses: Iterable[str] | Mapping[str, float] = ("ae", "lm"),
        lora: int | LoraConfig | None = 128,
        window: int | None = None,
        end_token: int | None = None,
        joint_head: bool = False,
    ) -> None:
        loss_weights = check_losses(losses)
        super().__init__(model, chunk, ratio, layout, lora, window)
        self.loss_weights = loss_weights
        if end_token is not None and not (isinstance(end_token, int) and 0 <= end_token < self.vocabulary):
            raise ValueError(f"end_token: expected a token id in [0, {self.vocabulary}), got {end_token!r}")
        self.end_token = end_token
        self.compression_head: CompressionHead | JointHead | None = None
        if "compression" in loss_weights:
            width, offsets = self.memory_embeddings.shape[1], -(-chunk // self.memory_tokens)
            head = JointHead(width, offsets, self.vocabulary) if joint_head else CompressionHead(width, offsets)
            self.compression_head = head.to(self.device)

    def forward(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        *,
        continuation_ids: Any = None,
        question_ids: Any = None,
        answer_ids: Any = None,
    ) -> dict[str, Tensor]:
        """The losses named at construction, from one shared compression, and their weighted mean as "loss".

        Args:
            input_ids, attention_mask: the contexts, as in `encode`.
            continuation_ids: int64 [B, t], the tokens after each context, padded with -100 at the end, or lists; needed
                for the "lm" loss alone.
            question_ids, answer_ids: the same for the "qa" loss: the answer is predicted after [LM] and the question.

        Returns:
            fp32 scalars in nats a token, one for each loss and "loss".
        """
        rows = self.contexts(input_ids, attention_mask)
        given = {"continuation_ids": ("lm", continuation_ids), "question_ids": ("qa", question_ids),
                 "answer_ids": ("qa", answer_ids)}  # fmt: skip
        texts = {name: self._text(name, *value, rows) for name, value in given.items() if value[0] in self.loss_weights}
        losses: dict[str, Tensor] = {}
        with hf.attach(self.model):
            memory, hidden, compressed = self.compress(rows)
            for name in self.loss_weights:
                if name == "compression" and self.compression_head is not None:
                    targets = segment_targets(compressed.ids, self.chunk, self.memory_tokens, compressed.lengths)
                    losses[name] = self.compression_head(hidden, self.head.weight, targets, softcap=self.softcap)
                elif name == "ae":
                    losses[name] = self._loss(memory, "ae", self._ended(compressed))
                elif name == "lm":
                    losses[name] = self._loss(memory, "lm", texts["continuation_ids"])
                elif name == "qa":
                    question, answer = texts["question_ids"], texts["answer_ids"]
                    losses[name] = self._loss(memory, "qa", join_rows(question, answer), question.lengths)
        weighted = [weight * losses[name] for name, weight in self.loss_weights.items()]
        losses["loss"] = torch.stack(weighted).sum() / sum(self.loss_weights.values())
        return losses

    def generate(self, memory: Memory, prompt_ids: Any = None, attention_mask: Any = None, **options: Any) -> Tensor:
        """Tokens that follow [memory][task token][prompt]; see `gistkit.compress.generation.generate`."""
        from gistkit.compress.generation import generate

        return generate(self, memory, prompt_ids, attention_mask, **options)

    def join(self, memories: Sequence[Memory]) -> Memory:
        """Several documents, a memory each, as one context in that order; see `gistkit.compress.joining.join`."""
        from gistkit.compress.joining import join

        return join(self, memories)

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes what training changed: safetensors, the PEFT adapter, and compressor.json with the settings."""
        from gistkit.compress.pretrained import save

        save(self, Path(folder))

    @classmethod
    def from_pretrained(cls, folder: str | Path, model: PreTrainedModel | None = None) -> Compressor:
        """The compressor that `save_pretrained` wrote, around its base model.

        Args:
            folder: what `save_pretrained` wrote.
            model: the base model; None where the folder holds one (a compressor without LoRA).

        Raises:
            FileNotFoundError, ValueError: if the folder holds none, or one of another model, method or version.
        """
        from gistkit.compress.pretrained import load

        return load(cls, Path(folder), model)

    def _text(self, name: str, task: str, ids: Any, contexts: Rows) -> Rows:
        if ids is None:
            raise ValueError(f"{name}: expected int64 [B, t] for the {task} loss, got None")
        rows = label_rows(name, ids, vocabulary=self.vocabulary, device=self.device)
        if rows.batch_size != contexts.batch_size:
            raise ValueError(f"{name}: expected {contexts.batch_size} rows as input_ids has, got {rows.batch_size}")
        if not rows.ids.shape[1] and name != "question_ids":
            raise ValueError(f"{name}: expected tokens to predict, got empty rows")
        return rows

    def _ended(self, rows: Rows) -> Rows:
        if self.end_token is None:
            return rows
        return join_rows(rows, pad([[self.end_token]] * rows.batch_size, rows.ids.device))

    def _loss(self, memory: Memory, task: Task, text: Rows, prompt: Sequence[int] = (0,)) -> Tensor:
        """Mean loss of each row's tokens beyond its first `prompt`; the last token of a row predicts nothing."""
        fed = Rows(text.ids[:, :-1], tuple(max(length - 1, 0) for length in text.lengths))
        hidden = self.read(memory, task, fed)
        columns = torch.arange(text.ids.shape[1], device=text.ids.device)
        asked = columns >= torch.tensor(prompt, device=text.ids.device)[:, None]
        targets = text.ids.where(text.valid & asked, IGNORE)
        return token_loss(hidden, self.head.weight, targets, softcap=self.softcap)
