"""How the studies train: the library's trainer on a loss of each step, with evaluations at intervals."""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from gistkit.common.processes import launched
from gistkit.compress import Compressor
from gistkit.hf import attach
from gistkit.train import checkpoints
from gistkit.train.recipe import adamw, warmed_up
from gistkit.train.resumable import Flow, ResumableTrainer


@dataclass(frozen=True)
class StudyRecipe:
    """The schedule of a run, whatever its model and its data."""

    steps: int = 450
    batch: int = 16
    learning_rate: float = 2e-3
    warmup: int = 30
    weight_decay: float = 0.1
    clip: float = 1.0
    eval_every: int = 25

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of step 0, 1, ..., constant after the warm-up."""
        return warmed_up(self.learning_rate, step, self.warmup)


@dataclass(frozen=True)
class FallingRecipe(StudyRecipe):
    """A schedule whose learning rate is constant after the warm-up, and falls to 0 in the share `decay` at the end."""

    decay: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay: expected a share from 0 to 1, got {self.decay}")

    def learning_rate_at(self, step: int) -> float:
        falling = (self.steps - step) / max(1.0, self.decay * self.steps)
        return self.learning_rate * min(1.0, (step + 1) / max(self.warmup, 1), falling)


@dataclass
class Progress:
    """The evaluations of a training, (step, figure, ...) each, and its seconds without them.

    `times` are the seconds up to each evaluation: of the processor where one thread trains on a CPU, so that other work
    on the machine does not count, and otherwise by the clock.
    """

    curve: list[tuple[Any, ...]]
    seconds: float
    times: list[float] = field(default_factory=list)


@dataclass(kw_only=True)
class Run:
    """The results of one arm and seed; a study's own has the fields of its arm too.

    `curve` holds (step, loss in nats, figure, ...) over some held-out data; `held_out` and `test` the figures of the
    trained model. The test split is read once, at the end.
    """

    seed: int
    curve: list[tuple[Any, ...]] = field(default_factory=list)
    held_out: dict[str, Any] = field(default_factory=dict)
    test: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    parameters: int = 0


class Carried(NamedTuple):
    """What a run has besides parameters and step: how a checkpoint gets it, as JSON, and gives it back."""

    get: Callable[[], Any]
    set: Callable[[Any], None]


@contextmanager
def exclusively(path: Path) -> Iterator[None]:
    """Inside, no other process is in this block; `path` is a lock file. For what several runs share.

    Of the processes of one launch the first has the lock for all; the others do not wait for it.
    """
    if not launched().is_first:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class Session:
    """A run: what decides it, and how it trains.

    Args:
        recipe, arm, seed: what decides it, with its source.
        out: folder of the states of a study's runs.
        source: text or images; None: there are none.
        device: torch device.
        resume: whether to go on from a state in `out`.
        bar: a tqdm progress bar.
        stage: of a run that trains in several, which have a state each; "": the first.
    """

    recipe: Any
    arm: Any
    seed: int
    out: Path
    source: Any = None
    device: str = "cpu"
    resume: bool = False
    bar: Any = None
    stage: str = ""

    @property
    def name(self) -> str:
        return self.arm if isinstance(self.arm, str) else str(self.arm.name)

    @property
    def state(self) -> Path:
        """The folder of its checkpoints."""
        return self.out / "-".join(filter(None, (self.name, str(self.seed), self.stage)))

    @contextmanager
    def shared(self, arm: Any, **changes: Any) -> Iterator[Session]:
        """The same session with another arm, and other values of its recipe: what several runs share, such as the model
        that the arms of a seed begin with.

        It goes on from what is there, and no other process is in this block. Other `steps` are evaluated at their end.
        """
        if "steps" in changes:
            changes["eval_every"] = changes["steps"]
        session = replace(self, arm=arm, recipe=replace(self.recipe, **changes), resume=True)
        with exclusively(session.state.with_name(f"{session.state.name}.lock")):
            yield session

    def decides(self, *measured: str, **more: Any) -> dict[str, Any]:
        """The JSON values that decide it; `measured`: fields of the recipe for figures of its end."""
        recipe = {name: value for name, value in asdict(self.recipe).items() if name not in measured}
        return {"recipe": recipe, "arm": self.name, "seed": self.seed, **more}

    def run(
        self, kind: Callable[..., Any], arm: Mapping[str, Any], progress: Progress,
        trained: Iterable[tuple[str, nn.Parameter]], figures: Callable[[str], Any], **more: Any,
    ) -> Any:  # fmt: skip
        """The run of a trained model, of a kind of `Run`, with `figures` of "held_out" and "test"."""
        found = {split: figures(split) for split in ("held_out", "test")}
        count = sum(parameter.numel() for _, parameter in trained)
        return kind(
            **arm, **found, **more, seed=self.seed, curve=progress.curve, seconds=progress.seconds, parameters=count
        )

    def fit(
        self, compressor: Compressor, loss: Callable[[int], Tensor], figures: Callable[[], tuple[float, ...]],
        identity: dict[str, Any], **options: Any,
    ) -> Progress:  # fmt: skip
        """Trains a compressor to the recipe's last step with its model attached, and leaves it in eval mode.

        Arguments as of `optimise`; the loss is that of train mode, the figures those of eval mode.
        """

        def trained(step: int) -> Tensor:
            compressor.train()
            return loss(step)

        def measured() -> tuple[float, ...]:
            compressor.eval()
            return figures()

        with attach(compressor.model):
            progress = optimise(self, list(compressor.trainable()), trained, measured, identity, **options)
        compressor.eval()
        return progress


def optimise(
    session: Session,
    parameters: Sequence[tuple[str, nn.Parameter]],
    loss: Callable[[int], Tensor],
    evaluate: Callable[[], tuple[float, ...]],
    identity: dict[str, Any],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    learning_rate: Callable[[int], float] | None = None,
    clips: Sequence[tuple[Sequence[nn.Parameter], float]] = (),
    carried: Carried | None = None,
    enough: Callable[[tuple[float, ...]], bool] = lambda figures: False,
) -> Progress:
    """Trains to the recipe's last step. SIGINT or SIGTERM ends it after a step with a checkpoint; a second one at once.

    Under a launcher each process has the loss of its part of a step's batch, whose mean is the step's.

    Args:
        session: of the run, whose recipe has `steps` and `eval_every`, and what else is not given. Its state gets a
            checkpoint at every evaluation, of which the last two are kept; without `resume` it is removed first.
        parameters: the trained parameters, by name.
        loss: of step 0, 1, ...; the same at every call.
        evaluate: figures of the current model, the first of them its held-out loss; called before the first step,
            every `eval_every` steps and after the last.
        identity: JSON values that decide the run; a checkpoint of another one is refused.
        optimizer: of these; the learning rate of a group is the step's times its "factor", if it has one. None: AdamW
            with the recipe's weight decay.
        learning_rate: of step 0, 1, ...; None: the recipe's.
        clips: parameters whose gradients are clipped together, with the norm each; (): all, with the recipe's.
        carried: what loss and evaluations change besides the parameters, and what a resumed run gets back.
        enough: whether these figures of an evaluation end the run.

    Raises:
        Interrupted: after a signal, when a checkpoint is saved.
    """
    recipe, out, resume = session.recipe, session.state, session.resume
    if recipe.steps == 0:
        return Progress([(0, *evaluate())], 0.0, [0.0])
    processes, device = launched(), parameters[0][1].device
    if not resume and processes.is_first:
        shutil.rmtree(out, ignore_errors=True)
    # One that looks for checkpoints must not find those of before.
    processes.gathered(None)
    values = [parameter for _, parameter in parameters]
    optimizer = optimizer or adamw(values, recipe.learning_rate, recipe.weight_decay)
    learning_rate = learning_rate or recipe.learning_rate_at
    clips = clips or [(values, recipe.clip)]
    cpu = device.type == "cpu"
    args = TrainingArguments(
        output_dir=str(out), max_steps=recipe.steps, per_device_train_batch_size=1, max_grad_norm=1.0,
        eval_strategy="steps", eval_steps=recipe.eval_every, save_steps=recipe.eval_every, save_total_limit=2,
        logging_strategy="no", logging_nan_inf_filter=False, report_to=[], disable_tqdm=True, use_cpu=cpu,
        dataloader_pin_memory=False, ddp_find_unused_parameters=True, eval_on_start=True,
    )  # fmt: skip
    if device.index and processes.count == 1:
        # transformers would take the first GPU.
        torch.cuda.set_device(device)
        PartialState().device = args.__dict__["_setup_devices"] = device
    # What is drawn is that of the run, whatever transformers draws.
    with torch.random.fork_rng([] if cpu else [device]):
        trainer = _StudyTrainer(
            args, parameters, optimizer, loss, evaluate, identity, learning_rate, clips, session.bar, carried, enough
        )
    session.bar.reset(total=recipe.steps)
    trainer.train(resume and bool(checkpoints.find(out)))
    evaluations: list[Any] = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    curve = [(entry["step"], *entry["eval_figures"]) for entry in evaluations]
    return Progress(curve, trainer.seconds, [entry["eval_seconds"] for entry in evaluations])


class _Step(nn.Module):
    """A loss as a module: it has the trained parameters, and what it reads is the number of a step."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], loss: Callable[[int], Tensor]) -> None:
        super().__init__()
        self.trained, self.loss = nn.ParameterList(parameter for _, parameter in parameters), loss

    def forward(self, step: int) -> Tensor:
        return self.loss(step)


