"""`gistkit study greedy`: how near a Dodo's nuggets are to the best that a greedy search finds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit.cli.arguments import add_command, device, positive
from gistkit.cli.models import add_model, load_compressor, load_model
from gistkit.cli.texts import read_contents

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gistkit.compress import Dodo

PURPOSE = "swap a Dodo's nuggets one by one for better ones: how many stay, and what is gained"
EXAMPLES = """\
example: gistkit study greedy --model smollm2 --compressor runs/dodo/compressor --texts book.txt --passages 4
example: gistkit study greedy --model ./llama --compressor runs/dodo/compressor --texts wiki/ --device cuda \
--passages 1000"""
OUT = Path("runs/greedy")


def add(studies: Any) -> None:
    """Adds the study."""
    parser = add_command(studies, "greedy", run, PURPOSE, EXAMPLES)
    parser.add_argument("--compressor", type=Path, required=True, metavar="FOLDER", help="trained Dodo")
    add_model(parser)
    parser.add_argument(
        "--texts", nargs="+", required=True, metavar="TEXT", help="text file, folder, or - for standard input"
    )
    parser.add_argument("--glob", default="**/*.txt", help="which files of a folder (default: %(default)s)")
    parser.add_argument(
        "--passages", type=positive, default=16, metavar="N",
        help="of the texts, at most; each is read some thousand times (default: %(default)s; the paper: 1000)",
    )  # fmt: skip
    parser.add_argument(
        "--context", type=positive, default=128, metavar="N", help="tokens compressed (default: %(default)s)"
    )
    parser.add_argument(
        "--read", type=positive, default=64, metavar="N", help="tokens after them, uncompressed (default: %(default)s)"
    )
    parser.add_argument(
        "--asked", type=positive, default=64, metavar="N", help="tokens after these, predicted (default: %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=positive, default=1, metavar="N", help="times through all nuggets (default: %(default)s)"
    )
    parser.add_argument(
        "--batch-size", type=positive, default=32, metavar="N", help="selections read at a time (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="folder for results (default: %(default)s)")


def run(arguments: argparse.Namespace) -> int:
    """Searches in every passage, prints the table and leaves results in --out."""
    where = device(arguments.device)
    contents = read_contents(arguments.texts, arguments.glob)

    from gistkit.studies import greedy
    from gistkit.studies import greedy_report as report
    from gistkit.train.data import token_ids

    recipe = greedy.Recipe(arguments.context, arguments.read, arguments.asked, arguments.rounds)
    model, tokenizer = load_model(arguments.model, arguments.dtype, where)
    compressor = _dodo(arguments.compressor, model)
    texts = [token_ids(tokenizer, content) for content in contents]
    passages = greedy.passages(texts, recipe.length, arguments.passages)
    if not passages:
        raise ValueError(
            f"--texts: expected one of at least {recipe.length} tokens, those of --context, --read and --asked, "
            f"got at most {max(map(len, texts))}"
        )
    print(
        f"{compressor.title}: {len(passages)} passages, {recipe.context} tokens compressed, {recipe.read} read, "
        f"{recipe.asked} asked"
    )
    found = list(greedy.study(compressor, passages, recipe, batch_size=arguments.batch_size))
    results = arguments.out / "results.json"
    report.write_json(results, found, recipe, compressor)
    print(f"\n{report.format_results(found, compressor.title)}\n\nWritten: {results}")
    return 0


def _dodo(folder: Path, model: PreTrainedModel) -> Dodo:
    from gistkit.compress import Dodo

    compressor = load_compressor(folder, model)
    if not isinstance(compressor, Dodo):
        raise ValueError(f"--compressor: expected a Dodo, got a {type(compressor).__name__}, {folder}")
    return compressor
