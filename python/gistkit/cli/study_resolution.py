"""`gistkit study resolution`: image classifiers tested at larger sizes than in training, by position encoding."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gistkit.cli.arguments import add_command, add_device, device, names, positive

PURPOSE = "compare SeqPE with other position encodings at images larger than those in training"
EXAMPLES = """example: gistkit study resolution --preset quick --encodings learned-2d,rope-2d-mix,seqpe-mul
         gistkit study resolution --data fashion-mnist --seeds 3 --resume
         gistkit study resolution --preset paper --data folder/of/idx/files --device cuda"""
ENCODINGS = (
    "nope", "sinusoidal-2d", "learned-2d", "rope-2d", "rope-2d-mix", "seqpe-sum", "seqpe-mul", "seqpe-bias"
)  # fmt: skip
ABLATIONS = ("seqpe-mul-no-delta", "seqpe-mul-no-ood")
PRESETS = ("quick", "short", "paper")
OUT = Path("runs/resolution")


def add(studies: Any) -> None:
    """Adds the study."""
    parser = add_command(studies, "resolution", run, PURPOSE, EXAMPLES)
    parser.add_argument(
        "--preset",
        choices=PRESETS,
        default="short",
        help="quick: seconds a run; short: trained on a grid of 8 x 8 patches and tested on up to 24 x 24, minutes a "
        "run on a CPU; paper: ViT-S, trained on 224 x 224 pixels, on a GPU (default: %(default)s)",
    )
    parser.add_argument(
        "--data",
        default="digits",
        help="digits (scikit-learn's), fashion-mnist (Debian's dataset-fashion-mnist), or a folder of IDX files with "
        "MNIST's names (default: %(default)s)",
    )
    parser.add_argument(
        "--encodings",
        type=names(*ENCODINGS, *ABLATIONS),
        default=list(ENCODINGS),
        help=f"comma-separated, {' and '.join(ABLATIONS)} among them (default: {','.join(ENCODINGS)})",
    )
    parser.add_argument("--seeds", type=positive, default=1, metavar="N", help="seeds 0 to N-1 (default: %(default)s)")
    parser.add_argument("--steps", type=positive, help="training steps a run (default: the preset's)")
    add_device(parser)
    parser.add_argument("--out", type=Path, default=OUT, help="folder for results (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on where an interrupted run in --out stopped")
    parser.set_defaults(if_interrupted="; --resume goes on from the last evaluation")


def run(arguments: argparse.Namespace) -> int:
    """Trains, prints the tables and leaves results and a picture in --out."""
    # All that the end needs is loaded before the training starts.
    from dataclasses import replace

    from gistkit.evaluate.report import format_table
    from gistkit.info import machine
    from gistkit.studies import resolution
    from gistkit.studies import resolution_report as report
    from gistkit.studies.images import load_images
    from gistkit.viz import extrapolation as _  # noqa: F401

    where, out = device(arguments.device), arguments.out
    images = load_images(arguments.data)
    recipe = resolution.PRESETS[arguments.preset].fitted(images)
    if arguments.steps:
        recipe = replace(recipe, steps=arguments.steps)
    first, last = (f"{grid} x {grid}" for grid in (recipe.grids[0], recipe.grids[-1]))
    print(
        f"Classifiers of {recipe.size} x {recipe.size} pixels, {first} patches, tested on up to {last}: "
        f"{len(arguments.encodings)} position encodings, {recipe.steps} steps of {recipe.batch}; {images.name}, "
        f"{len(images.train)} training images, {images.digest}"
    )
    runs = []
    for found in resolution.run_study(
        recipe, resolution.arms(arguments.encodings), list(range(arguments.seeds)), images, out, device=where,
        resume=arguments.resume,
    ):  # fmt: skip
        runs.append(found)
        report.write_json(out / "results.json", runs, recipe, images, machine())
    for split, what in (("held_out", "held-out images"), ("test", "images that no choice was made on")):
        print(f"\nAccuracy in percent, {what}:\n{format_table(report.table_rows(runs, split))}")
    print(f"\n{format_table(report.paper_rows())}")
    pictures = report.draw(out, runs)
    embedded = [arm for arm in arguments.encodings if arm == "learned-2d" or arm.startswith("seqpe")]
    if embedded:
        states = {arm: out / f"{arm}-0.safetensors" for arm in embedded}
        pictures.append(report.draw_embeddings(out / "similarity.png", recipe, states))
    print("\nWritten: " + ", ".join(str(path) for path in [out / "results.json", *pictures]))
    return 0
