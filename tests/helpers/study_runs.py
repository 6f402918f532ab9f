"""What tests of the studies share: a bar that interrupts, what a run gave, and that it resumes."""

import dataclasses

import pytest


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


def check_resumes(train):
    """A whole run; one that is interrupted and resumed is its equal, and one of another seed is not."""
    whole = train()
    with pytest.raises(KeyboardInterrupt):
        train(bar=Bar(3))
    assert outcome(train(resume=True)) == outcome(whole)
    assert train(seed=1).curve != whole.curve
    return whole
