"""Study `pooling`: can one attention layer learn to average windows of its context?

A standard Gemma2 layer reads n context embeddings and then ceil(n / r) learned gist embeddings; its output at gist j
should be the mean of window j (GistPool, Section 6.1). Under the pool mask a gist sees its own window and itself, under
the standard one everything before it.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import product
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import normalize
from transformers import Gemma2Config, Gemma2Model

from gistkit import layouts
from gistkit.hf import attach
from gistkit.hf.smollm2 import load_smollm2
from gistkit.inspect import AttentionRecorder
from gistkit.layouts import Layout, Plan, Role
from gistkit.options.arguments import names, number, positive, several
from gistkit.train.recipe import warmed_up
from gistkit_lab.studies.fitting import Session, optimise
from gistkit_lab.studies.pages import machine_caption
from gistkit_lab.studies.pages import runs as runs_of
from gistkit_lab.studies.rows import Cell, Rows, name_of, tabulate
from gistkit_lab.studies.study import Job, Pictures, SavedRun, Study, StudyPlan, seeds_of

INPUTS = ("sphere", "vocabulary", "sphere+common")
MASKS = ("pool", "standard")
# Of "at-zero" the length varies, and all gists have position id 0.
CONTEXTS = ("fixed", "variable", "at-zero")


@dataclass(frozen=True)
class Setting:
    """One cell of the study with its learning rate and seed.

    Args:
        inputs: one of `INPUTS`.
        mask: "pool" or "standard".
        context: "fixed", "variable" or "at-zero".
        ratio: context embeddings a window, at least 1.
        length: context embeddings; where the length varies the most there are, and half of it the least.
        heads, kv_heads: of the attention; the head dimension is the width divided by `heads`.
        learning_rate: of Adam.
        seed: of weights and of what is drawn for training.
    """

    inputs: str = "sphere"
    mask: str = "pool"
    context: str = "fixed"
    ratio: int = 2
    length: int = 20
    heads: int = 1
    kv_heads: int = 1
    learning_rate: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        for name, choices in (("inputs", INPUTS), ("mask", MASKS), ("context", CONTEXTS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if not 1 <= self.ratio <= self.lengths[0]:
            raise ValueError(f"ratio: expected 1 to the shortest context, {self.lengths[0]}, got {self.ratio}")
        if self.heads < 1 or self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"heads: expected a multiple of the key heads, got {self.heads}/{self.kv_heads}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate: expected a number above 0, got {self.learning_rate}")

    @property
    def name(self) -> str:
        """A name for files, different for every setting."""
        layer = f"{self.heads}-{self.kv_heads}-{self.ratio}x-{self.length}"
        return f"{self.inputs}-{self.mask}-{self.context}-{layer}-{self.learning_rate:g}-{self.seed}"

    @property
    def lengths(self) -> tuple[int, int]:
        """The shortest and the longest context."""
        return (self.length if self.context == "fixed" else max(1, self.length // 2)), self.length


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a run except its setting.

    Args:
        steps: updates at most; training ends at the first evaluation with a share of right vectors of `enough`.
        batch: sequences of a step, all of one length.
        width, mlp: sizes of the layer.
        warmup: steps over which the learning rate grows.
        clip: largest norm of the gradient.
        init_std: of the layer's matrices; the default is that of torch's own linear layers.
        eval_every: steps from one evaluation to the next.
        eval_batches, final_batches: batches of an evaluation, and of the one after training.
    """

    steps: int = 500
    batch: int = 32
    width: int = 128
    mlp: int = 512
    warmup: int = 50
    clip: float = 1.0
    init_std: float = (3 * 128) ** -0.5
    enough: float = 0.999
    eval_every: int = 50
    eval_batches: int = 4
    final_batches: int = 16


def grid(seeds: int = 1, **axes: Sequence[Any]) -> list[Setting]:
    """All settings of the given values; `axes` are those of `Setting`, with heads as (heads, key heads) pairs."""
    settings = []
    for values in product(*axes.values(), range(seeds)):
        setting = dict(zip([*axes, "seed"], values, strict=True))
        if "heads" in setting:
            setting["heads"], setting["kv_heads"] = setting["heads"]
        settings.append(Setting(**setting))
    return settings


