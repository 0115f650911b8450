"""Layers that a forward moves to a type or a device, as routers of experts do with `self.classifier.to(dtype)`.

Where the layer is there already that is nothing. Elsewhere eager torch would change the parameters themselves in the
first call, under the optimizer that holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from .._torch import moves_of_modules
from ..errors import CaptureError


@contextmanager
def layers_stay() -> Iterator[None]:
    """Inside, a module that is moved to where it is stays as it is; to move one elsewhere raises CaptureError."""

    def stay(layer: nn.Module, move: Callable[[Tensor], Tensor]) -> nn.Module:
        for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
            moved = move(tensor)
            if (moved.dtype, moved.device) != (tensor.dtype, tensor.device):
                raise CaptureError(
                    f"the forward moves {type(layer).__name__}.{name} from {tensor.dtype} on {tensor.device} to "
                    f"{moved.dtype} on {moved.device}",
                    shape=tuple(tensor.shape),
                    fix=f"move it before compile: layer.to({moved.dtype})",
                )
        return layer

    with moves_of_modules(stay):
        yield
