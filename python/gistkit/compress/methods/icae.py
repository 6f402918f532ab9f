"""ICAE and 500xCompressor: each chunk of a context is encoded into learned memory tokens that follow it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from gistkit import hf
from gistkit.common.checks import check_float
from gistkit.compress.compressor import Compressor
from gistkit.compress.config import Config, draw_like, matched_to, register, setting
from gistkit.compress.memory import Memory, Task
from gistkit.compress.plans import encoder_parts, encoder_pass
from gistkit.compress.tokens import Rows, room
from gistkit.hf.keep import Layers
from gistkit.layouts import Plan
from gistkit.layouts.positions import SCHEMES

if TYPE_CHECKING:
    from peft import LoraConfig

ENCODER = "encoder"


@dataclass(frozen=True, kw_only=True)
class ChunkConfig(Config):
    """The arguments that methods with chunks share.

    Args:
        chunk: chunk size L in tokens.
        ratio: compression ratio r >= 1, context tokens per memory token; chunk / ratio must be a whole number.
        layout: "dpl", "upl", "epl" or "cpl" (only the decoder half of EPL).
        lora: rank of a PEFT LoRA on the encoder's query and value projections (alpha is twice the rank), or a
            peft.LoraConfig; the base weights are frozen and the decoder runs without the adapter, or with it if
            shared_lora is set. None: the model's own weights train, in encoder and decoder.
        embedding_lora: beside a rank, that of LoRA on the encoder's input embedding; None: no LoRA there.
        train_norms: beside a rank, the encoder has norms of its own, which train; the decoder keeps the model's. (More
            Effective LLM Compressed Tokens, Section 3: lora 16, embedding_lora 128, train_norms.)
        shared_lora: the decoder runs with the encoder's adapter, norms among it, as that paper's released code has it.
        window: the first `window` tokens of a longer context are compressed, and the decoder reads the others
            uncompressed, after [LM] (More Effective LLM Compressed Tokens, section 2.2). None: all are compressed.
        end_token: token id that ends the reconstruction of a context, such as the tokenizer's eos. None: no token.
        joint_head: the compression loss has one map to all logits of a segment, instead of one map for each offset.
    """

    losses: Iterable[str] | Mapping[str, float] = setting(("ae", "lm"), in_memory=False)
    lora: int | LoraConfig | None = setting(128, in_memory=False)
    chunk: int = setting(510, least=1, in_memory=False)
    ratio: float = setting(5, in_memory=False)
    layout: str = setting("epl", among=SCHEMES)
    shared_lora: bool = setting(False, before=False, in_memory=False)
    window: int | None = setting(None, least=1, in_memory=False)
    end_token: int | None = setting(None, in_memory=False)
    joint_head: bool = setting(False, in_memory=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("ratio", self.chunk / check_divides(self.chunk, self.ratio))
        if self.shared_lora and self.lora is None:
            raise ValueError(
                "shared_lora: expected False without LoRA, because encoder and decoder are then the same, got True"
            )

    @property
    def memory_tokens(self) -> int:
        return round(self.chunk / self.ratio)

    @property
    def roles(self) -> tuple[str, ...]:
        return (ENCODER,)

    @classmethod
    def sizes(cls, chunk: int, memory_tokens: int) -> dict[str, Any]:
        return {"chunk": chunk, "ratio": chunk / memory_tokens}

    def parts(self, embed: nn.Embedding) -> dict[str, nn.Parameter | nn.Module | None]:
        memory = draw_like(embed, self.memory_tokens)
        tasks = nn.ParameterDict({task: draw_like(embed, 1) for task in ("ae", "lm")})
        return {"memory_embeddings": memory, "task_embeddings": tasks}

    def kept(self, compressor: Any, hidden_states: Tensor, layers: Layers) -> tuple[Tensor, ...]:
        """What the memory keeps, [..., K, .] each, of its tokens' hidden states [B, K, d] or keys and values."""
        return tuple(tensor for layer in layers for tensor in layer) if self.carrier == "kv" else (hidden_states,)

    def contents(self, kept: Sequence[Tensor]) -> dict[str, Any]:
        """The memory's `embeddings` or `layers`, from what `kept` returned."""
        if self.carrier == "embedding":
            return {"embeddings": kept[0]}
        return {"layers": tuple(zip(kept[::2], kept[1::2], strict=True))}


