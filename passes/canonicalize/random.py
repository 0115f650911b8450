"""Random ops of ATen -> formulas in `autopar::dropout`, `uniform` and `normal`, which draw by counter
(autopar/ops/counter_rng.py).

The state that they all read is a buffer of the exported graph, which becomes the joint graph's "random" placeholder.
Streams are numbered in graph order. An in-place op becomes a copy of the drawn values into the tensor; differentiation
makes that functional.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import fx

from ..._torch import schema_of
from ...errors import UnsupportedOpError
from ...ir.graph import RANDOM_STATE, operand
from ...ops import autopar
from ...ops.counter_rng import contiguous_strides
from ...ops.streams import STREAM, stream_of
from ...rules.reading import bound

aten = torch.ops.aten
ALPHA = (
    -1.7580993408473766
)  # what SELU tends to for very negative inputs: -scale * alpha (Klambauer et al., arXiv 1706.02515)


@dataclass(frozen=True)
class Draws:
    """A random op that is being replaced. What its methods and formulas make is inserted before it."""

    graph_module: fx.GraphModule
    node: fx.Node

    @cached_property
    def arguments(self) -> dict[str, object]:
        """Return the op's arguments by schema name, tensors as proxies."""
        return {k: self.proxy(v) if isinstance(v, fx.Node) else v for k, v in bound(self.node).items()}

    @property
    def value(self) -> torch.Tensor:
        """Return the op's fake result."""
        return self.node.meta["val"]

    @cached_property
    def _tracer(self):
        return fx.proxy.GraphAppendingTracer(self.node.graph)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return a proxy of a node, on which ops of Python add nodes."""
        return fx.Proxy(node, self._tracer)

    @cached_property
    def input(self) -> fx.Proxy:
        """Return the op's first argument, whatever its name."""
        return self.proxy(operand(self.node))

    @property
    def state(self) -> fx.Node:
        """Return the node that reads the random state, whose buffer is registered when it is first asked for."""
        graph = self.node.graph
        if not hasattr(self.graph_module, RANDOM_STATE):
            self.graph_module.register_buffer(RANDOM_STATE, torch.zeros(2, dtype=torch.int64))
            with graph.inserting_before(next(iter(graph.nodes))):
                graph.get_attr(RANDOM_STATE).meta["val"] = getattr(self.graph_module, RANDOM_STATE)
        return next(n for n in graph.nodes if n.op == "get_attr" and n.target == RANDOM_STATE)

    def dropout(self, x: fx.Proxy, p: float, shape: torch.Size) -> fx.Proxy:
        """Drop elements of x, of global shape `shape`, with probability p."""
        return autopar.dropout.default(x, self.proxy(self.state), p, 0, 0, contiguous_strides(shape))

    def uniform(self) -> fx.Proxy:
        """Draw uniform numbers in the shape and type of the result."""
        return self.draw(autopar.uniform.default, self.value.shape, self.value.dtype)

    def normal(self) -> fx.Proxy:
        """Draw normal numbers in the shape and type of the result."""
        return self.draw(autopar.normal.default, self.value.shape, self.value.dtype)

    def happens(self, p: float | fx.Proxy, shape=None) -> fx.Proxy:
        """Draw bools that are True with probability p, in fine steps also where the result's type has coarse ones."""
        dtype = torch.promote_types(self.value.dtype, torch.float32)
        number = self.draw(autopar.uniform.default, self.value.shape if shape is None else shape, dtype)
        return (aten.lt.Tensor if isinstance(p, fx.Proxy) else aten.lt.Scalar)(number, p)

    def draw(self, op, shape, dtype: torch.dtype) -> fx.Proxy:
        """Draw numbers of a global shape by `op`, in float64 if `dtype` is no float type."""
        dtype = dtype if dtype.is_floating_point else torch.float64
        strides = contiguous_strides(shape)
        return op(self.proxy(self.state), list(shape), 0, 0, strides, dtype=dtype, device=self.value.device)

    def cast(self, x: fx.Proxy) -> fx.Proxy:
        """Cast x to the type of the result."""
        return aten._to_copy.default(x, dtype=self.value.dtype)


def random_op(graph_module: fx.GraphModule, node: fx.Node) -> fx.Node | None:
    """Return the node in the place of a random op, None if there is no formula for it."""
    name = schema_of(node.target).name.removeprefix("aten::")
    draws = Draws(graph_module, node)
    result = FORMULAS[name.removesuffix("_")](draws, **draws.arguments)
    if result is not None and name.endswith("_") and result is not draws.input:
        result = aten.copy_.default(draws.input, result)
    return None if result is None else result.node


# one formula an op; arguments are named as in its schema
# ------------------------------------------------------------------


def _dropout(draws: Draws, p, train, **_) -> fx.Proxy:
    return draws.dropout(draws.input, p, draws.value.shape) if train and p else draws.input


def _feature_dropout(draws: Draws, p, train, **_) -> fx.Proxy:
    """Drop whole channels of (N, C, ...)."""
    if not (train and p):
        return draws.input
    if p == 1:
        return aten.mul.Tensor(draws.input, 0.0)
    return aten.mul.Tensor(draws.input, aten.div.Tensor(draws.cast(draws.happens(1 - p, _channels(draws))), 1 - p))


def _alpha_dropout(draws: Draws, p, train, shape=None, **_) -> fx.Proxy:
    """Set dropped elements to ALPHA, then scale and shift all to keep mean and variance: section 3 of
    arXiv 1706.02515."""
    if not (train and p):
        return draws.input
    if p == 1:
        return aten.mul.Tensor(draws.input, 0.0)
    a = ((1 - p) * (1 + p * ALPHA**2)) ** -0.5
    masked = aten.where.ScalarOther(draws.happens(1 - p, shape), draws.input, ALPHA)
    return aten.add.Tensor(aten.mul.Tensor(masked, a), -a * p * ALPHA)


