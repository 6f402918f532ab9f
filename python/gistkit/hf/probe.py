"""traits_of: what is known of a model's class before gistkit's attention runs in the model itself.

Of tested families a table says it (`gistkit.hf.parts.FAMILIES`). Of others a small copy of the model shows it.

A copy of the same class and configuration with tiny sizes takes some milliseconds, whatever the model's size. It runs
whole layers beyond their sliding windows in single precision, and touches nothing of the model: no hooks, modes,
gradients or compiled code, and no random numbers. What it shows is a matter of the class and its configuration, and is
kept by these.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from gistkit.common.messages import one_line
from gistkit.hf.cache import CACHE, memory_cache
from gistkit.hf.carry import layers_of
from gistkit.hf.keep import Keeper, KeptKeys, Rope
from gistkit.hf.parts import changing, find_parts, of_known_family
from gistkit.hf.shrink import small_config, small_copy
from gistkit.layouts import Layout, Plan, Role, causal
from gistkit.layouts.relations import CAUSAL
from gistkit.ops.attention import MAX_HEAD_DIM

# Opens a decoder for gistkit's attention, as `attach` does; the flags: `Traits.carried`, and whether with its RoPE.
Attached = Callable[[PreTrainedModel, bool, bool], AbstractContextManager[None]]
# Both documents are longer than the small copy's sliding windows.
_FIRST, _SECOND = 7, 6
# Of the largest value; a wrong mask or position is off by its whole size.
_TOLERANCE = 2e-3
# Position IDs of both documents in a row, with gaps.
_SPREAD = 2 * torch.arange(_FIRST + _SECOND)[None]


@dataclass(frozen=True)
class Traits:
    """What is known of a decoder's class and configuration.

    Args:
        refused: why gistkit's attention cannot run in it; None: it can.
        carried: its layers drop keyword arguments, which hooks have to bring to their attention.
        fused: the classes of attention in which gistkit's forward and RoPE give what the model's own give, and a
            layer's norm and projections give its keys.
        windows: the widths of its sliding windows, ascending; of a family in the table its modules say them.
        embeddings: why it cannot read embeddings instead of tokens, as all compressors do; None: it can.
        maps: why tokens of one role cannot have linear maps of their own in its layers, as those of `separate` methods
            do; None: they can.
        keys: why it cannot read keys and values of an earlier pass, as methods with a memory of them do; None: it can.
        projects: why its layers cannot make keys of other hidden states at any positions, as methods that pool or
            offset hidden states ask for; None: they can.
    """

    refused: str | None = None
    carried: bool = False
    fused: frozenset[type] = frozenset()
    windows: tuple[int, ...] = ()
    embeddings: str | None = None
    maps: str | None = None
    keys: str | None = None
    projects: str | None = None


_KNOWN: dict[tuple[type, str], Traits] = {}
# Of decoders that have been asked for.
TRAITS: WeakKeyDictionary[PreTrainedModel, Traits] = WeakKeyDictionary()


def traits_of(decoder: PreTrainedModel, attached: Attached) -> Traits:
    """The traits of a decoder, found out once for each class and configuration."""
    traits = TRAITS.get(decoder)
    if traits is None and (width := _widest_head(decoder)) > MAX_HEAD_DIM:
        return Traits(refused=f"its heads have {width} dimensions, more than {MAX_HEAD_DIM}")
    if traits is None:
        key = type(decoder), decoder.config.to_json_string(use_diff=False)
        traits = _KNOWN.get(key)
        if traits is None and of_known_family(decoder):
            traits = _KNOWN[key] = Traits(fused=frozenset(map(type, find_parts(decoder).attentions)))
        if traits is None:
            # In a thread of its own no mode of the caller's holds: autocast, inference, a default device, a recorder.
            with ThreadPoolExecutor(1) as thread:
                traits = _KNOWN[key] = thread.submit(probe, type(decoder), decoder.config, attached).result()
        # A refusal may end with a setting of the configuration.
        if traits.refused is None:
            TRAITS[decoder] = traits
    return traits


def _widest_head(decoder: PreTrainedModel) -> int:
    """The largest dimension of an attention head that the decoder's modules name; 0 if they name none."""
    widths = [
        width
        for module in decoder.modules()
        if hasattr(module, "layer_idx")
        for name in ("head_dim", "qk_head_dim")
        if isinstance(width := getattr(module, name, None), int)
    ]
    return max(widths, default=0)


