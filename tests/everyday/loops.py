"""Scripts that show what a loop does around its steps: accumulation, clipping, schedules, freezing, checkpoints."""

from __future__ import annotations

import copy
import io

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from .nets import EncoderHead, Language, mlp
from .script import script


def _data(count: int, size: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(size, 8), torch.randint(0, 3, (size,))) for _ in range(count)]


@script()
def accumulation(parallel, log):
    """Gradients of three batches, each loss divided by three."""
    data = _data(6, 4)
    model = parallel(mlp(8, 12, 3), (data[0][0],))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i, (x, y) in enumerate(data):
        loss = F.cross_entropy(model(x), y) / 3
        loss.backward()
        if (i + 1) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()
        log(loss=loss.item())


@script()
def accumulation_without_reduction(parallel, log):
    """Accumulate inside of model.no_sync(), if the model has it, as scripts for DDP do."""
    from contextlib import nullcontext

    data = _data(6, 4)
    model = parallel(mlp(8, 12, 3), (data[0][0],))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i, (x, y) in enumerate(data):
        is_last = (i + 1) % 3 == 0
        with nullcontext() if is_last or not hasattr(model, "no_sync") else model.no_sync():
            loss = F.cross_entropy(model(x), y) / 3
            loss.backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
        log(loss=loss.item())


@script()
def clipping_and_schedules(parallel, log):
    """Clipping by norm and by value, a warmup followed by a cosine, and a plateau watched on a validation loss."""
    data = _data(4)
    model = parallel(mlp(8, 12, 3), (data[0][0],))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.CosineAnnealingLR(optimizer, 4)], [2])
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    for i, (x, y) in enumerate(data):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if i % 2:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.3)
        else:
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.step()
        cosine.step()
        with torch.no_grad():
            plateau.step(F.cross_entropy(model(data[0][0]), data[0][1]))
        log(loss=loss.item(), norm=norm.item(), rate=optimizer.param_groups[0]["lr"])


@script()
def groups_of_parameters(parallel, log):
    """No decay for biases and norms, another rate for the head, one cycle of the rate."""
    data = [torch.randint(0, 16, (6, 8)) for _ in range(3)]
    model = parallel(Language(), (data[0],))
    decay = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for n, p in model.named_parameters() if p.ndim < 2 and "norm" not in n]
    norms = [p for n, p in model.named_parameters() if "norm" in n]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest}, {"params": norms, "lr": 5e-3}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0)
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 1e-2, 5e-3], total_steps=5)
    for tokens in data:
        loss = F.cross_entropy(model(tokens)[:, :-1].transpose(1, 2), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        log(loss=loss.item(), rates=schedule.get_last_lr(), counts=[len(g["params"]) for g in optimizer.param_groups])


@script(dtype=torch.float32, tolerance=2e-2)
def autocast(parallel, log):
    """bfloat16 around the forward and the loss, and a scaler that is switched off."""
    data = _data(3)
    model = parallel(mlp(8, 16, 3), (data[0][0],))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for x, y in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(x)
            loss = F.cross_entropy(outputs, y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        log(loss=loss.item(), kind=outputs.dtype)


@script()
def checkpointed_layers(parallel, log):
    """The model computes its layers again in the backward."""

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.out = nn.ModuleList(mlp(8, 16, 8) for _ in range(3)), nn.Linear(8, 3)

        def forward(self, x):
            for layer in self.layers:
                x = x + checkpoint(layer, x, use_reentrant=False)
            return self.out(x)

    data = _data(3)
    model = parallel(Deep(), (data[0][0],))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item())


@script()
def frozen_encoder_thawed_later(parallel, log):
    """A head is trained on a frozen encoder; then the encoder joins the optimizer with a rate of its own."""
    data = _data(4)
    net = EncoderHead()
    for p in net.encoder.parameters():
        p.requires_grad = False
    model = parallel(net, (data[0][0],))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for i, (x, y) in enumerate(data):
        if i == 2:
            for p in model.encoder.parameters():
                p.requires_grad = True
            optimizer.add_param_group({"params": model.encoder.parameters(), "lr": 1e-3})
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item(), trained=sum(p.numel() for p in model.parameters() if p.requires_grad))


@script()
def features_of_a_part(parallel, log):
    """After training, the encoder inside of the model is called by itself, for nearest neighbors."""
    data = _data(2)
    model = parallel(EncoderHead(), (data[0][0],))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        features = F.normalize(model.encoder(data[0][0]))
        nearest = (features @ features.t()).fill_diagonal_(-1).argmax(1)
    log(nearest=nearest.tolist(), mean=features.mean().item())


@script()
def activations_by_hooks(parallel, log):
    """A forward hook keeps what a layer gives, for a penalty on it and for a statistic."""
    data, kept = _data(3), {}
    model = parallel(EncoderHead(), (data[0][0],))
    model.encoder.register_forward_hook(lambda module, inputs, output: kept.update(features=output))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x, y in data:
        loss = F.cross_entropy(model(x), y) + 1e-2 * kept["features"].abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item(), dead=(kept["features"] < 0).all(0).sum().item())


