"""Attention of every kind under every cut of its sequence equals one device's to 1e-10, or is refused in words."""

from __future__ import annotations

import itertools

import pytest

from autopar.errors import StrategyError
from autopar.simulate.compare import verify_model
from benchmarks.sequence_matrix import EXACT, cells_of, checked

from ..helpers.attention_kinds import KINDS, Model, inputs_of


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cell", cells_of(KINDS)[::97], ids=lambda cell: "-".join(map(str, cell)))
def test_cells_of_the_matrix(cell):
    """A part of what benchmarks/sequence_matrix.py tries: a prime stride meets all kinds, cuts, lengths and extras."""
    try:
        assert checked(*cell) <= EXACT
    except StrategyError as refusal:
        assert "cannot be" in refusal.message or "no layout of input_ids follows the pin" in refusal.message


ADDED = [("cp=2", "ring", 16), ("cp=3", "ring", 13), ("cp=4", "ring", 15), ("cp=2,up=2", "ring+ulysses", 13)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind, at", itertools.product(("alibi", "alibi_left"), ADDED))
def test_what_is_added_goes_round(kind, at):
    """Also where padding closes all keys of a query by the lowest number, as transformers does."""
    mesh, strategy, length = at
    report = verify_model(Model((kind,), 12, 6), inputs_of(kind, length), mesh, strategy=strategy)
    assert report.match and max(report.errors.values()) <= EXACT, report
    assert "ring over cp" in report.plan.attentions[0].scheme


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["alibi", "alibi_left"])
def test_what_is_added_goes_round_in_zigzag(kind):
    report = verify_model(
        Model(("causal", kind), 8, 4), inputs_of(kind, 16), "cp=2", strategy="ring", pin={"input_ids": "cp:Z(1)"}
    )
    assert report.match and max(report.errors.values()) <= EXACT, report
    assert {one.scheme for one in report.plan.attentions} == {"ring over cp in zigzag"}


def test_ranks_that_keep_other_values_for_the_weights_part():
    """A rank with fewer rows pads what it keeps between the two parts of a backward, so that it keeps more."""
    assert checked("t5", "mha", ("cp=3", "ring"), "plain", 23, "pp") <= EXACT
