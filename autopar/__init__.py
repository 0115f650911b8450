"""autopar: plans how a PyTorch model runs on many devices, and compiles it to do so.

model = autopar.compile(model, mesh, example_inputs=batch)   # an ordinary module; parameters are DTensors
plan = autopar.plan(model, "dp=8,tp=8", batch)               # the decision alone, on a laptop
"""

from . import ops  # noqa: F401  registers the canonical ops
from .adapt import FakeQuant, LoRA, QLoRA
from .api import compile, explain, plan
from .asynchronous import AsynchronousPipeline
from .convert import convert
from .errors import AdaptError, AutoparError
from .estimate import Estimate, estimate
from .hardware import Hardware
from .mesh import Mesh
from .plan import Plan
from .storage.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint, save_checkpoint
from .storage.quantized_folder import load_quantized

__all__ = [
    "AdaptError", "AsynchronousPipeline", "AutoparError", "Checkpoint", "Estimate", "FakeQuant", "Hardware", "LoRA",
    "Mesh", "Plan", "QLoRA", "compile", "convert", "estimate", "explain", "latest_checkpoint", "load_checkpoint",
    "load_quantized", "plan", "save_checkpoint",
]  # fmt: skip
__version__ = "0.1.0"
