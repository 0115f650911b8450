"""Price linear layers in FP8, beside the bytes that their ops read and write.

Products take the profile's curve of their kind, "fp8" or "fp8_block", less the quantization that it contains, which
ops of their own do here. A device without such products dequantizes the codes and multiplies in fp32. Bytes that go
through memory between the kernels of one op are said for each element of an argument:

    quantization      x is read twice, for the largest value and for the codes; x * scale is written and read in fp32
    a gradient        codes that are read along their other dim are copied in that order first
    dequantization    a number is written and read in fp32 for each code
"""

from __future__ import annotations

from torch import fx

from ..hardware.profile import Hardware
from ..ir.graph import tensor_arguments
from ..ops import autopar

QUANTIZE = {autopar.fp8_rows.default, autopar.fp8_columns.default, autopar.fp8_blocks.default}
PRODUCTS = {
    autopar.fp8_linear.default: (), autopar.fp8_linear_dx.default: (2,), autopar.fp8_linear_dw.default: (0, 2),
}  # fmt: skip
WIDE_BYTES = 4  # of a number in fp32
SCALED = 2 * WIDE_BYTES  # written and read
COPIED = 2  # of a code


def kind_of(node: fx.Node, hardware: Hardware) -> str | None:
    """Return the kind of products that a product in FP8 is on such a device, None for another op, or if it has
    none."""
    if node.target not in PRODUCTS:
        return None
    scale = tensor_arguments(node)[1].meta["val"]
    kind = "fp8_block" if scale.dim() else "fp8"
    return kind if "fp8" in hardware.flops_per_second and kind in hardware.products else None


def inner_bytes(node: fx.Node, hardware: Hardware) -> float:
    """Return the bytes that go through the memory of one device with whole tensors between the kernels of an op; they
    are cut as its first argument is."""
    values = [a.meta["val"] for a in tensor_arguments(node)]
    if node.target in QUANTIZE:
        return float(values[0].numel() * (SCALED + values[0].element_size()))
    if node.target is autopar.fp8_tensor.default:
        return float(values[0].numel() * SCALED)
    if node.target not in PRODUCTS:
        return 0.0
    if kind_of(node, hardware) is None:
        return float(SCALED * (values[0].numel() + values[2].numel()))
    return float(COPIED * sum(values[i].numel() for i in PRODUCTS[node.target]))


def flops_of(node: fx.Node) -> float:
    """Return the FLOPs of a product in FP8 on global shapes, 0 of another op."""
    if node.target not in PRODUCTS:
        return 0.0
    a, _, b, _ = (argument.meta["val"] for argument in tensor_arguments(node))
    is_weight = node.target is autopar.fp8_linear_dw.default
    return 2.0 * a.numel() * (b.shape[-1] if is_weight else b.numel() // a.shape[-1])
