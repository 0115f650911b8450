"""Seeds and states of torch's random numbers, set between calls and inside of them.

Masks are not eager's own, so that what is compared is where those of two calls are equal.
"""

from __future__ import annotations

import torch
from torch import nn

from .nets import Net
from .program import Topic, one, randn
from .randomness import ones

seeding = Topic(__name__)


def _dropped():
    return nn.Sequential(nn.Dropout(0.5), nn.Linear(300, 3))


@seeding(tolerance=0.05)
def seeded_by_the_user():
    """torch.manual_seed before each of two calls gives the same mask twice."""

    def script(run):
        torch.manual_seed(3)
        a = run.model(torch.ones(200, 300))
        torch.manual_seed(3)
        b = run.model(torch.ones(200, 300))
        run.record(same=(a == b).float().mean())

    return _dropped(), ones(200, 300), script


def _masks(run, x=None):
    """Return where the outputs of two calls on one input are equal."""
    x = torch.ones(200, 300) if x is None else x
    return (run.model(x) == run.model(x)).float().mean()


@seeding(tolerance=0.05)
def seeded_again_and_again():
    """Equal seeds with numbers drawn between them give equal masks, other seeds other masks, and two calls after one
    seed two masks."""

    def script(run):
        def after(seed, calls=1):
            torch.manual_seed(seed)
            torch.rand(5)
            return [run.model(torch.ones(200, 300)) for _ in range(calls)]

        first, other, again = after(1, 2), after(2), after(1, 2)
        run.record(
            same=[(a == b).float().mean() for a, b in zip(first, again)],
            differ=[bool((a != b).any()) for a, b in ((first[0], other[0]), (first[0], first[1]))],
        )

    return _dropped(), ones(200, 300), script


@seeding(tolerance=0.05)
def state_given_back():
    """A call is made again with the state that torch's generator had before it (GradCache, Gao et al. 2021)."""

    def script(run):
        x, states, first = torch.ones(200, 300), [], []
        for _ in range(3):
            states.append(torch.get_rng_state())
            with torch.no_grad():
                first.append(run.model(x))
        again = []
        for state in states:
            with torch.random.fork_rng():
                torch.set_rng_state(state)
                again.append(run.model(x))
        more = run.model(x)
        run.record(
            same=[(a == b).float().mean() for a, b in zip(first, again)],
            differ=[bool((more != a).any()) for a in first],
        )

    return _dropped(), ones(200, 300), script


@seeding(tolerance=0.05)
def evaluated_with_a_seed_of_its_own():
    """Between two steps something is drawn with another seed, in torch.random.fork_rng: the masks go on."""

    def script(run):
        outputs = []
        for _ in range(3):
            outputs.append(run.model(torch.ones(200, 300)))
            with torch.random.fork_rng():
                torch.manual_seed(0)
                noise = torch.randn(4)
        run.record(noise=noise, differ=[bool((a != b).any()) for a, b in zip(outputs, outputs[1:])])

    return _dropped(), ones(200, 300), script


@seeding(tolerance=0.05, refused="seed")
def seeded_in_the_forward():
    """The forward seeds torch, so that every call draws the same."""

    class Seeded(Net):
        def forward(self, x):
            torch.manual_seed(0)
            return super().forward(x) + 0 * x.sum(), (torch.rand(500, 40) < 0.3).float()

    def script(run):
        run.loss = lambda out: out[0].sum()
        a, b = run.model(randn(1, 5, 6))[1], run.model(randn(1, 5, 6))[1]
        run.record(same=(a == b).float().mean(), mean=a.mean())

    return Seeded(), one(5, 6), script


@seeding(tolerance=0.05, refused="seed")
def seeded_in_the_forward_as_before():
    """The forward seeds torch with the seed that it has."""

    class Seeded(nn.Sequential):
        def forward(self, x):
            torch.manual_seed(torch.initial_seed())
            return super().forward(x)

    def script(run):
        run.record(same=_masks(run))

    return Seeded(*_dropped()), ones(200, 300), script
