"""Functions of one query and key give, called with all of them at once, what torch's vmap gives."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn.attention import flex_attention as flex

from autopar.frontend.scalar_functions import of_all, places

SIZES = 2, 3, 5, 7  # samples, heads, queries, keys
LEAVES = ("b", "h", "i", "j", "3", "ids[b, i]", "ids[b][j]", "ids[b, 2]", "both[h, i][j]", "both[h][i, j]",
          "swapped[j, h]",
          "table[(i - j).abs() % 4]", "more[b][0][i][h]", "first[0]")  # fmt: skip
OPERATIONS = ("{} + {}", "{} - {}", "{} * {}", "torch.maximum({} + 0 * i, {} + 0 * j)", "({} + 0 * b) // (1 + {} ** 2)",
              "-({}) + {}", "torch.where({} > h, {}, i)", "5 - ({} + {})", "(i + 0) * {} + {}")  # fmt: skip


def expression(drawn: random.Random, depth: int) -> str:
    if not depth:
        return drawn.choice(LEAVES)
    return "(" + drawn.choice(OPERATIONS).format(expression(drawn, depth - 1), expression(drawn, depth - 1)) + ")"


@pytest.mark.parametrize("seed", [None, *range(3)])
def test_random_functions(seed):
    seed = random.randrange(2**32) if seed is None else seed
    print(f"seed {seed}")
    drawn, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    shapes = {"ids": (2, 9), "both": (3, 5, 7), "swapped": (7, 3), "table": (4,), "more": (2, 1, 5, 3), "first": (1,)}
    tensors = {name: torch.randint(9, shape, generator=generator) for name, shape in shapes.items()}
    for _ in range(20):
        left, right = expression(drawn, 2), expression(drawn, 2)
        text = f"lambda b, h, i, j: {left} {drawn.choice(('<', '>=', '=='))} {right} + 0 * i"
        function = eval(text, {"torch": torch, **tensors})
        mine = of_all(function, places(*SIZES, "cpu")).expand(SIZES)
        assert torch.equal(mine, flex.create_mask(function, *SIZES, device="cpu")), text


def test_places_are_views_of_what_they_index():
    """So that what is compared is known to be the numbers of tokens themselves (passes/canonicalize/documents.py)."""
    ids, seen = torch.arange(10).reshape(2, 5), []
    of_all(lambda b, h, i, j: seen.append(ids[b, i]) or seen[0] == ids[b, j], places(2, 3, 5, 5, "cpu"))
    assert seen[0].shape == (2, 1, 5, 1) and seen[0].data_ptr() == ids.data_ptr()