class _StudyFlow(Flow):
    """Counts the seconds of the steps, and shows them."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        super().on_train_begin(args, state, control)
        self.trainer.bar.update(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        super().on_step_end(args, state, control)
        self.trainer.spent += self.trainer.work_clock() - self.trainer.began
        self.trainer.bar.update()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        super().on_evaluate(args, state, control)
        control.should_training_stop |= self.trainer.has_ended(state)
        control.should_save = True


class _StudyTrainer(ResumableTrainer):
    """See `optimise`."""

    def __init__(
        self, args: TrainingArguments, parameters: Sequence[tuple[str, nn.Parameter]],
        optimizer: torch.optim.Optimizer, loss: Callable[[int], Tensor], measure: Callable[[], tuple[float, ...]],
        identity: Mapping[str, Any], learning_rate: Callable[[int], float],
        clips: Sequence[tuple[Sequence[nn.Parameter], float]], bar: Any, carried: Carried | None,
        enough: Callable[[tuple[float, ...]], bool],
    ) -> None:  # fmt: skip
        self.parameters, self.measure, self.learning_rate, self.clips = parameters, measure, learning_rate, clips
        self.bar, self.carried, self.enough = bar, carried, enough
        self.spent, self.began = 0.0, 0.0
        alone = args.use_cpu and torch.get_num_threads() == 1
        self.work_clock = time.process_time if alone else time.perf_counter
        for group in optimizer.param_groups:
            group["lr"] = group.get("factor", 1.0)
        super().__init__(
            _Step(parameters, loss), args, identity=identity, flow=_StudyFlow, notice="", eval_dataset=[None],
            optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)),
        )  # fmt: skip

    def trained(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self.parameters

    def get_train_dataloader(self) -> DataLoader[Any]:
        # With a generator of its own: the run's draws are those of losses and figures alone.
        steps: Any = range(self.args.max_steps)
        return DataLoader(steps, 1, collate_fn=lambda rows: {"step": rows[0]}, generator=torch.Generator())

    def get_batch_samples(self, *args: Any) -> Any:
        self.began = self.work_clock()
        return super().get_batch_samples(*args)

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **options: Any) -> Tensor:
        loss: Tensor = model(**inputs)
        return loss

    def _clip_grad_norm(self, model: Any) -> Tensor:
        norms = [nn.utils.clip_grad_norm_(parameters, limit) for parameters, limit in self.clips]
        return torch.stack(norms).norm()

    def evaluate(self, *_: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        figures = self.measure()
        self.bar.set_postfix_str(f"held-out loss {figures[0]:.3f}")
        metrics: dict[str, Any] = {"eval_loss": figures[0], "eval_figures": figures, "eval_seconds": self.spent}
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def has_ended(self, state: Any) -> bool:
        found = [entry["eval_figures"] for entry in state.log_history if "eval_loss" in entry]
        return bool(found) and self.enough(tuple(found[-1]))

    def header(self) -> dict[str, Any]:
        carried = None if self.carried is None else self.carried.get()
        return {"spent": self.spent, "carried": carried, **super().header()}

    def take(self, header: Mapping[str, Any]) -> None:
        super().take(header)
        self.spent = header["spent"]
        if self.carried is not None:
            self.carried.set(header["carried"])

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        super()._load_rng_state(resume_from_checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Nothing: an evaluation that was left has drawn from them since."""
