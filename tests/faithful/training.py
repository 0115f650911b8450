"""Training loops: optimizers, accumulation, clipping, schedules, and freezing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .nets import Net, Tokens
from .program import Topic, ids, one, randn

training = Topic(__name__)


class Language(Tokens):
    """tokens -> a dict with loss and logits."""

    def forward(self, tokens, labels=None):
        logits = super().forward(tokens)
        labels = tokens if labels is None else labels
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def _tokens(seed):
    return (ids(seed, 13, 3, 5),)


def train(run, optimizer, steps: int = 3, before_step=lambda: None):
    for seed in range(steps):
        optimizer.zero_grad()
        out = run.model(*run.batch(seed))
        loss = out["loss"] if isinstance(out, dict) else out.square().mean()
        loss.backward()
        before_step()
        optimizer.step()
        run.record(loss=loss)


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "sgd_momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda ps: torch.optim.Adam(ps, lr=1e-2, eps=1e-3),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, eps=1e-3, weight_decay=0.1),
    "adamw_amsgrad": lambda ps: torch.optim.AdamW(ps, lr=1e-2, eps=1e-3, amsgrad=True),
    "adamw_foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, eps=1e-3, foreach=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-2, eps=1e-3),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2, eps=1e-3),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
}
for name, make in OPTIMIZERS.items():

    def _script(run, make=make):
        train(run, make(run.model.parameters()))

    training.add(f"optimizer_{name}", lambda script=_script: (Language(), _tokens, script), tolerance=3e-4)


@training(tolerance=3e-4)
def parameter_groups():
    """No weight decay for vectors, found by name and dimension."""

    def script(run):
        decay = [p for n, p in run.model.named_parameters() if p.dim() > 1 and "embed" not in n]
        others = [p for n, p in run.model.named_parameters() if p.dim() <= 1 or "embed" in n]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        train(run, torch.optim.AdamW(groups, lr=1e-2, eps=1e-3))

    return Language(), _tokens, script


@training(tolerance=3e-4)
def schedule_and_clipping():
    """A cosine schedule, and gradients clipped by their norm."""

    def script(run):
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)

        def before():
            norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.3)
            run.record(norm=norm)
            schedule.step()

        train(run, optimizer, 3, before)

    return Language(), _tokens, script


@training()
def clipping_by_value():
    """Gradients clipped element by element."""

    def script(run):
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.5)
        train(run, optimizer, 2, lambda: torch.nn.utils.clip_grad_value_(run.model.parameters(), 0.01))

    return Net(), one(5, 6), script


@training()
def norm_by_hand():
    """The norm of all gradients added up by hand with item()."""

    def script(run):
        run.model(randn(1, 5, 6)).square().mean().backward()
        total = sum(p.grad.norm().item() ** 2 for p in run.model.parameters()) ** 0.5
        run.record(total=total)

    return Net(), one(5, 6), script


@training()
def accumulation():
    """Gradients of three micro-batches of unequal size are added up, losses divided by three."""

    def script(run):
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
        for step in range(2):
            for part, size in enumerate((5, 3, 4)):
                loss = run.model(randn(10 * step + part, size, 6)).square().mean() / 3
                loss.backward()
            run.record()
            optimizer.step()
            optimizer.zero_grad()
            run.record()

    return Net(), one(4, 6), script


@training()
def accumulation_zeroed_not_none():
    """zero_grad(set_to_none=False) keeps tensors of zeros."""

    def script(run):
        optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9)
        for seed in (1, 2):
            run.model(randn(seed, 5, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            run.record()

    return Net(), one(5, 6), script


@training()
def freezing_between_calls():
    """A layer is frozen and thawed between calls (gradual unfreezing)."""

    def script(run):
        run(1)
        run.model.up.requires_grad_(False)
        run(2)
        run.model.up.weight.requires_grad = True
        run(3)
        run.model.requires_grad_(True)
        run(4)

    return Net(), one(5, 6), script


@training()
def thawing_what_was_frozen():
    """A layer that was frozen at compile is thawed after the first call."""
    model = Net()
    model.up.requires_grad_(False)

    def script(run):
        run(1)
        for p in run.model.parameters():
            p.requires_grad = True
        run(2)

    return model, one(5, 6), script


@training()
def all_frozen_later():
    """Everything is frozen: outputs then have no gradient."""

    def script(run):
        run(1)
        run.model.requires_grad_(False)
        run(2)

    return Net(), one(5, 6), script


@training()
def parameters_written_between_calls():
    """Weights are scaled, clamped and initialized anew between calls."""

    def script(run):
        run(1)
        with torch.no_grad():
            run.model.up.weight.mul_(0.5)
            run.model.down.bias.clamp_(-0.1, 0.1)
        run(2)
        run.model.down.weight.data.zero_()
        run(3)
        nn.init.constant_(run.model.down.weight, 0.1)
        run(4)

    return Net(), one(5, 6), script


@training()
def parameter_replaced_between_calls():
    """A parameter is assigned anew: later calls use the new one."""

    def script(run):
        run(1)
        run.model.down.bias = nn.Parameter(torch.tensor([1.0, -1.0, 2.0]))
        run(2)

    return Net(), one(5, 6), script


@training()
def layer_replaced_between_calls():
    """A head is replaced by another layer for fine-tuning."""

    def script(run):
        run(1)
        torch.manual_seed(9)
        run.model.down = nn.Linear(10, 3)
        run(2)

    return Net(), one(5, 6), script


@training(tolerance=3e-4)
def evaluation_in_between():
    """Training, evaluation without gradients, and training again, with dropout of rate 0 and BatchNorm."""

    def script(run):
        optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-2, eps=1e-2)
        for epoch in range(2):
            run.model.train()
            train(run, optimizer, 2)
            run.model.eval()
            with torch.no_grad():
                run(10 + epoch)

    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.0), nn.Linear(5, 3)), one(7, 6), script


@training(tolerance=3e-4)
def lbfgs():
    """LBFGS calls a closure several times a step."""

    def script(run):
        optimizer, x = torch.optim.LBFGS(run.model.parameters(), lr=0.1, max_iter=3), randn(1, 5, 6)

        def closure():
            optimizer.zero_grad()
            loss = run.model(x).square().mean()
            loss.backward()
            return loss

        run.record(loss=optimizer.step(closure))

    return Net(), one(5, 6), script


@training()
def frozen_bias_thawed():
    """A bias that was frozen at compile is thawed, in a model with an input that requires a gradient."""
    model = Net()
    model.down.bias.requires_grad_(False)

    def script(run):
        run(1)
        run.model.down.bias.requires_grad_(True)
        run(2)

    return model, one(5, 6, requires_grad=True), script


@training()
def output_of_a_layer_that_is_frozen_later():
    """One of two outputs depends on a layer alone that is frozen between calls: it has no gradient then."""

    class Two(Net):
        def forward(self, x):
            h = self.features(x)
            return self.down(h.detach()), h.mean()

    def script(run):
        run(1)
        run.model.up.requires_grad_(False)
        run(2)

    return Two(), one(5, 6), script


@training()
def frozen_bias_thawed_with_a_counter():
    """The same in a model that counts its calls, and whose loss is used together with its logits."""

    class Counting(Net):
        def __init__(self):
            super().__init__()
            self.calls = 0
            self.down.bias.requires_grad_(False)

        def forward(self, x):
            self.calls += 1
            y = super().forward(x)
            return {"loss": y.square().mean(), "logits": y}

    def script(run):
        run(1)
        run.model.requires_grad_(True)
        run(2)

    return Counting(), one(5, 6), script


@training()
def data_assigned():
    """Parameters are updated by assigning their data, with momentum kept in plain tensors."""

    def script(run):
        momenta = {}
        for seed in range(3):
            run(seed)
            for name, p in run.model.named_parameters():
                momenta[name] = 0.5 * momenta.get(name, 0.0) + p.grad.data
                p.data = p.data - 0.1 * momenta[name]
            run.record()

    return Net(), one(5, 6), script


@training()
def vector_of_parameters():
    """All parameters as one vector, in the loss and written back."""

    def script(run):
        vector_of = torch.nn.utils.parameters_to_vector
        run.loss = lambda y: y.square().mean() + 0.1 * vector_of(run.model.parameters()).norm()
        run(1)
        halved = vector_of(run.model.parameters()).detach() * 0.5
        torch.nn.utils.vector_to_parameters(halved, run.model.parameters())
        run(2)

    return Net(), one(5, 6), script


@training()
def numbers_of_gradients():
    """Norms and counts of gradients and parameters are read as Python numbers."""

    def script(run):
        run(1)
        gradients = [p.grad for p in run.model.parameters()]
        run.record(
            norms=[g.norm().item() for g in gradients],
            largest=max(float(g.abs().max()) for g in gradients),
            text=" ".join(f"{g.square().sum():.4f}" for g in gradients),
            positive=[int((g > 0).sum()) for g in gradients],
            some=[bool((g > 0.1).any()) for g in gradients],
            lists=[g.sum(-1).tolist() for g in gradients],
            arrays=[float(p.detach().cpu().numpy().sum()) for p in run.model.parameters()],
        )

    return Net(), one(5, 6), script


@training()
def weights_drawn_into_place():
    """Plain tensors are written into parameters and added to gradients."""

    def script(run):
        run(1)
        with torch.no_grad():
            for i, p in enumerate(run.model.parameters()):
                p.copy_(randn(i, *p.shape)).add_(randn(i + 5, *p.shape))
        run(2)
        for i, p in enumerate(run.model.parameters()):
            p.grad.add_(randn(i, *p.shape) * 0.1)
        run.record()

    return Net(), one(5, 6), script
