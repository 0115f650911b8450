"""`autopar checkpoint`: which checkpoints a folder has, whether they are whole, and what is in them for others."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CheckpointCorrupt, CheckpointError
from ..utils.format import size, table
from . import common

if TYPE_CHECKING:
    from ..storage.manifest import Manifest

EXAMPLES = {
    "ls": ("list the checkpoints in a folder, the one that was saved last first", "autopar checkpoint ls checkpoints/"),
    "verify": ("read checkpoints whole and compare them with their digests", "autopar checkpoint verify checkpoints/"),
    "convert": (
        "write a checkpoint for torch.distributed.checkpoint, or its model for transformers",
        "autopar checkpoint convert checkpoints/step-00000040 out --to dcp",
    ),
}


def add(subparsers) -> None:
    """Declare `autopar checkpoint` and its commands."""
    summary = "list, verify and convert checkpoints"
    parser = common.command(subparsers, "checkpoint", summary, EXAMPLES["ls"][1], ls)  # the commands have their own
    commands = parser.add_subparsers(dest="what", required=True, metavar="ls|verify|convert")
    for name, (text, example) in EXAMPLES.items():
        command = common.command(commands, name, text, example, {"ls": ls, "verify": verify, "convert": convert}[name])
        command.add_argument("folder", metavar="FOLDER", help="a checkpoint, or the folder of several")
        if name == "convert":
            command.add_argument("out", metavar="OUT", help="a folder that is not there yet")
            command.add_argument(
                "--to",
                choices=("dcp", "huggingface"),
                default="dcp",
                help="torch.distributed.checkpoint, model and optimizer by name, or the model alone (default dcp)",
            )


def ls(args: argparse.Namespace) -> int:
    """Print the checkpoints of a folder."""
    from ..storage.manifest import Manifest, incomplete

    rows, others = [], [f"{path.name}: not complete" for path in incomplete(Path(args.folder).expanduser())]
    for path in _checkpoints(args.folder):
        try:
            rows.append([path.name, *_columns(Manifest.read(path))])
        except CheckpointError as error:
            others.append(f"{path.name}: {error.message}")
    print("\n".join([*table(["checkpoint", "step", "run", "saved", "size", "files"], rows), *others]))
    return 0


def _columns(manifest: Manifest) -> list[str]:
    bytes_ = sum(digest.bytes_ for digest in manifest.files.values())
    return [str(manifest.step), manifest.run, manifest.saved, size(bytes_), str(len(manifest.files))]


def verify(args: argparse.Namespace) -> int:
    """Print of each checkpoint whether it is whole. Return 1 if one is damaged."""
    from ..storage.manifest import Manifest

    code = 0
    for path in _checkpoints(args.folder):
        try:
            manifest = Manifest.read(path)
            manifest.refuse_unlisted(path)
            manifest.check(path)
            print(f"{path.name}: whole", flush=True)
        except CheckpointCorrupt as error:
            print(f"{path.name}: {error.message}", flush=True)
            code = 1
    return code


def convert(args: argparse.Namespace) -> int:
    """Check a checkpoint, the newest of a folder, and write it in another format."""
    from ..storage import converted
    from ..storage.manifest import Manifest

    path, out = _checkpoints(args.folder)[0], Path(args.out).expanduser()
    manifest = Manifest.read(path)
    manifest.check(path)
    if out.exists():
        raise CheckpointError(f"{out} is there already", fix="give the name of a new folder")
    {"dcp": converted.to_dcp, "huggingface": converted.to_huggingface}[args.to](path, out, manifest.step)
    print(f"{path.name} written to {out}")
    return 0


def _checkpoints(folder: str) -> list[Path]:
    """Return the complete checkpoints of a folder, or that one. Raises CheckpointError if there is none."""
    from ..storage.manifest import COMMIT, complete

    root = Path(folder).expanduser()
    found = [root] if (root / COMMIT).is_file() else complete(root)
    if not found:
        raise CheckpointError(f"there is no complete checkpoint in {folder}", fix="see the path")
    return found
