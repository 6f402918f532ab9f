"""Methods with a compressed token a window, written out on transformers' attention: row by row, each with its maps."""

import contextlib
import inspect

import torch
from torch.nn import functional as F
from transformers import DynamicCache

from gistkit.compress import AvgPool
from gistkit.hf import CACHE
from tests.helpers.models import additive, eager
from tests.helpers.rules import RULES


def rotate(x, positions, inv_freq):
    """Rotary embedding of x [1, H, N, D] at positions [N]."""
    angles = torch.tensor(positions, dtype=torch.float64)[:, None] * inv_freq.double()
    cos, sin = (torch.cat([f(angles), f(angles)], -1) for f in (torch.cos, torch.sin))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def written_out(method, context, ratio, options):
    """Of pass 1, by the rule of the method's layout: position IDs of context, compressed tokens and the first text
    token; the places of BOS, context and compressed tokens in logical order; and the mask [1 + n + m, 1 + n + m].
    """
    rule = RULES[method]
    known = {name: value for name, value in options.items() if name in inspect.signature(rule).parameters}
    tokens, sees, ids = rule(context, ratio, 1, **known)
    ids = list(ids)
    places = [i for kind in ("bos", "context", "memory") for i, (its, _) in enumerate(tokens) if its == kind]
    mask = torch.tensor([[bool(sees(i, tokens[i], j, tokens[j])) for j in places] for i in places])
    own = [ids[place] for place in places]
    return own[1 : 1 + context], own[1 + context :], ids[-1], places, mask


def merged(layer, name):
    """One LoRA adapter's whole map."""
    weight = layer.base_layer.weight + layer.scaling[name] * layer.lora_B[name].weight @ layer.lora_A[name].weight
    return lambda x: F.linear(x, weight, layer.base_layer.bias)


def table(layer, name):
    """The look-up of one LoRA adapter's whole table."""
    base = layer.base_layer
    added = layer.scaling[name] * layer.lora_embedding_B[name] @ layer.lora_embedding_A[name]
    scale = getattr(base, "embed_scale", 1.0)
    return lambda ids: (base.weight + added.T)[ids] * scale


def trained(layer, name):
    """The norm, or any other module, that an adapter has in place of the model's."""
    module = layer.modules_to_save[name]
    return lambda x: type(module).forward(module, x)


@contextlib.contextmanager
def maps_by_row(compressor, is_gist):
    """Every linear map of the layers, norm and look-up as torch.where of two whole ones; `is_gist` bool [N]."""
    patched = []
    copies = {} if compressor.copies is None else compressor.copies.maps
    own = {compressor.model.get_decoder().get_submodule(path.replace("/", ".")): its for path, its in copies.items()}
    if compressor.adapters is not None:
        names = compressor.adapters.names
        first, gists = next(iter(names.values())), names.get("memory")
        for layer in compressor.model.modules():
            found = [(merged, "lora_A"), (table, "lora_embedding_A"), (trained, "modules_to_save")]
            for of_adapter, part in found:
                if first in getattr(layer, part, ()):
                    text = of_adapter(layer, first)
                    separate = of_adapter(layer, gists) if gists in getattr(layer, part) else text
                    patched.append((layer, text, own.get(layer) or separate))
    done = {module for module, *_ in patched}
    for module, its in own.items():
        if module not in done:
            patched.append((module, lambda x, m=module: type(m).forward(m, x), its))
    for module, text, memory in patched:
        # Ids are those of the first rows: gists are not looked up.
        module.forward = lambda x, t=text, m=memory: (
            t(x) if m is t else torch.where(is_gist[: x.shape[1], None], m(x), t(x))
        )
    try:
        yield
    finally:
        for module, _, _ in patched:
            del module.forward


def masks_of(model, mask, places):
    """`mask` for each kind of layer; sliding windows cut by places [keys], the queries being the last ones."""
    full = additive(mask)
    width = getattr(model.config, "sliding_window", None)
    if width is None:
        return full
    rows = torch.tensor(places)[-mask.shape[0] :, None]
    cut = additive(mask & (rows - torch.tensor(places)[None] < width))
    if getattr(model.config, "layer_types", None):
        return {"full_attention": full, "sliding_attention": cut}
    return cut