class ChunkCompressor(Compressor):
    """Compresses chunks of a context into memory tokens, which the same model reads instead.

    A context of p tokens is cut into k = ceil(p / chunk) chunks. Each chunk is followed by M = chunk / ratio learned
    memory tokens and encoded separately. What the memory keeps of the memory tokens depends on the method's carrier.
    The decoder reads [memory][task token][tokens]. Position IDs follow the layout (Position IDs Matter, Tables 1-3 and
    12-15).

    Args:
        model: a transformers causal language model; encoder and decoder share its one copy of the weights.
        config: a `ChunkConfig`; its fields may be given by name instead.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """

    options: Any
    memory_embeddings: nn.Parameter
    task_embeddings: nn.ParameterDict

    def install(self) -> None:
        self.reader = ENCODER if self.options.shared_lora else None
        super().install()

    def starts(self, memory: Memory, task: Task) -> tuple[int, ...]:
        """See `Compressor.starts`; a reconstruction has the positions of the context where the layout keeps them."""
        return (0,) * memory.batch_size if task == "ae" and memory.source.consistent else memory.starts

    def rotated_over(self, memory: Memory) -> int:
        """See `Compressor.rotated_over`; all chunks are read in one pass."""
        longest = max(memory.context_lengths)
        return longest + 1 if memory.source.numbered_through else min(longest, self.chunk) + self.memory_tokens

    def encode_rows(self, rows: Rows) -> tuple[Memory, Tensor | None]:
        """One pass over all chunks of all rows; of a long context, without gradients, a pass over some of them each."""
        chunks = (rows.lengths, self.options.chunk, self.options.memory_tokens, self.layout)
        places = encoder_pass(*chunks, self.carrier)
        self.lm.check_positions("input_ids", places.last)
        parts = encoder_parts(*chunks, self.lm.windows, str(self.device), self._most(rows))
        made = [*zip(*(self._encoded(rows.ids[:, columns], plan) for columns, plan in parts), strict=True)]
        # One tensor after another, so that there are never two copies of all. A view of the hidden states would keep
        # those of the context alive.
        hidden_states, *kept = (torch.cat(made.pop(0), -2) for _ in range(len(made)))
        return self.remember(places, rows, **self.options.contents(kept)), hidden_states

    def _most(self, rows: Rows) -> int | None:
        """Tokens of a pass at most, which has the same chunks of each row; None: one pass has all.

        A chunk is the same in any pass, unless frequencies of RoPE depend on the length of a pass.
        """
        alike = len({-(-length // self.options.chunk) for length in rows.lengths}) == 1
        one_pass = torch.is_grad_enabled() or not alike or self.lm.changing_rope
        most = room(self.device)
        return None if one_pass or rows.batch_size * rows.ids.shape[1] <= most else most

    def _encoded(self, ids: Tensor, plan: Plan) -> tuple[Tensor, ...]:
        """A pass over chunks [B, N]: the hidden states [B, K, d] of their memory tokens, and what the memory keeps."""
        columns = ids.shape[1]
        embedded = self.lm.embedded(ENCODER, ids)
        slots = self.memory_embeddings.repeat(-(-columns // self.options.chunk), 1)
        inputs = torch.cat([embedded, slots.to(embedded).expand(len(ids), -1, -1)], 1)
        keep = hf.KeptKeys(slice(columns, None)) if self.carrier == "kv" else None
        out = self.lm.run(ENCODER, inputs_embeds=inputs, plan=plan, keep=keep)
        hidden_states = out.last_hidden_state[:, columns:]
        return hidden_states, *self.options.kept(self, hidden_states, () if keep is None else keep.close())

    def size(self, context: int, ratio: int | None = None) -> int:
        return -(-context // self.chunk) * self.memory_tokens

    def check_documents(self, memories: Sequence[Memory]) -> None:
        """Refuses a model whose keys cannot be moved where they are, or differ by document."""
        if self.carrier == "kv" and (self.lm.changing_rope or memories[0].source.numbered_through):
            hf.check_moves(self.model)

    def parts_of(self, memory: Memory, context: int) -> NDArray[np.int64]:
        """See `Compressor.parts_of`: memory token m of a chunk stands for its m-th part of M, in whole tokens."""
        part, spans = np.arange(self.memory_tokens), []
        for start in range(0, context, self.chunk):
            length = min(self.chunk, context - start)
            ends = -(-(part + 1) * length // self.memory_tokens)
            spans.append(start + np.stack([part * length // self.memory_tokens, ends], -1))
        return np.concatenate(spans)

    def task_embedding(self, task: Task, memory: Memory) -> Tensor:
        embedding = self.task_embeddings["ae" if task == "ae" else "lm"]
        return embedding.expand(memory.batch_size, 1, -1).to(self.embed.weight)


@register("icae")
@dataclass(frozen=True, kw_only=True)
class ICAEConfig(ChunkConfig):
    """In-context autoencoder (Ge et al.), with the position layouts of Position IDs Matter.

    Args:
        match_embeddings: the decoder reads rms_norm(h) * gain + shift instead of the encoder's outputs h. Gain and
            shift are learned, [d] each, and initialised with the spread and the mean of the token embeddings, so that
            the decoder's inputs have their usual size: SmolLM2-135M's outputs are 16 times as large. Not in a paper.
    """

    carrier: ClassVar[str] = "embedding"

    match_embeddings: bool = setting(False, before=False, in_memory=False)

    def parts(self, embed: nn.Embedding) -> dict[str, nn.Parameter | nn.Module | None]:
        gain, shift = matched_to(embed) if self.match_embeddings else (None, None)
        return super().parts(embed) | {"gain": gain, "shift": shift}

    def kept(self, compressor: Any, hidden_states: Tensor, layers: Layers) -> tuple[Tensor, ...]:
        if not self.match_embeddings:
            return super().kept(compressor, hidden_states, layers)
        matched = rms_norm(hidden_states.float(), compressor.gain.shape) * compressor.gain + compressor.shift
        return (matched.to(hidden_states.dtype),)


class ICAE(ChunkCompressor, config=ICAEConfig):
    """ICAE; arguments are those of `ICAEConfig` and `ChunkConfig`."""


@register("x500")
@dataclass(frozen=True, kw_only=True)
class FiveHundredXConfig(ChunkConfig):
    """500xCompressor (Li et al.), with the position layouts of Position IDs Matter.

    Keys keep the rotation of their encoder position IDs; the decoder's tokens take theirs from the layout.
    """


class FiveHundredX(ChunkCompressor, config=FiveHundredXConfig):
    """500xCompressor; arguments are those of `ChunkConfig`."""


def check_divides(chunk: int, ratio: float) -> int:
    """Memory tokens M = chunk / ratio of a chunk, which must be a whole number."""
    check_float("ratio", ratio, 1)
    tokens = chunk / Fraction(float(ratio)).limit_denominator(10**6)
    if tokens.denominator != 1:
        small = [divisor for divisor in range(1, math.isqrt(chunk) + 1) if chunk % divisor == 0]
        divisors = sorted({*small, *(chunk // divisor for divisor in small)})
        nearest = sorted(sorted(divisors, key=lambda divisor: abs(divisor - ratio))[:2])
        raise ValueError(
            f"ratio: expected one that divides chunk {chunk} into whole memory tokens, such as "
            f"{' or '.join(map(str, nearest))}, got {ratio}"
        )
    return int(tokens)
