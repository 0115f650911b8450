"""Let scripts use DTensors as if they were plain tensors, where torch raises or does something else in silence.

    loss + weight.norm()            a plain tensor beside a DTensor is an error
    weight.grad.norm().item()       the value of this rank's part, in silence; formats, tolist and numpy: errors
    weight.data = weight - update   changes the tensor around the local values and not these, in silence

What is switched on here stays on in this process: a backward, or a script's own line, comes at any time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

aten = torch.ops.aten


def mix_with_plain_tensors() -> None:
    """Let ops take DTensors beside plain tensors, which count as whole on every rank.

    torch.distributed.tensor.experimental.implicit_replication does so for a stretch, and backwards come after it."""
    from torch.distributed.tensor import DTensor

    DTensor._op_dispatcher._allow_implicit_replication = True


def forget_meshes() -> None:
    """Empty DTensor's caches of placements: they keep meshes, and so process groups with their threads, to the end of
    the process."""
    from torch.distributed.tensor import debug

    debug._clear_sharding_prop_cache()


def items_of_whole_tensors() -> None:
    """Let `item()`, `float(...)`, `bool(...)`, formats, `tolist()` and `numpy()` read the whole value of a DTensor: a
    collective unless every rank has it."""
    from torch.distributed.tensor import DTensor

    DTensor.__format__ = lambda self, form: format(self.item(), form) if form and not self.dim() else str(self)
    DTensor.tolist = lambda self: self.full_tensor().tolist()
    DTensor.numpy = lambda self, **options: self.full_tensor().numpy(**options)
    DTensor._op_dispatcher._custom_op_handlers[aten._local_scalar_dense.default] = _item


def _item(op, args, kwargs):
    return op(args[0].full_tensor(), *args[1:], **kwargs)


def on_data_set(write: Callable[[torch.Tensor, object], bool]) -> None:
    """Call `write(dtensor, value)` when a script sets `dtensor.data`; if it returns False, torch does what it does."""
    from torch.distributed.tensor import DTensor

    plain = torch.Tensor.data

    def set_data(self, value) -> None:
        if not write(self, value):
            plain.__set__(self, value)

    DTensor.data = property(lambda self: plain.__get__(self), set_data)
