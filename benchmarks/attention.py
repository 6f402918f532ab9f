"""gistkit.attention against torch on the masks of the papers: plain torch, SDPA and FlexAttention.

From a base point (B1 H8 N4096 D64 float32, every mask) the cases go one axis at a time with three of the masks, then
decode; see benchmarks/README.md. A size option (--lengths, --batch, --heads, --key-heads, --dim, --dtype) replaces the
axes by cases of one's own, and --study by those of a suite of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import contenders
import harness
import torch
from masks import AXES, BASE, FEW, PLANS, QUICK, STUDIES, Point, Shape, shapes
from roof import UNRATED, measure, rated_isas

import gistkit
from gistkit.ops import best_isa
from gistkit.ops._library import ISA_NAMES

DTYPES = ("float32", "bfloat16", "float16")
# Torch's own kernels, MKL, oneDNN and what torch.compile generates choose their instruction sets each for itself.
AVX2_ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "TORCHINDUCTOR_CACHE_DIR": str(harness.ROOT / "build" / "inductor-avx2"),
}


def limit_torch_to_avx2() -> None:
    """Starts this process again with torch limited to AVX2; the libraries read the variables as they load."""
    if os.environ.get("ATEN_CPU_CAPABILITY") != "avx2":
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | AVX2_ENVIRONMENT)
    import torch._inductor.config as inductor

    inductor.cpp.simdlen = 256


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = harness.parser(__doc__, "python benchmarks/attention.py --quick --masks causal --isa avx2", appends=True)
    options.add_argument(
        "--axes", nargs="+", choices=[*AXES, "decode"], help="default: all but quick; quick and decode if --quick"
    )
    options.add_argument("--study", choices=list(STUDIES), help="masks and sizes with results of their own")
    options.add_argument("--masks", nargs="+", choices=list(PLANS), help="default: as the axis has them")
    options.add_argument("--passes", nargs="+", choices=["forward", "both"], default=["forward", "both"])
    options.add_argument("--isa", nargs="+", choices=ISA_NAMES, help="default: the best; at the base all but generic")
    options.add_argument("--torch-isa", choices=["avx2"], help="limit torch too, and gistkit; base alone by default")
    options.add_argument("--lengths", nargs="+", type=int, metavar="N", help=f"tokens (base: {BASE.n})")
    options.add_argument("--batch", type=int, help=f"sequences (base: {BASE.batch})")
    options.add_argument("--heads", type=int, help=f"query heads (base: {BASE.heads})")
    options.add_argument("--key-heads", type=int, help="default: as many as --heads")
    options.add_argument("--dim", type=int, help=f"head dim (base: {BASE.dim})")
    options.add_argument("--dtype", choices=DTYPES, help=f"base: {BASE.dtype}")
    options.add_argument("--no-flex", action="store_true", help="leave FlexAttention out: compiling it takes a while")
    options.add_argument(
        "--no-slow", action="store_true", help="leave plain torch out, which takes part at the base point"
    )
    return options


def own_points(options: argparse.Namespace) -> tuple[Point, ...]:
    """The points that size options ask for, none without such an option."""
    sizes = {name: getattr(options, name) for name in ("batch", "heads", "key_heads", "dim", "dtype")}
    asked = {name: size for name, size in sizes.items() if size is not None}
    if not asked and options.lengths is None:
        return ()
    asked.setdefault("key_heads", asked.get("heads", BASE.key_heads))
    return tuple(replace(BASE, n=n, **asked) for n in options.lengths or (BASE.n,))


def decoding(options: argparse.Namespace, isas: list[str]) -> Iterator[harness.Case]:
    """A step over a short cache, which is latency, over a long one, which is reading memory, and of several tokens."""
    for queries, keys in ((1, 64), (1, 32768), (8, 32768)):
        for name in ("float32", "bfloat16"):
            dtype = getattr(torch, name)
            facts = {
                "mask": "decoding", "queries": queries, "n": keys, "batch": 1, "heads": 32, "key_heads": 8, "dim": 128,
                "dtype": name,
            }  # fmt: skip
            yield harness.Case(
                f"decoding, {queries} {'query' if queries == 1 else 'queries'}, {keys} keys, H32/8 D128 {name}",
                partial(contenders.decode, keys, dtype, isas, queries),
                traffic=contenders.decode_bytes(keys, dtype),
                facts={**facts, "pass": "forward", "caches": contenders.decode_layers(keys, dtype)},
            )


def default_axes(options: argparse.Namespace) -> list[str]:
    """The axes of a run that names none: all, for a quick run or one with torch limited the base point alone."""
    if options.torch_isa:
        return ["quick" if options.quick else "base"]
    return ["quick", "decode"] if options.quick else [*(axis for axis in AXES if axis != "quick"), "decode"]


def cases(options: argparse.Namespace) -> Iterator[harness.Case]:
    """Every case that the command line asks for."""
    best = "avx2" if options.torch_isa else best_isa()
    vectors = rated_isas(best)
    every = options.isa or vectors[:0:-1] or vectors
    own = own_points(options)
    names = options.axes or default_axes(options)
    points = own or [point for name in names for point in AXES.get(name, ())]
    masks = options.masks
    if options.study:
        studied, sizes = STUDIES[options.study]
        masks, points = masks or studied, own or (sizes[:1] if options.quick else sizes)

    def case(shape: Shape) -> harness.Case:
        at_base = shape.point in (BASE, QUICK, *own) and not options.study
        isas = every if at_base else options.isa or vectors[-1:]
        # What multiplies bfloat16 as it is takes part wherever there is some.
        if shape.point.dtype == "bfloat16" and best in UNRATED and not options.isa:
            isas = [best, *isas]
        make = partial(
            contenders.attention,
            shape,
            isas,
            with_flex=not options.no_flex
            and not (options.quick and (options.torch_isa or (shape.mask == FEW[-1] and not options.study))),
            slow=shape.point == BASE and shape.mask in FEW and not (options.no_slow or options.quick or options.study),
            planned=options.study == "dodo",
        )
        return harness.Case(shape.name, make, work=shape.work, facts=shape.facts, unrated=contenders.MASK_CREATION)

    for shape in shapes(points, masks):
        if ("both" if shape.backward else "forward") in options.passes:
            yield case(shape)
    if "decode" in names and not own and not masks:
        yield from decoding(options, options.isa or vectors[-1:])


def proportion(found: list[harness.Case], timings: list[harness.Timing]) -> list[str]:
    """Lines that say between which bounds the first form's time for a visible pair lies, a pass each."""
    visible = {case.name: case.facts for case in found if case.work}
    ours = next(timing.form for timing in timings)
    lines = []
    for name in dict.fromkeys(facts["pass"] for facts in visible.values()):
        each = [
            timing.median * 1e9 / visible[timing.case]["visible"]
            for timing in timings
            if timing.form == ours and timing.case in visible and visible[timing.case]["pass"] == name
        ]
        lines.append(f"{ours}, {name}: {min(each):.0f} to {max(each):.0f} ps a visible pair of a head")
    return lines


