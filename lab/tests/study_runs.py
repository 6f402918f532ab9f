"""What tests of the studies share: a bar that interrupts, what a run gave, and a command that measures little."""

import dataclasses

import pytest
import torch

from gistkit.nn import contrastive_loss, ood_loss
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


def check_step(learner, loss, batch, task, **close):
    """A step's loss is the task's, row by row, and SeqPE's two of the positions that were drawn; these, of each row."""
    rows, drawn, step = learner.schedule.batch, None, 1
    if learner.regularizer is not None:
        # A step in which some rows are shifted.
        drawn_at = ((step, learner.regularizer.draw(rows, step)) for step in range(50))
        step, drawn = next((step, one) for step, one in drawn_at if one.shifted.sum() == 2)
    found, (inputs, labels) = float(loss(step).detach()), batch(step)
    assert found == float(loss(step).detach())
    main = [None] * rows if drawn is None else drawn.positions[drawn.main]
    logits = torch.stack([learner.model(one[None], places)[0] for one, places in zip(inputs, main, strict=True)])
    expected = task(logits, labels)
    if drawn is not None:
        of = lambda index: learner.encoder(drawn.positions[index])  # noqa: E731
        name = learner.arm
        assert (drawn.pivots is None) == ("no-delta" in name) and (drawn.teacher is None) == name.endswith("no-ood")
        if drawn.pivots is not None:
            expected = expected + 0.1 * contrastive_loss(of(drawn.pivots), of(drawn.candidates), drawn.positive)
        if drawn.teacher is not None:
            expected = expected + 0.1 * ood_loss(of(drawn.teacher), of(drawn.student), 2)
    assert found == pytest.approx(float(expected.detach()), **close)
    return main


def check_arms_share_their_model(models, other):
    """All but what belongs to positions is the same in {arm: model}, and differs in one of another seed."""
    first = models["nope"].state_dict()
    for model in models.values():
        own = dict(model.position.named_parameters(prefix="position"))
        rest = {key: value for key, value in model.state_dict().items() if key not in own and key in first}
        assert rest.keys() == first.keys() and all(torch.equal(rest[key], value) for key, value in first.items())
    assert not all(torch.equal(value, first[key]) for key, value in other.state_dict().items())


@dataclasses.dataclass(frozen=True)
class FewChunks(epl.Recipe):
    """The study `epl` as it is, but for what it is measured on."""

    eval_chunks: int = 4
    final_chunks: int = 8
