"""`gistkit study pooling`: whether one attention layer learns to average windows of its context."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gistkit.cli.arguments import add_command, add_device, device, names, number, positive, several

PURPOSE = "train one layer to average windows of its context, under the pool mask and the standard one"
EXAMPLES = """\
example: gistkit study pooling --quick
example: gistkit study pooling --inputs sphere --heads 1/1,8/8,8/4 --ratios 1,2 --lengths 40 --resume"""
OUT = Path("runs/pooling")
# Without the vocabulary, whose matrix comes with another package.
QUICK: dict[str, Any] = {"inputs": ["sphere", "sphere+common"], "seeds": 1, "learning_rates": [1e-3], "steps": 400}
FULL: dict[str, Any] = {
    "inputs": ["sphere", "vocabulary", "sphere+common"],
    "seeds": 3,
    "learning_rates": [1e-3, 3e-3],
    "steps": 500,
}


def add(studies: Any) -> None:
    """Adds the study."""
    parser = add_command(studies, "pooling", run_pooling, PURPOSE, EXAMPLES)
    parser.add_argument(
        "--quick", action="store_true",
        help="one seed and learning rate, 400 steps, without the vocabulary: under two minutes on two cores",
    )  # fmt: skip
    parser.add_argument(
        "--inputs", type=names("sphere", "vocabulary", "sphere+common"),
        help="context embeddings: random on a sphere, rows of SmolLM2's vocabulary, or the sphere with one fixed "
        "vector added (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--masks", type=names("pool", "standard"), default=["pool", "standard"],
        help="a gist sees its own window (pool) or all before it (standard) (default: both)",
    )  # fmt: skip
    parser.add_argument(
        "--contexts", type=names("fixed", "variable", "at-zero"), default=["fixed", "variable", "at-zero"],
        help="length of the context: fixed, variable, or variable with all gists at position 0 (default: all)",
    )  # fmt: skip
    parser.add_argument("--ratios", type=several(positive), default=[2], help="embeddings a window (default: 2)")
    parser.add_argument("--lengths", type=several(positive), default=[20], help="embeddings a context (default: 20)")
    parser.add_argument("--heads", type=several(_heads), default=[(1, 1)], help="heads/key heads (default: 1/1)")
    parser.add_argument(
        "--learning-rates", type=several(number(1e-9, 1.0)), metavar="RATES", help="default: 0.001,0.003"
    )
    parser.add_argument("--seeds", type=positive, metavar="N", help="seeds 0 to N-1 (default: 3)")
    parser.add_argument("--steps", type=positive, help="training steps at most (default: 500)")
    parser.add_argument("--batch", type=positive, default=32, help="sequences a step (default: %(default)s)")
    add_device(parser)
    parser.add_argument("--out", type=Path, default=OUT, help="folder for results (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="keep the runs in --out and go on where they stopped")
    parser.set_defaults(if_interrupted="; --resume goes on from the last evaluation")


def _heads(text: str) -> tuple[int, int]:
    if re.fullmatch(r"\d+/\d+", text) is None:
        raise argparse.ArgumentTypeError(f"expected heads/key heads such as 8/4, got {text!r}")
    heads, keys = map(int, text.split("/"))
    return heads, keys


def run_pooling(arguments: argparse.Namespace) -> int:
    """Trains every setting, prints the table and leaves results and pictures in --out."""
    from gistkit.studies import pooling
    from gistkit.studies.pooling_layer import Recipe

    where = device(arguments.device)
    preset = QUICK if arguments.quick else FULL
    chosen = {name: preset[name] if (given := getattr(arguments, name)) is None else given for name in preset}
    settings = pooling.grid(
        seeds=chosen["seeds"],
        inputs=chosen["inputs"],
        heads=arguments.heads,
        ratio=arguments.ratios,
        length=arguments.lengths,
        mask=arguments.masks,
        context=arguments.contexts,
        learning_rate=chosen["learning_rates"],
    )
    recipe = Recipe(steps=chosen["steps"], batch=arguments.batch)
    return run_settings(recipe, settings, arguments.out, where=where, resume=arguments.resume)


def run_settings(recipe: Any, settings: Sequence[Any], out: Path, *, where: str = "cpu", resume: bool = False) -> int:
    """Trains settings of the study, prints their table and leaves results.json and pictures in `out`.

    Args:
        recipe, settings: a `Recipe` and `Setting`s of `gistkit.studies.pooling_layer`.
        out: folder.
        where: torch device.
        resume: runs that results.json holds are kept and not trained again.
    """
    # All that the end needs is loaded before the training starts.
    from gistkit.studies import pooling, pooling_report
    from gistkit.viz import pooling as _  # noqa: F401

    results = out / "results.json"
    done = pooling_report.read_same(results, recipe) if resume and results.exists() else []
    # What is there stays there until it is replaced, of whatever settings it is.
    found, runs = {run.setting: run for run in done}, []
    print(f"{len(settings)} settings, {recipe.steps} steps of {recipe.batch} sequences at most")
    for run in pooling.run_study(recipe, settings, out, device=where, done=done, resume=resume):
        runs.append(run)
        found[run.setting] = run
        pooling_report.write_json(results, list(found.values()), recipe)
    print("\n" + pooling_report.format_results(runs, recipe))
    pictures = pooling_report.draw(out, runs)
    print("\nWritten: " + ", ".join(map(str, [results, *pictures])))
    return 0
