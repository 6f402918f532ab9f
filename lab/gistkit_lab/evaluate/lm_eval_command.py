"""`gistkit lm-eval`: tasks of lm_eval with compressed contexts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from gistkit.cli.evaluate import refuse
from gistkit.options.arguments import add_command, device, existing, path, positive, whole
from gistkit.options.models import add_compressor, add_model, chosen_compressor, load_model
from gistkit.options.outputs import check_file

PURPOSE = "run tasks of lm_eval (EleutherAI's harness) with compressed contexts"
EXAMPLES = """\
example: gistkit lm-eval --model ./llama --compressor runs/qa/compressor --tasks sciq --marker Question:
example: gistkit lm-eval --model smollm2 --compressor runs/small/compressor --tasks wikitext --keep 32 --stride 64
example: gistkit lm-eval --model ./llama --tasks mine --include-path my_tasks --limit 100 --plain"""


def add(commands: Any) -> None:
    """Adds the command."""
    parser = add_command(commands, "lm-eval", _run, PURPOSE, EXAMPLES)
    add_model(parser)
    add_compressor(parser)
    parser.add_argument("--plain", action="store_true", help="evaluate the model itself, without a compressor")
    parser.add_argument("--tasks", required=True, metavar="NAME,NAME,..", help="tasks of lm_eval, or of --include-path")
    parser.add_argument("--include-path", type=existing, metavar="FOLDER", help="folder with your own task files")
    parser.add_argument(
        "--keep", type=positive, default=64, metavar="N",
        help="tokens at the end of a context that are not compressed (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--marker", metavar="TEXT", help="compress only what is before the last occurrence of TEXT, such as Question:"
    )
    parser.add_argument(
        "--stride", type=positive, default=256, metavar="N",
        help="tokens of a whole text that are predicted in one pass, from those before (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--max-length", type=positive, metavar="N", help="most tokens of context and continuation")
    parser.add_argument("--num-fewshot", type=whole(), metavar="N", help="examples in a context (default: the task's)")
    parser.add_argument("--limit", type=positive, metavar="N", help="documents of each task (default: all)")
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--out", type=path, default=Path("runs/lm_eval.json"), metavar="FILE", help="report (default: %(default)s)"
    )


def _run(arguments: argparse.Namespace) -> int:
    check_file("--out", arguments.out)
    if arguments.plain:
        untrained = dict.fromkeys(("method", "layout", "ratio", "chunk"))
        refuse(arguments, "--plain", compressor=None, encoder=None, option=[], **untrained)
    device_name = device(arguments.device)

    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import handle_non_serializable, make_table

    from gistkit.common.files import write_text
    from gistkit.evaluate import FullContext
    from gistkit_lab.evaluate.harness import CompressorLM

    manager = TaskManager(include_path=None if arguments.include_path is None else str(arguments.include_path))
    tasks = [name.strip() for name in arguments.tasks.split(",") if name.strip()]
    unknown = [name for name in tasks if name not in manager.all_tasks]
    if unknown or not tasks:
        raise ValueError(f"--tasks: expected names of lm_eval's tasks, got {(unknown or [arguments.tasks])[0]!r}")
    model, tokenizer = load_model(arguments.model, arguments.dtype, device_name)
    reader = FullContext(model) if arguments.plain else chosen_compressor(arguments, model)
    language_model = CompressorLM(
        reader,
        tokenizer,
        keep=arguments.keep,
        marker=arguments.marker,
        stride=arguments.stride,
        max_length=arguments.max_length,
        batch_size=arguments.batch_size,
    )
    found = simple_evaluate(
        language_model,
        tasks=tasks,
        num_fewshot=arguments.num_fewshot,
        limit=arguments.limit,
        task_manager=manager,
        log_samples=False,
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(arguments.out, json.dumps(found, indent=1, default=handle_non_serializable, ensure_ascii=False) + "\n")
    print(make_table(found))
    print(f"\nWritten: {arguments.out}")
    return 0
