"""A program that was kept is the one that would be lowered, or it is not taken."""

from __future__ import annotations

import json
import random

import pytest
import torch

from autopar import models
from autopar.codegen.program_data import program_data, program_of
from autopar.compiler import lower
from autopar.ir.mesh import Mesh
from autopar.simulate.step import plan_and_capture
from autopar.utils.plain_data import NotPortable

MODELS = (
    "mlp:hidden=16,layers=2", "gpt:hidden=16,layers=2,heads=4,vocab=33,seq=8",
    "resnet:depth=10,width=8,image=16,classes=5",
    "moe:hidden=16,layers=1,heads=4,kv_heads=2,ffn=24,vocab=32,seq=8,experts=4,active=2",
)  # fmt: skip
CPU = torch.device("cpu")


def lowered(model: str, mesh: str, batch: int = 4, rank: int = 0, **options):
    """Return a capture, its plan and what a rank runs of it."""
    made, inputs = models.build(model, batch=batch, seq=4)
    plan, captured = plan_and_capture(made, mesh, inputs, hardware="cpu-gloo", baselines=False, **options)
    return captured, plan, lower(captured, plan, rank)


def taken(found, captured, plan, rank: int = 0):
    return program_of(*found, captured, plan, rank, CPU)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(6))
def test_the_same_program_as_lowered(seed):
    draw = random.Random(seed)
    model, mesh = draw.choice(MODELS), draw.choice(("x=2", "x=3", "x=2,y=2"))
    batch, precision = draw.choice((3, 4, 6)), draw.choice(("fp32", "bf16"))
    rank = draw.randrange(Mesh.parse(mesh).devices)
    print(f"seed {seed}: {model} on {mesh}, batch {batch}, {precision}, rank {rank}")
    captured, plan, program = lowered(model, mesh, batch, rank, precision=precision)
    found = taken(program_data(program), captured, plan, rank)
    assert found.collectives() == program.collectives() and found.parts.saved == program.parts.saved
    for mine, other in ((found.parts.forward, program.parts.forward), (found.parts.backward, program.parts.backward)):
        assert mine.code == other.code and mine.meta == other.meta
        for one, like in zip(mine.graph.nodes, other.graph.nodes, strict=True):
            assert said_of(one) == said_of(like)
            assert one.meta.get("collective") == like.meta.get("collective")
            if one.op == "get_attr":
                assert torch.equal(getattr(mine, one.target), getattr(other, like.target))


def said_of(node) -> tuple:
    """Return what errors say of a node and what partitions read of it."""
    values = node.meta.get("val")
    values = values if isinstance(values, (tuple, list)) else (values,)
    forms = [(tuple(v.shape), v.stride(), v.dtype) if isinstance(v, torch.Tensor) else v for v in values]
    return node.name, forms, [node.meta.get(key) for key in ("module", "source", "phase", "role", "roles")]


def test_the_program_of_another_plan_is_refused():
    captured, plan, program = lowered(MODELS[0], "x=2", strategy="ddp")
    _, sharded, _ = lowered(MODELS[0], "x=2", strategy="fsdp")
    found = program_data(program)
    taken(found, captured, plan)
    with pytest.raises(NotPortable, match="another interface"):
        taken(found, captured, sharded)


def test_the_program_of_another_rank_is_refused_where_shapes_are_uneven():
    captured, plan, program = lowered(MODELS[0], "x=3", strategy="fsdp")
    with pytest.raises(NotPortable, match="another interface"):
        taken(program_data(program), captured, plan, 2)


@pytest.mark.parametrize("edit, words", [
    (lambda data: data["forward"]["nodes"].pop(0), "interface|graph"),
    (lambda data: data["saved"].reverse(), "interface"),
    (lambda data: data.update(backward=None), "interface"),
    (lambda data: data["forward"]["nodes"][-2].__setitem__(2, "aten::no_such_op.default"), "not registered"),
    (lambda data: data["forward"]["nodes"][-2].__setitem__(2, "mkldnn::_is_mkldnn_bf16_supported."), "mkldnn"),
    (lambda data: data["forward"]["nodes"][-2].__setitem__(1, "x = print(0)"), "named"),
    (lambda data: data["forward"]["nodes"][-2].__setitem__(2, ["call"]), "not registered"),
    (lambda data: data["forward"]["nodes"][-2].__setitem__(3, {"enum": ["os", "__dict__", "system"]}), "no enum"),
], ids=["leaf", "saved", "backward", "op", "namespace", "name", "function", "value"])  # fmt: skip
def test_forged_data_is_refused(edit, words):
    captured, plan, program = lowered(MODELS[0], "x=2", strategy="megatron")
    text, constants = program_data(program)
    data = json.loads(text)
    edit(data)
    with pytest.raises(NotPortable, match=words):
        taken((json.dumps(data), constants), captured, plan)
