"""Classifiers and regressions: a loss outside of the model, metrics, several heads."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from .nets import ConvNet, EncoderHead, mlp
from .script import script


@script()
def classifier(parallel, log):
    """Epochs over a DataLoader whose last batch is short; loss, accuracy, and a validation after each."""
    x = torch.randn(44, 8)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    train = DataLoader(TensorDataset(x[:30], y[:30]), batch_size=8, shuffle=True)
    validation = DataLoader(TensorDataset(x[30:], y[30:]), batch_size=8)
    model = parallel(mlp(8, 16, 3), (x[:8],))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        model.train()
        total, correct = 0.0, 0
        for inputs, targets in train:
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = F.cross_entropy(outputs, targets)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(inputs)
            correct += (outputs.argmax(dim=1) == targets).sum().item()
        log(epoch=epoch, loss=total / 30, accuracy=correct / 30)
        model.eval()
        with torch.no_grad():
            predictions = torch.cat([model(inputs).argmax(1) for inputs, _ in validation])
        log(accuracy=(predictions == y[30:]).float().mean().item(), predictions=predictions.tolist())


@script()
def images_with_batch_norm(parallel, log):
    """A convolutional network in train mode and in eval mode by turns, whose running statistics follow."""
    images, labels = torch.randn(24, 1, 8, 8), torch.randint(0, 4, (24,))
    model = parallel(ConvNet(), (images[:8],))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    for _ in range(2):
        model.train()
        for first in range(0, 24, 8):
            loss = criterion(model(images[first : first + 8]), labels[first : first + 8])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            log(loss=loss.item())
        model.eval()
        with torch.inference_mode():
            probabilities = torch.softmax(model(images), -1)
            top = probabilities.topk(2)
        log(confidence=top.values.numpy().mean(), top2=(top.indices == labels[:, None]).any(-1).float().mean().item())


@script()
def class_weights_and_label_smoothing(parallel, log):
    """Classes of unequal size, targets that are softened."""
    x, y = torch.randn(12, 8), torch.tensor([0] * 8 + [1] * 3 + [2])
    weights = len(y) / (3 * torch.bincount(y))
    criterion = nn.CrossEntropyLoss(weight=weights, label_smoothing=0.1)
    model = parallel(mlp(8, 12, 3), (x,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        log(loss=float(loss))


@script()
def several_labels_with_numpy_metrics(parallel, log):
    """Sigmoid outputs with positive weights; precision and recall are computed in numpy over all batches."""
    x, y = torch.randn(20, 8), (torch.rand(20, 5) > 0.7).to(torch.get_default_dtype())
    model = parallel(mlp(8, 12, 5, activation=nn.GELU), (x[:10],))
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.full((5,), 2.0))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-2)
    scores, targets = [], []
    for step in range(4):
        part = slice(10 * (step % 2), 10 * (step % 2) + 10)
        logits = model(x[part])
        loss = criterion(logits, y[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scores.append(logits.sigmoid().detach().cpu().numpy())
        targets.append(y[part].numpy())
    found, wanted = np.concatenate(scores) > 0.5, np.concatenate(targets) > 0.5
    hits = np.logical_and(found, wanted).sum()
    log(loss=loss.item(), precision=hits / max(found.sum(), 1), recall=hits / wanted.sum())


@script()
def regression(parallel, log):
    """A smooth L1 loss on standardized targets, predictions brought back to their scale, R squared."""
    x = torch.randn(16, 8)
    y = x @ torch.randn(8) * 10 + 3
    mean, deviation = y.mean(), y.std()
    model = parallel(mlp(8, 16, 1, activation=nn.Tanh), (x,))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for _ in range(4):
        prediction = model(x).squeeze(-1)
        loss = F.smooth_l1_loss(prediction, (y - mean) / deviation)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        real = prediction.detach() * deviation + mean
        log(loss=loss.item(), r2=1 - ((real - y) ** 2).sum().item() / ((y - mean) ** 2).sum().item())


@script()
def auxiliary_heads(parallel, log):
    """Two outputs in training, of which the second counts less, and one in evaluation."""

    class Inception(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.middle, self.out = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 3)
            self.auxiliary = nn.Linear(12, 3)

        def forward(self, x):
            h = F.relu(self.stem(x))
            y = self.out(F.relu(self.middle(h)))
            return (y, self.auxiliary(h)) if self.training else y

    x, y = torch.randn(10, 8), torch.randint(0, 3, (10,))
    model = parallel(Inception(), (x,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model.train()
        out, auxiliary = model(x)
        loss = F.cross_entropy(out, y) + 0.3 * F.cross_entropy(auxiliary, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            log(loss=loss.item(), error=(model(x).argmax(-1) != y).float().mean().item())


@script()
def tasks_weighted_by_their_uncertainty(parallel, log):
    """Two tasks whose losses are weighted by parameters of a criterion of the user's own, beside the model."""

    class Weighted(nn.Module):
        def __init__(self, tasks: int):
            super().__init__()
            self.log_variances = nn.Parameter(torch.zeros(tasks))

        def forward(self, *losses):
            return sum(torch.exp(-s) * loss + s for s, loss in zip(self.log_variances, losses))

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.heads = mlp(8, 12), nn.ModuleDict({"kind": nn.Linear(12, 3), "size": nn.Linear(12, 1)})

        def forward(self, x):
            h = torch.tanh(self.trunk(x))
            return {name: head(h) for name, head in self.heads.items()}

    x, kind, size = torch.randn(12, 8), torch.randint(0, 3, (12,)), torch.rand(12, 1)
    model, criterion = parallel(Two(), (x,)), Weighted(2)
    optimizer = torch.optim.Adam([*model.parameters(), *criterion.parameters()], lr=1e-2)
    for _ in range(3):
        out = model(x)
        loss = criterion(F.cross_entropy(out["kind"], kind), F.mse_loss(out["size"], size))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item(), weights=criterion.log_variances.exp().tolist())


