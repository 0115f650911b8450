"""docs/extending.md does what it says: its blocks of Python run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path

from autopar.compiler import PASSES
from autopar.ir.compiler_pass import GRAPH

DOCS = Path(__file__).parents[2] / "docs" / "extending.md"


def test_the_blocks_run(capsys):
    text = DOCS.read_text()
    names: dict = {"__name__": "docs"}
    for found in re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        line = text.count("\n", 0, found.start(1))
        exec(compile("\n" * line + found[1], str(DOCS), "exec"), names)
    printed = capsys.readouterr().out
    places = [step.name for step in PASSES if step.takes == GRAPH]
    assert places == re.findall(
        r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \| (?:the forward|forward|one)", text, re.MULTILINE))
    )
    assert "ways to shard it, all right" in printed and "the rule of docs.gate.default is wrong" in printed
    assert "two_by_two: 2 ranks" in printed and "rank 0 stands at 0B0 and waits for 1B0" in printed
