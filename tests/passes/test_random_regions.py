"""Random nests of stretches without gradients and under autocast, with writes to buffers, weights and a teacher,
against eager."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from .against_eager import assert_as_eager
from .test_explicit_casts import assert_the_same_bits, low
from .test_grad_regions import Net

REGIONS = [
    torch.no_grad, torch.enable_grad, lambda: torch.set_grad_enabled(False), torch.inference_mode, low,
    lambda: torch.autocast("cpu", enabled=False), lambda: torch.autocast("cpu", dtype=torch.float16),
]  # fmt: skip
GRAD_REGIONS = REGIONS[:4]


def _average(net, values, choice):
    net.mean.mul_(0.9).add_(choice(values).detach().float().mean((0, 1)), alpha=0.1)


def _average_with_gradients(net, values, choice):
    values.append(choice(values) * net.mean)


def _row(net, values, choice):
    net.codes[choice([0, 1, 2])] = choice(values).detach().float().mean((0, 1))
    values.append(choice(values) + net.codes[1])


def _count(net, values, choice):
    net.count.add_(1)


def _teacher(net, values, choice):
    with torch.no_grad():
        net.teacher.weight.mul_(0.9).add_(net.first.weight, alpha=0.1)
        values.append(net.teacher(choice(values).float()))


def _clamp(net, values, choice):
    with torch.no_grad():
        choice([net.first, net.second]).bias.clamp_(-0.3, 0.3)


def _layer(net, values, choice):
    values.append(choice([net.first, net.second])(choice(values).float()))


def _views(net, values, choice):
    flat = choice(values).view(-1, 4)
    values.append(flat.contiguous().view(2, 3, 4))


def _same(net, values, choice):
    values.append(choice(values).float().contiguous())


def _product(net, values, choice):
    values.append((choice(values) * choice(values)).tanh())


def _fresh(net, values, choice):
    """A new tensor, part of which is written to; what is written has no gradient that a stretch without gradients would
    forbid."""
    new = torch.zeros(2, 3, 4)
    new[0] = choice(values)[0]
    values.append(new + 1)


STATEMENTS = [
    _average, _average_with_gradients, _row, _count, _teacher, _clamp, _layer, _layer, _views, _same, _product, _fresh,
]  # fmt: skip


def program(seed: int, regions: list):
    """A forward: statements in nested regions, as the seed says."""

    def run(net, x):
        rng, values = random.Random(seed), [x, net.first(x)]

        def block(depth: int) -> None:
            for _ in range(rng.randint(2, 4)):
                if depth < 3 and rng.random() < 0.4:
                    with rng.choice(regions)():
                        block(depth + 1)
                else:
                    rng.choice(STATEMENTS)(net, values, rng.choice)

        block(0)
        return torch.stack([value.float() for value in values]).square().mean()

    return run


def _runs_in_eager(model: Net, x: torch.Tensor) -> bool:
    """Some programs write to what a gradient needs, or keep an inference tensor for one: eager torch refuses them
    too."""
    try:
        copy.deepcopy(model)(x).backward()
    except RuntimeError:
        return False
    return True


SEEDS = [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 120))]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", SEEDS)
def test_nests(seed):
    torch.manual_seed(seed)
    x = torch.randn(2, 3, 4)
    if _runs_in_eager(model := Net(program(seed, REGIONS)), x):
        assert_the_same_bits(model, x)
    if _runs_in_eager(model := Net(program(seed, GRAD_REGIONS)), x):
        assert_as_eager(model, x, tolerance=1e-5)
