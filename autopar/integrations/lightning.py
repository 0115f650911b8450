"""Lightning's Trainer for a LightningModule that calls a compiled module.

    from autopar.integrations.lightning import AutoparStrategy
    trainer = lightning.Trainer(accelerator="cpu", strategy=AutoparStrategy(model), ...)     # model: autopar.compile's

Every rank runs a Trainer of its own on the process group that was there before `autopar.compile`, and the compiled
module reduces gradients. What is left to say here: that the ranks belong together (one of them logs and writes files,
all stop together), and that checkpoints have whole tensors, which load on any mesh. Lightning takes `sync_dist=True`
for its own strategies alone: a metric of all ranks is `self.log(name, self.trainer.strategy.reduce(value))`. A loader
gives each rank the whole batch with inputs="global", and its own part with "local", by a sampler.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from .._torch import tree_map
from ..processes import watch
from ..runtime.module import ParallelModule


def _whole(value: Any) -> Any:
    """Return a tensor with all its parts, in memory of its own, and anything else as it is. All ranks call it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


class AutoparStrategy(SingleDeviceStrategy):
    """Lets the ranks of a compiled module train together. `model`: the module that `autopar.compile` returned."""

    strategy_name = "autopar"

    def __init__(self, model: ParallelModule, **options: Any):
        super().__init__(model.stage_mesh.device, **options)
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()

    @property
    def is_global_zero(self) -> bool:
        """Return whether this rank logs and writes files."""
        return self.global_rank == 0

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean or the sum of a tensor over all ranks, and anything else as it is."""
        if not isinstance(tensor, Tensor):
            return tensor
        total = _whole(tensor).detach().clone()
        with watch.collective("a metric of all ranks"):
            dist.all_reduce(total)
        is_mean = "sum" not in str(reduce_op).lower()
        return total / self.world_size if is_mean else total

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all ranks, stacked; without gradients."""
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with watch.collective("a tensor of all ranks"):
            dist.all_gather(parts, tensor.detach().contiguous())
        return torch.stack(parts)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether all ranks, or any, decide so."""
        count = int(self.reduce(torch.tensor(float(decision), device=self.root_device), reduce_op="sum"))
        return count == self.world_size if all else count > 0

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        with watch.collective("the other ranks"):
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return what rank `src` has."""
        objects = [obj]
        with watch.collective("an object of one rank"):
            dist.broadcast_object_list(objects, src)
        return objects[0]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the LightningModule with whole tensors."""
        return {name: _whole(value) for name, value in super().lightning_module_state_dict().items()}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer with whole tensors."""
        return tree_map(_whole, super().optimizer_state(optimizer))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole tensors into this rank's parts."""
        here = dict(super().lightning_module_state_dict())
        state = {name: _part(value, here.get(name)) for name, value in checkpoint["state_dict"].items()}
        super().load_model_state_dict({**checkpoint, "state_dict": state}, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the whole state of optimizers into this rank's parts."""
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"]):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            numbers = [number for group in saved["param_groups"] for number in group["params"]]
            like = dict(zip(numbers, parameters))
            state = {
                number: {key: _part(value, like[number]) for key, value in entry.items()}
                for number, entry in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": state})


def _part(value: Any, like: Any) -> Any:
    """Return a whole tensor in the layout of another one of its shape, and anything else as it is."""
    if isinstance(value, Tensor) and isinstance(like, DTensor) and value.shape == like.shape:
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
    return value
