"""A checkpoint in other programs' formats. Its tensors are whole already, so that no mesh is needed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from torch.distributed import checkpoint as dcp

from .durable import disk_errors
from .opened import MODEL, OPTIMIZER, STATE
from .weights import STEM, WeightsFolder


def to_dcp(path: Path, out: Path, step: int) -> None:
    """Write a checkpoint for torch.distributed.checkpoint: {"model": {NAME: tensor}, "optimizer": {"NAME/KEY": tensor},
    "step": int}. Its tensors are in memory together. Raises CheckpointError if it cannot be written."""
    content: dict[str, object] = {"model": _tensors(path / MODEL, STEM), "step": step}
    if json.loads((path / STATE).read_text())["optimizer"] is not None:
        content["optimizer"] = _tensors(path, OPTIMIZER)
    with disk_errors(out):
        dcp.save(content, checkpoint_id=out, no_dist=True)


def to_huggingface(path: Path, out: Path, step: int) -> None:
    """Copy the model of a checkpoint, which is a folder of transformers."""
    with disk_errors(out):
        shutil.copytree(path / MODEL, out)


def _tensors(folder: Path, stem: str) -> dict:
    files = WeightsFolder(folder, stem)
    try:
        return {name: files.read(name) for name in files.forms}
    finally:
        files.close()
