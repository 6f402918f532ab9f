"""Position ids of memory tokens: EPL gives each the place of the tokens that it stands for; DPL numbers on behind them.

python examples/position_layouts.py                  # writes layouts-dpl.png and layouts-epl.png to a folder
python examples/position_layouts.py pictures/
"""

import sys
import tempfile
from pathlib import Path

from gistkit.layouts import Role, icae_encoder

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
folder.mkdir(parents=True, exist_ok=True)

# 20 tokens of context, in one chunk, for which 4 memory tokens stand.
for positions in ("dpl", "epl"):
    layout = icae_encoder(context=20, chunk=20, memory=4, positions=positions)
    context = layout.positions[layout.roles == Role.CONTEXT]
    memory = layout.positions[layout.roles == Role.MEMORY]
    print(f"{positions.upper()}: context {context[0]}..{context[-1]}, memory tokens at {memory.tolist()}")
    # How far a memory token is from the five tokens that it should keep.
    distance = [abs(place - (5 * number + 2 + context[0])) for number, place in enumerate(memory)]
    print(f"     distance from the middle of their tokens: {[int(each) for each in distance]}")
    path = folder / f"layouts-{positions}.png"
    layout.draw().savefig(path)
    print(f"     {path}")
