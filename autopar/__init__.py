"""autopar: plans how a PyTorch model runs on many devices, and compiles it to do so.

model = autopar.compile(model, mesh, example_inputs=batch)   # an ordinary module; parameters are DTensors
plan = autopar.plan(model, "dp=8,tp=8", batch)               # the decision alone, on a laptop
"""

from .adapt import FakeQuant, LoRA, QLoRA
from .api.asynchronous_pipeline import AsynchronousPipeline
from .api.entry import compile, explain, plan
from .api.estimate import Estimate, estimate
from .api.export_quantized import convert
from .errors import AdaptError, AutoparError
from .hardware.profile import Hardware
from .ir.compiler_pass import Pass
from .ir.mesh import Mesh
from .ops import canonical  # noqa: F401  registers the canonical ops
from .plans.plan import Plan
from .storage.checkpoint import Checkpoint, latest_checkpoint, load_checkpoint, save_checkpoint
from .storage.quantized_folder import load_quantized

__all__ = [
    "AdaptError", "AsynchronousPipeline", "AutoparError", "Checkpoint", "Estimate", "FakeQuant", "Hardware", "LoRA",
    "Mesh", "Pass", "Plan", "QLoRA", "compile", "convert", "estimate", "explain", "latest_checkpoint", "load_checkpoint",
    "load_quantized", "plan", "save_checkpoint",
]  # fmt: skip
__version__ = "0.1.0"