@script()
def mixup(parallel, log):
    """Inputs and their losses are mixed by pairs."""
    x, y = torch.randn(12, 8), torch.randint(0, 3, (12,))
    model = parallel(mlp(8, 12, 3), (x,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, nesterov=True, momentum=0.9)
    for _ in range(3):
        share, order = torch.distributions.Beta(0.4, 0.4).sample().item(), torch.randperm(12)
        out = model(share * x + (1 - share) * x[order])
        loss = share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item(), accuracy=(out.argmax(1) == y).sum().item() / len(y))


@script()
def focal_loss_with_penalties(parallel, log):
    """Hard examples count more, and weights are kept small by terms of the loss."""
    x, y = torch.randn(12, 8), torch.randint(0, 3, (12,))
    model = parallel(mlp(8, 12, 3), (x,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        losses = F.cross_entropy(model(x), y, reduction="none")
        focal = ((1 - torch.exp(-losses)) ** 2 * losses).mean()
        l1 = sum(p.abs().sum() for p in model.parameters())
        l2 = sum(p.pow(2).sum() for n, p in model.named_parameters() if n.endswith("weight"))
        loss = focal + 1e-3 * l1 + 1e-2 * l2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item(), hardest=losses.argmax().item(), l2=l2.item())


@script()
def margin_on_normalized_weights(parallel, log):
    """ArcFace: the script computes logits itself, of features and of the head's normalized weight."""
    x, y = torch.randn(12, 8), torch.randint(0, 3, (12,))

    class Features(EncoderHead):
        def forward(self, x):
            return F.normalize(self.encoder(x)), self.head(self.encoder(x))

    model = parallel(Features(), (x,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        features, logits = model(x)
        cosine = F.linear(features, F.normalize(model.head.weight))
        target = torch.cos(torch.acos(cosine.clamp(-0.999, 0.999)) + 0.2)
        marked = F.one_hot(y, 3).bool()
        loss = F.cross_entropy(8 * torch.where(marked, target, cosine), y) + 0.1 * F.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item())


@script()
def segmentation(parallel, log):
    """A small U-Net with a Dice loss, and the intersection over union."""

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.middle = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
            self.up, self.out = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(8, 1, 1)

        def forward(self, x):
            skip = F.relu(self.down(x))
            return self.out(torch.cat([skip, F.relu(self.up(F.relu(self.middle(F.max_pool2d(skip, 2)))))], 1))

    images = torch.randn(6, 1, 8, 8)
    masks = (images > 0.3).to(images)
    model = parallel(UNet(), (images,))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        logits = model(images)
        p = logits.sigmoid()
        dice = 1 - (2 * (p * masks).sum((1, 2, 3)) + 1) / (p.sum((1, 2, 3)) + masks.sum((1, 2, 3)) + 1)
        loss = dice.mean() + F.binary_cross_entropy_with_logits(logits, masks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found = logits.detach() > 0
        log(loss=loss.item(), iou=((found & (masks > 0)).sum() / (found | (masks > 0)).sum()).item())


@script()
def boxes_of_matched_anchors(parallel, log):
    """A detector's losses: scores of all anchors, boxes of those alone that match."""

    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.score, self.box = mlp(8, 12), nn.Linear(12, 5), nn.Linear(12, 20)

        def forward(self, x):
            h = F.relu(self.trunk(x))
            return {"scores": self.score(h), "boxes": self.box(h).view(-1, 5, 4)}

    x, match, boxes = torch.randn(6, 8), torch.rand(6, 5) > 0.6, torch.rand(6, 5, 4)
    model = parallel(Detector(), (x,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        out = model(x)
        positive = out["boxes"][match]
        loss = F.binary_cross_entropy_with_logits(out["scores"], match.to(x))
        loss = loss + F.smooth_l1_loss(positive, boxes[match], reduction="sum") / max(1, match.sum().item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item(), matched=positive.shape[0])
