"""Study `voco`: do VoCo tokens carry where items are in an image, and does their position layout help?

A small vision-language model learns to answer questions about mosaics of items, first with all vision tokens in sight.
From there each arm learns to answer from fewer: from the keys and values of VoCo tokens under a position layout, or
from means of vision tokens. All arms of a seed have the same model, steps, batches and questions (VoCo-LLaMA; Position
IDs Matter, Section 4.4 and Table 10; there the model is LLaVA).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from gistkit.layouts.positions import SCHEMES
from gistkit_lab.studies.fitting import FallingRecipe
from gistkit_lab.studies.resolution.images import Images
from gistkit_lab.studies.voco.words import Words

# What reads no VoCo tokens: all vision tokens, none, or means of some.
METHODS = ("full", "none", "avgpool")
RATIOS = ("4.5", "16", "72", "144", "288")


@dataclass(frozen=True)
class Recipe(FallingRecipe):
    """Everything that determines a run except its arm, its seed and the images.

    Args:
        side: items on a side of a mosaic.
        patches: on a side of an item.
        questions: about each mosaic, in a row in one text; each sees the answers to those before.
        tower_steps, tower_batch, tower_rate: of the vision tower's own training, before all else: a linear map of each
            vision token names the item and the cell that it belongs to.
        base_steps: of the whole model's training with all vision tokens, which the arms of a seed share.
        dim, layers, heads: of the language model.
        vision_layers: of the tower, which is as wide.
        rope_theta: base of the language model's rotation.
        weight_std: of the language model's first weights; embeddings are three times as large.
        eval_mosaics: held-out mosaics at every evaluation.
        test_mosaics: of each split at the end.
    """

    steps: int = 600
    batch: int = 16
    learning_rate: float = 1e-3
    warmup: int = 30
    weight_decay: float = 0.01
    eval_every: int = 100
    side: int = 3
    patches: int = 4
    questions: int = 12
    tower_steps: int = 400
    tower_batch: int = 32
    tower_rate: float = 2e-3
    base_steps: int = 600
    dim: int = 64
    layers: int = 3
    heads: int = 4
    vision_layers: int = 2
    rope_theta: float = 1000.0
    weight_std: float = 0.1
    eval_mosaics: int = 64
    test_mosaics: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("side", "patches", "questions", "tower_steps", "base_steps", "eval_mosaics", "test_mosaics"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")

    @property
    def cells(self) -> int:
        """Items of a mosaic."""
        return self.side**2

    @property
    def grid(self) -> int:
        """Vision tokens on a side of a mosaic."""
        return self.side * self.patches

    @property
    def vision_tokens(self) -> int:
        """Vision tokens of a mosaic."""
        return self.grid**2

    def patch(self, images: Images) -> int:
        """Pixels on a side of a patch, so that an item of these images has as many as it has pixels, or a few more."""
        return math.ceil(max(images.train.images.shape[1:3]) / self.patches)

    @property
    def tower(self) -> Recipe:
        """The schedule of the tower's own training."""
        return replace(
            self, steps=self.tower_steps, batch=self.tower_batch, learning_rate=self.tower_rate,
            eval_every=self.tower_steps,
        )  # fmt: skip

    @property
    def base(self) -> Recipe:
        """The schedule of the training that the arms of a seed share."""
        return replace(self, steps=self.base_steps, eval_every=self.base_steps)


PRESETS = {
    # Two or three minutes of a core for a seed's model, and one or two for each of its arms.
    "quick": Recipe(),
    # As large, trained seven times as long.
    "short": Recipe(steps=4000, base_steps=4000, eval_every=250, test_mosaics=1024),
    # As many vision tokens as LLaVA has, for a GPU.
    "paper": Recipe(
        steps=10_000, batch=64, learning_rate=3e-4, warmup=300, eval_every=1000, side=6, questions=24, tower_steps=3000,
        tower_batch=64, tower_rate=1e-3, base_steps=20_000, dim=256, layers=6, heads=8, vision_layers=4,
        weight_std=0.05, eval_mosaics=256, test_mosaics=2048,
    ),
}  # fmt: skip
# What a command line without these options asks for, by preset.
DEFAULT_DATA = {"quick": "digits", "short": "digits", "paper": "fashion-mnist"}
DEFAULT_LAYOUTS = {"quick": ("dpl", "epl"), "short": SCHEMES, "paper": SCHEMES}
DEFAULT_RATIOS = {"quick": RATIOS[:3], "short": RATIOS[:4], "paper": ("4.5", "16", "72", "288")}


@dataclass(frozen=True)
class Arm:
    """What the text reads of an image.

    Args:
        method: one of `METHODS`, or the position layout of VoCo tokens.
        ratio: vision tokens a token that is read; 1 for "full" and "none".
    """

    method: str
    ratio: float = 1.0

    def __post_init__(self) -> None:
        if self.method not in (*METHODS, *SCHEMES):
            raise ValueError(f"method: expected one of {', '.join((*METHODS, *SCHEMES))}, got {self.method!r}")

    @property
    def name(self) -> str:
        """Such as voco-epl-4.5x."""
        if self.method in ("full", "none"):
            return self.method
        return f"{'voco-' if self.method in SCHEMES else ''}{self.method}-{self.ratio:g}x"

    def tokens(self, recipe: Recipe) -> int:
        """Tokens that an image leaves.

        Raises:
            ValueError: if the ratio divides no whole number of vision tokens out.
        """
        if self.method == "none":
            return 0
        tokens = recipe.vision_tokens / self.ratio
        if tokens < 1 or tokens != int(tokens):
            raise ValueError(
                f"ratio: expected one that leaves a whole number of the {recipe.vision_tokens} vision tokens, "
                f"got {self.ratio:g}"
            )
        return int(tokens)


def arms(methods: Sequence[str], layouts: Sequence[str], ratios: Sequence[float]) -> list[Arm]:
    """The arms of these methods, and at each ratio means and VoCo tokens in these layouts."""
    bounds = [Arm(method) for method in methods if method != "avgpool"]
    compressing = [*(method for method in methods if method == "avgpool"), *layouts]
    return [*bounds, *(Arm(method, ratio) for ratio in ratios for method in compressing)]


def fresh_model(recipe: Recipe, images: Images, seed: int) -> LlavaForConditionalGeneration:
    """The untrained vision-language model of a seed."""
    words, patch = Words(images.classes, recipe.cells), recipe.patch(images)
    torch.manual_seed(seed)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=recipe.dim, intermediate_size=2 * recipe.dim, num_hidden_layers=recipe.vision_layers,
            num_attention_heads=recipe.heads, image_size=recipe.grid * patch, patch_size=patch,
            num_channels=images.channels, projection_dim=recipe.dim,
        ),
        text_config=LlamaConfig(
            vocab_size=words.size, hidden_size=recipe.dim, intermediate_size=3 * recipe.dim,
            num_hidden_layers=recipe.layers, num_attention_heads=recipe.heads, num_key_value_heads=recipe.heads,
            max_position_embeddings=4096, rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
            initializer_range=recipe.weight_std, bos_token_id=Words.BOS, eos_token_id=Words.EOS,
            pad_token_id=Words.PAD, tie_word_embeddings=False,
        ),
        image_token_index=Words.IMAGE, image_seq_length=recipe.vision_tokens, vision_feature_layer=-1,
    )  # fmt: skip
    model = LlavaForConditionalGeneration(config).float()
    with torch.no_grad():
        # Larger, so that attention tells tokens apart from the first step on.
        model.get_input_embeddings().weight.mul_(3)
    return model
