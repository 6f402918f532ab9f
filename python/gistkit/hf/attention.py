"""gistkit's attention and RoPE in transformers' calling convention, and the forwards of layers that run on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_rope_utils import dynamic_rope_update

from gistkit import ops
from gistkit.hf.cache import CACHE
from gistkit.hf.carry import Carried
from gistkit.hf.keep import Keeper, Layers
from gistkit.hf.packed import PackedLayers
from gistkit.hf.parts import Family
from gistkit.layouts import Plan, causal_plan


def window_of(family: Family, attention: nn.Module) -> int | None:
    """Width of the sliding window of an attention module; None where it sees everything."""
    if family.window is None:
        return None
    holder: Any = attention if family.window == "layer" else attention.config
    return cast("int | None", holder.sliding_window)


@lru_cache
def all_tokens(device: torch.device) -> Tensor:
    """A mask of all tokens, once it is expanded, which nobody has to look into."""
    with torch.inference_mode(False):
        return torch.ones(1, 1, dtype=torch.bool, device=device)


class Rotation(NamedTuple):
    """Replaces cos and sin in a layer; it puts positions into queries and keys."""

    position_ids: Tensor
    inv_freq: Tensor
    scaling: float

    def __call__(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return ops.rope(query, key, self.position_ids, self.inv_freq, scaling=self.scaling)


@torch.no_grad()
def rotary_forward(self: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Rotation:
    """Passes position IDs and frequencies on: the fused op computes the angles itself."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    kind = self.rope_type if layer_type is None else self.rope_type[layer_type]
    cached = f"{prefix}max_seq_len_cached"
    if kind == "dynamic" and getattr(self, cached, self.max_seq_len_cached) > self.original_max_seq_len:
        # A shorter pass would have the frequencies of the longest one before it.
        original = getattr(self, f"{prefix}original_inv_freq").to(x.device)
        self.register_buffer(f"{prefix}inv_freq", original, persistent=False)
        setattr(self, cached, self.original_max_seq_len)
    return _own_rotation(self, x, position_ids, layer_type)  # type: ignore[no-any-return]


@dynamic_rope_update
def _own_rotation(self: Any, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Rotation:
    """The rotation with the frequencies of a pass of this length."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    inv_freq = getattr(self, f"{prefix}inv_freq")
    if hasattr(self, f"{prefix}long_inv_freq"):
        # The next pass writes its own frequencies into the buffer, which the backward pass of this one still needs.
        inv_freq = inv_freq.clone()
    return Rotation(position_ids, inv_freq, getattr(self, f"{prefix}attention_scaling"))


def norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """An RMS norm as one operation of a GPU instead of seven, which keeps one copy for the backward pass."""
    x, weight = hidden_states, self.weight
    wide = x.dtype == torch.float64 or x.dtype != weight.dtype
    if x.is_cpu or wide or torch.is_autocast_enabled(x.device.type):
        return type(self).forward(self, x)  # type: ignore[no-any-return]
    return F.rms_norm(x, weight.shape, weight, self.variance_epsilon)


@lru_cache
def attention_forward(family: Family) -> Callable[..., tuple[Tensor, None]]:
    """The forward of an attention layer with RoPE, as all families have it."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        attention_mask: int | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        cache = kwargs.pop(CACHE, None)
        batch, length, _ = hidden_states.shape
        heads = (batch, length, -1, self.head_dim)
        query = self.q_proj(hidden_states).view(heads).transpose(1, 2)
        key = self.k_proj(hidden_states).view(heads).transpose(1, 2)
        value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)

        query, key = position_embeddings(query, key)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)

        out, _ = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            scaling=self.scaling,
            dropout=float(self.attention_dropout or 0.0) if self.training else 0.0,
            softcap=self.attn_logit_softcapping if family.softcap else None,
            sliding_window=window_of(family, self),
            **kwargs,
        )
        return self.o_proj(out.reshape(batch, length, -1)), None

    return forward


# The arguments of `model(...)` under `attach`. Transformers passes any other name on without an error.
ARGUMENTS = ("plan", "memory", "keep", "key_bias", "extend", "parts")
# Arguments of other families' attention that gistkit's does not have.
_REFUSED = {
    "s_aux": "attention sinks",
    "position_bias": "a bias for each pair of tokens",
    "attention_bias": "a bias for each pair of tokens",
    "head_mask": "masked heads",
}

