"""Small random transformers models and a tokenizer, and their own attention as an oracle in double precision."""

import contextlib
from unittest import mock

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedTokenizerFast

from gistkit.compress import METHODS

# Model, its config and what is particular to it; the sliding windows are shorter than the tests' sequences.
FAMILIES = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {"head_dim": 16, "sliding_window": 6}),
    "qwen2": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {"head_dim": 16}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {"head_dim": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 50.0, "sliding_window": 5},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
}
# Another family that follows the attention interface: our attention, its own RoPE.
OTHERS = {"phi3": ("Phi3ForCausalLM", "Phi3Config", {"sliding_window": 6, "pad_token_id": 0})}
COMMON = {
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "attn_implementation": "sdpa",
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,
}
# Of two ways to compute the same in double precision.
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}


def tiny(family, **changes):
    """A two-layer model of one family in double precision, in eval mode."""
    model, config, own = (FAMILIES | OTHERS)[family]
    settings = COMMON | own | changes
    if family == "gpt2":
        renamed = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
        renamed |= {"max_position_embeddings": "n_positions", "intermediate_size": "n_inner"}
        settings = {renamed.get(key, key): value for key, value in settings.items() if key != "num_key_value_heads"}
    if family == "gemma2":
        settings["attn_implementation"] = "eager"
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**settings)).double().eval()


def tiny_llama(**changes):
    """A two-layer Llama in double precision, in eval mode.

    Its own attention is torch's: transformers' eager form takes its softmax in single precision whatever the model's.
    """
    return tiny("llama", **changes)


def tokens(*shape):
    """Ids of tokens that are no padding, no BOS and no end."""
    return torch.randint(2, 50, shape)


def small(name, model, layout="epl"):
    """A compressor of 16 tokens, with a memory token for four."""
    own = {"icae": {"chunk": 8, "layout": layout}, "x500": {"chunk": 8, "layout": layout}, "dodo": {"layer": 1}}
    return METHODS[name](model, ratio=4, window=16, lora=4, **own.get(name, {}))


def checkpoint(model, **options):
    """Switches on the model's own gradient checkpointing, whose name differs between releases of transformers."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options or None)
    return model


def byte_tokenizer(start=False):
    """A token a byte, 0..255; 256 ends a text, and 257 begins one where `start`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if not start:
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    tokenizer.add_special_tokens(["<end>", "<start>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<start> $A", special_tokens=[("<start>", 257)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", bos_token="<start>")


@contextlib.contextmanager
def double_angles(model):
    """transformers' own RoPE with angles in double precision, so that nothing but rounding separates the two."""
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    # Qwen's RoPE for images takes its angles in single precision; gistkit uses it as it is.
    if rotary is None or "forward" in vars(rotary) or hasattr(rotary, "mrope_section"):
        yield model
        return

    def forward(x, position_ids, layer_type=None):
        prefix = "" if layer_type is None else f"{layer_type}_"
        angles = position_ids[..., None].double() * getattr(rotary, f"{prefix}inv_freq").double()
        angles = torch.cat((angles, angles), -1)
        scaling = getattr(rotary, f"{prefix}attention_scaling")
        return (angles.cos() * scaling).to(x.dtype), (angles.sin() * scaling).to(x.dtype)

    rotary.forward = forward
    try:
        yield model
    finally:
        del rotary.forward


@contextlib.contextmanager
def attending(model, name):
    """The model's own layers on an attention of transformers' interface."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield model
    finally:
        model.set_attn_implementation(before)


def by_hand(model, attention, mask=lambda *args, **kwargs: None):
    """The model's own layers on `attention`, in transformers' calling convention, with the masks that `mask` makes."""
    AttentionInterface.register("by_hand", attention)
    AttentionMaskInterface.register("by_hand", mask)
    return attending(model, "by_hand")


@contextlib.contextmanager
def eager(model):
    """The model's own eager attention and RoPE, with softmax and angles in the model's precision."""
    softmax = torch.nn.functional.softmax
    exact = mock.patch.object(torch.nn.functional, "softmax", lambda x, dim, dtype=None: softmax(x, dim=dim))
    with attending(model, "eager"), double_angles(model), exact:
        yield model


def additive(mask):
    """A boolean mask [..., Nq, Nk] as the 4-D additive mask that transformers passes on untouched."""
    mask = mask if mask.dim() == 4 else mask[None, None]
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)


def masked_logits(model, ids, mask, positions, windowed=None):
    """The model's own logits under a boolean mask [Nq, Nk], and `windowed` in the layers with a sliding window."""
    full, cut = additive(mask), additive(mask if windowed is None else windowed)
    if getattr(model.config, "layer_types", None):
        masks = {"full_attention": full, "sliding_attention": cut}
    else:
        masks = cut if getattr(model.config, "sliding_window", None) else full
    with eager(model):
        return model(ids, attention_mask=masks, position_ids=positions, use_cache=False).logits


def same_gradients(compressor, step, other, rtol=1e-9, atol=1e-9):
    """The gradients by name of the losses `step()` and `other()`, which are the same."""
    found = []
    for loss in (step, other):
        compressor.zero_grad()
        loss().backward()
        found.append({name: p.grad for name, p in compressor.trainable() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=rtol, atol=atol, msg=name)
    return found[0]


def same_under_checkpointing(compressor, step, **near):
    """The gradients by name of `step()`, a loss in training mode, which gradient checkpointing leaves as they are."""

    def checkpointed():
        compressor.gradient_checkpointing_enable()
        return step()

    compressor.train()
    return same_gradients(compressor, step, checkpointed, **near)
