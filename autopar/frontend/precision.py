"""Trace a model under `precision="bf16"` or "fp16": it computes in bfloat16 or float16, its parameters stay as they
are.

* A parameter of a wider float type is cast where the forward first reads it, so what is gathered is the narrow copy.
  Its gradient is cast back where it is made, before it is reduced over devices (passes/canonicalize/upcast.py).
* Float inputs of the model are cast; those of `loss_fn` alone are not.
* Losses of torch.nn.functional compute on float32, as under torch.autocast, and a scalar loss is returned as float32.
  What torch has no kernel for in these types, on CPUs at least (decompositions of matrices, pairwise distances, some
  pooling), computes on float32 and gives the narrow type. Other ops compute in it, those with sums inside (softmax,
  norms, products) accumulate in float32 in torch's kernels.
* Persistent float buffers are cast like parameters. Others (rotary frequencies, say) are constants that models treat on
their
  own, and stay. So do batch norms: their statistics would not move in steps below 2**-8 of their size.

Gradients that float16 has no numbers for, too large or too small, are the business of torch.amp.GradScaler around the
loop (autopar/runtime/optimizers.py). `precision="fp32"` casts nothing: a float64 or a bfloat16 model runs
as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .._torch import tree_flatten, tree_map
from ..errors import StrategyError
from ..ir.graph import values_of

AUTO = "auto"  # what the hardware computes fastest in, see Hardware.precision
COMPUTE_DTYPE: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SYNONYMS = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}  # as torch says

LOSSES = {
    F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.cosine_embedding_loss, F.cross_entropy, F.ctc_loss,
    F.gaussian_nll_loss, F.hinge_embedding_loss, F.huber_loss, F.kl_div, F.l1_loss, F.margin_ranking_loss, F.mse_loss,
    F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss, F.nll_loss, F.poisson_nll_loss,
    F.smooth_l1_loss, F.soft_margin_loss, F.triplet_margin_loss, F.triplet_margin_with_distance_loss,
}  # fmt: skip

_LINALG = """
    cholesky cholesky_ex cond det eig eigh eigvals eigvalsh householder_product inv inv_ex ldl_factor ldl_factor_ex
    ldl_solve lstsq lu lu_factor lu_factor_ex lu_solve matrix_exp matrix_norm matrix_power matrix_rank norm pinv qr
    slogdet solve solve_ex solve_triangular svd svdvals tensorinv tensorsolve"""
_TORCH = """
    cholesky cholesky_inverse cholesky_solve corrcoef cov det inverse logdet lu_solve matrix_exp matrix_power orgqr
    ormqr pinverse qr slogdet svd triangular_solve cdist pdist"""
WIDE_INSIDE = (
    {getattr(torch.linalg, name) for name in _LINALG.split()}
    | {getattr(where, name) for where in (torch, Tensor) for name in _TORCH.split() if hasattr(where, name)}
    | {F.avg_pool3d, F.local_response_norm, F.lp_pool3d, F.pdist}
)


def precision_name(precision: str | torch.dtype) -> str:
    """Return the name in COMPUTE_DTYPE of a precision: that name, a synonym, or a type of torch. Raises StrategyError
    for an unknown one."""
    said = str(precision).removeprefix("torch.").lower()
    name = SYNONYMS.get(said, said)
    if name not in COMPUTE_DTYPE:
        raise StrategyError(
            f"no precision {precision!r} is known",
            fix=f"use one of {', '.join(sorted(COMPUTE_DTYPE))}, {', '.join(SYNONYMS)}, or torch's type of that name; "
            "fp32 runs a model in its own types",
        )
    return name


def compute_dtype(precision: str | torch.dtype) -> torch.dtype | None:
    """Return the type that a precision computes in, None for the model's own types. Raises StrategyError for an unknown
    one."""
    return COMPUTE_DTYPE[precision_name(precision)]


def reduce_type(name: str | torch.dtype | None) -> torch.dtype | None:
    """Return the type that gradients are reduced in, None for their own: see `Plan.reduce_dtype`. Raises StrategyError
    for one that is no narrow type."""
    dtype = None if name is None else compute_dtype(name)
    if name is not None and dtype is None:
        raise StrategyError(
            f"gradients cannot be reduced in {name!r}",
            fix="use bf16 or fp16, or leave reduce_dtype out: their own type",
        )
    return dtype


def state_type(name: str | torch.dtype | None) -> torch.dtype | None:
    """Return the type that an optimizer's state is kept in, None for that of the parameters: see `Plan.state_dtype`.
    Raises StrategyError for any but bfloat16: in float16 the squares of small gradients are zero."""
    dtype = None if name is None else compute_dtype(name)
    if name is not None and dtype is not torch.bfloat16:
        raise StrategyError(
            f"the state of an optimizer cannot be kept in {name!r}",
            fix="use bf16, or leave state_dtype out: the type of the parameters",
        )
    return dtype


def has_half(graph: fx.Graph) -> bool:
    """Return whether a graph computes something in float16, in which gradients vanish unless the loss is scaled."""
    return any(v.dtype is torch.float16 for n in graph.nodes if n.op == "call_function" for v in values_of(n))


def narrowed(tensor: object, dtype: torch.dtype | None):
    """Return a float tensor that is wider than `dtype` in that type, anything else as it is."""
    if dtype is None or not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype) if tensor.dtype.itemsize > dtype.itemsize else tensor


@contextmanager
def computing_in(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, modules of `model` read their parameters and buffers in `dtype`, and losses compute on float32."""
    if dtype is None:
        yield
        return
    copies: dict[int, Tensor] = {}

    def narrow(tensor: object):
        if id(tensor) not in copies:
            copies[id(tensor)] = narrowed(tensor, dtype)
        return copies[id(tensor)]

    changed = [module for module in model.modules() if not stays_wide(module)]
    before = [(module._parameters, module._buffers) for module in changed]
    buffers = [b for _, table in before for b in table.values() if b is not None]
    for module, (parameters, table) in zip(changed, before):
        persistent = table.keys() - module._non_persistent_buffers_set
        module.__dict__.update(
            _parameters=_Reading(parameters, parameters, narrow), _buffers=_Reading(table, persistent, narrow)
        )
    try:
        with _Widening():
            yield
    finally:
        for module, (parameters, table) in zip(changed, before):
            table.update({k: v for k, v in module._buffers.items() if v is not table.get(k)})  # assigned by the forward
            module.__dict__.update(_parameters=parameters, _buffers=table)
        for buffer in buffers:  # what a forward wrote into a copy
            copy = copies.get(id(buffer), buffer)
            if copy is not buffer and copy._version:
                buffer.copy_(copy)


