"""Count the bytes that ops allocate and hold, on any tensors: also fake ones, and such without memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from .._torch import TorchDispatchMode, storage_key, tree_flatten


class LiveBytes(TorchDispatchMode):
    """A context: bytes of the live storages that ops inside make, beside those of tensors that are `known`; `ops` are
    the ops' names. Kernels of attention's backward allocate `inside_bytes` themselves, which only real ones do."""

    def __init__(self, known: Iterable[torch.Tensor], inside_bytes: int = 0):
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
                weakref.finalize(memory, self._free, key, memory.nbytes()).atexit = False
        inside = self.inside_bytes if self.ops[-1].endswith("attention_backward") else 0
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + inside)
        return result

    def _free(self, key: int, size: int) -> None:
        self.keys.discard(key)
        self.live_bytes -= size
