"""Quantized weights in an exported forward graph: what read the weight reads it dequantized.

    W                   ->  dequantize(packed, absmax, scale, offset)
    W cast to bf16      ->  the same, straight to bf16
    transpose of W      ->  the same, as Conv1D's weights are packed transposed

Runs after the pass of the adapters, which find their layers by the weight, and before differentiation: nothing here
trains, so the gradients go past. The weight itself is no parameter of the graph any more. passes/canonicalize/clean.py
makes the backward dequantize again, so that nothing but the packed tensors is kept for it, or gathered.
"""

from __future__ import annotations

import torch
from torch import fx, nn

from ...adapt.qlora import QuantizedWeight, quantized_weights
from ...frontend.export import ROOT, Exported
from ...ops import autopar
from .forward_edit import CASTS, Editor, finish, reads_of

aten = torch.ops.aten


def quantize(exported: Exported, model: nn.Module) -> Exported:
    """Dequantize in place, for every weight that `Quantization.attach` marked in `model`, where the graph reads the
    weight."""
    for path, site in quantized_weights(model):
        for read in list(reads_of(exported, f"{path}.{site.parameter}")):
            casts = [user for user in read.users if user.target in CASTS]
            for source in (read, *casts):
                _replace(exported, path, site, source, [user for user in source.users if user not in casts])
    finish(exported)
    for path, site in quantized_weights(model):
        first = exported.ties.get(f"{path}.{site.parameter}", f"{path}.{site.parameter}")
        for name in [name for name, tied in exported.ties.items() if tied == first] or [first]:
            owner, _, leaf = f"{ROOT}.{name}".rpartition(".")
            exported.graph_module.get_submodule(owner)._parameters.pop(leaf, None)
    return exported


def _replace(exported: Exported, path: str, site: QuantizedWeight, source: fx.Node, users: list[fx.Node]) -> None:
    """Let these users of the weight in one dtype, `source`, read it dequantized to that dtype."""
    if not users:
        return
    edit = Editor.in_front_of(exported, next(node for node in source.graph.nodes if node in users))
    parts = {part: edit.parameter(f"{path}.{name}") for part, name in site.names.items()}
    arguments = [parts.get(part) for part in ("packed", "absmax", "scale", "offset")]
    weight = edit.call(autopar.dequantize.default, *arguments, site.quant_type, source.meta["val"].dtype)
    for user in users:
        if not site.is_transposed:
            user.replace_input_with(source, weight)
        elif user.target is aten.t.default:
            user.replace_all_uses_with(weight)
        else:
            user.replace_input_with(source, edit.call(aten.t.default, weight))
