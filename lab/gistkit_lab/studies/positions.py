"""What the studies of position encodings share: models with any encoding, their training, and figures by length."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gistkit.common.checks import IGNORE
from gistkit.common.processes import launched
from gistkit.nn import GPT, TEXT_ENCODINGS, PositionEncoding, SeqPE, SeqPEPositions, position_encoding
from gistkit.nn.models.block import Style
from gistkit.nn.seqpe.regularizer import SeqPERegularizer
from gistkit.train import checkpoints
from gistkit.train.data import Corpus, load_corpus
from gistkit_lab.studies import fitting
from gistkit_lab.studies.fitting import Progress, Session, StudyRecipe, optimise
from gistkit_lab.studies.rows import SECONDS, SEEDS, Rows, figure_of, name_of, tabulate
from gistkit_lab.studies.study import Study, add_names
from gistkit_lab.vit import ViT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Model = TypeVar("Model", GPT, ViT)


@dataclass(frozen=True)
class PositionRecipe(StudyRecipe):
    """The model's sizes and the training of the model and its positions, for any model and task.

    Args:
        dim, layers, heads, dropout, attention_dropout: of the model.
        decay: of the learning rate after its warm-up, to `final` of it at the last step.
        beta_2: of AdamW, whose other one is 0.9.
        bfloat16: autocast to it, but for the encoder of positions.
        max_position, base, digits: of SeqPE; encoder_heads, encoder_layers, encoder_dropout: of its encoder, which is
            as wide as the model.
        position_std: of the first weights of encoder and projections, times dim ** -0.5.
        position_rate: learning rate of all that belongs to positions, as a factor; their weight decay is 0.
        position_clip: norm that the gradients of these are clipped to, by themselves.
        mul_start: of `SeqPEPositions`, for "seqpe-mul".
        pivots, candidates, windows, window_positions, contrastive_weight, ood_weight, shift_rate: of
            `SeqPERegularizer`.
    """

    dim: int = 128
    layers: int = 2
    heads: int = 4
    dropout: float = 0.0
    attention_dropout: float = 0.0
    decay: Literal["cosine", "linear"] = "cosine"
    final: float = 0.1
    beta_2: float = 0.95
    bfloat16: bool = False
    max_position: int = 5000
    base: int = 10
    digits: int = 4
    encoder_heads: int = 4
    encoder_layers: int = 2
    encoder_dropout: float = 0.0
    position_std: float = 0.55
    position_rate: float = 1.0
    position_clip: float = 5.0
    mul_start: float = 1.0
    pivots: int = 32
    candidates: int = 32
    windows: int = 16
    window_positions: int = 32
    contrastive_weight: float = 0.1
    ood_weight: float = 0.1
    shift_rate: float = 0.1

    def learning_rate_at(self, step: int) -> float:
        progress = step / self.steps
        shape = (1 + math.cos(math.pi * progress)) / 2 if self.decay == "cosine" else 1 - progress
        return self.learning_rate * min(1.0, (step + 1) / max(self.warmup, 1)) * (self.final + (1 - self.final) * shape)

    def encoder_options(self, arm: str, axes: int = 1) -> dict[str, Any]:
        """What `position_encoding` needs for an arm of SeqPE, a new encoder among it; nothing for others."""
        if not arm.startswith("seqpe"):
            return {}
        std = self.position_std * self.dim**-0.5
        encoder = SeqPE(
            self.dim, base=self.base, digits=self.digits, axes=axes, layers=self.encoder_layers,
            heads=self.encoder_heads, dropout=self.encoder_dropout, std=std,
        )  # fmt: skip
        return {"std": std, "encoder": encoder} | ({"mul_start": self.mul_start} if arm == "seqpe-mul" else {})


def without_losses(arm: str) -> dict[str, dict[str, float]]:
    """The weights of SeqPE's losses in the arms of its ablation (SeqPE, Table IV), by name."""
    delta, ood = {"contrastive_weight": 0.0}, {"ood_weight": 0.0}
    return {f"{arm}-no-delta": delta, f"{arm}-no-ood": ood, f"{arm}-no-delta-no-ood": delta | ood}


