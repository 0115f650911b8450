"""Attention of a sequence that is cut in plain blocks, as one writes it by hand: a ring of sends and receives, and
Ulysses' all-to-alls. For benchmarks/peers_sequence.py.

The ring is that of ring-flash-attention in its plain form: keys and values go all the way round while a device computes
with what it has, blocks that a causal mask closes are not computed with, and the gradients of a block go round with it.
Both work on torch's own CPU kernel. Tensors are (b, h, rows, d) of a device, in fp32.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

aten = torch.ops.aten


def _passed_on(tensors: list[Tensor]) -> tuple[list[Tensor], list]:
    """Start to send tensors to the next rank and to receive as many from the one before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = [torch.empty_like(x) for x in tensors]
    works = [dist.irecv(x, (rank - 1) % size, tag=i) for i, x in enumerate(received)]
    works += [dist.isend(x, (rank + 1) % size, tag=i) for i, x in enumerate(tensors)]
    return received, works


def _wait(works: list) -> None:
    for work in works:
        work.wait()


class Ring(torch.autograd.Function):
    """Causal attention whose keys and values go round."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank, size = dist.get_rank(), dist.get_world_size()
        held, out, lse = [k.contiguous(), v.contiguous()], None, None
        for step in range(size):
            following, works = _passed_on(held) if step + 1 < size else (held, [])
            if step <= rank:
                more, more_lse = aten._scaled_dot_product_flash_attention_for_cpu(q, *held, 0.0, step == 0)
                if out is None:
                    out, lse = more, more_lse
                else:
                    total = torch.logaddexp(lse, more_lse)
                    out = out * (lse - total).exp().unsqueeze(-1) + more * (more_lse - total).exp().unsqueeze(-1)
                    lse = total
            _wait(works)
            held = following
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = ctx.saved_tensors
        rank, size = dist.get_rank(), dist.get_world_size()
        held, dq, sums = [k.contiguous(), v.contiguous()], torch.zeros_like(q), [torch.zeros_like(x) for x in (k, v)]
        for step in range(size):
            following, works = _passed_on(held) if step + 1 < size else (held, [])
            if step <= rank:
                found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    grad, q, *held, out, lse, 0.0, step == 0
                )
                dq += found[0]
                for total, more in zip(sums, found[1:]):
                    total += more
            sums, of_sums = _passed_on([x.contiguous() for x in sums])  # behind the last step they are at home
            _wait(works + of_sums)
            held = following
        return dq, *sums


def ring(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention of all ranks' keys to this rank's queries."""
    return Ring.apply(q, k, v)


class Exchange(torch.autograd.Function):
    """An all-to-all of equal parts of dim 0, whose gradient is one too."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x = x.contiguous()
        result = torch.empty_like(x)
        dist.all_to_all_single(result, x)
        return result

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return Exchange.apply(grad)


def ulysses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the same from all rows of some heads; heads of queries and of keys are as many."""
    size = dist.get_world_size()
    whole = []
    for x in (q, k, v):
        b, h, rows, d = x.shape
        parts = Exchange.apply(x.reshape(b, size, h // size, rows, d).transpose(0, 1))  # (sources, b, h', rows, d)
        whole.append(parts.permute(1, 2, 0, 3, 4).reshape(b, h // size, size * rows, d))
    y = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
    b, h, rows, d = y.shape
    parts = Exchange.apply(y.reshape(b, h, size, rows // size, d).permute(2, 0, 1, 3, 4))
    return parts.transpose(0, 1).reshape(b, h * size, rows // size, d)
