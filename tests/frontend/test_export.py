"""The captured joint graph computes what eager torch computes, in canonical ops, on whatever device the model is."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import fx, nn

from autopar import compiler
from autopar.errors import CaptureError, InputError, UnsupportedOpError
from autopar.frontend.device import move
from autopar.frontend.export import export
from autopar.ir.graph import fingerprint, output_node

from ..runtime import tiny

MODELS = {
    "hf gpt2": tiny.gpt2,
    "hf llama": tiny.llama,
    "hf bert": tiny.bert,
    "mlp": lambda: tiny.own("mlp:hidden=16"),
    "gpt": lambda: tiny.own("gpt:hidden=16,layers=2,heads=2,vocab=96,seq=16"),
    "llama": lambda: tiny.own("llama:hidden=16,layers=2,heads=4,kv_heads=2,ffn=32,vocab=96"),
}


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    """(name, model, its inputs, the captured graph)."""
    model, inputs = MODELS[request.param]()
    return request.param, model, inputs, compiler.trace(model, inputs)


def interpret(captured, model, inputs) -> dict[tuple[str, str], torch.Tensor]:
    """Outputs of the joint graph by (kind, name); the tangent of the loss is one."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    values = []
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            role = node.meta["role"]
            if role.kind == "tangent":
                values.append(torch.ones(tuple(node.meta["val"].shape)))
            else:
                values.append((inputs if role.kind == "input" else state)[role.name].detach())
    results = fx.Interpreter(captured.graph_module).run(*values)
    return {(r.kind, r.name): v for r, v in zip(output_node(captured.graph).meta["roles"], results, strict=True)}


@pytest.mark.sampled(1)
def test_values_are_those_of_eager_torch(case):
    _, model, inputs, captured = case
    results = interpret(captured, model, inputs)
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    torch.testing.assert_close(results["output", str(captured.returns.loss)], loss.detach(), rtol=1e-6, atol=1e-6)
    for name, parameter in model.named_parameters():
        found = results["gradient", name]
        torch.testing.assert_close(found, parameter.grad, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert sum(kind == "gradient" for kind, _ in results) == len(list(model.parameters()))


def test_ops_are_canonical(case):
    name, model, _, captured = case
    targets = Counter(str(n.target) for n in captured.graph.nodes if n.op == "call_function")
    replaced = {"mm", "addmm", "bmm", "scaled_dot_product_attention", "detach"}
    assert not {name.split(".")[1] for name in targets if "." in name} & replaced
    linears, attentions = {
        "hf gpt2": (9, 2), "hf llama": (15, 2), "hf bert": (14, 2), "mlp": (4, 0), "gpt": (9, 2), "llama": (15, 2),
    }[name]  # fmt: skip
    assert targets["autopar.linear.default"] == targets["autopar.linear_dw.default"] == linears
    assert targets["autopar.attention.default"] == targets["autopar.attention_bw.default"] == attentions
    for node in captured.graph.nodes:
        if str(node.target) == "autopar.attention.default":
            mask, causal = node.args[3:5]
            assert mask is None and causal == (name != "hf bert"), name


def test_leaves_and_where_they_come_from(case):
    _, model, inputs, captured = case
    roles = Counter((n.meta["role"].kind, n.meta["role"].name) for n in captured.graph.nodes if n.op == "placeholder")
    assert max(roles.values()) == 1  # a shared weight is one placeholder
    assert [name for kind, name in roles if kind == "input"] == list(inputs)
    assert {name for kind, name in roles if kind == "parameter"} == {name for name, _ in model.named_parameters()}
    ops = [n for n in captured.graph.nodes if str(n.target).startswith("autopar.")]
    assert all(".py:" in n.meta["source"] for n in ops)
    names = {name for name, _ in model.named_modules()}
    placed = [n for n in ops if n.meta["module"]]
    assert {n.meta["module"] for n in placed} <= names and len(placed) >= len(
        ops
    ) - 4  # the loss is in no module of the user's
    assert {n.meta["phase"] for n in ops} == {"forward", "backward"}


@pytest.mark.sampled(1)
def test_the_device_makes_no_difference(case):
    name, *_, captured = case
    with torch.device("meta"):
        model, inputs = MODELS[name]() if name.startswith("hf") else (None, None)
    if model is None:
        _, model, inputs, _ = case
        memo = {id(p): nn.Parameter(p.detach().to("meta")) for p in model.parameters()}
        model, inputs = copy.deepcopy(model, memo), {k: v.to("meta") for k, v in inputs.items()}
    assert fingerprint(compiler.trace(model, inputs).graph) == fingerprint(captured.graph)


def test_move(case):
    captured = copy.deepcopy(case[3])
    move(captured, torch.device("meta"))
    for node in captured.graph.nodes:
        assert node.kwargs.get("device", torch.device("meta")) == torch.device("meta")
        if isinstance(node.meta.get("val"), torch.Tensor):
            assert node.meta["val"].device.type == "meta", node


def test_a_model_is_left_as_it_was():
    model, inputs = tiny.gpt2(n_layer=1)
    before = {
        n: (id(p), p.clone()) for n, p in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    }
    compiler.trace(model, inputs)
    after = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers()])
    assert list(after) == list(before)
    assert all(id(after[n]) == i and torch.equal(after[n], value) for n, (i, value) in before.items())
    with pytest.raises(CaptureError):
        compiler.trace(model, dict(input_ids=torch.randn(2, 2)))
    assert model(**inputs).loss.requires_grad


