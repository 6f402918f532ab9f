"""Study `voco`: do VoCo tokens carry where items are in an image, and does their position layout help?

A small vision-language model learns to answer questions about mosaics of items, first with all vision tokens in sight.
From there each arm learns to answer from fewer: from the keys and values of VoCo tokens under a position layout, or
from means of vision tokens. All arms of a seed have the same model, steps, batches and questions (VoCo-LLaMA; Position
IDs Matter, Section 4.4 and Table 10; there the model is LLaVA).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, cross_entropy
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from gistkit.common.checks import check_int
from gistkit.compress import VoCo
from gistkit.hf import attach
from gistkit.hf.vision import Vision
from gistkit.inspect import AttentionRecorder
from gistkit.layouts.positions import SCHEMES
from gistkit.options.arguments import names
from gistkit.train import checkpoints
from gistkit_lab.studies import fitting
from gistkit_lab.studies.fitting import FallingRecipe, Progress, Session, optimise
from gistkit_lab.studies.images import Files, Images, load_images
from gistkit_lab.studies.mosaics import KINDS, TURN, Batch, Mosaics, Words
from gistkit_lab.studies.pages import machine_caption
from gistkit_lab.studies.rows import SECONDS, SEEDS, Cell, Rows, name_of, of_split, spread, tabulate
from gistkit_lab.studies.study import Names, Pictures, SavedRun, Study, StudyPlan

# What reads no VoCo tokens: all vision tokens, none, or means of some.
METHODS = ("full", "none", "avgpool")
RATIOS = ("4.5", "16", "72", "144", "288")
# What `Mosaics` are drawn for.
TOWER, BASE, ARM = range(3)


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
            check_int(name, getattr(self, name))

    @property
    def cells(self) -> int:
        return self.side**2

    @property
    def grid(self) -> int:
        """Vision tokens on a side of a mosaic."""
        return self.side * self.patches

    @property
    def vision_tokens(self) -> int:
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


class Plain:
    """The model itself, with so many tokens of an image: all vision tokens, their means, or none."""

    def __init__(self, model: LlavaForConditionalGeneration, tokens: int) -> None:
        self.model, self.tokens, self.vision = model, tokens, Vision(model)

    def answers(self, pixels: Tensor, text: Tensor) -> Tensor:
        """Logits [B, Q, V] of the answers in texts [B, 4 Q] about mosaics, by questions and answers before."""
        embed = self.model.get_input_embeddings()
        parts = [embed(text.new_full((len(text), 1), Words.BOS))]
        if self.tokens:
            parts.append(means(torch.stack(self.vision.features({"pixel_values": pixels})), self.tokens))
        embedded = torch.cat([*parts, embed(text)], 1)
        logits: Tensor = self.model(inputs_embeds=embedded, use_cache=False).logits
        return logits[:, self.tokens + TURN - 1 :: TURN]

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, value) for name, value in self.model.named_parameters() if value.requires_grad]


class Compressed:
    """VoCo around the model: questions are answered from the keys and values of its tokens."""

    def __init__(self, model: LlavaForConditionalGeneration, layout: str, tokens: int) -> None:
        self.model = model
        self.compressor = VoCo(
            model, memory_tokens=tokens, layout=layout, lora=None, train_projector=True, losses=("lm",)
        )  # fmt: skip

    def context(self, pixels: Tensor) -> dict[str, Tensor]:
        """What a processor would make of mosaics: [BOS][image]."""
        ids = torch.full((len(pixels), 1 + self.model.config.image_seq_length), Words.IMAGE, device=pixels.device)
        ids[:, 0] = Words.BOS
        return {"input_ids": ids, "pixel_values": pixels}

    def answers(self, pixels: Tensor, text: Tensor) -> Tensor:
        # Not `encode`, whose memories are made to be kept.
        memory, _, _ = self.compressor.compress_rows(self.compressor.contexts(self.context(pixels)))
        return self.compressor.logits(self.compressor.decode(memory, "lm", text)[:, TURN - 1 :: TURN])

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.compressor.trainable())


Reader: TypeAlias = Plain | Compressed


def means(features: Tensor, tokens: int) -> Tensor:
    """Means [B, tokens, d] of features [B, N, d] of a square grid, over windows as near to squares as they can be."""
    side = math.isqrt(features.shape[1])
    if tokens == side**2:
        return features
    rows = max(count for count in range(1, math.isqrt(tokens) + 1) if tokens % count == 0)
    grid = features.unflatten(1, (side, side)).movedim(-1, 1)
    return adaptive_avg_pool2d(grid, (rows, tokens // rows)).flatten(2).movedim(1, -1)


def build_reader(recipe: Recipe, arm: Arm, model: LlavaForConditionalGeneration) -> Reader:
    """The reader of an arm, around a model whose vision tower it freezes."""
    tokens = arm.tokens(recipe)
    if arm.method in SCHEMES:
        return Compressed(model, arm.method, tokens)
    reader = Plain(model, tokens)
    projector = set(reader.vision.projector_weights())
    for weight in {*reader.vision.tower.parameters()} - projector:
        weight.requires_grad_(False)
    return reader


@dataclass
class Run(fitting.Run):
    """Its figures are "loss", in nats an answer, and the share of right answers of each kind, nan where none is asked.

    `curve` holds (step, loss, at, count, left).
    """

    method: str
    ratio: float


def train(session: Session) -> Run:
    """Trains and measures one arm and seed, from a model that the arms of the seed share."""
    recipe, arm, seed = session.recipe, session.arm, session.seed
    mosaics = Mosaics(session.source, recipe, seed)
    model = _base(session, mosaics)
    torch.manual_seed(seed)
    reader = build_reader(recipe, arm, model)
    if isinstance(reader, Compressed):
        reader.compressor.to(session.device)
    progress = _fit_reader(session, ARM, reader, mosaics)
    with attach(model):
        figures = lambda split: measure(reader, mosaics.split(split, recipe.test_mosaics))  # noqa: E731
        run: Run = session.run(Run, vars(arm), progress, reader.trained(), figures)
    return run


@torch.no_grad()
def measure(reader: Reader, batch: Batch, at_once: int = 16) -> dict[str, float]:
    """{"loss", and each of `KINDS`}: nats an answer, shares of right answers. The reader's model is attached."""
    losses, right = [], []
    for pixels, text in zip(batch.pixels.split(at_once), batch.text.split(at_once), strict=True):
        logits, answers = _answers(reader, pixels, text)
        losses.append(cross_entropy(logits, answers, reduction="none").cpu())
        right.append((logits.argmax(-1) == answers).float().cpu())
    all_right, kinds = torch.cat(right), batch.text[:, 1::TURN].flatten()
    shares = {name: float(all_right[kinds == Words.kind(name)].mean()) for name in KINDS}
    return {"loss": float(torch.cat(losses).mean()), **shares}


