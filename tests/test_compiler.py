"""The list of passes, and passes that a user adds to it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar import compiler
from autopar.codegen import pass_manager
from autopar.errors import AutoparError, PassError
from autopar.simulate.step import plan_and_capture, simulate_step
from tests.helpers import gloo
from tests.helpers.staged import Case

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


class Mlp(nn.Module):
    def __init__(self, activation: type[nn.Module] = nn.GELU):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 10), activation(), nn.Linear(10, 6), activation())

    def forward(self, x):
        return {"loss": self.net(x).square().mean()}


def silu_for_gelu(module: torch.fx.GraphModule) -> None:
    """Swap the activation of a forward: gradients follow from it."""
    for node in module.graph.find_nodes(op="call_function", target=aten.gelu.default):
        node.target, node.kwargs = aten.silu.default, {}


def batch() -> dict:
    return {"x": torch.randn(8, 6, generator=torch.Generator().manual_seed(1))}


SILU = autopar.Pass("silu_for_gelu", silu_for_gelu, after="canonicalize")


def test_one_list_names_every_pass_once():
    names = [step.name for step in compiler.PASSES]
    assert len(names) == len({*names}) and names[0] == "export" and "partition" in names


@pytest.mark.parametrize("mesh, strategy", [("dp=2,tp=2", None), ("dp=3", "fsdp"), ("tp=2", "megatron")])
def test_gradients_are_those_of_the_model_that_the_pass_makes(mesh, strategy):
    options = {"hardware": "cpu-gloo", "strategy": strategy, "baselines": False, "passes": [SILU]}
    plan, captured = plan_and_capture(Mlp(), mesh, batch(), **options)
    assert not captured.graph.find_nodes(op="call_function", target=aten.gelu.default)
    step = simulate_step(captured, plan, Case.of(Mlp(nn.SiLU), batch()).values)
    model = Mlp(nn.SiLU).double()
    loss = model(batch()["x"].double())["loss"]
    loss.backward()
    torch.testing.assert_close(step.loss.double(), loss.detach(), rtol=1e-6, atol=0)
    assert len(step.gradients) == 4
    for name, gradient in step.gradients.items():
        torch.testing.assert_close(gradient.double(), model.get_parameter(name).grad, rtol=1e-5, atol=1e-7)


def test_passes_run_where_they_say():
    seen = []

    def look(module, *options):
        seen.append((options, len(module.graph.nodes)))

    added = [
        autopar.Pass("late", look, after="early"),
        autopar.Pass("early", look, after="bucket", options=lambda here: (here.rank,)),
    ]
    with pytest.raises(PassError, match="'late' runs after 'early', where no graph is"):
        pass_manager.check_added(added[:1], compiler.PASSES)
    plan, captured = plan_and_capture(Mlp(), "dp=2", batch(), hardware="cpu-gloo", baselines=False, passes=added[::-1])
    order = []
    with pass_manager.observe(lambda result: order.append(result.name)):
        compiler.lower(captured, plan, 1)
    assert order[3:6] == ["bucket", "early", "late"] and [options for options, _ in seen] == [(1,), ()]


def test_added_nodes_get_what_they_lack():
    def double(module):
        output = next(n for n in module.graph.nodes if n.op == "output")
        loss = output.args[0][0]
        with module.graph.inserting_after(loss):
            twice = module.graph.call_function(aten.mul.Tensor, (loss, 2.0))
        output.replace_input_with(loss, twice)

    options = {"hardware": "cpu-gloo", "baselines": False}
    plan, captured = plan_and_capture(
        Mlp(), "dp=2", batch(), passes=[autopar.Pass("double", double, after="clean")], **options
    )
    values = Case.of(Mlp(), batch()).values
    plain = simulate_step(*plan_and_capture(Mlp(), "dp=2", batch(), **options)[::-1], values)
    assert simulate_step(captured, plan, values).loss.item() == pytest.approx(2 * plain.loss.item())


def break_graph(module):
    output = next(n for n in module.graph.nodes if n.op == "output")
    node = module.graph.call_function(aten.neg.default, (output,))  # reads what ends the graph
    output.prepend(node)


@pytest.mark.parametrize(
    "passes, words",
    [
        (SILU, "passes is Pass"),
        ([silu_for_gelu], "passes is "),
        ([autopar.Pass("clean", silu_for_gelu, after="bucket")], "cannot have the name 'clean'"),
        ([autopar.Pass(3, silu_for_gelu, after="clean")], "cannot have the name 3"),
        ([autopar.Pass("mine", silu_for_gelu)], "runs after None"),
        ([autopar.Pass("mine", silu_for_gelu, after="partition")], "where no graph is"),
        ([autopar.Pass("mine", silu_for_gelu, after="lunch")], "one of explicit_casts, grad_regions"),
        ([autopar.Pass("mine", break_graph, after="canonicalize")], "the pass 'mine' left a graph that cannot be run"),
        ([autopar.Pass("mine", break_graph, after="clean")], "the pass 'mine' left a graph that cannot be run"),
    ],
)
def test_passes_that_cannot_be(passes, words):
    with pytest.raises(PassError, match=words):
        autopar.plan(Mlp(), "dp=2", batch(), passes=passes)


def sums_rows(module):
    """Change a shape, and not what the nodes say about it."""
    for node in module.graph.find_nodes(op="call_function", target=aten.gelu.default):
        node.target, node.args, node.kwargs = aten.sum.dim_IntList, (node.args[0], [1], True), {}


@pytest.mark.parametrize("after, words", [
    ("canonicalize", "linear.* cannot be computed: RuntimeError: a dim of 1 is multiplied with one of 10"),
    ("clean", r"gelu says that it is \(8, 10\) float32, and is \(8, 1\) float32"),
    ("localize", r"gelu says that it is \(4, 10\) float32, and is \(4, 1\) float32"),
])  # fmt: skip
def test_a_pass_whose_graph_cannot_be_computed_is_named(after, words):
    added = [autopar.Pass("mine", sums_rows, after=after)]
    with pytest.raises(PassError, match="the pass 'mine' left a graph that cannot be run: " + words) as error:
        options = {"hardware": "cpu-gloo", "strategy": "ddp", "baselines": False, "passes": added}
        plan, captured = plan_and_capture(Mlp(), "dp=2", batch(), **options)
        compiler.lower(captured, plan, 0)
    assert error.value.node


def test_an_added_node_of_one_rank_needs_a_layout():
    def double(module):
        (node, *_) = module.graph.find_nodes(op="call_function", target=aten.gelu.default)
        with module.graph.inserting_after(node):
            twice = module.graph.call_function(aten.mul.Tensor, (node, 2.0))
        node.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)

    added = [autopar.Pass("mine", double, after="localize")]
    plan, captured = plan_and_capture(Mlp(), "dp=2", batch(), hardware="cpu-gloo", baselines=False, passes=added)
    with pytest.raises(PassError, match="was promised mul_tensor as .*, and that has no layout"):
        compiler.lower(captured, plan, 0)


def test_verify_says_that_a_pass_changed_the_graph():
    def relu(module):
        for node in module.graph.find_nodes(op="call_function", target=aten.gelu.default):
            node.target, node.kwargs = aten.relu.default, {}

    report = autopar.verify(Mlp(), "dp=2", batch(), passes=[autopar.Pass("relu", relu, after="canonicalize")])
    assert "no match: the captured graph, changed by relu, is not the model" in str(report)


def test_verify_says_where_a_collective_is_missing():
    def without_sums(module):
        for node in module.graph.find_nodes(op="call_function", target=c10d.all_reduce.default):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)

    added = [autopar.Pass("mine", without_sums, after="localize")]
    net = Mlp().net  # its gradients alone are reduced, and no op reads them
    report = autopar.verify(net, "dp=2", (batch()["x"],), strategy="ddp", passes=added)
    assert not report.match and "collectives behind the last ones make the difference" in str(report)


def raises(module):
    raise KeyError("lost")


@pytest.mark.parametrize(
    "step, cause",
    [
        (autopar.Pass("mine", raises, after="canonicalize"), KeyError),
        (autopar.Pass("mine", lambda module: module.graph, after="clean"), TypeError),
        (autopar.Pass("mine", lambda module: 3, after="canonicalize", takes="capture"), TypeError),
        (autopar.Pass("mine", None, after="clean"), TypeError),
        (autopar.Pass("mine", print, after="clean", options=lambda call: call.plan), AttributeError),
        (autopar.Pass("mine", print, after="clean", when=lambda: True), TypeError),
        (autopar.Pass("mine", lambda module: torch.fx.GraphModule({}, torch.fx.Graph()), after="grad_regions"),
         AutoparError),
    ],
)  # fmt: skip
def test_passes_that_fail_are_named(step, cause):
    with pytest.raises(PassError, match="the pass 'mine' (failed|left)") as error:
        autopar.plan(Mlp(), "dp=2", batch(), passes=[step])
    assert isinstance(error.value.__cause__, cause) and error.value.fix


def test_a_pass_of_one_rank_that_fails_is_named():
    late = autopar.Pass("late", lambda module: 3, after="bucket")
    plan, captured = plan_and_capture(Mlp(), "dp=2", batch(), hardware="cpu-gloo", baselines=False, passes=[late])
    with pytest.raises(PassError, match="the pass 'late' failed: TypeError: it returned a int"):
        compiler.lower(captured, plan, 0)


def _trained(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model, reference = autopar.compile(Mlp(), mesh, batch(), passes=[SILU], strategy="fsdp"), Mlp(nn.SiLU)
    for rows in (8, 5):  # a second form is captured with the same passes
        x = batch()["x"][:rows]
        for m in (model, reference):
            m.zero_grad()
            m(x=x)["loss"].backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad.full_tensor(), reference.get_parameter(name).grad)


@pytest.mark.gloo
def test_compile_runs_added_passes():
    gloo.run(2, _trained)
