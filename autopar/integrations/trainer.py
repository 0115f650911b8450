"""transformers.Trainer, and those built on it, for a compiled model.

    from autopar.integrations.trainer import Trainer          # in place of transformers.Trainer
    trainer = Trainer(autopar.compile(model, mesh, batch, inputs="local"), args, train_dataset=...)

    class Tuner(ForTrainer, trl.SFTTrainer): ...              # any other class of Trainer

The compiled module already reduces gradients, so that nothing wraps it in DDP. What is left to say here: which ranks
read the same samples, that a loss inside of the model is the whole batch's, and that all ranks take part in saving.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import transformers
from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.trainer import SCHEDULER_NAME, TRAINING_ARGS_NAME

from .. import _torch
from ..errors import InputError
from ..processes import agree
from ..runtime.inputs import data_axes
from ..runtime.module import ParallelModule
from ..storage.checkpoint import load_checkpoint, save_checkpoint
from .padding import padding_of

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object
CHECKPOINT = "autopar"  # the folder of a Trainer's checkpoint that has the optimizer's state


class _Accelerator(Accelerator):
    """Lets `copies` ranks next to each other read the same samples."""

    copies: int
    parts_mesh: DeviceMesh

    def _prepare_device_mesh(self) -> DeviceMesh:
        return self.parts_mesh

    def gather(self, tensor):
        """Return a tensor, or each of a structure, of one rank of every part of the batch, one after the other."""
        return _torch.tree_map(self._of_parts, super().gather(tensor))

    def _of_parts(self, gathered):
        is_tensor = isinstance(gathered, torch.Tensor)
        return torch.cat(gathered.chunk(self.num_processes)[:: self.copies]) if is_tensor else gathered


class ForTrainer(Base):
    """Makes a class of Trainer, as the base before it, train a module of `autopar.compile(..., inputs="local")`. Raises
    InputError for one with other inputs, or if its axes of data are not the first of its mesh."""

    def __init__(self, model: ParallelModule, *args, **kwargs):
        if not isinstance(model, ParallelModule) or not model.takes_parts:
            raise InputError(
                f"a Trainer gives each rank its own samples, and got a {type(model).__name__} that takes others",
                fix='autopar.compile(model, mesh, example_inputs=batch, inputs="local"), with the batch of one rank',
            )
        mesh = model.plan.mesh
        axes = data_axes(mesh)
        if mesh.names[: len(axes)] != axes:
            raise InputError(
                f"a Trainer gives neighboring ranks the same samples, and {', '.join(axes)} is not first on the mesh",
                mesh=mesh,
                fix=f"init_device_mesh with {', '.join(axes)} as the first of mesh_dim_names",
            )
        self.parts, self.device_type = math.prod(map(mesh.size, axes)), model.stage_mesh.device.type
        super().__init__(model, *args, **kwargs)
        pad = padding_of(self.data_collator, self.processing_class)
        for mine in vars(self).values():  # the model, and one that it is compared with
            if isinstance(mine, ParallelModule) and pad and not mine.pads:
                mine.pad_with(pad)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Accelerator, and have it read a part of the data set for each part of the batch."""
        super().create_accelerator_and_postprocess()
        sizes = (self.parts, self.get_tp_size())
        self.accelerator.__class__, self.accelerator.copies = _Accelerator, sizes[1]
        self.accelerator.parts_mesh = init_device_mesh(self.device_type, sizes, mesh_dim_names=("dp_shard", "tp"))

    def get_tp_size(self) -> int:
        """Return the number of ranks that read the same samples."""
        return torch.distributed.get_world_size() // self.parts

    def _get_num_items_in_batch(self, batch_samples, device):
        """Return the number of tokens in the whole batch, or None where it is not asked for."""
        count = super()._get_num_items_in_batch(batch_samples, device)
        if not isinstance(count, torch.Tensor):
            return count
        count = count * self.get_tp_size()  # by which it was divided, though parts alone are gathered here
        return count if self.args.average_tokens_across_devices else self.accelerator.gather(count).sum()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Return the loss of the whole batch from inside of the model, or what a loss function says of this rank's."""
        counts: list[bool] = []  # whether the model was told the number of tokens, for a loss of its own
        hook = lambda module, args, kwargs: counts.append("num_items_in_batch" in kwargs)  # noqa: E731
        with model.register_forward_pre_hook(hook, with_kwargs=True):
            found = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        is_inside = self.compute_loss_func is None and self.label_smoother is None and any(counts)
        if num_items_in_batch is None or not self.args.average_tokens_across_devices or not is_inside:
            return found
        # transformers takes the loss for this rank's part of the sum, which DDP would divide by the number of parts
        return (found[0] / self.parts, found[1]) if return_outputs else found / self.parts

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model's folder, as `from_pretrained` reads it; all ranks call this."""
        folder = Path(output_dir or self.args.output_dir)
        self.model.save_pretrained(folder)
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_checkpoint(Path(output_dir) / CHECKPOINT, self.model, self._plain_optimizer(), step=self.state.global_step)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        """Do nothing: the model's values are loaded with the optimizer's state, which comes later."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_checkpoint(Path(checkpoint) / CHECKPOINT, self.model, self._plain_optimizer())
            state = agree.everywhere(lambda: torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))
            self.lr_scheduler.load_state_dict(state)

    def _load_best_model(self) -> None:
        load_checkpoint(Path(self.state.best_model_checkpoint) / CHECKPOINT, self.model)

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer without Accelerate's wrapper."""
        return cast(torch.optim.Optimizer, getattr(self.optimizer, "optimizer", self.optimizer))


class Trainer(ForTrainer, transformers.Trainer):
    """Is transformers.Trainer for a module of `autopar.compile(..., inputs="local")`."""
