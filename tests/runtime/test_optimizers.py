"""torch's optimizers and learning-rate schedulers on a compiled model: the parameters of one process after some steps,
or an error before the first."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import optim
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop, lr_scheduler

import autopar
from autopar.errors import OptimizerError
from tests.helpers import gloo

from . import tiny
from .parity import assert_close, assert_same_values, device_mesh, full, pair, planned

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


@pytest.mark.sampled(1)
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


# each of them, in double precision
# ---------------------------------------------------------------------------------------

VARIANTS = {
    "ASGD": [dict(lr=0.05, t0=2)], "Adadelta": [{}], "Adagrad": [{}, dict(fused=True)], "Adamax": [{}], "NAdam": [{}],
    "RAdam": [{}],
    "Adam": [dict(amsgrad=True), dict(fused=True)], "AdamW": [{}, dict(fused=True, lr=torch.tensor(0.01))],
    "RMSprop": [dict(centered=True, momentum=0.5)], "Rprop": [{}, dict(maximize=True)],
    "SGD": [dict(lr=0.1), dict(lr=0.1, momentum=0.9, nesterov=True), dict(fused=True),
            dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True)],
    "Muon": [dict(lr=0.01)], "Adafactor": [{}], "LBFGS": [dict(lr=0.1), dict(lr=0.1, line_search_fn="strong_wolfe")],
}  # fmt: skip
DOUBLE = dict(x=X.double(), target=Y.double())
NESTED = {"up.weight": "tp:S(0) dp:S(0)", "up.bias": "tp:S(0) dp:S(0)", "down.weight": "tp:S(1) dp:S(1)"}
REFUSED = {"LBFGS": "flattens parameters"}


def double(hidden: int):
    return tiny.Regressor(hidden=hidden, loss=True).double()


def variants():
    for name, options in VARIANTS.items():
        for each in options:
            yield name, each
            if "fused" not in each and name not in ("Muon", "LBFGS"):
                yield name, each | {"foreach": True}


def _steps(model, name: str, options: dict, count: int = 3) -> optim.Optimizer:
    """Steps of a new optimizer, the gradients computed by a closure in every other variant."""
    parameters = [p for p in model.parameters() if name != "Muon" or p.dim() == 2]
    optimizer = getattr(optim, name)(parameters, **options)

    def closure():
        optimizer.zero_grad()
        loss = model(**DOUBLE).loss
        loss.backward()
        return loss

    for _ in range(count):
        if name == "LBFGS" or "maximize" in options or "weight_decay" in options:
            loss = optimizer.step(closure)
            assert torch.is_tensor(loss) and loss.requires_grad
        else:
            closure()
            optimizer.step()
    return optimizer


def _every_one(rank, mesh, plan, hidden, refused):
    parallel, reference = pair(double(hidden), device_mesh(mesh), DOUBLE, plan=plan)
    start = [{n: p.detach().clone() for n, p in m.named_parameters()} for m in (parallel, reference)]
    errors = []
    for name, options in variants():
        for model, values in zip((parallel, reference), start):
            with torch.no_grad():
                for n, p in model.named_parameters():
                    p.copy_(values[n])
            model.zero_grad()
        # Muon computes in bfloat16, in which another order of sums is seen
        with mock.patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor.clone()):
            if name in refused:
                with pytest.raises(OptimizerError, match=f"^{name} {REFUSED[name]}") as error:
                    _steps(parallel, name, options)
                errors.append(str(error.value))
                assert all(torch.equal(full(p), full(start[0][n])) for n, p in parallel.named_parameters())
                continue
            state = [_steps(m, name, options).state for m in (parallel, reference)]
        assert_same_values(parallel, reference, 1e-12)
        for (_, mine), (p, whole) in zip(sorted_state(state[0], parallel), sorted_state(state[1], reference)):
            assert mine.keys() == whole.keys()
            for key in [] if name == "LBFGS" else whole:
                if isinstance(whole[key], torch.Tensor):
                    assert_close(mine[key], whole[key], f"{name} {key}", 1e-9)
                    assert whole[key].shape != p.shape or hasattr(mine[key], "placements")
    return errors


def sorted_state(state: dict, model) -> list:
    return [(p, state[p]) for p in model.parameters() if p in state]


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(
    "mesh, strategy, pins, hidden, refused",
    [
        ("dp=2", "ddp", None, 31, ()),
        ("dp=2", "zero1", None, 32, ()),
        ("dp=2", "fsdp", None, 31, ()),
        ("tp=2", None, UNEVEN, 31, ("LBFGS",)),
        ("dp=2,tp=2", None, NESTED, 32, ()),
        ("dp=2,tp=2", None, MIXED, 16, ()),
    ],
    ids=["ddp", "zero1", "fsdp", "uneven", "nested", "mixed"],
)
def test_every_optimizer(mesh, strategy, pins, hidden, refused):
    """Right, or refused before anything is changed."""
    known = {name for name, kind in vars(optim).items() if isinstance(kind, type) and name != "Optimizer"}
    assert known == {*VARIANTS, "SparseAdam"}  # which takes no dense gradients
    plan = planned(double(hidden), mesh, DOUBLE, pin=pins, strategy=strategy)
    errors = gloo.run(plan.mesh.devices, _every_one, mesh, plan, hidden, refused)
    assert all(e == errors[0] for e in errors) and len(errors[0]) == 2 * len(refused)
    for error in errors[0]:
        assert "up.weight (" in error and "fix: torch.optim.AdamW or SGD" in error


def _stages(rank, plan):
    parallel, reference = pair(double(16), device_mesh("pp=2"), DOUBLE, plan=plan)
    for name, options in (("Rprop", {}), ("SGD", dict(fused=True, momentum=0.9)), ("AdamW", {})):
        for model in (parallel, reference):
            _steps(model, name, options)
        wanted = dict(reference.named_parameters())
        for n, p in parallel.named_parameters():
            assert_close(p, wanted[n], n, 1e-12)
    with pytest.raises(OptimizerError, match="^LBFGS searches along all parameters at once"):
        _steps(parallel, "LBFGS", {})


@pytest.mark.gloo
def test_optimizers_of_stages():
    plan = planned(double(16), "pp=2", DOUBLE, micro_batches=2)
    gloo.run(2, _stages, plan)


class Signed(SGD):
    """Somebody's own optimizer."""


