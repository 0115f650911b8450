"""Lightning trains a module that calls a compiled one as it trains the plain one in one process.

The tests need `pip install lightning`, and are skipped without it.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autopar
from tests.helpers import gloo
from tests.runtime.parity import device_mesh

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
BATCH, EPOCHS = 8, 3


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(48, 6, generator=generator), torch.randn(48, 4, generator=generator))


def _module(model: nn.Module):
    import lightning

    class Regression(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses, self.norms = model, [], []

        def training_step(self, batch, at):
            x, y = batch
            loss = (self.model(x) - y).square().mean()
            self.losses.append(loss.item())
            self.log("loss", self.trainer.strategy.reduce(loss))
            return loss

        def validation_step(self, batch, at):
            x, y = batch
            self.log("validation", self.trainer.strategy.reduce((self.model(x) - y).square().mean()))

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    return Regression()


def _trained(module, loader, validation, folder, checkpoint=None, epochs: int = EPOCHS, strategy="auto") -> dict:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    keeping = ModelCheckpoint(folder, save_last=True, monitor="validation")
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, strategy=strategy, logger=False, callbacks=[keeping],
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=0.5, num_sanity_val_steps=0,
        accumulate_grad_batches=2,
    )  # fmt: skip
    trainer.fit(module, loader, validation, ckpt_path=checkpoint)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _on_autopar(rank: int, mesh: str, inputs: str, options: dict, folder) -> tuple[list[float], dict, list[float]]:
    from autopar.integrations.lightning import AutoparStrategy

    devices, data = device_mesh(mesh), _data()
    parts = devices.size(0) if inputs == "local" else 1
    sampler = DistributedSampler(data, parts, devices.get_local_rank(0), shuffle=False) if parts > 1 else None
    loader = DataLoader(data, BATCH // parts, sampler=sampler)
    found = []
    os.environ["AUTOPAR_CACHE"] = str(folder.parent / "cache")  # the second run finds what the first one has traced
    for checkpoint, epochs in ((None, EPOCHS), (folder / "last.ckpt", EPOCHS + 1)):  # the second one goes on
        model = autopar.compile(_net(), devices, data[: BATCH // parts][0], inputs=inputs, **options)
        module = _module(model)
        metrics = _trained(module, loader, loader, folder, checkpoint, epochs, AutoparStrategy(model))
        found.append(torch.tensor(module.losses))
    return found[0], metrics, found[1]


@pytest.mark.gloo
@pytest.mark.parametrize(("mesh", "inputs", "options"), [
    ("dp=2", "local", dict(strategy="fsdp")),
    pytest.param("tp=2", "global", dict(strategy="megatron"), marks=pytest.mark.slow),
    pytest.param("dp=2,tp=2", "local", {}, marks=pytest.mark.slow),
])  # fmt: skip
def test_losses_and_resumed_training_are_those_of_one_process(tmp_path, mesh, inputs, options):
    expected = []
    for checkpoint, epochs in ((None, EPOCHS), (tmp_path / "plain/last.ckpt", EPOCHS + 1)):
        module, loader = _module(_net()), DataLoader(_data(), BATCH)
        metrics = _trained(module, loader, loader, tmp_path / "plain", checkpoint, epochs)
        expected.append(torch.tensor(module.losses))
    results = gloo.run(4 if "," in mesh else 2, _on_autopar, mesh, inputs, options, tmp_path / "autopar")
    parts = 2 if inputs == "local" else 1
    for at in (0, 2):  # a rank's loss is that of its samples: all together have the mean
        ranks = torch.stack([found[at] for found in results[:: len(results) // parts if parts > 1 else 1]])
        torch.testing.assert_close(ranks.mean(0), expected[at // 2], rtol=1e-5, atol=0)
    for _, found, _ in results:
        assert found == pytest.approx(metrics, rel=1e-5)
    assert sorted(p.name for p in (tmp_path / "autopar").iterdir()) == sorted(
        p.name for p in (tmp_path / "plain").iterdir()
    )
    state = torch.load(tmp_path / "autopar/last.ckpt", weights_only=False)["state_dict"]
    assert {type(value) for value in state.values()} == {torch.Tensor}


def _with_fabric(rank: int) -> None:
    """Fabric's backward, clipping and loaders around a module that is not set up by it."""
    import lightning

    data = _data()
    found = []
    for make in (lambda: autopar.compile(_net(), device_mesh("dp=2"), data[:BATCH][0]), _net):
        fabric = lightning.Fabric(accelerator="cpu", devices=1)
        model, losses = make(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for x, y in fabric.setup_dataloaders(DataLoader(data, BATCH)):
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        found.append(losses)
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.slow
@pytest.mark.gloo
def test_fabric():
    gloo.run(2, _with_fabric)
