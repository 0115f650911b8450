"""LoRA adapters in an exported forward graph, beside the ops that read the adapted parameters.

    linear(x, W)      ->  linear(x, W) + scaling * linear(linear(dropout(x), A), B)
    embedding(W, i)   ->  embedding(W, i) + scaling * linear(embedding(A.T, i), B)
    any op of W       ->  the same of W + scaling * (B A for each expert)

Runs before differentiation, so the adapters' gradients are autograd's, and sharding follows from the factors of the ops
that are added: where the base is column-parallel A is read whole and B cut by rows, where it is row-parallel A is cut
by columns and the output is a partial sum like the base's.
"""

from __future__ import annotations

import torch
from torch import fx

from ...adapt.lora_site import LORA_A, LORA_B, MAGNITUDE, LoraSite, is_factor, sites_of
from ...errors import AdaptError
from ...frontend.export import Captured, Exported
from ...ir.graph import operand, output_node
from ...ops import autopar
from ..canonicalize.random import number_streams, random_op
from .forward_edit import CASTS, Editor, check_reads, computed_from, finish, is_read, replace_value, uses_in, uses_of

aten = torch.ops.aten


def lora(exported: Exported, model: torch.nn.Module) -> Exported:
    """Add an adapter in place for every site that `LoRA.attach` marked in `model`; a site that has its adapter already
    stays.

    Raises AdaptError for a layer whose parameter goes into another op than the one that can be adapted, or into
    none."""
    for path, module, site in sites_of(model):
        if is_read(exported, f"{path}.{site.names[0]}"):
            continue
        name = f"{path}.{site.parameter}"
        uses = uses_of(exported, name) if site.kind == "parameter" else uses_in(exported, name, model, module)
        if not uses:
            raise AdaptError(
                f"{name} is not used in this call: its adapter would never train", fix="leave it out of the targets"
            )
        if site.kind == "parameter":
            for source in dict.fromkeys(computed_from(argument) for _, argument in uses):
                _whole(exported, path, site, source)
        else:
            for user, argument in uses:
                _add_branch(exported, path, module, site, user, argument)
    number_streams(exported.graph_module.graph)
    finish(exported)
    return exported


def check_gradients(captured: Captured) -> Captured:
    """Return the joint graph; raise AdaptError for adapters in it that no gradient reaches."""
    trained = {r.name for r in output_node(captured.graph).meta["roles"] if r.kind == "gradient"}
    roles = [n.meta["role"] for n in captured.graph.nodes if n.op == "placeholder"]
    lost = [
        r.name for r in roles if r.kind == "parameter" and r.trainable and is_factor(r.name) and r.name not in trained
    ]
    if lost:
        raise AdaptError(
            f"no gradient reaches {len(lost)} adapters, as behind a detach: {lost[0]}",
            fix="leave their layers out of the targets",
        )
    return captured


def _add_branch(exported: Exported, path: str, module, site: LoraSite, user: fx.Node, argument: fx.Node) -> None:
    """Add the adapter beside one linear or embedding op."""
    name, short = f"{path}.{site.parameter}", f"{path.rpartition('.')[2]}.{site.parameter}"
    fix = f'adapt the parameter itself: target_parameters=["{short}"]'
    check_reads(site.kind, name, user, argument, "beside which no adapter can stand", fix)
    edit = Editor.behind(exported, user)
    edit_a, edit_b = edit.within(LORA_A), edit.within(LORA_B)
    a, b = (edit.parameter(f"{path}.{n}") for n in site.names)
    dtype = user.meta["val"].dtype
    wide = dtype if computed_from(argument).op != "get_attr" else torch.promote_types(dtype, a.meta["val"].dtype)
    a, b = edit_a.cast(a, wide), edit_b.cast(b, wide)
    if site.kind == "embedding":
        hidden = edit_a.call(autopar.embedding.default, edit_a.call(aten.t.default, a), *user.args[1:])
    else:
        x = edit.cast(operand(user), wide)
        dropped = _dropout(edit, x, site.dropout) if module.training and site.dropout else x
        hidden = edit_a.call(autopar.linear.default, dropped, a)
    delta = edit_b.call(aten.mul.Tensor, edit_b.call(autopar.linear.default, hidden, b), site.scaling)
    base = edit.cast(user, wide)
    if site.use_dora:
        magnitude = edit.parameter(f"{path}.{MAGNITUDE}")
        weight = edit.cast(argument, wide)
        scale = edit.call(aten.div.Tensor, edit.cast(magnitude, wide), _length(edit, weight, a, b, site))
        if dropped is not x:  # the base's part of the change comes from what is left of the input
            more = edit.call(autopar.linear.default, dropped, weight)
            change = edit.call(aten.mul.Tensor, more, edit.call(aten.sub.Tensor, scale, 1.0))
            result = edit.call(
                aten.add.Tensor, base, edit.call(aten.add.Tensor, change, edit.call(aten.mul.Tensor, delta, scale))
            )
        else:
            result = edit.call(aten.mul.Tensor, edit.call(aten.add.Tensor, base, delta), scale)
    else:
        result = edit.call(aten.add.Tensor, base, delta)
    replace_value(user, edit.cast(result, dtype))


def _whole(exported: Exported, path: str, site: LoraSite, source: fx.Node) -> None:
    """Add the adapter to the parameter itself: (o, i), or (experts, o, i), (experts, i, o) if it is transposed. What is
    cast from it stays as it is: a cast that is used is a source of its own."""
    edit = Editor.behind(exported, source)
    a, b = (edit.cast(edit.parameter(f"{path}.{n}"), source.meta["val"].dtype) for n in site.names)
    shape = source.meta["val"].shape
    if len(shape) == 3:
        experts = shape[0]
        a = edit.call(aten.view.default, a, [experts, site.r, a.meta["val"].shape[1]])
        b = edit.call(aten.view.default, b, [b.meta["val"].shape[0], site.r, experts])
        b = edit.call(aten.permute.default, b, [2, 0, 1])
        if site.is_transposed:
            a, b = edit.call(aten.transpose.int, b, 1, 2), edit.call(aten.transpose.int, a, 1, 2)
        product = edit.call(autopar.matmul.default, b, a)
    else:
        product = edit.call(aten.mm.default, b, a)
    casts = tuple(user for user in source.users if user.target in CASTS)
    replace_value(
        source, edit.call(aten.add.Tensor, source, edit.call(aten.mul.Tensor, product, site.scaling)), but=casts
    )


def _length(edit: Editor, weight: fx.Node, a: fx.Node, b: fx.Node, site: LoraSite) -> fx.Node:
    """Return the lengths (o) of the rows of W + scaling * B A, constants to the gradient (section 4.3 of
    arXiv 2402.09353)."""
    product = edit.call(aten.mul.Tensor, edit.call(aten.mm.default, b, a), site.scaling)
    changed = edit.call(aten.detach.default, edit.call(aten.add.Tensor, weight, product))
    return edit.call(
        aten.sqrt.default, edit.call(aten.sum.dim_IntList, edit.call(aten.mul.Tensor, changed, changed), [1])
    )


def _dropout(edit: Editor, x: fx.Node, p: float) -> fx.Node:
    plain = edit.call(aten.dropout.default, x, p, True)
    with edit.graph.inserting_before(plain), fx.traceback.preserve_node_meta(), fx.traceback.set_current_meta(plain):
        drawn = random_op(edit.exported.graph_module, plain)
    drawn.meta["val"] = plain.meta["val"]
    plain.replace_all_uses_with(drawn)
    edit.graph.erase_node(plain)
    return drawn
