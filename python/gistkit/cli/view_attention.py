"""`gistkit view attention`: a page of attention maps, of a model that reads or a compressor that encodes a text."""

from __future__ import annotations

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from gistkit.cli.view_page import LARGEST, add_out, fits_page, write_page
from gistkit.options.arguments import add_command, device, several, typed
from gistkit.options.models import add_compressor, add_model, chosen_compressor, load_model
from gistkit.options.outputs import check_file
from gistkit.options.texts import read_content

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

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
    text = read_content(arguments.text)
    device_name = device(arguments.device)

    import numpy as np

    from gistkit.common.text_ids import text_ids
    from gistkit.compress.methods.in_place import InPlace
    from gistkit.viz.page import attention_page

    model, tokenizer = load_model(arguments.model, arguments.dtype, device_name)
    ids = text_ids(text, tokenizer)
    if len(ids) > LARGEST:
        raise ValueError(f"--text: expected at most {LARGEST} tokens, got {len(ids)}; show a part of it")
    compressor = None
    if not arguments.plain:
        compressor = chosen_compressor(arguments, model)
        compressor.tokenizer = tokenizer
    config = model.config.get_text_config() if compressor is None else compressor.encoder_lm.config
    chosen_layers = _below("--layer", arguments.layer or [], config.num_hidden_layers)
    chosen_heads = _below("--head", arguments.head or [], config.num_attention_heads)
    fitting = partial(_fitting, chosen_layers, chosen_heads, config)
    shown = _record(model, tokenizer, compressor, ids, chosen_heads, fitting)
    plan, count = shown.plan, shown.maps[0].shape[-1]
    # The rows of the maps are in the plan's physical order.
    order = np.arange(count) if plan is None or plan.order is None else plan.order[0].cpu().numpy().argsort()
    tokens = _tokens(shown.texts, plan, order, shown.kept, isinstance(compressor, InPlace))
    maps = np.stack([layer.float().numpy()[:, order][..., order] for layer in shown.maps])
    title = f"{arguments.model} reads" if compressor is None else f"{compressor.title} encodes"
    heads = [f"{MEAN} of {config.num_attention_heads}" if head == MEAN else str(head) for head in shown.heads]
    page = attention_page(
        maps, layers=list(map(str, shown.layers)), heads=heads, queries=tokens, title=f"{title} {arguments.text}"
    )
    write_page(page, arguments.out)
    return 0


def _fitting(layers: list[int], heads: list[Any], config: Any, tokens: int) -> tuple[list[int], list[Any]]:
    """The layers and heads to show: the chosen ones, or else as many as a page can comfortably hold."""
    from gistkit.viz.page import MOST_CELLS

    if tokens > LARGEST:
        raise ValueError(
            f"--text: expected at most {LARGEST} tokens with those of the memory, got {tokens}; show a part of it"
        )
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
    if (count := len(shown[0]) * len(shown[1])) > (most := MOST_CELLS // tokens**2):
        raise ValueError(f"--layer, --head: expected at most {most} maps of {tokens} tokens, got {count}")
    return shown


def _below(name: str, chosen: list[Any], limit: int) -> list[Any]:
    """In order, `MEAN` first."""
    numbers = sorted(number for number in chosen if number != MEAN)
    if numbers and numbers[-1] >= limit:
        raise ValueError(f"{name}: expected less than {limit}, the number that the model has, got {numbers[-1]}")
    return [MEAN, *numbers] if MEAN in chosen else numbers


class _Shown(NamedTuple):
    """Of the pass that is shown: maps [heads, N, N] of layers, its plan, texts of all but memory slots, those kept."""

    layers: list[int]
    heads: list[Any]
    maps: list[Tensor]
    plan: Plan | None
    texts: list[str]
    kept: list[int]


def _record(
    model: PreTrainedModel, tokenizer: Any, compressor: Any, ids: list[int], heads: list[Any], fitting: Any
) -> _Shown:
    """A pass over a text; `fitting` says which layers, and which of the chosen `heads`, are shown of so many tokens."""
    import torch

    from gistkit.compress.methods.in_place import InPlace
    from gistkit.compress.texts import encoder_ids
    from gistkit.evaluate import token_texts
    from gistkit.hf import CACHE, attach
    from gistkit.inspect import AttentionRecorder

    # A mean beside some heads needs them all, of which only it is kept.
    own = AttentionRecorder(heads=[head for head in heads if head != MEAN] or None)
    recorders = (AttentionRecorder(reduce="mean"), own)
    plan: Plan | None = None
    shown: tuple[list[int], list[Any]] = [], []
    passes: list[tuple[int, ...]] = []

    def begin(module: Any, args: Any, inputs: dict[str, Any]) -> None:
        # Of two passes over the text (a Dodo's scorer, then its encoder) the last one counts. KVzip's later passes
        # continue the text.
        nonlocal plan, shown
        for recorder in recorders:
            recorder.layers = []
        if inputs.get("memory") is not None or inputs.get(CACHE) is not None:
            return
        size = tuple((args[0] if args else inputs["inputs_embeds"]).shape[:2])
        known = size in passes
        passes.append(size)
        if size[0] > 1:
            # Parts side by side, which are refused.
            return
        shown = shown if known else fitting(size[1])
        plan = inputs.get("plan")
        for recorder, wanted in zip(recorders, (MEAN in shown[1], shown[1] != [MEAN]), strict=True):
            recorder.maps.clear()
            recorder.layers = [recorder.calls + layer for layer in shown[0] if wanted]

    read_ids, kept = ids, list[int]()
    reader: Any = model if compressor is None else compressor.encoder_lm.model
    hook = reader.get_decoder().register_forward_pre_hook(begin, with_kwargs=True)
    try:
        with torch.no_grad(), attach(reader), recorders[0], recorders[1]:
            if compressor is None:
                reader.get_decoder()(torch.tensor([ids], device=model.device), use_cache=False)
            else:
                memory, rows = compressor.encode_contexts(compressor.contexts([ids]))
                rows = compressor.with_bos(rows) if isinstance(compressor, InPlace) else rows
                (read_ids,) = rows.lists()
                kept = compressor.kept_tokens(memory)
    finally:
        hook.remove()
    if compressor is not None and reader is not model:
        (read_ids,) = encoder_ids(compressor, [read_ids])
        tokenizer = tokenizer if compressor.shares_tokens else compressor.encoder_tokenizer
    if sum(rows for rows, _ in passes) > 1 and {*passes} != {(1, len(read_ids))}:
        raise ValueError(
            f"--text: expected a text that {compressor.title} reads in one pass, got {len(ids)} tokens, which it reads "
            "in parts; show one of them"
        )
    layers = zip(*(recorder.maps for recorder in recorders if recorder.maps), strict=True)
    maps = [torch.cat([found.weights[0] for found in layer]) for layer in layers]
    return _Shown(*shown, maps, plan, token_texts(tokenizer, read_ids), kept)


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
