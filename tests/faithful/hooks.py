"""Hooks of modules, parameters and tensors, added before and after compile."""

from __future__ import annotations

import torch
from torch import nn

from .nets import Net
from .program import Topic, one

hooks = Topic(__name__)


def _doubling(module, args, output):
    return 2 * output


def _shifting(module, args):
    return (args[0] + 1,)


def _scaling_kwargs(module, args, kwargs):
    return args, {k: v * 3 for k, v in kwargs.items()}


def _halving_gradients(module, grad_input, grad_output):
    return tuple(None if g is None else g / 2 for g in grad_input)


def _halving_output_gradients(module, grad_output):
    return tuple(None if g is None else g / 2 for g in grad_output)


KINDS = {
    "forward": ("register_forward_hook", _doubling),
    "forward_pre": ("register_forward_pre_hook", _shifting),
    "full_backward": ("register_full_backward_hook", _halving_gradients),
    "full_backward_pre": ("register_full_backward_pre_hook", _halving_output_gradients),
}
for kind, (register, hook) in KINDS.items():
    for where in ("", "down"):

        def _before(register=register, hook=hook, where=where):
            model = Net()
            getattr(model.get_submodule(where), register)(hook)
            return model, one(5, 6)

        def _after(register=register, hook=hook, where=where):
            def script(run):
                run(1)
                handle = getattr(run.model.get_submodule(where), register)(hook)
                run(2)
                handle.remove()
                run(3)

            return Net(), one(5, 6), script

        at = "inner" if where else "root"
        hooks.add(f"{kind}_before_compile_{at}", _before)
        hooks.add(f"{kind}_after_compile_{at}", _after)


@hooks()
def activations_collected():
    """Hooks put features of inner layers into a dict of the user's."""

    def script(run):
        seen = {}
        for name, module in run.model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda m, args, output, name=name: seen.__setitem__(name, output.detach()))
        run(1)
        run.record(seen=dict(seen))
        run(2)
        run.record(seen=dict(seen))

    return Net(), one(5, 6), script


@hooks()
def activations_collected_before_compile():
    """The same with hooks that are there before compile."""
    model, seen = Net(), {}
    model.up.register_forward_hook(lambda m, args, output: seen.__setitem__("up", output.detach()))

    def script(run):
        seen.clear()
        run(1)
        run.record(seen=dict(seen))
        run(2)
        run.record(seen=dict(seen))

    return model, one(5, 6), script


@hooks()
def shapes_printed():
    """A hook counts calls and notes shapes."""
    model, shapes = Net(), []
    model.down.register_forward_hook(lambda m, args, output: shapes.append(tuple(output.shape)))

    def script(run):
        shapes.clear()
        run(1)
        run(2)
        run.record(shapes=list(shapes))

    return model, one(5, 6), script


@hooks()
def hook_with_kwargs():
    """A forward-pre hook changes keyword arguments of the root."""

    class Scaled(Net):
        def forward(self, x, scale=1.0):
            return super().forward(x) * scale

    def script(run):
        run.model.register_forward_pre_hook(_scaling_kwargs, with_kwargs=True)
        run.call(run.batch(1)[0], scale=2.0)

    return Scaled(), one(5, 6), script


@hooks()
def parameter_hook():
    """A hook of a parameter halves its gradient."""

    def script(run):
        handle = run.model.up.weight.register_hook(lambda g: g / 2)
        run(1)
        handle.remove()
        run(2)

    return Net(), one(5, 6), script


@hooks()
def parameter_hook_before_compile():
    """A hook of a parameter from before compile halves its gradient."""
    model = Net()
    model.up.weight.register_hook(lambda g: g / 2)
    return model, one(5, 6)


@hooks()
def parameter_hook_mask():
    """A hook of a parameter masks rows of its gradient, as fine-tuning of some embeddings does."""

    def script(run):
        mask = torch.ones(10, 1)
        mask[3:] = 0
        run.model.up.weight.register_hook(lambda g: g * mask)
        run(1)

    return Net(), one(5, 6), script


@hooks()
def post_accumulate_hook():
    """A hook steps the optimizer as soon as a gradient is there, as in memory-saving fine-tuning."""

    def script(run):
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in run.model.parameters()}

        def step(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in run.model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for seed in (1, 2):
            run.model(run.batch(seed)[0]).square().mean().backward()
            run.record()

    return Net(), one(5, 6), script


@hooks()
def tensor_hook_in_the_forward():
    """The forward registers a hook on its features, which scales their gradient (gradient reversal)."""

    class Reversed(Net):
        def features(self, x):
            h = super().features(x)
            if h.requires_grad:
                h.register_hook(lambda g: -0.5 * g)
            return h

    return Reversed(), one(5, 6)


@hooks()
def retain_grad_in_the_forward():
    """The forward retains the gradient of its features for the user."""

    class Retaining(Net):
        def forward(self, x):
            self.h = self.features(x)
            if self.h.requires_grad:
                self.h.retain_grad()
            return self.down(self.h)

    def script(run):
        run(1)
        run.record(gradient=run.model.h.grad)

    return Retaining(), one(5, 6), script


@hooks()
def output_hook_by_the_user():
    """The user registers a hook on the output."""

    def script(run):
        y = run.model(run.batch(1)[0])
        y.register_hook(lambda g: 3 * g)
        y.square().sum().backward()
        run.record(y=y)

    return Net(), one(5, 6), script


@hooks()
def gradient_of_output_retained():
    """The user retains the gradient of an output."""

    def script(run):
        y = run.model(run.batch(1)[0])
        y.retain_grad()
        y.square().sum().backward()
        run.record(gradient=y.grad)

    return Net(), one(5, 6), script


@hooks()
def global_forward_hook():
    """A hook for all modules is there while the model is called."""

    def script(run):
        run(1)
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, args, output: output + 1 if isinstance(module, nn.Linear) else None
        )
        try:
            run(2)
        finally:
            handle.remove()
        run(3)

    return Net(), one(5, 6), script


@hooks()
def state_dict_hook():
    """A hook of state_dict adds an entry."""

    def script(run):
        state = run.model.state_dict()
        run.record(names=sorted(state))

    model = Net()
    model._register_state_dict_hook(
        lambda module, state, prefix, meta: state.__setitem__(prefix + "extra", torch.ones(2))
    )
    return model, one(5, 6), script


@hooks()
def saved_tensors_hooks():
    """The user packs what is saved for the backward."""

    def script(run):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            y = run.model(run.batch(1)[0])
        y.sum().backward()
        run.record(y=y)

    return Net(), one(5, 6), script
