"""Programs as text that runs, and groups bound at load."""

import pytest
import torch
from torch import fx

from autopar._torch import c10d
from autopar.codegen.python_code import bind_groups, emit_text, group_names, reductions_beside
from autopar.errors import MeshError
from autopar.ir.mesh import Mesh
from autopar.passes.distribute.localize import localize
from autopar.passes.distribute.lower_ops import lower_ops
from autopar.passes.distribute.partition import partition

from ..passes.lowering import MLP, capture, written


@pytest.fixture
def parts():
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    joint, _ = capture(MLP(), x, x.clone())
    leaves = {"x_args_0_": "dp:S(0)", "p_up": "tp:S(0)", "p_down": "tp:S(1)"}
    nodes = {"linear": "R|tp:S(0)->tp:S(2)", "linear_1": "tp:S(2)|tp:S(1)->tp:P"}
    sharding = written(joint, Mesh.parse("dp=2,tp=2"), "R", nodes, leaves, ["R"] * 4)
    return partition(lower_ops(localize(joint, sharding, 3)))


def test_text_shows_layouts_and_collectives(parts):
    text = emit_text(parts.forward)
    print(text)
    assert text.startswith("# rank 3 of dp=2,tp=2")
    assert "    p_up,  # (6, 8) float64 <- (12, 8) tp:S(0)\n" in text
    assert "    linear = torch.ops.aten.linear.default(mul, p_up)  # (4, 6, 6) float64 <- (4, 6, 12) tp:S(2)\n" in text
    assert "  # all_reduce[tp] of linear_1, 1536 B sent\n" in text


def test_text_is_stable_and_valid_python(parts):
    assert emit_text(parts.forward) == emit_text(parts.forward)
    compile(emit_text(parts.forward) + emit_text(parts.backward, "backward"), "emitted", "exec")


def test_text_computes_what_the_graph_computes():
    """On one device, where no collective stands in the way."""
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    joint, values = capture(MLP(), x, x.clone())
    local = localize(joint, written(joint, Mesh.parse("dp=1"), "R", {}, {}, ["R"] * 4), 0)
    module = partition(lower_ops(local)).forward
    space = {"torch": torch}
    exec(emit_text(module), space)
    inputs = [values[n.name] for n in module.graph.nodes if n.op == "placeholder"]
    for a, b in zip(space["forward"](*inputs), module(*inputs), strict=True):
        assert torch.equal(a, b)


def test_groups_are_bound_at_load(parts):
    assert set(group_names(parts.forward)) == {"dp", "tp"}
    bind_groups(parts.forward, {"dp": "group 7", "tp": "group 9"})
    assert set(group_names(parts.forward)) == {"group 7", "group 9"}
    assert "'group 9'" in parts.forward.code


def test_a_group_that_is_missing(parts):
    with pytest.raises(MeshError, match="no process group is given for the axes dp"):
        bind_groups(parts.forward, {"tp": "group 9"})


def test_reductions_beside_other_work_have_groups_of_their_own():
    """A collective that is waited for at once keeps the group that gathers use."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    at_once, beside = (graph.call_function(c10d.all_reduce.default, (x, "sum", "dp")) for _ in range(2))
    beside.prepend(wait := graph.call_function(c10d.wait_tensor.default, (at_once,)))
    product = graph.call_function(torch.ops.aten.mm.default, (wait, wait))
    gather = graph.call_function(c10d.all_gather_into_tensor.default, (product, 2, "dp"))
    graph.output([graph.call_function(c10d.wait_tensor.default, (n,)) for n in (beside, gather)])
    module = fx.GraphModule({}, graph)
    assert reductions_beside(module) == [beside]
    bind_groups(module, {"dp": "first"}, {"dp": "second"})
    assert [n.args[-1] for n in (at_once, beside, gather)] == ["first", "second", "first"]
