"""SeqPE's encoder over a trie of digits against the plain form, eager and compiled; frozen, against an embedding.

The paper's text encoder: width 768, 12 heads, 2 layers, 5 decimal digits, float32. Positions 0 .. 16383, as a text has
them, and 2048 drawn below 20,000, as the losses' samplers do. The trie is planned within the time that is measured.
--frozen measures look-ups in a frozen encoder instead, and --memory the peak of one forward + backward, each contender
in a fresh process (Linux only).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import harness
import torch
import torch.nn.functional as F
from memory import peak_of
from torch import Tensor
from tqdm import tqdm

from gistkit.nn import SeqPE

DIM, DIGITS = 768, 5
SETS = ("0..16383", "2048 below 20000")
FORMS = ("gistkit", "plain, eager", "plain, compiled")


def positions_of(name: str) -> Tensor:
    """A set of positions by its name."""
    if name == SETS[0]:
        return torch.arange(16384)
    return torch.randint(0, 20000, (2048,), generator=torch.Generator().manual_seed(0))


def encoders(model: SeqPE, positions: Tensor) -> dict[str, Callable[[], Tensor]]:
    """The contenders' forward passes."""
    symbols = model.symbols(positions)
    compiled = torch.compile(model.read, fullgraph=True, dynamic=False)
    return dict(
        zip(FORMS, (lambda: model(positions), lambda: model.read(symbols), lambda: compiled(symbols)), strict=True)
    )


def with_backward(model: SeqPE, forward: Callable[[], Tensor], grad: Tensor) -> None:
    """One pass in both directions, to every parameter."""
    model.zero_grad(set_to_none=True)
    forward().backward(grad)


def forms(name: str, backward: bool) -> harness.Forms:
    """The contenders of a set of positions, forward alone or with backward."""
    model = SeqPE(DIM, digits=DIGITS)
    positions = positions_of(name)
    grad = torch.randn(len(positions), DIM) / DIM
    ways = encoders(model, positions)
    if backward:
        return {form: partial(with_backward, model, way, grad) for form, way in ways.items()}
    return {form: torch.no_grad()(way) for form, way in ways.items()}


def table_forms(count: int) -> harness.Forms:
    """Looking positions up in an encoder that is frozen, and in an embedding of as many rows."""
    model = SeqPE(DIM, digits=DIGITS).eval().requires_grad_(False)
    positions = torch.arange(count)
    block, weight = ExitStack(), torch.randn(4096, DIM)
    block.enter_context(model.frozen(torch.arange(4096)))

    # Holds the block, which would end without it.
    def look_up(block: ExitStack = block) -> Tensor:
        return model(positions)

    return {"gistkit": look_up, "F.embedding": lambda: F.embedding(positions, weight)}


def cases(quick: bool) -> Iterator[harness.Case]:
    """Both sets of positions, forward and with backward; the small set alone if quick."""
    for name in SETS[1:] if quick else SETS:
        for backward in (False, True):
            passes = "forward + backward" if backward else "forward"
            # Of the training that reads positions, forward as it stands in it would keep what backward needs.
            facts = {"positions": name, "dim": DIM, "pass": passes}
            yield harness.Case(f"seqpe {name}, d {DIM} float32, {passes}", partial(forms, name, backward), facts=facts)


def lookups() -> list[harness.Case]:
    """Few and many positions of a frozen encoder."""
    return [
        harness.Case(f"seqpe frozen, {count} positions, d {DIM} float32", partial(table_forms, count))
        for count in (512, 4096)
    ]


def peak_mib(form: str) -> float:
    """MiB of one forward + backward of the large set above what was there before: call it in a fresh process."""
    model = SeqPE(DIM, digits=DIGITS)
    small, large = (torch.arange(count) for count in (64, 16384))
    grads = [torch.randn(len(x), DIM) / DIM for x in (small, large)]
    with_backward(model, encoders(model, small)[form], grads[0])
    way = encoders(model, large)[form]
    if form == FORMS[2]:
        with_backward(model, way, grads[1])
    return peak_of(lambda: with_backward(model, way, grads[1]))[1]


def measure_memory(options: argparse.Namespace) -> None:
    """Every contender's peak, each in a process of its own."""
    found, rows = harness.begin("seqpe-memory", options), []
    for form in tqdm(FORMS, desc="seqpe memory", unit="form", dynamic_ncols=True):
        mib = harness.measured_apart(options, form)
        rows.append({"case": f"seqpe {SETS[0]}, d {DIM} float32", "form": form, "mib": mib})
        tqdm.write(f"  {form:20} {mib:10.1f} MiB")
    harness.write("seqpe-memory", {"machine": found, "mebibytes": rows}, options)


def main() -> None:
    """Runs all cases; those of the small set alone if quick."""
    parser = harness.parser(__doc__, "python benchmarks/seqpe.py --quick", appends=True, apart=True)
    parser.add_argument("--memory", action="store_true", help="measure peak memory instead of times")
    parser.add_argument("--frozen", action="store_true", help="measure look-ups in a frozen encoder instead")
    options = parser.parse_args()
    if harness.measured_here(options, peak_mib):
        return
    if options.append and options.memory:
        parser.error("--append: expected none with --memory")
    if options.memory:
        measure_memory(options)
    elif options.frozen:
        harness.run("seqpe-frozen", lookups(), options)
    else:
        harness.run("seqpe", list(cases(options.quick)), options, seconds=8, least=3)


if __name__ == "__main__":
    main()
