"""Selections that models/ has: the adapter of a trained compressor around what `Select` keeps; `reader.py` trains them.

example: OMP_NUM_THREADS=1 python lab/models/selection.py smollm2-select-4x
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from card import beside
from make import FOLDER, MODELS, Model, new_compressor, save

from gistkit.common.trained import DEFAULTS
from gistkit.compress import Compressor
from gistkit.compress.files import CARD
from gistkit.compress.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from gistkit.compress.methods.select import READER
from gistkit.hf.smollm2 import load_smollm2


@dataclass(frozen=True)
class Selection:
    """A selection around the adapter of one of `MODELS`."""

    # The name of that model.
    adapter: str
    # With "own_reader" a copy of that adapter reads questions, and learns.
    settings: Mapping[str, Any]
    # Texts that are joined to a long context in its training, at most.
    parts: int = 1


SELECTIONS = {
    "smollm2-select-4x": Selection(
        "smollm2-avgpool-2x", {"ratio": 4, "by": "kvzip", "shares": "all", "fit": True, "own_reader": True}, parts=8
    )
}


# Of the reader's weights that these figures are of.
MEASURED = "97eab05ab38d"
# The heading of what a card says by hand.
PURPOSE = "## What it is for"


def build(name: str, out: Path | None = None) -> Path:
    """Writes a selection's compressor; its adapters' files are those of the trained one, byte for byte."""
    one = SELECTIONS[name]
    source, folder = FOLDER / one.adapter, out or FOLDER / name
    trained = Compressor.from_pretrained(source, load_smollm2()[0])
    made = new_compressor(Model("select", one.settings, (), rank=MODELS[one.adapter].rank), losses=("qa",))
    made.trained_length, made.trained_parts = trained.trained_length, one.parts
    save(made, folder)
    assert trained.adapters is not None and made.adapters is not None
    for name in made.adapters.names.values():
        for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            shutil.copyfile(source / trained.adapters.names["text"] / file, folder / name / file)
    return folder


def write_card(name: str, out: Path | None = None) -> None:
    """Writes README.md into a selection's folder."""
    one, folder = SELECTIONS[name], out or FOLDER / name
    option = "" if name in DEFAULTS.values() else f" --compressor {name}"
    settings = ", ".join(f"{key} {value}" for key, value in one.settings.items() if key != "own_reader")
    about = "## Figures\n\nThese weights have not been measured; the figures are of the first adapter.\n\n"
    if digest(folder) == MEASURED:
        # Written by hand in the card that there is.
        page = (FOLDER / name / CARD).read_text()
        about = f"""{page[page.index(PURPOSE) : page.index("## Figures")]}## Figures

*kvzip {one.settings["ratio"]}x, heads share, fitted* with the adapter of {name} is this compressor.

{beside(name)}"""
    text = f"""# {name}

A compressor for SmolLM2-135M-Instruct: `Select`, {settings}. It keeps
1/{one.settings["ratio"]} of the context's own keys and values, chosen by KVzip among all layers and heads, and reads
the context with the adapter of [{one.adapter}](../{one.adapter}/README.md).
Values and biases are fitted so that attention gives nearly the same as over the full text. Questions and answers are
read with a second adapter{_trained(folder)}

    gistkit compress report.txt -o report.gist{option}
    gistkit ask report.gist "Who signed it?"{option}

{about}{beside(one.adapter)}`python lab/models/reader.py {name}` with `texts`, `train` and `save` makes such a
folder.
"""
    (folder / CARD).write_text(text)


def digest(folder: Path) -> str:
    """12 hex digits of the reader's weights; "": it has none."""
    path = folder / f"gistkit_0_{READER}" / ADAPTER_WEIGHTS
    return sha256(path.read_bytes()).hexdigest()[:12] if path.exists() else ""


def _trained(folder: Path) -> str:
    """How a reader was trained."""
    lines = (folder / "history.jsonl").read_text().splitlines() if (folder / "history.jsonl").exists() else []
    if not lines:
        return ", so far a copy of that one."
    found = [json.loads(line) for line in lines]
    ratios = [key for key in found[-1] if key[0].isdigit()]

    def right(kind: str, rows: Sequence[Mapping[str, Any]]) -> str:
        return ", ".join(f"{key} {rows[0][key][kind]:.0f} to {rows[-1][key][kind]:.0f}" for key in ratios)

    tokens, texts = f"{found[-1]['tokens'] / 1000:.0f} thousand tokens", max(line["texts"] for line in found)
    text = f""". It began as a copy of the first, and learned to answer from
such memories at 4x, 8x and 16x: {found[-1]["step"]} steps about {texts} texts, {tokens} of questions and answers in
all. The questions were written by hand about pages of manuals (1,032), and made up (facts that were put into
pages, and the next words of a passage). Where the first adapter answers right from the whole text, its distribution was
the teacher. Of 72 made-up questions about held-out pages, those with every token right went, in percent, from
{right("right", found)}."""
    if together := [line for line in found if "joined" in line[ratios[0]]]:
        text += f""" In the last {together[-1]["step"] - together[0]["step"]} steps up to 8 memories were
joined, as those of the parts of a long text are. From all held-out pages joined, those with every token right then went
from {right("joined", together)}."""
    return text


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
