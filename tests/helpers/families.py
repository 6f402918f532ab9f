"""Every causal language model class of transformers that a tiny configuration builds, and what gistkit does in it."""

import functools
import re
import warnings

import torch
import transformers
from transformers.masking_utils import eager_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gistkit.compress import ICAE, AvgPool, Dodo, FiveHundredX, Gist, GistPool
from gistkit.hf import attach, encode_positions, sliding_windows
from gistkit.hf.shrink import small_config
from gistkit.layouts import Layout, Role
from gistkit.layouts.relations import ALL, CAUSAL, SEGMENT_CAUSAL
from gistkit.nn import NoPE, SeqPE, SeqPEPositions
from tests.helpers.encodings import projected
from tests.helpers.models import by_hand

# What the defaults of a configuration lack, or leave out of what a test should see.
SETTINGS = {
    "Nemotron": {"num_key_value_heads": 8},
    "DeepseekV2": {"num_experts_per_tok": 2, "num_key_value_heads": 32},
    "HunYuanDenseV1": {"head_dim": 128},
    "HunYuanMoEV1": {"head_dim": 128},
    "Ministral": {"head_dim": 128, "sliding_window": 4096},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1},
    "Qwen2Moe": {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1},
    "Phimoe": {"sliding_window": 4096},
    "Starcoder2": {"sliding_window": 4096},
    "Phi3": {"sliding_window": 4096},
    "HyperCLOVAX": {"logits_scaling": 0.25},
    "Granite": {"logits_scaling": 8.0},
}
METHODS = {
    "ICAE": functools.partial(ICAE, chunk=6, ratio=3),
    "500x": functools.partial(FiveHundredX, chunk=6, ratio=3),
    "Gist": functools.partial(Gist, ratio=3),
    "Dodo": functools.partial(Dodo, ratio=3, layer=1, separate=False),
    "AvgPool": functools.partial(AvgPool, ratio=3),
    "GistPool": functools.partial(GistPool, ratio=3, offset=True, separate=False),
}
# Too large to build whatever its settings, by adapters and encoders of its own.
LEFT_OUT = {"Phi4MultimodalForCausalLM"}
LENGTH = 14


def classes():
    """{class name: its type of model}, of which no module is loaded yet."""
    found = {}
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        name = name[0] if isinstance(name, tuple) else name
        if kind in CONFIG_MAPPING and name not in LEFT_OUT:
            found.setdefault(name, kind)
    return found


def tiny_of(name):
    """A tiny model of a class by its name, or None where its configuration builds none."""
    config = CONFIG_MAPPING[classes()[name]]
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[config]
    kind = kind[0] if isinstance(kind, tuple) else kind
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            full = config(**SETTINGS.get(re.sub("(ForCausalLM|LMHeadModel)$", "", name), {}))
            if full.get_text_config(decoder=True) is not full:
                return None
            torch.manual_seed(0)
            model = kind(small_config(full)).float().eval()
            model(torch.ones(1, 3, dtype=torch.int64))
        except Exception:
            return None
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.2)
            else:
                weight.add_(torch.randn_like(weight), alpha=0.1)
    return model


