"""`gistkit evaluate --against presses`: trained compressors beside selections that need no training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gistkit.options.arguments import device, names, positive, several
from gistkit.options.models import load_compressor, load_model

if TYPE_CHECKING:
    from gistkit.evaluate import Example
    from gistkit_lab.presses import Comparison

# Of `gistkit.compress.scores.SCORES`, which is read only where it is needed; a test compares the two.
SCORES = ("kvzip", "expected_attention", "snapkv", "key_diff", "key_norm", "streaming", "even", "random")
RATIOS = (2, 4, 8, 16)
# Options of `gistkit evaluate` that have no meaning here, with what they are by default.
NONE: dict[str, Any] = {
    "method": None, "layout": None, "ratio": None, "chunk": None, "option": [], "documents": False,
    "images": None, "prompt": "plain", "tasks": None, "baselines": None, "tau": None, "segment": None,
    "excluded_words": None, "judge": None,
    "batch_size": 8, "keep_examples": False, "judge_model": None, "judge_prompt": None, "judge_concurrency": None,
}  # fmt: skip


def add(parser: Any) -> None:
    """The options."""
    group = parser.add_argument_group("comparison with training-free selection")
    group.add_argument(
        "--against", choices=("presses",),
        help="answers from selections of the context's keys and values, at the bytes of a trained compressor and under "
        "its adapter, beside full and no context, truncation and means; all with the same prompt. The questions are "
        "--questions, and facts put into passages of --text (default: Python's topics) of 64 to 4,096 tokens, or of "
        "--context tokens. --out is JSON lines, with tables and a picture beside it; where it is there, rows that it "
        "has are not measured again",
    )  # fmt: skip
    group.add_argument(
        "--ratios", type=several(positive), metavar="N,N",
        help=f"context tokens for each that is kept (default: {','.join(map(str, RATIOS))})",
    )  # fmt: skip
    group.add_argument("--by", type=names(*SCORES), help=f"some of {', '.join(SCORES)} (default: all)")
    group.add_argument(
        "--shares", type=names("equal", "heads", "all"),
        help="how heads share what a score keeps, some of equal,heads,all: as many each, by layer, or all together "
        "(default: equal)",
    )  # fmt: skip
    group.add_argument(
        "--fit", action="store_true", default=None,
        help="adds to each selection one whose values and biases are fitted",
    )  # fmt: skip


def asked(arguments: argparse.Namespace) -> bool:
    """Whether this is what the arguments ask for; its options alone are refused."""
    for name in ("ratios", "by", "shares", "fit"):
        if arguments.against is None and getattr(arguments, name) is not None:
            raise ValueError(f"--{name}: expected none without --against, got {getattr(arguments, name)}")
    return arguments.against is not None


def run(arguments: argparse.Namespace) -> int:
    """Measures, and writes results, tables and picture."""
    for name, value in NONE.items():
        if getattr(arguments, name) != value:
            word = name.replace("_", "-")
            raise ValueError(f"--{word}: expected none with --against, got {getattr(arguments, name)}")
    from gistkit.cli.evaluate import refuse

    if arguments.questions is not None and arguments.text is None:
        refuse(arguments, "--questions alone", context=None, continuation=None)
    elif arguments.split == "train":
        raise ValueError("--split: expected validation or test of a text, got train")
    from gistkit.common.trained import default_for
    from gistkit.evaluate.metrics import need
    from gistkit_lab import presses

    # Missing packages raise an error before an hour of work.
    for module in ("text_to_num", "rouge_score.rouge_scorer", "tqdm"):
        need(module)
    out: Path = arguments.out.with_suffix(".jsonl")
    model, tokenizer = load_model(arguments.model, arguments.dtype, device(arguments.device))
    folder = arguments.compressor or default_for(arguments.model)
    trained = {} if folder is None else {Path(folder).name: load_compressor(Path(folder), model)}
    given = {name: getattr(arguments, name) for name in ("ratios", "by", "shares", "fit")}
    rows = presses.entries(trained, **{name: value for name, value in given.items() if value is not None})
    sets = _sets(arguments, tokenizer, model)
    done = presses.Comparison.load(out) if out.exists() else None
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with need("tqdm").tqdm(total=len(rows), unit="row") as bar:

            def keep(comparison: Comparison) -> None:
                comparison.save(out)
                bar.update()

            found = presses.against_presses(
                model, tokenizer, sets, trained=trained, rows=rows, done=done,
                max_new_tokens=arguments.max_new_tokens or 16, on_outcome=keep, on_step=bar.set_description,
            )  # fmt: skip
    except ValueError as error:
        raise ValueError(f"--out: {out}: {error}" if str(error).startswith("done:") else str(error)) from error
    found.save(out)
    _show(found, out)
    return 0


def _sets(arguments: argparse.Namespace, tokenizer: Any, model: Any) -> dict[str, list[Example]]:
    """Questions of --questions by file, and facts by kind."""
    from itertools import islice

    from gistkit import evaluate
    from gistkit.cli.evaluate import corpus_of
    from gistkit.formats import question_sets
    from gistkit_lab.presses.facts import LENGTHS, fact_questions

    limit = arguments.examples
    sets = {
        each.name: list(islice(evaluate.iter_questions(each.path, split=arguments.split), limit))
        for each in question_sets(arguments.questions or [], arguments.split)
    }
    if arguments.questions is not None and arguments.text is None:
        return sets
    corpus = corpus_of(arguments, tokenizer, held_out_only=True)
    # KVzip reads a text, and up to 2,048 tokens of it once more.
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None) or max(LENGTHS) * 2
    lengths = {length: count for length, count in LENGTHS.items() if length <= most // 2}
    if arguments.context is not None:
        lengths = {arguments.context: limit}
    facts = fact_questions(corpus.held_out.tolist(), tokenizer, lengths, continuation=arguments.continuation or 64)
    return sets | {kind: examples[:limit] for kind, examples in facts.items()}


def _show(found: Comparison, out: Path) -> None:
    from gistkit.common.files import write_text
    from gistkit_lab import presses

    tables = presses.presses_table(found), presses.pairs_table(found), presses.parts_table(found)
    page = "\n\n".join(filter(None, tables))
    write_text(out.with_suffix(".md"), page + "\n")
    print(page)
    written = [out, out.with_suffix(".md")]
    try:
        from gistkit_lab.viz.presses import draw_presses
    except ImportError as error:
        print(f"\nNo picture: {error}")
    else:
        written.append(out.with_suffix(".png"))
        draw_presses(presses.curves(found), marked=presses.trained_names(found)).savefig(written[-1])
    print("\nWritten: " + ", ".join(map(str, written)))