Extend = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


class Part(NamedTuple):
    """Tokens of a pass of one row [1, T, d] that attention takes as B rows of N.

    Args:
        tokens: int64 [B, N], which of the T they are; any at the end of a shorter row.
        rows: B rows of the keys and values that the cache gives.
        plan, memory, key_bias: as in a pass of these rows.
    """

    tokens: Tensor
    rows: slice
    plan: Plan
    memory: PackedLayers | None
    key_bias: Sequence[Tensor] | None


class Parts(NamedTuple):
    """A pass of one row whose attention is that of several rows, all other maps being of tokens.

    Args:
        each: parts that have all the tokens, in their order.
        real: int64 [T], which of the tokens of all parts are not the end of a shorter row; None: all.
    """

    each: Sequence[Part]
    real: Tensor | None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, call: Callable[..., tuple[Tensor, None]]) -> Tensor:
        """[1, T, Hq, D], by a call of `attention` for each part."""
        outs = []
        for tokens, rows, plan, memory, key_bias in self.each:
            own = (tensor[rows, :, : plan.num_keys] for tensor in (key, value))
            out, _ = call(query[0, :, tokens].transpose(0, 1), *own, plan=plan, memory=memory, key_bias=key_bias)
            outs.append(out.flatten(0, 1))
        out = torch.cat(outs)
        return (out if self.real is None else out[self.real])[None]


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | int | Carried | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    plan: Plan | None = None,
    memory: Layers | PackedLayers | None = None,
    keep: Keeper | None = None,
    key_bias: Tensor | Sequence[Tensor] | None = None,
    extend: Extend | None = None,
    parts: Parts | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention under `plan`, in transformers' calling convention; without a plan, plain causal attention.

    Args:
        query, key, value: [B, Hq, Nq, D] and [B, Hk, N, D], rotated already.
        attention_mask: what `mask` returned; only the plan decides visibility.
        sliding_window: the layer's width; the plan is then `plan.windowed[sliding_window]`.
        dropout: of the weights; above 0 `ops.attention_with_dropout` runs, which is dense and slower.
        plan, memory, keep, key_bias, extend, parts: the keyword arguments of `model(...)`, see `attach`.

    Returns:
        The output as [B, Nq, Hq, D], and None instead of attention weights.

    Raises:
        ValueError: for what the plan or the op does not support, such as a dense mask or a window that the plan was not
            compiled for.
    """
    if isinstance(attention_mask, Carried):
        kwargs |= attention_mask.arguments
        inner = attention_mask.mask
        return attention(module, query, key, value, inner, scaling, dropout, softcap, sliding_window, **kwargs)
    if parts is not None:
        call = partial(
            attention, module, attention_mask=attention_mask, scaling=scaling, dropout=dropout, softcap=softcap,
            sliding_window=sliding_window, **kwargs,
        )  # fmt: skip
        return parts.attend(query, key, value, call), None
    if dropout and softcap is not None:
        raise ValueError(f"attention_dropout: expected 0 where a model caps attention's logits, got {dropout}")
    if isinstance(attention_mask, int):
        # Some families pass their window only to the mask.
        sliding_window = attention_mask
    elif attention_mask is not None:
        raise ValueError(
            f"attention_mask: expected none with a plan, got a dense mask (of shape {tuple(attention_mask.shape)}); "
            "say who sees whom in the layout"
        )
    for name, what in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"model: expected attention that gistkit's kernels compute, got one with {what} ({name})")
    layer = cast(int, getattr(module, "layer_idx", -1))
    device, held = query.device.type, key
    if torch.is_autocast_enabled(device):
        # Norms after the projections may leave a dtype that differs from the values'.
        dtype = torch.get_autocast_dtype(device)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if keep is not None:
        keep.attend(layer, query, key, value, scaling, sliding_window)
    packed = memory if isinstance(memory, PackedLayers) else None
    if memory is not None and packed is None:
        key, value = _with_memory(cast(Layers, memory), layer, key, value)
    if extend is not None:
        key, value = extend(layer, key, value)
    if key_bias is not None and not isinstance(key_bias, Tensor):
        own = key_bias[layer].to(torch.promote_types(query.dtype, torch.float32))
        own = own.repeat_interleave(query.shape[1] // own.shape[1], 1)
        key_bias = F.pad(own, (0, key.shape[2] - own.shape[2]))
    layer_plan = _layer_plan(plan, sliding_window, query, key)
    tensors = query, key, value, layer_plan
    if packed is not None:
        if key_bias is not None:
            raise ValueError(
                "key_bias: expected none over a memory whose heads keep different numbers of keys, got one"
            )
        options: dict[str, Any] = {"scale": scaling, "softcap": softcap}
        out = packed.attend(layer, *tensors, window=sliding_window, dropout=dropout, cached=held, **options)
    elif dropout:
        out = ops.attention_with_dropout(*tensors, dropout=dropout, scale=scaling, key_bias=key_bias)
    else:
        out = cast(Tensor, ops.attention(*tensors, scale=scaling, softcap=softcap, key_bias=key_bias))
    # Layers of some families view it.
    return out.transpose(1, 2).contiguous(), None


def _with_memory(memory: Layers, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [B, Hk, K + N, D]: those of the memory for this layer, then the layer's own."""
    joined = []
    for name, memory_part, own_part in zip(("keys", "values"), memory[layer], (key, value), strict=True):
        batch, heads, _, dim = own_part.shape
        if (
            memory_part.dim() != 4
            or memory_part.shape[0] not in (1, batch)
            or (memory_part.shape[1], memory_part.shape[3]) != (heads, dim)
        ):
            raise ValueError(
                f"memory: expected {name} [{'1' if batch == 1 else f'1 or {batch}'}, {heads}, K, {dim}] for layer "
                f"{layer}, got shape {tuple(memory_part.shape)}"
            )
        joined.append(torch.cat([memory_part.to(own_part).expand(batch, -1, -1, -1), own_part], 2))
    return joined[0], joined[1]


