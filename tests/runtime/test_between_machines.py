"""Steps of ranks on several machines: what passes between them is sent, and receives are posted before sends."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.helpers import gloo
from tests.helpers.two_tiers import two_tiers
from tests.runtime import tiny

pytestmark = pytest.mark.gloo


def _collectives_of_a_step(rank: int, strategy: str) -> dict[str, set[str]]:
    """Take a step as if two ranks each were a machine, compare its gradients, and return the collectives by group."""
    from torch.distributed.device_mesh import init_device_mesh

    import autopar
    from autopar.codegen.python_code import is_collective
    from autopar.processes import watch
    from autopar.runtime import loaded

    watch.machines = lambda: ((0, 0, 1, 1), 1.0)
    found: dict[str, set[str]] = {}
    bind = loaded.bind_groups

    def noted(module, *names):
        for node in filter(is_collective, module.graph.nodes):
            found.setdefault(node.args[-1], set()).add(str(node.target))
        return bind(module, *names)

    loaded.bind_groups = noted
    model, batch = tiny.own("gpt:hidden=36,layers=1,heads=3,vocab=50,seq=12", batch=4)
    reference, mesh = copy.deepcopy(model), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = autopar.compile(model, mesh, batch, strategy=strategy, hardware=two_tiers(2))
    for _ in range(2):
        model(**batch).loss.backward()
        reference(**batch).loss.backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), parameter.grad)
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["zero1", "fsdp"])
def test_what_leaves_a_machine_is_sent(strategy):
    for found in gloo.run(4, _collectives_of_a_step, strategy):
        assert {"autopar.gather_by_sends.default", "autopar.exchange_by_sends.default"} <= found["dp"]
        assert {"autopar.gather_by_broadcasts.default", "_c10d_functional.all_to_all_single.default"} <= found["tp"]
        assert not any("sends" in target for target in found["tp"]) and "broadcasts" not in str(found["dp"])
