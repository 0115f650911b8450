"""Linear layers in FP8, in an exported forward graph: marked layers multiply 8-bit floats.

    linear(x, W)   ->  linear_in_fp8(x, W, recipe)

Runs before differentiation, which takes the op apart (autopar/ops/fp8_linear.py): in the joint graph quantizations and
the three products of a layer are nodes of their own, so an activation that several layers read is quantized once, a
weight is quantized where its shards are and gathered as codes, and each is sharded by its own rule.
"""

from __future__ import annotations

from torch import nn

from ...adapt.fp8 import sites_of
from ...errors import AdaptError
from ...frontend.export import Exported
from ...ops import autopar
from .forward_edit import Editor, check_reads, finish, uses_in


def fp8(exported: Exported, model: nn.Module) -> Exported:
    """Change in place every layer that `FP8.attach` marked in `model`, but not a second time.

    Raises AdaptError for a layer whose weight goes into another op than a linear, or into none."""
    for path, module, site in sites_of(model):
        name = f"{path}.weight"
        uses = uses_in(exported, name, model, module)
        if not uses:
            raise AdaptError(f"{name} is not used in this call", fix="leave the layer out by exclude_modules")
        for user, argument in uses:
            if user.target is autopar.linear_in_fp8.default:
                continue
            fix = f'exclude_modules=["{path.rpartition(".")[2]}"]'
            check_reads("linear", name, user, argument, "which does not multiply in FP8", fix)
            edit = Editor.in_front_of(exported, user)
            user.replace_all_uses_with(edit.call(autopar.linear_in_fp8.default, *user.args, site.recipe))
            user.graph.erase_node(user)
    finish(exported)
    return exported
