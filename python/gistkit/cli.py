"""The command `gistkit`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _device(text: str) -> str:
    """A device that the ops have kernels for."""
    import torch

    from gistkit.info import cuda_library

    try:
        kind = torch.device(text).type
    except RuntimeError:
        kind = ""
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"--device: expected a device that is here, got {text!r}, and torch sees no CUDA device")
        if not torch._C._dispatch_has_kernel_for_dispatch_key("gistkit::attention", "CUDA"):
            raise ValueError(f"--device: expected cpu, got {text!r}; the CUDA library is {cuda_library()}")
    elif kind != "cpu":
        raise ValueError(f"--device: expected cpu or cuda, got {text!r}")
    return text


def _names(text: str) -> list[str]:
    from gistkit.layouts.positions import SCHEMES as known

    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    if not names or not set(names) <= set(known) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"expected some of {','.join(known)}, each once, got {text!r}")
    return names


def _study_epl(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, help="text file to train on (default: the standard library's topics)")
    parser.add_argument("--layouts", type=_names, default="dpl,upl,epl", help="comma-separated (default: %(default)s)")
    parser.add_argument("--seeds", type=_positive, default=1, metavar="N", help="seeds 0 to N-1 (default: %(default)s)")
    parser.add_argument("--steps", type=_positive, default=450, help="training steps a run (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="torch device (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/epl"), help="folder for results (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on where an interrupted run in --out stopped")
    parser.set_defaults(run=_run_epl)


def _run_epl(arguments: argparse.Namespace) -> int:
    # All that the end needs is loaded before the training starts.
    from gistkit.studies import epl, report
    from gistkit.studies import runs as training
    from gistkit.train.data import load_corpus
    from gistkit.viz import studies as _  # noqa: F401

    device = _device(arguments.device)
    recipe = epl.Recipe(steps=arguments.steps)
    corpus = load_corpus(arguments.text)
    print(
        f"Reconstructing {recipe.chunk} bytes from {recipe.chunk // recipe.ratio} memory tokens; text {corpus.name} "
        f"({corpus.train.numel()} + {corpus.held_out.numel()} held-out bytes, {corpus.digest})"
    )
    runs = []
    for run in training.run_study(
        recipe,
        epl.build_compressor,
        arguments.layouts,
        list(range(arguments.seeds)),
        corpus,
        arguments.out,
        device=device,
        resume=arguments.resume,
    ):
        runs.append(run)
        report.write_json(arguments.out / "results.json", runs, recipe, corpus)
    print()
    print(report.format_table(report.table_rows(runs)))
    print("\nOne held-out passage, reconstructed greedily:")
    print(report.format_passages(runs))
    print()
    print(report.format_tracking(runs, recipe))
    print(f"\n{report.LIMITS}")
    pictures = report.draw(arguments.out, runs, recipe)
    print("\nWritten: " + ", ".join(str(path) for path in [arguments.out / "results.json", *pictures]))
    return 0


def _run_info(arguments: argparse.Namespace) -> int:
    from gistkit.info import lines

    print("\n".join(lines()))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line of `gistkit`."""
    root = argparse.ArgumentParser(prog="gistkit", description="Context compression and position layouts.")
    commands = root.add_subparsers(required=True, metavar="COMMAND")
    epl_help = "compare position layouts (DPL, UPL, EPL) on a small autoencoder"
    demo = commands.add_parser(
        "demo", help=epl_help, description=epl_help, epilog="example: gistkit demo --seeds 3 --out runs/three"
    )
    _study_epl(demo)
    study = commands.add_parser("study", help="run a paper's experiment")
    studies = study.add_subparsers(required=True, metavar="STUDY")
    _study_epl(
        studies.add_parser(
            "epl",
            help=epl_help,
            description=epl_help,
            epilog="example: gistkit study epl --text book.txt --layouts dpl,epl --resume",
        )
    )
    info = commands.add_parser("info", help="what is installed and what is missing", epilog="example: gistkit info")
    info.set_defaults(run=_run_info)
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; a user's mistake ends in one line on standard error and exit status 2."""
    try:
        options = parser().parse_args(arguments)
        return options.run(options)
    except ModuleNotFoundError as error:
        print(f"gistkit: {error.name} is missing; pip install 'gistkit[demo]' brings it", file=sys.stderr)
        return 2
    except (ValueError, OSError, ImportError) as error:
        print(f"gistkit: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ngistkit: interrupted; --resume goes on from the last evaluation", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