def _layer_plan(plan: Plan | None, window: int | None, query: Tensor, key: Tensor) -> Plan:
    """The plan of one layer, whose sliding window may be `window`."""
    if plan is None:
        return causal_plan(query.shape[2], key.shape[2], query.device, window)
    if window is None:
        return plan
    if plan.num_keys > key.shape[2]:
        raise ValueError(
            f"{CACHE}: expected a cache that keeps the {plan.num_keys} keys of the plan in sliding-window "
            f"layers too, such as DynamicCache() made without a config, got {key.shape[2]} keys"
        )
    cut = plan.windowed.get(window)
    if cut is not None:
        return cut
    if (plan.num_keys if plan.reach is None else plan.reach) > window:
        raise ValueError(
            f"plan: expected one compiled for a sliding window of {window} with windows=({window},), see "
            f"gistkit.hf.sliding_windows, got one for {tuple(plan.windowed) or 'none'}"
        )
    return plan


def mask(*args: Any, attention_mask: Tensor | None = None, local_size: int | None = None, **kwargs: Any) -> int | None:
    """The width of a sliding window, `local_size`, or None for full attention: the plan decides visibility.

    Its registration keeps transformers from treating position IDs that do not grow by 1 as packed sequences.

    Raises:
        ValueError: if a 2-D attention mask marks padding; a ragged batch is compiled into the plan instead.
    """
    if attention_mask is None or torch.compiler.is_compiling():
        return local_size
    repeated = all(
        step == 0 or size == 1 for step, size in zip(attention_mask.stride(), attention_mask.shape, strict=True)
    )
    if repeated and attention_mask.data_ptr() == all_tokens(attention_mask.device).data_ptr():
        return local_size
    # Outside of graph capture the host waits for the check, once a pass: otherwise attention would read padding.
    captured = attention_mask.is_cuda and torch.cuda.is_current_stream_capturing()
    if not captured and not bool(attention_mask.all()):
        raise ValueError(
            "attention_mask: expected none or all ones with gistkit's attention, got a mask with padding; compile a "
            "ragged batch of layouts into the plan instead (gistkit.layouts.compile_batch)"
        )
    return local_size
