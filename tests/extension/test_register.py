"""Rules, passes, strategies, schedules and optimizers from outside of the package: each of the files a_*.py is a user's
whole extension, of at most ten lines."""

from __future__ import annotations

import functools
import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import register_flop_formula

import autopar
from autopar import models
from autopar.cli.main import main
from autopar.cost.compute import flops_of
from autopar.cost.host import HostCost
from autopar.cost.memory import Optimizer, StateBytes
from autopar.errors import AutoparError, OptimizerError, PipelineError, RuleError, ScheduleError, StrategyError
from autopar.hardware.profile import load
from autopar.rules import rule_of
from autopar.rules.numeric_check import make_node
from autopar.rules.rule import rule
from autopar.simulate.compare import verify_model
from tests.helpers import kept

from .library import gate, gate_backward, gated

HERE = Path(__file__).parent
FILES = sorted(HERE.glob("a_*.py")) + sorted(HERE.glob("an_*.py"))


plan_of = functools.partial(kept.plan, baselines=False)


def extend(name: str) -> None:
    """Run a user's file."""
    runpy.run_path(str(HERE / f"{name}.py"))


def verified(model, inputs, mesh, **options):
    """One step on the simulator, right against eager torch. Its plan."""
    found = verify_model(model, inputs, mesh, cache=kept.captures(), **options)
    assert found.match, str(found)
    return found.plan


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_ten_lines(file):
    lines = [line for line in file.read_text().splitlines() if line.strip()]
    assert len(lines) <= 10 and "autopar." in file.read_text()
    assert not any("import" in line and "autopar." in line for line in lines), "a user needs the package's top alone"


# rules ----------------------------------------------------------------------------------------------------------------


def test_a_rule_takes_effect_in_the_next_plan():
    model, inputs = gated()
    before = plan_of(model, "dp=2,tp=2", inputs, hardware="cpu-gloo", strategy="megatron")
    assert "mine.gate.default has no sharding rule" in " ".join(before.warnings)
    extend("a_rule")
    plan = verified(model, inputs, "dp=2,tp=2", strategy="megatron")
    assert not plan.warnings and plan.compute_seconds < before.compute_seconds
    node = next(node for name, node in plan.sharding.nodes.items() if name.startswith("gate"))
    assert node.choice == ("b0", "n")


def test_linear_lets_partial_sums_through():
    extend("a_rule")
    node, _ = make_node(gate_backward._opoverload, torch.randn(4, 6).double(), torch.randn(4, 6).double())
    assert rule_of(node).linear == (frozenset({0}),)


def test_flops_of_a_users_op():
    node, _ = make_node(gate._opoverload, torch.randn(6, 8), torch.randn(8, 10))
    assert flops_of(node) == 0.0
    register_flop_formula(torch.ops.mine.gate)(lambda x, w, *, out_shape=None, **_: 2 * x[0] * x[1] * w[1])
    assert flops_of(node) == 2 * 6 * 8 * 10


@pytest.mark.parametrize(
    "op, text, options, complaint",
    [
        (gate, "m k, k n", {}, "cannot read(.|\n)*elementwise(.|\n)*m k, k n -> m n"),
        (gate, "m k, k n -> m n", {"reduction": "mean"}, "reduction 'mean'"),
        (gate, "m k -> m", {}, "1 tensors as arguments, mine::gate(.|\n)* has 2"),
        (gate, "m k, k n -> m n, m", {}, "2 tensors as results"),
        (gate, "m k, k n -> m n", {"linear": [2]}, "no argument 2 to be linear in"),
        (gate, 3, {}, "is a int(.|\n)*give text"),
        (torch.ops.aten.add, "a, a -> a", {}, "is not one op(.|\n)*aten.add.Tensor"),
        (max, "a -> a", {}, "is not one op"),
        (torch.ops.aten.mm.default, "m k, k n -> m n", {}, "a rule of aten.mm.default already(.|\n)*replace=True"),
    ],
)
def test_refused_rules(op, text, options, complaint):
    with pytest.raises(RuleError, match=complaint):
        autopar.register_rule(op, text, **options)


