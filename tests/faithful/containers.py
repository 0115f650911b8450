"""Programs that ask more of a model than a call: its parts, attributes and methods; and what a compiled model must
refuse."""

from __future__ import annotations

import copy

import torch
from torch import nn

from .nets import Block, Net, Tokens
from .program import Topic, ids, one, randn

containers = Topic(__name__)


class Stack(nn.Module):
    """x (B, S, 12) through blocks in a ModuleList."""

    def __init__(self, depth: int = 3):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.heads = nn.ModuleDict({"a": nn.Linear(12, 2), "b": nn.Linear(12, 3)})
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(12)) for _ in range(2)])
        self.table = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(12))})
        self.config = {"depth": depth}

    def forward(self, x, head: str = "a"):
        for layer in self.layers:
            x = layer(x)
        return self.heads[head](x * self.scales[0] * self.scales[1] + self.table["shift"])


READS = {
    "length_of_a_list": lambda m: len(m.layers),
    "iterating": lambda m: [type(layer).__name__ for layer in m.layers],
    "index_and_rate": lambda m: (m.layers[0].dropout.p, m.layers[-1].heads),
    "slice_of_a_list": lambda m: len(m.layers[1:]),
    "keys_of_a_dict": lambda m: (list(m.heads), list(m.heads.keys()), "a" in m.heads),
    "features": lambda m: (m.heads["a"].in_features, m.heads["b"].out_features, m.layers[0].norm1.eps),
    "parameter_list": lambda m: (len(m.scales), [p.shape for p in m.scales], list(m.table.keys())),
    "names": lambda m: ([n for n, _ in m.named_modules()], [n for n, _ in m.named_parameters()]),
    "children": lambda m: [n for n, _ in m.named_children()],
    "isinstance": lambda m: sum(isinstance(x, nn.LayerNorm) for x in m.modules()),
    "counts": lambda m: sum(p.numel() for p in m.parameters()),
    "trainable": lambda m: sum(p.numel() for p in m.parameters() if p.requires_grad),
    "dtype_and_device": lambda m: (next(m.parameters()).dtype, str(next(m.parameters()).device)),
    "config": lambda m: m.config["depth"],
    "get_submodule": lambda m: type(m.get_submodule("layers.1.mlp.0")).__name__,
    "get_parameter": lambda m: m.get_parameter("layers.1.mlp.0.bias").shape,
    "text_of_a_layer": lambda m: repr(m.layers[0].mlp[0]),
    "class_of_the_root": lambda m: isinstance(m, nn.Module),
    "weight_shapes": lambda m: [tuple(p.shape) for p in m.parameters()],
    "has_attribute": lambda m: (hasattr(m, "layers"), hasattr(m, "nothing"), hasattr(m.layers[0], "gamma")),
    "default_of_getattr": lambda m: getattr(m, "gradient_checkpointing", None),
    "state_dict_names": lambda m: list(m.state_dict()),
    "state_dict_shapes": lambda m: [tuple(v.shape) for v in m.state_dict().values()],
    "training_flags": lambda m: [x.training for x in m.eval().modules()],
}
for name, read in READS.items():

    def _read(run, read=read):
        run.record(value=read(run.model))

    containers.add(f"reads_{name}", lambda script=_read: (Stack(2), one(3, 5, 12), script))


@containers()
def head_chosen_by_string():
    """The head of a ModuleDict is chosen by an argument that changes."""

    def script(run):
        run.call(randn(1, 3, 5, 12), "b")
        run.call(randn(2, 3, 5, 12), head="a")

    return Stack(1), one(3, 5, 12), script


@containers()
def depth_changed_between_calls():
    """A layer is taken out of a ModuleList between calls."""

    class Sliced(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).tanh()
            return x

    def script(run):
        run(1)
        run.model.layers = run.model.layers[:2]
        run(2)

    return Sliced(), one(5, 6), script


@containers()
def early_exit():
    """The user changes an attribute that says how many layers run."""

    class Exiting(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.depth = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), 3

        def forward(self, x):
            for layer in self.layers[: self.depth]:
                x = layer(x).tanh()
            return x

    def script(run):
        run(1)
        run.model.depth = 1
        run(2)
        run.model.depth = 3
        run(3)

    return Exiting(), one(5, 6), script


@containers(refused="taken over")
def inner_module_called():
    """The user calls an inner module of the compiled model alone."""

    def script(run):
        run(1)
        run.record(h=run.model.up(randn(2, 5, 6)))

    return Net(), one(5, 6), script


@containers()
def weight_used_outside():
    """The user computes with a weight of the model: a regularizer of its norm."""

    def script(run):
        run.loss = lambda y: y.square().mean() + 0.1 * run.model.up.weight.square().sum()
        run(1)

    return Net(), one(5, 6), script


@containers()
def all_weights_regularized():
    """L1 of all parameters is added to the loss."""

    def script(run):
        run.loss = lambda y: y.square().mean() + 0.01 * sum(p.abs().sum() for p in run.model.parameters())
        run(1)
        run(2)

    return Net(), one(5, 6), script


