"""The study `in-place`."""

PURPOSE = "compare Gist, AvgPool, GistPool and their variants on answers from a compressed context"
EXAMPLES = """example: gistkit study in-place --preset quick --methods no,full,avgpool --ratios 2
         gistkit study in-place --preset paper --device cuda --seeds 3 --resume"""