@pytest.mark.parametrize(
    "text, fault",
    [("m _, _ n -> m n", "argument 0 has 3 dims, in the rule 2"), ("... k, n k -> ... n", "k has sizes 32 and 128")],
)
def test_a_rule_against_the_shapes(text, fault):
    autopar.register_rule(gate, text)
    with pytest.raises(RuleError, match="contradicts mine.gate.default") as error:
        plan_of(gated()[0], "tp=2", gated()[1])
    assert fault in error.value.message and error.value.source.startswith("library.py")
    assert "_ _ _, _ _ -> _ _ _" in error.value.fix


def test_a_rule_against_the_numbers():
    autopar.register_rule(gate, "m k, k n -> m n")  # as if sums of sigmoids were sigmoids of sums
    with pytest.raises(RuleError, match="wrong in(.|\n)*x=2: x:k"):
        autopar.check_rule(gate, torch.randn(6, 8).double(), torch.randn(8, 10).double())
    autopar.register_rule(gate, "m _, _ n -> m n", replace=True)
    assert autopar.check_rule(gate, torch.randn(6, 8).double(), torch.randn(8, 10).double()) >= 6
    with pytest.raises(RuleError, match=r'no sharding rule(.|\n)*backward.default, "..., ... -> ..."\) if it is'):
        autopar.check_rule(gate_backward, torch.randn(2), torch.randn(2))


def test_a_rule_without_an_arrow():
    with pytest.raises(RuleError, match="cannot read 'm k, k n' as a rule(.|\n)*m k, k n -> m n"):
        rule("m k, k n")


# passes ---------------------------------------------------------------------------------------------------------------


def test_a_pass():
    model, inputs = models.build("mlp-tiny", batch=8, seq=1, device="cpu")
    before = plan_of(model, "dp=2", inputs)
    step = runpy.run_path(str(HERE / "a_pass.py"))["step"]
    plan = verified(model, inputs, "dp=2", strategy="ddp", passes=[step])
    assert "gelu" in before.sharding.nodes and "erf" in plan.sharding.nodes
    assert not any(name.startswith("gelu") for name in plan.sharding.nodes)
    assert plan_of(model, "dp=2", inputs).sharding == before.sharding  # without it


# strategies -----------------------------------------------------------------------------------------------------------


def test_a_strategy():
    model, inputs = models.build("mlp-tiny", batch=8, seq=1, device="cpu")
    with pytest.raises(StrategyError, match="no strategy 'mine'"):
        plan_of(model, "dp=2,tp=2", inputs, strategy="mine")
    extend("a_strategy")
    plan = verified(model, inputs, "dp=2,tp=2", strategy="mine")
    layouts = {name: layout for name, layout in plan.sharding.leaves.items() if name.startswith("p_")}
    assert plan.strategy == "mine" and all("dp" in x.sharding_axes for x in layouts.values() if len(x.dims) > 1)
    assert any("tp" in x.sharding_axes for x in layouts.values())
    assert not any("tp" in x.sharding_axes for name, x in layouts.items() if name.endswith("bias"))
    both = autopar.plan(model, "dp=2,tp=2", inputs)
    assert "mine" in {one.name for one in both.alternatives} or both.strategy == "mine"
    with pytest.raises(StrategyError, match="mine gives no role to the axis x(.|\n)*dp, tp"):
        plan_of(model, "dp=2,x=2", inputs, strategy="mine")


def test_pins_of_a_strategy_tell_equal_blocks_apart():
    model, inputs = models.build("gpt2-tiny", batch=8, seq=16, device="cpu")
    name = next(n for n, _ in model.named_parameters() if ".0." in n and n.endswith("weight") and "ln" not in n)
    other = name.replace(".0.", ".1.")
    autopar.register_strategy("pinned", autopar.Recipe(data=True, pin={name: "dp:S(0)"}, forbid={other: "dp:S(0)"}))
    leaves = verified(model, inputs, "dp=2", strategy="pinned").sharding.leaves
    found = {n: leaves["p_" + n.replace(".", "_")].text() for n in (name, other)}
    assert found[name] == "dp:S(0)" and found[other] != "dp:S(0)"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["pin", "forbid"])
