"""Trains an adapter of any model to answer from whole contexts, so that selections can be compared under it.

The questions are those of training_questions.jsonl, each about a part of its page with as many tokens as one of
`LENGTHS`, and questions about made-up facts. A step reads a few contexts and asks some questions about each.

example: OMP_NUM_THREADS=1 python lab/models/adapter.py runs/gemma.gguf --steps 150 --out runs/gemma
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from make import lora_of
from reader import HELD_OUT, Asked, by_hand, facts_about, losses, new_optimizer, update
from texts import manuals
from transformers import AutoModelForCausalLM, AutoTokenizer

from gistkit.compress import Select
from gistkit.hf.smollm2 import unpacked

# Tokens of contexts with questions by hand.
LENGTHS = (384, 512, 768, 1024)
RANK = 32


def folder_of(model: Path, out: Path) -> Path:
    """The model as a folder of transformers: itself, or what is written into `out` of a GGUF file."""
    if model.suffix != ".gguf":
        return model
    unpacked(model).save_pretrained(folder := out / "model")
    AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name).save_pretrained(folder)
    return folder


def train(
    model: Any, tokenizer: Any, known: Sequence[tuple[list[int], list[Asked]]], *, steps: int, size: int, most: int,
    rate: float,
) -> Select:  # fmt: skip
    """A selection with the adapter: KVzip at 4x, which can be asked for any other ratio.

    A step has up to `most` questions about each of `size` contexts, every other one of which is one with made-up facts.
    """
    corpus = manuals(tokenizer)
    made = Select(model, ratio=4, by="kvzip", lora=lora_of(RANK), losses="qa")
    made.trained_length = max(LENGTHS)
    # The same weights; it keeps everything, and needs no score.
    whole = made.changed(by="even").at(1).train()
    optimizer = new_optimizer([parameter for _, parameter in made.trainable()])
    total, begun = 0.0, time.monotonic()
    for step in range(steps):
        draw = random.Random(step)
        for part in range(size):
            seed = HELD_OUT + step * size + part
            context, asked = facts_about(seed, tokenizer, corpus) if part % 2 else draw.choice(known)
            asked = draw.sample(asked, min(most, len(asked)))
            memory = whole.encode_contexts(whole.contexts([context]))[0]
            loss, _, _ = losses(whole, memory.repeat(len(asked)), asked)
            (loss / size).backward()
            total += loss.item() / size
        update(optimizer, rate, step, steps)
        if step % 10 == 9:
            line = {"step": step + 1, "seconds": round(time.monotonic() - begun), "nats": round(total / 10, 4)}
            print(json.dumps(line), flush=True)
            total = 0.0
    return made.eval()


def main() -> int:
    """Trains, and writes the compressor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of a transformers decoder model, or a GGUF file")
    parser.add_argument("--steps", type=int, default=150, help="updates (default: %(default)s)")
    parser.add_argument("--size", type=int, default=2, help="contexts of a step (default: %(default)s)")
    parser.add_argument("--most", type=int, default=5, help="questions about each (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=3e-4, help="of learning (default: %(default)s)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default: %(default)s")
    parser.add_argument("--out", type=Path, required=True, help="folder for the compressor, in OUT/adapter")
    options = parser.parse_args()
    torch.manual_seed(0)
    folder = folder_of(options.model, options.out)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, options.dtype))
    schedule = {"steps": options.steps, "size": options.size, "most": options.most, "rate": options.rate}
    known = [one for length in LENGTHS for one in by_hand(tokenizer, length)]
    train(model, tokenizer, known, **schedule).save_pretrained(options.out / "adapter")
    return 0


if __name__ == "__main__":
    sys.exit(main())