def probe(kind: type[PreTrainedModel], config: Any, attached: Attached) -> Traits:
    """The traits of a class of decoders with a configuration, from passes of a small copy."""
    with _quiet(), torch.no_grad():
        try:
            model = small_copy(kind, small_config(config))
            own = _Own(model)
        except Exception as error:
            return Traits(refused=f"no small copy of it can be made and run to check it ({_short(error)})")
        traits = Traits()
        try:
            # Gistkit's forward takes any keyword argument, but layers may still drop them.
            for carried, fused in ((False, True), (True, True), (False, False), (True, False)):
                classes = frozenset(type(module) for module in find_parts(model).attentions) if fused else frozenset()
                traits = replace(traits, carried=carried, fused=classes)
                try:
                    with attached(model, carried, fused):
                        refused, widths = _run(model, own, fused)
                except Exception:
                    if not fused:
                        raise
                    refused = "gistkit's forward fails in it"
                if refused is None or (not fused and refused != _NOT_REACHED):
                    break
        except Exception as error:
            return Traits(refused=f"its small copy fails under a plan ({_short(error)})")
        if refused is not None:
            return Traits(refused=refused)
        small, real = getattr(model.config, "sliding_window", None), getattr(config, "sliding_window", None)
        windows = tuple(sorted(int(real) if real and width == small else width for width in widths))
        traits = replace(traits, windows=windows, embeddings=own.embeddings, maps=_maps(model, own))
        with attached(model, traits.carried, bool(traits.fused)):
            projects = None if traits.fused else _projects(model, own)
            return replace(traits, keys=_reads_keys(model, own, tuple(widths)), projects=projects)


class _Own:
    """What a small copy computes with its own attention.

    Args:
        model: the small copy; it reads two documents, each by itself and one after the other.
    """

    def __init__(self, model: Any) -> None:
        size = model.get_input_embeddings().num_embeddings
        self.ids = (torch.arange(_FIRST + _SECOND) * 7 % (size - 4) + 3)[None]
        self.first, self.second = (hidden(model, ids) for ids in (self.ids[:, :_FIRST], self.ids[:, _FIRST:]))
        self.both = hidden(model, self.ids)
        # With a mask transformers does not take position IDs with gaps for packed sequences.
        self.spread = hidden(model, self.ids, position_ids=_SPREAD, attention_mask=torch.ones_like(self.ids))
        embeddings = model.get_input_embeddings()(self.ids)
        embedded = hidden(model, None, inputs_embeds=embeddings)
        self.embeddings = None if close(embedded, self.both) else "it reads token ids besides their embeddings"
        try:
            # Gemma 4 looks ids up by their embeddings, and learned embeddings are no token's.
            hidden(model, None, inputs_embeds=1.5 * embeddings)
        except RuntimeError:
            self.embeddings = "it reads token ids besides their embeddings"


def hidden(model: PreTrainedModel, ids: Tensor | None, **inputs: Any) -> Tensor:
    """The last hidden states of a decoder, without a cache unless one is given."""
    if ids is not None:
        inputs["input_ids"] = ids
    return model(**{"use_cache": CACHE in inputs} | inputs).last_hidden_state  # type: ignore[no-any-return]


def close(found: Tensor, expected: Tensor) -> bool:
    """Whether two results are the same up to rounding."""
    return bool(((found - expected).abs().max() <= _TOLERANCE * expected.abs().max()).item())


class _Calls(Keeper):
    """Counts the calls of attention in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[int, int] = {}
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}

    def store(self, layer_idx: int, key: Tensor, value: Tensor) -> None:
        """One call."""
        self.counts[layer_idx] = self.counts.get(layer_idx, 0) + 1
        self.stored[layer_idx] = key, value


class _Projections(_Calls):
    """Collects the layers that project their keys and values again from what entered them.

    `turned` are layers whose keys move with their positions, by any part of one and all by the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.projected: set[int] = set()
        self.turned: set[int] = set()

    def leave(self, layer_idx: int, layer: nn.Module, before: Tensor, after: Tensor, rope: Rope) -> None:
        """Projects what entered the layer once more, and half a position further on."""
        made = rope.project(layer, before, rope.positions)
        further, _ = rope.project(layer, before, rope.positions + 0.5)
        if all(map(close, made, self.stored[layer_idx])) and close(_products(further), _products(made[0])):
            self.projected.add(layer_idx)
        if not close(further, made[0]):
            self.turned.add(layer_idx)


def _products(keys: Tensor) -> Tensor:
    """The inner products of keys, which depend only on differences of positions."""
    return keys @ keys.transpose(-1, -2)