def _answers(reader: Reader, pixels: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [B Q, V] of answers, and the answers [B Q]."""
    device = reader.model.device
    text = text.to(device)
    logits = reader.answers(pixels.to(device), text).flatten(0, 1).float()
    return logits, text[:, TURN - 1 :: TURN].flatten()


def _fit_reader(session: Session, stage: int, reader: Reader, mosaics: Mosaics) -> Progress:
    recipe = session.recipe
    held_out = mosaics.split("held_out", recipe.eval_mosaics)

    def loss(step: int) -> Tensor:
        batch = mosaics(stage, step, recipe.batch)
        return cross_entropy(*_answers(reader, batch.pixels, batch.text))

    def figures() -> tuple[float, ...]:
        return tuple(measure(reader, held_out).values())

    with attach(reader.model):
        return _fit(session, reader.trained(), loss, figures)


def _fit(
    session: Session, parameters: list[tuple[str, nn.Parameter]], loss: Callable[[int], Tensor],
    figures: Callable[[], tuple[float, ...]],
) -> Progress:  # fmt: skip
    identity = session.decides("test_mosaics", images=session.source.digest)
    return optimise(session, parameters, loss, figures, identity)


def _base(session: Session, mosaics: Mosaics) -> LlavaForConditionalGeneration:
    """The model that the arms of a seed start from, whose tower sees items; each gets its own copy."""
    recipe: Recipe = session.recipe
    model = fresh_model(recipe, session.source, session.seed)
    nn.Module.to(model, session.device)
    with session.shared("base", steps=recipe.base_steps) as shared:
        # The tower is a part of the base's state, too.
        if not checkpoints.find(shared.state):
            _train_tower(replace(shared, arm="tower", recipe=recipe.tower), model, mosaics)
        _fit_reader(shared, BASE, Plain(model, recipe.vision_tokens), mosaics)
    return model


def _train_tower(session: Session, model: LlavaForConditionalGeneration, mosaics: Mosaics) -> None:
    """Each vision token learns to name its item and its cell, by a linear map that is not kept."""
    recipe, vision, items = session.recipe, Vision(model), mosaics.words.items
    head = nn.Linear(recipe.dim, items + recipe.cells).to(model.device)
    parts = {"tower": vision.tower, "projector": vision.projector, "head": head}
    parameters = [
        (f"{part}.{name}", value) for part, module in parts.items() for name, value in module.named_parameters()
    ]
    line = torch.arange(recipe.grid) // recipe.patches
    cell = (line[:, None] * recipe.side + line).flatten()

    def figures(batch: Batch) -> tuple[Tensor, Tensor]:
        logits = head(torch.stack(vision.features({"pixel_values": batch.pixels.to(model.device)}))).flatten(0, 1)
        labels = batch.labels[:, cell].flatten().to(logits.device)
        cells = cell.repeat(len(batch.labels)).to(logits.device)
        loss = cross_entropy(logits[:, :items], labels) + cross_entropy(logits[:, items:], cells)
        return loss, (logits[:, :items].argmax(-1) == labels).float().mean()

    @torch.no_grad()
    def measured() -> tuple[float, float]:
        loss, share = figures(mosaics.split("held_out", recipe.eval_mosaics))
        return float(loss), float(share)

    _fit(session, parameters, lambda step: figures(mosaics(TOWER, step, recipe.batch))[0], measured)


def trained_reader(recipe: Recipe, arm: Arm, seed: int, images: Images, out: Path) -> Reader:
    """The reader of an arm as a run left it, whose checkpoints are in `out`."""
    model = fresh_model(recipe, images, seed)
    checkpoints.restore(checkpoints.last_whole(out / f"base-{seed}", remove=False), model.named_parameters())
    reader = build_reader(recipe, arm, model)
    checkpoints.restore(checkpoints.last_whole(out / f"{arm.name}-{seed}", remove=False), reader.trained())
    return reader


@torch.no_grad()
def sight(reader: Reader, recipe: Recipe, batch: Batch) -> Tensor:
    """Where VoCo tokens look on the first mosaic of a batch: float [M, side, side], a share of attention a patch.

    Mean over layers and heads; the rest is over text and VoCo tokens.
    """
    if not isinstance(reader, Compressed):
        raise TypeError(f"reader: expected one with VoCo tokens, got {type(reader).__name__}")
    compressor = reader.compressor
    rows = compressor.contexts(reader.context(batch.pixels[:1]))
    order = compressor.pass_over(rows, compressor.vision.features(rows.pixels)).plan.order
    # In logical order BOS comes first, then the image, then its VoCo tokens.
    total = 1 + recipe.vision_tokens + compressor.memory_tokens
    place = torch.arange(total) if order is None else order[0].argsort()
    seen, voco = place[1 : 1 + recipe.vision_tokens], place[1 + recipe.vision_tokens : total]
    with attach(reader.model), AttentionRecorder(rows=voco, reduce="mean") as recorder:
        compressor.compress_rows(rows)
    maps = torch.stack([layer.weights[0, 0][:, seen] for layer in recorder.maps])
    return maps.mean(0).unflatten(-1, (recipe.grid, recipe.grid))


TITLES = {
    "full": "all vision tokens",
    "none": "no image",
    "avgpool": "means of vision tokens",
    **{layout: f"VoCo {layout.upper()}" for layout in SCHEMES},
}
ASKED = {"at": "which item is here", "count": "how many of it", "left": "what is left of it"}
ORDER = (*METHODS, *SCHEMES)
# Position IDs Matter, Table 10: VoCo tokens of 576, and the figures of SQA, MMB and VQAv2. A star: as VoCo-LLaMA's
# authors report.
PAPER: tuple[tuple[str, int, tuple[float | None, float, float]], ...] = (
    ("upper bound*", 576, (66.5, 64.0, 77.7)),
    ("DPL*", 128, (None, 61.0, 76.9)),
    ("DPL", 128, (64.9, 59.9, 76.9)),
    ("EPL", 128, (66.5, 64.6, 78.4)),
    ("DPL*", 2, (None, 60.1, 73.5)),
    ("DPL", 2, (66.1, 61.5, 73.7)),
    ("EPL", 2, (67.6, 61.4, 69.5)),
    ("lower bound*", 1, (60.7, 22.3, 41.2)),
)


class VoCoStudy(Study):
    """Answers about where items are in an image, from VoCo tokens under each position layout."""

    name = "voco"
    run_type = Run
    recipe_type = Recipe
    arm_type = Arm
    presets = PRESETS
    kind = "images"
    sizes = (
        "quick: 144 vision tokens, some 20 minutes of a core, an hour for three seeds; short: the same, trained seven "
        "times as long, hours; paper: 576 vision tokens, on a GPU"
    )
    lists: ClassVar[Mapping[str, Names]] = {
        "methods": Names(METHODS, METHODS, "; full: all vision tokens; none: no image; avgpool: means of some")
    }
    train = staticmethod(train)
    measured = (
        "Right answers in percent, mosaics of held-out items",
        "Right answers in percent, mosaics of items that no choice was made on",
    )

    def add_own(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--data",
            help="items of the mosaics: digits (scikit-learn's), fashion-mnist (Debian's dataset-fashion-mnist), or a "
            "folder of IDX files with MNIST's names (default: digits; fashion-mnist for paper)",
        )  # fmt: skip
        parser.add_argument(
            "--layouts", type=names(*SCHEMES, empty=True),
            help=f"position layouts of VoCo tokens, comma-separated (default: dpl,epl; {','.join(SCHEMES)} for short "
            "and paper)",
        )  # fmt: skip
        parser.add_argument(
            "--ratios", type=names(*RATIOS),
            help="vision tokens a token that is left, comma-separated (default: 4.5,16,72; 4.5,16,72,144 for short; "
            "4.5,16,72,288 for paper)",
        )  # fmt: skip

    def load(self, options: argparse.Namespace, recipe: Recipe) -> Images:
        data = options.data or DEFAULT_DATA[options.preset]
        images = load_images(data)
        if isinstance(images.train.images, Files):
            raise ValueError(f"--data: expected digits, fashion-mnist or a folder of IDX files, got {str(data)!r}")
        return images

    def arms(self, options: argparse.Namespace, recipe: Recipe) -> Sequence[Arm]:
        layouts = DEFAULT_LAYOUTS[options.preset] if options.layouts is None else options.layouts
        ratios = [float(ratio) for ratio in options.ratios or DEFAULT_RATIOS[options.preset]]
        found = arms(options.methods, layouts, ratios)
        try:
            for arm in found:
                arm.tokens(recipe)
        except ValueError as error:
            raise ValueError(f"--ratios: {error}") from error
        return found

    def about(self, recipe: Recipe, arms: Sequence[Arm], source: Images) -> str:
        left = {arm.tokens(recipe): None for arm in arms if arm.ratio > 1}
        return (
            f"Mosaics of {recipe.side} x {recipe.side} items, {recipe.vision_tokens} vision tokens, of which "
            f"{', '.join(map(str, left)) or 'all'} are left; {len(arms)} arms of {recipe.steps} steps of "
            f"{recipe.batch} after {recipe.base_steps} with all; {source.name}, {len(source.train)} training items, "
            f"{source.digest}"
        )

    def file(self, options: argparse.Namespace, recipe: Recipe) -> str:
        return f"{Path(options.data or DEFAULT_DATA[options.preset]).name}-{options.preset}"

    def order(self, run: Run) -> tuple[float, int]:
        return run.ratio, ORDER.index(run.method)

    def rows(self, runs: Sequence[Run], recipe: Recipe, split: str = "test") -> Rows:
        """Right answers of each kind in percent."""
        columns: dict[str, Cell] = {
            "the text reads": name_of(lambda arm: TITLES[arm.method]),
            "ratio": name_of(lambda arm: "-" if arm.method in ("full", "none") else f"{arm.ratio:g}x"),
            "tokens": name_of(lambda arm: str(arm.tokens(recipe))),
        }
        columns |= {asked: of_split(split, kind, form="{:.1f}", times=100) for kind, asked in ASKED.items()}
        columns |= {"loss": of_split(split, "loss"), "training": SECONDS, "seeds": SEEDS}
        return tabulate(self.by_arm(runs), columns)

    def more_rows(self, runs: Sequence[Run], recipe: Recipe) -> Sequence[Rows]:
        """A row a ratio: right answers with EPL less those with DPL, in points, seed by seed."""
        rows = [["EPL less DPL", *ASKED.values(), "seeds"]]
        arms = self.by_arm(runs)
        for ratio in sorted({run.ratio for run in runs}):
            first, other = ({run.seed: run.test for run in arms.get(Arm(name, ratio), ())} for name in ("epl", "dpl"))
            if seeds := sorted(first.keys() & other.keys()):
                gains = ([100 * (first[seed][kind] - other[seed][kind]) for seed in seeds] for kind in KINDS)
                cells = (spread(values, "{:+.1f}", " to ") for values in gains)
                rows.append([f"{ratio:g}x", *cells, str(len(seeds))])
        return [rows]

    def paper_rows(self, recipe: Recipe) -> Sequence[Rows]:
        rows = [["paper: LLaVA, 576 vision tokens", "ratio", "tokens", "SQA", "MMB", "VQAv2"]]
        for name, tokens, figures in PAPER:
            cells = ["-" if figure is None else f"{figure:.1f}" for figure in figures]
            rows.append([name, "-" if tokens == 576 else f"{576 / tokens:g}x", str(tokens), *cells])
        return [rows]

    def captions(self, group: Sequence[SavedRun]) -> Sequence[str]:
        recipe: Recipe = group[0].recipe
        return [
            f"Right answers in percent, mosaics of {recipe.side} x {recipe.side}, {group[0].source}, on which nothing "
            f"was chosen; {recipe.steps} steps of {recipe.batch} mosaics and {recipe.questions} questions each, after "
            f"{recipe.base_steps} with all vision tokens. {machine_caption(group)}.",
            "In points, seed by seed: mean (lowest to highest).",
        ]

    def figures(self, runs: Sequence[Run], recipe: Recipe) -> Pictures:
        """Right answers of each kind by tokens left, and by training steps at each ratio."""
        from gistkit_lab.viz.voco import draw_accuracy, draw_curves

        arms = self.by_arm(runs)
        lines: dict[str, dict[str, dict[int, list[float]]]] = {asked: {} for asked in ASKED.values()}
        bounds: dict[str, dict[str, float]] = {asked: {} for asked in ASKED.values()}
        for arm, arm_runs in arms.items():
            for kind, asked in ASKED.items():
                shares = [100 * run.test[kind] for run in arm_runs]
                if arm.method in ("full", "none"):
                    bounds[asked][TITLES[arm.method]] = mean(shares)
                else:
                    lines[asked].setdefault(arm.method, {})[arm.tokens(recipe)] = shares
        pictures = {"accuracy": draw_accuracy(lines, bounds, TITLES)}
        curves = {
            f"{ratio:g}x": {
                arm.method: [[(step, 100 * at) for step, _, at, *_ in run.curve] for run in arm_runs]
                for arm, arm_runs in arms.items()
                if arm.ratio == ratio or arm.method in ("full", "none")
            }
            for ratio in sorted({arm.ratio for arm in arms if arm.method not in ("full", "none")})
        }
        return pictures | (
            {"curves": draw_curves(curves, f"{ASKED['at']}: right answers (%)", TITLES)} if curves else {}
        )

    def more_pictures(self, plan: StudyPlan, out: Path) -> list[Path]:
        # The arms of the lowest ratio, where there is most to see, as far as their states are here.
        study_arms = dict.fromkeys(job.arm for job in plan.jobs if job.arm.method in SCHEMES)
        there = [arm for arm in study_arms if checkpoints.find(out / f"{arm.name}-0")]
        if not there or not checkpoints.find(out / "base-0") or plan.source is None:
            return []
        first = [arm for arm in there if arm.ratio == min(arm.ratio for arm in there)]
        return [draw_sight(out / "sight.png", plan.recipe, plan.source, first, out)]  # type: ignore[arg-type]


def draw_sight(path: Path, recipe: Recipe, images: Images, arms: Sequence[Arm], out: Path) -> Path:
    """Where 6 VoCo tokens, spread over all, of trained arms with as many look on a held-out mosaic, as a PNG file."""
    from gistkit_lab.viz.voco import draw_maps

    batch = Mosaics(images, recipe, 0).split("held_out", 1)
    maps = {TITLES[arm.method]: sight(trained_reader(recipe, arm, 0, images, out), recipe, batch) for arm in arms}
    count = arms[0].tokens(recipe)
    chosen = sorted({round(at * (count - 1) / 5) for at in range(6)})
    picture = batch.pixels[0].mean(0).numpy()
    title = (
        f"Attention of {len(chosen)} of {count} VoCo tokens over a mosaic, {arms[0].ratio:g}x; mean of layers, heads"
    )
    draw_maps({name: one[chosen].numpy() for name, one in maps.items()}, chosen, picture, title).savefig(path, dpi=120)
    return path


STUDY = VoCoStudy()