# Arms that train SeqPE without one of its losses, or without both.
ABLATIONS = without_losses("seqpe-bias")
ARMS = (*TEXT_ENCODINGS, *ABLATIONS)


@dataclass
class Run(fitting.Run):
    """Its splits' figures are those at each length, or on each grid."""

    arm: str


def finished(
    session: Session, learner: Learner[Any], progress: Progress, sizes: Sequence[int], figure: Callable[[str, int], Any]
) -> Run:
    """The run of a trained model, with `figure(split, size)` of both splits at each size."""
    figures = lambda split: {str(size): figure(split, size) for size in sizes}  # noqa: E731
    found: Run = session.run(Run, {"arm": session.name}, progress, learner.model.named_parameters(), figures)
    return found


class StepPositions(NamedTuple):
    """The positions of a step's sequences, SeqPE's embeddings of them, and SeqPE's losses.

    Other encodings have None for positions and embeddings, which is the model's default, and no loss.
    """

    positions: Tensor | None
    embeddings: Tensor | None
    loss: Tensor | float


class Learner(Generic[Model]):
    """A model with a position encoding, the sampler of SeqPE's positions, and its training.

    Under `accelerate launch` or torchrun each process trains on its part of a batch, with the mean of all gradients.

    Args:
        schedule: of its training.
        model: with its `position`; moved to `device`.
        shape: of a training sequence's positions, see `SeqPERegularizer`.
        seed: of what is drawn for positions.
        device: where the model is.
        weights: SeqPE's `contrastive_weight` and `ood_weight`, where they are not the schedule's.
    """

    def __init__(
        self,
        schedule: PositionRecipe,
        model: Model,
        shape: int | Sequence[int],
        seed: int,
        device: str = "cpu",
        **weights: Any,
    ) -> None:
        self.schedule, self.seed, self.device = schedule, seed, device
        self.processes = launched()
        self.part(schedule.batch)
        self.model: Model = model.to(device)
        self.encoder: SeqPE | None = None
        self.regularizer: SeqPERegularizer | None = None
        if isinstance(model.position, SeqPEPositions):
            self.encoder = model.position.encoder
            used: dict[str, Any] = {
                "contrastive_weight": schedule.contrastive_weight, "ood_weight": schedule.ood_weight, **weights
            }  # fmt: skip
            self.regularizer = SeqPERegularizer(
                self.encoder, shape, schedule.max_position, schedule.heads, **used, shift_rate=schedule.shift_rate,
                pivots=schedule.pivots, candidates=schedule.candidates, windows=schedule.windows,
                window_positions=schedule.window_positions, seed=seed,
            )  # fmt: skip

    def part(self, rows: int) -> slice:
        """The rows of this process in a batch of so many; a ValueError if parts would differ in size."""
        each, rest = divmod(rows, self.processes.count)
        if rest:
            raise ValueError(f"batch: expected a multiple of {self.processes.count} processes, got {rows} rows")
        return slice(self.processes.index * each, (self.processes.index + 1) * each)

    def place(self, rows: int, step: int) -> StepPositions:
        """The positions of this process's part of a step's batch of so many rows, the same at every call."""
        if self.regularizer is None or self.encoder is None:
            return StepPositions(None, None, 0.0)
        sample = self.regularizer.draw(rows, step)
        encoded = self.encoder(sample.positions)
        main = sample.main if sample.main.dim() == 1 else sample.main[self.part(rows)]
        return StepPositions(
            sample.positions[main], sample.embeddings(encoded, main), self.regularizer.losses(sample, encoded).total
        )

    def fit(
        self, session: Session, loss: Callable[[int], Tensor], figures: Callable[[], tuple[float, ...]],
        identity: dict[str, Any],
    ) -> Progress:  # fmt: skip
        """Trains to the last step of the schedule; `loss` and `figures` as in `optimise`.

        `identity` are the JSON values that determine the run, besides schedule and seed.
        """
        parameters = list(self.model.named_parameters())
        of_positions = {id(parameter) for parameter in self.model.position.parameters()}
        positions = [parameter for _, parameter in parameters if id(parameter) in of_positions]
        model_parameters = [parameter for _, parameter in parameters if id(parameter) not in of_positions]
        matrices, vectors = (
            [x for x in model_parameters if (x.dim() >= 2) == is_matrix] for is_matrix in (True, False)
        )
        groups = [
            {"params": matrices, "weight_decay": self.schedule.weight_decay, "factor": 1.0},
            {"params": vectors, "weight_decay": 0.0, "factor": 1.0},
            {"params": positions, "weight_decay": 0.0, "factor": self.schedule.position_rate},
        ]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=self.schedule.learning_rate,
            betas=(0.9, self.schedule.beta_2),
        )
        # Dropout, where a model has it.
        torch.manual_seed(self.seed + 100_003 * self.processes.index)
        return optimise(
            replace(session, recipe=self.schedule), parameters, loss, figures,
            {"recipe": asdict(self.schedule), "seed": self.seed} | identity, optimizer=optimizer,
            clips=[(model_parameters, self.schedule.clip), (positions, self.schedule.position_clip)],
        )  # fmt: skip

    def precision(self) -> AbstractContextManager[Any]:
        """bfloat16, where the schedule has it."""
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.schedule.bfloat16)


