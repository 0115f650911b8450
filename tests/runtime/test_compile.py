"""compile over real gloo processes: gradients, inputs and errors, several checks a spawn."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.helpers import gloo
from tests.runtime import tiny

pytestmark = pytest.mark.gloo


def device_mesh(text: str):
    from torch.distributed.device_mesh import init_device_mesh

    from autopar import Mesh

    mesh = Mesh.parse(text)
    return init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradient_error(model, reference) -> float:
    """Worst relative error over all parameters; gradients that are zero but for rounding count against the largest."""
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    floor = 1e-4 * max(float(g.norm()) for g in wanted.values())
    got = dict(model.named_parameters())
    assert set(got) == set(dict(reference.named_parameters()))
    return max(float((full(got[n].grad) - g).norm() / g.norm().clamp_min(floor)) for n, g in wanted.items())


def uneven(rank: int, strategies: tuple[str, ...]) -> None:
    """Hidden 31 over 3, vocabulary 50 over 3: shards differ in size."""
    import autopar

    for strategy in strategies:
        model, batch = tiny.own("gpt:hidden=31,layers=1,heads=1,vocab=50,seq=12", batch=6)
        reference = copy.deepcopy(model)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        model = autopar.compile(model, device_mesh("tp=3"), example_inputs=batch, strategy=strategy)
        for name, parameter in model.named_parameters():
            assert torch.equal(full(parameter).detach(), before[name]), name
        model(**batch).loss.backward()
        reference(**batch).loss.backward()
        assert gradient_error(model, reference) < 1e-5, strategy


@pytest.mark.slow
@pytest.mark.parametrize("strategies", [("megatron_sp",), pytest.param(("fsdp", "zero2"), marks=pytest.mark.slow)])
def test_uneven_shards(strategies):
    gloo.run(3, uneven, strategies)


def inputs_and_errors(rank: int) -> None:
    import autopar
    from autopar.errors import CaptureError, InputError, MovedParameterError, UnsupportedOpError

    mesh = device_mesh("dp=2")

    # a fused weight sharded inside its three parts
    model, batch = tiny.gpt2(n_layer=1)
    reference = copy.deepcopy(model)
    pin = {"*.c_attn.weight": "dp:S(1/3)"}
    model = autopar.compile(model, mesh, example_inputs=batch, pin=pin)
    model(**batch).loss.backward()
    reference(**batch).loss.backward()
    assert gradient_error(model, reference) < 1e-5
    assert "S(1/3)" in model.plan.layouts["transformer.h.0.attn.c_attn.weight"]
    assert model.config.n_layer == 1

    # local inputs: each rank passes its half
    model, batch = tiny.llama(num_hidden_layers=1)
    reference = copy.deepcopy(model)
    mine = {k: v[2 * rank : 2 * rank + 2] for k, v in batch.items()}
    model = autopar.compile(model, mesh, example_inputs=mine, inputs="local", strategy="ddp")
    model(**mine).loss.backward()
    reference(**batch).loss.backward()
    assert gradient_error(model, reference) < 1e-5

    # labels that are the same tensor as the ids are still an input of their own
    other = {"input_ids": batch["input_ids"], "labels": batch["labels"].flip(0)}
    model = autopar.compile(copy.deepcopy(reference), mesh, example_inputs=batch, strategy="fsdp")
    assert abs(float(model(**other).loss) - float(reference(**other).loss)) < 1e-5

    # no loss in the model: outputs are DTensors, the loss outside
    module = tiny.Regressor()
    reference = copy.deepcopy(module)
    x, y = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), torch.ones(4, 4)
    model = autopar.compile(module, mesh, example_inputs=(x,))
    torch.nn.functional.mse_loss(full(model(x)), y).backward()
    torch.nn.functional.mse_loss(reference(x), y).backward()
    assert gradient_error(model, reference) < 1e-5

    # the source is taken over
    with pytest.raises(MovedParameterError):
        module(x)

    # frozen parameters have no gradient
    module = tiny.Regressor()
    module.up.weight.requires_grad_(False)
    model = autopar.compile(module, mesh, example_inputs=(x,))
    full(model(x)).sum().backward()
    assert model.get_parameter("up.weight").grad is None and model.get_parameter("up.bias").grad is not None

    def refused(kind, call, *words):
        with pytest.raises(kind) as caught:
            call()
        for word in words:
            assert word in str(caught.value), str(caught.value)

    refused(InputError, lambda: model(torch.ones(5 + rank, 6)), "(5, 6)", "(6, 6)", "fix")
    refused(CaptureError, lambda: model(x.double()), "Double and Float")
    refused(CaptureError, lambda: model(x, x), "positional argument", "fix")
    fresh = autopar.compile(tiny.Regressor(), mesh, example_inputs=(x,))
    refused(InputError, lambda: fresh(x + rank), "rank 1", "local")
    later = autopar.compile(tiny.Regressor(), mesh)
    refused(InputError, lambda: list(later.parameters()), "example_inputs")
    later(x)
    assert len(list(later.parameters())) == 4
    shuffled = tiny.Shuffled()
    refused(UnsupportedOpError, lambda: autopar.compile(shuffled, mesh, (x,)), "randperm")


@pytest.mark.slow
def test_inputs_and_errors():
    gloo.run(2, inputs_and_errors, seconds=240)


def wrong_world(rank: int) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    import autopar
    from autopar.errors import MeshError

    half = DeviceMesh("cpu", torch.tensor([0]), mesh_dim_names=("dp",))
    with pytest.raises(MeshError):
        autopar.compile(tiny.Regressor(), half, (torch.randn(4, 6),))


def test_mesh_that_is_not_the_world():
    gloo.run(2, wrong_world)


def compiled_after_a_step(rank: int) -> None:
    """torch.compile gets the graph in which nothing is written in place, though another one ran before."""
    import autopar

    for strategy in ("ddp", "fsdp"):
        model, batch = tiny.own("gpt:hidden=32,layers=1,heads=2,vocab=50,seq=12", batch=4)
        reference = copy.deepcopy(model)
        model = autopar.compile(model, device_mesh("dp=2"), example_inputs=batch, strategy=strategy)
        reference(**batch).loss.backward()
        for way in ("eager", "compiled"):
            if way == "compiled":
                model.zero_grad()
                model.compile(backend="aot_eager")
            model(**batch).loss.backward()
            assert gradient_error(model, reference) < 1e-5, (strategy, way)


@pytest.mark.slow
def test_torch_compile_after_a_step():
    gloo.run(2, compiled_after_a_step)
