"""Collectives beside compute: the same bytes, the same gradients, at most one gather and one reduction on their way
beside a product."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar._torch import c10d
from autopar.compiler import RANK, Local, lower
from autopar.hardware.profile import load
from autopar.ir.graph import bytes_of
from autopar.models import build
from autopar.passes.distribute.heavy_ops import is_product
from autopar.passes.distribute.overlap import REDUCTIONS, wait_of
from autopar.passes.distribute.partition import phase_of
from autopar.simulate import step
from autopar.simulate.oracle import global_values
from tests.helpers import gloo, kept
from tests.helpers.allocations import training_step

GPT = "gpt:hidden=32,layers=2,heads=2,vocab=64,seq=16"
LLAMA = "llama:hidden=32,layers=2,heads=4,kv_heads=2,ffn=48,vocab=60"
CASES = [
    (GPT, "dp=2", "ddp", {}), (GPT, "dp=2,tp=2", "fsdp", {}), (LLAMA, "dp=2,tp=2", "megatron_sp", {}),
    (LLAMA, "dp=2", "zero1", {"precision": "bf16"}), (LLAMA, "dp=2", "fsdp", {"recompute": "full"}),
    (LLAMA, "dp=3,tp=2", None, {"memory": "450KiB"}), ("resnet-tiny", "dp=2", "fsdp", {}),
]  # fmt: skip
BUCKET_BYTES = 8192.0


def planned(model: str, mesh: str, strategy: str | None, **options):
    module, inputs = build(model, batch=12, seq=16, device="cpu")
    plan, captured = step.plan_and_capture(
        module, mesh, inputs, hardware="cpu-gloo", strategy=strategy, baselines=False, cache=kept.captures(), **options
    )
    return module, inputs, replace(plan, bucket_bytes=BUCKET_BYTES), captured


def on_their_way(graph, is_kind) -> int:
    """The most collectives of a kind that are started and not yet waited for, without those that are waited for at
    once; several that start with no product between them count as one."""
    most, open_, products = 0, {}, 0
    for node in graph.nodes:
        products += is_product(node)
        if node.meta.get("collective") and is_kind(node) and node.next is not wait_of(node):
            open_[node] = products
        elif node.target is c10d.wait_tensor.default:
            open_.pop(node.args[0], None)
        most = max(most, len({*open_.values()}))
    return most


def sent(program) -> Counter:
    """Return the bytes of a program by kind of collective and axes."""
    found = Counter()
    for node in program.local.graph.nodes:
        if one := node.meta.get("collective"):
            found[one.kind, one.axes, one.phase] += one.wire_bytes
    return found


def distances(graph, is_kind=lambda node: True) -> list[int]:
    """Return, by collective of a kind, the ops between its start and its wait."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    return [place[wait_of(n)] - place[n] - 1 for n in graph.nodes if n.meta.get("collective") and is_kind(n)]


def is_gather(node) -> bool:
    return node.target is c10d.all_gather_into_tensor.default


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("model", "mesh", "strategy", "options"), CASES)
def test_the_same_collectives_and_gradients(model, mesh, strategy, options):
    module, inputs, plan, captured = planned(model, mesh, strategy, **options)
    behind = replace(plan, overlaps=True)
    programs = [[lower(captured, p, rank, check=True) for rank in range(plan.mesh.devices)] for p in (plan, behind)]
    for before, after in zip(*programs):
        assert sent(before) == pytest.approx(sent(after))
        assert not any(distances(before.local.graph, is_gather)) and sum(distances(before.local.graph)) > 0
        assert sum(d > 0 for d in distances(after.local.graph)) >= 2
        for part in (after.parts.forward, after.parts.backward):
            assert on_their_way(part.graph, is_gather) <= 1
            assert on_their_way(part.graph, lambda n: n.target in REDUCTIONS) <= 1
    texts = [[(group, what) for group, what, _ in p.collectives()] for p in programs[1]]
    assert all(text == texts[0] for text in texts)
    values = global_values(captured, module, inputs)
    wanted, got = (step.simulate_step(captured, p, values).gradients for p in (plan, behind))
    for name, gradient in wanted.items():
        assert torch.equal(got[name], gradient), name


def test_a_gather_travels_while_the_bucket_before_it_is_computed_with():
    _, _, plan, captured = planned(GPT, "dp=2", "fsdp")
    graph = lower(captured, replace(plan, overlaps=True), 0).local.graph
    gathers = [n for n in graph.nodes if is_gather(n) and phase_of(n) == "forward"]
    place = {node: i for i, node in enumerate(graph.nodes)}
    assert len(gathers) >= 4
    for before, start in zip(gathers, gathers[1:]):
        between = list(graph.nodes)[place[wait_of(before)] + 1 : place[start]]
        assert sum(bytes_of(n.meta["val"]) for n in between if "mm" in n.name or "linear" in n.name) == 0
    assert sum(distances(graph)) > len(list(graph.nodes)) / 4


def test_gathers_ahead_only_where_something_is_gained():
    """Two processes of a CPU share the cores with what carries their bytes; GPUs have streams."""
    module, inputs = build(GPT, batch=4, seq=16, device="meta")
    for hardware, gains in (("cpu-gloo", False), ("h100", True)):
        plan, _ = step.plan_and_capture(module, "dp=2", inputs, hardware=hardware, strategy="fsdp", baselines=False)
        assert plan.overlaps == gains == (load(hardware).overlap_gain > 0)
        assert RANK[-1].name == "overlap" and RANK[-1].options(Local(plan, 0)) == (gains,)


def steps(rank: int, folder: str) -> list[tuple[float, list[torch.Tensor], int]]:
    """Loss, local gradients and most live bytes of a step, waiting at once and later."""
    found = []
    for name in ("at_once", "later"):
        torch.manual_seed(0)
        model, inputs = build(GPT, batch=12, seq=16, device="cpu")
        device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        module = autopar.compile(model, device_mesh, inputs, plan=f"{folder}/{name}.json")
        loss = module(**inputs).loss
        loss.backward()
        gradients = [p.grad.to_local().clone() for p in module.parameters()]
        module.zero_grad()
        seen = training_step(module, inputs, torch.optim.AdamW(module.parameters()))
        found.append((float(loss), gradients, seen.peak_bytes))
    return found


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("strategy", ["fsdp"])
def test_on_processes(strategy, tmp_path):
    """The same numbers; a bucket more of memory, with the part that was sent."""
    _, _, plan, _ = planned(GPT, "dp=2", strategy)
    plan.save(tmp_path / "at_once.json")
    replace(plan, overlaps=True).save(tmp_path / "later.json")
    for (loss, gradients, bytes_), (late_loss, late_gradients, late_bytes) in gloo.run(2, steps, str(tmp_path)):
        assert loss == late_loss and all(map(torch.equal, gradients, late_gradients))
        assert late_bytes <= 1.05 * (bytes_ + 1.5 * BUCKET_BYTES)
