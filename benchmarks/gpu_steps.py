"""Whole training steps, and answers, of a model of 1.2 billion weights on a GPU, beside transformers without gistkit.

A step is forward and backward of the autoencoding loss with LoRA of rank 64 on a random Llama in bfloat16: half of its
tokens are context, half text. The plain step is a causal LoRA step of as many tokens by transformers' SDPA and PEFT. An
answer is 32 tokens after 16 of a question: from a memory, and from the whole context, which has to be read first.
Each row is on the disk once measured; a contender that fails is a row with its error.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpu import check, machine, parsed, parser, recording, rounded, said
from gpu_clock import Rows, at_most
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from gistkit.compress import ICAE, AvgPool, Dodo, FiveHundredX, GistPool, MixedResolution

LARGE = {"vocab_size": 49152, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
         "num_attention_heads": 16, "num_key_value_heads": 8}  # fmt: skip
TINY = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
RATIO, RANK, QUESTION, ANSWER = 8, 64, 16, 32
# Most seconds of a row: a step's, and an answer's.
LIMIT = 40.0
Step = Callable[[], Any]


@dataclass(frozen=True)
class Setting:
    """Where and how large: `shapes` are (rows, tokens) of steps, `context` the tokens of the answers' contexts."""

    device: str
    model: dict[str, int]
    shapes: Sequence[tuple[int, int]]
    context: int
    chunk: int = 512
    dtype: torch.dtype = torch.bfloat16

    def ids(self, rows: int, length: int) -> torch.Tensor:
        """Random tokens."""
        return torch.randint(3, self.model["vocab_size"], (rows, length), device=self.device)

    def fresh(self, attention: str = "sdpa") -> LlamaForCausalLM:
        """The random model."""
        torch.manual_seed(0)
        config = LlamaConfig(
            **self.model, max_position_embeddings=1 << 20, bos_token_id=1, eos_token_id=2, attn_implementation=attention
        )
        with torch.device(self.device):
            return LlamaForCausalLM(config).to(self.dtype)


def compressors(chunk: int) -> dict[str, Callable[[Any], Any]]:
    """Makers of what trains, by the row's name."""
    shared: dict[str, Any] = {"ratio": RATIO, "losses": ("ae",), "lora": RANK}
    return {
        "GistPool": lambda model: GistPool(model, separate=False, **shared),
        "AvgPool": lambda model: AvgPool(model, **shared),
        "500x": lambda model: FiveHundredX(model, chunk=chunk, **shared),
        "ICAE": lambda model: ICAE(model, chunk=chunk, **shared),
        "Dodo": lambda model: Dodo(model, selection="strided", **shared),
        "Dodo, reading on": lambda model: MixedResolution(
            Dodo(model, selection="strided", separate=False, ratio=RATIO, lora=RANK), tau=128, segment=32
        ),
    }


def plain_step(setting: Setting, rows: int, length: int, attention: str, *, dense: bool = False) -> Step:
    """A causal LoRA step of transformers and PEFT; `dense`: with a mask of all pairs, as public code of papers has."""
    model: Any = get_peft_model(
        setting.fresh(attention), LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    ).train()
    ids, targets = setting.ids(rows, length), length // 2
    inner, mask = model.base_model.model, None
    if dense:
        mask = torch.ones(length, length, dtype=torch.bool, device=setting.device).tril()[None, None]

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        states = inner.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[:, -targets:]
        loss = F.cross_entropy(
            F.linear(states, inner.lm_head.weight).float().flatten(0, 1), ids[:, -targets:].flatten()
        )
        loss.backward()
        return loss

    return step


def our_step(setting: Setting, trained: Any, rows: int, length: int) -> Step:
    """A step of one of `compressors`."""
    compressor = getattr(trained, "compressor", trained)
    compressor.train()
    ids = setting.ids(rows, length // 2 if trained is compressor else length)

    def step() -> torch.Tensor:
        for _, parameter in compressor.trainable():
            parameter.grad = None
        loss: torch.Tensor = trained(ids)["loss"]
        loss.backward()
        return loss

    return step


def steps(setting: Setting) -> Iterator[tuple[str, str, Callable[[], Step]]]:
    """Case, form, and what makes the step."""
    for rows, length in setting.shapes:
        case = f"step, {rows} x {length}"
        yield case, "plain causal: transformers, SDPA", lambda r=rows, n=length: plain_step(setting, r, n, "sdpa")
        for name, make in compressors(setting.chunk).items():
            yield case, name, lambda r=rows, n=length, make=make: our_step(setting, make(setting.fresh()), r, n)
        yield (
            case,
            "plain causal: transformers, SDPA with a dense mask",
            lambda r=rows, n=length: plain_step(setting, r, n, "sdpa", dense=True),
        )
        if setting.device == "cuda":
            flex = "plain causal: transformers, FlexAttention"
            yield case, flex, lambda r=rows, n=length: plain_step(setting, r, n, "flex_attention")


def whole_context(setting: Setting, **options: Any) -> Step:
    """Transformers' answer from the whole context."""
    model, ids = setting.fresh().eval(), setting.ids(1, setting.context + QUESTION)
    tokens = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER, "do_sample": False, "pad_token_id": 0}
    return lambda: model.generate(ids, **tokens, **options)


