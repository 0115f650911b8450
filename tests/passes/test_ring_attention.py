"""Ring attention as it is emitted: its messages are those of the formula, all ranks take part in the same ones, and two
blocks of keys are held, not all."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from autopar.codegen.python_code import is_collective
from autopar.codegen.verify_graph import collective_call
from autopar.simulate.oracle import global_values
from autopar.simulate.step import plan_and_capture, simulate_step

from ..helpers.sequences import Decoder, batch

SAMPLES, WIDTH = 2, 8


def planned(model, size: int, length: int, layout: str = "cp:S(1)"):
    options = dict(strategy="ring", hardware="cpu-gloo", baselines=False, pin={"input_ids": layout})
    return plan_and_capture(model, f"cp={size}", batch(length, samples=SAMPLES), **options)


def simulated(model, size: int, length: int, layout: str = "cp:S(1)"):
    """Simulate a step of a layer; a rank that waits for one that does not come is an error. Return it and the plan."""
    plan, captured = planned(model, size, length, layout)
    return simulate_step(captured, plan, global_values(captured, model, batch(length, samples=SAMPLES))), plan


def messages(graph) -> list[float]:
    """Bytes that each exchange of blocks sends."""
    found = [n for n in graph.graph.nodes if n.meta.get("collective") and "attention" in n.name]
    return [n.meta["collective"].wire_bytes for n in found]


MORE = [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in ((2, "causal"), (3, "causal"), (2, "full"), (4, "full"), (2, "zigzag"), (3, "window"), (2, "window"))
]
WINDOW = 3  # of Decoder


def block_visits(size: int, kind: str, block_rows: int) -> float:
    """Return how often a block is sent to a device, of all blocks: a window reaches its last rows from the next."""
    if kind == "window":
        return (size - 1) * (WINDOW - 1) / block_rows
    return {"full": 1.0, "causal": 0.5, "zigzag": 0.75}[kind] * size * (size - 1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size, kind", [(4, "causal"), (3, "full"), (4, "zigzag"), (4, "window"), *MORE])
def test_bytes_are_those_of_the_formula(size, kind):
    """A block of keys and values is n / P rows of 2 d_kv numbers; forward it goes to each device that needs it,
    backward again, and its gradients once. In zigzag all devices need half of all blocks or all of them. The plan has
    the bytes of the device that sends most."""
    length, (heads, kv_heads) = 24, (4, 2)
    model = Decoder(kind if kind in ("full", "window") else "causal", heads, kv_heads)
    step, plan = simulated(model, size, length, "cp:Z(1)" if kind == "zigzag" else "cp:S(1)")
    block = SAMPLES * length // size * 2 * kv_heads * WIDTH * 8
    exchanges = 1 if kind == "window" else size - 1
    for phase, rounds in (("forward", 1), ("backward", 2)):
        sent = [messages(getattr(p.parts, phase)) for p in step.programs]
        assert sum(map(sum, sent)) == pytest.approx(rounds * block_visits(size, kind, length // size) * block)
        (planned,) = [c for c in plan.collectives if c.phase == phase and c.kind == "all_to_all"]
        assert {len(of_rank) for of_rank in sent} == {planned.count} == {rounds * exchanges}
        assert max(map(sum, sent)) == planned.wire_bytes


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size, length, kind", [(4, 13, "causal"), (3, 7, "window"), (4, 10, "full")])
def test_all_ranks_call_the_same(size, length, kind):
    step, _ = simulated(Decoder(kind, 4, 1), size, length)
    for phase in ("forward", "backward"):
        calls = [
            [collective_call(n) for n in getattr(p.parts, phase).graph.nodes if is_collective(n)] for p in step.programs
        ]
        assert all(of_rank == calls[0] for of_rank in calls)


class Frozen(Decoder):
    """Only the projection of the queries, of the keys or of the values is trained: nobody asks for other gradients."""

    def __init__(self, part: int):
        super().__init__("causal", 4, 4)
        self.part = part
        self.delta = torch.nn.Parameter(torch.zeros(32, 32, dtype=torch.float64))
        for name, p in self.named_parameters():
            p.requires_grad_(name == "delta")

    def forward(self, input_ids, labels, attention_mask):
        place = torch.arange(input_ids.shape[1])
        x = self.tokens(input_ids) + self.places(place)
        parts = list(self.qkv(self.norm(x)).split(32, -1))
        parts[self.part] = parts[self.part] + self.norm(x) @ self.delta
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in parts)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2))).square().mean()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("part, size", [(0, 3), (1, 3), (2, 2)])
def test_what_nobody_needs_is_left_out_on_all_ranks(part, size):
    step, _ = simulated(Frozen(part), size, 9)
    kinds = [Counter(n.name.split("_start")[0] for n in p.parts.backward.graph.nodes if "start" in n.name)
             for p in step.programs]  # fmt: skip
    assert all(found == kinds[0] for found in kinds)
    assert any("gradients" in name for name in kinds[0]) == (part > 0)


class Biased(Decoder):
    def attend(self, q, k, v, mask, is_causal):
        places = torch.arange(q.shape[2]).double() * 0.1
        return super().attend(q, k, v, (places[:, None] - places).square().neg(), False)


def test_what_is_added_to_scores_is_not_sent():
    """A device makes its own rows of it, each step takes its columns, and what is most in a row is looked for once."""
    size, length = 3, 12
    model = Biased("full", 4, 2)
    step, plan = simulated(model, size, length)
    plain, _ = simulated(Decoder("full", 4, 2), size, length)
    assert step.bytes_sent == plain.bytes_sent and plan.attentions[0].scheme == "ring over cp"
    for program in step.programs:
        calls = Counter(str(n.target) for n in program.parts.forward.graph.nodes if n.name.startswith("attention"))
        assert calls["autopar.block_lse.default"] == size and calls["autopar.whole_lse.default"] == 1
        assert calls["aten.amax.default"] == 1
        masks = [n.args[3] for n in program.parts.forward.graph.nodes if str(n.target) == "autopar.attention.default"]
        assert {tuple(m.meta["val"].shape) for m in masks} == {(length // size, length // size)}
