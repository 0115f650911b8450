"""Every rule in the table against its op: all strategies on meshes of one and two axes, even and uneven."""

from __future__ import annotations

import pytest

from autopar.rules.table import TABLE, rule_of

from .rule_check import assert_right, make_node
from .rule_instances import INSTANCES, overload

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
