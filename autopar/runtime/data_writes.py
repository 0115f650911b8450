"""`parameter.data = value` of a sharded parameter: the value goes into its local part.

Manual updates (`p.data = p.data - lr * p.grad`) and `vector_to_parameters` are written so. torch would put the value
into the tensor around the local part, which nothing reads.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .._torch.dtensors import items_of_whole_tensors, on_data_set
from ..errors import InputError

_parameters: WeakIdKeyDictionary = WeakIdKeyDictionary()


def take(parameter: Tensor) -> None:
    """Write into a sharded parameter what is set as its data from now on; let single numbers that are read of DTensors
    be those of whole tensors."""
    if not _parameters:
        on_data_set(_write)
        items_of_whole_tensors()
    _parameters[parameter] = True


def _write(parameter: Tensor, value: object) -> bool:
    """Write `value`, a plain tensor that is whole or a DTensor, into one of the parameters; return whether it is one.

    Raises InputError for a value of another shape or type."""
    if parameter not in _parameters:
        return False
    if not isinstance(value, Tensor) or value.shape != parameter.shape or value.dtype != parameter.dtype:
        found = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(
            f"the data of a parameter {tuple(parameter.shape)} {parameter.dtype} is set to a {found}",
            fix="keep its shape and type: a compiled model's graphs are made for them",
        )
    with torch.no_grad():
        parameter.copy_(value)
    return True
