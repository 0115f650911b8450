"""`autopar cost`: what the cost model that plans are made with says of a table of measured operators, or of a profile's
own sources and errors."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..hardware import profile
from ..utils.format import table as text_table
from . import common

if TYPE_CHECKING:
    import numpy as np

    from ..cost.operator_tables import OperatorTable

EXAMPLE = "autopar cost --hardware h100 --table h100_gemm_bf16.csv"


def add(subparsers) -> None:
    """Declare `autopar cost` and its arguments."""
    parser = common.command(subparsers, "cost", "compare the cost model with measured operators", EXAMPLE, run)
    profiles = f"{', '.join(profile.names())}, or a TOML file (default h100)"
    parser.add_argument("--hardware", default="h100", help=profiles)
    columns = (
        "CSV file of measured products, attention, experts or collectives, milliseconds last; without it the profile's "
        "own sources and errors are printed"
    )
    parser.add_argument("--table", metavar="FILE", help=columns)
    precision = "bf16, fp16, fp32, fp8 or fp8_block (default: what the file's name says, else bf16)"
    parser.add_argument("--precision", metavar="P", help=precision)
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON; - for stdout instead of the text")


def run(args: argparse.Namespace) -> int:
    """Print the errors of a table by size class, or of the profile."""
    hardware = profile.load(args.hardware)
    if args.table is None:
        common.show(of_profile(hardware))
        return 0
    from ..cost.operator_tables import read

    if other := other_gpu(Path(args.table), hardware.name):
        print(
            f"warning: {args.table} is of {other}, the profile of {hardware.name}; fix: use --hardware {other}",
            file=sys.stderr,
        )
    found = read(Path(args.table), args.precision)
    predicted = found.predicted_seconds(hardware)
    rows = json.dumps(_rows(found, predicted), indent=1, allow_nan=False)
    if args.json == "-":
        print(rows)
        return 0
    if args.json:
        Path(args.json).write_text(rows + "\n")
    common.show(of_table(hardware, found, predicted))
    return 0


def other_gpu(file: Path, hardware: str) -> str | None:
    """Return the GPU that a table's name starts with, if there is a profile of it and `hardware` is that of another."""
    known = {name.partition("-")[0] for name in profile.names()}
    named, own = re.split(r"[^a-z0-9]", file.stem.lower())[0], hardware.partition("-")[0]
    return named if named in known and own in known and named != own else None


def _rows(found: OperatorTable, predicted: np.ndarray) -> list[dict]:
    """Return each row with the names of the table's columns, its size class and both seconds."""
    columns = {
        name: [int(v) if v == v // 1 else v for v in values.tolist()] if values.dtype.kind == "f" else values.tolist()
        for name, values in found.columns.items()
    }
    columns |= {"size_class": found.size_classes(), "measured_seconds": found.measured_seconds.tolist(),
                "predicted_seconds": predicted.tolist()}  # fmt: skip
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def of_table(hardware: profile.Hardware, found: OperatorTable, predicted: np.ndarray) -> str:
    """Return the mean errors of a table as text, beside those that the profile states."""
    from ..cost.operator_tables import errors_by_class

    stated, by_class = hardware.errors.get(found.name, {}), errors_by_class(found, predicted)
    by_class["all"] = len(predicted), float(abs(predicted / found.measured_seconds - 1).mean())
    rows = [
        (name, str(many), f"{error:.1%}", f"{stated[name]:.1%}" if name in stated else "-")
        for name, (many, error) in by_class.items()
    ]
    lines = text_table(["size class", "rows", "mean error", "profile's"], rows)
    return "\n".join([f"{found.name} predicted by profile {hardware.name}", *lines]) + "\n"


def of_profile(hardware: profile.Hardware) -> str:
    """Return the sources of a profile, and its errors by table and size class, as text."""
    rows = [(n, key, f"{error:.1%}") for n, errors in hardware.errors.items() for key, error in errors.items()]
    lines = [f"{hardware.name}: {hardware.description}", "", *hardware.source.splitlines()]
    if rows:
        lines += ["", *text_table(["measured operators", "size class", "mean error"], rows, left=2)]
    else:
        lines += ["", "not compared with measured operators"]
    return "\n".join(lines) + "\n"
