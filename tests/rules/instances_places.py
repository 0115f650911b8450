"""Instances of views, of ops that take and put pieces of tensors, and of those that make tensors from nothing."""

from __future__ import annotations

import torch

from .instances import op, real, whole
from .rule_check import zeros_node

x = real(4, 5, 6)

# views
op("view _unsafe_view reshape", real(4, 5, 12), [4, 5, 3, 4])
op("view reshape", real(4, 5, 3, 4), [4, 5, -1])
op("flatten.using_ints", real(4, 5, 6), 0, 1)
op("unflatten.int", real(4, 12), -1, [3, 4])
op("permute", x, [2, 0, 1])
op("transpose.int", x, -1, 0)
op("t", real(5, 6))
op("t", real(5))
op("unsqueeze", x, -1)
op("unsqueeze", x, 1)
op("squeeze", real(4, 1, 5))
op("squeeze.dim", real(4, 1, 5), 1)
op("squeeze.dim", real(4, 2, 5), 1)
op("squeeze.dims", real(4, 1, 5, 1), [1, -1])
op("expand", real(4, 1, 6), [3, -1, 5, 6])
op("repeat", real(4, 1, 6), [2, 1, 5, 3])
op("repeat", real(4, 6), [3, 1])
op("view_as_complex", real(5, 6, 2))
op("view_as_real", torch.complex(real(5, 6), real(5, 6)))

# Fourier transforms
op("_fft_c2c", torch.complex(real(4, 5, 6), real(4, 5, 6)), [1], 0, True)
op("_fft_r2c", real(4, 5, 6), [2], 0, True)
op("_fft_c2r", torch.complex(real(4, 5, 4), real(4, 5, 4)), [2], 0, 6)

# pieces and places
for dim, size in ((1, 4), (1, 5), (0, 5), (-1, 3)):
    op("split.Tensor unsafe_split.Tensor", real(5, 12, 3), size, dim)
for sizes in ([4, 4, 4], [6, 6], [3, 9], [12]):
    op("split_with_sizes unsafe_split_with_sizes split_with_sizes_copy", real(5, 12), sizes, 1)
op("cat", [real(5, 4), real(5, 4), real(5, 4)], 1)
op("cat", [real(5, 4), real(5, 3)], -1)
op("cat", [real(6, 5), zeros_node(6, 5)])
op("stack", [real(5, 6), real(5, 6)], 1)
op("unbind.int", real(5, 3, 6), 1)
for start, end, step in (
    (0, 4, 1), (4, 8, 1), (8, 99, 1), (-4, 2**63 - 1, 1), (2, 6, 1), (0, 12, 1), (0, 12, 2), (6, 12, 1), (3, 4, 1),
):  # fmt: skip
    op("slice.Tensor", real(5, 12), 1, start, end, step)
    piece = real(5, 12)[:, slice(start if start >= 0 else 12 + start, end, step)]
    op("slice_backward", torch.randn_like(piece), [5, 12], 1, start, end, step)
    op("slice_scatter", real(5, 12), torch.randn_like(piece), 1, start, end, step)
op("slice.Tensor", real(5, 6))
op("select.int", real(5, 4, 6), 1, 2)
op("select_backward", real(5, 6), [5, 4, 6], 1, -1)
op("select_scatter", real(5, 4, 6), real(5, 6), 1, 2)
op("index_select", real(5, 4, 6), 1, whole(4, 8))
op("index_add", real(5, 4, 6), 1, whole(4, 7), real(5, 7, 6))
op("index_copy", real(5, 4, 6), 1, torch.tensor([2, 0]), real(5, 2, 6))
op("gather", real(4, 5, 6), 1, whole(5, 4, 8, 6))
op("gather", real(4, 5, 6), -1, whole(6, 3, 5, 1))
op("gather", real(4, 5, 6), 2, whole(6, 1, 5, 1))
place = torch.argsort(real(4, 5, 6), 1)[:, :3]
op("scatter.src scatter_add", real(4, 5, 6), 1, place, real(4, 3, 6))
op("scatter.src", real(4, 5, 6), 1, place[:2], real(4, 3, 6))
op("scatter_add", zeros_node(4, 5, 6), 1, place, real(4, 3, 6))
op("scatter.value", real(4, 5, 6), 1, place, 0)
op("scatter.value", real(4, 5, 6), 1, place, 2.0)
op("scatter_reduce.two", real(4, 5, 6), 1, place, real(4, 3, 6), "amax")
op("scatter_reduce.two", real(4, 5, 6), 1, place, real(4, 3, 6), "sum")
for indices in (
    [whole(4, 7)], [None, whole(5, 8)], [whole(4, 5, 1), whole(5, 8)], [whole(4, 6), None, whole(6, 6)], [whole(4)],
):  # fmt: skip
    op("index.Tensor _unsafe_index.Tensor", real(4, 5, 6), indices)
for accumulate in (False, True):
    for source in (real(7, 5, 6), zeros_node(7, 5, 6)):
        op("index_put _unsafe_index_put", source, [torch.tensor([3, 0, 6, 1])], real(4, 5, 6), accumulate)
        op("index_put", source, [None, torch.tensor([4, 0])], real(2, 6), accumulate)
        op("index_put", source, [torch.tensor([4, 0]), torch.tensor([[4], [1], [0], [2]])], real(6), accumulate)
op("index_put", zeros_node(7, 6), [whole(7, 4, 5)], real(4, 5, 6), True)

# made from nothing
op("zeros ones empty.memory_format", [5, 6], dtype=torch.float64)
op("full", [5, 6], 3.0)
op("new_zeros new_ones new_empty", real(5, 6), [5, 6])
op("new_zeros", real(3), [5, 6])
op("new_full", real(3), [5, 6], 2.0)
op("scalar_tensor", 2.0)
op("arange", 6)
op("arange.start", 1, 8)
op("arange.start_step", 2, 17, 2)
op("arange.start_step", 9, 2, -1)
op("arange.start_step", 0.0, 1.0, 0.1)
op("eye", 5)
op("linspace", 0, 1, 5)
