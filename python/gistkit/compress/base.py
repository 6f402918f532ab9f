"""Compressor: the losses, and the one interface of all methods."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gistkit import hf
from gistkit.compress.checks import check_losses
from gistkit.compress.codec import Codec, Task
from gistkit.compress.losses import CompressionHead, JointHead, divergence_loss, segment_targets, token_loss
from gistkit.compress.memory import Memory
from gistkit.compress.tokens import IGNORE, Rows, join_rows, label_rows, pad

if TYPE_CHECKING:
    from peft import LoraConfig


class Compressor(Codec):
    """What all methods share: losses from one compression, generation, joining, and their files.

    Args:
        model, chunk, memory_tokens, layout, reader, window: see `Codec`.
        losses: what `forward` returns, names or {name: weight}: "ae" (reconstruct the context), "lm" (continue it),
            "compression" (each memory token predicts its own segment), "qa" (answer a question about it), "kl" (answer
            it as the base model does that reads the whole context).
        end_token: token id that ends the reconstruction of a context, such as the tokenizer's eos. None: none does.
        joint_head: the compression loss has one map to all logits of a segment in place of one map an offset.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        losses: Iterable[str] | Mapping[str, float],
        end_token: int | None = None,
        joint_head: bool = False,
        **passes: Any,
    ) -> None:
        loss_weights = check_losses(losses)
        super().__init__(model, **passes)
        self.loss_weights = loss_weights
        if end_token is not None and not (isinstance(end_token, int) and 0 <= end_token < self.vocabulary):
            raise ValueError(f"end_token: expected a token id in [0, {self.vocabulary}), got {end_token!r}")
        self.end_token = end_token
        self.joint_head = bool(joint_head)
        self.compression_head: CompressionHead | JointHead | None = None
        if "compression" in loss_weights:
            width, offsets = self.embed.embedding_dim, -(-self.chunk // self.memory_tokens)
            head = JointHead(width, offsets, self.vocabulary) if joint_head else CompressionHead(width, offsets)
            self.compression_head = head.to(self.device)

    @property
    @abstractmethod
    def title(self) -> str:
        """What a table calls it, such as FiveHundredX EPL 5x."""

    def set_losses(self, losses: Iterable[str] | Mapping[str, float]) -> None:
        """Changes what `forward` returns; a compressor made without the compression loss has no head for it."""
        wanted = check_losses(losses)
        self._check_base(wanted, self.adapters is not None)
        if "compression" in wanted and self.compression_head is None:
            raise ValueError("losses: expected no 'compression' for a compressor made without it, got it")
        self.loss_weights = wanted

    def install(self, lora: Mapping[str, LoraConfig] | None) -> None:
        """See `SharedModel.install`."""
        self._check_base(self.loss_weights, lora is not None)
        super().install(lora)

    @staticmethod
    def _check_base(losses: Mapping[str, float], kept: bool) -> None:
        if "kl" in losses and not kept:
            raise ValueError("losses: expected 'kl' beside LoRA, without which the base model is lost, got lora None")

    @classmethod
    def arguments(cls) -> set[str]:
        """The keyword arguments that make one around a model."""
        parameters = inspect.signature(cls).parameters.values()
        return {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}

    @classmethod
    @abstractmethod
    def roles(cls, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Whose adapters one made with these settings has, where it has any."""

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments that made it, but `lora`; JSON values."""
        return {"losses": dict(self.loss_weights), "end_token": self.end_token}

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
            question_ids, answer_ids: the same for the losses "qa" and "kl": the answer is predicted after the question.

        Returns:
            fp32 scalars in nats a token, one for each loss and "loss".
        """
        rows = self.contexts(input_ids, attention_mask)
        answers = next((name for name in ("qa", "kl") if name in self.loss_weights), "")
        given = {"continuation_ids": ("lm", continuation_ids), "question_ids": (answers, question_ids),
                 "answer_ids": (answers, answer_ids)}  # fmt: skip
        texts = {name: self._text(name, *value, rows) for name, value in given.items() if value[0] in self.loss_weights}
        losses: dict[str, Tensor] = {}
        with hf.attach(self.model):
            memory, hidden, compressed = self.compress(rows)
            for name in self.loss_weights:
                if name == "compression" and self.compression_head is not None:
                    targets = self._segments(compressed)
                    losses[name] = self.compression_head(self.readout(hidden), targets=targets, **self.output_embedding)
                elif name == "ae":
                    losses[name] = self._loss(memory, "ae", self._ended(compressed))
                elif name == "lm":
                    losses[name] = self._loss(memory, "lm", texts["continuation_ids"])
            if answers:
                losses |= self._answer_losses(memory, rows, texts["question_ids"], texts["answer_ids"])
        weighted = [weight * losses[name] for name, weight in self.loss_weights.items()]
        losses["loss"] = torch.stack(weighted).sum() / sum(self.loss_weights.values())
        return losses

    def parameter_groups(self, learning_rate: float, memory_factor: float = 3.0) -> list[dict[str, Any]]:
        """The parameters for an optimizer, those of the gists with a learning rate `memory_factor` times as high.

        GistPool, Section 5.2: parameters that compress need a higher learning rate.
        """
        if not memory_factor > 0:
            raise ValueError(f"memory_factor: expected a number > 0, got {memory_factor}")
        own: list[nn.Parameter] = []
        text: list[nn.Parameter] = []
        for name, parameter in self.trainable():
            (own if self.of_gists(name) else text).append(parameter)
        groups = [{"params": text, "lr": learning_rate}, {"params": own, "lr": learning_rate * memory_factor}]
        return [group for group in groups if group["params"]]

    def of_gists(self, name: str) -> bool:
        """Whether a parameter, by its name, serves gists alone."""
        return False

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

    @property
    def output_embedding(self) -> dict[str, Any]:
        """What the losses make logits with."""
        return {"weight": self.head.weight, "bias": self.head.bias, "softcap": self.softcap}

    def _segments(self, compressed: Rows) -> Tensor:
        """The context tokens that each memory token's compression loss asks for."""
        return segment_targets(compressed.ids, self.chunk, self.memory_tokens, compressed.lengths)

    def _loss(self, memory: Memory, task: Task, text: Rows) -> Tensor:
        """Mean loss of the tokens of a text behind the memory; the last token of a row predicts nothing."""
        hidden = self.read(memory, task, _but_last(text))
        targets = text.ids.where(text.valid, IGNORE)
        return token_loss(self.readout(hidden), targets=targets, **self.output_embedding)

    def _answer_losses(self, memory: Memory, contexts: Rows, question: Rows, answer: Rows) -> dict[str, Tensor]:
        """The losses "qa" and "kl", those that are asked for, of the answers' tokens behind the questions."""
        text = join_rows(question, answer)
        hidden = self.read(memory, "qa", _but_last(text))
        columns = torch.arange(text.ids.shape[1], device=text.ids.device)
        asked = text.valid & (columns >= torch.tensor(question.lengths, device=text.ids.device)[:, None])
        losses = {}
        if "qa" in self.loss_weights:
            targets = text.ids.where(asked, IGNORE)
            losses["qa"] = token_loss(self.readout(hidden), targets=targets, **self.output_embedding)
        if "kl" in self.loss_weights:
            teacher = self._taught(self.uncompressed(contexts), text)
            states = (self.readout(each[asked]) for each in (hidden, teacher))
            losses["kl"] = divergence_loss(*states, **self.output_embedding)
        return losses

    @torch.no_grad()
    def _taught(self, contexts: Rows, text: Rows) -> Tensor:
        """Hidden states [B, T, d] before each token of `text` in the base model that reads the whole context."""
        rows = _but_last(join_rows(contexts, text))
        plan = self.causal_plan(rows.ids.shape[1])
        hidden = self.run(None, inputs_embeds=self.embed(rows.ids), plan=plan).last_hidden_state
        start = torch.tensor(contexts.lengths, device=hidden.device)[:, None] - 1
        index = start + torch.arange(text.ids.shape[1], device=hidden.device)
        return hidden.take_along_dim(index.clamp(max=hidden.shape[1] - 1)[..., None], 1)

    def uncompressed(self, contexts: Rows) -> Rows:
        """Contexts as the base model reads them whole."""
        return contexts


def _but_last(rows: Rows) -> Rows:
    return Rows(rows.ids[:, :-1], tuple(max(length - 1, 0) for length in rows.lengths))