@dataclass(frozen=True)
class Sizes(PositionRecipe):
    """The model's sizes and the training of the model and its positions, for any task.

    Args:
        length: L, the tokens of a sequence in training.
        longest: it is tested at L, 2 L, 4 L, ..., up to this many times L.
        hidden_dim, style: of `gistkit.nn.GPT`; weight_std: its `std`, which a table of positions has too.
        sinusoid_scale: of `Sinusoidal`; None: as large as the embedded tokens.
    """

    steps: int = 1000
    batch: int = 16
    learning_rate: float = 2e-3
    warmup: int = 50
    weight_decay: float = 0.1
    eval_every: int = 250
    length: int = 128
    longest: int = 32
    hidden_dim: int | None = None
    style: Style = "llama"
    weight_std: float = 0.02
    sinusoid_scale: float | None = None

    def __post_init__(self) -> None:
        if self.longest < 1 or self.longest & (self.longest - 1):
            raise ValueError(f"longest: expected a power of two, got {self.longest}")
        if self.length * self.longest > min(self.max_position, self.base**self.digits):
            raise ValueError(
                f"longest: expected at most {min(self.max_position, self.base**self.digits)} positions, "
                f"got {self.longest} x {self.length}"
            )

    @property
    def lengths(self) -> tuple[int, ...]:
        """L, 2 L, ... that the model is tested at."""
        return tuple(self.length << power for power in range(self.longest.bit_length()))