def layout():
    """A context in segments that see only themselves, and a text that sees all of it; positions with gaps."""
    roles = [Role.CONTEXT] * 8 + [Role.TEXT] * (LENGTH - 8)
    return Layout(
        roles=roles,
        segments=[index // 3 for index in range(LENGTH)],
        positions=[3 * index // 2 for index in range(LENGTH)],
        sees={Role.CONTEXT: {Role.CONTEXT: SEGMENT_CAUSAL}, Role.TEXT: {Role.CONTEXT: ALL, Role.TEXT: CAUSAL}},
    )


def dense_layout():
    """The same visibility, written out: bool [N, N]."""
    row, column = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    return (column <= row) & ((row >= 8) | (row // 3 == column // 3))


def dense(model, visible=None, more=0.0):
    """transformers' attention interface with dense masks: the model's own, and `visible` besides.

    `more` is added to the products of queries and keys.
    """

    def attention(module, query, key, value, attention_mask, scaling=None, softcap=None, **kwargs):
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        logits = (query @ key.transpose(2, 3) + more) * (query.shape[3] ** -0.5 if scaling is None else scaling)
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        logits = logits + attention_mask[..., : key.shape[2]]
        if visible is not None:
            logits = logits.masked_fill(~visible, float("-inf"))
        return (logits.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    return by_hand(model.get_decoder(), attention, eager_mask)


def off(found, expected):
    """The largest difference as a part of the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


@torch.no_grad()
def check_attach(model):
    """How far a model under `attach` is from dense attention: causal, and under a plan."""
    ids = torch.randint(3, 60, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    ones, positions = torch.ones_like(ids), torch.tensor([[3 * index // 2 for index in range(LENGTH)]])
    with dense(model):
        causal = model(ids, use_cache=False).logits
    with dense(model, dense_layout()):
        planned = model(ids, attention_mask=ones, position_ids=positions, use_cache=False).logits
    plan = layout().compile(windows=sliding_windows(model))
    with attach(model):
        return (
            off(model(ids, use_cache=False).logits, causal),
            off(model(ids, plan=plan, use_cache=False).logits, planned),
        )


@torch.no_grad()
def check_encoding(model):
    """How far SeqPE's bias in a model, without its own positions and beside them, is from dense attention with it.

    At position 0 RoPE turns nothing.
    """
    with encode_positions(model, NoPE()):
        # Or refused, before sizes are asked that others do not have.
        decoder = model.get_decoder()
    heads, width = decoder.config.num_attention_heads, head_dim(decoder)
    keys = getattr(decoder.config, "num_key_value_heads", None) or heads
    torch.manual_seed(0)
    encoder = SeqPE(16, digits=2, heads=2, std=0.3)
    position = SeqPEPositions(encoder, heads, width, key_heads=keys, std=0.3).eval()
    ids, places = torch.randint(3, 60, (1, LENGTH), generator=torch.Generator().manual_seed(1)), torch.arange(LENGTH)
    e_q, e_k = projected(position, places[None], 0)
    bias = e_q @ e_k.repeat_interleave(heads // keys, 1).transpose(2, 3)
    errors = []
    gpt2 = decoder.config.model_type == "gpt2"
    for rope in (False,) if gpt2 else (False, True):
        with dense(model, more=bias):
            given = {"position_ids": places[None] * (rope or gpt2)}
            if gpt2:
                decoder.wpe.weight.zero_()
            expected = model(ids, attention_mask=torch.ones_like(ids), use_cache=False, **given).logits
        with encode_positions(model, position, rope=rope):
            errors.append(off(model(ids, use_cache=False).logits, expected))
    return max(errors)


def head_dim(decoder):
    """The width of a head, as attention sees it."""
    config = decoder.config
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


@torch.no_grad()
def check_method(model, method):
    """How far a compressor is from what the model itself says: of its reading, and of its logits."""
    compressor = METHODS[method](model, lora=None, **({} if method in ("ICAE", "500x") else {"bos_token": 1}))
    compressor.eval()
    ids = torch.randint(3, 60, (1, 12), generator=torch.Generator().manual_seed(1))
    memory = compressor.encode(ids[:, :6])
    states = compressor.decode(memory, "qa", ids[:, 6:])
    # Generation reads through a cache what decoding reads as a memory.
    written = compressor.generate(memory, ids[:, 6:], task="qa", max_new_tokens=2, stop_tokens=())
    choice = compressor.logits(states[:, -1])
    gap = float(choice.max() - choice[0, written[0, 0]])
    again = compressor.logits(compressor.decode(memory, "qa", torch.cat([ids[:, 6:], written[:, :1]], 1))[:, -1])
    gap = max(gap, float(again.max() - again[0, written[0, 1]])) / float(choice.abs().max())
    with dense(model):
        own = model(ids, use_cache=False)
        hidden = model.get_decoder()(ids, use_cache=False).last_hidden_state
    errors = [gap, off(compressor.logits(hidden), own.logits.float())]
    if method == "Dodo":
        everything = Dodo(model, ratio=1, layer=1, separate=False, lora=None, bos_token=1).eval()
        read = everything.logits(everything.decode(everything.encode(ids[:, :6]), "qa", ids[:, 6:]))[:, 1:]
        with dense(model):
            whole = model(torch.cat([torch.ones_like(ids[:, :1]), ids], 1), use_cache=False).logits[:, 7:]
        errors.append(off(read, whole))
    return max(errors)


@torch.no_grad()
def row(name):
    """What gistkit does in a class: {"attach": .., and each method: ..}, "yes", or why not. None: no tiny model."""
    model = tiny_of(name)
    if model is None:
        return None
    try:
        with attach(model):
            pass
    except TypeError as error:
        return {"attach": reason(error)}
    cells = {"attach": verdict(max(check_attach(model)))}
    try:
        cells["positions"] = verdict(check_encoding(tiny_of(name)))
    except Exception as error:
        cells["positions"] = reason(error)
    for method in METHODS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                cells[method] = verdict(check_method(tiny_of(name), method))
        except Exception as error:
            cells[method] = reason(error)
    return cells


def verdict(error):
    return "yes" if error < 1e-3 else f"wrong by {error:.2g}"


def reason(error):
    """What a refusal says of the model; it begins like all of gistkit's."""
    message = str(error)
    if not isinstance(error, TypeError) or not message.startswith("model: expected "):
        return f"wrong: {type(error).__name__}: {message}"
    return " ".join(message.rpartition(", got ")[2].split())


COLUMNS = ("attach", "positions", *METHODS)


def line(name, cells):
    """A row of the table in docs/families.md."""
    refusals = [cells[column] for column in COLUMNS if cells.get(column, "yes") != "yes"]
    marks = [("yes" if cells[column] == "yes" else "no") if column in cells else "" for column in COLUMNS]
    # Each reason once, without the name of the class and the details of an error.
    reasons = {refusal.partition(": ")[2] or refusal.partition(" ")[2].removeprefix("with ") for refusal in refusals}
    reasons = {re.split(r" \(|\)$", reason)[0] for reason in reasons}
    return f"| {name} | {' | '.join(marks)} | {'; '.join(sorted(reasons))} |"
