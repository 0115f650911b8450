"""Adaptations of a model, planned and sharded with the rest: what to change (the classes here), and what they add to
the model (see attach.py). The passes that change the graph are in passes/, under the same names."""

from .fake_quant import FakeQuant
from .fp8 import FP8
from .lora import LoRA
from .qlora import QLoRA

__all__ = ["FP8", "FakeQuant", "LoRA", "QLoRA"]
