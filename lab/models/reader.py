"""Trains readers of selections: a second adapter, for questions and answers, learns from what the first has kept.

The adapter that reads texts stays as it is, so each text is read once: `texts` keeps its fitted memories of all ratios,
and questions with their answers, about facts put into it or written by hand. A step then costs the tokens of questions
only, at a ratio that it draws.

example: OMP_NUM_THREADS=1 python lab/models/reader.py smollm2-select-4x texts --minutes 30
example: OMP_NUM_THREADS=1 python lab/models/reader.py smollm2-select-4x train --steps 940 --rate 6e-4 --size 8 --most 2
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from make import MODELS, RUNS, lora_of
from manual_questions import together
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from questions import draw_facts
from safetensors.torch import load_file, save_file
from selection import FOLDER, SELECTIONS, build, write_card
from texts import manuals
from torch import Tensor

from gistkit.compress import Memory, Select
from gistkit.compress.folder import ADAPTER_WEIGHTS
from gistkit.compress.losses import divergence_loss, token_loss
from gistkit.compress.methods.in_place import TEXT
from gistkit.compress.methods.select import READER
from gistkit.compress.scores import SCORES
from gistkit.compress.tokens import QUESTION, pad
from gistkit.hf.smollm2 import load_smollm2
from gistkit_lab.evaluate.cloze import cloze_questions
from gistkit_lab.presses.comparison import kept
from gistkit_lab.presses.facts import plant
from gistkit_lab.presses.reader import PressReader

RATIOS = (4, 8, 16)
# Tokens of a text.
SHORTEST, LONGEST = 128, 512
# Texts that are held out, of a seed of their own; texts with questions by hand come after these.
HELD_OUT = 12
HAND, WORDS = "by hand", "next words"
# Questions by hand, about pages that are not held out.
FILE = Path(__file__).with_name("training_questions.jsonl")


@dataclass(frozen=True)
class Asked:
    """A question about a text and its answer, token ids, of one of `questions.KINDS`, `WORDS` or `HAND`."""

    kind: str
    question: list[int]
    answer: list[int]
    # [len(answer), d], the outputs that predict the answer from the whole text, if all of it is right there.
    states: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Read:
    """A text as the model has read it, and what is asked about it."""

    # At each of `RATIOS`.
    memories: list[Memory]
    # The same of a later part of a long context, whose first tokens are kept for their scores only.
    later: list[Memory]
    asked: list[Asked]


def new_reader(name: str, dtype: torch.dtype) -> tuple[Select, PressReader, Any]:
    """A selection whose reader's adapter is a copy of the text's; what reads with it; the tokenizer."""
    one = SELECTIONS[name]
    model, tokenizer = load_smollm2(dtype)
    made = Select(model, lora=lora_of(MODELS[one.adapter].rank), **one.settings).eval()
    weights = load_file(FOLDER / one.adapter / "gistkit_0_text" / ADAPTER_WEIGHTS)
    assert made.adapters is not None
    for adapter in made.adapters.names.values():
        set_peft_model_state_dict(made.adapters.peft, weights, adapter_name=adapter)
    return made, PressReader(model, tokenizer, {"kvzip": SCORES["kvzip"]()}, made, fit=True), tokenizer


def facts_about(seed: int, tokenizer: Any, corpus: Any) -> tuple[list[int], list[Asked]]:
    """A passage with facts in it, and questions about them and about its next words; held out below `HELD_OUT`."""
    draw, is_held_out = np.random.default_rng([11, seed]), seed < HELD_OUT
    tokens = corpus.held_out if is_held_out else corpus.train
    length = int(draw.integers(SHORTEST, LONGEST + 1))
    facts = draw_facts(max(2, length // 64), draw, is_held_out)
    sentences = [fact.sentence for found in facts.values() for fact in found if fact.sentence]
    room = length - sum(len(ids_of(tokenizer, f" {sentence}")) for sentence in sentences)
    start = int(draw.integers(len(tokens) - length))
    plain = tokenizer.decode(tokens[start : start + room].tolist())
    known = [(kind, fact.question, fact.answer) for kind, each in facts.items() for fact in each]
    words = min(40, len(plain.split()))
    for one in cloze_questions(plain, words=words, seed=seed, template="{context}{question}")[:2]:
        known.append((WORDS, str(one.question), one.answers[0]))
    asked = [Asked(kind, *pair_of(tokenizer, question, answer)) for kind, question, answer in known]
    return ids_of(tokenizer, plant(plain, sentences, random.Random(seed))), asked


@torch.no_grad()
def prepared(context: Sequence[int], asked: Sequence[Asked], presses: PressReader) -> Read:
    """A text as the model has read it; what it answers right from all of it gets `Asked.states`."""
    text, select = presses.read(context), presses.select
    memory = presses.first(text, text.length).repeat(len(asked))
    found = []
    for one, states in zip(asked, answer_states(select, memory, asked), strict=True):
        is_right = select.logits(states).argmax(-1).tolist() == one.answer
        found.append(replace(one, states=states.clone() if is_right else None))
    counts = [kept(text.length - 1, ratio) for ratio in RATIOS]
    first, later = (
        [presses.scored(text, "kvzip", count, "all", fit=True, sinks=sinks) for count in counts] for sinks in (None, 0)
    )
    return Read(first, later, found)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Token ids without special tokens."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def pair_of(tokenizer: Any, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Token ids of a question in its prompt, and of an answer with its end."""
    return ids_of(tokenizer, QUESTION.format(question=question)), [*ids_of(tokenizer, answer), tokenizer.eos_token_id]


