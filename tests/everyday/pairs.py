"""Models that are called several times a step, or beside one another."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from .nets import mlp
from .script import script


@script()
def two_towers_in_batch_negatives(parallel, log):
    """CLIP: images and texts in two towers with a learned temperature, every other text of the batch a negative."""

    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.text = mlp(8, 12, 6), nn.EmbeddingBag(20, 6, mode="mean")
            self.scale = nn.Parameter(torch.tensor(1.0))

        def forward(self, images, texts):
            return F.normalize(self.image(images)), F.normalize(self.text(texts)), self.scale.exp()

    images, texts = torch.randn(3, 8, 8), torch.randint(0, 20, (3, 8, 4))
    model = parallel(Towers(), (images[0], texts[0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.2)
    for i in range(3):
        a, b, scale = model(images[i], texts[i])
        logits = scale * a @ b.t()
        same = torch.arange(len(a))
        loss = (F.cross_entropy(logits, same) + F.cross_entropy(logits.t(), same)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.scale.clamp_(0, 4.6)
        log(loss=loss.item(), scale=scale.item(), recall=(logits.argmax(1) == same).float().mean().item())


@script()
def two_views_one_encoder(parallel, log):
    """SimCLR: the encoder is called on two views, and the loss is of all pairs of both."""
    x = torch.randn(6, 8)
    model = parallel(mlp(8, 12, 6), (x,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        views = [model(x + 0.1 * torch.randn_like(x)) for _ in range(2)]
        z = F.normalize(torch.cat(views))
        similarity = z @ z.t() / 0.5
        similarity.fill_diagonal_(float("-inf"))
        loss = F.cross_entropy(similarity, torch.cat([torch.arange(6, 12), torch.arange(6)]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item())


@script()
def siamese(parallel, log):
    """One network on both of a pair; a margin for pairs that differ."""
    a, b, same = torch.randn(10, 8), torch.randn(10, 8), torch.rand(10) > 0.5
    model = parallel(mlp(8, 12, 4), (a,))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        distance = F.pairwise_distance(model(a), model(b))
        loss = torch.where(same, distance**2, F.relu(1.5 - distance) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item(), correct=int(((distance < 1) == same).sum()))


@script()
def triplets(parallel, log):
    """Anchor, positive and negative in one call; the hardest negative of the batch is chosen by distances."""
    anchor, positive, negative = (torch.randn(8, 8) for _ in range(3))
    model = parallel(mlp(8, 12, 4), (torch.cat([anchor, positive, negative]),))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.TripletMarginLoss(margin=1.0)
    for _ in range(3):
        a, p, n = model(torch.cat([anchor, positive, negative])).chunk(3)
        hardest = torch.cdist(a, n).argmin(1)
        loss = criterion(a, p, n[hardest])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item(), hardest=hardest.tolist())


def _distilled(parallel, log, teacher):
    x, y = torch.randn(10, 8), torch.randint(0, 3, (10,))
    student = parallel(mlp(8, 6, 3), (x,))
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    for _ in range(3):
        with torch.no_grad():
            wanted = teacher(x)
        out = student(x)
        soft = F.kl_div((out / 2).log_softmax(-1), (wanted / 2).softmax(-1), reduction="batchmean") * 4
        loss = 0.5 * soft + 0.5 * F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item(), agree=(out.argmax(-1) == wanted.argmax(-1)).sum().item())


@script()
def distillation_from_a_plain_teacher(parallel, log):
    """The teacher is on every rank as it is."""
    _distilled(parallel, log, mlp(8, 24, 3).eval().requires_grad_(False))


@script()
def distillation_from_a_parallel_teacher(parallel, log):
    """The teacher is frozen and on many devices too."""
    teacher = mlp(8, 24, 3).eval()
    for p in teacher.parameters():
        p.requires_grad = False
    _distilled(parallel, log, parallel(teacher, (torch.randn(10, 8),)))


@script()
def momentum_encoder_with_a_queue(parallel, log):
    """MoCo: keys come from a copy that follows the encoder, negatives from a queue of former keys."""
    x = torch.randn(4, 6, 8)
    query = parallel(mlp(8, 12, 4), (x[0],))
    key = copy.deepcopy(query)
    for p in key.parameters():
        p.requires_grad_(False)
    queue, optimizer = F.normalize(torch.randn(18, 4)), torch.optim.SGD(query.parameters(), lr=0.1)
    for batch in x:
        q = F.normalize(query(batch + 0.1))
        with torch.no_grad():
            for mine, theirs in zip(key.parameters(), query.parameters()):
                mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)
            k = F.normalize(key(batch - 0.1))
        logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ queue.t()], 1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        queue = torch.cat([k, queue])[:18]
        log(loss=loss.item(), queue=queue)


@script()
def matrix_factorization(parallel, log):
    """Users and items as embeddings with biases, batches of ratings."""

    class Factors(nn.Module):
        def __init__(self):
            super().__init__()
            self.users, self.items = nn.Embedding(14, 6), nn.Embedding(9, 6)
            self.user_bias, self.item_bias = nn.Embedding(14, 1), nn.Embedding(9, 1)
            self.mean = nn.Parameter(torch.zeros(()))

        def forward(self, user, item):
            biases = self.user_bias(user) + self.item_bias(item)
            return (self.users(user) * self.items(item)).sum(-1) + biases.squeeze(-1) + self.mean

    user, item, rating = torch.randint(0, 14, (24,)), torch.randint(0, 9, (24,)), torch.rand(24) * 5
    model = parallel(Factors(), (user[:8], item[:8]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=1e-3)
    for first in range(0, 24, 8):
        part = slice(first, first + 8)
        loss = F.mse_loss(model(user[part], item[part]), rating[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(rmse=loss.sqrt().item())
    model.eval()
    with torch.no_grad():
        scores = model(torch.full((9,), 3), torch.arange(9))
    log(best=scores.argsort(descending=True)[:3].tolist())


@script()
def words_with_negative_samples(parallel, log):
    """word2vec: scores of a word with its neighbor and with drawn others."""

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Embedding(20, 8), nn.Embedding(20, 8)

        def forward(self, center, others):
            return torch.einsum("bd,bkd->bk", self.inner(center), self.outer(others))

    center, context = torch.randint(0, 20, (3, 8)), torch.randint(0, 20, (3, 8))
    model = parallel(Words(), (center[0], torch.zeros(8, 5, dtype=torch.long)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for i in range(3):
        drawn = torch.multinomial(torch.ones(20), 32, replacement=True).view(8, 4)
        scores = model(center[i], torch.cat([context[i, :, None], drawn], 1))
        loss = -(F.logsigmoid(scores[:, 0]) + F.logsigmoid(-scores[:, 1:]).sum(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item())
    vectors = model.inner.weight.detach()
    log(nearest=F.cosine_similarity(vectors[3], vectors).topk(3).indices.tolist())


@script()
def ranking_by_pairs(parallel, log):
    """RankNet: documents of a query are scored together, pairs of them compared."""
    documents, relevance = torch.randn(4, 5, 8), torch.randint(0, 4, (4, 5))
    model = parallel(mlp(8, 12, 1), (documents,))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        scores = model(documents).squeeze(-1)
        better = relevance[:, :, None] > relevance[:, None, :]
        loss = F.softplus(scores[:, None, :] - scores[:, :, None])[better].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item(), order=scores.argsort(-1).tolist())


@script()
def ensemble_of_folds(parallel, log):
    """Cross-validation: a model for each fold, whose predictions are averaged in the end."""
    x, y = torch.randn(12, 8), torch.randint(0, 3, (12,))
    models = []
    for fold in torch.arange(12).chunk(2):
        rest = torch.tensor([i for i in range(12) if i not in fold.tolist()])
        model = parallel(mlp(8, 12, 3), (x[rest],))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(2):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[rest]), y[rest])
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            log(held_out=F.cross_entropy(model(x[fold]), y[fold]).item())
        models.append(model)
    with torch.no_grad():
        average = torch.stack([m(x).softmax(-1) for m in models]).mean(0)
    log(average=average, accuracy=(average.argmax(1) == y).double().mean().item())