def answers(setting: Setting) -> Iterator[tuple[str, str, Callable[[], Step]]]:
    """Case, form, and what makes the call."""
    case, context = f"{ANSWER} tokens, {setting.context} of context", setting.context
    yield case, "whole context: transformers", lambda: whole_context(setting)
    if setting.device == "cuda":
        static = "whole context: transformers, static cache, compiled"
        yield case, static, lambda: whole_context(setting, cache_implementation="static")
    made: dict[str, tuple[Any, torch.Tensor, Any]] = {}

    def encode(name: str) -> Step:
        made.clear()
        compressor = compressors(setting.chunk)[name](setting.fresh()).eval()
        ids = setting.ids(1, context)
        made[name] = compressor, setting.ids(1, QUESTION), compressor.encode(ids)
        return lambda: compressor.encode(ids)

    def read(name: str) -> Step:
        compressor, question, memory = made[name]
        return lambda: compressor.generate(memory, prompt_ids=question, max_new_tokens=ANSWER)

    for name in ("GistPool", "AvgPool", "500x", "ICAE", "Dodo"):
        yield f"encode, {context} tokens", name, lambda name=name: encode(name)
        yield case, name, lambda name=name: read(name)


class Calls(TorchDispatchMode):
    """Counts the operations that a pass asks of a device: what the host has to launch, whatever the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Views and memory launch nothing.
        self.count += not (func.is_view or func.overloadpacket.__name__ in ("empty", "new_empty", "_unsafe_view"))
        return func(*args, **(kwargs or {}))


def timed(call: Step, device: str, runs: int) -> dict[str, float]:
    """Medians of a call's milliseconds, of the host's until it returns, and the peak of memory."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    for _ in range(2):
        call()
    wait()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    whole, host = [], []
    for _ in range(runs):
        begun = time.perf_counter()
        call()
        host.append((time.perf_counter() - begun) * 1e3)
        wait()
        whole.append((time.perf_counter() - begun) * 1e3)
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return {"ms": statistics.median(whole), "host_ms": statistics.median(host), "gib": peak}


def measure(setting: Setting, rows: Rows, deadline: float, runs: int, only: str) -> None:
    """Measures row by row until all is done or the time is up."""
    for part in (answers, steps):
        for case, form, make in part(setting):
            if only not in f"{case}, {form}" and part is steps:
                continue
            left = deadline - time.monotonic()
            if left <= 0:
                return
            call, found = None, {}
            try:
                with at_most(min(LIMIT, left)):
                    call = make()
                    with torch.set_grad_enabled(part is steps):
                        found = {name: rounded(x) for name, x in timed(call, setting.device, runs).items()}
            except Exception as error:
                found = {"error": said(error)}
            rows.add({"case": case, "form": form, **found})
            print(f"{case:36} {form:52} " + ", ".join(f"{name} {value}" for name, value in found.items()), flush=True)
            call = None
            check(setting.device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures until all is done or the budget ends."""
    begun = time.monotonic()
    example = "python benchmarks/gpu_steps.py --budget 120 --json runs/gpu/steps.jsonl"
    options = parser(__doc__, "steps", 120, example)
    options.add_argument("--long", action="store_true", help="steps of 32768 tokens too")
    chosen = parsed(options, arguments)
    facts = machine(chosen.device)
    print("gpu_steps: " + ", ".join(f"{key} {value}" for key, value in facts.items()), flush=True)
    shapes = [(1, 8192), (8, 1024), *([(1, 32768)] if chosen.long else [])]
    setting = Setting(chosen.device, LARGE, shapes, 4096)
    if chosen.quick:
        setting = Setting(chosen.device, TINY, [(2, 128)], 64, chunk=32)
    with recording(chosen, "steps", facts) as rows:
        measure(setting, rows, begun + chosen.budget, 2 if chosen.quick else 3, chosen.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