def by_hand(tokenizer: Any, length: int) -> list[tuple[list[int], list[Asked]]]:
    """The questions by hand, those about up to `length` tokens of a page together."""
    return [
        (one.context, [Asked(HAND, *pair_of(tokenizer, each.question, each.answer)) for each in one.asked])
        for one in together(tokenizer, length, FILE)
    ]


def answer_states(select: Select, memory: Memory, asked: Sequence[Asked]) -> list[Tensor]:
    """The outputs [len(answer), d] that predict each answer after its question."""
    inputs = pad([[*one.question, *one.answer[:-1]] for one in asked], select.device)
    states = select.read(memory, "qa", inputs)
    return [
        row[len(one.question) : len(one.question) + len(one.answer)] for row, one in zip(states, asked, strict=True)
    ]


def write(read: Read, folder: Path) -> None:
    """Writes a folder, which is whole or not there."""
    new = folder.with_suffix(".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for ratio, memory, later in zip(RATIOS, read.memories, read.later, strict=True):
        memory.save(new / f"{ratio}x.gist")
        later.save(new / f"{ratio}x-later.gist")
    torch.save([vars(one) for one in read.asked], new / "asked.pt")
    os.replace(new, folder)


def loaded(folder: Path) -> Read:
    """What `write` wrote."""
    asked = torch.load(folder / "asked.pt", weights_only=True)
    memories, later = ([Memory.load(folder / f"{ratio}x{kind}.gist") for ratio in RATIOS] for kind in ("", "-later"))
    return Read(memories, later, [Asked(**one) for one in asked])


def joined(select: Select, texts: Sequence[Read], index: int) -> tuple[Memory, list[list[Asked]]]:
    """Texts as the parts of one context: its memory at `RATIOS[index]`, and of each text what is asked in no other."""
    times = Counter(tuple(one.question) for text in texts for one in text.asked)
    asked = [[one for one in text.asked if times[tuple(one.question)] == 1] for text in texts]
    first, *others = texts
    return select.join([first.memories[index], *(text.later[index] for text in others)]), asked


def losses(select: Select, memory: Memory, asked: Sequence[Asked]) -> tuple[Tensor, Tensor, Tensor]:
    """Of answers after a memory: cross entropy, divergence from `Asked.states` where there are any, and outputs."""
    states = answer_states(select, memory, asked)
    targets, own = torch.tensor([token for one in asked for token in one.answer]), torch.cat(states)
    loss = token_loss(own, targets=targets, **select.output_embedding)
    pairs = [(rows, one.states) for rows, one in zip(states, asked, strict=True) if one.states is not None]
    both = map(torch.cat, zip(*pairs, strict=True)) if pairs else (own[:0], own[:0])
    return loss, divergence_loss(*both, **select.output_embedding), own


@torch.no_grad()
def held_out(presses: PressReader, texts: Sequence[Read]) -> dict[str, Any]:
    """Of held-out texts at each ratio: nats a token of the answers, and percent of answers that are right, by kind.

    "joined" are those of all texts in one context.
    """
    found: dict[str, Any] = {}
    percent = lambda values: round(100 * sum(values) / len(values), 1)  # noqa: E731
    for index, ratio in enumerate(RATIOS):
        nats, right = [], {}
        for text in texts:
            loss, count, own = answered(presses.select, text.memories[index], text.asked)
            nats.append((loss * count, count))
            for one, is_right in zip(text.asked, own, strict=True):
                right.setdefault(one.kind, []).append(is_right)
        memory, asked = joined(presses.select, texts, index)
        together = [is_right for own in asked if own for is_right in answered(presses.select, memory, own)[2]]
        found[f"{ratio}x"] = {
            "nats": round(float(np.divide(*np.sum(nats, 0))), 4),
            "right": percent([value for values in right.values() for value in values]),
            "joined": percent(together),
            **{kind: percent(values) for kind, values in sorted(right.items())},
        }
    return found


def answered(select: Select, memory: Memory, asked: Sequence[Asked]) -> tuple[float, int, list[bool]]:
    """Of answers after a memory of one row: nats a token, their tokens, and whether each is right."""
    loss, _, states = losses(select, memory.repeat(len(asked)), asked)
    said = select.logits(states).argmax(-1).split([len(one.answer) for one in asked])
    return float(loss), len(states), [ids.tolist() == one.answer for one, ids in zip(asked, said, strict=True)]


def new_optimizer(trained: Sequence[Tensor]) -> torch.optim.Optimizer:
    """What `update` steps."""
    return torch.optim.AdamW(trained, weight_decay=0.0, betas=(0.9, 0.98))


def update(optimizer: torch.optim.Optimizer, rate: float, step: int, steps: int) -> None:
    """One of `steps` updates at a learning rate that rises for 20 steps to `rate` and falls to a tenth of it."""
    (group,) = optimizer.param_groups
    torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
    group["lr"] = rate * min((step + 1) / 20, 1 - 0.9 * step / steps)
    optimizer.step()
    optimizer.zero_grad()


def train(name: str, dtype: torch.dtype, steps: int, rate: float, size: int, most: int, every: int = 100) -> None:
    """Trains for `steps`, or to their end if it has paused; writes a line every `every` steps, and a checkpoint.

    A step has up to `most` questions about each of `size` texts, and draws how many of these a context has: 1, 2, 4 and
    so on to `Selection.parts`. The steps of the reader that models/ has count.
    """
    made, presses, _ = new_reader(name, dtype)
    parts = SELECTIONS[name].parts
    assert made.adapters is not None
    own = made.adapters.names[READER]
    trained = [parameter for key, parameter in made.named_parameters() if own in key.split(".")]
    folder = RUNS / name
    optimizer = new_optimizer(trained)
    done, first, seconds, tokens = 0, 0, 0.0, 0
    if (checkpoint := folder / "checkpoint.pt").exists():
        saved = torch.load(checkpoint, weights_only=True)
        set_peft_model_state_dict(made.adapters.peft, saved["weights"], adapter_name=own)
        optimizer.load_state_dict(saved["optimizer"])
        done, first, seconds, tokens = (saved[key] for key in ("step", "first", "seconds", "tokens"))
    elif (history := FOLDER / name / "history.jsonl").exists():
        weights = load_file(FOLDER / name / f"gistkit_0_{READER}" / ADAPTER_WEIGHTS)
        set_peft_model_state_dict(made.adapters.peft, weights, adapter_name=own)
        shutil.copyfile(history, folder / history.name)
        last = json.loads(history.read_text().splitlines()[-1])
        done = first = last["step"]
        seconds, tokens = last["seconds"], last["tokens"]
    texts: dict[str, Read] = {}
    apart = [loaded(folder / "texts" / f"{seed:05}") for seed in range(HELD_OUT)]
    sums, since = np.zeros(2), done
    for step in range(done, steps + 1):
        if (step % every == 0 or step in (first, steps)) and not first < step == done:
            line = {"step": step, "seconds": round(seconds), "texts": len(texts), "tokens": tokens}
            means = sums / max(step - since, 1)
            line |= {"qa": round(means[0], 4), "kl": round(means[1], 4), **held_out(presses, apart)}
            sums[:], since = 0, step
            with (folder / "history.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
            weights = get_peft_model_state_dict(made.adapters.peft, adapter_name=own, save_embedding_layers=False)
            state = {"weights": weights, "optimizer": optimizer.state_dict(), "step": step, "first": first}
            torch.save(state | {"seconds": seconds, "tokens": tokens}, folder / "new.pt")
            os.replace(folder / "new.pt", checkpoint)
        if step == steps:
            return
        begun, draw = time.monotonic(), random.Random(step)
        # Other processes may still read texts.
        for path in (folder / "texts").iterdir():
            if path.name not in texts and not path.suffix and int(path.name) >= HELD_OUT:
                texts[path.name] = loaded(path)
        ratio, count = draw.randrange(len(RATIOS)), 2 ** draw.randrange(parts.bit_length())
        keys, contexts = draw.sample(sorted(texts), max(size, count)), []
        for start in range(0, len(keys), count):
            memory, asked = joined(presses.select, [texts[key] for key in keys[start : start + count]], ratio)
            contexts.append((memory, [one for own in asked for one in draw.sample(own, min(most, len(own)))]))
        answers = sum(len(one.answer) for _, asked in contexts for one in asked)
        for memory, asked in contexts:
            if asked:
                loss, divergence, states = losses(presses.select, memory.repeat(len(asked)), asked)
                share = len(states) / answers
                (share * (loss + divergence)).backward()
                sums += share * loss.item(), share * divergence.item()
                tokens += sum(len(one.question) + len(one.answer) for one in asked)
        update(optimizer, rate, step - first, steps - first)
        seconds += time.monotonic() - begun


def save(name: str, out: Path | None = None) -> Path:
    """Writes the compressor with the reader's adapter of the checkpoint, in bfloat16, and how it was trained."""
    folder = build(name, out)
    shutil.copyfile(RUNS / name / "history.jsonl", folder / "history.jsonl")
    last = torch.load(RUNS / name / "checkpoint.pt", weights_only=True)["weights"]
    weights = {key: value.bfloat16().contiguous() for key, value in last.items()}
    save_file(weights, folder / f"gistkit_0_{READER}" / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    write_card(name, out)
    return folder


def write_texts(name: str, dtype: torch.dtype, minutes: float, first: int, stride: int) -> None:
    """Reads texts for so many minutes, each `stride`-th from the `first` on; several processes may share them."""
    made, presses, tokenizer = new_reader(name, dtype)
    corpus, folder = manuals(), RUNS / name / "texts"
    known = by_hand(tokenizer, LONGEST)
    deadline, seed = time.monotonic() + 60 * minutes, first
    with made.lm.folded(TEXT, made.identity.versions()), made.folded():
        while time.monotonic() < deadline:
            if not (path := folder / f"{seed:05}").exists():
                at = seed - HELD_OUT
                text = known[at] if 0 <= at < len(known) else facts_about(seed, tokenizer, corpus)
                write(prepared(*text, presses), path)
            seed += stride


def main() -> int:
    """Reads texts, or trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SELECTIONS)
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="the faster here (default: %(default)s)"
    )
    parts = parser.add_subparsers(dest="part", required=True)
    reading = parts.add_parser("texts", help="read texts")
    reading.add_argument("--minutes", type=float, required=True)
    reading.add_argument("--first", type=int, default=0)
    reading.add_argument("--stride", type=int, default=1, help="processes that read texts (default: %(default)s)")
    training = parts.add_parser("train", help="train on the texts that are read")
    training.add_argument("--steps", type=int, required=True)
    training.add_argument("--rate", type=float, default=3e-4, help="of learning (default: %(default)s)")
    training.add_argument("--size", type=int, default=4, help="texts of a step (default: %(default)s)")
    training.add_argument("--every", type=int, default=100, help="steps between checkpoints (default: %(default)s)")
    training.add_argument("--most", type=int, default=6, help="questions of a text in a step (default: %(default)s)")
    saving = parts.add_parser("save", help="write the compressor with the reader of the last checkpoint")
    saving.add_argument("--out", type=Path, help="its folder (default: models/NAME)")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    if options.part == "texts":
        write_texts(options.name, dtype, options.minutes, options.first, options.stride)
    elif options.part == "save":
        print(save(options.name, options.out))
    else:
        schedule = {key: getattr(options, key) for key in ("steps", "rate", "size", "most", "every")}
        train(options.name, dtype, **schedule)
    return 0


if __name__ == "__main__":
    sys.exit(main())
