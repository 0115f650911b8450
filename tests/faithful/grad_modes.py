"""Gradient modes, autocast and the default dtype, around the call and inside of the forward."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .modes import Normed
from .nets import Net, Tokens
from .program import Topic, ids, one, randn

grad_modes = Topic(__name__)


@grad_modes()
def no_grad_around():
    """Calls in no_grad, inference_mode and with gradients take turns."""

    def script(run):
        run(1)
        with torch.no_grad():
            run(2)
        with torch.inference_mode():
            run.record(y=run.model(randn(3, 5, 6)))
        run(4)

    return Net(), one(5, 6), script


@grad_modes()
def set_grad_enabled_by_phase():
    """torch.set_grad_enabled(phase == "train"), as in the tutorials."""

    def script(run):
        for phase in ("train", "val", "train"):
            run.model.train(phase == "train")
            with torch.set_grad_enabled(phase == "train"):
                run(1)

    return Normed(), one(5, 6), script


@grad_modes()
def decides_by_grad_mode():
    """The forward asks torch.is_grad_enabled()."""

    class Asking(Net):
        def forward(self, x):
            return super().forward(x) * (1.0 if torch.is_grad_enabled() else 3.0)

    def script(run):
        run(1)
        with torch.no_grad():
            run(2)
        run(3)

    return Asking(), one(5, 6), script


class Region(Net):
    """Computes its features in a gradient mode of its own."""

    def __init__(self, mode):
        super().__init__()
        self.mode = mode

    def forward(self, x):
        with self.mode():
            h = self.features(x)
        return self.down(h)


REGIONS = {
    "no_grad": torch.no_grad, "enable_grad": torch.enable_grad, "inference_mode": torch.inference_mode,
    "grad_disabled": lambda: torch.set_grad_enabled(False),
}  # fmt: skip
for name, region in REGIONS.items():
    raises = name == "inference_mode"  # its tensors cannot be saved for a backward
    grad_modes.add(f"region_{name}", lambda region=region: (Region(region), one(5, 6)), raises=raises)


@grad_modes()
def enable_grad_inside_no_grad():
    """The forward turns gradients on although the call is in no_grad: an energy's gradient with respect to the
    input."""

    class Inner(Net):
        def forward(self, x):
            with torch.enable_grad():
                return self.features(x).sum()

    def script(run):
        run(1)
        with torch.no_grad():
            run(2)

    return Inner(), one(5, 6), script


@grad_modes()
def decorated_forward():
    """The forward is decorated with torch.no_grad()."""

    class Feature(Net):
        @torch.no_grad()
        def forward(self, x):
            return super().forward(x)

    return Feature(), one(5, 6)


@grad_modes(tolerance=2e-2)
def autocast_around():
    """bfloat16 autocast around the call, then none."""

    def script(run):
        with torch.autocast("cpu", torch.bfloat16):
            run(1)
        run(2)

    return Net(), one(5, 6), script


@grad_modes(tolerance=2e-2)
def autocast_from_the_second_call_on():
    """Planned without autocast, called first without and then with it, a loss included."""

    class WithLoss(Tokens):
        def forward(self, tokens):
            logits = super().forward(tokens)
            return {"loss": F.cross_entropy(logits.flatten(0, 1), tokens.flatten()), "logits": logits}

    def script(run):
        run(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            run(2)

    return WithLoss(), lambda seed: (ids(seed, 13, 3, 5),), script


@grad_modes(tolerance=2e-2)
def autocast_backward_outside():
    """The forward in autocast, loss and backward outside of it."""

    def script(run):
        with torch.autocast("cpu", torch.bfloat16):
            y = run.model(randn(1, 5, 6))
        F.mse_loss(y.float(), torch.zeros(5, 3)).backward()
        run.record(y=y)

    return Net(), one(5, 6), script


@grad_modes(tolerance=2e-2)
def autocast_inside():
    """The forward has a region of autocast, and one without inside of it."""

    class Mixed(Net):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                h = self.features(x)
                with torch.autocast("cpu", enabled=False):
                    return self.down(h.float())

    return Mixed(), one(5, 6)


@grad_modes(tolerance=2e-2)
def autocast_of_a_forward_with_its_own():
    """The forward switches the autocast of the call off."""

    class Precise(Net):
        @torch.autocast("cpu", enabled=False)
        def forward(self, x):
            return super().forward(x.float())

    def script(run):
        run(1)
        with torch.autocast("cpu", torch.bfloat16):
            run(2)

    return Precise(), one(5, 6), script


@grad_modes()
def default_dtype_changed():
    """torch.set_default_dtype changes between calls what the forward makes."""

    class Making(Net):
        def forward(self, x):
            return super().forward(x) + torch.full((3,), 0.1).to(x.dtype), torch.ones(2)

    def script(run):
        run(1)
        x = randn(2, 5, 6)
        torch.set_default_dtype(torch.float64)
        try:
            run.call(x)
        finally:
            torch.set_default_dtype(torch.float32)

    return Making(), one(5, 6), script
