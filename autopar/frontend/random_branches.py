"""Code that a forward runs or leaves out by a random number, as LayerDrop does.

A graph takes one way, and which one it is would be drawn when the model is traced, once and for all: inside of
`no_random_branches` a forward that asks for the value of a random number is refused.
"""

from __future__ import annotations

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import CaptureError
from .user_lines import line_now

DRAWS = {"rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "bernoulli", "normal", "multinomial",
         "randperm", "poisson", "uniform_", "normal_", "bernoulli_", "random_", "exponential_"}  # fmt: skip
ASKS = {"item", "tolist", "__int__", "__float__", "__index__"}  # `checks_pass` sees who asks for a truth


class no_random_branches(TorchFunctionMode):  # noqa: N801  (a context manager)
    """Inside, reading the value of a random number in Python raises CaptureError."""

    def __init__(self):
        super().__init__()
        self.drawn: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def refuse(self, value: object) -> None:
        """Raise CaptureError if `value`, which Python reads, is drawn."""
        if isinstance(value, Tensor) and value in self.drawn:
            raise CaptureError(
                "this line runs one of several ways, as a random number says (LayerDrop does so): a graph has one way",
                source=line_now(),
                fix="set the probability of leaving out a layer to 0 (layerdrop=0.0 in its configuration), or draw a "
                "mask and multiply by it",
            )

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in ASKS:
            self.refuse(args[0])
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and self._is_drawn(function, args):
            self.drawn[result] = True
        return result

    def _is_drawn(self, function, args) -> bool:
        """Return whether nothing but random numbers and constants goes into a result."""
        if getattr(function, "__name__", "") in DRAWS:
            return True
        tensors = [a for a in args if isinstance(a, Tensor)]
        return bool(self.drawn and tensors) and all(t in self.drawn for t in tensors)
