"""Inductor without Dynamo: a graph of ATen's ops is compiled as it is, and lets go of each argument after its last use.

What Dynamo makes of a function holds all of its arguments until it returns. A backward would so keep every saved value
to its end. It also counts recompilations, and runs what is beyond a few op by op.

Written for torch >= 2.11, < 2.16.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx


def inductor_options(options: Mapping[str, object]) -> dict[str, Any]:
    """Return options of Inductor as it takes them. Raises RuntimeError, as torch.compile does, if there is none of a
    name, or one has another type."""
    return torch._TorchCompileInductorWrapper(None, dict(options), None).config


def lower_as_collective(op: torch._ops.OpOverload) -> None:
    """Let Inductor take an op, whose first argument is sent, for the start of a collective, of which only run time
    knows how much comes: until the wait it writes nothing else to the memory of what is sent."""
    from torch._inductor import ir
    from torch._inductor.lowering import add_layout_constraint, constrain_to_fx_strides, lowerings, register_lowering
    from torch._inductor.virtualized import V

    if op in lowerings:
        return

    class Started(ir._CollectiveKernel):
        def codegen_size_asserts(self, wrapper) -> None:
            """Check nothing: sizes are read off the result."""

    def start(sent, *others):
        sent = ir.ExternKernel.require_contiguous(sent)
        with V.graph.fake_mode:
            value, tensors, constants, rebuild, symbols = Started.process_kernel(op, sent, *others)
        for tensor in tensors:
            tensor.realize()
        layout = Started.tensor_to_layout(value)
        return ir.TensorBox.create(Started(layout, op, tensors, constants, rebuild, unbacked_bindings=symbols))

    add_layout_constraint(op, constrain_to_fx_strides)
    register_lowering(op, type_promotion_kind=None)(start)


@dataclass(frozen=True)
class Replay:
    """Says how a program is recorded as a CUDA graph and replayed, where torch finds nothing that forbids it. `fixed`:
    the positions of arguments that stay where they are in memory, parameters and buffers; others are copied to where
    the recorded kernels read them, unless a recorded program has put them there."""

    fixed: tuple[int, ...]
    is_backward: bool


class InductorProgram:
    """Runs what Inductor makes of a graph for the forms of some values: numbers, and tensors with their sizes, strides
    and types. `open_dims`: by position those dims of tensors, and those numbers (as dim 0), that may have other sizes.
    Raises what compiling raises."""

    def __init__(
        self,
        module: fx.GraphModule,
        values: Sequence[Any],
        open_dims: Mapping[int, Collection[int]],
        options: Mapping[str, object],
        replay: Replay | None = None,
    ) -> None:
        from torch._dynamo.utils import GmWrapper
        from torch._functorch import config as functorch_config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        mode, inputs = _opened(values, open_dims)
        # arguments may be parameters; the cache of AOTAutograd does not look at what a replay says, Inductor's does
        is_kept = functorch_config.enable_autograd_cache and replay is None
        with torch.no_grad(), functorch_config.patch(enable_autograd_cache=is_kept):
            self.run: Callable[[list], Sequence] = compile_fx(
                GmWrapper(module, list),
                inputs,
                _recorded(compile_fx_inner, len(inputs), replay) if replay else compile_fx_inner,
                config_patches=dict(options),
            )
        self.inputs = [list(_numbers(value)) for value in inputs]
        symbolic = [n for numbers in self.inputs for n in numbers if isinstance(n, torch.SymInt)]
        self.env = mode.shape_env
        self.guards = self.env.produce_guards_expression(symbolic, ignore_static=False) if symbolic else None

    def serves(self, values: Sequence[Any]) -> bool:
        """Return whether the program is right for values, whose types are those that it was made for."""
        found: list[int] = []
        for value, numbers in zip(values, self.inputs):
            for here, known in zip(_numbers(value), numbers):
                if isinstance(known, torch.SymInt):
                    found.append(here)
                elif here != known:
                    return False
        return self.guards is None or self.env.evaluate_guards_expression(self.guards, found)


def _recorded(compile_inner: Callable, count: int, replay: Replay) -> Callable:
    """Return what compiles a graph of so many arguments, behind its constants, such that torch knows which stay in
    place, and that values of a forward live until its backward: alone, torch takes both for calls of inference."""

    def compile_recorded(graph: fx.GraphModule, inputs: Sequence, **given: Any) -> Any:
        constants = len(inputs) - count
        fixed = [*range(constants), *(constants + place for place in replay.fixed)]
        kinds = {"static_input_idxs": fixed, "is_inference": False, "is_backward": replay.is_backward}
        return compile_inner(graph, inputs, **given | kinds)

    return compile_recorded


def _opened(values: Sequence[Any], open_dims: Mapping[int, Collection[int]]) -> tuple[Any, list[Any]]:
    """Return fake values of the same forms, with some sizes open, and their mode."""
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    env = ShapeEnv()
    mode, inputs = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env), list[Any]()
    for place, value in enumerate(values):
        dims, source = open_dims.get(place, ()), ConstantSource(f"value_{place}")
        if isinstance(value, torch.Tensor):
            sizes = [DimDynamic.DUCK if dim in dims else DimDynamic.STATIC for dim in range(value.dim())]
            context: Any = StatelessSymbolicContext(dynamic_sizes=sizes) if dims else None
            inputs.append(
                mode.from_tensor(value.detach(), static_shapes=not dims, symbolic_context=context, source=source)
            )
        elif dims:
            symbol = env.create_symbol(value, source, DimDynamic.DUCK, None)
            inputs.append(env.create_symintnode(symbol, hint=value, source=source))
        else:
            inputs.append(value)
    return mode, inputs


def _numbers(value: Any) -> Iterator[Any]:
    """Iterate over the sizes and strides of a tensor, or return a number."""
    if isinstance(value, torch.Tensor):
        yield from value.shape
        yield from value.stride()
    else:
        yield value