def stays_wide(module: nn.Module) -> bool:
    """Return whether a module keeps its tensors in their own type, whatever the model computes in."""
    return isinstance(module, nn.modules.batchnorm._NormBase)


class _Reading(dict):
    """A module's table of tensors that gives those of some names through `read`, when they are asked for."""

    def __init__(self, table: dict, names, read: Callable):
        super().__init__(table)
        self._names, self._read = frozenset(names), read

    def __getitem__(self, name: str):
        value = super().__getitem__(name)
        return self._read(value) if name in self._names else value


class _Widening(TorchFunctionMode):
    """Loss functions get float32 for narrower floats; so do those of WIDE_INSIDE, whose results are narrowed."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in LOSSES:
            return function(*map(upcast, args), **{k: upcast(v) for k, v in kwargs.items()})
        if function not in WIDE_INSIDE and not (function is F.interpolate and kwargs.get("antialias")):
            return function(*args, **kwargs)
        narrow = next((x.dtype for x in tree_flatten((args, kwargs))[0] if upcast(x) is not x), None)
        args, kwargs = tree_map(upcast, (args, kwargs))
        return tree_map(lambda x: narrowed(x, narrow), function(*args, **kwargs))


def upcast(tensor: object):
    """Return a float tensor that is narrower than float32 as float32, anything else as it is."""
    if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype.itemsize < 4:
        return tensor.float()
    return tensor
