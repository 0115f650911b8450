"""DTensors of every layout hold what the layout says, also of a dim in parts that two axes shard."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.ir.layout import Layout, local_part
from autopar.ir.mesh import Mesh
from autopar.processes.dtensors import as_dtensor, redistributed
from tests.helpers import gloo
from tests.runtime.parity import device_mesh

MESH = "dp=2,tp=2"
DIMS = (((), ()), (("dp",), ()), (("tp",), ("dp",)), (("dp", "tp"), ()), (("tp", "dp"), ()), ((), ("tp", "dp")))
LAYOUTS = [Layout(dims, (), parts) for dims in DIMS for parts in ((1, 1), (3, 2))]


def _hold(rank, layouts):
    mesh, whole = Mesh.parse(MESH), torch.arange(24.0 * 16).reshape(24, 16)
    devices, here = device_mesh(MESH), mesh.coordinate(rank)

    def local(layout: Layout) -> torch.Tensor:
        return local_part(whole, layout, mesh, here).contiguous()

    wrong = []
    for layout in layouts:
        tensor = as_dtensor(local(layout), whole.shape, layout, mesh, devices)
        made = {"itself": (tensor, whole), "twice": (tensor * 2, 2 * whole), "sum": (tensor + tensor, 2 * whole)}
        made |= {"transposed": (tensor.t(), whole.t())}
        wrong += [(str(layout), what) for what, (t, w) in made.items() if not torch.equal(t.full_tensor(), w)]
    for a, b in itertools.product(layouts[::8], layouts[1::9]):
        tensor = as_dtensor(local(a), whole.shape, a, mesh, devices)
        if not torch.equal(redistributed(tensor, b, mesh, devices), local(b)):
            wrong.append((str(a), str(b)))
    return wrong


@pytest.mark.gloo
@pytest.mark.parametrize("layouts", [LAYOUTS[5::5], pytest.param(LAYOUTS, marks=pytest.mark.slow)], ids=["some", "all"])
def test_what_a_layout_says(layouts):
    assert gloo.run(4, _hold, layouts) == [[]] * 4
