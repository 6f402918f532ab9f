"""The study `voco`."""

PURPOSE = "compare the position layouts of VoCo tokens on questions about where items are in an image"
EXAMPLES = """example: gistkit study voco --preset quick --layouts dpl,epl --ratios 4.5
         gistkit study voco --preset short --seeds 3 --resume"""
