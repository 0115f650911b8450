"""The ablation is of mechanisms that are there, and its table of its rows."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks import ablation

TABLE = Path(ablation.__file__).parent / "results/ablation.txt"
ROWS = {*ablation.PATCHES, *ablation.OPTIONS, "deep models by eight blocks"}


def test_what_is_turned_off_is_there():
    for row, changes in ablation.PATCHES.items():
        with ablation.without(*changes):  # raises AttributeError for what is not
            assert changes, row


def test_the_table_has_the_rows():
    """At least one of each, and no other."""
    found = re.findall(r"^  (\S.{43}) +(?:[+-]\d+\.\d+%|stopped|\w+Error)", TABLE.read_text(), re.MULTILINE)
    assert {row.strip() for row in found} == ROWS
