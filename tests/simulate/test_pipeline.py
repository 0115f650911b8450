"""A pipeline on all its ranks gives what one device gives: models x meshes x schedules x strategies, each pair of
values once.

benchmarks/pipeline_matrix.py has the whole product."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar import FakeQuant, LoRA
from autopar.adapt import order
from autopar.compiler import lower_pipeline, stages_of
from autopar.errors import MicroBatchError, StageError, VerifyError
from autopar.hardware.profile import load
from autopar.ir.graph import bytes_of
from autopar.ir.mesh import Mesh
from autopar.passes.pipeline.micro_batch import micro_batch
from autopar.planner.pipeline.plan import plan_pipeline
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.schedule import KINDS, Action, play
from autopar.simulate.pipeline import Lowered, _Simulation, simulate_pipeline
from tests.helpers import staged
from tests.helpers.bubble_formulas import in_flight
from tests.planner.planning import captured
from tests.runtime import tiny

ONE_STAGE = ("naive", "gpipe", "1f1b", "zb_h1", "zb_h2")


def check(case: staged.Case, micro_batches: int, note: str, tolerance: float = staged.EXACT, **planning):
    micro = micro_batch(case.captured, micro_batches)
    step = simulate_pipeline(case.captured, staged.plan_of(micro, **planning), case.values, check=False)
    case.check(step, f"{note} {planning}", tolerance)
    return step


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name, micro_batches, mesh, schedule, strategy", [
    ("gpt2", 4, "pp=2", "1f1b", "auto"),
    ("gpt2", 2, "pp=2,dp=2,tp=2", "zb_h1", "megatron_sp"),
    pytest.param("gpt2", 4, "pp=4", "zb_h2", "auto", marks=pytest.mark.slow),
    ("llama", 4, "pp=4", "zbv", "auto"),
    pytest.param("llama", 2, "pp=2,dp=2", "interleaved_1f1b", "fsdp", marks=pytest.mark.slow),
    ("llama", 4, "pp=2,tp=2", "interleaved_zero_bubble", "megatron_sp"),
    ("t5", 4, "pp=2,tp=2", "gpipe", "auto"),
    pytest.param("t5", 2, "pp=2,dp=2", "zb_h1", "zero2", marks=pytest.mark.slow),
    pytest.param("vit", 2, "pp=2,dp=2", "zb_h2", "ddp", marks=pytest.mark.slow),
    ("vit", 4, "pp=4,tp=2", "dualpipev", "megatron"),
    pytest.param("bert", 2, "pp=2,dp=2,tp=2", "naive", "hsdp", marks=pytest.mark.slow),
    ("bert", 2, "pp=2,dp=2,tp=2", "interleaved_1f1b", "zero1"),
    ("llama", 2, "pp=2,dp=2,tp=2", "zbv", "megatron_sp+zero1"),
    ("bert", 4, "pp=2", "v_min", "auto"),
    ("mixtral", 2, "pp=2,dp=2", "1f1b", "fsdp"),
    ("mixtral", 4, "pp=2,ep=2", "zbv", "auto"),
    ("resnet", 1, "pp=2,dp=2", "zbv", "ddp"),
])  # fmt: skip
def test_against_one_device(name, micro_batches, mesh, schedule, strategy):
    check(staged.family(name), micro_batches, name, mesh=mesh, schedule=schedule, strategy=strategy)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(6))
def test_random_cuts(seed):
    """On a mesh with every kind of axis, wherever stages begin."""
    name, schedule = (("gpt2", "zb_h1"), ("t5", "1f1b"), ("vit", "zbv"))[seed % 3]
    case = staged.family(name)
    cuts = staged.random_cuts(micro_batch(case.captured, 2).captured, 4 if schedule == "zbv" else 2, seed)
    mesh, strategy = ("pp=2,tp=2", "megatron_sp") if seed < 3 else ("pp=2,dp=2", "fsdp")
    check(case, 2, f"{name}, seed {seed}", mesh=mesh, schedule=schedule, strategy=strategy, cuts=cuts)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "recompute, schedule", [("full", "1f1b"), ("full", "zb_h1"), ("selective", "zb_h1"), ("selective", "1f1b")]
)
def test_recomputation_inside_of_stages(recompute, schedule):
    planning = dict(mesh="pp=2,tp=2", strategy="megatron", recompute=recompute)
    check(staged.family("gpt2"), 2, recompute, schedule=schedule, **planning)


@pytest.mark.slow
def test_dropout():
    model, inputs = tiny.gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, n_layer=1)
    case = staged.Case.of(model.train(), inputs)
    check(case, 2, "dropout", mesh="pp=2,dp=2", schedule="zb_h1", strategy="fsdp")
    check(case, 4, "dropout", mesh="pp=2", schedule="interleaved_1f1b")
    check(case, 2, "dropout", mesh="pp=2,tp=2", schedule="1f1b", strategy="megatron_sp", recompute="full")


def adapted(adaptation) -> staged.Case:
    model, inputs = tiny.llama(num_hidden_layers=1)
    order.attach(model, [adaptation], "cpu", seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return staged.Case.of(model, staged.ragged(inputs), adapt=[adaptation])


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("adaptation", [
    LoRA(target_modules="all-linear", r=2), FakeQuant("int4", group_size=8),
    pytest.param(FakeQuant("int8"), marks=pytest.mark.slow),
])  # fmt: skip
def test_adapters(adaptation):
    """Trained low-rank factors on a frozen model, and weights on a grid."""
    case = adapted(adaptation)
    check(case, 4, str(adaptation), mesh="pp=2", schedule="zb_h1")
    check(case, 2, str(adaptation), mesh="pp=2,dp=2", schedule="1f1b", strategy="fsdp")


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule, mesh, strategy", [("zbv", "pp=2,tp=2", "megatron_sp"), ("1f1b", "pp=2,dp=2", "fsdp")]
)
def test_bf16_with_fp32_masters(schedule, mesh, strategy):
    """One device in bf16 is as near as its rounding, and the same graph in fp32 shows that this is all."""
    model, inputs = tiny.gpt2(n_layer=1)
    case = staged.Case.of(model, staged.ragged(inputs), wide=False, precision="bf16")
    micro = micro_batch(case.captured, 2)
    planning = dict(mesh=mesh, schedule=schedule, strategy=strategy, precision="bf16")
    plan = staged.plan_of(micro, **planning)
    step = simulate_pipeline(case.captured, plan, case.values)
    assert all(gradient.dtype == torch.float32 for gradient in step.gradients.values())
    errors = case.errors(step, share=1e-2)
    assert max(errors.values()) <= 3e-2, errors
    wide = staged.Case.of(model, staged.ragged(inputs), narrow=torch.bfloat16, precision="bf16")
    wide.check(simulate_pipeline(wide.captured, plan, wide.values), "in fp32", 1e-5)


class Shifted(nn.Module):
    """With micro-batches of one sample, the gradients of both shifts are the tensor that passes between stages."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.shift, self.another = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.randn(1, 4))

    def forward(self, x, target):
        return nn.functional.mse_loss(self.last((self.first(x) + self.shift + self.another).tanh()), target)


