"""What lower bounds charge for values that are made again: never more than making them again costs, whatever is made again."""

from __future__ import annotations

import random

import pytest

from autopar.planner.again import Again
from autopar.planner.blocks import Blocks
from autopar.planner.prices import Prices
from autopar.planner.remake import FULL

from .test_remake import CASES, evaluated, remakes

PRICE_SECONDS = (1e-14, 1e-11, 1e-10, 1e-9, 1e-7)  # a byte: from free memory to memory that costs more than any compute


@pytest.mark.parametrize(("model", "mesh", "strategy"), CASES)
def test_no_set_of_ops_is_charged_more_than_it_costs(model, mesh, strategy):
    """For random sets: the charges for what need not be saved, against the ops that run again and what is saved for them."""
    instance, e = evaluated(model, mesh, strategy)
    hubs = {}
    for hub in instance.hubs:
        for v in instance.problem.classes[hub.hub.producer].members:
            hubs.setdefault((v, hub.hub.output), []).append(hub)
    blocks = Blocks(instance.problem, instance.pricer)
    again, rng, charged = Again(instance.problem, instance.pricer, blocks.inner), random.Random(0), 0
    for remake in remakes(instance, e):
        full = sorted(remake.at(FULL))
        for byte_seconds in PRICE_SECONDS:
            prices = Prices(byte_seconds, True)
            for _ in range(40):
                made = frozenset(rng.sample(full, rng.randint(1, len(full))))
                before, after = remake.held(frozenset()), remake.held(made)
                needed = sum(b for key, b in after.items() if key not in before) / remake.copies
                cost = sum(remake.seconds[i] for i in made) + byte_seconds * needed
                charge = 0.0
                for v, output, layout in before.keys() - after.keys():
                    k = e.choice[v]
                    for hub in hubs.get((v, output), ())[:1]:
                        if hub.sources[hub.source_of[k]] == layout and (priced := again.seconds(hub, prices)) is not None:
                            charge += float(priced[hub.source_of[k]])
                charged += charge > 0
                assert charge <= cost * (1 + 1e-9) + 1e-18, (remake.block, byte_seconds, sorted(made))
    assert charged