@pytest.mark.parametrize("strategy, mesh", [("mine", "dp=2"), ("megatron+mine", "dp=2,tp=2"), ("mine", "pp=2,dp=2")])
def test_globs_of_a_strategy_match_something(kind, strategy, mesh):
    model, inputs = models.build("mlp-tiny", batch=8, seq=1)
    globs = {"*.up.wieght": "R"}
    autopar.register_strategy("mine", autopar.Recipe(data=True, **{kind: globs}))
    with pytest.raises(StrategyError, match=rf"'\*.up.wieght' of strategy {re.escape(strategy)} matches no") as error:
        plan_of(model, mesh, inputs, strategy=strategy)
    assert "blocks.0.up.weight" in error.value.fix
    autopar.register_strategy("mine", autopar.Recipe(data=True, optional=list(globs), **{kind: globs}), replace=True)
    assert plan_of(model, mesh, inputs, strategy=strategy).strategy == strategy


def test_pins_of_both_strategies_count():
    model, inputs = models.build("mlp-tiny", batch=8, seq=1)
    autopar.register_strategy("mine", autopar.Recipe(data=True, pin={"*.bias": "dp:S(0)"}))
    plan = plan_of(model, "dp=2,tp=2", inputs, strategy="megatron+mine")
    assert all("dp:S(0)" in layout for name, layout in plan.layouts.items() if name.endswith("bias"))


@pytest.mark.parametrize("layout, complaint", [("dp:S(2)", "names dim 2"), ("ep:S(0)", "no axis 'ep'")])
def test_a_pin_that_a_parameter_cannot_follow_is_named(layout, complaint):
    model, inputs = models.build("mlp-tiny", batch=8, seq=1)
    autopar.register_strategy("mine", autopar.Recipe(data=True, pin={"*.up.weight": layout}))
    for options, whose in (({"strategy": "mine"}, "pin of strategy mine,"), ({"pin": {"*.up.weight": layout}}, "pin")):
        with pytest.raises(
            AutoparError, match=rf"blocks.\d.up.weight cannot follow the {whose} .*{complaint}"
        ) as error:
            plan_of(model, "dp=2", inputs, **options)
        assert error.value.fix


@pytest.mark.parametrize(
    "name, recipe, complaint",
    [
        ("fsdp", dict(data=True), "a strategy fsdp already"),
        ("auto", dict(data=True), "a strategy auto already"),
        ("a+b", dict(data=True), "no name"),
        ("mine", dict(), "^cannot read data=False, tensor=None, sequence=None, roles={} and shard='none' as a recipe"),
        ("mine", dict(data=True, tensor="tensor"), "as a recipe"),
        ("mine", dict(roles={"dp": "batch"}), "as a recipe"),
    ],
)
def test_refused_strategies(name, recipe, complaint):
    with pytest.raises(StrategyError, match=complaint):
        autopar.register_strategy(name, autopar.Recipe(**recipe))


def test_the_command_line_knows_what_the_models_file_registers(tmp_path, capsys):
    file = tmp_path / "mine.py"
    model = "class M(nn.Sequential):\n    def forward(self, x):\n        return super().forward(x).square().mean()\n"
    build = model + "def build():\n    return M(nn.Linear(8, 8), nn.Linear(8, 8)), (torch.ones(8, 8),)\n"
    texts = [(HERE / f"{name}.py").read_text() for name in ("a_strategy", "an_optimizer", "a_schedule")]
    file.write_text("\n".join(["import torch\nfrom torch import nn", *texts, build]))
    start = ["plan", "--model", f"{file}:build", "--batch", "8", "--seq", "1", "--optimizer", "lion"]
    assert main([*start, "--mesh", "dp=2,tp=2", "--strategy", "mine"]) == 0
    assert "lion" in capsys.readouterr().out
    assert main([*start, "--mesh", "pp=2", "--schedule", "two-by-two", "--micro-batches", "4"]) == 0
    assert "two_by_two" in capsys.readouterr().out


# schedules ------------------------------------------------------------------------------------------------------------

TURNS = ["0F0 0F1 0B1 0B0", "1F0 1F1 1B1 1B0"]  # the last micro-batch comes back first


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)))

    def forward(self, x):
        return self.layers(x).square().mean()


