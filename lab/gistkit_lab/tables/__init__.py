"""The papers' tables: for each the runs that make it, as commands, and the paper's figures beside ours.

`gistkit study paper-table NAME` makes the missing runs of a table and prints it; a file for each paper.
"""

from __future__ import annotations

from collections.abc import Mapping

from gistkit_lab.tables import epl, gistpool, masks, preferences
from gistkit_lab.tables.files import read
from gistkit_lab.tables.table import Arm, Column, Stage, Table

__all__ = ["TABLES", "Arm", "Column", "Stage", "Table", "find_table"]

TABLES: Mapping[str, Table] = {
    **epl.TABLES,
    **read("cl"),
    **preferences.TABLES,
    **read("dodo"),
    **gistpool.TABLES,
    **masks.TABLES,
}
# Experiments that train models of their own: their tables are what studies print.
STUDIES = {
    "seqpe-1": "gistkit study length --preset seqpe-wikitext",
    "seqpe-2": "gistkit study retrieval --preset seqpe-squad",
    "seqpe-3": "gistkit study resolution --preset seqpe-imagenet",
    "gistpool-11": "gistkit study pooling --paper",
}


def find_table(name: str) -> Table:
    """The table of a name.

    Raises:
        ValueError: if there is none; for those of studies, with the study's command.
    """
    if name in STUDIES:
        raise ValueError(f"table: expected one that trains compressors, got {name}, which {STUDIES[name]} prints")
    if name not in TABLES:
        raise ValueError(f"table: expected one of {', '.join(TABLES)}, got {name!r}")
    return TABLES[name]
