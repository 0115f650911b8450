"""autopar: plans how a PyTorch model runs on many devices, and compiles it to do so.

model = autopar.compile(model, mesh, example_inputs=batch)   # an ordinary module; parameters are DTensors
plan = autopar.plan(model, "dp=8,tp=8", batch)               # the decision alone, on a laptop
"""

from importlib import import_module
from typing import TYPE_CHECKING

from . import schedule  # noqa: F401
from .errors import AdaptError, AutoparError
from .hardware.profile import Hardware
from .ir.compiler_pass import Pass
from .ir.mesh import Mesh
from .planner.problem.recipes import Recipe, register_strategy
from .plans.plan import Plan
from .schedule import Schedule, register_schedule

if TYPE_CHECKING:
    from .adapt import FP8, FakeQuant, LoRA, QLoRA
    from .api.asynchronous_pipeline import AsynchronousPipeline
    from .api.entry import compile, explain, plan
    from .api.estimate import Estimate, estimate
    from .api.export_quantized import convert
    from .cost.memory import register_optimizer
    from .rules import check_rule, register_rule
    from .runtime.module import ParallelModule
    from .simulate.compare import verify
    from .storage.checkpoint import (
        Checkpoint,
        finish_checkpoint,
        latest_checkpoint,
        load_checkpoint,
        save_checkpoint,
    )
    from .storage.quantized_folder import load_quantized

__all__ = [
    "AdaptError", "AsynchronousPipeline", "AutoparError", "Checkpoint", "Estimate", "FP8", "FakeQuant", "Hardware",
    "LoRA", "Mesh", "ParallelModule", "Pass", "Plan", "QLoRA", "Recipe", "Schedule", "check_rule", "compile",
    "convert", "estimate", "explain", "finish_checkpoint", "latest_checkpoint", "load_checkpoint", "load_quantized",
    "plan", "register_optimizer", "register_rule", "register_schedule", "register_strategy", "save_checkpoint",
    "verify",
]  # fmt: skip
__version__ = "0.1.0"

_WITH_TORCH = {  # where the names are that are imported when they are first asked for, as `import torch` takes seconds
    "FP8": "adapt", "FakeQuant": "adapt", "LoRA": "adapt", "QLoRA": "adapt",
    "AsynchronousPipeline": "api.asynchronous_pipeline",
    "compile": "api.entry", "explain": "api.entry", "plan": "api.entry", "Estimate": "api.estimate",
    "estimate": "api.estimate", "convert": "api.export_quantized", "Checkpoint": "storage.checkpoint",
    "finish_checkpoint": "storage.checkpoint", "latest_checkpoint": "storage.checkpoint",
    "load_checkpoint": "storage.checkpoint", "save_checkpoint": "storage.checkpoint",
    "load_quantized": "storage.quantized_folder",
    "check_rule": "rules", "register_rule": "rules", "register_optimizer": "cost.memory",
    "verify": "simulate.compare", "ParallelModule": "runtime.module",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_WITH_TORCH[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