@script()
def early_stopping(parallel, log):
    """The best weights are copied when the validation loss falls, and loaded when it rises."""
    data = _data(5)
    model = parallel(mlp(8, 12, 3), (data[0][0],))
    optimizer, best, best_loss, patience = torch.optim.SGD(model.parameters(), lr=2.0), None, float("inf"), 2
    for epoch, (x, y) in enumerate(data):
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = F.cross_entropy(model(data[0][0]), data[0][1]).item()
        log(epoch=epoch, loss=loss)
        if loss < best_loss:
            best, best_loss, patience = copy.deepcopy(model.state_dict()), loss, 2
        else:
            patience -= 1
            if patience == 0:
                break
    model.load_state_dict(best)
    with torch.no_grad():
        log(best=best_loss, again=F.cross_entropy(model(data[0][0]), data[0][1]).item())


@script()
def saved_and_resumed(parallel, log):
    """Model, optimizer and schedule are saved with torch.save, loaded into new ones, and trained on."""
    data, file = _data(4), io.BytesIO()

    def fresh():
        model = parallel(mlp(8, 12, 3), (data[0][0],))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, lr_scheduler.StepLR(optimizer, 2, gamma=0.5)

    def train(model, optimizer, schedule, batches):
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
            log(loss=loss.item())

    one = fresh()
    train(*one, data[:2])
    torch.save({"epoch": 2} | {name: part.state_dict() for name, part in zip(("model", "optimizer", "schedule"), one)},
               file)  # fmt: skip
    file.seek(0)
    loaded, other = torch.load(file), fresh()
    for name, part in zip(("model", "optimizer", "schedule"), other):
        part.load_state_dict(loaded[name])
    train(*other, data[loaded["epoch"] :])
    train(*one, data[2:])


@script()
def sharpness_aware(parallel, log):
    """SAM: a step up along the gradient, the gradient there, and the step from where the weights were."""
    data = _data(3)
    model = parallel(mlp(8, 12, 3), (data[0][0],))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in model.parameters()]), p=2)
        moves = []
        with torch.no_grad():
            for p in model.parameters():
                moves.append(0.05 * p.grad / (norm + 1e-12))
                p.add_(moves[-1])
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        log(loss=loss.item(), norm=norm.item())


@script()
def closures(parallel, log):
    """LBFGS calls a closure as often as it likes."""
    x, y = _data(1)[0]
    model = parallel(mlp(8, 6, 3, activation=nn.Tanh), (x,))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=3)

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(2):
        log(loss=optimizer.step(closure).item())


@script()
def statistics_for_a_dashboard(parallel, log):
    """Norms, histograms and a table of parameters, and steps left out whose loss is not finite."""
    data = _data(3)
    data[1][0][0, 0] = float("nan")
    model = parallel(EncoderHead(), (data[0][0],))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        if not torch.isfinite(loss):
            log(skipped=True)
            continue
        optimizer.zero_grad()
        loss.backward()
        norms = {name: p.grad.norm().item() for name, p in model.named_parameters()}
        ratios = {name: (p.grad.std() / (p.detach().std() + 1e-8)).item() for name, p in model.named_parameters()}
        optimizer.step()
        histogram = np.histogram(model.encoder[0].weight.detach().cpu().numpy(), bins=5)[0].tolist()
        log(loss=loss.item(), norms=norms, ratios=ratios, histogram=histogram)
    log(shapes={name: tuple(p.shape) for name, p in model.named_parameters()}, text=f"{loss:.6f}",
        total=sum(p.numel() for p in model.parameters()), arrays=model.head.bias.detach().cpu().numpy())  # fmt: skip


@script()
def graph_network(parallel, log):
    """All nodes in every step, with masks for those that train and those that test."""

    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 3)

        def forward(self, x, edges):
            for layer in (self.first, self.second):
                h = layer(x)
                x = torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]) + h
                x = F.relu(x) if layer is self.first else x
            return x

    x, edges, y = torch.randn(10, 8), torch.randint(0, 10, (2, 24)), torch.randint(0, 3, (10,))
    train = torch.arange(10) < 6
    model = parallel(Graph(), (x, edges))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    for _ in range(3):
        out = model(x, edges)
        loss = F.cross_entropy(out[train], y[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item(), test=(out[~train].argmax(1) == y[~train]).sum().item())


@script()
def low_rank_adapters(parallel, log):
    """LoRA as scripts write it: linear layers are replaced by ones with a frozen base, then the adapters are merged."""

    class LoRA(nn.Module):
        def __init__(self, base: nn.Linear):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
            self.b = nn.Parameter(torch.zeros(base.out_features, 2))

        def forward(self, x):
            return self.base(x) + F.linear(F.linear(x, self.a), self.b) * 2

    data = _data(3)
    net = mlp(8, 12, 3)
    net[0], net[2] = LoRA(net[0]), LoRA(net[2])
    model = parallel(net, (data[0][0],))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for x, y in data:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item())
    with torch.no_grad():
        before = model(data[0][0])
        for layer in (model[0], model[2]):
            layer.base.weight += 2 * layer.b @ layer.a
            layer.b.zero_()
        log(merged=torch.allclose(before, model(data[0][0])))
