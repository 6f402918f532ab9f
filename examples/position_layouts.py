"""Draw position IDs of memory tokens, under DPL and EPL.

EPL gives each memory token the position of the tokens that it compresses. DPL
numbers memory tokens after the context. Writes layouts-dpl.png and layouts-epl.png.

python examples/position_layouts.py
python examples/position_layouts.py pictures/
"""

import sys
import tempfile
from pathlib import Path

from gistkit.layouts import Role, icae_encoder

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
folder.mkdir(parents=True, exist_ok=True)

# One chunk of 20 context tokens, compressed to 4 memory tokens.
for positions in ("dpl", "epl"):
    layout = icae_encoder(context=20, chunk=20, memory=4, positions=positions)
    context = layout.positions[layout.roles == Role.CONTEXT]
    memory = layout.positions[layout.roles == Role.MEMORY]
    print(
        f"{positions.upper()}: context {context[0]}..{context[-1]}, "
        f"memory tokens at {memory.tolist()}"
    )
    # The distance of a memory token from the five tokens that it should keep.
    distance = [
        abs(place - (5 * number + 2 + context[0]))
        for number, place in enumerate(memory)
    ]
    shown = [int(each) for each in distance]
    print(f"     distance from the middle of their tokens: {shown}")
    path = folder / f"layouts-{positions}.png"
    layout.draw().savefig(path)
    print(f"     {path}")