def projected(compressor, layer, hidden, positions):
    """Keys and values of hidden [1, K, d] by a layer's own norm and projections."""
    attention, rotary = layer.self_attn, compressor.model.get_decoder().rotary_emb
    kinds = getattr(compressor.model.config, "layer_types", None)
    inv_freq = getattr(rotary, "inv_freq", None)
    if inv_freq is None:
        inv_freq = getattr(rotary, f"{kinds[attention.layer_idx]}_inv_freq")
    normed = layer.input_layernorm(hidden)
    key, value = (
        p(normed).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for p in (attention.k_proj, attention.v_proj)
    )
    if hasattr(attention, "k_norm"):
        key = attention.k_norm(key)
    return key, value, lambda k: rotate(k, positions, inv_freq)


def means(hidden, ratio):
    return torch.stack([part.mean(-2) for part in hidden.split(ratio, -2)], -2)


def states(compressor, ids, text):
    """Hidden states [T + 1, d] after the memory and at each token of `text`; ids and text are lists of token ids."""
    model, ratio, method = compressor.model, compressor.chunk, compressor.method
    layers = model.get_decoder().layers
    options = {k: v for k, v in compressor.settings.items() if k not in ("ratio", "window", "losses")}
    ctx, memory, start, places, mask = written_out(method, len(ids), ratio, options)
    count, pooled = len(memory), isinstance(compressor, AvgPool)
    embed = compressor.embed
    with maps_by_row(compressor, torch.zeros(1 + len(ids), dtype=torch.bool)):
        inputs = embed(torch.tensor([[compressor.bos_token, *ids]]))
    if pooled:
        # Means have no place in the pass.
        positions, places, mask = [0, *ctx], [0, *ctx], mask[: 1 + len(ids), : 1 + len(ids)]
    else:
        slots = compressor.memory_embeddings.double()
        slots = slots[:count] if slots.shape[0] > 1 else slots.expand(count, -1)
        inputs, positions = torch.cat([inputs, slots[None]], 1), [0, *ctx, *memory]
    is_gist = torch.arange(len(positions)) > len(ids)
    befores, afters, kept = [], [], {}

    def hook(_, args, out):
        befores.append(args[0])
        afters.append(out)

    handles = [layer.register_forward_hook(hook) for layer in layers]
    cache = DynamicCache()
    try:
        with maps_by_row(compressor, is_gist), eager(model):
            out = model.get_decoder()(
                inputs_embeds=inputs, attention_mask=masks_of(model, mask, places),
                position_ids=torch.tensor([positions]), **{CACHE: cache}, use_cache=True,
            ).last_hidden_state  # fmt: skip
    finally:
        for handle in handles:
            handle.remove()
    last = out[:, -1:]
    nobody = lambda n: torch.zeros(n, dtype=torch.bool)  # noqa: E731
    for index, layer in enumerate(layers):
        own = cache.layers[index]
        first = own.keys[:, :, :1], own.values[:, :, :1]
        if pooled:
            hidden = befores[index][:, 1:]
            if compressor.pool == "hidden":
                with maps_by_row(compressor, nobody(count)):
                    key, value, turn = projected(compressor, layer, means(hidden, ratio), memory)
            else:
                with maps_by_row(compressor, nobody(len(ids))):
                    key, value, turn = projected(compressor, layer, hidden, memory)
                key, value = means(key, ratio), means(value, ratio)
            rest = turn(key), value
        elif options.get("offset"):
            with maps_by_row(compressor, nobody(count)):
                key, value, turn = projected(compressor, layer, afters[index][:, 1 + len(ids) :], memory)
            rest = turn(key), value
        else:
            rest = own.keys[:, :, -count:], own.values[:, :, -count:]
        kept[index] = [torch.cat(pair, 2) for pair in zip(first, rest, strict=True)]
    reading = DynamicCache()
    for index, (key, value) in kept.items():
        reading.update(key, value, index)
    text_positions = list(range(start, start + len(text)))
    seen = torch.ones(len(text), 1 + count + len(text)).tril(1 + count).bool()
    # Sliding windows count the places of the uncompressed order.
    places = [0, *[int(p) for p in memory], *text_positions]
    with maps_by_row(compressor, nobody(len(text))), eager(model):
        out = model.get_decoder()(
            inputs_embeds=embed(torch.tensor([text])), attention_mask=masks_of(model, seen, places),
            position_ids=torch.tensor([text_positions]), **{CACHE: reading}, use_cache=True,
        ).last_hidden_state  # fmt: skip
    return torch.cat([last, out], 1)[0]


def unsettle(compressor, std=0.1, among=("lora_B", "copies.")):
    """Trained-like weights: adapters that change something, copies that differ from what they copy."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in compressor.trainable():
            if any(part in name for part in among):
                parameter += std * torch.randn_like(parameter)
    return compressor
