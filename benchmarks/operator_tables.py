"""Fits what the profiles of A100, H100 and H200 say of kernels and collectives to measured operators, and prints how
far rows are predicted that were held back.

    OMP_NUM_THREADS=1 python benchmarks/operator_tables.py [--gpu h100] [--fit]

Every third row of a table, in the order of its file, is held back: no constant is fitted to it. --fit prints the tables
of a profile that it finds; without it the profiles are judged as they are. A fit is a descent along one constant after
the other, of the mean absolute logarithm of predicted over measured, from the same start each time. Nothing is fitted
to a whole training step. The tables: benchmarks/operator_tables/README.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from autopar.cost.attention import FLASH, FLASH3
from autopar.cost.operator_tables import OPS, OperatorTable, errors_by_class, read
from autopar.hardware import profile
from autopar.hardware.profile import Attention, Curve, Experts, Hardware, Products
from autopar.utils.format import table as text_table

FOLDER = Path(__file__).parent / "operator_tables"
GPUS = ("a100", "h100", "h200")
BYTES = tuple(2.0**k for k in (9, 12, 15, 17, 19, 20, 21, 22, 23, 25, 27, 29))  # of a curve, the whole tensor
START = Products(0.8, 2e-6, 1e-6, 6e12, 2e12, 2e-6, 0.7)
FREE = ("share", "start_seconds", "fill_seconds", "tile_bytes_per_second", "memory_bytes_per_second", "split_seconds",
        "whole_waves")  # fmt: skip
QUANTIZED = (*FREE, "row_seconds", "element_seconds")
SCALED = (*QUANTIZED, "least_seconds", "padding_seconds")
DIMS = {"a100": (128.0,)}


def held_back(table: OperatorTable) -> np.ndarray:
    """Return the mask of the rows that nothing is fitted to."""
    return np.arange(len(table.measured_seconds)) % 3 == 0


def descend(loss: Callable[[np.ndarray], float], start: Sequence[float], rounds: int = 40) -> np.ndarray:
    """Return the positive numbers at which the loss is least, found along one of them after the other."""
    point, steps = np.array(start, float), np.full(len(start), 0.5)
    best = loss(point)
    for _ in range(rounds):
        for i in range(len(point)):
            for sign in (1, -1):
                tried = point.copy()
                tried[i] *= np.exp(sign * steps[i])
                found = loss(tried)
                if found < best:
                    best, point, steps[i] = found, tried, steps[i] * 1.3
                    break
            else:
                steps[i] *= 0.5
    return np.array([float(f"{value:.3g}") if value > 1e-15 else 0.0 for value in point])


def fitted(
    table: OperatorTable, start: Sequence[float], with_numbers: Callable[[np.ndarray], Hardware], rounds: int = 40
) -> Hardware:
    """Return the profile whose numbers predict the rows best that are not held back."""
    rows = table.take(~held_back(table))

    def loss(numbers: np.ndarray) -> float:
        predicted = rows.predicted_seconds(with_numbers(numbers))
        return float(np.abs(np.log(predicted / rows.measured_seconds)).mean())

    return with_numbers(descend(loss, start, rounds))


def with_products(hardware: Hardware, kind: str, names: Sequence[str], start: Products, numbers) -> Hardware:
    """Return the profile with these constants of one kind of products."""
    found = replace(start, **dict(zip(names, map(float, numbers))))
    found = replace(found, whole_waves=round(min(1.0, found.whole_waves), 3))
    return replace(hardware, products={**hardware.products, kind: found})


def fit_products(hardware: Hardware, tables: dict[str, OperatorTable]) -> Hardware:
    """Fit each kind of products there is a table of."""
    starts = {
        "bf16": ("dense", FREE, START),
        "fp8": ("fp8", QUANTIZED, replace(START, row_seconds=7e-9, element_seconds=1e-12)),
        "fp8_block": ("fp8_block", SCALED, replace(START, row_seconds=1e-9, element_seconds=1e-12, least_seconds=8e-5,
                                                   padding_seconds=8e-5)),
    }  # fmt: skip
    for precision, (kind, names, start) in starts.items():
        if table := tables.get(f"products_{precision}"):
            first = [getattr(start, name) for name in names]
            hardware = fitted(table, first, lambda n, *a: with_products(hardware, kind, names, start, n))  # noqa: B023
    return hardware


def fit_attention(hardware: Hardware, table: OperatorTable) -> Hardware:
    """Fit attention's share of the peak at each width of a head, and what its kernels take besides."""
    dims = tuple(np.unique(table.columns["head_dim"]).tolist())
    kernel = FLASH3 if FLASH3 in hardware.attention else FLASH
    backward = hardware.attention[kernel].backward

    def with_numbers(numbers: np.ndarray) -> Hardware:
        start, block, cache, exponent, width, lone, *shares = map(float, numbers)
        width = width if len(dims) > 1 else 0.0
        found = Attention(dims, tuple(shares), backward, start, block, cache, exponent, width, min(lone, 1.0))
        return replace(hardware, attention={**hardware.attention, kernel: found})

    return fitted(table, [1e-5, 2e-6, 5e-11, 0.65, 0.5, 0.7, *(0.6 for _ in dims)], with_numbers, rounds=60)


