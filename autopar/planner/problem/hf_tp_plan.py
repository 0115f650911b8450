"""The tensor parallelism that a model brings along, as transformers' models do: a style by the name of a module or
parameter.

    {"model.layers.*.self_attn.q_proj": "colwise", "model.layers.*.self_attn.o_proj": "rowwise", "lm_head":
    "colwise_gather_output"}

Weights are (out, in), experts' (expert, out, in), embeddings (vocabulary, hidden). A style says which dim the tensor
axis cuts, and with it how the layer computes; what has no style is whole on every device
(https://huggingface.co/docs/transformers/perf_infer_gpu_multi). Values stay cut only between a column-wise layer and
the row-wise one beside it, so inside of the module that holds both; everywhere else they are whole: norms, residuals,
logits and the loss.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ...errors import StrategyError
from .problem import Problem

COLUMN, ROW, WHOLE = (-2, -1), (-1, None), (None, None)  # the dim that is cut of a weight and of a bias
STYLES: dict[str, tuple[int | None, int | None]] = {
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise"), COLUMN),
    **dict.fromkeys(("local_colwise", "local_packed_colwise"), COLUMN),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise"), ROW),
    **dict.fromkeys(("local_rowwise", "local_packed_rowwise"), ROW),
    "embedding_rowwise": (-2, None), "embedding_colwise": (-1, None), "grouped_gemm": (0, 0),
    **dict.fromkeys(("sequence_parallel", "local", "local_params", "replicate", "replicated_with_grad_allreduce"),
                    WHOLE),
    **dict.fromkeys(("gather", "all_reduce", "moe_tp_experts", "moe_identity_expert", "mla_kv_a_proj"), WHOLE),
}  # fmt: skip


def styles_of(model: object) -> dict[str, str]:
    """Return the styles of a model that has any, by names as of `named_parameters` with `*` for a number: its own
    `_tp_plan`, and what its config says of the base model in it."""
    base = getattr(getattr(model, "config", None), "base_model_tp_plan", None)
    prefix = getattr(model, "base_model_prefix", "")
    where = f"{prefix}." if prefix and isinstance(prefix, str) and hasattr(model, prefix) else ""
    own = getattr(model, "_tp_plan", None)
    return {f"{where}{key}": style for key, style in _texts(base).items()} | _texts(own)


def _texts(plan: object) -> dict[str, str]:
    """Return a plan if it is one, else an empty one: attributes of these names may be anything in somebody's model."""
    is_plan = isinstance(plan, Mapping) and all(isinstance(x, str) for pair in plan.items() for x in pair)
    return dict(plan) if is_plan else {}


@dataclass(frozen=True)
class TensorPlan:
    """Styles by name. Raises StrategyError for one that is not known."""

    styles: tuple[tuple[str, str], ...]

    def __post_init__(self):
        if unknown := sorted({style for _, style in self.styles} - set(STYLES)):
            raise StrategyError(f"the model's own plan has styles that are not known: {', '.join(unknown)}")

    @cached_property
    def _patterns(self) -> list[tuple[re.Pattern, tuple[int | None, int | None]]]:
        return [(_pattern(key), STYLES[style]) for key, style in self.styles]

    @cached_property
    def _holders(self) -> list[re.Pattern]:
        """Return patterns of the modules that hold a row-wise layer, and of what is in them."""
        rows = {key.rpartition(".")[0] for key, style in self.styles if STYLES[style] == ROW}
        return [re.compile(_pattern(parent).pattern + r"(\..*)?") for parent in sorted(rows - {""})]

    def dim_of(self, name: str, dims: int) -> int | None:
        """Return the dim of a parameter that the tensor axis cuts, None if it cuts none."""
        weight, bias = self._of(name) or self._of(name.rpartition(".")[0]) or WHOLE
        dim = bias if name.rpartition(".")[2].endswith("bias") else weight
        return None if dim is None or dims + dim < 0 else dim % dims

    def cuts(self, module: str) -> bool:
        """Return whether a layer computes with a part of its weight."""
        return (self._of(module) or WHOLE) != WHOLE

    def is_between(self, module: str) -> bool:
        """Return whether values of a module may stay cut: it holds a row-wise layer, or is inside of a module that
        does."""
        return any(pattern.fullmatch(module) for pattern in self._holders)

    def _of(self, name: str) -> tuple[int | None, int | None] | None:
        return next((dims for pattern, dims in self._patterns if pattern.fullmatch(name)), None)


def _pattern(key: str) -> re.Pattern:
    return re.compile(re.escape(key).replace(r"\*", r"\d+"))


def inside(problem: Problem, plan: TensorPlan) -> set[int]:
    """Return the vertices that the tensor axis may cut: layers that it cuts, and what lies between them. A sum of
    gradients belongs to no module; it lies where what it adds does."""
    between: set[int] = set()
    layers: set[int] = set()
    for v in problem.vertices:
        module = v.node.meta.get("module", "") if v.kind == "op" else None
        if module and plan.cuts(module):
            layers.add(v.index)
        if module and plan.is_between(module) or module == "" and any(p in between for p, _ in v.inputs):
            between.add(v.index)
    return between | layers
