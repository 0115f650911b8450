"""Trace loops over experts, which pick the tokens of one expert after the other, in the order of the tokens.

How many tokens an expert gets is a value, and a trace cannot follow it. Some families of transformers have such a loop
as their only implementation. What each of them computes is written here with the matrices of each token's expert, which
become `autopar::grouped_mm` (passes/canonicalize/experts.py). A loop is known by its text: another version of it, and
experts that somebody has changed, are traced as they are, and refused.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Forward = Callable[..., object]


@contextmanager
def in_order(model: nn.Module) -> Iterator[None]:
    """Inside, known loops over experts in `model` take tokens in their order; none of a family where one is not
    known."""
    loops = [module for module in model.modules() if type(module).__name__ in {name for name, _ in KNOWN}]
    changed = {type(loop).__module__ for loop in loops if not _is_known(loop)}
    before = {type(loop): type(loop).forward for loop in loops if type(loop).__module__ not in changed}
    try:
        for cls, forward in before.items():
            cls.forward = KNOWN[cls.__name__, _text_of(forward)]
        yield
    finally:
        for cls, forward in before.items():
            cls.forward = forward


def _dbrx(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Stacked experts (experts * width, hidden): gate, up and down."""
    active, group = top_k_index.shape[-1], top_k_index.reshape(-1)
    w1, v1, w2 = (w.view(self.num_experts, self.ffn_hidden_size, -1) for w in (self.mlp.w1, self.mlp.v1, self.mlp.w2))
    rows = hidden_states.reshape(-1, self.hidden_size).repeat_interleave(active, dim=0)
    rows = self.mlp.activation_fn(_linear(rows, w1, group)) * _linear(rows, v1, group)
    rows = torch.bmm(rows.unsqueeze(1), w2[group]).squeeze(1) * top_k_weights.reshape(-1, 1)
    return rows.view(-1, active, self.hidden_size).sum(1).view(len(hidden_states), -1, self.hidden_size)


def _jetmoe_gating(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows in the order of tokens instead of that of experts, and in the place of the experts' sizes their numbers."""
    logits = self.layer(hidden_states).float()
    chosen, which = logits.topk(self.top_k, dim=1)
    gates = torch.softmax(chosen, dim=1).type_as(hidden_states).flatten()
    row = torch.arange(gates.shape[0], device=gates.device)
    return row, row.div(self.top_k, rounding_mode="trunc"), gates, which.flatten(), logits


def _jetmoe_linear(self, inputs: Tensor, expert_size: Tensor) -> Tensor:
    return _linear(inputs, self.weight, expert_size)


def _switch(self, hidden_states: Tensor, selected_experts: Tensor, routing_weights: Tensor) -> Tensor:
    """One expert a token, none for those beyond its capacity."""
    chosen, experts = selected_experts.squeeze(1), list(self.values())
    group, is_kept = chosen.argmax(-1), chosen.sum(-1, keepdim=True)
    wi, wo = (torch.stack([getattr(expert, name).weight for expert in experts]) for name in ("wi", "wo"))
    rows = experts[0].dropout(experts[0].act(_linear(hidden_states, wi, group)))
    rows = _linear(rows.to(wo.dtype), wo, group) * routing_weights
    return (rows * is_kept).to(hidden_states.dtype)


def _nllb(self, hidden_states: Tensor, router_mask: Tensor, router_probs: Tensor) -> Tensor:
    """Takes the mask's zeros and ones for the numbers of experts, as the loop does: the first two are dense."""
    result = torch.zeros_like(hidden_states)
    for number in range(min(2, self.num_experts)):
        weight = (router_probs * (router_mask == number)).sum(1, keepdim=True)
        rows = self[f"expert_{number}"](hidden_states) * weight
        if self.moe_token_dropout > 0:
            rows = self.token_dropout(rows) if self.training else rows * (1 - self.moe_token_dropout)
        result = result + rows.to(hidden_states.dtype)
    return result


def _linear(rows: Tensor, weight: Tensor, group: Tensor) -> Tensor:
    """Return each row (r, k) times the matrix (n, k) of its group."""
    return torch.bmm(weight[group], rows.unsqueeze(2)).squeeze(2)


def _text_of(forward: Forward) -> str:
    """Return what tells the text of a function from others, "" for one that has none."""
    try:
        return hashlib.sha256(inspect.getsource(forward).encode()).hexdigest()[:16]
    except (OSError, TypeError):
        return ""


# by class and text of its forward
KNOWN: dict[tuple[str, str], Forward] = {
    ("DbrxExperts", "acae1549e65ba7b2"): _dbrx,
    ("JetMoeTopKGating", "a83a4201867ddc15"): _jetmoe_gating,
    ("JetMoeParallelExperts", "8b3dc71286eb7c1a"): _jetmoe_linear,
    ("SwitchTransformersExperts", "da2e70afb1285346"): _switch,
    ("NllbMoeExperts", "88971f39ff5776b8"): _nllb,
}
# what a loop calls, where its text is not called here
PARTS = {
    ("DbrxExpertGLU", "d4dac21b0aac7bb3"), ("SwitchTransformersDenseActDense", "12eedb9af398a60a"),
}  # fmt: skip
CALLED = {"DbrxExperts", "SwitchTransformersExperts"}


def _is_known(module: nn.Module) -> bool:
    """Return whether a module is one of these loops, over experts as they were written."""
    name = type(module).__name__
    parts = list(module.children()) if name in CALLED else []
    return (name, _text_of(type(module).forward)) in KNOWN and all(
        _is_plain(part) and (type(part).__name__, _text_of(type(part).forward)) in PARTS for part in parts
    )


def _is_plain(part: nn.Module) -> bool:
    """Return whether an expert and its layers are called as they are: no hooks, adapters or forward of their own."""
    layers = list(part.modules())
    hooked = any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in layers)
    return not hooked and all(type(getattr(part, name, nn.Linear(1, 1))) is nn.Linear for name in ("wi", "wo"))