@pytest.mark.parametrize("begins", ["add", "add_1", "tanh"])
def test_a_gradient_that_is_passed_on_is_not_added_to(begins):
    """It is the second stage's and what that one returns, or the first one's and what arrives there, or both."""
    torch.manual_seed(0)
    case = staged.Case.of(Shifted(), (torch.randn(6, 4), torch.randn(6, 1)))
    ops = staged.forward_ops(micro_batch(case.captured, 6).captured)
    assert begins in ops, ops
    cuts = (begins,)
    for schedule in ("1f1b", "zb_h1", "gpipe"):
        check(case, 6, f"stage 1 begins at {begins}", mesh="pp=2", schedule=schedule, cuts=cuts)


# what passes, and what is kept
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [pytest.param("gpipe", marks=pytest.mark.slow), "zbv"])
def test_sends_are_those_of_the_cut(schedule):
    """Each value that crosses a cut is sent once for every micro-batch, and so is each gradient that comes back."""
    case = staged.own("gpt:layers=2,hidden=8,heads=2,vocab=16,seq=8,tied=false")
    micro = micro_batch(case.captured, 4)
    plan = staged.plan_of(micro, "pp=2", schedule)
    step = simulate_pipeline(case.captured, plan, case.values, check=False)
    stages = stages_of(case.captured, plan)[1]
    wanted = {(s.index, "forward"): 4 * len(s.sent) for s in stages if s.sent}
    wanted |= {(s.index, "backward"): 4 * len(s.returned) for s in stages if s.returned}
    assert dict(step.sends) == wanted


@pytest.mark.slow
def test_blocks_send_two_values_a_cut_and_micro_batch():
    """The hidden state and its gradient, where stages begin with blocks."""
    case = staged.own("gpt:layers=4,hidden=8,heads=2,vocab=16,seq=8,tied=false")
    for count in (1, 4):
        captured = micro_batch(case.captured, count).captured
        modules = {n.name: n.meta["module"] for n in captured.graph.nodes}
        blocks = sorted(
            {".".join(m.split(".")[:2]) for m in modules.values() if m.count(".") and m.split(".")[1].isdigit()}
        )
        cuts = tuple(
            next(op for op in staged.forward_ops(captured) if modules[op].startswith(block)) for block in blocks[1:]
        )
        assert len(cuts) == 3, blocks
        step = check(case, count, "blocks", mesh="pp=4", schedule="1f1b", cuts=cuts)
        assert set(step.sends.values()) == {count} and sum(step.sends.values()) == 2 * 3 * count


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", KINDS)
def test_in_flight_is_what_the_schedule_says(schedule):
    case = staged.own("mlp:layers=4,hidden=4", batch=8)
    plan = staged.plan_of(micro_batch(case.captured, 8), "pp=2", schedule)
    step = simulate_pipeline(case.captured, plan, case.values)
    case.check(step, schedule)
    played = play(plan.pipeline.orders)
    assert list(step.in_flight) == [played.peak_of_stage(s) for s in range(len(step.in_flight))]
    if schedule in ONE_STAGE:
        limits = [in_flight(schedule, 2, 8, rank) for rank in range(2)]
        assert all(most <= limit for most, limit in zip(step.in_flight, limits)) and step.in_flight[0] == limits[0]