def _feature_alpha_dropout(draws: Draws, p, train, **_) -> fx.Proxy:
    return _alpha_dropout(draws, p, train, _channels(draws))


def _channels(draws: Draws) -> tuple[int, ...]:
    """Return (N, C, 1, ...), the shape of one number a channel."""
    return (*draws.value.shape[:2], *(1 for _ in draws.value.shape[2:]))


def _bernoulli(draws: Draws, p=None, **_) -> fx.Proxy:
    return draws.cast(draws.happens(draws.input if p is None else p))


def _uniform(draws: Draws, **bounds) -> fx.Proxy:
    low, high = bounds["from"], bounds["to"]
    return aten.add.Tensor(aten.mul.Tensor(draws.uniform(), high - low), low)


def _normal(draws: Draws, mean=0.0, std=1.0, **_) -> fx.Proxy:
    return aten.add.Tensor(aten.mul.Tensor(draws.normal(), std), mean)


def _randint(draws: Draws, high, low=0, **_) -> fx.Proxy | None:
    if isinstance(high, fx.Proxy) or high - low > 2**24:  # fp32 counts no further
        return None
    whole = aten.floor.default(aten.mul.Tensor(draws.uniform(), float(high - low)))
    return draws.cast(aten.add.Tensor(whole, float(low)))


def _exponential(draws: Draws, lambd=1.0, **_) -> fx.Proxy:
    """Return -log(1 - u) / lambda; never zero, since its logarithm is often taken next."""
    log = aten.neg.default(aten.log1p.default(aten.neg.default(draws.uniform())))
    return aten.div.Tensor(aten.clamp_min.default(log, torch.finfo(draws.value.dtype).eps / 4), lambd)


def _rrelu(draws: Draws, lower=1 / 8, upper=1 / 3, training=False, **_) -> fx.Proxy | None:
    """Multiply every negative element by a slope of its own; in evaluation the op draws nothing."""
    if not training:
        return None
    slope = aten.add.Tensor(aten.mul.Tensor(draws.uniform(), upper - lower), lower)
    return aten.where.self(aten.le.Scalar(draws.input, 0), aten.mul.Tensor(draws.input, slope), draws.input)


def _multinomial(draws: Draws, num_samples, replacement=False, **_) -> fx.Proxy | None:
    """Return the class in whose share of the sum of all weights a uniform number falls, (..., c) -> (..., samples)."""
    if num_samples > 1 and not replacement:
        return None
    weights = operand(draws.node).meta["val"]
    wide = aten._to_copy.default(draws.input, dtype=torch.promote_types(weights.dtype, torch.float32))
    ends = aten.cumsum.default(wide, -1)
    number = draws.draw(autopar.uniform.default, draws.value.shape, torch.promote_types(weights.dtype, torch.float32))
    number = aten.mul.Tensor(number, aten.sum.dim_IntList(wide, [-1], True))
    passed = aten.le.Tensor(aten.unsqueeze.default(ends, -2), aten.unsqueeze.default(number, -1))
    return aten.clamp_max.default(aten.sum.dim_IntList(passed, [-1]), weights.shape[-1] - 1)


FORMULAS: dict[str, Callable[..., fx.Proxy | None]] = {
    "dropout": _dropout,
    "feature_dropout": _feature_dropout,
    "alpha_dropout": _alpha_dropout,
    "feature_alpha_dropout": _feature_alpha_dropout,
    "bernoulli": _bernoulli,
    "rand": lambda draws, **_: draws.uniform(),
    "rand_like": lambda draws, **_: draws.uniform(),
    "uniform": _uniform,
    "randn": lambda draws, **_: draws.normal(),
    "randn_like": lambda draws, **_: draws.normal(),
    "normal": _normal,
    "randint": _randint,
    "randint_like": _randint,
    "exponential": _exponential,
    "rrelu": _rrelu,
    "multinomial": _multinomial,
}


def has_formula(node: fx.Node) -> bool:
    """Return whether the node is a random op of ATen that a formula replaces."""
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    return schema is not None and schema.name.startswith("aten::") and schema.name[6:].removesuffix("_") in FORMULAS


def number_streams(graph: fx.Graph) -> None:
    """Give every drawing op its stream number, in graph order."""
    drawing = [n for n in graph.nodes if stream_of(n) is not None]
    for number, node in enumerate(drawing):
        node.update_arg(STREAM[node.target], number)


def refuse_the_rest(graph_module: fx.GraphModule) -> None:
    """Raise UnsupportedOpError listing every op that draws from torch's own generator, those in nested graphs (of a
    condition) included."""
    graphs = [m.graph for m in graph_module.modules() if isinstance(m, fx.GraphModule)]
    found = [f"{n.name} ({n.target})" for graph in graphs for n in graph.nodes if _draws_from_torch(n)]
    if found:
        raise UnsupportedOpError(
            f"{len(found)} random ops would draw other numbers on every device: {', '.join(found[:8])}"
            + (" ..." if len(found) > 8 else ""),
            node=found[0],
            fix="use one of " + ", ".join(FORMULAS),
        )


def _draws_from_torch(node: fx.Node) -> bool:
    """Return whether the op is tagged as drawing and does: some layers draw only for a dropout that is not zero, in
    training."""
    if node.op != "call_function" or torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    given = bound(node)
    p = given.get("dropout_p", given.get("dropout", 1.0))
    return p != 0 and given.get("train", given.get("training", True))
