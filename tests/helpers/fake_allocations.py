"""Count what the body of an op allocates on another device, on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from autopar._torch import TorchDispatchMode, fake_mode, storage_key, tree_flatten


class Count(TorchDispatchMode):
    """Bytes of the live storages that ops inside make; `ops` are their names. Kernels of attention's backward allocate
    `inside_bytes` themselves, which fake ones do not."""

    def __init__(self, known: list[torch.Tensor], inside_bytes: int = 0):
        super().__init__()
        self.inside_bytes = inside_bytes
        self.live_bytes = self.peak_bytes = 0
        self.ops: list[str] = []
        self.keys = {storage_key(t) for t in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        self.ops.append(func.name().split("::")[1])
        for value in tree_flatten(result)[0]:
            if isinstance(value, torch.Tensor) and storage_key(value) not in self.keys:
                memory = value.untyped_storage()
                self.keys.add(key := storage_key(value))
                self.live_bytes += memory.nbytes()
                weakref.finalize(memory, self.free, key, memory.nbytes()).atexit = False
        inside = self.inside_bytes if self.ops[-1].endswith("attention_backward") else 0
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + inside)
        return result

    def free(self, key: int, size: int) -> None:
        self.keys.discard(key)
        self.live_bytes -= size


def counted(
    body: Callable, make: Callable[[], list], inside: Callable[[list], int] = lambda arguments: 0
) -> tuple[object, list, Count]:
    """(results, arguments, count) of a function of fake tensors; what `make` gives is there before. `inside`: bytes
    that the kernels of attention's backward allocate, by the arguments."""
    with fake_mode():
        arguments = make()
        with Count([a for a in arguments if isinstance(a, torch.Tensor)], inside(arguments)) as count:
            results = body(*arguments)
    return results, arguments, count


def nbytes(values) -> int:
    """Return the bytes of all tensors among these values."""
    return sum(v.numel() * v.element_size() for v in tree_flatten(values)[0] if isinstance(v, torch.Tensor))
