"""Writes docs/families.md: what gistkit does in every causal language model class of transformers. Takes minutes.

python tools/families.py
"""

import sys
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.helpers.families import COLUMNS, classes, line, row  # noqa: E402

HEAD = """# Families of transformers

What gistkit does in the causal language models of transformers {version}, each with a tiny random configuration.
`attach`: plain causal attention and a plan are those of dense attention, in logits. `positions`: SeqPE's bias under
`hf.encode_positions`, in place of RoPE and beside it, is that of dense attention; sliding windows are refused, and a
Mistral or Qwen2 without them is taken. A method: its memory is read as the model reads the same tokens, its logits are
the model's own, and generating agrees with reading; Gist here has no offset, GistPool has one. Everything else is
refused with the reason. `tools/families.py` writes this page.

| class | {columns} | why not |
|---|{rules}---|
"""


def main() -> None:
    """Writes the page."""
    torch.set_num_threads(1)
    lines = []
    for name in sorted(classes()):
        cells = row(name)
        if cells is not None:
            lines.append(line(name, cells))
            print(lines[-1], flush=True)
    head = HEAD.format(version=transformers.__version__, columns=" | ".join(COLUMNS), rules="---|" * len(COLUMNS))
    (ROOT / "docs" / "families.md").write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
