"""Tables of measured operators: CSV files of sizes and milliseconds, and what the cost model says of each row.

    products     m, n, k                                             (m, k) x (k, n)
    collectives  op, gpus, bytes                                     of the whole tensor, on one node
    attention    batch, sequence, heads, kv_heads, head_dim          forward, causal
    experts      tokens, hidden, intermediate, topk, experts, tp, ep, distribution
                                                                     three products of the experts of one GPU

each with a last column milliseconds; the columns say which it is. These are kernels of inference servers, so a row of
attention also writes keys and values to a cache, and its kernels read both from memory once.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import HardwareError
from ..hardware.profile import Hardware
from ..ir.mesh import Mesh
from .attention import FLASH, FLASH3, Shape, blocked_seconds
from .collectives import CollectiveCost
from .experts import experts_seconds, power_law
from .product_seconds import product_seconds

Columns = dict[str, np.ndarray]
MEASURED = "milliseconds"
KINDS = {"bf16": ("bf16", 2, "dense"), "fp16": ("fp16", 2, "dense"), "fp32": ("fp32", 4, "dense"),
         "fp8": ("fp8", 1, "fp8"), "fp8_block": ("fp8", 1, "fp8_block")}  # fmt: skip
OPS = {"all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce",
       "alltoall": "all_to_all", "all_to_all": "all_to_all"}  # fmt: skip
NARROW = 1024  # columns or depth of a product below which it is narrow


@dataclass(frozen=True)
class Format:
    """One kind of table: its columns but the last, the seconds and the size class of its rows."""

    name: str
    texts: tuple[str, ...]
    numbers: tuple[str, ...]
    seconds: Callable[[Hardware, str, Columns], np.ndarray]
    size_classes: Callable[[Columns], list[str]]


def _product_rows(hardware: Hardware, precision: str, c: Columns) -> np.ndarray:
    dtype, element_bytes, kind = KINDS[precision]
    products = np.stack([np.ones(len(c["m"])), c["m"], c["n"], c["k"]], axis=1)
    return product_seconds(hardware, products, hardware.peak_flops_per_second(dtype), element_bytes, kind)


def _product_classes(c: Columns) -> list[str]:
    narrow = np.minimum(c["n"], c["k"]) < NARROW
    return [("narrow" if a else "wide") + ("_few_rows" if m < 1024 else "") for a, m in zip(narrow, c["m"])]


def _attention_rows(hardware: Hardware, precision: str, c: Columns) -> np.ndarray:
    batch, sequence, heads, kv_heads, dim = (c[k] for k in ("batch", "sequence", "heads", "kv_heads", "head_dim"))
    dtype, element_bytes, _ = KINDS[precision]
    shape, peak = Shape(batch, heads, sequence, sequence, dim, dim), hardware.peak_flops_per_second(dtype)
    constants = hardware.attention.get(FLASH3, hardware.attention.get(FLASH))
    if constants is None:
        result = shape.flops(forward=True) / (peak * hardware.flops_efficiency)
    else:
        result = blocked_seconds(constants, hardware.kernels.multiprocessors, peak, shape)
        token_seconds = constants.cache_seconds * kv_heads**constants.cache_exponent * constants.width_factor(dim)
        result = result + token_seconds * batch * sequence
    moved = 2 * element_bytes * batch * sequence * (heads + kv_heads) * dim
    return np.maximum(result, moved / hardware.reached_memory_bytes_per_second)


def _attention_classes(c: Columns) -> list[str]:
    return [_size_class("sequence", s, {1024: "1k", 4096: "4k"}) for s in c["sequence"]]


def _collective_rows(hardware: Hardware, precision: str, c: Columns) -> np.ndarray:
    result, gpus = np.zeros(len(c["op"])), c["gpus"].astype(int)
    for op, n in sorted(set(zip(c["op"], gpus))):
        rows, kind = (c["op"] == op) & (gpus == n), OPS[op]
        held = c["bytes"][rows] / (n if kind == "all_gather" else 1)
        result[rows] = CollectiveCost(hardware, Mesh(("gpus",), (int(n),))).seconds(kind, ("gpus",), held)
    return result


def _collective_classes(c: Columns) -> list[str]:
    limits = {2**16: "64k", 2**23: "8m"}
    return [OPS[op] + "_" + _size_class("bytes", b, limits) for op, b in zip(c["op"], c["bytes"])]


def _expert_rows(hardware: Hardware, precision: str, c: Columns) -> np.ndarray:
    dtype, element_bytes, _ = KINDS[precision]
    return experts_seconds(hardware, c, hardware.peak_flops_per_second(dtype), element_bytes)


def _expert_classes(c: Columns) -> list[str]:
    return [_size_class("tokens", t, {1024: "1k", 4096: "4k"}) for t in c["tokens"]]


def _size_class(what: str, size: float, limits: dict[int, str]) -> str:
    below = next((f"{what}_below_{name}" for limit, name in limits.items() if size < limit), None)
    return below or f"{what}_from_{list(limits.values())[-1]}"


FORMATS = (
    Format("products", (), ("m", "n", "k"), _product_rows, _product_classes),
    Format("collectives", ("op",), ("gpus", "bytes"), _collective_rows, _collective_classes),
    Format("attention", (), ("batch", "sequence", "heads", "kv_heads", "head_dim"), _attention_rows,
           _attention_classes),
    Format("experts", ("distribution",), ("tokens", "hidden", "intermediate", "topk", "experts", "tp", "ep"),
           _expert_rows, _expert_classes),
)  # fmt: skip


@dataclass(frozen=True)
class OperatorTable:
    """Rows of one table by column, and the seconds that each was measured to take. `precision`: a key of KINDS."""

    format: Format
    precision: str
    columns: Columns
    measured_seconds: np.ndarray

    @property
    def name(self) -> str:
        """Return the name of Hardware.errors: the format's, with the precision of products."""
        return f"{self.format.name}_{self.precision}" if self.format.name == "products" else self.format.name

    def predicted_seconds(self, hardware: Hardware) -> np.ndarray:
        """Return what the cost model says of each row. Raises HardwareError where the profile says nothing of it."""
        return self.format.seconds(hardware, self.precision, self.columns)

    def size_classes(self) -> list[str]:
        """Return the size class of each row."""
        return self.format.size_classes(self.columns)

    def take(self, rows: np.ndarray) -> OperatorTable:
        """Return the table of some rows, by index or by a mask."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        return OperatorTable(self.format, self.precision, columns, self.measured_seconds[rows])


def errors_by_class(table: OperatorTable, predicted_seconds: np.ndarray) -> dict[str, tuple[int, float]]:
    """Return (rows, mean relative error) of each size class, in order of their names."""
    classes, errors = np.array(table.size_classes()), np.abs(predicted_seconds / table.measured_seconds - 1)
    return {str(c): (int((classes == c).sum()), float(errors[classes == c].mean())) for c in np.unique(classes)}


def read(file: Path, precision: str | None = None) -> OperatorTable:
    """Read a table. `precision`: a key of KINDS; by default what the file's name says of fp8 or fp8_block, else bf16.
    Raises HardwareError naming the line for a file that is no such table."""
    if precision is None:
        precision = next((p for p in ("fp8_block", "fp8", "fp16", "fp32") if p in file.stem), "bf16")
    if precision not in KINDS:
        raise HardwareError(f"there is no precision {precision!r} of tables", fix=f"use one of {', '.join(KINDS)}")
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            header, *rows = [row for row in csv.reader(lines) if row] or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise HardwareError(f"cannot read {file}: {error}", fix="give a CSV file of measured operators") from error
    header = [name.strip() for name in header]
    fitting = [f for f in FORMATS if {*f.texts, *f.numbers, MEASURED} <= set(header)]
    if not fitting or not rows:
        known = "; ".join(", ".join((*f.texts, *f.numbers, MEASURED)) for f in FORMATS)
        what = f"has the columns {', '.join(header) or 'none'}" if not fitting else "has no rows"
        raise HardwareError(f"{file} {what}", fix=f"give a table with the columns {known}")
    found = fitting[0]
    values = [_values(file, found, header, number, row) for number, row in enumerate(rows, 2)]
    columns = {name: np.array([v[name] for v in values]) for name in (*found.texts, *found.numbers)}
    return OperatorTable(found, precision, columns, np.array([v[MEASURED] for v in values]) / 1e3)


def _values(file: Path, form: Format, header: list[str], number: int, row: list[str]) -> dict[str, Any]:
    """Return the values of one row. Raises HardwareError for one that is missing or cannot be."""
    given: dict[str, Any] = dict(zip(header, (text.strip() for text in row)))
    for name in (*form.numbers, MEASURED):
        try:
            value = float(given.get(name, "nan"))
        except ValueError:
            value = math.nan
        whole = name == MEASURED or value == value // 1
        if not (0 < value < math.inf and whole):
            wanted = "a number above 0" if name == MEASURED else "a whole number above 0"
            raise HardwareError(f"{file}, row {number}: {name} is {given.get(name, 'missing')}", fix=f"give {wanted}")
        given[name] = value
    if form.name == "collectives" and (given.get("op") not in OPS or given["gpus"] < 2):
        what = f"{given.get('op')} on {given['gpus']:.0f} devices"
        raise HardwareError(f"{file}, row {number}: {what}", fix=f"use {', '.join(OPS)} on 2 or more")
    if form.name == "experts":
        try:
            power_law(str(given.get("distribution")))
        except ValueError as error:
            fix = "use balanced, or power_law_ and an exponent"
            raise HardwareError(
                f"{file}, row {number}: distribution is {given.get('distribution')}", fix=fix
            ) from error
    return given
