"""Loops over experts of transformers, traced in the order of the tokens, compute what they compute as they are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from autopar import compiler
from autopar.errors import CaptureError
from autopar.frontend.expert_loops import in_order
from autopar.frontend.export import export
from tests.families import FAMILIES

LOOPS = {name: FAMILIES[name] for name in ("dbrx", "jetmoe", "switch_transformers", "nllb-moe")}


def routed(name: str, seed: int, capacity: int | None = None) -> tuple[nn.Module, dict]:
    """A family with a router that prefers some experts, and, if said, experts that take so many tokens at most."""
    torch.manual_seed(seed)
    model, inputs = LOOPS[name](3, 7)
    for module in model.modules():
        for router in ("classifier", "layer"):
            if isinstance(linear := getattr(module, router, None), nn.Linear):
                nn.init.normal_(linear.weight, std=2.0)
        if capacity is not None and hasattr(module, "expert_capacity"):
            module.expert_capacity = capacity
    return model, inputs


def step(model: nn.Module, inputs: dict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = model(**inputs).loss
    loss.backward()
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LOOPS)
def test_loss_and_gradients(name, seed):
    print(f"seed {seed}")
    model, inputs = routed(name, seed, capacity=2 if seed else None)
    other = copy.deepcopy(model)
    torch.manual_seed(seed)
    wanted, gradients = step(model, inputs)
    torch.manual_seed(seed)
    with in_order(other):
        loss, found = step(other, inputs)
    torch.testing.assert_close(loss, wanted)
    for key, gradient in gradients.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-6)
    assert all(not found[key].any() for key in found.keys() - gradients.keys())


def test_other_texts_and_changed_experts_are_left_alone(monkeypatch):
    """A hook on one expert, or another forward, would not be called: the loop stays, and is refused."""
    model, inputs = routed("switch_transformers", 0)
    experts = next(m for m in model.modules() if type(m).__name__ == "SwitchTransformersExperts")
    loops, plain = type(experts), type(experts).forward
    with in_order(model):
        assert loops.forward is not plain
    hook = experts["expert_1"].wi.register_forward_hook(lambda module, args, output: output * 2)
    with in_order(model):
        assert loops.forward is plain
    with pytest.raises(CaptureError):
        export(model, inputs)
    hook.remove()
    monkeypatch.setattr(loops, "forward", lambda self, x, selected, weights: plain(self, x, selected, weights) * 2)
    with in_order(model):
        assert loops.forward is not plain and loops.forward.__module__ == __name__


class Router(nn.Module):
    """Moves its layer in the forward."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.layer, self.dtype = nn.Linear(4, 4), dtype

    def forward(self, x):
        self.layer = self.layer.to(self.dtype)
        return self.layer(x.to(self.dtype)).square().mean()


def test_a_layer_that_is_moved_to_its_own_type_stays():
    compiler.trace(Router(torch.float32), (torch.randn(2, 4),))


def test_a_layer_that_is_moved_to_another_type_is_refused():
    with pytest.raises(CaptureError, match=r"moves Linear.weight from torch.float32 .* to torch.float64"):
        compiler.trace(Router(torch.float64), (torch.randn(2, 4),))
