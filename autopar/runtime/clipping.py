"""Norms of gradients over a whole model whose stages are on other ranks, for its own clipping and for torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..processes import process_groups, watch
from .stand_in import local_gradient

WHAT = "the norm of the gradients"


def norm_of_all(mine: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the norm, in fp64, of what all ranks have, which call this together with tensors of their own."""
    norms = torch.zeros(dist.get_world_size(), dtype=torch.float64, device=device)
    here = torch.zeros((), dtype=torch.float64, device=device)
    if mine:
        each = [norm.to(here) for norm in torch._foreach_norm(list(mine), norm_type)]
        here = torch.linalg.vector_norm(torch.stack(each), norm_type)
    dist.all_gather(list(norms), here, group=process_groups.tensor_group("norm"))
    return torch.linalg.vector_norm(norms, norm_type)


def counts_here(module: Any, name: str) -> bool:
    """Return whether this rank's part of a parameter counts for a sum over all parameters: of ranks with the same part
    it is the first one's that does."""
    stage, axes = module.stage_mesh, module.layouts[name].sharding_axes
    is_first = all(index == 0 for axis, index in stage.coordinate.items() if axis not in axes)
    return is_first and module.pp_ranks_of(name)[0] == stage.pp_rank


def over_stages(modules: WeakSet[nn.Module]) -> Callable[[Callable], Callable]:
    """Return what makes torch's norm of gradients that of all stages, for gradients of those of these ParallelModules
    that have some. All ranks call it together, also those whose stages have none of the gradients."""

    def wrapped(total_norm: Callable) -> Callable:
        def over_all(
            tensors: Tensor | Iterable[Tensor],
            norm_type: float = 2.0,
            error_if_nonfinite: bool = False,
            foreach: bool | None = None,
        ) -> Tensor:
            tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            owners = _owners(modules)
            if not _goes_over_stages(tensors, owners, modules):
                return total_norm(tensors, norm_type, error_if_nonfinite, foreach)
            with watch.collective(WHAT):
                counted = [part for tensor in tensors for part in _counted(tensor, owners)]
                device = next(m.stage_mesh.device for m in _staged(modules))
                norm = norm_of_all(counted, norm_type, device)
            dtype = next((tensor.dtype for tensor in tensors), torch.float32)
            return total_norm([norm.to(dtype)], norm_type, error_if_nonfinite)  # which raises what torch raises

        return over_all

    return wrapped


def _staged(modules: Iterable[Any]) -> list[Any]:
    return [module for module in modules if module.stage_mesh.pp_group is not None]


def _owners(modules: Iterable[Any]) -> dict[int, tuple[Any, str]]:
    """Return, by the id of a gradient, the module with stages and the name of the parameter that it is of."""
    return {
        id(parameter.grad): (module, name)
        for module in _staged(modules)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }


def _goes_over_stages(tensors: Sequence[Tensor], owners: dict, modules: Iterable[Any]) -> bool:
    """Return whether ranks of other stages take part: where a rank has no gradient at all, theirs may have some."""
    return any(id(tensor) in owners for tensor in tensors) or (not tensors and bool(_staged(modules)))


def _counted(tensor: Tensor, owners: dict[int, tuple[Any, str]]) -> list[Tensor]:
    """Return the part of a gradient that counts on this rank, if any: of what several ranks have, the first one's."""
    if id(tensor) in owners:
        module, name = owners[id(tensor)]
        part = local_gradient(module.get_parameter(name))
        return [part] if counts_here(module, name) else []
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return [whole] if dist.get_rank() == 0 else []
