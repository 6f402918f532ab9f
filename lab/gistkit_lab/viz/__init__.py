"""Pictures of the studies, and of a comparison with presses."""

from gistkit_lab.viz.dodo import draw_bleu_by_length, draw_perplexity
from gistkit_lab.viz.grids import draw_grid_similarity
from gistkit_lab.viz.lines import draw_loss_curves
from gistkit_lab.viz.nuggets import draw_attention_to_nuggets, draw_token_types
from gistkit_lab.viz.pooling import draw_gist_attention
from gistkit_lab.viz.presses import draw_presses
from gistkit_lab.viz.similarity import draw_similarity
from gistkit_lab.viz.text import draw_text, text_html, text_page

__all__ = [
    "draw_attention_to_nuggets",
    "draw_bleu_by_length",
    "draw_gist_attention",
    "draw_grid_similarity",
    "draw_loss_curves",
    "draw_perplexity",
    "draw_presses",
    "draw_similarity",
    "draw_text",
    "draw_token_types",
    "text_html",
    "text_page",
]