def fit_experts(hardware: Hardware, table: OperatorTable) -> Hardware:
    """Fit grouped products, and what passes through memory around them."""

    def with_numbers(numbers: np.ndarray) -> Hardware:
        *products, hidden, width, start = map(float, numbers)
        memory = hardware.reached_memory_bytes_per_second
        found = with_products(hardware, "grouped", GROUPED, replace(START, memory_bytes_per_second=memory), products)
        return replace(found, experts=Experts(hidden, width, start))

    return fitted(table, [0.6, 5e-6, 1e-6, 6e12, 0.5, 2.0, 2.0, 2e-5], with_numbers)


GROUPED = ("share", "start_seconds", "fill_seconds", "tile_bytes_per_second", "whole_waves")


def fit_curves(hardware: Hardware, table: OperatorTable) -> Hardware:
    """Fit a curve to each collective and number of devices: seconds at BYTES that rise, between which the logarithm is
    linear."""
    rows, curves = table.take(~held_back(table)), []
    for op, n in sorted(set(zip(rows.columns["op"], rows.columns["gpus"].astype(int)))):
        these = rows.take((rows.columns["op"] == op) & (rows.columns["gpus"] == n))
        bytes_, seconds = np.log(these.columns["bytes"]), np.log(these.measured_seconds)
        order = np.argsort(bytes_)
        start = np.interp(np.log(BYTES), bytes_[order], seconds[order])
        weights = np.stack([np.interp(bytes_, np.log(BYTES), row) for row in np.eye(len(BYTES))], axis=1)

        def loss(factors, weights=weights, start=start, seconds=seconds):
            values = np.maximum.accumulate(start + np.log(factors))
            bends = np.abs(np.diff(values, 2)).mean()  # of two curves that fit as well, the straighter one
            return float(np.abs(weights @ values - seconds).mean() + 0.05 * bends)

        values = np.maximum.accumulate(start + np.log(descend(loss, np.ones(len(BYTES)))))
        held = [b / n if OPS[str(op)] == "all_gather" else b for b in BYTES]
        curves.append(Curve(OPS[str(op)], int(n), 1, tuple(held), tuple(float(f"{v:.3g}") for v in np.exp(values))))
    return replace(hardware, curves=tuple(curves))


def fit(hardware: Hardware, tables: dict[str, OperatorTable]) -> Hardware:
    """Fit all that the tables say something of."""
    found = fit_products(hardware, tables)
    found = fit_attention(found, tables["attention"])
    found = fit_experts(found, tables["experts"])
    return fit_curves(found, tables["collectives"])


def errors(hardware: Hardware, tables: dict[str, OperatorTable]) -> dict[str, dict[str, tuple[int, float]]]:
    """Return (rows, mean relative error) of what was held back, by table and size class."""
    result = {}
    for name, table in tables.items():
        rows = table.take(held_back(table))
        result[name] = errors_by_class(rows, rows.predicted_seconds(hardware))
    return result


def tables_of(gpu: str) -> dict[str, OperatorTable]:
    """Return the tables of one GPU by their names."""
    return {table.name: table for table in map(read, sorted(FOLDER.glob(f"{gpu}_*.csv")))}


def toml(hardware: Hardware, found: dict[str, dict[str, tuple[int, float]]]) -> str:
    """Return what was fitted as tables of a profile."""
    from autopar.calibrate.profile import text

    def known(value) -> dict:
        return {key: entry for key, entry in asdict(value).items() if entry != getattr(type(value), key, None)}

    attention = {kernel: known(value) for kernel, value in hardware.attention.items()}
    products = {kind: known(value) for kind, value in hardware.products.items()}
    curves = [
        {"kind": c.kind, "devices": c.devices, "stride": c.stride, "bytes": c.bytes_, "seconds": c.seconds}
        for c in hardware.curves
    ]
    rounded = {name: {key: round(error, 3) for key, (_, error) in rows.items()} for name, rows in found.items()}
    collectives = [error for error in rounded["collectives"].values()]
    median = round(float(np.median(collectives)), 3)
    return text({"products": products, "attention": attention, "experts": known(hardware.experts),
                 "errors": rounded, "measured": {"median_error": median, "curves": curves}})  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", choices=GPUS)
    parser.add_argument("--fit", action="store_true")
    args = parser.parse_args()
    for gpu in [args.gpu] if args.gpu else GPUS:
        hardware, tables = profile.load(gpu), tables_of(gpu)
        hardware = fit(hardware, tables) if args.fit else hardware
        found = errors(hardware, tables)
        if args.fit:
            print(toml(hardware, found))
        print(f"{gpu}: mean error of the rows that were held back")
        rows = [(name, key, str(n), f"{e:.1%}") for name, by_class in found.items() for key, (n, e) in by_class.items()]
        print(*text_table(["table", "size class", "rows", "error"], rows), sep="\n")


if __name__ == "__main__":
    main()
