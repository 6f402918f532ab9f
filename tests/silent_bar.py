"""What the studies' runs take in place of a progress bar."""


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