def _projects(model: PreTrainedModel, own: _Own) -> str | None:
    """Why the layers of the attached small copy cannot make keys at any positions; None: they can."""
    if changing(model):
        return "its frequencies depend on the length of a pass, and its attention is built otherwise than a Llama's"
    row = causal(_FIRST + _SECOND)
    plan = replace(row.compile(), windowed=_Windows(row), positions=_SPREAD[0])
    calls = _Projections()
    try:
        found = hidden(model, own.ids, plan=plan, keep=calls)
    except Exception as error:
        return f"its layers make keys in another way ({_short(error)})"
    turns = calls.turned or getattr(model, "rotary_emb", None) is None
    if len(calls.projected) < model.config.num_hidden_layers or not turns:
        return "its layers make keys in another way"
    return None if close(found, own.spread) else "its layers keep what they made, so that none can run again"


class _Windows(dict[int, Plan]):
    """A layout's plans by the width of a window, made when a layer asks for one."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout

    def get(self, width: int, default: Any = None) -> Any:
        """The plan for a width."""
        if width not in self:
            self[width] = self.layout.compile(window=width)
        return self[width]


_NOT_REACHED = "a plan does not reach its attention, as its layers drop keyword arguments"


def _run(model: PreTrainedModel, own: _Own, fused: bool) -> tuple[str | None, set[int]]:
    """Why the attached small copy does not obey plans, and the widths of the windows that its layers ask for."""
    documents = np.repeat([0, 1], [_FIRST, _SECOND]).astype(np.int32)
    layout = Layout(
        roles=np.full(len(documents), Role.TEXT, np.uint8),
        documents=documents,
        positions=np.concatenate([np.arange(_FIRST), np.arange(_SECOND)]),
        sees={Role.TEXT: {Role.TEXT: CAUSAL}},
    )
    windows, calls = _Windows(layout), _Projections() if fused else _Calls()
    apart = hidden(model, own.ids, plan=replace(layout.compile(), windowed=windows), keep=calls)
    layers = model.config.num_hidden_layers
    if not calls.counts:
        return _NOT_REACHED, set()
    if set(calls.counts) != set(range(layers)):
        return f"{len(calls.counts)} of its {layers} layers call the attention interface", set()
    if (most := max(calls.counts.values())) > 1:
        return f"its layers call attention {most} times each", set()
    if isinstance(calls, _Projections) and len(calls.projected) < layers:
        return "its keys are not a layer's projections", set()
    if not close(hidden(model, own.ids), own.both):
        return "plain causal attention gives other values than its own attention", set()
    if close(own.spread, own.both):
        return "it reads no position IDs", set()
    row = replace(causal(_FIRST + _SECOND).compile(), windowed=_Windows(causal(_FIRST + _SECOND)), positions=_SPREAD[0])
    if not close(hidden(model, own.ids, plan=row), own.spread):
        return "a plan's position IDs are not obeyed", set()
    if not close(apart[:, :_FIRST], own.first) or not close(apart[:, _FIRST:], own.second):
        return "tokens see others than those of their document under a plan", set()
    return None, set(windows)


def _maps(model: PreTrainedModel, own: _Own) -> str | None:
    """Why the linear maps of the small copy's layers do not all read tokens in a row; None: they do."""
    shapes: set[torch.Size] = set()
    with ExitStack() as undo:
        for layer in layers_of(model):
            for module in layer.modules():
                if type(module) is nn.Linear:
                    seen = module.register_forward_pre_hook(lambda _, args: shapes.add(args[0].shape[:-1]))
                    undo.callback(seen.remove)
                elif any(weight.dim() > 1 for weight in module.parameters(recurse=False)):
                    return "its layers have maps that are no plain linear maps, such as experts"
        hidden(model, own.ids)
    return None if shapes == {own.ids.shape} else "its layers have linear maps that do not read tokens in a row"


def _reads_keys(model: PreTrainedModel, own: _Own, widths: tuple[int, ...]) -> str | None:
    """Why the attached small copy cannot read the first document as keys and values; None: it can."""
    keep = KeptKeys(slice(None))
    plan = causal(_FIRST + _SECOND).compile(windows=widths)
    rest = plan.rows(_FIRST, _FIRST + _SECOND)
    hidden(model, own.ids[:, :_FIRST], plan=plan.rows(0, _FIRST, num_keys=_FIRST), keep=keep)
    if len({tensor.shape for layer in keep.layers for tensor in layer}) != 1:
        return "its keys and values differ in shape"
    for inputs in (
        {"memory": keep.layers},
        {CACHE: memory_cache(keep.layers, _FIRST)},
    ):
        try:
            read = hidden(model, own.ids[:, _FIRST:], plan=rest, **inputs)
        except Exception as error:
            return f"keys of an earlier pass are not read ({_short(error)})"
        if not close(read, own.both[:, _FIRST:]):
            return "keys of an earlier pass are read as others"
    return None


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {one_line(error, 120)}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside, neither Python nor transformers warns of the small sizes."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
