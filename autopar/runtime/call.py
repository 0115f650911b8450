"""One call of a compiled module: its tensors as the user passed them, and as this rank computes with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import _torch
from ..codegen.follow_size import Sizes
from ..errors import InputError
from ..frontend.call_signature import Returns
from .inputs import Inputs
from .lengths import OwnLengths


@dataclass
class Call:
    """`tensors` in the order of the inputs' names; `returns`: what the user gets; `lengths`: the rank's own, where
    they are not those of `tensors`; `sizes`: those that a program that serves several follows."""

    inputs: Inputs
    tensors: list[torch.Tensor]
    returns: Returns
    lengths: OwnLengths | None = None
    sizes: Sizes | None = None

    def local(self) -> list[torch.Tensor]:
        """Return this rank's parts of the tensors."""
        return self.inputs.local(self.tensors)

    def write(self, i: int, local: torch.Tensor) -> None:
        """Give a tensor of the user new values, of which `local` is this rank's part."""
        name, tensor = self.inputs.signature.tensor_names[i], self.tensors[i]
        tensor.copy_(self.inputs.as_passed(name, tensor, local))

    def check_apart(self, written: Sequence[int]) -> None:
        """Raise InputError if the model writes to one of the tensors `written` and reads the same memory as another
        input: a trace has each of them in memory of its own. So it does if that one was padded."""
        storages = [_torch.storage_key(t.to_local() if hasattr(t, "to_local") else t) for t in self.tensors]
        for i in written:
            if self.lengths is not None and (name := self.inputs.signature.tensor_names[i]) in self.lengths.inputs:
                raise InputError(
                    f"the model writes to {name}, of which ranks have lengths of their own",
                    fix=f"pad {name} to the same length on all ranks before the call",
                )
            if storages.count(storages[i]) > 1:
                name = self.inputs.signature.tensor_names[i]
                raise InputError(
                    f"the model writes to {name}, which shares its memory with another input",
                    fix=f"pass {name}.clone()",
                )
