"""InPlace: one pass over [BOS][context], of whose activations the text reads some in the context's place."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gistkit import hf
from gistkit.compress.base import Compressor
from gistkit.compress.codec import Task, draw_like
from gistkit.compress.copies import Copies
from gistkit.compress.memory import Memory
from gistkit.compress.pretrained import LATER
from gistkit.compress.shared import Maps, adapter_config
from gistkit.compress.tokens import Rows, join_rows

if TYPE_CHECKING:
    from peft import LoraConfig


TEXT, GISTS = "text", "memory"
FLAGS = {
    "offset", "separate", "full_copy", "separate_positions", "memory_sees_memory", "memory_sees_itself",
    "memory_sees_bos", "context_sees_memory", "train_scorer",
}  # fmt: skip


class Common(TypedDict, total=False):
    """The keyword arguments that all in-place methods share, as `InPlace` tells; NoContext has no window."""

    losses: Iterable[str] | Mapping[str, float]
    lora: int | LoraConfig | None
    window: int | None
    end_token: int | None
    bos_token: int | None


class InPlace(Compressor):
    """What methods that compress in place share: Gist, AvgPool and GistPool (Getting to the Gist of Gisting), Dodo.

    The context is read once, behind BOS; of it remain the keys and values of BOS and of one compressed token for every
    `ratio` context tokens. The text follows them directly, at the position ids of the uncompressed order; only a
    reconstruction is asked for by a learned [AE] token.

    Args:
        model: a transformers causal language model; one copy of its weights reads context and text.
        ratio: context tokens a compressed token stands for, a whole number >= 1; no context may be shorter.
        options: what else of its arguments a method has, by name; JSON values.
        separate: what compresses has parameters of its own.
        full_copy: with `separate`, those are a copy of the layers' linear maps, whatever `lora` is.
        losses, end_token: as in `Compressor`.
        lora: rank of a PEFT LoRA on all linear maps of the layers (alpha is twice the rank), or a peft.LoraConfig; with
            `separate` one for context and text and, without `full_copy`, one for gists. The base weights are frozen.
            None: the model's own weights train, and with `separate` a copy of its linear maps.
        window: a longer context is compressed in its first `window` tokens, and the others are read as they are.
        bos_token: id of the token that all others see; None: the first token, or else the end token, of the model's
            configuration. A context that begins with it is not given another.
    """

    carrier = "kv"
    # Compressed tokens are learned tokens of the pass, beside the context's.
    has_gists = False
    # Which linear maps a rank given as `lora` is of.
    maps: Maps = "all"

    @property
    def needs_projections(self) -> bool:
        """Whether keys are made of hidden states beside the pass."""
        return False

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        ratio: int,
        options: Mapping[str, Any],
        separate: bool = False,
        full_copy: bool = False,
        losses: Iterable[str] | Mapping[str, float] = ("qa",),
        lora: int | LoraConfig | None = 64,
        window: int | None = None,
        end_token: int | None = None,
        bos_token: int | None = None,
    ) -> None:
        ratio = whole("ratio", ratio)
        self._options = dict(options)
        for name in FLAGS & self._options.keys():
            if not isinstance(self._options[name], bool):
                raise ValueError(f"{name}: expected True or False, got {self._options[name]!r}")
        super().__init__(
            model,
            chunk=ratio,
            memory_tokens=1,
            layout=json.dumps(_of_layout(self._options), sort_keys=True),
            losses=losses,
            reader=TEXT,
            window=window,
            end_token=end_token,
        )
        if full_copy and not separate:
            raise ValueError("full_copy: expected separate=True with it, got separate=False")
        if self.needs_projections or separate:
            hf.check_projects(model)
        if window is not None and window < ratio:
            raise ValueError(f"window: expected at least the ratio, {ratio} tokens, got {window}")
        if "compression" in self.loss_weights and not self.has_gists:
            raise ValueError(f"losses: expected no 'compression' for {self.method}, which has no gists, got it")
        self.bos_token = self.first_token("bos_token", bos_token)
        self.separate = separate
        config = adapter_config(model, lora, self.maps)
        if full_copy and config is not None:
            _check_copied(model, config)
        self.install(None if config is None else dict.fromkeys(self.roles(self._options), config))
        if separate and (config is None or full_copy):
            self.copies = Copies(model, GISTS)
        self.task_embeddings = nn.ParameterDict({"ae": draw_like(self.embed, 1)})

    @classmethod
    def roles(cls, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Whose adapters one made with these settings has, where it has any."""
        return (TEXT, GISTS) if settings.get("separate") and not settings.get("full_copy") else (TEXT,)

    @classmethod
    def arguments(cls) -> set[str]:
        """The keyword arguments that make one around a model."""
        return super().arguments() | Common.__annotations__.keys()

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments that made it, but `lora`; JSON values."""
        own = {"ratio": self.chunk, "window": self.window, "bos_token": self.bos_token} | self._options
        return own | super().settings

    @property
    def title(self) -> str:
        """What a table calls it."""
        return f"{type(self).__name__} {self.chunk}x"

    def contexts(self, input_ids: Any, attention_mask: Any = None, shortest: int | None = None) -> Rows:
        """`rows` of contexts, each of `shortest` tokens beside BOS; None: of as many as are compressed."""
        shortest = self.shortest if shortest is None else shortest
        rows = self.rows("input_ids", input_ids, attention_mask, shortest=shortest)
        least = min(length - given for length, given in zip(rows.lengths, self._given_bos(rows), strict=True))
        if least < shortest:
            raise ValueError(f"input_ids: expected at least {shortest} tokens beside the first token, got {least}")
        return rows

    def uncompressed(self, contexts: Rows) -> Rows:
        """Contexts as the base model reads them whole."""
        return self.behind_bos(contexts)

    def behind_bos(self, rows: Rows) -> Rows:
        """The rows with BOS before them, where they do not begin with it."""
        given = self._given_bos(rows)
        if all(given):
            return rows
        first = Rows(torch.full_like(rows.ids[:, :1], self.bos_token), tuple(1 - there for there in given))
        return join_rows(first, rows)

    def task_embedding(self, task: Task, memory: Memory) -> Tensor:
        """[B, 1, d], the learned [AE] token, or [B, 0, d]: any other text follows the memory directly."""
        embedding = self.task_embeddings["ae"][: int(task == "ae")]
        return embedding.expand(memory.batch_size, -1, -1).to(self.embed.weight.dtype)

    def places(self, memory: Memory) -> tuple[Tensor, tuple[int, ...]]:
        """Places in the uncompressed order: what position ids are where all tokens share a counter."""
        return memory.positions.floor().long(), memory.starts

    def limits(self, rows: Rows, window: int) -> tuple[int, ...]:
        """How many tokens of each row a window compresses; BOS is none of them."""
        return tuple(window + given for given in self._given_bos(rows))

    def as_text(self) -> Any:
        """A context in which layers have the text's parameters for all rows they are given."""
        return self.all_rows_as(TEXT) if self.separate else nullcontext()

    def of_gists(self, name: str) -> bool:
        """Whether a parameter, by its name, serves gists alone."""
        if name.startswith(("memory_embeddings", "copies.")):
            return True
        adapter = None if self.adapters is None else self.adapters.names.get(GISTS)
        return adapter is not None and adapter in name.split(".")

    def join(self, memories: Sequence[Memory]) -> NoReturn:
        """Refused: a document compressed in place has read those before it."""
        raise ValueError(
            f"memories: expected those of a method that compresses chunks by themselves, got {self.method}'s; encode "
            "the documents as one context"
        )

    def _given_bos(self, rows: Rows) -> list[int]:
        """1 for each row that begins with BOS, 0 for the others."""
        return (rows.ids[:, 0] == self.bos_token).int().tolist()  # type: ignore[no-any-return]

    def _segments(self, compressed: Rows) -> Tensor:
        context = self.behind_bos(compressed)
        return super()._segments(Rows(context.ids[:, 1:], tuple(length - 1 for length in context.lengths)))


def _of_layout(options: Mapping[str, Any]) -> dict[str, Any]:
    # Memories that are older than a choice name the same layout.
    return {name: value for name, value in options.items() if name not in LATER or value != LATER[name]}


def _check_copied(model: PreTrainedModel, config: LoraConfig) -> None:
    """Refuses adapters that the gists' copies of the linear maps would be without."""
    from gistkit.compress.adapters import active_adapters

    if active := active_adapters(model):
        raise ValueError(f"full_copy: expected a model without other active adapters, got {', '.join(active)}")
    if config.modules_to_save:
        raise ValueError(f"lora: expected no modules_to_save beside full_copy, got {sorted(config.modules_to_save)}")


def whole(name: str, value: Any) -> int:
    """`value` as an int of at least 1; a float that is one will do."""
    number = isinstance(value, int | float | np.integer) and not isinstance(value, bool)
    if not number or not 1 <= value < math.inf or value != int(value):
        raise ValueError(f"{name}: expected a whole number >= 1, got {value!r}")
    return int(value)
