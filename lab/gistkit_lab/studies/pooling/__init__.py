"""The study `pooling`."""

PURPOSE = "train one layer to average windows of its context, under the pool mask and the standard one"
EXAMPLES = """\
example: gistkit study pooling --quick
example: gistkit study pooling --inputs sphere --heads 1/1,8/8,8/4 --ratios 1,2 --lengths 40 --resume
example: gistkit study pooling --paper --inputs sphere --device cuda --processes 8"""
