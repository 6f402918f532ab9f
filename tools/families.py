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

HEAD = """# Supported model families

The table shows which causal language models of transformers {version} gistkit supports, each tested with a tiny random
configuration.
A "yes" is a passed test:

- `attach`: under plain causal attention and under a plan, the logits equal those of dense attention.
- `positions`: SeqPE's bias under `hf.encode_positions`, instead of RoPE and together with it, gives the logits of dense
  attention. Sliding windows are refused; a Mistral or Qwen2 without them works.
- A method: the logits from a memory equal those of the model on the same tokens, and generation agrees with a single
  pass. Gist here has no offset; GistPool has one.

RoPE of the types longrope and dynamic changes its frequencies with the length of a pass. Cached keys are read with
those of the pass that made them, also where a question or an answer goes beyond the length at which they change; there
the logits are those of the model with these frequencies.

Everything else is refused with the reason in the last column. `tools/families.py` writes this page.

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
