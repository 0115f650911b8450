"""torch's own clipping on gloo: by the norm of the whole model, whose stages are on other ranks."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm

from tests.helpers import gloo

from . import tiny
from .parity import assert_close, device_mesh, full, pair


def _clipped(rank: int, mesh: str, options: dict) -> tuple[int, float]:
    """Compare norms and clipped gradients: of all parameters, tied ones too, and of those of a single stage. Return how
    many parameters of that stage this rank has, and the norm of a plain model beside."""
    model, batch = tiny.gpt2(n_layer=1)  # which ties the first stage's embedding to the last one's head
    parallel, reference = pair(model, device_mesh(mesh), batch, **options)
    parallel(**batch).loss.backward()
    reference(**batch).loss.backward()
    for norm_type in (2.0, 1.0, float("inf")):
        mine = get_total_norm([p.grad for p in parallel.parameters()], norm_type)
        wanted = get_total_norm([p.grad for p in reference.parameters()], norm_type)
        assert_close(full(mine), wanted, f"norm {norm_type}")
    of_last = [[p for name, p in m.named_parameters() if "ln_f" in name] for m in (parallel, reference)]
    for chosen in of_last, [parallel.parameters(), reference.parameters()]:
        mine, wanted = (clip_grad_norm_(parameters, 0.01) for parameters in chosen)
        assert_close(full(mine), wanted, "norm")
        for name, parameter in parallel.named_parameters():
            assert_close(parameter.grad, reference.get_parameter(name).grad, name)
    for parameter in parallel.parameters():
        parameter.grad.fill_(float("inf"))
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(parallel.parameters(), 1.0, error_if_nonfinite=True)
    return len(of_last[0]), _norm_of_a_plain_model(rank)


def _norm_of_a_plain_model(rank: int) -> float:
    """Return the norm of a plain model's gradients, which are other ones on each rank."""
    plain = torch.nn.Linear(3, 3)
    plain(torch.full((1, 3), float(rank + 1))).sum().backward()
    return float(clip_grad_norm_(plain.parameters(), 1e9))


@pytest.mark.gloo
@pytest.mark.parametrize("mesh, options", [
    ("pp=2", dict(micro_batches=2)),
    pytest.param("pp=4", dict(micro_batches=2), marks=pytest.mark.slow),
    pytest.param("pp=2,tp=2", dict(micro_batches=2, strategy="megatron"), marks=pytest.mark.slow),
    pytest.param("dp=2,pp=2", dict(micro_batches=2, strategy="fsdp"), marks=pytest.mark.slow),
    pytest.param("dp=2,tp=2", dict(strategy="megatron+fsdp"), marks=pytest.mark.slow),
])  # fmt: skip
def test_torchs_clipping_is_that_of_one_process(mesh, options):
    found, norms = zip(*gloo.run(2 if mesh == "pp=2" else 4, _clipped, mesh, options))
    assert max(found) == 2 and (min(found) == 0) == ("pp" in mesh)  # a stage without any of them takes part
    assert len({*norms}) == len(norms)  # a plain model is clipped by itself
