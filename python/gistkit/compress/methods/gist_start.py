"""start_as_means: initialises gists so that they compute about the means of their windows.

Gists that start from a language model's weights take long to learn to pool. But their target is known: in every layer,
the mean of the context tokens' hidden states. Least squares comes close to it without training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from gistkit import ops
from gistkit.common.checks import placed
from gistkit.compress.adapters import Copies
from gistkit.compress.methods.gist import GistPool
from gistkit.compress.plans import InPlacePass
from gistkit.hf.attach import decoder_of
from gistkit.hf.lora import plain_map
from gistkit.hf.modes import eval_mode

# Parts of layers that add to their input the outputs of attention's and the MLP's last maps, and nothing else.
_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_MAPS = {"self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"}


@torch.no_grad()
def start_as_means(
    compressor: GistPool,
    input_ids: Any,
    attention_mask: Any = None,
    *,
    ridge: float = 1e-3,
    progress: bool = True,
) -> list[float]:
    """Fits the gists' copied maps so that a layer's output at a gist is close to the mean of its window's inputs.

    One pass fits the layers one after another. Queries become zero, so that a gist attends uniformly. The output
    projections of attention and of the MLP are each fitted by least squares to the remaining difference from the mean.
    The MLP's other maps are those of the layer below, which computed this layer's inputs. The mean is what AvgPool's
    text reads in the layer (Getting to the Gist of Gisting, Sections 4 and 5.1). The paper trains from the model's
    weights only.

    Args:
        compressor: with windows=1, offset, and a copy of the maps for gists: full_copy=True or lora=None.
        input_ids, attention_mask: contexts, as for `encode`, all read in one pass. They need several times as many
            gists as a map has inputs (the study `in-place` uses 5000 for 1536); with fewer, the fit is good only for
            these contexts.
        ridge: added to the diagonal of the normal equations, as a multiple of its mean.
        progress: whether to show a progress bar.

    Returns:
        For each layer, the squared distance of its normed outputs from the normed means, over the variance of those.

    Raises:
        ValueError: if the compressor has other settings, such as gists that see several windows.
        TypeError: if the model's layers differ from Llama's.
    """
    layers, copies = _check(compressor)
    if not 0 < ridge < float("inf"):
        raise ValueError(f"ridge: expected above 0, got {ridge}")
    contexts, _ = compressor.cut(compressor.contexts(input_ids, attention_mask))
    batch = compressor.pass_over(compressor.with_bos(contexts))
    if sum(batch.lengths) - len(batch.lengths) < 2:
        raise ValueError("input_ids: expected contexts of at least 2 gists, got 1 gist")
    before = {name: tensor.clone() for name, tensor in copies.state_dict().items()}
    try:
        with ExitStack() as stack:
            stack.enter_context(eval_mode(compressor))
            bar = tqdm(total=len(layers), desc="gists as means", unit="layer", disable=not progress, leave=False)
            stack.enter_context(bar)
            fits = [_Fit(layer, _copied(copies, i), batch, ridge, bar.update) for i, layer in enumerate(layers)]
            for below, fit in zip([fits[0], *fits], fits, strict=False):
                stack.enter_context(fit.hooks(below.layer))
            compressor.encode_rows(contexts)
    except BaseException:
        copies.load_state_dict(before)
        raise
    return [fit.error for fit in fits]


class _Fit:
    """Fits the gists' copies `maps` of a layer's linear maps, by name, while the pass runs through the layer."""

    def __init__(
        self, layer: nn.Module, maps: dict[str, nn.Linear], batch: InPlacePass, ridge: float, on_end: Callable[[], Any]
    ) -> None:
        self.layer, self.maps, self.batch, self.ridge, self.done = layer, maps, batch, ridge, on_end
        self.error = float("nan")

    @contextmanager
    def hooks(self, below: nn.Module) -> Iterator[None]:
        """Fits the maps inside the block; the MLP is copied from the layer `below`, except its last map."""
        self.below = below
        last_maps = [self.maps[name] for name in ("self_attn.o_proj", "mlp.down_proj")]
        handles = [
            self.layer.register_forward_pre_hook(self._enter),
            *[module.register_forward_pre_hook(self._solve) for module in last_maps],
            self.layer.register_forward_hook(self._leave),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        hidden_states = args[0]
        counts = placed(self.batch.lengths, hidden_states.device)[:, None] - 1
        self.real = torch.arange(int(counts.max()), device=hidden_states.device) < counts
        window_mean = ops.window_pool(hidden_states[:, self.batch.context], windows=self.batch.windows)
        self.precision = torch.promote_types(hidden_states.dtype, torch.float32)
        self.mean, self.made = self._real(window_mean), self._real(hidden_states[:, self.batch.gists])
        # Each gist has the same weight, whatever its norm: the next layer normalises its input.
        square = self.mean.square().mean(-1, keepdim=True)
        self.share = (square + 1e-6 * square.mean()).rsqrt()
        query = self.maps["self_attn.q_proj"]
        for parameter in query.parameters():
            parameter.zero_()
        for name, copied_map in self.maps.items():
            if name.startswith("mlp."):
                copied_map.load_state_dict(plain_map(self.below.get_submodule(name)).state_dict())

    def _real(self, rows: Tensor) -> Tensor:
        """The rows [G, d] of [B, W, d] that are not padding."""
        return rows[self.real].to(self.precision)

    def _solve(self, last: nn.Linear, args: tuple[Any, ...]) -> None:
        inputs = self._real(args[0])
        rows, missing = inputs * self.share, (self.mean - self.made) * self.share
        gram = (rows.T @ rows).double()
        gram.diagonal().add_(self.ridge * gram.diagonal().mean())
        last.weight.copy_(torch.linalg.solve(gram, (rows.T @ missing).double()).T)
        if last.bias is not None:
            last.bias.zero_()
        self.made = self.made + inputs @ last.weight.to(inputs.dtype).T

    def _leave(self, layer: Any, args: tuple[Any, ...], out: Tensor) -> None:
        pair = self._real(out[:, self.batch.gists]), self.mean
        output, target = (layer.input_layernorm(states.to(out.dtype)).to(self.precision) for states in pair)
        self.error = float((output - target).square().sum() / (target - target.mean(0)).square().sum())
        self.done()
        del self.real, self.mean, self.made, self.share


def _check(compressor: GistPool) -> tuple[list[nn.Module], Copies]:
    """The model's layers and the gists' copies of their maps, after all checks."""
    if not isinstance(compressor, GistPool):
        raise TypeError(f"compressor: expected a GistPool, got {type(compressor).__name__}")
    settings = compressor.settings
    required = {
        "windows": 1, "offset": True, "separate": True, "memory_sees_memory": False, "context_sees_memory": False,
    }  # fmt: skip
    for name, value in required.items():
        if settings[name] != value:
            raise ValueError(f"compressor: expected one with {name}={value}, got {name}={settings[name]}")
    if compressor.copies is None:
        raise ValueError("compressor: expected one with full_copy=True or lora=None, got adapters for gists")
    layers: Any = decoder_of(compressor.model).layers
    for index, layer in enumerate(layers):
        parts = {name for name, child in layer.named_children() if any(True for _ in child.parameters())}
        # The gradient of a norm at zero, where even attention starts, is as large as its epsilon is small.
        normed = hasattr(layer.self_attn, "q_norm")
        scaled = getattr(compressor.config, "residual_multiplier", 1.0) != 1.0
        if parts != _PARTS or normed or scaled or not _copied(compressor.copies, index).keys() >= _MAPS:
            raise TypeError(
                f"model: expected layers that add up as Llama's, of {', '.join(sorted(_PARTS))} with "
                f"{', '.join(sorted(_MAPS))} and without norms of queries, got {compressor.config.model_type}'s, of "
                f"{', '.join(sorted(parts))}"
            )
    return list(layers), compressor.copies


def _copied(copies: Copies, index: int) -> dict[str, nn.Linear]:
    """The copies of a layer's linear maps, by their names there."""
    start = f"layers/{index}/"
    maps: Any = copies.maps.items()
    return {
        name.removeprefix(start).replace("/", "."): copied_map for name, copied_map in maps if name.startswith(start)
    }