def leads(found: list[harness.Case], timings: list[harness.Timing]) -> list[str]:
    """Lines that say between which bounds each other form's time lies in times of the first form's, a pass each."""
    passes = {case.name: case.facts["pass"] for case in found if case.work}
    ours = timings[0].form
    first = {timing.case: timing.median for timing in timings if timing.form == ours}
    ratios: dict[tuple[object, str], list[float]] = {}
    for timing in timings:
        if timing.case in passes and timing.form not in (ours, *contenders.MASK_CREATION):
            ratios.setdefault((passes[timing.case], timing.form), []).append(timing.median / first[timing.case])
    return [f"{form}, {name}: {min(each):.2f} to {max(each):.2f} x {ours}" for (name, form), each in ratios.items()]


def main() -> None:
    """Runs the cases that the command line asks for."""
    command = parser()
    options = command.parse_args()
    if options.torch_isa:
        if "avx512" not in rated_isas(best_isa()):
            print(f"attention: this processor offers {best_isa()} at most, so a run without --torch-isa is the same")
            return
        limit_torch_to_avx2()
        gistkit.ops.cpu_isa("avx2")
    isas = rated_isas("avx2" if options.torch_isa else best_isa())
    found = list(cases(options))
    if options.torch_isa and any(case.facts["dtype"] != "float32" for case in found):
        command.error("--torch-isa: expected float32 cases only, as oneDNN has no bfloat16 or float16 kernels for AVX2")
    roof = measure(isas, options.threads, seconds=0.05) if options.quick else measure(isas, options.threads)
    suite = "-".join(["attention", *filter(None, [options.study, options.torch_isa and f"torch-{options.torch_isa}"])])
    if any(case.work and case.facts["n"] > contenders.LONGEST_DENSE for case in found):
        print(f"SDPA with a dense mask is left out beyond N {contenders.LONGEST_DENSE}")
    timings = harness.run(suite, found, options, seconds=5, least=3, roof=roof)
    if options.study:
        print("\n".join([*proportion(found, timings), *leads(found, timings)]))
    if path := harness.output(options):
        from picture import draw, drawn

        if not drawn(case.facts for case in found):
            return
        print(f"wrote {draw(path, suite)}")


if __name__ == "__main__":
    main()