class Student(Learner[GPT]):
    """A language model and its training, all of which but the positions' weights is the same for all arms of a seed."""

    def __init__(self, sizes: Sizes, arm: str, vocabulary: int, seed: int, device: str = "cpu") -> None:
        self.arm = arm
        torch.manual_seed(seed)
        position = _position(sizes, arm)
        torch.manual_seed(seed)
        model = GPT(
            vocabulary, sizes.dim, sizes.layers, sizes.heads, position, hidden_dim=sizes.hidden_dim,
            dropout=sizes.dropout, attention_dropout=sizes.attention_dropout, style=sizes.style, std=sizes.weight_std,
        )  # fmt: skip
        super().__init__(sizes, model, sizes.length, seed, device, **ABLATIONS.get(arm, {}))

    def loss(self, step: int, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The loss of a step: mean cross-entropy of labels [B, N] that are not -100, and SeqPE's two.

        Several processes have a part of the rows each, and the mean of their losses is that of the batch.
        `input_ids` are int64 [B, N], N at most the training length.
        """
        self.model.train()
        positions, embeddings, loss = self.place(len(input_ids), step)
        part, weight = self.part(len(input_ids)), 1.0
        if self.processes.count > 1:
            # The mean of the parts' means is that of the batch.
            counted = labels != IGNORE
            weight = float(counted[part].sum()) * self.processes.count / float(counted.sum())
        input_ids, labels = input_ids[part].to(self.device), labels[part].to(self.device)
        if positions is not None and embeddings is not None:
            count = input_ids.shape[1]
            positions, embeddings = positions[..., :count], embeddings[..., :count, :]
        with self.precision():
            logits = self.model(input_ids, positions, embeddings=embeddings)
        task = cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        return task * weight + loss

    @torch.no_grad()
    def logits(self, input_ids: Tensor, *, last: int | None = None, where: Tensor | None = None) -> Tensor:
        """float32 logits [B, N, vocabulary] of `input_ids` [B, N].

        Of so many `last` tokens alone, [B, last, vocabulary], or of those `where` bool [B, N] is true, [n, vocabulary].
        """
        self.model.eval()
        # Positions are encoded in full precision.
        embeddings = None if self.encoder is None else self.encoder(torch.arange(input_ids.shape[1]))
        with self.precision():
            hidden_states = self.model.hidden(input_ids.to(self.device), embeddings=embeddings)
            if where is not None:
                hidden_states = hidden_states[where.to(self.device)]
            elif last is not None:
                hidden_states = hidden_states[:, -last:]
            return self.model.head(hidden_states).float()

    def train(
        self, session: Session, batch: Callable[[int], tuple[Tensor, Tensor]],
        figures: Callable[[], tuple[float, ...]], **data: Any,
    ) -> Progress:  # fmt: skip
        """Trains to the last step on a batch, (input_ids, labels), of step 0, 1, ...; `data` determines these."""
        identity = {"data": data, "arm": self.arm}
        return self.fit(session, lambda step: self.loss(step, *batch(step)), figures, identity)


def _position(sizes: Sizes, arm: str) -> PositionEncoding:
    encoding = "seqpe-bias" if arm in ABLATIONS else arm
    options: dict[str, Any] = sizes.encoder_options(encoding)
    match encoding:
        case "sinusoidal":
            scale = sizes.sinusoid_scale
            options = {"scale": sizes.weight_std * math.sqrt(2) if scale is None else scale}
        case "learned":
            options = {"length": sizes.length, "std": sizes.weight_std}
    return position_encoding(
        encoding, heads=sizes.heads, head_dim=sizes.dim // sizes.heads, layers=sizes.layers, **options
    )


# The paper's text, and what made its tokens.
PAPER_DATASET = "Salesforce/wikitext:wikitext-103-raw-v1"
PAPER_TOKENIZER = "openai-community/gpt2"
TITLES = {
    "nope": "NoPE",
    "sinusoidal": "Sinusoidal",
    "learned": "Learned",
    "rope-1e4": "RoPE 1e4",
    "rope-1e6": "RoPE 1e6",
    "rope-1e8": "RoPE 1e8",
    "pope": "PoPE",
    "alibi": "ALiBi",
    "seqpe-sum": "SeqPE AttnSum",
    "seqpe-mul": "SeqPE AttnMul",
    "seqpe-bias": "SeqPE AttnBias",
    "seqpe-bias-no-delta": "SeqPE AttnBias without L_delta",
    "seqpe-bias-no-ood": "SeqPE AttnBias without L_OOD",
    "seqpe-bias-no-delta-no-ood": "SeqPE AttnBias without both losses",
}
Lines = dict[str, dict[float, list[float]]]


class PositionStudy(Study):
    """Position encodings beyond the lengths of training.

    Args:
        titles: of all arms, in their order.
        defaults: the arms without --encodings; ablations: others.
        paper: the preset that follows the paper, with its text and its tokens.
        published, published_of, published_at: the paper's figures by arm, on what, and at which lengths.
    """

    run_type = Run
    preset = "short"
    shared = True
    titles: ClassVar[Mapping[str, str]] = TITLES
    defaults: ClassVar[Sequence[str]] = ARMS
    ablations: ClassVar[Sequence[str]] = tuple(ABLATIONS)
    paper: ClassVar[str]
    published: ClassVar[Mapping[str, Sequence[Any]]]
    published_of: ClassVar[str]
    published_at: ClassVar[Sequence[int]]

    def add_own(self, parser: argparse.ArgumentParser) -> None:
        known = list(dict.fromkeys([*self.defaults, *self.ablations]))
        further = [name for name in known if name not in self.defaults]
        more = f", {' and '.join(further)} among them" if further else ""
        add_names(parser, "--encodings", known, self.defaults, more)

    def add_corpus(self, parser: argparse.ArgumentParser) -> None:
        """Adds --dataset and --tokenizer, with other defaults in the preset that follows the paper."""
        parser.add_argument(
            "--dataset", help=f"Hugging Face dataset with a column text (default: of {self.paper}, WikiText-103)"
        )
        parser.add_argument("--tokenizer", help=f"folder or hub name (default: bytes; of {self.paper}, GPT-2's)")

    def corpus(self, options: argparse.Namespace) -> Corpus:
        """The text that --text, --dataset and --tokenizer ask for; the paper's where they ask for none."""
        dataset, tokenizer = options.dataset, options.tokenizer
        if options.preset == self.paper and options.text is None and dataset is None:
            dataset = PAPER_DATASET
        if options.preset == self.paper and tokenizer is None:
            tokenizer = PAPER_TOKENIZER
        made = None if tokenizer is None else _tokenizer(tokenizer)
        return load_corpus(options.text, dataset=dataset, tokenizer=made, progress=dataset is not None)

    def arms(self, options: argparse.Namespace, recipe: Any) -> Sequence[str]:
        return list(options.encodings)

    def order(self, run: Run) -> int:
        return list(self.titles).index(run.arm)

    def by_length(
        self, runs: Sequence[Run], split: str, figure: Callable[[Any], float], form: str | Callable[[float], str]
    ) -> Rows:
        """Header and one row an arm: a figure at each length."""
        lengths = list(getattr(runs[0], split))
        columns = {"position encoding": name_of(self.titles)}
        for length, heading in zip(lengths, self.headings([int(length) for length in lengths]), strict=True):
            columns[heading] = figure_of(lambda run, length=length: figure(getattr(run, split)[length]), form)  # type: ignore[misc]
        return tabulate(self.by_arm(runs), columns | {"training": SECONDS, "seeds": SEEDS})

    def headings(self, lengths: Sequence[int]) -> list[str]:
        """Of the columns of so many tokens, or patches on a side."""
        return [f"{length // lengths[0]}x, {length}" for length in lengths]

    def lines(self, runs: Sequence[Run], figure: Callable[[Any], float], scale: float = 1) -> Lines:
        """A figure of the test split by arm and length, of each seed."""
        return {
            self.titles[arm]: {
                int(length) / scale: [figure(run.test[length]) for run in found] for length in found[0].test
            }
            for arm, found in self.by_arm(runs).items()
        }

    def paper_rows(self, recipe: Any) -> Sequence[Rows]:
        header = [f"paper: {self.published_of}", *self.headings(self.published_at)]
        rows = [[self.titles[arm], *map(self.paper_cell, row)] for arm, row in self.published.items()]
        return [[header, *[row + ["-"] * (len(header) - len(row)) for row in rows]]]

    def paper_cell(self, figure: Any) -> str:
        """A figure of the paper."""
        return number(figure)

    def paper_lines(self, runs: Sequence[Run], figure: Callable[[Any], float] = float, scale: float = 1) -> Lines:
        """As `lines`, of the paper's figures of the same arms."""
        arms = self.by_arm(runs)
        return {
            self.titles[arm]: {
                length / scale: [figure(value)] for length, value in zip(self.published_at, row, strict=False)
            }
            for arm, row in self.published.items()
            if arm in arms
        }


def _tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name)


