"""logits_of: how a causal language model makes logits from its decoder's hidden states, measured."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

# Logits in the straight part of a cap, in its bend, and far beyond it.
_PROBES = (2.0**-30, 3.0, 40.0, 2.0**50)
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Logits:
    """Logits are after * (W (before * h) + bias), and with a cap c they are c tanh(that / c).

    Args:
        before, after: the factors of the hidden states and of the output embedding's result.
        softcap: the cap; None: there is none.
    """

    before: float
    after: float
    softcap: float | None


class _Output(BaseModelOutputWithPast):
    """A decoder's output of any family: what is not there is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _Stub(nn.Module):
    """Stands for a module: keeps what it receives and returns the same whatever it is."""

    def __init__(self, result: Any, like: nn.Module) -> None:
        super().__init__()
        self.result, self.received = result, None
        # Models ask for the dtype of their output embedding.
        if isinstance(weight := getattr(like, "weight", None), Tensor):
            self.weight = weight
        self.config = getattr(like, "config", None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The result."""
        self.received = args[0] if args else None
        return self.result


@torch.no_grad()
def logits_of(model: PreTrainedModel) -> Logits:
    """How `model` makes logits, from a pass of a shallow copy whose decoder and output embedding are stubs.

    Costs no product with any weight, and runs no hook of the model.

    Raises:
        TypeError: if logits are anything else than `Logits` says.
    """
    # A model that reads images too makes them and the tokens embeddings before its decoder: the stub stands for all.
    base: Any = model.base_model
    decoder, head = base if hasattr(base, "get_image_features") else model.get_decoder(), model.get_output_embeddings()
    names = {module: name for name, module in model.named_modules()}
    # No weight takes part, so a model on device meta, which has no values, is measured as well.
    device = torch.device("cpu") if head.weight.is_meta else head.weight.device
    like: dict[str, Any] = {"device": device, "dtype": torch.float64}
    # Powers of two, which no dtype rounds.
    states = torch.where(torch.arange(head.weight.shape[1], device=device) % 3 == 0, 1.0, -2.0).double()
    states = states.expand(1, len(_PROBES), -1)
    values = torch.tensor(_PROBES, **like)[None, :, None].expand(1, -1, head.weight.shape[0])
    last = _Stub(values, head)
    copied = _with(model, names[decoder], _Stub(_Output(last_hidden_state=states), decoder))
    copied = _with(copied, names[head], last)
    ids = torch.zeros(1, len(_PROBES), dtype=torch.int64, device=device)
    found = copied(input_ids=ids, use_cache=False, return_dict=True).logits.double()
    if last.received is None:
        raise TypeError(f"model: expected one that calls its output embedding, got {type(model).__name__}")
    before, spread = _ratio(last.received.double(), states)
    small, bend, beyond, far = found[0, :, 0].tolist()
    after = small / _PROBES[0]
    softcap = None if math.isclose(far, after * _PROBES[3], rel_tol=_TOLERANCE) else abs(far)
    expected = [
        after * value if softcap is None else softcap * math.tanh(after * value / softcap) for value in _PROBES[1:3]
    ]
    linear = all(math.isclose(a, b, rel_tol=_TOLERANCE) for a, b in zip((bend, beyond), expected, strict=True))
    if spread > _TOLERANCE or not linear or before == 0 or after == 0:
        raise TypeError(
            "model: expected logits from an output embedding of the hidden states, with at most a factor and a cap, "
            f"got other logits from {type(model).__name__}"
        )
    return Logits(_plain(before), _plain(after), None if softcap is None else _plain(softcap))


def _ratio(found: Tensor, states: Tensor) -> tuple[float, float]:
    """The factor between two tensors, and how far it is from being the same everywhere."""
    if found.shape != states.shape:
        return 0.0, math.inf
    ratio = found / states
    mean = float(ratio.mean())
    return mean, float((ratio - mean).abs().max()) / max(abs(mean), 1e-30)


def _plain(value: float) -> float:
    """The value without the last digits, which computing in single precision leaves."""
    short = float(f"{value:.6g}")
    return short if math.isclose(short, value, rel_tol=2e-7) else value


def _with(module: Any, path: str, stub: nn.Module) -> Any:
    """A shallow copy of a module with `stub` at `path`, without hooks and forwards of instances."""
    clone = copy.copy(module)
    vars(clone)["_modules"] = dict(module._modules)
    for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        vars(clone)[name] = OrderedDict()
    vars(clone).pop("forward", None)
    name, _, rest = path.partition(".")
    clone._modules[name] = _with(module._modules[name], rest, stub) if rest else stub
    return clone
