"""Selections that models/ has: the adapter of a trained compressor around what `Select` keeps; `reader.py` trains them.

example: OMP_NUM_THREADS=1 python lab/models/selection.py smollm2-select-4x
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from card import beside
from make import FOLDER, MODELS, Model, new_compressor, save

from gistkit.common.trained import DEFAULTS
from gistkit.compress import Compressor
from gistkit.compress.files import CARD
from gistkit.compress.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from gistkit.hf.smollm2 import load_smollm2


@dataclass(frozen=True)
class Selection:
    """A selection around the adapter of one of `MODELS`.

    Args:
        adapter: the name of that model, whose memory is read with an adapter for the text.
        settings: of `Select`; with "own_reader" a copy of that adapter reads questions, and learns.
    """

    adapter: str
    settings: Mapping[str, Any]


SELECTIONS = {
    "smollm2-select-4x": Selection(
        "smollm2-avgpool-2x", {"ratio": 4, "by": "kvzip", "shares": "all", "fit": True, "own_reader": True}
    )
}


def build(name: str, out: Path | None = None) -> Path:
    """Writes a selection's compressor; its adapters' files are those of the trained one, byte for byte."""
    one = SELECTIONS[name]
    source, folder = FOLDER / one.adapter, out or FOLDER / name
    trained = Compressor.from_pretrained(source, load_smollm2()[0])
    made = new_compressor(Model("select", one.settings, (), rank=MODELS[one.adapter].rank), losses=("qa",))
    made.trained_length = trained.trained_length
    save(made, folder)
    assert trained.adapters is not None and made.adapters is not None
    for name in made.adapters.names.values():
        for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            shutil.copyfile(source / trained.adapters.names["text"] / file, folder / name / file)
    return folder


def write_card(name: str, out: Path | None = None) -> None:
    """Writes README.md into a selection's folder."""
    one, folder = SELECTIONS[name], out or FOLDER / name
    given = {"ratio": 4, "by": "kvzip", "shares": "equal", "fit": False} | dict(one.settings)
    fits = "\nValues and biases are fitted so that attention gives nearly the same as over the full text.\n"
    fitted = fits if given["fit"] else " "
    option = "" if name in DEFAULTS.values() else f" --compressor {name}"
    own = given.pop("own_reader", False)
    ask, reader = (option, f" with the adapter of {name}") if own else ("", "")
    read = "reads the context" if own else "reads them"
    again = f"`python lab/models/selection.py {name}` makes the folder again."
    if own:
        again = f"`python lab/models/reader.py {name}` with `texts`, `train` and `save` makes such a folder."
    learned = _trained(folder, one.share) if own else NOTHING
    settings = ", ".join(f"{key} {value}" for key, value in given.items())
    text = f"""# {name}

A compressor for SmolLM2-135M-Instruct: `Select`, {settings}. It keeps
1/{given["ratio"]} of the context's own keys and values, chosen by KVzip among all layers and heads, and {read} with
the adapter of [{one.adapter}](../{one.adapter}/README.md).{fitted}{learned}

    gistkit compress report.txt -o report.gist{option}
    gistkit ask report.gist "Who signed it?"{ask}

{OWN if own else PLAIN}
## Figures

*kvzip {given["ratio"]}x, heads share{", fitted" if given["fit"] else ""}*{reader} is this compressor.

{beside(name) if own else ""}{beside(one.adapter)}{again}
"""
    (folder / CARD).write_text(text)


def _trained(folder: Path, share: float) -> str:
    """How a reader was trained."""
    lines = (folder / "history.jsonl").read_text().splitlines() if (folder / "history.jsonl").exists() else []
    if not lines:
        return "What is read after a memory has an adapter of its own, so far a copy of that one."
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    right = ", ".join(
        f"{key} {first[key]['right']:.0f} to {last[key]['right']:.0f}" for key in last if key[0].isdigit()
    )
    count = f"{last['tokens'] / 1000:.0f} thousand"
    return f"""Questions and answers are read with a
second adapter. A copy of the first has learned from what the selection keeps at 4x, 8x and 16x, without a fit:
{last["step"]} steps of 24 questions about {last["texts"]} texts, {count} tokens in all. Held-out answers
with every token right went, in percent, from {right}. The second adapter's weights are
{share:g} of the way from the first to that copy, as the copy forgot how to answer other questions."""


def main() -> int:
    """Makes one of the selections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=SELECTIONS)
    name = parser.parse_args().name
    print(build(name))
    write_card(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
