"""The papers' experiments at a size that runs on a laptop, a file a study.

Each has its own `Recipe`, `Run` and, where runs differ in more than a name, `Arm`.
"""
