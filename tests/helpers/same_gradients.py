"""Steps of a compiled model beside those of the model itself."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from autopar.simulate.oracle import relative_error


def assert_same_gradients(parallel: nn.Module, reference: nn.Module, batches: Iterable[tuple], exact: float) -> None:
    """After a backward of each of some batches, whose losses the models return, all gradients are the model's own."""
    for given in batches:
        parallel(*given).backward()
        reference(*given).backward()
    wanted = dict(reference.named_parameters())
    for name, parameter in parallel.named_parameters():
        assert relative_error(parameter.grad.full_tensor(), wanted[name].grad) <= exact, name
