"""A checkpoint that is opened and found fit for a model, its optimizer and what else is restored, before any of them
changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ..errors import CheckpointMismatch
from . import generators, optimizer_state
from .manifest import corrupt
from .model_folder import layout_of, local
from .plain import decode
from .tensor_file import TensorFile
from .weights import Weights, WeightsFolder, persistent_buffers, shortened

MODEL, OPTIMIZER, RNG, STATE = "model", "optimizer", "rng", "state.json"


def rng_name(rank: int) -> str:
    """Return the name of the file with the states of a rank's generators."""
    return f"{RNG}-{rank:05d}.safetensors"


class Opened:
    """The files of a checkpoint at `path`, whose digests are checked already. `step`; `scheduler`: its state,
    `positions`: the data positions, of all ranks or of one for all; `scaler`: the state of a GradScaler.

    Raises CheckpointMismatch if it is of another model or optimizer, or lacks what is wanted (`with_scheduler`,
    `with_data`, `with_scaler`), and CheckpointCorrupt if no save wrote such files."""

    def __init__(
        self,
        path: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        with_scheduler: bool,
        with_data: bool,
        with_scaler: bool = False,
    ):
        self.path, self.model, self.optimizer, self.tensors = path, model, optimizer, None
        state = _readable(path, STATE, lambda: json.loads((path / STATE).read_text()))
        self.step, self.scheduler, self.positions, self.dropout, self.described, self.ranks = _readable(
            path, STATE, lambda: _values_of(state)
        )
        self.scaler = _readable(path, STATE, lambda: decode(state["scaler"]) if "scaler" in state else None)
        self._check_wanted(with_scheduler, with_data)
        if with_scaler and not self.scaler:
            raise CheckpointMismatch(f"{path} was saved without a scaler that is enabled", fix="load it without one")
        self.weights = Weights(model, path / MODEL, CheckpointMismatch)
        self._check_dtypes()
        if optimizer is not None:
            _readable(path, STATE, lambda: optimizer_state.check(model, optimizer, self.described))
            self.tensors = WeightsFolder(path, OPTIMIZER)
            _readable(path, STATE, lambda: optimizer_state.check_values(model, self.tensors.forms, self.described))
        name = rng_name(dist.get_rank() if dist.get_rank() < self.ranks else 0)
        self.generators = _readable(path, name, lambda: _generators_of(path / name))

    def _check_wanted(self, with_scheduler: bool, with_data: bool) -> None:
        ranks = dist.get_world_size()
        if with_scheduler and self.scheduler is None:
            raise CheckpointMismatch(f"{self.path} was saved without a scheduler", fix="load it without one")
        if with_data and len(self.positions) not in (1, ranks):
            raise CheckpointMismatch(
                f"{len(self.positions)} ranks saved data positions of their own and there are {ranks} now",
                fix="load without data=, and divide what Checkpoint.data lists",
            )
        if with_data and None in self.positions:
            raise CheckpointMismatch(f"{self.path} was saved without data", fix="load it without data=")
        if self.optimizer is not None and self.described is None:
            raise CheckpointMismatch(f"{self.path} was saved without an optimizer", fix="load it without one")

    def _check_dtypes(self) -> None:
        """Raise CheckpointMismatch for other dtypes than the model's: a cast in silence would be another model, and
        leave an optimizer with state of another dtype than its parameters."""
        differ = [
            f"{name} {self.weights.form(name).dtype}, not {tensor.dtype}"
            for name, tensor in self._targets()
            if self.weights.form(name).dtype != tensor.dtype
        ]
        if differ:
            raise CheckpointMismatch(
                f"{self.path} has other dtypes than the model: {shortened(differ)}",
                fix=f"compile the model in those dtypes, or take the weights alone: "
                f"compile(weights={str(self.path / MODEL)!r})",
            )

    def _targets(self) -> list[tuple[str, torch.Tensor]]:
        return [*self.model.named_parameters(), *dict(persistent_buffers(self.model)).items()]

    def restore(self) -> None:
        """Overwrite parameters, buffers, the optimizer's state, random numbers, and close the files."""
        model, stage = self.model, self.model.stage_mesh
        with torch.no_grad():
            for name, tensor in self._targets():
                part = self.weights.part(name, tensor.dtype, layout_of(model, name), stage.mesh, stage.coordinate)
                local(tensor).copy_(part)
        self.weights.close()
        if self.tensors is not None:
            optimizer_state.restore(model, self.optimizer, self.tensors, self.described)
            self.tensors.close()
        generators.restore(self.generators)
        random = getattr(model, "random", None)
        if random is not None and self.dropout is not None:  # the last word: the generator's state is another seed
            random.seed, random.offset = self.dropout


def _generators_of(path: Path) -> dict[str, torch.Tensor]:
    """Return the states of random generators in a file, which are found fit to be restored."""
    file = TensorFile(path)
    try:
        states = {name: file.read(name) for name in file.forms}
    finally:
        file.close()
    generators.check(states)
    return states


def _values_of(state: dict) -> tuple:
    """Return (step, scheduler, positions, (seed, offset) or None, the optimizer as JSON, ranks that saved)."""
    positions, dropout = decode(state["data"]), state["dropout"]
    numbers = [state["step"], state["ranks"], *([] if dropout is None else (dropout["seed"], dropout["offset"]))]
    if type(positions) is not list or not positions or any(type(n) is not int for n in numbers):
        raise ValueError("a number or the list of data positions is of another kind")
    dropout = None if dropout is None else (dropout["seed"], dropout["offset"])
    return state["step"], decode(state["scheduler"]), positions, dropout, state["optimizer"], state["ranks"]


def _readable(path: Path, name: str, read: Callable):
    """Return what `read` returns. Raises CheckpointCorrupt for a file that no save wrote."""
    try:
        return read()
    except OSError as error:
        raise corrupt(path, name, f"cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, RuntimeError) as error:
        raise corrupt(path, name, f"is not what a save writes: {error!r:.200}") from error