def number(value: float) -> str:
    """A perplexity: two decimals, and fewer digits where it is large."""
    return f"{value:.2f}" if value < 100 else f"{value:.0f}" if value < 10_000 else f"{value:.1e}"


def load_part(module: nn.Module, state: Path, prefix: str) -> None:
    """Gives a module the weights of a run's last checkpoint whose names begin so."""
    weights = load_file(checkpoints.last_whole(state, remove=False) / checkpoints.WEIGHTS)
    module.load_state_dict({name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(prefix)})


STYLE = {
    "NoPE": ("grey", ":", "x"), "Sinusoidal": ("yellow", "--", "s"), "Learned": ("orange", "--", "D"),
    "RoPE2D": ("red", "-.", "^"), "RoPE2D-Mix": ("green", "-", "v"), "RoPE 1e4": ("red", "-.", "^"),
    "RoPE 1e6": ("red", "--", "v"), "RoPE 1e8": ("red", ":", "<"), "PoPE": ("red", "-", "d"),
    "ALiBi": ("green", "-", "P"),
    "SeqPE AttnSum": ("sky", "--", "p"), "SeqPE AttnMul": ("purple", "--", "h"), "SeqPE AttnBias": ("blue", "-", "o"),
    "SeqPE AttnBias without L_delta": ("black", ":", "o"), "SeqPE AttnBias without both losses": ("black", "-.", "o"),
    "SeqPE AttnMul without both losses": ("black", "-.", "h"), "SeqPE AttnMul without L_delta": ("black", ":", "h"),
    "SeqPE AttnMul without L_OOD": ("black", "--", "h"), "SeqPE AttnBias without L_OOD": ("black", "--", "o"),
}  # fmt: skip