def test_a_schedule_by_name():
    with pytest.raises(StrategyError, match="no pipeline schedule 'two_by_two'"):
        plan_of(Deep(), "pp=2", (torch.randn(12, 16),), schedule="two_by_two")
    extend("a_schedule")
    for mesh, m in (("pp=2,dp=2", 4), ("pp=2", 3)):
        plan = verified(Deep(), (torch.randn(12, 16),), mesh, schedule="two_by_two", micro_batches=m)
        assert plan.pipeline.schedule == "two_by_two" and plan.pipeline.orders.orders[0][0:2] == (
            (*"F", 0, 0),
            (*"F", 0, 1),
        )
        assert autopar.Plan.from_json(plan.to_json()).pipeline.orders == plan.pipeline.orders


def test_a_schedule_as_an_object():
    schedule = autopar.Schedule.parse("turns", TURNS)
    plan = verified(Deep(), (torch.randn(8, 16),), "pp=2", schedule=schedule)
    assert plan.pipeline.micro_batches == 2 and plan.pipeline.orders.orders == schedule.orders
    with pytest.raises(StrategyError, match="turns is for 2 ranks and 2 micro-batches, not 2 and 4"):
        plan_of(Deep(), "pp=2", (torch.randn(8, 16),), schedule=schedule, micro_batches=4)
    with pytest.raises(StrategyError, match="turns is for 2 ranks(.|\n)*pp=2"):
        plan_of(Deep(), 4, (torch.randn(8, 16),), schedule=schedule)
    other = autopar.Schedule.parse("turns", [order.replace("B1", "B9").replace("B0", "B1").replace("B9", "B0")
                                             for order in TURNS])  # fmt: skip
    with pytest.raises(StrategyError, match="turns already"):
        plan_of(Deep(), "pp=2", (torch.randn(8, 16),), schedule=replace(other, name="Turns"))


def test_a_schedule_with_weight_gradients_put_in():
    def orders(stages, m):
        """1F1B with input gradients."""
        p = len(stages)
        ahead = [min(m, p - 1 - rank) for rank in range(p)]
        lines = [[f"{s}F{i}" for i in range(n)] for (s,), n in zip(stages, ahead)]
        for line, (s,), n in zip(lines, stages, ahead):
            for i in range(m):
                line += [f"{s}F{i + n}"] * (i + n < m) + [f"{s}I{i}"]
        return lines

    autopar.register_schedule("own_zero_bubble", orders, in_flight=lambda p, v, m: p)
    plan = verified(Deep(), (torch.randn(8, 16),), "pp=2", schedule="own_zero_bubble", micro_batches=4)
    own, built_in = plan.pipeline.orders, replace(plan.pipeline, schedule="zb_h1").orders
    assert own.orders == built_in.orders


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "orders, complaint",
    [
        (["0F0 0B0", "1B0 1F0"], "rank 0 stands at 0B0 and waits for 1B0; rank 1 stands at 1B0 and waits for 1F0"),
        (["0F0 0B0", "1F0"], "actions missing: 1B0"),
        (["0F0 0B0 0B0", "1F0 1B0"], "actions twice: 0B0"),
        (["0F0 0B0", "1F0 1X0"], "cannot read '1X0'"),
    ],
)
@pytest.mark.parametrize("as_object", [True, False])
def test_refused_schedules(orders, complaint, as_object):
    with pytest.raises(ScheduleError, match=complaint):
        if as_object:
            schedule = autopar.Schedule.parse("mine", orders)
        else:
            schedule = "mine"
            autopar.register_schedule(schedule, lambda stages, m: orders)
        plan_of(Deep(), "pp=2", (torch.randn(4, 16),), schedule=schedule, micro_batches=1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "orders, in_flight, complaint",
    [
        (lambda stages, m: None, None, "'NoneType' object is not iterable"),
        (lambda stages, m: [3, 4], None, "'int' object is not iterable"),
        (lambda stages, m: stages[7], None, "IndexError"),
        (lambda stages, m: ["0F0 0B0"], None, "has 1 orders"),
        (lambda stages, m: [[autopar.schedule.Action("X", 0, 0)], ["1F0"]], None, "actions of no kind: 0X0"),
        (lambda stages, m: ["0F0 0B0", "1F0 1B0"], lambda p, v, m: p, "KeyError: 'B'"),
        (lambda stages, m: ["0F0 0I0", "1F0 1I0"], lambda p, v, m: None, "no limit of micro-batches in flight"),
        (lambda stages, m: ["0F0 0I0", "1F0 1I0"], lambda p, v, m: 0, "ValueError: 0 are too few"),
    ],
)
def test_functions_of_schedules_that_fail_are_named(orders, in_flight, complaint):
    autopar.register_schedule("mine", orders, in_flight=in_flight)
    with pytest.raises(ScheduleError, match="^schedule mine ") as error:
        plan_of(Deep(), "pp=2", (torch.randn(4, 16),), schedule="mine", micro_batches=1)
    assert complaint in error.value.message and error.value.fix


