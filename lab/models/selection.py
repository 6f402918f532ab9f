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
ABOUT = """## What it is for

| | |
|---|---|
| language | English prose; a text with few common English words gives a warning |
| length | read in parts of at most 512 tokens, up to 8 of which the reader learned from; more give a warning |
| long texts | of 190 questions about 1,024 to 4,096 tokens 23% right at 4x, 22% at 8x, 23% from the full text |
| questions | answered with a few words of the text: names, numbers, terms; in `### Question:` and `### Answer:` lines |
| does badly | yes or no (64% right, where chance is 50%); "not in the text" (said in 61% of such cases); tables |
| is not for | text that goes on after a memory (perplexity 29; with the first adapter 19) |
| answers | a few words, even if the question asks for a sentence |

Of 150 questions by hand it answers 51% exactly at 4x, 51% at 8x, 42% at 16x, and 51% from the full text. With the first
adapter these are 33%, 29%, 21% and 36%. Settings were chosen with the first 50; of the other 100 it answers 42%, 44%
and 34%, and 42% from the full text. Over these 150 and 251 questions about made-up facts the fit gains 7 points (3 to
11) at 8x and 10 (6 to 14) at 16x under the same adapter, which learned from fitted memories. The questions to learn
from and those to test with are about different pages of the same manuals, by the same hand; one test page (Django
1.8.10) repeats most of a training page. `gistkit compress --ratio 8`, or `compressor.at(8)`, selects another ratio.

## What it costs

Times on one core of an Intel Xeon with AMX, for 512 tokens and answers of 16 tokens, with keys and values in the
model's dtype, without the second adapter and before heads were packed in RAM:

| | compressing | an answer | file | in RAM |
|---|---|---|---|---|
| smollm2-select-4x, float32 | 4.2 s | 1.4 s | 5.9 MB | 5.9 MB |
| smollm2-avgpool-2x, float32 | 1.3 s | 1.2 s | 11.8 MB | 11.8 MB |
| smollm2-select-4x, bfloat16 | 2.6 s | 1.2 s | 2.9 MB | 2.9 MB |
| smollm2-avgpool-2x, bfloat16 | 0.4 s | 1.2 s | 5.9 MB | 5.9 MB |

KVzip reads the text twice. The times do not include the fit, which adds about 70% in bfloat16; its biases add 2% to the
file. vLLM and transformers' own cache need the same number of tokens in each head: use smollm2-avgpool-2x there.
"""


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
        about = f"""{ABOUT}
## Figures

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
