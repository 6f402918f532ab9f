"""What tests of the studies share: a bar that interrupts, what a run gave, and a command that measures little."""

import dataclasses

from gistkit.nn.seqpe import contrastive_loss, ood_loss
from gistkit_lab.studies import epl
from gistkit_lab.studies.fitting import Session

# Of a small model with any position encoding, and of its training.
TINY = {
    "warmup": 2, "dim": 16, "layers": 2, "heads": 2, "encoder_heads": 2, "pivots": 4, "candidates": 5, "windows": 3,
    "window_positions": 4,
}  # fmt: skip


class Bar:
    """A silent progress bar that can interrupt the run after some steps."""

    def __init__(self, interrupt_after=None):
        self.left = interrupt_after

    def reset(self, total): ...

    def set_postfix_str(self, text): ...

    def update(self, steps=1):
        if self.left is not None and steps == 1:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt


def outcome(run):
    """All that a run gave but how long it took."""
    return {key: value for key, value in dataclasses.asdict(run).items() if key != "seconds"}


def session(recipe, arm, out, source=None, *, seed=0, bar=None, **options):
    """A run in the folder `out`."""
    return Session(recipe, arm, seed, out, source, bar=bar or Bar(), **options)


def with_positions(learner, drawn, task):
    """The loss of a step: that of its task, and SeqPE's two of the positions that were drawn, which have one each."""
    of = lambda index: learner.encoder(drawn.positions[index])  # noqa: E731
    name = learner.arm
    assert (drawn.pivots is None) == ("no-delta" in name) and (drawn.teacher is None) == name.endswith("no-ood")
    if drawn.pivots is not None:
        task = task + 0.1 * contrastive_loss(of(drawn.pivots), of(drawn.candidates), drawn.positive)
    if drawn.teacher is not None:
        task = task + 0.1 * ood_loss(of(drawn.teacher), of(drawn.student), 2)
    return float(task.detach())


@dataclasses.dataclass(frozen=True)
class FewChunks(epl.Recipe):
    """The study `epl` as it is, but for what it is measured on."""

    eval_chunks: int = 4
    final_chunks: int = 8
