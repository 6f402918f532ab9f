"""`gistkit train`: trains a compressor."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit.common.processes import launched
from gistkit.options.arguments import (
    LAYOUTS,
    Parser,
    add_command,
    add_declared,
    add_device,
    add_questions,
    device,
    existing,
    names_of,
    number,
    path,
    positive,
    several,
    whole,
)
from gistkit.options.models import (
    DTYPES,
    IMAGES,
    add_model_name,
    add_option,
    load_empty,
    load_model,
    method,
    model_errors,
    trained_folder,
    with_options,
)
from gistkit.options.outputs import check_folder
from gistkit.train.arguments import RunOptions
from gistkit.train.presets import PRESETS, find_preset
from gistkit.train.recipe import Recipe

if TYPE_CHECKING:
    from gistkit.train import DryRun

EXAMPLES = """\
example: gistkit train --model smollm2 --preset smollm2-small --out runs/small
example: gistkit train --model ./llama --preset dodo-ae --dry-run
example: gistkit train --model ./gemma --preset gistpool-squad --questions squad.json --epochs 1 --batch 8
example: gistkit train --model ./llama --text books/ --schedule cosine --warmup 100 --patience 5
example: gistkit train --model ./llama --text books/ --losses ae,lm,compression=0.5 --precision bf16 --resume
example: gistkit train --model ./llama --text pile/ --packed --max-length 1020 --track tensorboard
example: gistkit train --model ./llama --method icae --lora 16 --embedding-lora 128 --train-norms
example: gistkit train --model ./llama --compressor runs/first/compressor --preset epl-finetune --questions qa.jsonl
example: gistkit train --model ./llama --method gistpool --preset epl-finetune --questions qa.jsonl --option windows=5
example: gistkit train --model ./llama --preset epl-finetune --questions squad.jsonl drop.jsonl --weights 2,1
example: gistkit train --model ./llava --preset voco-llama --questions chats.jsonl --images photos/ --batch 8
example: gistkit train --model ./llama --method dodo --ratio 10 --tau 128 --segment 32 --text books/
example: gistkit train --model ./llama --method dodo --ratio 8 --random-steps 10000 --ratios 2,4,8 --text books/
example: accelerate launch --num_processes 4 -m gistkit.cli train --model ./llama --dataset wikitext:wikitext-103-v1"""
DEFAULT = "epl-pretrain"


def add(commands: Any) -> None:
    parser = add_command(commands, "train", _run, "train a compressor around a model", EXAMPLES)
    parser.set_defaults(saved=_saved)
    first = parser.add_argument_group("what most runs need")
    titles = ("data", "compressor", "settings of a compressor", "language models that compress their past, and stages")
    data, new, settings, reading = map(parser.add_argument_group, titles)
    _add_first(first)
    _add_data(data)
    _add_new(new)
    _add_settings(settings)
    _add_reading(reading)
    names = [[action.dest for action in group._group_actions] for group in (data, reading, settings)]
    parser.set_defaults(run_options=["text", *names[0], *names[1]], settings_options=["ratio", *names[2]])
    add_declared(parser.add_argument_group("schedule (default: the preset's)"), Recipe, defaults=False)
    group = parser.add_argument_group("run")
    group.add_argument("--dtype", choices=DTYPES, default="float32", help="of the frozen model (default: %(default)s)")
    add_device(group)
    group.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --out")
    group.add_argument(
        "--preset", metavar="NAME",
        help=f"defaults of other options, a paper's experiment: {', '.join(PRESETS)} (default: {DEFAULT})",
    )  # fmt: skip
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="train nothing; print what the preset follows, the parameters that train, tokens a step and an estimate "
        "of memory. The model's configuration is enough",
    )
    add_declared(group, RunOptions, defaults=True)
    group.add_argument(
        "--track", action="append", choices=("tensorboard", "wandb"),
        help="also report to TensorBoard (event files in --out) or Weights & Biases; repeatable",
    )  # fmt: skip


def _add_first(group: Any) -> None:
    add_model_name(group)
    group.add_argument(
        "--text",
        type=existing,
        help="text file, or folder of .txt, .md and .rst; JSON lines or Parquet with one text each, like the Pile; or "
        "WikiText's .raw or .tokens; plain, gzip or zstd; with official splits if file names show them (default: "
        "Python's topics)",
    )
    group.add_argument(
        "--method", type=method, metavar="METHOD", help="default: the preset's, often x500; voco with --images"
    )
    group.add_argument("--ratio", type=number(1), help="context tokens a memory token")
    group.add_argument("--out", type=path, default=Path("runs/train"), help="folder (default: %(default)s)")


def _add_data(group: Any) -> None:
    group.add_argument("--dataset", metavar="NAME", help="hub data set, owner/name or owner/name:configuration")
    group.add_argument("--limit", type=positive, metavar="N", help="read at most N training tokens")
    group.add_argument(
        "--packed",
        action="store_true",
        default=None,
        help="cut the text into rows of --max-length, and visit each once in every epoch (default: "
        "passages at random places, of random lengths)",
    )
    group.add_argument(
        "--longer-than",
        type=whole(),
        metavar="N",
        help="one passage of --max-length tokens, from a random place, of each document of more than N characters, and "
        "none of the others; every epoch visits each once (default: 4096 for cl-llama2; 0: passages at "
        "random places of all the text)",
    )
    purpose = "for the losses qa and kl; with --images one file of image, question and answer, or in LLaVA's format"
    add_questions(group, purpose, "train")
    group.add_argument(
        "--validation",
        type=existing,
        metavar="FILE",
        nargs="+",
        help="files or folders of questions that are held out (default: the last tenth of the contexts of each set)",
    )
    group.add_argument(
        "--weights",
        type=weights,
        metavar="W,W,..",
        help="shares of several sets of questions in the mixture, in their order (default: by size)",
    )
    group.add_argument(
        "--images", type=existing, metavar="FOLDER", help="folder of the images of --questions; --method is then voco"
    )


def _add_new(group: Any) -> None:
    group.add_argument(
        "--compressor", type=trained_folder, metavar="FOLDER", help="a trained compressor to continue from"
    )
    group.add_argument(
        "--baseline",
        choices=("none", "full"),
        help="instead of a compressor, train the task tokens of the plain model, which reads none of the context, or "
        "all of it; gistkit evaluate --compressor OUT/compressor measures it",
    )
    group.add_argument("--layout", choices=LAYOUTS, help="position layout of icae, x500 and voco (default: epl)")
    add_option(group)


def _add_settings(group: Any) -> None:
    group.add_argument(
        "--losses",
        type=losses,
        help="such as ae,lm or ae=1,compression=0.5; ae, lm, compression, qa, kl, reverse_kl, hidden",
    )
    group.add_argument("--chunk", type=positive, help="chunk size in tokens")
    group.add_argument("--lora", type=positive, metavar="RANK", help="rank of the encoder's LoRA")
    group.add_argument(
        "--embedding-lora", type=positive, metavar="RANK", help="rank of LoRA on the input embedding (default: no LoRA)"
    )
    group.add_argument(
        "--train-norms", action="store_true", default=None, help="train copies of the norms beside the LoRA"
    )
    group.add_argument(
        "--window", type=positive, help="tokens of a context that are compressed; the others stay uncompressed"
    )
    group.add_argument(
        "--end-token", action="store_true", default=None, help="end a reconstruction with the tokenizer's end token"
    )


def _add_reading(group: Any) -> None:
    group.add_argument(
        "--tau",
        type=positive,
        metavar="N",
        help="instead of the losses, train a language model that sees its last N tokens in full, and earlier tokens "
        "only as nuggets (--method dodo) or means (avgpool); passages must be longer",
    )
    group.add_argument(
        "--segment", type=positive, metavar="N", help="tokens per step by which the window of --tau moves (default: 32)"
    )
    group.add_argument(
        "--random-steps",
        type=positive,
        metavar="N",
        help="dodo: random nuggets in the first N steps; the scorer learns after them (default: from the first step)",
    )
    group.add_argument(
        "--ratios",
        type=several(positive),
        metavar="R,R,..",
        help="dodo: ratios after these steps, such as 2,4,8; the last is --ratio and has half of the remaining steps, "
        "the others have equal shares of the other half (default: only --ratio)",
    )
    group.add_argument(
        "--scorer-rests", action="store_true", default=None, help="dodo: freeze the scorer at the last ratio"
    )


def losses(text: str) -> dict[str, float]:
    """{name: weight} of "ae,compression=0.5"."""
    weights: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, weight = part.partition("=")
        try:
            weights[name.strip()] = float(weight or 1)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a number after {name}=, got {weight!r}") from None
    return weights


def weights(text: str) -> list[float]:
    """A kind of argument: comma-separated numbers above 0, which may be equal."""
    values = [number(0)(part.strip()) for part in text.split(",")]
    if not all(values):
        raise argparse.ArgumentTypeError(f"expected numbers above 0, got {text!r:.80}")
    return values


def _saved(arguments: argparse.Namespace) -> str:
    """What an interrupted run has saved, and how to go on; without torch, whose import may be what was interrupted."""
    steps = [path.name.rpartition("-")[2] for path in arguments.out.glob("checkpoint-*")]
    if not (numbers := [int(step) for step in steps if step.isdigit()]):
        return "nothing is saved yet"
    path = arguments.out / f"checkpoint-{max(numbers)}"
    return f"{path} is saved, and the same command with --resume goes on from there"


def _set_options(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}


def _method(arguments: argparse.Namespace, method_options: dict[str, Any]) -> str:
    """The method of a new compressor, the preset's where none is asked for."""
    return str(method_options.get("method", find_preset(arguments.preset or DEFAULT).method))


