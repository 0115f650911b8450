"""Layers that a forward moves to a type or a device, as routers of experts do with `self.classifier.to(dtype)`.

Where the layer is there already that is nothing. Elsewhere eager torch would change the parameters themselves in the
first call, under the optimizer that holds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..errors import CaptureError


@contextmanager
def layers_stay() -> Iterator[None]:
    """Inside, a module that is moved to where it is stays as it is; to move one elsewhere raises CaptureError."""
    plain = nn.Module._apply

    def stay(self: nn.Module, move, recurse: bool = True) -> nn.Module:
        for name, tensor in [*self.named_parameters(recurse=recurse), *self.named_buffers(recurse=recurse)]:
            moved = move(tensor)
            if (moved.dtype, moved.device) != (tensor.dtype, tensor.device):
                raise CaptureError(
                    f"the forward moves {type(self).__name__}.{name} from {tensor.dtype} on {tensor.device} to "
                    f"{moved.dtype} on {moved.device}",
                    shape=tuple(tensor.shape),
                    fix=f"move it before compile: layer.to({moved.dtype})",
                )
        return self

    nn.Module._apply = stay  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = plain  # type: ignore[method-assign]