def test_gradients_are_reduced_once_a_step():
    """However many micro-batches: an all-reduce of all gradients of a stage over 2 sends their bytes."""
    case = staged.own("llama:layers=1,hidden=16,heads=2,vocab=32", wide=False)
    for count in (1, 2):
        micro = micro_batch(case.captured, count)
        plan = staged.plan_of(micro, "pp=2,dp=2", "1f1b", strategy="ddp")
        step = simulate_pipeline(case.captured, plan, case.values, check=False)
        for stage, sent in zip(stages_of(case.captured, plan)[1], step.bytes_sent):
            mine = sum(bytes_of(case.wanted.gradients[name]) for name in stage.parameters)
            assert all(mine <= bytes_ <= mine + 256 for bytes_ in sent), (
                count,
                stage.index,
                mine,
                sent,
            )  # and the loss


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_parameters_that_are_kept_are_gathered_once_a_step(strategy):
    """However many micro-batches there are, ZeRO-1 gathers as often and holds as much; ZeRO-3 gathers in each of them.
    Both emit what they plan."""
    graph = captured("gpt:layers=2,hidden=32,heads=2,vocab=32,tied=false")
    options, gathers, kept_bytes = PlanOptions(load("cpu-gloo"), strategy=strategy), [], []
    for count in (2, 4):
        plan = plan_pipeline(graph, Mesh.parse("pp=2,dp=2"), options, schedule="1f1b", micro_batches=count).plan
        calls: Counter = Counter()
        for programs in Lowered.of(graph, replace(plan, bucket_bytes=0.0), check=False).stages:
            for _, what, _ in programs[
                0
            ].collectives():  # "stage 0 forward all_gather_into_tensor float32 over dp: ..."
                _, _, phase, kind, *_ = what.split()
                calls[phase] += kind == "all_gather_into_tensor"
        emitted = calls["copies"] + count * (calls["forward"] + calls["backward"])
        assert emitted == sum(c.count for c in plan.collectives if c.kind == "all_gather")
        gathers.append((calls["copies"], emitted))
        kept_bytes.append(plan.memory.get("gathered parameters kept", 0.0))
    (once, emitted), (again, more) = gathers
    if strategy == "zero1":
        assert once == emitted == again == more > 0
        assert kept_bytes[0] == pytest.approx(kept_bytes[1], rel=0.1) and kept_bytes[0] > 0  # two plans
    else:
        assert once == again == 0 and more == 2 * emitted and kept_bytes == [0.0, 0.0]


def test_all_ranks_of_a_stage_call_the_same():
    case = staged.family("gpt2")
    plan = staged.plan_of(micro_batch(case.captured, 2), "pp=2,dp=2,tp=2", "1f1b", strategy="megatron_sp")
    by_stage: dict[tuple[int, ...], list] = {}
    for rank in range(4):  # of the mesh inside of a stage
        program = lower_pipeline(case.captured, replace(plan), rank)
        by_stage.setdefault(tuple(program.stages), []).append([c[:2] for c in program.collectives()])
    for calls in by_stage.values():
        assert calls[0] and all(c == calls[0] for c in calls)


# refusals
# --------------------------------------------------------------------------------------------------------------


def test_what_is_not_received_is_an_error():
    case = staged.family("vit")
    plan = staged.plan_of(micro_batch(case.captured, 2), "pp=2", "1f1b")
    simulation = _Simulation(Lowered.of(case.captured, plan), plan, case.values)
    with pytest.raises(VerifyError, match="stage 1 waits for .* of micro-batch 0, which nobody sent"):
        simulation.links.receive(Action("F", 1, 0))
    simulation.links.passing[Action("F", 0, 0)] = {"nothing": []}
    with pytest.raises(VerifyError, match="sent and never received: nothing"):
        simulation.step()


def test_wrong_cuts_and_numbers():
    case = staged.family("vit")
    plan = staged.plan_of(micro_batch(case.captured, 2), "pp=2", "1f1b")
    with pytest.raises(StageError, match="3 stages do not fill 2 ranks with 1 each"):
        replace(plan.pipeline, cuts=("a", "b"))
    with pytest.raises(StageError, match="stages cannot begin at nowhere"):
        simulate_pipeline(case.captured, replace(plan, pipeline=replace(plan.pipeline, cuts=("nowhere",))), case.values)
    with pytest.raises(MicroBatchError, match="4 samples cannot be cut into 5"):
        simulate_pipeline(case.captured, replace(plan, pipeline=replace(plan.pipeline, micro_batches=5)), case.values)
