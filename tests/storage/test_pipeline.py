"""Saving and loading when a rank has the parameters of its stages alone: on other meshes, on one device, and back."""

from __future__ import annotations

import errno
import itertools
import json
import os

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import autopar
from autopar.errors import CheckpointError, InputError
from autopar.models.output import Output
from autopar.storage import tensor_file
from tests.helpers import gloo
from tests.runtime import tiny
from tests.runtime.parity import assert_close, device_mesh

MESHES = {"pp=2,dp=2": "fsdp", "pp=2,tp=2": "megatron", "pp=4": None, "dp=2,tp=2": "fsdp"}
MOVED = {"pp=2,dp=2": {*MESHES}, "dp=2,tp=2": {"pp=4"}, "pp=4": {"pp=2,tp=2"}}


def gpt2():
    return tiny.gpt2(batch=8, n_layer=1)


def optimizer_of(model) -> torch.optim.Optimizer:
    """Two groups, of which a stage may have no parameter in one."""
    parameters = [p for p in model.parameters()]
    groups = [[p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]]
    return torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}], lr=0.01
    )


def steps(model, optimizer, batch, count: int = 2) -> list[float]:
    losses = []
    for _ in range(count):
        loss = model(**batch).loss
        loss.backward()
        clip = getattr(model, "clip_grad_norm_", None) or (
            lambda *a: torch.nn.utils.clip_grad_norm_(model.parameters(), *a)
        )
        losses += [loss.item(), clip(0.5).item()]
        optimizer.step()
        optimizer.zero_grad()
    return losses


def close(mine: list[float], wanted: list[float]) -> bool:
    return max(abs(a / b - 1) for a, b in zip(mine, wanted, strict=True)) < 1e-4


class Reads:
    """Names of the tensors that are read from files, and ranks that parts are received from."""

    def __init__(self, patch):
        self.names, self.senders, read, recv = set(), set(), tensor_file.TensorFile.read, dist.recv
        patch.setattr(
            tensor_file.TensorFile, "read", lambda file, name, *a: (self.names.add(name), read(file, name, *a))[1]
        )
        patch.setattr(dist, "recv", lambda tensor, src, **group: (self.senders.add(src), recv(tensor, src, **group))[1])


def _between_meshes(rank: int, root: str, wanted: list[float], texts: tuple[str, ...]) -> dict:
    (_, batch), runs = gpt2(), {}
    os.environ["AUTOPAR_CACHE"] = f"{root}/cache"  # meshes share the capture
    with pytest.MonkeyPatch.context() as patch:
        reads = Reads(patch)
        for text in texts:
            reads.names.clear()
            with torch.device("meta"):
                empty, _ = gpt2()
            options = dict(micro_batches=2) if "pp" in text else {}
            model = autopar.compile(empty, device_mesh(text), batch, weights=f"{root}/in", strategy=MESHES[text],
                                    **options)  # fmt: skip
            assert reads.names == {n for n, _ in model.named_parameters()}, text
            optimizer = optimizer_of(model)
            losses = steps(model, optimizer, batch)
            reads.senders.clear()
            autopar.save_checkpoint(f"{root}/{text}", model, optimizer, step=1, data={"rank": rank})
            assert reads.senders <= {*model.stage_mesh.ranks[model.stage_mesh.pp_rank]}, (
                "a part from a rank of another stage"
            )
            assert close(losses + steps(model, optimizer, batch), wanted), text
            runs[text] = model, optimizer
            assert "pp=4" in text or not all(layout.is_replicated for layout in model.layouts.values())
    for saved, text in itertools.product(runs, repeat=2):
        if text in MOVED.get(saved, ()):
            model, optimizer = runs[text]
            torch.manual_seed(rank)
            assert autopar.load_checkpoint(f"{root}/{saved}", model, optimizer).data == {"rank": rank}
            assert close(steps(model, optimizer, batch), wanted[4:]), f"{saved} on {text}"
            _gradients(model, batch, torch.load(f"{root}/gradients.pt"), f"{saved} on {text}")
    _state_dicts(rank, runs["pp=2,dp=2"][0])
    _full_disk(rank, root, *runs["pp=2,dp=2"])
    for text in texts:
        autopar.load_checkpoint(f"{root}/dp=2,tp=2", runs[text][0])
        runs[text][0].save_pretrained(f"{root}/out {text}")
    return {text: len(list(model.parameters())) for text, (model, _) in runs.items()}


def _gradients(model, batch, wanted: dict, note: str) -> None:
    """After two more steps, and their norms over the whole model."""
    model(**batch).loss.backward()
    for kind, norm in wanted["norms"].items():
        found = model.clip_grad_norm_(1e9, kind).item()
        assert abs(found / norm - 1) < 1e-3, f"{note}, norm {kind}"
        everyone = [None] * 4
        dist.all_gather_object(everyone, found)
        assert len({*everyone}) == 1, f"{note}, norm {kind}: {everyone}"
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, wanted["gradients"][name], f"{note}, {name}", 2e-3)
    model.zero_grad()


