"""`gistkit view attention`: a page of attention maps, of a model that reads or a compressor that encodes a text."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from gistkit.cli.view_page import LARGEST, add_out, fits_page, write_page
from gistkit.options.arguments import add_command, device, several, typed
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
MEAN = "mean"
# Most weights of a page by default, a file of about 5 MB.
COMFORTABLE = 2**24


def _head(text: str) -> int | str:
    return MEAN if text == MEAN else fits_page(text)


def add(kinds: Any) -> None:
    """Adds the command."""
    parser = add_command(kinds, "attention", _run, PURPOSE, EXAMPLES)
    parser.description = f"{parser.description}; memory tokens of select are the tokens that most heads keep"
    parser.add_argument("--text", type=typed, required=True, help="text file, or - for standard input")
    add_model(parser)
    add_compressor(parser)
    parser.add_argument("--plain", action="store_true", help="show the model without a compressor")
    layers = "layers for the slider, comma-separated, counted from 0 (default: all, or the last if all are too many)"
    parser.add_argument("--layer", type=several(fits_page), metavar="L", help=layers)
    heads = "query heads for the slider, or mean for their mean (default: mean, and each head if the page has room)"
    parser.add_argument("--head", type=several(_head), metavar="H", help=heads)
    add_out(parser)


def _run(arguments: argparse.Namespace) -> int:
    check_file("-o", arguments.out, [arguments.text])
    options = ("compressor", "encoder", "method", "layout", "ratio", "chunk")
    if arguments.plain and (arguments.option or any(getattr(arguments, name) is not None for name in options)):
        raise ValueError("--plain: not allowed with --compressor or a compressor's options")
    (text,) = read_contents([arguments.text], "")
    device_name = device(arguments.device)

    import numpy as np

    from gistkit.compress.methods.in_place import InPlace
    from gistkit.compress.tokens import text_ids
    from gistkit.evaluate import token_texts
    from gistkit.viz.page import MOST_CELLS, attention_page

    model, tokenizer = load_model(arguments.model, arguments.dtype, device_name)
    config = model.config.get_text_config()
    chosen_layers = _below("--layer", arguments.layer or [], config.num_hidden_layers)
    chosen_heads = _below("--head", arguments.head or [], config.num_attention_heads)
    ids = text_ids(text, tokenizer)
    if len(ids) > LARGEST:
        raise ValueError(f"--text: expected at most {LARGEST} tokens, got {len(ids)}; show a part of it")
    layers, heads = _fitting(chosen_layers, chosen_heads, config, len(ids))
    if len(layers) * len(heads) * len(ids) ** 2 > MOST_CELLS:
        raise ValueError(
            f"--layer, --head: expected at most {MOST_CELLS // len(ids) ** 2} maps of {len(ids)} tokens, "
            f"got {len(layers) * len(heads)}"
        )
    compressor = None
    if not arguments.plain:
        compressor = chosen_compressor(arguments, model)
        compressor.tokenizer = tokenizer
    recorded, plan, input_ids, kept = _record(model, compressor, ids, layers, heads)
    # The rows of the maps are in the plan's physical order.
    count = recorded[0].weights.shape[-1]
    order = np.arange(count) if plan is None or plan.order is None else plan.order[0].cpu().numpy().argsort()
    texts = token_texts(tokenizer, input_ids)
    tokens = _tokens(texts, plan, order, kept, isinstance(compressor, InPlace))
    maps = np.empty((len(layers), len(heads), count, count), np.float32)
    for layer_maps, layer_map in zip(maps, recorded, strict=True):
        weights = layer_map.weights[0].float().numpy()
        places = {head: place for place, head in enumerate(layer_map.heads)}
        for one, head in zip(layer_maps, heads, strict=True):
            one[:] = (weights.mean(0) if head == MEAN else weights[places[head]])[np.ix_(order, order)]
    title = f"{arguments.model} reads" if compressor is None else f"{compressor.title} encodes"
    head_names = [f"{MEAN} of {config.num_attention_heads}" if head == MEAN else str(head) for head in heads]
    page = attention_page(
        maps, layers=list(map(str, layers)), heads=head_names, queries=tokens, title=f"{title} {arguments.text}"
    )
    write_page(page, arguments.out)
    return 0


def _fitting(layers: list[int], heads: list[Any], config: Any, tokens: int) -> tuple[list[int], list[Any]]:
    """The layers and heads to show: the chosen ones, or else as many as a page can comfortably hold."""
    every_layer, every_head = list(range(config.num_hidden_layers)), [MEAN, *range(config.num_attention_heads)]
    fullest = (layers or every_layer, heads or every_head)
    ways = [fullest, (fullest[0], heads or [MEAN]), (layers or every_layer[-1:], heads or [MEAN])]
    shown = next((way for way in ways if len(way[0]) * len(way[1]) * tokens**2 <= COMFORTABLE), ways[-1])
    if shown != fullest:
        of_layers = "the chosen layers" if layers else "each layer" if shown == ways[1] else "the last layer"
        print(
            f"{len(fullest[0])} layers x {len(fullest[1])} heads x {tokens} x {tokens} tokens are too many weights for "
            f"a page. It shows {'the chosen heads' if heads else 'the mean of all heads'} of {of_layers}; choose "
            "others with --layer and --head"
        )
    return shown


def _below(name: str, chosen: list[Any], limit: int) -> list[Any]:
    """In order, `MEAN` first."""
    numbers = sorted(number for number in chosen if number != MEAN)
    if numbers and numbers[-1] >= limit:
        raise ValueError(f"{name}: expected less than {limit}, the number that the model has, got {numbers[-1]}")
    return [MEAN, *numbers] if MEAN in chosen else numbers


def _record(
    model: PreTrainedModel, compressor: Compressor | None, ids: list[int], layers: list[int], heads: list[Any]
) -> tuple[list[AttentionMap], Plan | None, list[int], list[int]]:
    """Maps of the layers, the plan of their pass, its tokens without memory slots, and which of those are kept."""
    import torch

    from gistkit.compress.methods.in_place import InPlace
    from gistkit.hf import CACHE, attach
    from gistkit.inspect import AttentionRecorder

    # A mean beside some heads needs them all.
    recorder = AttentionRecorder(heads=None if MEAN in heads else heads, reduce="mean" if heads == [MEAN] else "none")
    plan: Plan | None = None

    def begin(module: Any, args: Any, inputs: dict[str, Any]) -> None:
        # Of several passes over the text (a Dodo's scorer, then its encoder) the last one counts. KVzip's later passes
        # continue the text.
        nonlocal plan
        if inputs.get("memory") is not None or inputs.get(CACHE) is not None:
            recorder.layers = []
            return
        plan = inputs.get("plan")
        recorder.layers = [recorder.calls + layer for layer in layers]
        recorder.maps.clear()

    input_ids, kept = ids, list[int]()
    hook = model.get_decoder().register_forward_pre_hook(begin, with_kwargs=True)
    try:
        with torch.no_grad(), attach(model), recorder:
            if compressor is None:
                model.get_decoder()(torch.tensor([ids], device=model.device), use_cache=False)
            else:
                memory, _, rows = compressor.compress_rows(compressor.contexts([ids]))
                rows = compressor.with_bos(rows) if isinstance(compressor, InPlace) else rows
                input_ids = rows.ids[0].tolist()
                kept = compressor.kept_tokens(memory)
    finally:
        hook.remove()
    return recorder.maps, plan, input_ids, kept


def _tokens(texts: list[str], plan: Plan | None, order: Any, kept: list[int], has_bos: bool) -> Tokens:
    """What is known of the tokens of a pass, in logical order; `order` says where each is in the physical one."""
    import numpy as np

    from gistkit.layouts import Role
    from gistkit.viz.page import Tokens

    count = len(order)
    # Memory slots come last in physical order. NoContext reads only BOS.
    slots = [f"[memory {slot}]" for slot in range(count - len(texts))]
    # Without slots the pass may have the text's tokens in another order.
    texts = [[*texts, *slots][row] for row in order] if slots else texts[:count]
    roles = np.full(count, Role.TEXT)
    positions = np.arange(count)
    if plan is not None:
        for role, rows in (plan.slices or {}).items():
            roles[rows] = role
        if plan.positions is not None:
            positions = plan.positions.cpu().numpy().reshape(-1, count)[0]
    roles = roles[order]
    if kept:
        roles[:], roles[kept] = Role.CONTEXT, Role.MEMORY
        roles[:has_bos] = Role.BOS
    return Tokens(texts, roles, positions[order])