def dry_run_of(words: Sequence[str]) -> DryRun:
    """What the command with these words would train, words after `train`."""
    parser = argparse.ArgumentParser()
    add(parser.add_subparsers(parser_class=Parser))
    arguments = parser.parse_args(["train", *words])
    return _dry_run(arguments, *_asked(arguments))


def _asked(arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of the compressor, and the choice of a new one."""
    settings = with_options(_set_options(arguments, arguments.settings_options), arguments.option)
    return settings, _set_options(arguments, ("baseline", "method", "layout"))


def _dry_run(arguments: argparse.Namespace, settings: dict[str, Any], method_options: dict[str, Any]) -> DryRun:
    """The page of a run that is not made."""
    if arguments.compressor is not None:
        raise ValueError(f"--compressor: not allowed with --dry-run, which makes a new one, got {arguments.compressor}")
    if settings.get("end_token"):
        raise ValueError("--end-token: not allowed with --dry-run, which reads no tokenizer")

    from gistkit import train

    if arguments.images is not None:
        method_options = {"method": IMAGES} | method_options
    options = _set_options(arguments, ("accumulate", "precision", "gradient_checkpointing", "tau", "segment"))
    with model_errors():
        return train.dry_run(
            load_empty(arguments.model, arguments.dtype, _method(arguments, method_options) == IMAGES),
            preset=arguments.preset or DEFAULT,
            recipe=_set_options(arguments, names_of(Recipe)),
            compressor=settings,
            **method_options,
            **options,
        )


def _run(arguments: argparse.Namespace) -> int:
    check_folder("--out", arguments.out)
    settings, method_options = _asked(arguments)
    if arguments.compressor is not None:
        for name, value in (method_options | settings).items():
            if name not in ("losses", "window", "encoder"):
                raise ValueError(
                    f"--{name.replace('_', '-')}: not allowed with --compressor, which has its own, got {value}"
                )
    if arguments.dry_run:
        print(_dry_run(arguments, settings, method_options))
        return 0
    device_name = device(arguments.device)

    import torch
    from accelerate import PartialState

    from gistkit import train

    if device_name.startswith("cuda:"):
        if launched().count > 1:
            raise ValueError(f"--device: expected cpu or cuda with several processes, got {device_name!r}")
        torch.cuda.set_device(device_name)
    images = arguments.images is not None
    if images and arguments.compressor is None:
        method_options.setdefault("method", IMAGES)
    if not images and arguments.compressor is None and _method(arguments, method_options) == IMAGES:
        raise ValueError(f"--images: expected a folder with the images of --questions for {IMAGES}, got none")
    if PartialState().is_main_process:
        # One that nobody asked for is named, too.
        note = (
            train.notes(arguments.preset)
            if arguments.preset
            else f"options that are not given are those of --preset {DEFAULT}"
        )
        print(note, file=sys.stderr)
    model, tokenizer = load_model(arguments.model, arguments.dtype, "cpu", images)
    if settings.pop("end_token", False):
        if images:
            raise ValueError("--end-token: expected none with --images, because those answers already have one")
        if tokenizer.eos_token_id is None:
            raise ValueError("--end-token: expected a tokenizer with an end token, got one without")
        settings["end_token"] = tokenizer.eos_token_id
    with model_errors():
        result = train.run(
            model,
            tokenizer,
            arguments.out,
            preset=arguments.preset or DEFAULT,
            recipe=_set_options(arguments, names_of(Recipe)),
            compressor=settings,
            start=arguments.compressor,
            resume=arguments.resume,
            cpu=device_name == "cpu",
            **method_options,
            **_set_options(arguments, arguments.run_options),
            **_set_options(arguments, [*names_of(RunOptions), "track"]),
        )
    if not PartialState().is_main_process:
        return 0
    held_out = ", ".join(f"{name} {value:.3f}" for name, value in result.held_out.items())
    if arguments.tau is not None and result.held_out:
        held_out += f" (perplexity {math.exp(result.held_out['loss']):.2f})"
    chosen = "" if result.weights == result.steps else f" of step {result.weights}, whose weights are kept"
    print(
        f"{result.steps} steps, {result.seconds:.0f} s of training; "
        f"held-out losses in nats a token{chosen}: {held_out or 'none'}"
    )
    print(f"Written: {result.folder / 'metrics.jsonl'}, {result.folder / 'compressor'}")
    return 0
