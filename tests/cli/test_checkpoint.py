"""`autopar checkpoint` lists, verifies and converts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.cli.main import main
from tests.storage.test_checkpoint import regressor, state_of, take_steps


@pytest.fixture
def saved(tmp_path):
    """A model, its optimizer, and a folder with checkpoints of two steps and one that was never finished."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = regressor(init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp")))
    optimizer = torch.optim.AdamW(model.parameters())
    take_steps(model, optimizer)
    root = tmp_path / "checkpoints"
    autopar.save_checkpoint(root, model, step=1)
    autopar.save_checkpoint(root, model, optimizer, step=2)
    (root / "step-00000003").mkdir()
    yield model, optimizer, root
    dist.destroy_process_group()


def test_list_and_verify(saved, capsys):
    *_, root = saved
    assert main(["checkpoint", "ls", str(root)]) == 0
    header, second, first, unfinished = capsys.readouterr().out.splitlines()
    assert header.split() == ["checkpoint", "step", "run", "saved", "size", "files"]
    assert second.split()[:2] == ["step-00000002", "2"] and first.split()[:2] == ["step-00000001", "1"]
    assert unfinished == "step-00000003: not complete"
    assert main(["checkpoint", "verify", str(root)]) == 0
    assert capsys.readouterr().out == "step-00000002: whole\nstep-00000001: whole\n"
    (root / "step-00000001" / "state.json").write_text("{}")
    assert main(["checkpoint", "verify", str(root)]) == 1
    assert "step-00000002: whole\nstep-00000001: state.json of " in capsys.readouterr().out
    (root / "step-00000002" / "manifest.json").write_text("{}")
    assert main(["checkpoint", "ls", str(root)]) == 0
    assert "step-00000002: manifest.json or COMMIT of " in capsys.readouterr().out
    assert main(["checkpoint", "ls", str(root / "none")]) == 2
    assert "there is no complete checkpoint" in capsys.readouterr().err


def test_convert(saved, tmp_path, capsys):
    model, optimizer, root = saved
    expected = state_of(model, optimizer)
    parameters = {name: torch.zeros_like(expected[name]) for name, _ in model.named_parameters()}
    state = {name: torch.zeros_like(value) for name, value in expected.items() if name not in parameters}
    assert main(["checkpoint", "convert", str(root), str(tmp_path / "dcp")]) == 0
    content = {"model": parameters, "optimizer": state, "step": 0}
    dcp.load(content, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert content["step"] == 2 and all(torch.equal(expected[n], x) for n, x in (parameters | state).items())
    assert main(["checkpoint", "convert", str(root), str(tmp_path / "hf"), "--to", "huggingface"]) == 0
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == parameters.keys() and all(torch.equal(found[name], parameters[name]) for name in found)
    assert main(["checkpoint", "convert", str(root), str(tmp_path / "hf")]) == 2
    assert "is there already" in capsys.readouterr().err
