"""Pictures of the studies."""

from gistkit_lab.viz.pooling import draw_gist_attention
from gistkit_lab.viz.studies import draw_loss_curves

__all__ = ["draw_gist_attention", "draw_loss_curves"]
