"""What tests of the studies share: a bar that interrupts, what a run gave, and a command that measures little."""

import dataclasses

from gistkit_lab.studies import epl
from gistkit_lab.studies.fitting import Session


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


@dataclasses.dataclass(frozen=True)
class FewChunks(epl.Recipe):
    """The study `epl` as it is, but for what it is measured on."""

    eval_chunks: int = 4
    final_chunks: int = 8