def test_tracing_works_without_gradients():
    x, _ = tiny.Regressor.batch()
    expected = fingerprint(compiler.trace(tiny.Regressor(), (x,)).graph)
    with torch.no_grad():
        assert fingerprint(compiler.trace(tiny.Regressor(), (x,)).graph) == expected
    with torch.inference_mode():
        assert fingerprint(compiler.trace(tiny.Regressor(), (x,)).graph) == expected


def test_inference_tensors_are_saved_for_no_backward():
    """A line that saves one is refused, as in eager torch; one that saves none, or clones it, is computed."""

    class Inferring(tiny.Regressor):
        def __init__(self, use):
            super().__init__()
            self.use = use

        def forward(self, x):
            with torch.inference_mode():
                scale = x.mean().sigmoid()
            return self.use(super().forward(x), scale)

    x, _ = tiny.Regressor.batch()
    for use in (torch.add, lambda y, scale: y * scale.clone()):
        Inferring(use)(x).sum().backward()
        compiler.trace(Inferring(use), (x,))
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        Inferring(torch.mul)(x)
    with pytest.raises(CaptureError, match=r"(?s)Inference tensors cannot be saved.*source: .*self\.use\("):
        compiler.trace(Inferring(torch.mul), (x,))


# what cannot be captured
# -----------------------------------------------------------------------------------------------


class Branching(tiny.Regressor):
    def forward(self, x):
        y = super().forward(x)
        if y.sum() > 0:  # this line is named
            y = y * 2
        return y


def test_errors_name_the_line():
    x, _ = tiny.Regressor.batch()
    said = r"Branching could not be traced: (.|\n)*test_export.py:\d+: if y.sum\(\) > 0:  # this line is named"
    with pytest.raises(CaptureError, match=said):
        compiler.trace(Branching(), (x,))
    with pytest.raises(CaptureError, match=r"same reduction dim(.|\n)*tiny.py:\d+(.|\n)*args\[0\] \(8, 5\)"):
        compiler.trace(tiny.Regressor(), (x[:, :5],))
    with pytest.raises(CaptureError, match="unexpected keyword argument 'z'"):
        compiler.trace(tiny.Regressor(), dict(z=x))
    with pytest.raises(InputError, match="passes no tensor"):
        export(tiny.Regressor(), (None,))


class Inward(tiny.Regressor):
    """The loss is of a derivative that the forward itself computes."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
        return slope.square().mean()


def test_a_gradient_inside_of_the_forward_is_refused():
    with pytest.raises(CaptureError, match="takes a gradient"):
        compiler.trace(Inward(), {"x": tiny.Regressor.batch()[0]})


def test_random_ops_without_a_formula_are_refused():
    x, _ = tiny.Regressor.batch()
    with pytest.raises(
        UnsupportedOpError, match="would draw other numbers on every device: randperm(.|\n)*fix: use one of"
    ):
        compiler.trace(tiny.Shuffled(), (x,))