def _state_dicts(rank: int, model) -> None:
    """A rank's own tensors go out; they come in again, alone or among those of the whole model."""
    whole = gpt2()[0].state_dict()
    model.load_state_dict({name: value / 2 for name, value in whole.items()})
    state = model.state_dict()
    assert {*state} | {*model.elsewhere} == {*whole} and not {*state} & {*model.elsewhere}
    for name, value in state.items():
        assert torch.equal(value.full_tensor(), whole[name] / 2), name
        assert not any("Strided" in repr(p) for p in value.placements)
    model.load_state_dict({name: value.detach() * 2 for name, value in state.items()})
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), whole[name]), name
    own = next(iter(state))
    with pytest.raises(RuntimeError, match=f"Missing.*{own}"):
        model.load_state_dict({name: value for name, value in whole.items() if name != own})
    with pytest.raises(RuntimeError, match="Unexpected.*strange"):
        model.load_state_dict(whole | {"strange": torch.ones(1)})
    of_all = torch.distributed.tensor.DTensor.from_local(whole[own], device_mesh("dp=4"), run_check=False)
    with pytest.raises(InputError, match="is a DTensor of ranks"):
        model.load_state_dict(whole | {own: of_all})


def _full_disk(rank: int, root: str, model, optimizer) -> None:
    """On one rank, in the middle: the same error on all of them."""

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(tensor_file.TensorFileWriter, "append", refuse)
        with pytest.raises(CheckpointError, match="No space left"):
            autopar.save_checkpoint(f"{root}/full", model, optimizer, step=1)
    assert autopar.latest_checkpoint(f"{root}/full") is None


@pytest.mark.gloo
@pytest.mark.parametrize("texts", [("pp=2,dp=2", "dp=2,tp=2"), pytest.param((*MESHES,), marks=pytest.mark.slow)])
def test_pipelines_and_other_meshes(tmp_path, texts):
    source, batch = gpt2()
    source.save_pretrained(tmp_path / "in")
    wanted = steps(source, optimizer_of(source), batch, 4)
    source(**batch).loss.backward()
    gradients = {name: p.grad for name, p in source.named_parameters()}
    norms = {kind: torch.nn.utils.get_total_norm(gradients.values(), kind).item() for kind in (1.0, 2.0, float("inf"))}
    torch.save({"gradients": gradients, "norms": norms}, tmp_path / "gradients.pt")
    counts = gloo.run(4, _between_meshes, str(tmp_path), wanted, texts, seconds=240)
    assert all(count[text] < count["dp=2,tp=2"] for count in counts for text in texts if "pp" in text)

    folders = [tmp_path / text / "step-00000001" / "model" for text in texts] + [
        tmp_path / f"out {text}" for text in texts
    ]
    models = []
    for folder in folders:
        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        held = [(name, file) for file in {*index.values()} for name in load_file(folder / file)]
        assert sorted(held) == sorted(index.items()) and {*index} == {n for n, _ in source.named_parameters()}
        assert len({*index.values()}) == 4  # every rank writes some
        models.append(type(source).from_pretrained(folder))
    for model in models[1:]:
        for name, parameter in models[0].named_parameters():
            assert_close(model.get_parameter(name), parameter, name, 1e-3)


class Dropping(torch.nn.Module):
    """Random numbers are drawn in the second half alone, which has a buffer that is saved and one that is not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(4)))
        self.second = torch.nn.Linear(6, 4)
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.register_buffer("shift", torch.ones(4), persistent=False)

    def forward(self, x, target):
        y = torch.nn.functional.dropout(torch.relu(self.second(self.first(x))), 0.5, self.training)
        return Output(torch.nn.functional.mse_loss(y * self.scale + self.shift, target), None)


def _random(rank: int, root: str) -> None:
    x, y = tiny.Regressor.batch()
    batch = dict(x=x, target=y)
    model = autopar.compile(Dropping(), device_mesh("pp=2"), batch, micro_batches=2)
    optimizer = optimizer_of(model)
    assert ("scale" in model.elsewhere, *model.pp_ranks_of("scale")) == (rank == 0, 1)
    steps(model, optimizer, batch, 3)
    if rank == 1:
        model.scale.mul_(1.5)
    autopar.save_checkpoint(f"{root}/saved", model, optimizer, step=3)
    wanted = steps(model, optimizer, batch), torch.rand(1)
    if rank == 1:
        model.scale.fill_(0.0)
    model.random.seed, model.random.offset = 0, 0
    torch.manual_seed(5)
    autopar.load_checkpoint(f"{root}/saved", model, optimizer)
    assert (steps(model, optimizer, batch), torch.rand(1)) == wanted
    different = [optimizer, torch.optim.AdamW(model.parameters())]
    with pytest.raises(
        CheckpointError, match="ranks have different optimizers: AdamW with 2 groups, AdamW with 1 groups"
    ):
        autopar.save_checkpoint(f"{root}/saved", model, different[rank], step=4)
    model.save_pretrained(f"{root}/out")


@pytest.mark.gloo
def test_random_numbers_and_buffers(tmp_path):
    gloo.run(2, _random, str(tmp_path))
    plain = Dropping()
    held = [load_file(file) for file in sorted((tmp_path / "out").glob("*.safetensors"))]
    plain.load_state_dict({name: value for file in held for name, value in file.items()})
    assert torch.equal(plain.scale, torch.full((4,), 3.0)) and len(held) == 2