@dataclass(frozen=True)
class Panel:
    """One figure of several encodings.

    Args:
        title: what is shown, and where.
        lines: {encoding, as in `STYLE`: {length or size: the seeds' values}}.
        logarithmic: the vertical axis.
        beyond: values are by sizes of images, as multiples of training's, and not by tokens.
    """

    title: str
    lines: Mapping[str, Mapping[Any, Sequence[float]]]
    logarithmic: bool = True
    beyond: bool = False


def draw_lengths(panels: Sequence[Panel], title: str) -> Figure:
    """A panel a figure: its mean over seeds against the length, a line an encoding, with bars from lowest to highest.

    The shortest length of a panel is that of training, and has a thin vertical line.
    """
    from gistkit.viz.style import Picture, tidy
    from gistkit_lab.viz.lines import draw_bars, styles

    # A paper may have none of the arms.
    panels = [panel for panel in panels if panel.lines]
    figure, style = Picture(figsize=(2.4 + 3.5 * len(panels), 4.2), layout="constrained"), styles(STYLE)
    handles: dict[str, Any] = {}
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name, line in panel.lines.items():
            handles.setdefault(name, draw_bars(axes, line, markersize=4.5, linewidth=1.3, **style[name]))
        sizes = sorted({size for line in panel.lines.values() for size in line})
        axes.axvline(sizes[0], color="0.5", linewidth=0.8, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        axes.set_title(panel.title, loc="left", fontsize=10)
        tidy(axes)
        if panel.beyond:
            # Labels that would touch are left out.
            ticks = [size for size, larger in zip(sizes, [*sizes[1:], math.inf], strict=True) if larger / size > 1.06]
            axes.set_xticks(ticks, [f"{size:.3g}x" for size in ticks])
            axes.set_xlabel("side of the images (dotted: in training)")
            continue
        axes.set_xticks(sizes, [f"{size // 1024:.0f}K" if size % 1024 == 0 else f"{size:.0f}" for size in sizes])
        if panel.logarithmic:
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, 1.02)
        axes.set_xlabel("tokens in a chunk (dotted: in training)")
    names = [name for name in style if name in handles]
    figure.legend([handles[name] for name in names], names, loc="outside right center", frameon=False, fontsize=8)
    figure.suptitle(title, x=0.01, ha="left")
    return figure
