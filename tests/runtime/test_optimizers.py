"""torch's optimizers and learning-rate schedulers on a compiled model: the parameters of one process after five steps."""

from __future__ import annotations

import pytest
import torch
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, lr_scheduler

from tests import gloo

from . import tiny
from .parity import assert_close, assert_same_values, device_mesh, pair, planned

X, Y = tiny.Regressor.batch()
CALL = dict(x=X, target=Y)
OPTIMIZERS = {
    "adamw foreach": lambda p: AdamW(p, lr=1e-2, foreach=True),
    "adamw loop": lambda p: AdamW(p, lr=1e-2, foreach=False),
    "adamw fused": lambda p: AdamW(p, lr=1e-2, fused=True),
    "adam fused": lambda p: Adam(p, lr=1e-2, fused=True, weight_decay=0.1),
    "adam amsgrad": lambda p: Adam(p, lr=1e-2, amsgrad=True),
    "adamw, rate in a tensor": lambda p: AdamW(p, lr=torch.tensor(1e-2)),
    "sgd foreach": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True, weight_decay=0.1),
    "sgd loop": lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "adagrad": lambda p: Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: RMSprop(p, lr=1e-2),
    "adadelta": Adadelta, "adamax": Adamax, "nadam": NAdam, "radam": RAdam,
}  # fmt: skip
SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda i: 0.9**i),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=10),
}


def _groups(model):
    """No decay for biases, by name."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
        {"params": [p for n, p in named if not n.endswith("bias")], "lr": 1e-3},
    ]


def _train(rank, mesh_text, plan, hidden, optimizers, schedulers):
    mesh = device_mesh(mesh_text)
    parallel, reference = pair(tiny.Regressor(hidden=hidden, loss=True), mesh, CALL, plan=plan)
    start = [{n: p.detach().clone() for n, p in m.named_parameters()} for m in (parallel, reference)]
    runs = [(name, make, None) for name, make in OPTIMIZERS.items() if name in optimizers]
    runs += [(name, lambda p: AdamW(p, lr=1e-2), make) for name, make in SCHEDULERS.items() if name in schedulers]
    for number, (name, make, schedule) in enumerate(runs):
        losses = []
        for m, values in zip((parallel, reference), start):
            with torch.no_grad():
                for n, p in m.named_parameters():
                    p.copy_(values[n])
            optimizer = make(_groups(m) if schedule else m.parameters())
            scheduler = schedule(optimizer) if schedule else None
            for _ in range(5):
                loss = m(**CALL).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5)
                optimizer.step()
                if scheduler:
                    scheduler.step(*[loss.item()] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
                optimizer.zero_grad(set_to_none=number % 2 == 0)
            losses.append(loss)
        assert_close(*losses, name, 1e-4)
        assert_same_values(parallel, reference, 1e-4)
    return len(runs)


UNEVEN = {"up.*": "tp:S(0)", "down.weight": "tp:S(1)", "down.bias": "R"}
MIXED = {"up.weight": "dp:S(0) tp:S(1)", "up.bias": "tp:S(0)", "down.weight": "R"}


@pytest.mark.gloo
@pytest.mark.parametrize(
    "mesh, pins, hidden, optimizers, schedulers",
    [
        ("tp=2", UNEVEN, 31, tuple(OPTIMIZERS), tuple(SCHEDULERS)),
        ("dp=2,tp=2", MIXED, 16, ("adamw foreach", "adamw fused", "sgd loop"), ()),
    ],
    ids=["uneven", "mixed"],
)
def test_five_steps(mesh, pins, hidden, optimizers, schedulers):
    plan = planned(tiny.Regressor(hidden=hidden, loss=True), mesh, CALL, pin=pins)
    ranks = plan.mesh.devices
    runs = gloo.run(ranks, _train, mesh, plan, hidden, optimizers, schedulers)
    assert runs == [len(optimizers) + len(schedulers)] * ranks
