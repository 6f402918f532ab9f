"""`gistkit view attention`: the attention maps of a model that reads, or of a compressor that encodes, as a page."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from gistkit.cli.view_page import LARGEST, add_out, fits_page, write_page
from gistkit.options.arguments import add_command, device, several
from gistkit.options.models import add_compressor, add_model, chosen_compressor, load_model
from gistkit.options.outputs import check_file
from gistkit.options.texts import read_contents

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gistkit.compress import Compressor
    from gistkit.inspect import AttentionMap
    from gistkit.layouts import Plan
    from gistkit.viz.page import Tokens

PURPOSE = "write a page that shows the attention weights over a text"
EXAMPLES = """\
example: gistkit view attention --text report.txt --model smollm2 --layer 0,29 -o view.html
example: gistkit view attention --text report.txt --model ./llama --compressor runs/x500 --layer 5 --head 0,1
example: gistkit view attention --text - --model ./llama --method gistpool --ratio 8 < report.txt"""
BY_ITSELF = "show the model by itself"


def add(kinds: Any) -> None:
    """Adds the command."""
    parser = add_command(kinds, "attention", _run, PURPOSE, EXAMPLES)
    parser.add_argument("--text", required=True, help="text file, or - for standard input")
    add_model(parser)
    add_compressor(parser, BY_ITSELF)
    layers = "layers, counted from 0 and comma-separated (default: the last)"
    parser.add_argument("--layer", type=several(fits_page), metavar="L", help=layers)
    heads = "query heads, a map each (default: the mean of all)"
    parser.add_argument("--head", type=several(fits_page), metavar="H", help=heads)
    add_out(parser)


def _run(arguments: argparse.Namespace) -> int:
    device_name = device(arguments.device)
    check_file("-o", arguments.out)
    (text,) = read_contents([arguments.text], "")

    import numpy as np

    from gistkit.evaluate import token_texts
    from gistkit.viz.page import MOST_CELLS, attention_page

    model, tokenizer = load_model(arguments.model, arguments.dtype, device_name)
    config = model.config.get_text_config()
    layers = _below("--layer", arguments.layer or [config.num_hidden_layers - 1], config.num_hidden_layers)
    heads = _below("--head", arguments.head or [], config.num_attention_heads) or None
    ids = tokenizer(text, verbose=False)["input_ids"]
    if len(ids) > LARGEST:
        raise ValueError(f"--text: expected at most {LARGEST} tokens, got {len(ids)}; show a part of it")
    map_count = len(layers) * len(heads or [0])
    if map_count * len(ids) ** 2 > MOST_CELLS:
        raise ValueError(
            f"--layer, --head: expected at most {MOST_CELLS // len(ids) ** 2} maps of {len(ids)} tokens, "
            f"got {map_count}"
        )
    compressor_options = [getattr(arguments, name) for name in ("compressor", "method", "layout", "ratio", "chunk")]
    compressor = None
    if any(value is not None for value in compressor_options) or arguments.option:
        compressor = chosen_compressor(arguments, model)
    recorded, plan, input_ids, nuggets = _record(model, compressor, ids, layers, heads)
    # The rows of the maps are in the plan's physical order.
    count = recorded[0].weights.shape[-1]
    order = np.arange(count) if plan is None or plan.order is None else plan.order[0].cpu().numpy().argsort()
    texts = token_texts(tokenizer, input_ids)
    tokens = _tokens(texts, plan, nuggets, order)
    maps = {}
    for layer, layer_map in zip(layers, recorded, strict=True):
        for place, weights in enumerate(layer_map.weights[0].float().numpy()):
            head_title = f"mean of {len(layer_map.heads)} heads" if heads is None else f"head {layer_map.heads[place]}"
            maps[f"layer {layer}, {head_title}"] = weights[np.ix_(order, order)]
    title = f"{arguments.model} reads" if compressor is None else f"{compressor.title} encodes"
    write_page(attention_page(maps, queries=tokens, title=f"{title} {arguments.text}"), arguments.out)
    return 0


def _below(name: str, numbers: list[int], limit: int) -> list[int]:
    if numbers and max(numbers) >= limit:
        raise ValueError(f"{name}: expected less than {limit}, the number that the model has, got {max(numbers)}")
    return sorted(numbers)


def _record(
    model: PreTrainedModel, compressor: Compressor | None, ids: list[int], layers: list[int], heads: list[int] | None
) -> tuple[list[AttentionMap], Plan | None, list[int], list[int]]:
    """Maps of the layers, the plan of their pass, its tokens without memory slots, and which of those are nuggets."""
    import torch

    from gistkit.compress.methods.in_place import InPlace
    from gistkit.hf import attach
    from gistkit.inspect import AttentionRecorder

    recorder = AttentionRecorder(heads=heads, reduce="mean" if heads is None else "none")
    plan: Plan | None = None

    def begin(module: Any, args: Any, inputs: dict[str, Any]) -> None:
        # Of several passes, such as that of a Dodo's scorer and its encoder, the last one counts.
        nonlocal plan
        plan = inputs.get("plan")
        recorder.layers = [recorder.calls + layer for layer in layers]
        recorder.maps.clear()

    input_ids, nuggets = ids, []
    hook = model.get_decoder().register_forward_pre_hook(begin, with_kwargs=True)
    try:
        with torch.no_grad(), attach(model), recorder:
            if compressor is None:
                model.get_decoder()(torch.tensor([ids], device=model.device), use_cache=False)
            else:
                memory, _, rows = compressor.compress_rows(compressor.contexts([ids]))
                rows = compressor.with_bos(rows) if isinstance(compressor, InPlace) else rows
                input_ids = rows.ids[0].tolist()
                nuggets = memory.positions[0].tolist() if compressor.method == "dodo" else []
    finally:
        hook.remove()
    return recorder.maps, plan, input_ids, nuggets


def _tokens(texts: list[str], plan: Plan | None, nuggets: list[int], order: Any) -> Tokens:
    """What is known of the tokens of a pass, in logical order; `order` says where each is in the physical one."""
    import numpy as np

    from gistkit.layouts import Role
    from gistkit.viz.page import Tokens

    count = len(order)
    # Memory slots come last in physical order. NoContext reads BOS alone.
    texts = [*texts, *(f"[memory {slot}]" for slot in range(count - len(texts)))][:count]
    roles = np.full(count, Role.TEXT)
    positions = np.arange(count)
    if plan is not None:
        for role, rows in (plan.slices or {}).items():
            roles[rows] = role
        if plan.positions is not None:
            positions = plan.positions.cpu().numpy().reshape(-1, count)[0]
    if nuggets:
        # The first one stands for BOS.
        roles[:], roles[nuggets], roles[0] = Role.CONTEXT, Role.MEMORY, Role.BOS
    return Tokens([texts[row] for row in order], roles[order], positions[order])
