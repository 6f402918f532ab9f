"""Runs the demo, or the study of the compression loss, over several seeds and keeps the figures for the README.

example: python benchmarks/demo.py --seeds 3
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import harness

from gistkit.cli import main as gistkit

RESULTS = Path(__file__).resolve().parent / "results"


def main() -> int:
    """Writes demo.json, without the attention maps' numbers, and the demo's two pictures; or compression-loss.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=("demo", "compression-loss"), default="demo", help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="default: %(default)s")
    parser.add_argument(
        "--quick", action="store_true", help="one layout, one seed, 25 steps, kept nowhere: does it run?"
    )
    options = parser.parse_args()
    found = harness.environment()
    with tempfile.TemporaryDirectory() as folder:
        size = (
            ["--seeds", "1", "--steps", "25", "--layouts", "epl"] if options.quick else ["--seeds", str(options.seeds)]
        )
        command = ["demo"] if options.study == "demo" else ["study", options.study]
        if status := gistkit([*command, *size, "--out", folder]):
            return status
        if options.quick:
            return 0
        content = json.loads((Path(folder) / "results.json").read_text())
        content["machine"] = found
        for run in content["runs"]:
            del run["attention"]
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{options.study}.json").write_text(json.dumps(content, indent=1) + "\n")
        for name in ("loss", "attention") if options.study == "demo" else ():
            shutil.copyfile(Path(folder) / f"{name}.png", RESULTS / f"demo-{name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
