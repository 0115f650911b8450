"""Small models that are unusual in one way each, most of them within what a compiler should take."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import AutoparError


class Plain(nn.Module):
    """x (B, I) -> a loss if asked for, else (B, O)."""

    def __init__(self, inputs: int = 4, hidden: int = 6, outputs: int = 3):
        super().__init__()
        self.up, self.down = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))).square().mean()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return F.cross_entropy(self.head(self.embedding(ids)).flatten(0, -2), ids.flatten())


class Buffered(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("hidden_scale", torch.tensor(0.5), persistent=False)

    def forward(self, x):
        return (self.down(self.up(x) * self.hidden_scale) * self.scale).square().mean()


class Counting(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Part(Plain):
    """Overrides what happens between the layers."""

    def __init__(self, between, **sizes):
        super().__init__(**sizes)
        self.between = between

    def forward(self, x, *rest):
        return self.between(self, x, *rest)


def branch(m, x):
    return m.down(m.up(x)).mean() if x.sum() > 0 else m.up(x).mean()


def item(m, x):
    return m.up(x).mean() * x.sum().item()


def loop(m, x):
    for _ in range(int(x.abs().max())):
        x = x + 1
    return m.up(x).mean()


def nested(m, x):
    y = m.up(x)
    return {"a": [y, (m.down(y), None, 3)], "b": {"c": y.sum()}}


def scalar_and_more(m, x, s, n, mask):
    return (m.down(m.up(x) * s)[mask.bool().sum(1) >= 0] * n.float()).mean()


def unused(m, x):
    return m.up(x).square().sum()


def inplace(m, x):
    y = m.up(x)
    y.add_(1).relu_()
    return m.down(y).mean()


def detached(m, x):
    return m.down(m.up(x).detach()).mean()


def no_gradient(m, x):
    return m.down(m.up(x)).detach().mean()


def noise(m, x):
    return m.up(x + torch.randn_like(x)).mean()


def integers(m, x):
    return m.up(x).argmax(-1)


def optional(m, x, extra=None):
    return m.down(m.up(x if extra is None else x + extra)).mean()


def views(m, x):
    return m.up(x).view(-1, 2).flip(0).t().reshape(-1).cumsum(0).mean()


def frozen(model):
    return model.requires_grad_(False)


def partly_frozen(model):
    model.up.requires_grad_(False)
    return model


def _x(batch, width=4, **options):
    return torch.randn(batch, width, **options)


def _with(between, **sizes):
    return lambda b: (Part(between, **sizes), (_x(b, sizes.get("inputs", 4)),))


MODELS = {
    "plain": lambda b: (Plain(), (_x(b),)),
    "primes": lambda b: (Plain(7, 5, 3), (_x(b, 7),)),
    "ones": lambda b: (Plain(1, 1, 1), (_x(b, 1),)),
    "tied": lambda b: (Tied(), (torch.randint(0, 7, (b, 3)),)),
    "buffers": lambda b: (Buffered(), (_x(b),)),
    "counting": lambda b: (Counting(), (_x(b),)),
    "frozen": lambda b: (frozen(Plain()), (_x(b),)),
    "partly frozen": lambda b: (partly_frozen(Plain()), (_x(b),)),
    "branch": _with(branch), "item": _with(item), "loop": _with(loop), "unused": _with(unused),
    "inplace": _with(inplace), "detached": _with(detached), "no gradient": _with(no_gradient), "noise": _with(noise),
    "integers": _with(integers), "views": _with(views), "nested": _with(nested), "none": _with(lambda m, x: None),
    "text": _with(lambda m, x: "text"), "generator": _with(lambda m, x: (y for y in m.up(x))),
    "raises": _with(lambda m, x: 1 // 0), "number": _with(lambda m, x: 3.0), "input itself": _with(lambda m, x: x),
    "parameter": _with(lambda m, x: m.up.weight), "twice": _with(lambda m, x: (y := m.up(x), y)),
    "wrong width": lambda b: (Plain(), (_x(b, 5),)),
    "double": lambda b: (Plain().double(), (_x(b, dtype=torch.float64),)),
    "half": lambda b: (Plain().half(), (_x(b).half(),)),
    "double input": lambda b: (Plain(), (_x(b, dtype=torch.float64),)),
    "integer input": lambda b: (Plain(), (torch.ones(b, 4, dtype=torch.long),)),
    "complex": lambda b: (nn.Linear(4, 4, dtype=torch.complex64), (_x(b, dtype=torch.complex64),)),
    "nan": lambda b: (Plain(), (torch.full((b, 4), float("nan")),)),
    "empty batch": lambda b: (Plain(), (_x(0),)),
    "empty width": lambda b: (Plain(inputs=0), (_x(b, 0),)),
    "one sample": lambda b: (Plain(), (_x(1)[0],)),
    "no tensor": lambda b: (Plain(), (3,)),
    "no input": lambda b: (Plain(), ()),
    "none input": lambda b: (Plain(), None),
    "none among inputs": lambda b: (Part(optional), (_x(b), None)),
    "two inputs": lambda b: (Part(optional), (_x(b), _x(b))),
    "same input twice": lambda b: (Part(optional), (x := _x(b), x)),
    "list input": lambda b: (Part(lambda m, x: m.up(x[0] + x[1]["k"]).mean()), ([_x(b), {"k": _x(b)}],)),
    "scalars": lambda b: (Part(scalar_and_more), (_x(b), torch.tensor(2.0), torch.tensor(3),
                                                  torch.ones(b, 2, dtype=torch.bool))),
    "expanded input": lambda b: (Plain(), (_x(1).expand(b, 4),)),
    "transposed input": lambda b: (Plain(), (torch.randn(4, b).t(),)),
    "input with gradient": lambda b: (Plain(), (_x(b, requires_grad=True),)),
    "gradient of an identity": lambda b: (nn.Identity(), (_x(b, requires_grad=True),)),
    "sparse input": lambda b: (Plain(), (_x(b).to_sparse(),)),
    "keyword": lambda b: (Plain(), {"x": _x(b)}),
    "wrong keyword": lambda b: (Plain(), {"y": _x(b)}),
    "meta input": lambda b: (Plain(), (_x(b, device="meta"),)),
    "set input": lambda b: (Plain(), ({_x(b)},)),
    "no parameters": lambda b: (nn.ReLU(), (_x(b),)),
    "identity": lambda b: (nn.Identity(), (_x(b),)),
    "function": lambda b: ((lambda x: x), (_x(b),)),
    "norm": lambda b: (nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh()), (_x(b),)),
    "layer norm": lambda b: (nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh()), (_x(b),)),
    "recurrent": lambda b: (nn.GRU(4, 3, batch_first=True), (torch.randn(b, 2, 4),)),
    "dropout": lambda b: (nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5)), (_x(b),)),
    "lazy": lambda b: (nn.LazyLinear(3), (_x(b),)),
    "eval": lambda b: (nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5)).eval(), (_x(b),)),
    "shared layer": lambda b: (nn.Sequential(layer := nn.Linear(4, 4), nn.ReLU(), layer), (_x(b),)),
    "convolution": lambda b: (nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten()), (torch.randn(b, 2, 4),)),
}  # fmt: skip


def build(name: str, batch: int):
    """(model, example inputs), the same ones every time."""
    torch.manual_seed(0)
    return MODELS[name](batch)


def _first(inputs, change):
    if isinstance(inputs, tuple) and inputs and isinstance(inputs[0], torch.Tensor):
        return (change(inputs[0]), *inputs[1:])
    return inputs


CHANGES = {
    "as compiled": lambda i: i,
    "other batch": lambda i: _first(i, lambda x: torch.cat([x, x])),
    "other dtype": lambda i: _first(i, lambda x: x.double()),
    "other rank": lambda i: _first(i, lambda x: x[None]),
    "no arguments": lambda i: (),
    "more arguments": lambda i: (*i, 3) if isinstance(i, tuple) else i,
    "text": lambda i: _first(i, lambda x: "text"),
    "list": lambda i: _first(i, lambda x: x.tolist()),
    "none": lambda i: _first(i, lambda x: None),
    "nan": lambda i: _first(i, lambda x: x * float("nan") if x.is_floating_point() else x),
}


def compare(parallel: nn.Module, reference: nn.Module, inputs) -> str:
    """ "right" if both models do the same with a call, forward and backward; an error that both raise is right as
    well."""
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    try:
        expected = _results(reference, args, kwargs)
    except Exception as error:
        expected = error
    try:
        got = _results(parallel, args, kwargs)
    except AutoparError:
        raise
    except Exception as error:
        if isinstance(expected, Exception):
            return "same error"
        return f"wrong: bare {type(error).__name__} {error}"
    if isinstance(expected, Exception):
        return f"wrong: accepted what gives {type(expected).__name__}: {expected}"
    same = len(got) == len(expected) and all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-5 if a.dtype != torch.half else 1e-2, equal_nan=True)
        for a, b in zip(got, expected)
    )
    return "right" if same else f"wrong: {got} instead of {expected}"


def _results(model: nn.Module, args, kwargs) -> list[torch.Tensor]:
    """Outputs, then gradients of their sum (those that there are), of parameters and of inputs."""
    outputs = [o for o in _tensors(model(*args, **kwargs))]
    loss = [o.float().sum() if not o.is_complex() else o.abs().sum() for o in outputs if o.requires_grad]
    if loss:
        sum(loss).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for tensor in _tensors([list(args), list(kwargs.values())]):
        if tensor.is_leaf and tensor.grad is not None:
            gradients.append(tensor.grad.clone())
            tensor.grad = None
    return [_whole(t).detach() for t in (*outputs, *gradients)]


def _tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in _tensors(v)] if isinstance(value, (list, tuple)) else []


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
