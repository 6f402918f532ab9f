"""The papers' protocols of evaluation, on `gistkit.evaluate`: judges, summaries, several sets, lm_eval.

`gistkit evaluate --judge`, `--images`, `--prompt dodo` and the commands `gistkit judge`, `nuggets`,
`lm-eval` are made of it.
"""