@pytest.mark.parametrize("options", [{"schedule": "1f1b"}, {"stages_per_rank": 2}])
def test_a_schedule_is_for_stages(options):
    with pytest.raises(PipelineError, match="an axis pp, not dp=2(.|\n)*pp=2,dp=2"):
        plan_of(Deep(), "dp=2", (torch.randn(4, 16),), **options)


def test_refused_names_of_schedules():
    for name in ("1f1b", "ZB-H1", "auto"):
        with pytest.raises(StrategyError, match="already"):
            autopar.register_schedule(name, lambda stages, m: [])
    with pytest.raises(ScheduleError, match="stages on ranks"):
        autopar.register_schedule("odd", autopar.Schedule.parse("odd", ["1F0 1B0", "0F0 0B0"]))


# optimizers -----------------------------------------------------------------------------------------------------------


def test_an_optimizer():
    model, inputs = models.build("mlp-tiny", batch=8, seq=1)
    with pytest.raises(StrategyError, match="no optimizer 'lion'"):
        plan_of(model, "dp=2", inputs, optimizer="lion")
    extend("an_optimizer")
    elements = sum(p.numel() for p in model.parameters())
    plans = {
        name: plan_of(model, "dp=2", inputs, strategy="ddp", optimizer=name)
        for name in ("none", "lion", "adam8bit", "adamw")
    }
    state = {name: plan.memory.get("optimizer", 0.0) for name, plan in plans.items()}
    assert state == {"none": 0.0, "lion": 4.0 * elements, "adam8bit": 2.03125 * elements, "adamw": 8.0 * elements}
    for name, plan in plans.items():
        assert plan.peak_bytes - plans["none"].peak_bytes == pytest.approx(state[name]), name


def test_the_step_of_an_optimizer_on_the_host():
    autopar.register_optimizer("unfused", tensors=2, sweeps=3)
    host = HostCost(load("h100").host)
    one, three = (
        host.optimizer_seconds(1e6, StateBytes.of(Optimizer.of(name), 4, 0), True) for name in ("adamw", "unfused")
    )
    assert three == pytest.approx(3 * one)


def test_an_optimizer_that_orthogonalizes():
    model, inputs = models.build("mlp-tiny", batch=8, seq=1)
    autopar.register_optimizer("own_muon", tensors=1, orthogonalizes=True)
    own, built_in = (plan_of(model, "dp=2", inputs, strategy="ddp", optimizer=n) for n in ("own_muon", "muon"))
    assert own.step_seconds == built_in.step_seconds and own.memory == built_in.memory
    with pytest.raises(StrategyError, match="own_muon orthogonalizes"):
        plan_of(model, "dp=2", inputs, optimizer="own_muon", offload="auto")


def test_refused_optimizers():
    with pytest.raises(OptimizerError, match="adamw already"):
        autopar.register_optimizer("adamw", tensors=1)
    with pytest.raises(OptimizerError, match="tensors=-1"):
        autopar.register_optimizer("less", tensors=-1)
    with pytest.raises(StrategyError, match="no optimizer 'lion'(.|\n)*adamw"):
        plan_of(*models.build("mlp-tiny", batch=8, seq=1)[:1], "dp=2", {}, optimizer="lion")