@dataclass(frozen=True, eq=False)
class Inputs:
    """A distribution of embeddings whose root mean square norm, a common vector aside, is sqrt(width).

    They are rows of `table` [V, width], or else from the sphere; `common` [width] is added to each.
    """

    width: int
    common: Tensor | None = None
    table: Tensor | None = None
    device: str = "cpu"

    def draw(self, batch: int, length: int, generator: torch.Generator) -> Tensor:
        """Embeddings [batch, length, width], independent of each other; drawn on the CPU, whatever the device."""
        if self.table is not None:
            rows = self.table[torch.randint(len(self.table), (batch, length), generator=generator)]
        else:
            rows = normalize(torch.randn(batch, length, self.width, generator=generator), dim=-1) * self.width**0.5
        if self.common is not None:
            rows = rows + self.common
        return rows.to(self.device)


@lru_cache(maxsize=4)
def make_inputs(name: str, width: int) -> Inputs:
    """The inputs of a name in `INPUTS`.

    - sphere: uniform on the sphere of radius sqrt(width).
    - vocabulary: rows of SmolLM2-135M's embedding matrix [49152, 576] through one random projection onto `width`
      orthonormal axes, all scaled by one factor. A random projection favours no coordinate and keeps lengths, angles
      and the rows' common part in expectation; principal components would instead keep what the rows have in common
      and drop what tells them apart. The paper has Gemma2's matrix, and does not say how it comes to width 128.
    - sphere+common: the sphere and one fixed vector of the same norm, which no paper has: what a common part does.
    """
    if name == "sphere":
        return Inputs(width)
    if name == "sphere+common":
        direction = torch.randn(width, generator=torch.Generator().manual_seed(0))
        return Inputs(width, common=normalize(direction, dim=0) * width**0.5)
    if name != "vocabulary":
        raise ValueError(f"inputs: expected one of {', '.join(INPUTS)}, got {name!r}")
    model: Any = load_smollm2()[0]
    return Inputs(width, table=project(model.get_input_embeddings().weight.detach().float(), width))


def project(table: Tensor, width: int, seed: int = 0) -> Tensor:
    """Rows [V, d] on `width` <= d random orthonormal axes, scaled to a root mean square norm of sqrt(width)."""
    random = torch.randn(table.shape[1], width, generator=torch.Generator().manual_seed(seed))
    axes, _ = torch.linalg.qr(random)
    rows = table @ axes
    return rows * math.sqrt(width / float(rows.square().sum(-1).mean()))


def build_layout(mask: str, context: int, ratio: int, at_zero: bool = False) -> Layout:
    """[context][gists] without BOS; positions count through both, or are 0 at the gists.

    The mask "pool" is GistPool's with one window, "standard" Gist's, plain causal. The last window may be shorter.
    """
    if mask == "pool":
        with_bos = layouts.gistpool(context, ratio, windows=1, memory_sees_bos=False)
    else:
        with_bos = layouts.gist(context, ratio)
    layout = with_bos.take(with_bos.roles != Role.BOS, name=f"{mask} mask {ratio}x")
    gist = layout.roles == Role.MEMORY
    positions = np.cumsum(~gist) - 1
    positions[gist] = 0 if at_zero else context + np.arange(gist.sum())
    return replace(layout, positions=positions)


@lru_cache(maxsize=256)
def _plan(mask: str, context: int, ratio: int, at_zero: bool, device: str) -> Plan:
    # Grouped by role the context comes first, whatever the layout's logical order.
    return build_layout(mask, context, ratio, at_zero).compile(device=device)


