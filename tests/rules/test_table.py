"""Every rule in the table against its op: all strategies on meshes of one and two axes, even and uneven."""

from __future__ import annotations

import pytest

from autopar.ir.graph import tensor_arguments, tensor_of
from autopar.rules import factor_parts
from autopar.rules.lookup import TABLE, rule_of
from autopar.rules.numeric_check import check, make_node
from autopar.rules.reading import output_indices

from .instances import overload
from .rule_check import MESHES, assert_right
from .rule_instances import INSTANCES

WIDE = ["aten.mm.default", "aten.view.default", "aten.split.Tensor", *(n for n in TABLE if n.startswith("autopar."))]


def nodes(name: str):
    return [make_node(overload(name), *args, **kwargs) for args, kwargs in INSTANCES[name]]


def test_every_entry_has_an_instance_and_every_instance_a_rule():
    assert set(TABLE) == set(INSTANCES)
    for name in TABLE:
        for node, _ in nodes(name):
            assert rule_of(node) is not None, name


@pytest.mark.parametrize("name", sorted(TABLE))
def test_rule(name):
    assert assert_right(nodes(name)) > 0


@pytest.mark.parametrize("name", WIDE)
def test_rule_on_six_devices(name):
    assert_right(nodes(name)[:4], ["x=3,y=2"])


@pytest.mark.parametrize("name", sorted(TABLE))
def test_rule_inside_parts(name):
    """Any factor that `factor_parts` lets through may be sharded inside equal parts."""
    for node, inputs in nodes(name):
        rule = rule_of(node)
        everywhere = {key: [frozenset({2, 3})] * 8 for key in map(tensor_of, [node, *tensor_arguments(node)])}
        everywhere |= {(node, i): [frozenset({2, 3})] * 8 for i in output_indices(node)}
        _, wrong = check(node, inputs, MESHES["x=2"], rule, factor_parts(node, rule, everywhere))
        assert not wrong, "\n".join(map(str, wrong))
