"""Buckets without copies give what packed ones give."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import fx

from autopar._torch import c10d
from autopar.codegen.buckets_in_place import buckets_in_place
from autopar.codegen.python_code import as_on_gloo
from autopar.compiler import lower
from autopar.models import build
from autopar.ops import autopar
from autopar.simulate import step

aten = torch.ops.aten
DEVICES = 2


class Alone(fx.Interpreter):
    """Runs a rank's graph as if all ranks had the same values."""

    def call_function(self, target, args, kwargs):
        if target is c10d.all_reduce_.default:
            return args[0].mul_(DEVICES)
        if target is c10d.all_reduce.default:
            return args[0] * DEVICES
        if target is c10d.wait_tensor.default:
            return args[0]
        if target is autopar.gather_by_broadcasts.default:
            return torch.cat([args[0]] * DEVICES)
        if target is autopar.gather_bucket_by_broadcasts.default:
            return [torch.cat([x] * DEVICES) for x in args[0]]
        if target is c10d.all_to_all_single.default:
            return args[0].clone()
        return super().call_function(target, args, kwargs)


def before_and_after(model: str, strategy: str, bucket_bytes: float) -> list[tuple[fx.GraphModule, fx.GraphModule]]:
    """Return a rank's forward and backward, each with packed buckets and without."""
    module, inputs = build(model, batch=4, seq=8, device="meta")
    plan, captured = step.plan_and_capture(
        module, f"dp={DEVICES}", inputs, hardware="cpu-gloo", strategy=strategy, baselines=False
    )
    parts = lower(captured, replace(plan, bucket_bytes=bucket_bytes), 0).parts
    found = []
    for part in (parts.forward, parts.backward):
        packed = as_on_gloo(part, ())
        unpacked = copy.deepcopy(packed)
        buckets_in_place(unpacked)
        unpacked.graph.lint()
        found.append((packed, unpacked))
    return found


def made_up(graph: fx.Graph) -> list[torch.Tensor]:
    torch.manual_seed(0)
    values = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
    return [torch.rand(v.shape, dtype=v.dtype) if v.is_floating_point() else torch.ones(v.shape, dtype=v.dtype)
            for v in values]  # fmt: skip


def targets(module: fx.GraphModule) -> list[object]:
    return [n.target for n in module.graph.nodes if n.op == "call_function"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bucket_bytes", [1 << 14, 1 << 20])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_same_values(strategy, bucket_bytes):
    """The model has an embedding and biases, which are copied into the bucket, and a concatenation of its own."""
    pairs = before_and_after("llama:hidden=16,layers=1,heads=2,vocab=32", strategy, bucket_bytes)
    for packed, unpacked in pairs:
        wanted, found = (Alone(m).run(*made_up(packed.graph)) for m in (packed, unpacked))
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True) if isinstance(a, torch.Tensor))
    assert sum(len(targets(m)) for _, m in pairs) < sum(len(targets(m)) for m, _ in pairs)


def test_products_write_into_the_bucket():
    (_, (packed, unpacked)) = before_and_after("mlp:hidden=16,layers=2", "ddp", 1 << 20)
    assert targets(packed).count(aten.cat.default) == 1 and aten.cat.default not in targets(unpacked)
    assert targets(unpacked).count(aten.mm.out) == targets(packed).count(aten.mm.default) == 4  # two weights a layer
    assert targets(unpacked).count(aten.copy_.default) == 4  # biases
    results = Alone(unpacked).run(*made_up(packed.graph))
    assert len({r.untyped_storage().data_ptr() for r in results}) == 1


def test_a_product_that_something_else_reads_is_copied():
    """A gradient that is an output of its own too is made apart, and copied into the bucket."""
    (_, (packed, _)) = before_and_after("mlp:hidden=16,layers=2", "ddp", 1 << 20)
    product = next(n for n in packed.graph.nodes if n.target is aten.mm.default)
    (result,) = next(iter(reversed(packed.graph.nodes))).args
    next(iter(reversed(packed.graph.nodes))).args = ((*result, product),)
    unpacked = copy.deepcopy(packed)
    buckets_in_place(unpacked)
    wanted, found = (Alone(m).run(*made_up(packed.graph)) for m in (packed, unpacked))
    assert all(map(torch.equal, wanted, found)) and targets(unpacked).count(aten.mm.out) == 3


def test_parameters_are_gathered_in_one_op():
    ((packed, unpacked), _) = before_and_after("mlp:hidden=16,layers=2", "fsdp", 1 << 20)
    assert autopar.gather_by_broadcasts.default in targets(packed)
    assert targets(unpacked).count(autopar.gather_bucket_by_broadcasts.default) == 1
    assert autopar.gather_by_broadcasts.default not in targets(unpacked)