class PoolingLayer(nn.Module):
    """One Gemma2 layer and the embeddings of its gists, one for each window of the longest context."""

    def __init__(self, recipe: Recipe, setting: Setting) -> None:
        super().__init__()
        if recipe.width % setting.heads:
            raise ValueError(f"heads: expected a divisor of the width {recipe.width}, got {setting.heads}")
        self.setting = setting
        head_dim = recipe.width // setting.heads
        config = Gemma2Config(
            vocab_size=1, hidden_size=recipe.width, intermediate_size=recipe.mlp, num_hidden_layers=1,
            num_attention_heads=setting.heads, num_key_value_heads=setting.kv_heads, head_dim=head_dim,
            query_pre_attn_scalar=head_dim, initializer_range=recipe.init_std, layer_types=["full_attention"],
            pad_token_id=None, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        model: Any = Gemma2Model(config)
        # The target is the layer's output: the norm that a whole model ends with would fix its length.
        model.norm = nn.Identity()
        model.embed_tokens.requires_grad_(False)
        self.model = model
        gists = -(-setting.length // setting.ratio)
        self.gists = nn.Parameter(torch.randn(gists, recipe.width) / math.sqrt(recipe.width))

    def forward(self, context: Tensor) -> Tensor:
        """The layer's outputs [B, m, width] at the gists, for context embeddings [B, n, width]; under `attach`."""
        setting, (batch, length, _) = self.setting, context.shape
        plan = _plan(setting.mask, length, setting.ratio, setting.context == "at-zero", str(context.device))
        gists = self.gists[: plan.num_keys - length].expand(batch, -1, -1)
        out = self.model(inputs_embeds=torch.cat([context, gists], 1), plan=plan, use_cache=False).last_hidden_state
        return out[:, length:]


def window_means(context: Tensor, ratio: int) -> Tensor:
    """Means [B, ceil(n / ratio), d] of windows of `ratio` vectors out of [B, n, d]; the last may be shorter."""
    whole = context.shape[1] // ratio * ratio
    means, rest = context[:, :whole].unflatten(1, (-1, ratio)).mean(2), context[:, whole:]
    return torch.cat([means, rest.mean(1, keepdim=True)], 1) if rest.shape[1] else means


def share_right(predicted: Tensor, means: Tensor) -> float:
    """Share of predicted vectors [B, m, d] whose nearest mean [B, m, d] of their own sequence is that of their index.

    Nearest by Euclidean distance (GistPool, Section 6.1).
    """
    nearest = torch.cdist(predicted, means).argmin(-1)
    return float((nearest == torch.arange(means.shape[1], device=means.device)).float().mean())


@torch.no_grad()
def attention_of_gists(layer: PoolingLayer, context: Tensor) -> Tensor:
    """[m, n], the weights of the gists over the context [B, n, d], mean over sequences and heads; under `attach`."""
    length = context.shape[1]
    with AttentionRecorder(rows=slice(length, None), reduce="mean") as recorder:
        layer(context)
    return recorder[0].weights[:, 0, :, :length].mean(0)


def share_in_window(attention: Tensor, ratio: int) -> float:
    """Mean share of the gists' attention [m, n], of what falls on the context, that lies in their own windows."""
    gists, length = attention.shape
    in_own_window = torch.arange(length)[None] // ratio == torch.arange(gists)[:, None]
    return float(((attention * in_own_window).sum(-1) / attention.sum(-1)).mean())


@dataclass
class Run:
    """The results of one setting, on embeddings it was not trained on.

    `share` is the share of predicted vectors whose nearest window mean of their sequence is their own; `error` the
    mean squared error divided by that of predicting zeros; `in_window` the share of a gist's attention on the context
    that lies in its own window, and `attention` [m, n] the weights of gists over the context, means over sequences and
    heads at the longest context. `curve` holds (step, error, share).
    """

    setting: Setting
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    share: float = float("nan")
    error: float = float("nan")
    in_window: float = float("nan")
    seconds: float = 0.0
    parameters: int = 0
    attention: list[list[float]] = field(default_factory=list)


def draw(inputs: Inputs, setting: Setting, batch: int, seed: int) -> Tensor:
    """A batch of contexts [B, n, width], all of one length."""
    return inputs.draw(batch, *_draw_length(setting, seed))


def _draw_length(setting: Setting, seed: int) -> tuple[int, torch.Generator]:
    """The length of the contexts of a seed, and what draws these."""
    generator = torch.Generator().manual_seed(seed)
    low, high = setting.lengths
    return int(torch.randint(low, high + 1, (1,), generator=generator)), generator


def chance(recipe: Recipe, setting: Setting) -> float:
    """Share of right vectors of a guess on what a trained layer is measured on, whose lengths may vary."""
    lengths = [_draw_length(setting, seed)[0] for seed in _seeds(2, recipe.final_batches)]
    return sum(1 / -(-length // setting.ratio) for length in lengths) / len(lengths)


@torch.no_grad()
def evaluate(layer: PoolingLayer, inputs: Inputs, batch: int, seeds: Sequence[int]) -> tuple[float, float]:
    """(error, share) as in `Run`, means over one batch a seed."""
    squared = zeros = share = 0.0
    for seed in seeds:
        context = draw(inputs, layer.setting, batch, seed)
        means = window_means(context, layer.setting.ratio)
        predicted = layer(context)
        squared += float(functional.mse_loss(predicted, means))
        zeros += float(means.square().mean())
        share += share_right(predicted, means)
    return squared / zeros, share / len(seeds)


def train(session: Session) -> Run:
    """Trains and measures one setting; its checkpoints go at the end."""
    recipe, setting = session.recipe, session.arm
    torch.manual_seed(setting.seed)
    layer = PoolingLayer(recipe, setting).to(session.device)
    trained = [(name, parameter) for name, parameter in layer.named_parameters() if parameter.requires_grad]
    parameters = [parameter for _, parameter in trained]
    inputs = replace(make_inputs(setting.inputs, recipe.width), device=session.device)
    run = Run(setting, parameters=sum(parameter.numel() for parameter in parameters))

    def loss(step: int) -> Tensor:
        # Each step has a seed of its own: a resumed run draws what the whole one would have.
        context = draw(inputs, setting, recipe.batch, _seeds(3 + setting.seed, recipe.steps)[step])
        return functional.mse_loss(layer(context), window_means(context, setting.ratio))

    with attach(layer.model):
        progress = optimise(
            session, trained, loss,
            lambda: evaluate(layer, inputs, recipe.batch, _seeds(1, recipe.eval_batches)),
            {"recipe": asdict(recipe), "setting": asdict(setting)},
            optimizer=torch.optim.Adam(parameters, lr=setting.learning_rate),
            learning_rate=lambda step: warmed_up(setting.learning_rate, step, recipe.warmup),
            enough=lambda figures: figures[1] >= recipe.enough,
        )  # fmt: skip
        run.curve, run.seconds = progress.curve, progress.seconds
        run.error, run.share = evaluate(layer, inputs, recipe.batch, _seeds(2, recipe.final_batches))
        longest = replace(setting, context="fixed")
        attention = attention_of_gists(layer, draw(inputs, longest, recipe.batch, _seeds(2, 1)[0]))
    run.in_window = share_in_window(attention, setting.ratio)
    run.attention = [[round(float(weight), 5) for weight in row] for row in attention]
    shutil.rmtree(session.state, ignore_errors=True)
    return run


def _seeds(stream: int, count: int) -> range:
    """Seeds of a stream: 1 is drawn while training is watched, 2 at its end, 3 + s trains seed s."""
    return range(stream << 32, (stream << 32) + count)


# Without the vocabulary, whose matrix comes with another package.
QUICK: dict[str, Any] = {"inputs": ["sphere", "sphere+common"], "seeds": 1, "learning_rates": [1e-3], "steps": 400}
FULL: dict[str, Any] = {"inputs": list(INPUTS), "seeds": 3, "learning_rates": [1e-3, 3e-3], "steps": 500}
# What Section 6.1 says in words; its ratios but 1, lengths and learning rates are formulas that the stored text lacks.
PAPER: dict[str, Any] = {
    "inputs": ["sphere", "vocabulary"], "seeds": 3, "learning_rates": [3e-4, 1e-3, 3e-3], "steps": 50_000,
    "batch": 64, "heads": [(1, 1), (8, 8), (8, 4)], "ratios": [1, 2, 5],
}  # fmt: skip
PAPER_OPEN = """\
Getting to the Gist of Gisting, Table 11: 50,000 steps of 64 sequences, 3 seeds, heads 1/1, 8/8 and 8/4.
  - ratios: 1, and two that its stored text lacks, here 2 and 5 (--ratios)
  - lengths and learning rates: lacking too, here 20 and 3e-4, 1e-3, 3e-3 (--lengths, --learning-rates)
  - the vocabulary: SmolLM2's in place of Gemma 2's
  - the table's own figures: lacking; what the text says of them stands in the rows "paper"
  - a run that has 99.9% right ends there"""
BATCH, HEADS, RATIOS = 32, [(1, 1)], [2]
# What GistPool, Section 6.1, says of Table 11, by inputs, mask and context: 50,000 steps of 64 sequences, the best of
# 3 seeds and several learning rates. Its vocabulary is Gemma2's.
_POOL = {("pool", context): "near perfect" for context in CONTEXTS}
_VARIABLE = {("standard", "variable"): "much reduced", ("standard", "at-zero"): "better, short of pool"}
SAID = {
    "sphere": {**_POOL, ("standard", "fixed"): "much worse", **_VARIABLE},
    "vocabulary": {**_POOL, ("standard", "fixed"): "as pool", **_VARIABLE},
}
CAPTION = (
    "Share of predicted vectors whose nearest window mean is their own: the best of the runs over seeds and learning "
    "rates (their median).\nChance: of a guess, fixed / variable length. Words: what the paper says of its own runs."
)
# What a row is about: inputs, heads, key heads, ratio and length.
Group = tuple[str, int, int, int, int]


class PoolingStudy(Study):
    """One layer that learns to average windows of its context."""

    name = "pooling"
    run_type = Run
    recipe_type = Recipe
    measured = ()
    legend = CAPTION
    train = staticmethod(train)

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        size = parser.add_mutually_exclusive_group()
        size.add_argument(
            "--quick", action="store_true",
            help="one seed and learning rate, 400 steps, without the vocabulary: under two minutes on two cores",
        )  # fmt: skip
        size.add_argument(
            "--paper", action="store_true",
            help="the paper's 50,000 steps of 64 sequences, 3 seeds and 3 shapes of heads at ratios 1, 2 and 5, for a "
            "GPU; other options change it",
        )  # fmt: skip
        parser.add_argument(
            "--inputs", type=names(*INPUTS),
            help="context embeddings: random on a sphere, rows of SmolLM2's vocabulary, or the sphere with one fixed "
            "vector added (default: all)",
        )  # fmt: skip
        parser.add_argument(
            "--masks", type=names(*MASKS), default=list(MASKS),
            help="a gist sees its own window (pool) or all before it (standard) (default: both)",
        )  # fmt: skip
        parser.add_argument(
            "--contexts", type=names(*CONTEXTS), default=list(CONTEXTS),
            help="length of the context: fixed, variable, or variable with all gists at position 0 (default: all)",
        )  # fmt: skip
        parser.add_argument("--ratios", type=several(positive), help="embeddings a window (default: 2)")
        parser.add_argument(
            "--lengths", type=several(positive), default=[20], help="embeddings a context (default: 20)"
        )
        parser.add_argument("--heads", type=several(_heads), help="heads/key heads (default: 1/1)")
        parser.add_argument(
            "--learning-rates", type=several(number(1e-9, 1.0)), metavar="RATES", help="default: 0.001,0.003"
        )
        parser.add_argument("--seeds", type=seeds_of, metavar="N", help="seeds 0 to N-1 (default: 3)")
        parser.add_argument("--steps", type=positive, help="training steps at most (default: 500)")
        parser.add_argument("--batch", type=positive, help="sequences a step (default: 32)")

    def plan(self, options: argparse.Namespace) -> StudyPlan:
        preset: dict[str, Any] = {"batch": BATCH, "heads": HEADS, "ratios": RATIOS}
        preset |= PAPER if options.paper else QUICK if options.quick else FULL
        values = {name: preset[name] if (option := getattr(options, name)) is None else option for name in preset}
        settings = grid(
            values["seeds"], inputs=values["inputs"], heads=values["heads"], ratio=values["ratios"],
            length=options.lengths, mask=options.masks, context=options.contexts,
            learning_rate=values["learning_rates"],
        )  # fmt: skip
        recipe = Recipe(steps=values["steps"], batch=values["batch"])
        if options.paper:
            # As often in all as the shorter runs are watched.
            recipe = replace(recipe, eval_every=max(recipe.eval_every, recipe.steps // 100))
        # What is missing is missed before the first run, not after it.
        for name in values["inputs"]:
            make_inputs(name, recipe.width)
        about = f"{len(settings)} settings, {recipe.steps} steps of {recipe.batch} sequences at most"
        if options.paper:
            about = f"{PAPER_OPEN}\n{about}"
        return StudyPlan(recipe, [Job(setting, setting.seed) for setting in settings], about)

    def arm_of(self, run: Run) -> Setting:
        return run.setting

    def seed(self, run: Run) -> int:
        return run.setting.seed

    def run_of(self, values: dict[str, Any]) -> Run:
        return Run(**values | {"setting": Setting(**values["setting"])})

    def groups(self, runs: Sequence[Run]) -> dict[Group, list[Run]]:
        """The runs of each row."""
        found: dict[Group, list[Run]] = {}
        for run in runs:
            one = run.setting
            found.setdefault((one.inputs, one.heads, one.kv_heads, one.ratio, one.length), []).append(run)
        return found

    def rows(self, runs: Sequence[Run], recipe: Recipe, split: str = "test") -> Rows:
        """Header and one row a group, after those of the paper for the inputs that it has."""
        cells = list(product(MASKS, CONTEXTS))

        def share(mask: str, context: str) -> Cell:
            cell = lambda run: (run.setting.mask, run.setting.context) == (mask, context)  # noqa: E731
            return lambda group, runs: _cell([run.share for run in runs if cell(run)])

        def guesses(group: Group) -> str:
            sizes: dict[str, Any] = {"ratio": group[3], "length": group[4]}
            return " / ".join(f"{chance(recipe, Setting(context=each, **sizes)):.2f}" for each in CONTEXTS[:2])

        def counts(group: Group, runs: Sequence[Run]) -> str:
            settings = [(run.setting.mask, run.setting.context) for run in runs]
            counted = sorted({settings.count(cell) for cell in settings})
            return "-".join(map(str, dict.fromkeys([counted[0], counted[-1]])))

        columns: dict[str, Cell] = {
            "inputs": name_of(lambda group: group[0]),
            "heads": name_of(lambda group: f"{group[1]}/{group[2]}"),
            "ratio": name_of(lambda group: str(group[3])),
            "length": name_of(lambda group: str(group[4])),
            **{f"{mask}, {'gists at 0' if name == 'at-zero' else name}": share(mask, name) for mask, name in cells},
            "chance": name_of(guesses),
            "runs": counts,
        }
        header, *rows = tabulate(self.groups(runs), columns)
        inputs = [name for name in dict.fromkeys(run.setting.inputs for run in runs) if name in SAID]
        said = [[f"paper: {name}", "", "", "", *(SAID[name][cell] for cell in cells), "", ""] for name in inputs]
        return [header, *said, *rows]

    def page(self, groups: Sequence[Sequence[SavedRun]]) -> str:
        saved = [run for part in groups for run in part]
        recipe = saved[0].recipe
        return (
            f"{self.table(runs_of(saved), recipe)}\nAt most {recipe.steps} steps of {recipe.batch} sequences. "
            f"{machine_caption(saved)}."
        )

    def figures(self, runs: Sequence[Run], recipe: Recipe) -> Pictures:
        """Attention of the gists, a figure for each kind of inputs that has any: its first group's best runs."""
        from gistkit_lab.viz.pooling import draw_gist_attention

        pictures = {}
        mapped = [run for run in runs if run.attention]
        for inputs in dict.fromkeys(run.setting.inputs for run in mapped):
            (_, heads, keys, ratio, length), found = next(
                (group, found) for group, found in self.groups(mapped).items() if group[0] == inputs
            )
            best = {(run.setting.context, run.setting.mask): run for run in sorted(found, key=lambda run: run.share)}
            # In the order of the study, whichever came first.
            cells = {cell: best[cell] for cell in product(CONTEXTS, MASKS) if cell in best}
            pictures[f"attention-{inputs}"] = draw_gist_attention(
                {cell: (run.attention, run.share) for cell, run in cells.items()},
                ratio,
                title=f"{inputs}, {ratio}x, {length} embeddings, heads {heads}/{keys}",
            )
        return pictures


def _cell(shares: Sequence[float]) -> str:
    if not shares:
        return "-"
    return f"{max(shares):.2f}" + (f" ({median(shares):.2f})" if len(shares) > 1 else "")


def _heads(text: str) -> tuple[int, int]:
    if re.fullmatch(r"\d+/\d+", text) is None:
        raise argparse.ArgumentTypeError(f"expected heads/key heads such as 8/4, got {text!r}")
    heads, keys = map(int, text.split("/"))
    return heads, keys


STUDY = PoolingStudy()
