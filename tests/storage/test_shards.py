"""Tests of who writes which tensor and who sends its parts: the choice is that of a look at all ranks."""

from __future__ import annotations

import random

import pytest
import torch

from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.processes.stage_mesh import StageMesh
from autopar.storage.gather import Held, _cut_by, _positions
from autopar.storage.shards import owners_of
from autopar.storage.tensor_file import Form
from tests.helpers.random_layouts import random_layout


@pytest.mark.parametrize("seed", range(20))
def test_owners_have_least_to_write(seed):
    """The same as by the sum of every holder for each tensor."""
    rng = random.Random(seed)
    stages, each = rng.randint(1, 3), rng.randint(1, 5)
    ranks = [tuple(range(p, stages * each, stages)) for p in range(stages)]
    names = [f"w{i}" for i in range(rng.randint(1, 40))]
    forms = {name: Form((rng.choice((0, 1, 3, 64)),), torch.float32) for name in names}
    held = {name: tuple(sorted(rng.sample(range(stages), rng.randint(1, stages)))) for name in names}
    load, expected = dict.fromkeys(range(stages * each), 0), {}
    for name in sorted(names, key=lambda name: (-forms[name].bytes_, name)):
        expected[name] = min((load[r], r) for p in held[name] for r in ranks[p])[1]
        load[expected[name]] += max(1, forms[name].bytes_)
    assert owners_of(forms, held, ranks) == expected


@pytest.mark.parametrize("text", ["dp=4", "dp=2,tp=3", "a=2,b=2,c=2"])
def test_every_part_has_one_giver(text):
    """The first device, in order, of those at a position along the axes that cut a tensor."""
    mesh, rng = Mesh.parse(text), random.Random(0)
    for _ in range(20):
        layout = random_layout(rng, (24, 24), mesh)
        axes = layout.sharding_axes
        first: dict[tuple[int, ...], int] = {}
        for device in range(mesh.devices):
            first.setdefault(tuple(mesh.coordinate(device)[axis] for axis in axes), device)
        positions = _positions(layout, mesh)
        assert [mesh.rank_at(position) for position in positions] == [*first.values()]
        assert [tuple(position[axis] for axis in axes) for position in positions] == [*first]
        assert sorted(_cut_by(layout, mesh)) == sorted(axes)


def test_a_tensor_comes_from_the_owners_own_stage_if_it_is_there():
    stage = StageMesh(Mesh.parse("dp=2"), None, {"dp": 0}, 0, ((0, 2), (1, 3), (4, 5)))
    held = Held(Form((2,), torch.float32), Layout((("dp",),)), None, (1, 2))
    assert [held.giver(owner, stage) for owner in range(6)] == [1, 1, 1, 1, 2, 2]
    assert stage.places[3] == (1, 1)
