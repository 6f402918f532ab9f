"""gistkit's lab: the papers' experiments and tables, run on the library."""
