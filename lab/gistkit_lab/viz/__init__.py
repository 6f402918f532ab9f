"""Pictures of the studies, and of a comparison with presses."""

from gistkit_lab.viz.pooling import draw_gist_attention
from gistkit_lab.viz.presses import draw_presses
from gistkit_lab.viz.studies import draw_loss_curves

__all__ = ["draw_gist_attention", "draw_loss_curves", "draw_presses"]
