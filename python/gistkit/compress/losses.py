"""Losses of the compressors, which never hold the logits of all tokens at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gistkit.common.checks import IGNORE, placed

LOSSES = ("ae", "lm", "compression", "qa", "kl", "reverse_kl", "hidden")
LOGITS = 2**25


def check_losses(losses: Iterable[str] | Mapping[str, float]) -> dict[str, float]:
    """{name: weight} of the losses asked for."""
    if losses is None or isinstance(losses, str):
        losses = [str(losses)]
    names = list(losses) if isinstance(losses, Iterable) else [losses]
    if not all(isinstance(name, str) for name in names):
        raise ValueError(f"losses: expected some of {', '.join(LOSSES)}, got {losses!r}")
    weights = dict(losses) if isinstance(losses, Mapping) else dict.fromkeys(names, 1.0)
    if not weights or not set(weights) <= set(LOSSES):
        raise ValueError(f"losses: expected some of {', '.join(LOSSES)}, got {tuple(weights)}")
    if not all(isinstance(weight, Real) and 0 < float(weight) < float("inf") for weight in weights.values()):
        raise ValueError(f"losses: expected weights > 0, got {weights}")
    return {name: float(weights[name]) for name in LOSSES if name in weights}


def _logits(hidden_states: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None) -> Tensor:
    logits = F.linear(hidden_states, weight, bias).float()
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


class _SummedCrossEntropy(torch.autograd.Function):
    """Cross entropy of `hidden_states @ weight.T + bias`, summed; its gradient is made while the logits are there.

    Computing logits again in the backward pass, and a pass over them for each operation, cost more than the products.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        softcap: float | None,
        chunk: int,
        trains: bool,
    ) -> Tensor:
        """A scalar, fp32; `trains`: whether there will be a backward pass, which `forward` cannot see."""
        needs = [trains and need for need in ctx.needs_input_grad[:3]]
        total = hidden_states.new_zeros((), dtype=torch.float32)
        gradients = [
            torch.empty_like(hidden_states) if needs[0] else None,
            torch.zeros_like(weight, dtype=torch.float32) if needs[1] else None,
            torch.zeros_like(bias, dtype=torch.float32) if bias is not None and needs[2] else None,
        ]
        for first in range(0, len(hidden_states), chunk):
            part, labels = hidden_states[first : first + chunk], targets[first : first + chunk, None]
            logits = F.linear(part, weight, bias).float()
            slope = None
            if softcap is not None:
                capped = torch.tanh(logits / softcap)
                logits, slope = softcap * capped, 1 - capped * capped
            counted = labels != IGNORE
            labels = labels.where(counted, 0)
            label_logits = logits.gather(1, labels)
            peak = logits.amax(1, keepdim=True)
            exponentials = logits.sub_(peak).exp_()
            sums = exponentials.sum(1, keepdim=True)
            total += (peak + sums.log() - label_logits).where(counted, 0.0).sum()
            if not any(needs):
                continue
            # softmax(logits) - one_hot(label), 0 in rows that are left out.
            difference = exponentials.mul_(torch.where(counted, 1 / sums, 0.0))
            difference.scatter_add_(1, labels, -counted.to(difference.dtype))
            if slope is not None:
                difference *= slope
            rounded = difference.to(weight.dtype)
            if gradients[0] is not None:
                torch.mm(rounded, weight, out=gradients[0][first : first + chunk])
            if gradients[1] is not None:
                gradients[1] += rounded.t() @ part
            if gradients[2] is not None:
                gradients[2] += difference.sum(0)
        ctx.gradients, ctx.dtypes = gradients, (hidden_states.dtype, weight.dtype, weight.dtype)
        return total

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that `forward` made, times that of the sum."""
        found = [
            None if kept is None else (kept * gradient).to(dtype)
            for kept, dtype in zip(ctx.gradients, ctx.dtypes, strict=True)
        ]
        return *found, None, None, None, None


def token_loss(
    hidden_states: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Mean cross entropy of `hidden_states @ weight.T + bias` and `targets`, with at most `chunk` rows of logits alive.

    Args:
        hidden_states: [..., d] hidden states.
        weight, bias: [V, d] and [V], the output embedding.
        targets: int64 [...], vocabulary ids; -100 is ignored.
        chunk: rows of logits computed at a time, and their gradient with them: it can be differentiated once. None: as
            many as hold 2^25 logits, an eighth of a gigabyte.
        softcap: cap logits to softcap * tanh(logits / softcap), as in Gemma 2; None: no cap.

    Returns:
        A scalar in nats per token, fp32; 0 if all targets are ignored.
    """
    if hidden_states.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets: expected shape {tuple(hidden_states.shape[:-1])} as hidden_states has, "
            f"got {tuple(targets.shape)}"
        )
    chunk = max(1, LOGITS // weight.shape[0]) if chunk is None else chunk
    if chunk < 1:
        raise ValueError(f"chunk: expected at least 1, got {chunk}")
    rows, labels = hidden_states.reshape(-1, hidden_states.shape[-1]), targets.reshape(-1)
    count = (labels != IGNORE).sum().clamp(min=1)
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows, weight, bias = rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(device, enabled=False):
        total = _SummedCrossEntropy.apply(rows, weight, bias, labels, softcap, chunk, torch.is_grad_enabled())
    return total / count


def _summed_divergence(
    hidden_states: Tensor, teacher: Tensor, weight: Tensor, bias: Tensor | None, softcap: float | None
) -> Tensor:
    target, prediction = (_logits(states, weight, bias, softcap).log_softmax(-1) for states in (teacher, hidden_states))
    return F.kl_div(prediction, target, reduction="sum", log_target=True)


def divergence_loss(
    hidden_states: Tensor,
    teacher: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Mean Kullback-Leibler divergence KL(teacher || model) of next tokens, at most `chunk` rows of logits alive.

    Args:
        hidden_states, teacher: [n, d] hidden states of the model and of its teacher, at the same tokens. Both have
            gradients: with the two exchanged it is the reverse divergence, KL(model || teacher).
        weight, bias, softcap: as in `token_loss`.
        chunk: rows of logits computed at a time, of each; they are computed again in the backward pass. None: half as
            many as in `token_loss`.

    Returns:
        A scalar in nats per token, fp32; 0 without tokens.
    """
    chunk = max(1, LOGITS // 2 // weight.shape[0]) if chunk is None else chunk
    total = hidden_states.new_zeros((), dtype=torch.float32)
    for part, teacher_part in zip(hidden_states.split(chunk), teacher.split(chunk), strict=True):
        total = total + checkpoint(_summed_divergence, part, teacher_part, weight, bias, softcap, use_reentrant=False)
    return total / max(hidden_states.shape[0], 1)


def hidden_loss(states: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """Mean over layers of the smooth L1 distance of hidden states, in standard deviations of the teacher's (CompLLM).

    Args:
        states, teacher: of each layer [n, d], of the model and of its teacher, at the same tokens.

    Returns:
        A scalar, fp32; 0 without tokens.
    """
    if not teacher[0].numel():
        return states[0].sum(dtype=torch.float32)
    scales = [goal.float().std() for goal in teacher]
    parts = zip(states, teacher, scales, strict=True)
    return torch.stack([F.smooth_l1_loss(own.float() / s, goal.float() / s) for own, goal, s in parts]).mean()


def segment_targets(context_ids: Tensor, chunk: int, memory: int, lengths: Sequence[int] | None = None) -> Tensor:
    """The context tokens of each memory token's segment: its part of its chunk, in order.

    Args:
        context_ids: int64 [B, p].
        chunk: chunk size L.
        memory: memory tokens M a chunk.
        lengths: context tokens of each row, the rest of which is padding; None: all p.

    Returns:
        int64 [B, kM, ceil(L / M)]; -100 fills shorter segments and padding.
    """
    rows, width = context_ids.shape
    device = context_ids.device
    context = placed([width] * rows if lengths is None else list(lengths), device)[:, None, None]
    first = torch.arange(0, width, chunk, device=device)[:, None]
    length = (context - first).clamp(min=0, max=chunk)
    slot = torch.arange(memory, device=device)
    start, stop = first + slot * length // memory, first + (slot + 1) * length // memory
    index = start[..., None] + torch.arange(-(-chunk // memory), device=device)
    owned = context_ids.gather(1, index.clamp(max=width - 1).flatten(1)).view(index.shape)
    return owned.masked_fill(index >= stop[..., None], IGNORE).flatten(1, 2)


# The heads' one parameter, as a compressor names it.
HEAD = "compression_head.projection.weight"


class CompressionHead(nn.Module):
    """The compression loss: each memory token predicts the context tokens of its own segment at once.

    One linear map per offset o = 0..r-1 takes a memory token's output to the hidden state of its segment's o-th token;
    the model's output embedding makes the logits (More Effective LLM Compressed Tokens, compression loss).

    Args:
        hidden_size: width d of the model.
        offsets: tokens a segment holds at most, ceil(L / M).
    """

    def __init__(self, hidden_size: int, offsets: int) -> None:
        super().__init__()
        self.offsets = offsets
        self.projection = nn.Linear(hidden_size, offsets * hidden_size, bias=False)
        nn.init.normal_(self.projection.weight, std=hidden_size**-0.5)

    def forward(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Mean cross entropy over all targets; hidden_states [B, kM, d], weight [V, d], targets [B, kM, offsets]."""
        projected = self.projection(hidden_states.to(self.projection.weight.dtype)).unflatten(-1, (self.offsets, -1))
        return token_loss(projected.to(weight.dtype), weight, targets, bias=bias, softcap=softcap)


class JointHead(nn.Module):
    """The compression loss with one map from a memory token to the logits of its whole segment, Linear(d, r V).

    It has r V d weights of its own (425 million for SmolLM2 at r = 15) where `CompressionHead` has r d^2.

    Args:
        hidden_size: width d of the model.
        offsets: tokens a segment holds at most, ceil(L / M).
        vocabulary: V.
    """

    def __init__(self, hidden_size: int, offsets: int, vocabulary: int) -> None:
        super().__init__()
        self.offsets = offsets
        self.projection = nn.Linear(hidden_size, offsets * vocabulary, bias=False)

    def forward(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Mean cross entropy over all targets; as `CompressionHead.forward`, without use for weight and bias."""
        hidden_states = hidden_states.to(self.projection.weight.dtype)
        count = (targets != IGNORE).sum().clamp(min=1)
        total = hidden_states.new_zeros((), dtype=torch.float32)
        # An offset at a time: no more than the logits of one token a memory token are alive.
        for offset, part in enumerate(self.projection.weight.chunk(self.offsets)):
            labels = targets[..., offset]
            total = total + token_loss(hidden_states, part, labels, softcap=softcap) * (labels != IGNORE).sum()
        return total / count