def _of_others(rank, root):
    mesh = device_mesh("dp=2")
    model = autopar.compile(double(31), mesh, DOUBLE, strategy="fsdp")
    with pytest.raises(OptimizerError, match="Signed inherits from an optimizer that calls ops"):
        _of_class(model, Signed(model.parameters(), fused=True))
    _of_class(model, Signed(model.parameters(), lr=0.1))
    plain = torch.nn.Linear(3, 3)  # another model's optimizers are left alone
    optimizer = Rprop(plain.parameters())
    plain(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert "prev" in optimizer.state[plain.weight]
    for make in (Rprop, lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True), lambda p: Adagrad(p, fused=True)):
        optimizer = make(model.parameters())
        _of_class(model, optimizer)
        autopar.save_checkpoint(root, model, optimizer, step=1)
        _of_class(model, optimizer)
        expected = [full(p).detach().clone() for p in model.parameters()]
        again = make(model.parameters())
        autopar.load_checkpoint(root, model, again)
        _of_class(model, again)
        assert all(torch.equal(full(p), wanted) for p, wanted in zip(model.parameters(), expected))
    first, second = [*model.parameters()][:2]
    optimizer = SGD([first], lr=0.1, fused=True)  # a group that is added later counts
    _of_class(model, optimizer)
    optimizer.add_param_group({"params": [second], "lr": 0.2})
    before = full(second).detach().clone()
    _of_class(model, optimizer)
    assert not torch.equal(full(second), before)


def _of_class(model, optimizer) -> None:
    model.zero_grad()
    model(**DOUBLE).loss.backward()
    optimizer.step()


@pytest.mark.gloo
def test_optimizers_of_others_and_their_state(tmp_path):
    gloo.run(2, _of_others, str(tmp_path))


class Transposed(tiny.Regressor):
    """Its weights lie in memory column by column, and so do the gradients that the backward computes of others."""

    def __init__(self):
        super().__init__(loss=True)
        self.up.weight = torch.nn.Parameter(self.up.weight.detach().T.contiguous().T)


def _fused(rank, name, mesh, plan):
    source, inputs = (Transposed().double(), DOUBLE) if name == "transposed" else tiny.gpt2(n_layer=1)
    parallel, reference = pair(source.double(), device_mesh(mesh), inputs, plan=plan)
    for make in (lambda p: AdamW(p, lr=1e-2, fused=True), lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True)):
        for model in (parallel, reference):
            optimizer = make(model.parameters())
            for _ in range(2):
                model(**inputs).loss.backward()
                if model is parallel:
                    locals_ = [(p.to_local(), p.grad.to_local()) for p in model.parameters() if p.grad is not None]
                    assert all(p.stride() == g.stride() and p.is_contiguous() for p, g in locals_)
                optimizer.step()
                optimizer.zero_grad()
    wanted = dict(reference.named_parameters())
    for n, p in parallel.named_parameters():
        assert_close(p, wanted[n], n, 1e-5)  # the loss of GPT-2 is in single precision


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("name, mesh, pins", [("gpt2", "tp=2", {"*.c_attn.weight": "tp:S(1/3)",
                                                                "*.c_attn.bias": "tp:S(0/3)"}),
                                              ("gpt2", "pp=2", None),
                                              ("transposed", "tp=2", {"up.*": "R"})])  # fmt: skip
def test_gradients_lie_in_memory_as_the_parameters_do(name, mesh, pins):
    """Fused kernels go through the memory of both, whatever their strides say."""
    source, inputs = (Transposed().double(), DOUBLE) if name == "transposed" else tiny.gpt2(n_layer=1)
    plan = planned(source.double(), mesh, inputs, pin=pins, **({"micro_batches": 2} if mesh == "pp=2" else {}))
    gloo.run(2, _fused, name, mesh, plan)


def test_a_step_through_which_gradients_flow_is_eagers(alone):
    """Check that it is not taken on local parts, where it would lose them."""
    x, target = tiny.Regressor.batch()
    for model in pair(tiny.Regressor(loss=True), alone, dict(x=x, target=target)):
        model(x=x, target=target).loss.backward()
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place"):
            SGD(model.parameters(), lr=0.1, differentiable=True).step()
