"""Fake quantization in an exported forward graph: the weights and inputs of marked layers, rounded to their grids.

    linear(x, W)      ->  linear(fake_quantize(x, ...), fake_quantize(W, ...))
    embedding(W, i)   ->  embedding(fake_quantize(W, ...), i)
    any op of W       ->  the same of fake_quantize(W, ...), for a stack of experts

A scale follows from the largest values of what shares it, as constants to the gradient, or is a parameter. Runs before
differentiation, so the gradients are autograd's, and sharding follows from the factors of the ops that are added: the
largest value of a tensor in parts is the largest of the parts' own, which is all that the devices have to tell each
other. A weight behind a cast, as in mixed precision, is rounded before it, in its own type; behind a transpose (GPT-2's
Conv1D), after it.
"""

from __future__ import annotations

import torch
from torch import fx, nn

from ...adapt.fake_quant import HIGH, LOW, OBSERVER, STACK, QuantSite, sites_of
from ...adapt.grid import Grid, at_least_float32, limits
from ...errors import AdaptError
from ...frontend.export import Exported
from ...ir.graph import operand
from ...ops import autopar
from .forward_edit import Editor, check_reads, finish, reads_of, uses_in

aten = torch.ops.aten
MARK = "fake_quant"  # in the metadata of a node: the layer that it quantizes a weight for


def fake_quant(exported: Exported, model: nn.Module) -> Exported:
    """Add fake quantization in place for every layer that `FakeQuant.attach` marked in `model`, but not a second time.

    Raises AdaptError for a layer whose weight goes into another op than a linear or an embedding, or into none."""
    done = {node.meta.get(MARK) for node in exported.graph_module.graph.nodes}
    for path, module, site in sites_of(model):
        name = f"{path}.{site.parameter}"
        if name in done:
            continue
        uses = uses_in(exported, name, model, module)
        if not uses:
            raise AdaptError(f"{name} is not used in this call", fix="leave it out of the targets, by exclude_modules")
        if site.kind == STACK:
            _stack(exported, path, site)
            continue
        for user, argument in uses:
            fix = f'exclude_modules=["{path.rpartition(".")[2]}"]'
            check_reads(site.kind, name, user, argument, "which reads no quantized weight", fix)
            _layer(Editor.in_front_of(exported, user), path, module, site, argument)
    finish(exported)
    return exported


def _layer(edit: Editor, path: str, module: nn.Module, site: QuantSite, argument: fx.Node) -> None:
    """Quantize what one op of a layer reads: its weight, and its input if that is asked for."""
    user = edit.node
    user.replace_input_with(argument, _weight(edit, path, site, argument))
    if (grid := site.activation_grid) is not None:
        x = operand(user)
        user.update_arg(0, _observed(edit, path, module, site, x) if site.observes else _dynamic(edit, x, grid))


def _stack(exported: Exported, path: str, site: QuantSite) -> None:
    """Let all that reads a stack of experts read it fake-quantized."""
    for read in list(reads_of(exported, f"{path}.{site.parameter}")):
        users = list(read.users)
        edit = Editor.in_front_of(exported, next(node for node in read.graph.nodes if node in users))
        rounded = _weight(edit, path, site, read)
        stored = edit.call(aten.transpose.int, rounded, -2, -1) if site.is_transposed else rounded
        for user in users:
            user.replace_input_with(read, stored)


def _weight(edit: Editor, path: str, site: QuantSite, argument: fx.Node) -> fx.Node:
    """Return the fake-quantized weight (o, i), or (experts, o, i), that takes the place of `argument`."""
    weight = argument
    while weight.op != "get_attr":
        weight = operand(weight)
    if site.is_transposed:
        transposed = (aten.transpose.int, weight, -2, -1) if site.kind == STACK else (aten.t.default, weight)
        weight = edit.call(*transposed)
    grid, shape = site.config.weight_grid, list(site.shape)
    grouped = grid.grouped(edit.call, weight, shape)
    if site.config.range_learning:
        scale = edit.parameter(f"{path}.{site.scale}")
        scale = edit.call(aten.unsqueeze.default, scale, -1) if grid.group_size is not None else scale
        rounded = _fake_quantize(edit, grouped, (scale, None), grid, site.grad_factor)
    else:
        rounded = _dynamic(edit, grouped, grid)
    rounded.meta[MARK] = f"{path}.{site.parameter}"
    whole = edit.call(aten.view.default, rounded, shape) if grid.group_size is not None else rounded
    return edit.cast(whole, argument.meta["val"].dtype)


def _fake_quantize(edit: Editor, x: fx.Node, qparams: tuple, grid: Grid, *grad_factor: float) -> fx.Node:
    return edit.call(autopar.fake_quantize.default, x, *qparams, grid.qmin, grid.qmax, *grad_factor)


def _dynamic(edit: Editor, x: fx.Node, grid: Grid) -> fx.Node:
    """Return x (..., i) fake-quantized with scales that follow from its own values along the last dim."""
    constant = edit.call(aten.detach.default, x)
    found = grid.range_of(edit.call, constant, at_least_float32(x.meta["val"].dtype))
    return _fake_quantize(edit, x, grid.qparams(edit.call, *found), grid)


def _observed(edit: Editor, path: str, module: nn.Module, site: QuantSite, x: fx.Node) -> fx.Node:
    """Return x fake-quantized with the scale of the observed range, which in train mode takes in x first unless it is
    frozen. Without any range x stays as it is."""
    observer, config, grid = module.get_submodule(OBSERVER), site.config, site.activation_grid
    low, high = edit.buffer(f"{path}.{LOW}", observer.min_val), edit.buffer(f"{path}.{HIGH}", observer.max_val)
    if not observer.training or config.observer == "frozen":
        quantized = _fake_quantize(edit, x, grid.qparams(edit.call, low, high), grid)
        return edit.call(aten.where.self, edit.call(aten.isfinite.default, high), quantized, x)
    constant = edit.call(aten.detach.default, x)
    now = limits(edit.call, constant, list(range(constant.meta["val"].dim())), False, observer.min_val.dtype)
    if config.observer == "minmax":
        new = edit.call(aten.minimum.default, low, now[0]), edit.call(aten.maximum.default, high, now[1])
    else:
        new = [_moved(edit, old, value, config.averaging_constant) for old, value in zip((low, high), now)]
    for old, value in zip((low, high), new):
        edit.call(aten.copy_.default, old, value)
    return _fake_quantize(edit, x, grid.qparams(edit.call, *new), grid)


def _moved(edit: Editor, old: fx.Node, value: fx.Node, share: float) -> fx.Node:
    """Return (1 - share) * old + share * value; the first value as it is."""
    call = edit.call
    step = call(aten.mul.Tensor, call(aten.sub.Tensor, value, old), share)
    return call(aten.where.self, call(aten.isfinite.default, old), call(aten.add.Tensor, old, step), value)