@containers(refused="taken over by autopar.compile")
def method_called():
    """A method beside forward, which uses the parameters."""

    class Encoding(Net):
        def encode(self, x):
            return self.features(x)

    def script(run):
        run(1)
        run.record(h=run.model.encode(randn(1, 5, 6)))

    return Encoding(), one(5, 6), script


@containers()
def generation_loop():
    """A generate method that calls the model in a loop."""

    class Generating(Tokens):
        @torch.no_grad()
        def generate(self, tokens, steps):
            for _ in range(steps):
                tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
            return tokens

    def script(run):
        run.record(tokens=run.model.generate(ids(1, 13, 2, 4), 3))

    return Generating(), lambda seed: (ids(seed, 13, 2, 4),), script


@containers()
def generation_by_the_user():
    """The user calls the model on ever longer tokens."""

    def script(run):
        tokens = ids(1, 13, 2, 3)
        with torch.no_grad():
            for _ in range(4):
                tokens = torch.cat([tokens, run.model(tokens)[:, -1:].argmax(-1)], 1)
        run.record(tokens=tokens)

    return Tokens(), lambda seed: (ids(seed, 13, 2, 4),), script


@containers()
def method_without_parameters():
    """A method that only computes with numbers of the model."""

    class Scheduled(Net):
        def rate(self, step):
            return 1 / (1 + step)

    def script(run):
        run.record(rate=run.model.rate(3))

    return Scheduled(), one(5, 6), script


CASTS = {
    "half": lambda m: m.half(), "double": lambda m: m.double(), "bfloat16": lambda m: m.to(torch.bfloat16),
    "to_dtype_and_device": lambda m: m.to("cpu", torch.float64),
}  # fmt: skip
for name, cast in CASTS.items():

    def _cast(run, cast=cast):
        run(1)
        cast(run.model)
        run.model(run.batch(2)[0].to(next(run.model.parameters()).dtype))
        run.record()

    containers.add(f"cast_to_{name}", lambda script=_cast: (Net(), one(5, 6), script), refused="dtype")


@containers()
def casts_that_change_nothing():
    """.to("cpu"), .float() and .cpu() of a model that is there already."""

    def script(run):
        run.model.to("cpu").float().cpu()
        run(1)

    return Net(), one(5, 6), script


@containers()
def apply_of_a_function():
    """model.apply(initialize) initializes linear layers anew."""

    def initialize(module):
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.05)
            nn.init.zeros_(module.bias)

    def script(run):
        run(1)
        run.model.apply(initialize)
        run(2)

    return Net(), one(5, 6), script


@containers(refused="taken over")
def optimizer_of_the_source():
    """The optimizer was built before compile, on the source's parameters."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def script(run):
        run(1)
        optimizer.step()
        run(2)

    return model, one(5, 6), script


@containers(refused="taken over")
def source_called_after_compile():
    """The source model is called after compile."""
    model = Net()

    def script(run):
        run(1)
        run.record(y=model(randn(1, 5, 6)))

    return model, one(5, 6), script


@containers(refused="taken over")
def source_saved_after_compile():
    """The state dict of the source model is copied after compile."""
    model = Net()

    def script(run):
        run.record(state=copy.deepcopy(model.state_dict()))

    return model, one(5, 6), script


@containers()
def wrapped_in_another_module():
    """The compiled model is a part of a larger plain one, which is trained."""

    def script(run):
        torch.manual_seed(8)
        whole = nn.Sequential(nn.LayerNorm(6), run.model, nn.Tanh())
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
        for seed in (1, 2):
            optimizer.zero_grad()
            y = whole(randn(seed, 5, 6))
            y.square().mean().backward()
            optimizer.step()
            run.record(y=y, norm=whole[0].weight)

    return Net(), one(5, 6), script


@containers()
def method_replaced_between_calls():
    """A method of the model's class gets another one in its place, on the model and then on a layer's forward."""

    class Acting(Net):
        def act(self, x):
            return x.tanh()

        def forward(self, x):
            return self.down(self.act(self.up(x)))

    def script(run):
        run(1)
        run.model.act = torch.relu
        run(2)
        plain = run.model.up.forward
        run.model.up.forward = lambda x: 3 * plain(x)
        run(3)
        del run.model.act, run.model.up.forward
        run(4)

    return Acting(), one(5, 6), script


@containers()
def method_of_the_class_replaced_between_calls():
    """A method that the forward calls, and then a layer's forward, get others in their classes."""

    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Acting(Net):
        def __init__(self):
            super().__init__()
            self.scaled = Scaled(6, 6)

        def act(self, x):
            return x.tanh()

        def forward(self, x):
            return super().forward(self.act(self.scaled(x)))

    def script(run):
        run(1)
        Acting.act = lambda self, x: torch.relu(x)
        run(2)
        Scaled.forward = lambda self, x: nn.Linear.forward(self, x) - x
        run(3)

    return Acting(), one(5, 6), script
