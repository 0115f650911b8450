import pytest
import torch
from torch import nn
from transformers import MistralConfig, MistralForCausalLM

import autopar
from autopar import compiler
from autopar.errors import InputError
from autopar.models import build
from autopar.simulate import step as simulated
from autopar.simulate.compare import verify_model, verify_plan
from autopar.simulate.oracle import global_values
from autopar.simulate.step import plan_and_capture, simulate_step

MODELS = ["gpt2-tiny:layers=1", "llama-tiny:layers=1", "mlp-tiny:layers=1"]
AUTO = [(model, mesh, None) for model in MODELS for mesh in ("dp=4", "dp=2,tp=4")] + [
    ("gpt2-tiny:layers=2", "dp=4,tp=4", None)
]
EXPERTS = [
    ("gpt2-tiny:layers=1", "dp=2,tp=4", "megatron"),
    ("llama-tiny:layers=1", "dp=2,tp=4", "megatron_sp"),
    ("llama-tiny:layers=1", "dp=4", "fsdp"),
    ("mlp-tiny:layers=2", "dp=4,tp=4", "hsdp"),
    ("mlp-tiny:layers=2", "dp=4,tp=4", "megatron"),
    ("mlp-tiny:layers=1", "dp=8", "zero1"),
    ("gpt2-tiny:layers=1", "dp=2,tp=2", "ddp"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("model, mesh, strategy", AUTO + EXPERTS)
def test_a_step_is_that_of_the_unsharded_model(model, mesh, strategy):
    module, inputs = build(model, batch=16, seq=16, device="cpu")
    report = verify_model(module, inputs, mesh, strategy=strategy, name=model)
    assert report.match and report.diverging is None, str(report)
    assert len(report.sent_bytes) == report.plan.mesh.devices
    assert len(report.gradient_errors) == len({n.replace(".1.", ".0.") for n, _ in module.named_parameters()})
    assert str(report).endswith("\nmatch\n")


def test_results_by_name():
    module, inputs = build("mlp-tiny:layers=1", batch=4, seq=4, device="cpu")
    plan, captured = plan_and_capture(
        module, "dp=2,tp=2", inputs, strategy="megatron", hardware="cpu-gloo", baselines=False
    )
    step = simulate_step(captured, plan, global_values(captured, module, inputs))
    loss = module(**inputs).loss
    loss.backward()
    torch.testing.assert_close(step.loss, loss.detach())
    assert set(step.gradients) == {name for name, _ in module.named_parameters()}
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(step.gradients[name], parameter.grad)
    assert step.outputs[1].shape == (4, 4, 64)
    assert ("all_reduce", ("tp",)) in step.collectives and len(step.bytes_sent) == 4


class Normalised(nn.Module):
    """A buffer with a new value in every step, and no loss of its own."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros(8))

    def forward(self, x):
        y = self.linear(x)
        self.steps.add_(y.detach().sum(0))
        return y * self.steps.new_ones(8)


def test_buffers_are_compared_and_left_as_they_were():
    torch.manual_seed(0)
    module = Normalised()
    report = verify_model(module, (torch.randn(8, 8),), "dp=4", strategy="ddp")
    assert report.match and report.loss is None, str(report)
    assert set(report.buffer_errors) == {"steps"}
    assert not module.steps.any()


@pytest.mark.parametrize("mesh, strategy", [("dp=2,tp=2", "megatron_sp"), ("dp=4", None)])
@pytest.mark.slow
def test_a_window_of_attention(mesh, strategy):
    """The mask depends on no input and is a constant of the graph, one for all layers."""
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    inputs = dict(input_ids=ids, labels=ids)
    module = MistralForCausalLM(MistralConfig(
        vocab_size=64, hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, sliding_window=5,
    ))  # fmt: skip
    report = verify_model(module, inputs, mesh, strategy=strategy)
    assert report.match and module.config.sliding_window < ids.shape[1], str(report)
    constants = [n for n in compiler.trace(module, inputs).graph.nodes if n.op == "get_attr"]
    assert len({n.target for n in constants}) == 1 and constants[0].meta["val"].shape == (1, 1, 16, 16)


class Strided(nn.Module):
    """Kernels that get, or whose backward gets, what is not contiguous: (4, 3, 8) -> loss."""

    def __init__(self, kind: str):
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.linear = kind, nn.Linear(8, 8)
        self.layer = {
            "group norm": lambda: nn.GroupNorm(2, 8), "lstm": lambda: nn.LSTM(8, 5, batch_first=True),
            "gru": lambda: nn.GRU(8, 5, batch_first=True), "pool": lambda: nn.AvgPool1d(2),
            "layer norm": lambda: nn.LayerNorm(3), "batch norm": lambda: nn.BatchNorm1d(8),
            "conv": lambda: nn.Conv1d(8, 4, 3),
        }[kind]()  # fmt: skip

    def forward(self, x):
        x = self.linear(x)
        if self.kind in ("lstm", "gru"):
            return self.layer(x)[0].sum()
        y = self.layer(x.transpose(1, 2))
        return y.sum() + y.transpose(1, 2).square().mean((0, 1)).sum()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind, strategy", [
    ("group norm", "ddp"), ("group norm", None), ("lstm", "ddp"), ("gru", "ddp"), ("pool", None), ("layer norm", "ddp"),
    ("batch norm", "ddp"), ("conv", None),
])  # fmt: skip
def test_kernels_that_do_not_look_at_strides(kind, strategy):
    report = verify_model(Strided(kind), {"x": torch.randn(4, 3, 8)}, "dp=2", strategy=strategy)
    assert report.match, str(report)


class ReturnsWhatItHas(nn.Module):
    """Outputs that are parameters, views of them and views of each other; without a loss each of them has a
    gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.register_buffer("fixed", torch.ones(3))

    def forward(self, x):
        y = self.linear(x)
        return y, y.t(), self.linear.weight, self.linear.weight.t(), self.linear.bias[2:], self.fixed, x, y, y.detach()


@pytest.mark.parametrize(
    "mesh, strategy", [("dp=2", "ddp"), ("dp=3", "fsdp"), ("tp=3", "megatron"), ("dp=2,tp=2", None)]
)
def test_parameters_and_views_as_outputs(mesh, strategy):
    torch.manual_seed(0)
    report = verify_model(ReturnsWhatItHas(), {"x": torch.randn(4, 6)}, mesh, strategy=strategy)
    assert report.match and set(report.gradient_errors) == {"linear.weight", "linear.bias"}, str(report)


def test_loss_fn():
    torch.manual_seed(0)
    module, batch = nn.Linear(8, 8), dict(input=torch.randn(8, 8), target=torch.randn(8, 8))
    report = verify_model(module, batch, "dp=2,tp=2", loss_fn=lambda output, target: (output - target).pow(2).mean())
    assert report.match and report.loss > 0


def test_the_first_wrong_node_is_named(monkeypatch):
    honest = simulated.lower

    def damaged(captured, plan, rank):
        """Rank 1 takes another function in the first gelu."""
        program = honest(captured, plan, rank)
        if rank == 1:
            for graph in (program.local.graph, program.parts.forward.graph):
                node = next(n for n in graph.nodes if n.name == "gelu")
                node.target, node.kwargs = torch.ops.aten.relu.default, {}
        return program

    monkeypatch.setattr(simulated, "lower", damaged)
    module, inputs = build("mlp-tiny:layers=2", batch=4, seq=4, device="cpu")
    report = verify_model(module, inputs, "dp=2,tp=2", strategy="megatron")
    assert not report.match
    assert (report.diverging.node, report.diverging.module) == ("gelu", "blocks.0")
    assert report.diverging.error > 1e-3
    assert "first node that differs: gelu (dp:S(0) tp:S(2))" in str(report)


def test_a_mistake_smaller_than_the_rounding_is_seen_without_the_casts(monkeypatch):
    honest = simulated.lower

    def damaged(captured, plan, rank):
        """Rank 1 takes 1.01 times the first gelu: less than bf16 is off by, and nothing that rounding does."""
        program = honest(captured, plan, rank)
        if rank == 1:
            graph = program.parts.forward.graph
            node = next(n for n in graph.nodes if n.name == "gelu")
            with graph.inserting_after(node):
                scaled = graph.call_function(torch.ops.aten.mul.Tensor, (node, 1.01))
            node.replace_all_uses_with(scaled, lambda user: user is not scaled)
        return program

    module, inputs = build("mlp-tiny:layers=2", batch=4, seq=4, device="cpu")
    honest_report = verify_model(module, inputs, "dp=2,tp=2", strategy="megatron", precision="bf16")
    assert honest_report.match and "error in fp32" in str(honest_report)
    assert max(honest_report.wide.errors.values()) <= 1e-5 < min(e for e in honest_report.rounding.values() if e)
    monkeypatch.setattr(simulated, "lower", damaged)
    report = verify_model(module, inputs, "dp=2,tp=2", strategy="megatron", precision="bf16")
    assert not report.match and not report.wide.match
    assert all(error <= report.tolerance(name) for name, error in report.errors.items())
    assert "no match: in fp32, errors above 1e-05" in str(report)


class BiasBeforeNorm(nn.Module):
    """The bias has no effect: its gradient is zero but for rounding."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(self.linear(x)).pow(3).sum()


@pytest.mark.parametrize("mesh", ["dp=2", "dp=3"])
def test_rounding_is_no_mistake(mesh):
    torch.manual_seed(0)
    report = verify_model(BiasBeforeNorm(), (torch.randn(6, 8) * 1e-2,), mesh, strategy="ddp")
    assert report.match, str(report)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_wrong_capture_is_not_taken_for_rounding(precision):
    """One device and several compute the same graph, which is not that of the model."""
    module, inputs = build("mlp-tiny:layers=2", batch=4, seq=4, device="cpu")
    plan, captured = plan_and_capture(module, "dp=2,tp=2", inputs, hardware="cpu-gloo", precision=precision)
    assert verify_plan(captured, plan, module, inputs).match
    node = next(n for n in captured.graph.nodes if n.name == "gelu")
    node.target, node.kwargs = torch.ops.aten.relu.default, {}
    report = verify_plan(captured, plan, module, inputs)
    assert not report.match, str(report)
    assert report.wide is None or report.wide.match
    assert "the captured graph is not the model" in str(report)


def test_adapters_are_not_verified():
    with pytest.raises(InputError, match="verify compares a model with itself"):
        autopar.verify(nn.Linear(4, 4), "dp=2", (torch.ones(4, 4),), adapt=[autopar.LoRA(target_modules="all-linear")])
