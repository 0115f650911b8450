"""Train and eval, gradient modes, autocast, and settings of layers, changed between calls and inside of the forward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .nets import Net, Tokens
from .program import Topic, ids, one, randn

modes = Topic(__name__)


class Normed(nn.Module):
    """With BatchNorm in the middle."""

    def __init__(self, **settings):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 9), nn.BatchNorm1d(9, **settings), nn.Linear(9, 3)

    def forward(self, x):
        return self.last(F.relu(self.norm(self.first(x))))


@modes()
def batch_norm_train_and_eval():
    """Running statistics are followed in train mode and used in eval mode."""

    def script(run):
        run(1)
        run(2)
        run.model.eval()
        run(3)
        run.model.train()
        run(4)

    return Normed(), one(7, 6), script


@modes()
def batch_norm_momentum_changed():
    """The momentum of BatchNorm is changed between calls, as schedules for it do."""

    def script(run):
        run(1)
        for module in run.model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.momentum = 0.5
        run(2)

    return Normed(), one(7, 6), script


@modes(refused="value")
def batch_norm_cumulative():
    """momentum=None averages over all calls."""

    def script(run):
        for seed in range(3):
            run(seed)

    return Normed(momentum=None), one(7, 6), script


@modes()
def batch_norm_without_statistics():
    """Statistics of the batch alone, also in eval mode."""

    def script(run):
        run(1)
        run.model.eval()
        run(2)

    return Normed(track_running_stats=False), one(7, 6), script


@modes()
def batch_norm_frozen():
    """Only the norm is put in eval mode, as in fine-tuning of detectors, by a train() that the class overrides."""

    class Frozen(Normed):
        def train(self, mode: bool = True):
            super().train(mode)
            self.norm.eval()
            return self

    def script(run):
        run.model.train()
        run(1)
        run.model.eval()
        run(2)
        run.model.train()
        run(3)

    return Frozen(), one(7, 6), script


@modes()
def batch_norm_reset():
    """reset_running_stats() between calls."""

    def script(run):
        run(1)
        run.model.norm.reset_running_stats()
        run(2)

    return Normed(), one(7, 6), script


@modes()
def batch_norm_eps_changed():
    """The eps of a norm is changed between calls."""

    def script(run):
        run(1)
        run.model.norm.eps = 0.5
        run(2)

    return Normed(), one(7, 6), script


class Dropped(nn.Module):
    """Dropout of which only p=0 and p=1 are compared exactly."""

    def __init__(self, p: float):
        super().__init__()
        self.net, self.dropout = Net(), nn.Dropout(p)

    def forward(self, x):
        return self.dropout(self.net(x))


@modes()
def dropout_switched_off_by_p():
    """p of a dropout layer is set to 0 between calls, found by looping over modules with isinstance."""

    def script(run):
        run(1)
        for module in run.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        run(2)

    return Dropped(1.0), one(5, 6), script


@modes()
def dropout_switched_on_by_p():
    """p of a dropout layer is set to 1 by its name."""

    def script(run):
        run(1)
        run.model.dropout.p = 1.0
        run(2)

    return Dropped(0.0), one(5, 6), script


@modes()
def dropout_eval_of_one_layer():
    """One dropout layer is put in eval mode."""

    def script(run):
        run(1)
        run.model.dropout.eval()
        run(2)
        run.model.train()
        run(3)

    return Dropped(1.0), one(5, 6), script


@modes()
def functional_dropout_by_training_flag():
    """F.dropout with the training flag and a rate from an attribute."""

    class Functional(Net):
        rate = 1.0

        def forward(self, x):
            return F.dropout(super().forward(x), self.rate, training=self.training)

    def script(run):
        run(1)
        run.model.eval()
        run(2)
        run.model.train()
        run.model.rate = 0.0
        run(3)

    return Functional(), one(5, 6), script


@modes()
def branch_on_training():
    """Another structure comes out in eval mode."""

    class Detector(Net):
        def forward(self, x):
            y = super().forward(x)
            return {"loss": y.square().mean()} if self.training else [y.argmax(-1), y]

    def script(run):
        run(1)
        run.model.eval()
        run(2)

    return Detector(), one(5, 6), script


@modes()
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


@modes()
def set_grad_enabled_by_phase():
    """torch.set_grad_enabled(phase == "train"), as in the tutorials."""

    def script(run):
        for phase in ("train", "val", "train"):
            run.model.train(phase == "train")
            with torch.set_grad_enabled(phase == "train"):
                run(1)

    return Normed(), one(5, 6), script


@modes()
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
    modes.add(f"region_{name}", lambda region=region: (Region(region), one(5, 6)), raises=raises)


@modes()
def enable_grad_inside_no_grad():
    """The forward turns gradients on although the call is in no_grad: an energy's gradient with respect to the input."""

    class Inner(Net):
        def forward(self, x):
            with torch.enable_grad():
                return self.features(x).sum()

    def script(run):
        run(1)
        with torch.no_grad():
            run(2)

    return Inner(), one(5, 6), script


@modes()
def decorated_forward():
    """The forward is decorated with torch.no_grad()."""

    class Feature(Net):
        @torch.no_grad()
        def forward(self, x):
            return super().forward(x)

    return Feature(), one(5, 6)


@modes(tolerance=2e-2)
def autocast_around():
    """bfloat16 autocast around the call, then none."""

    def script(run):
        with torch.autocast("cpu", torch.bfloat16):
            run(1)
        run(2)

    return Net(), one(5, 6), script


@modes(tolerance=2e-2)
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


@modes(tolerance=2e-2)
def autocast_backward_outside():
    """The forward in autocast, loss and backward outside of it."""

    def script(run):
        with torch.autocast("cpu", torch.bfloat16):
            y = run.model(randn(1, 5, 6))
        F.mse_loss(y.float(), torch.zeros(5, 3)).backward()
        run.record(y=y)

    return Net(), one(5, 6), script


@modes(tolerance=2e-2)
def autocast_inside():
    """The forward has a region of autocast, and one without inside of it."""

    class Mixed(Net):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                h = self.features(x)
                with torch.autocast("cpu", enabled=False):
                    return self.down(h.float())

    return Mixed(), one(5, 6)


@modes(tolerance=2e-2)
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


@modes()
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
