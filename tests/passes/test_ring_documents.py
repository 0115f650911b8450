"""Rings among packed documents: a step equals one device's, and it sends the keys that documents reach, no others."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from autopar.codegen.python_code import is_collective
from autopar.codegen.verify_graph import collective_call
from autopar.compiler import lower
from autopar.ops import autopar
from autopar.simulate.compare import verify_plan
from autopar.simulate.step import plan_and_capture

from ..helpers.sequences import Packed, packed, reached_keys

SAMPLES, WIDTH = 2, 8
EXCHANGE = autopar.exchange_reached.default
KINDS = ("causal", "full", "window", "zigzag")


def planned(kind: str, heads: tuple[int, int], size: int, inputs):
    layout = "cp:Z(1)" if kind == "zigzag" else "cp:S(1)"
    model = Packed("causal" if kind == "zigzag" else kind, *heads)
    options = dict(strategy="ring", hardware="cpu-gloo", baselines=False, pin={"input_ids": layout})
    return model, *plan_and_capture(model, f"cp={size}", inputs, **options)


def check(kind: str, heads: tuple[int, int], size: int, length: int, lengths: list[int]) -> tuple[float, float]:
    """Compare a step; return the bytes that its ring sends, and those of a plan."""
    inputs = packed(length, lengths)
    model, plan, captured = planned(kind, heads, size, packed(length, [length]))
    report = verify_plan(captured, plan, model, inputs)
    assert report.match and max(report.errors.values()) <= 1e-10, report
    programs = [lower(captured, plan, rank).local.graph for rank in range(size)]
    said = [[(n.target, c.wire_bytes) for n in g.nodes if (c := n.meta.get("collective"))] for g in programs]
    others = sum(bytes_ for of_rank in said for target, bytes_ in of_rank if target != EXCHANGE)
    row_bytes = SAMPLES * 2 * heads[1] * WIDTH * 8
    sent = sum(report.sent_bytes) - others
    assert sent == pytest.approx(3 * row_bytes * reached_keys(inputs["documents"], kind, size))
    return sent, sum(bytes_ for of_rank in said for target, bytes_ in of_rank if target == EXCHANGE)


def any_case(rng: random.Random) -> tuple:
    size, kind = rng.choice((2, 3, 4)), rng.choice(KINDS)
    length = 2 * size * rng.randint(2, 4) if kind == "zigzag" else rng.randint(2 * size, 30)
    if kind != "zigzag" and -(-length // size) * (size - 1) >= length:
        length = size * (length // size)  # a block for each device
    lengths = []
    while (left := length - sum(lengths)) > 0:
        lengths.append(min(left, rng.choice((1, 2, 5, length // 2, length))))
    return kind, rng.choice(((4, 4), (4, 2))), size, length, lengths


def test_a_random_case():
    seed = random.randrange(10**6)
    case = any_case(random.Random(seed))
    print("seed", seed, case)
    sent, most = check(*case)
    assert sent <= most


@pytest.mark.slow
@pytest.mark.parametrize("part", range(30))
def test_random_cases(part):
    test_a_random_case()


@pytest.mark.parametrize("size, length, lengths, saved", [
    (2, 32, [3, 9, 2, 6, 12], 0.25), (4, 32, [3, 9, 2, 6, 12], 0.5), pytest.param(4, 32, [32], 0.0,
                                                                                  marks=pytest.mark.slow),
])  # fmt: skip
def test_documents_save_bytes(size, length, lengths, saved):
    """All that a causal mask opens is sent if there is one document."""
    sent, most = check("causal", (4, 2), size, length, lengths)
    assert sent <= (1 - saved) * most and (saved or sent == most)


def test_documents_are_looked_at_once_and_all_ranks_call_the_same():
    _, plan, captured = planned("causal", (4, 2), 3, packed(12, [5, 7]))
    graphs = [lower(captured, plan, rank).local for rank in range(3)]
    calls = [[collective_call(n) for n in g.graph.nodes if is_collective(n)] for g in graphs]
    assert all(of_rank == calls[0] for of_rank in calls)
    for g in graphs:
        count = Counter(n.target for n in g.graph.nodes)
        assert count[autopar.reached_rows.default] == 1 and count[EXCHANGE] == 3 * 2
