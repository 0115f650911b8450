"""A hardware profile from measurements, and profiles as TOML or JSON (the form is in autopar/hardware/profile.py)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np

from ..cost.attention import FLASH, Shape, kernel_of
from ..hardware.profile import Attention, Curve, Hardware, Kernels, Products, Tier
from . import fit
from .measure import EXCHANGED

SECTIONS = ("compute", "memory", "host", "collectives", "kernels", "products", "attention", "experts", "nccl", "errors",
            "measured")  # fmt: skip  # as in a profile, links after them


def to_profile(measured: dict, base: Hardware, name: str, fingerprint: Mapping[str, str]) -> Hardware:
    """Return `base` with what was measured in its place.

    On a CPU the speeds are those of the products, and `kernels` is fitted; on a GPU the peaks and `kernels` of the base
    stay, the efficiency is that of the largest product, and the base's products are scaled to it. Attention's shares
    are scaled to what was measured on both. The closest tier of links gets the latency and speed that fit best; where
    ranks were on several machines, it joins those of one, and the next tier gets what fits groups with one rank of each
    machine. Errors that the base states of itself are left out.
    """
    launch = measured["launch_seconds"]
    products = {dtype: [p for p in measured["products"] if p["dtype"] == dtype] for dtype in base.flops_per_second}
    lowering, curves = _curves(measured["curves"])
    notes = {"compute": f"launch {launch * 1e6:.1f} us"}
    if base.kernels.multiprocessors:
        dtype = "bf16" if products["bf16"] else "fp32"
        largest = max(products[dtype], key=_flops)
        speeds, efficiency = (
            base.flops_per_second,
            min(1.0, _flops(largest) / largest["seconds"] / base.flops_per_second[dtype]),
        )
        kernels, products_ = base.kernels, _scaled(base.products, efficiency / base.flops_efficiency)
    else:
        ramps = {dtype: fit.ramp(rows, launch) for dtype, rows in products.items() if rows}
        known = ramps["fp32"]
        guessed = {
            d: speed * known.speed / base.reached_flops_per_second("fp32") * base.flops_efficiency
            for d, speed in base.flops_per_second.items()
        }
        speeds, efficiency = guessed | {dtype: r.speed for dtype, r in ramps.items()}, 1.0
        halves = {"half_rows": known.half_rows, "half_columns": known.half_columns, "half_depth": known.half_depth}
        kernels = Kernels(**halves, functions_per_second=measured["functions_per_second"])
        products_ = {}
        notes["compute"] += f"; products fitted with a median error of {known.median_error:.0%}"
    attention = _attention(base, measured["attention"], speeds)
    links = base.links
    if curves:
        links, fits = _links(base, curves, measured["machine_ranks"])
        notes |= fits | {"measured": "lower quartiles; groups of a shape ran at once"}
    sources = dict(row.split(": ", 1) for row in base.source.splitlines())
    by = "autopar calibrate"
    sources |= {"memory": by, "collectives": by} | {key: f"{by}: {note}" for key, note in notes.items()}
    sources["attention"] = f"{by}, one shape a direction"
    if products_:
        sources["products"] = f"{by}: the efficiency; else {sources['products']}"
    else:
        sources["kernels"] = by
    sources.pop("errors", None)
    in_order = sorted(sources, key=lambda key: SECTIONS.index(key) if key in SECTIONS else len(SECTIONS))
    bandwidth = measured["copy_bytes_per_second"]
    peak = max(base.memory_bytes_per_second, bandwidth) if base.kernels.multiprocessors else bandwidth
    return replace(
        base,
        name=name,
        description=f"measured on {fingerprint['device']}",
        source="\n".join(f"{key}: {sources[key]}" for key in in_order),
        flops_per_second=speeds,
        flops_efficiency=efficiency,
        memory_bytes_per_second=peak,
        memory_efficiency=bandwidth / peak,
        memory_bytes=measured["memory_bytes"],
        launch_seconds=launch,
        cores_per_device=measured["cores_per_device"],
        links=links,
        reduce_scatter_lowering=lowering,
        overlap_slowdown=measured["overlap_slowdown"] if curves else base.overlap_slowdown,
        kernels=kernels,
        products=products_,
        attention=attention,
        errors={},
        curves=curves,
        curves_error=fit.left_out_error(curves),
        fingerprint=dict(fingerprint),
    )


def _flops(product: dict) -> float:
    return 2.0 * product["rows"] * product["depth"] * product["columns"]


def _scaled(products: Mapping[str, Products], factor: float) -> dict[str, Products]:
    """Return products that are faster by a factor where they compute."""
    return {
        kind: replace(p, share=p.share * factor, tile_bytes_per_second=p.tile_bytes_per_second * factor)
        for kind, p in products.items()
    }


def _attention(base: Hardware, measured: dict, speeds: Mapping[str, float]) -> dict[str, Attention]:
    """Return attention whose share at the width of heads that was measured is the measured one; kernels that did not
    serve what was measured keep their place relative to the one that did."""
    forward, backward = (measured[direction] / speeds[measured["dtype"]] for direction in ("forward", "backward"))
    dim = measured["head_dim"]
    known = base.attention.get(kernel_of(base, Shape(1, 1, measured["sequence"], measured["sequence"], dim, dim)))
    if known is None:
        return {FLASH: Attention((dim,), (min(1.0, forward),), backward / forward)}
    factor = forward / float(np.interp(dim, known.head_dims, known.shares))
    return {
        kernel: replace(
            constants,
            shares=tuple(min(1.0, share * factor) for share in constants.shares),
            backward=constants.backward * backward / forward / known.backward,
        )
        for kernel, constants in base.attention.items()
    }


def _links(base: Hardware, curves: Sequence[Curve], machine_ranks: int) -> tuple[tuple[Tier, ...], dict[str, str]]:
    """Return the tiers of links, those that were measured fitted, and a note on each of these by its section."""
    together = [c for c in curves if c.kind in fit.TOGETHER]
    inside = [c for c in together if c.span <= machine_ranks]
    between = [c for c in together if c.stride >= machine_ranks > 1]  # one rank of each machine, all groups at once
    tiers = [(base.links[0], inside or together)]
    if inside and between:
        network = base.links[1] if len(base.links) > 1 else replace(base.links[0], name="network", devices=None)
        network = replace(network, rails=None, oversubscription=1.0)  # what was measured is a device's share
        tiers = [(replace(base.links[0], devices=machine_ranks), inside), (network, between)]
    lines = [fit.line(found) for _, found in tiers]
    measured = [
        replace(
            tier,
            latency_seconds=line.latency_seconds,
            bytes_per_second=line.bytes_per_second,
            bucket_bytes=fit.bucket_bytes(line),
        )
        for (tier, _), line in zip(tiers, lines)
    ]
    notes = {
        f"links.{tier.name}": f"one fit over {', '.join(fit.TOGETHER)}, median error {line.median_error:.0%}"
        for tier, line in zip(measured, lines)
    }
    return (*measured, *(_not_faster(tier, measured[-1]) for tier in base.links[len(measured) :])), notes


def _not_faster(tier: Tier, inner: Tier) -> Tier:
    return replace(tier, bytes_per_second=min(tier.bytes_per_second, inner.bytes_per_second))


def _curves(rows: list[dict]) -> tuple[str, tuple[Curve, ...]]:
    """Return the faster way to reduce-scatter the largest tensor, and the curves with that one."""
    totals = {kind: sum(r["seconds"][-1] for r in rows if r["kind"] == kind) for kind in ("reduce_scatter", EXCHANGED)}
    exchanged = totals[EXCHANGED] < totals["reduce_scatter"]
    unused = "reduce_scatter" if exchanged else EXCHANGED
    curves = tuple(
        Curve(
            "reduce_scatter" if r["kind"] == EXCHANGED else r["kind"],
            r["devices"],
            r["stride"],
            tuple(map(float, r["bytes"])),
            tuple(map(float, r["seconds"])),
        )
        for r in rows
        if r["kind"] != unused
    )
    return "all_to_all" if exchanged else "native", curves


def to_table(hardware: Hardware) -> dict:
    """Return a profile as nested dicts, in the form that `hardware.load` reads."""
    sources = dict(row.split(": ", 1) for row in hardware.source.splitlines())
    table: dict = {
        "name": hardware.name, "description": hardware.description, "device_names": [],
        "compute": {
            "flops_per_second": dict(hardware.flops_per_second), "efficiency": hardware.flops_efficiency,
            "launch_seconds": hardware.launch_seconds, "source": sources["compute"],
        },
        "memory": {
            "bytes": hardware.memory_bytes, "bytes_per_second": hardware.memory_bytes_per_second,
            "efficiency": hardware.memory_efficiency, "source": sources["memory"],
        },
        "collectives": {
            "reduce_scatter_lowering": hardware.reduce_scatter_lowering, "overlap_slowdown": hardware.overlap_slowdown,
            "source": sources["collectives"],
        },
    }  # fmt: skip
    if hardware.cores_per_device:
        table["compute"]["cores_per_device"] = hardware.cores_per_device
    if hardware.sustained != 1.0:
        table["compute"]["sustained"] = hardware.sustained
    if hardware.reserve_bytes:
        table["memory"]["reserve_bytes"] = hardware.reserve_bytes
    if hardware.host:
        table["host"] = {**asdict(hardware.host), "source": sources["host"]}
    if hardware.kernels != Kernels():
        table["kernels"] = {**_unusual(hardware.kernels), "source": sources["kernels"]}
    if hardware.products:
        products = {kind: _unusual(constants) for kind, constants in sorted(hardware.products.items())}
        table["products"] = {"source": sources["products"], **products}
    if hardware.attention:
        kernels = {kernel: _unusual(constants) for kernel, constants in sorted(hardware.attention.items())}
        table["attention"] = {"source": sources["attention"], **kernels}
    if hardware.experts is not None:
        table["experts"] = {**_unusual(hardware.experts), "source": sources["experts"]}
    if hardware.nccl:
        known = {key: value for key, value in asdict(hardware.nccl).items() if value and key != "reached"}
        table["nccl"] = {**known, "source": sources["nccl"]}
        for kind, points in hardware.nccl.reached.items():
            devices, speeds = zip(*points)
            table["nccl"].setdefault("reached", {})[kind] = {"devices": list(devices), "bytes_per_second": list(speeds)}
    if hardware.errors:
        table["errors"] = {"source": sources["errors"], **{key: dict(rows) for key, rows in hardware.errors.items()}}
    if hardware.published_utilization:
        table["published"] = {
            "utilization": dict(hardware.published_utilization), "source": sources["published"],
        }  # fmt: skip
    if hardware.curves:
        table["measured"] = {
            "median_error": hardware.curves_error,
            "source": sources["measured"],
            "curves": _rows(hardware),
        }
    if hardware.fingerprint:
        table["fingerprint"] = dict(hardware.fingerprint)
    table["links"] = [
        _unusual(tier)
        | {"bytes_per_second": tier.bytes_per_second / tier.share(hardware.links[0].devices)}
        | {"source": sources[f"links.{tier.name}"]}
        for tier in hardware.links
    ]
    return table


def _unusual(constants) -> dict:
    """Return the fields of a dataclass that differ from their defaults."""
    return {key: value for key, value in asdict(constants).items() if value != getattr(type(constants), key, None)}


def _rows(hardware: Hardware) -> list[dict]:
    """Return the curves, each with the relative residuals of the closest tier's latency and speed at its points."""
    tier = hardware.links[0]
    line = fit.Line(tier.latency_seconds, tier.bytes_per_second, 0.0)
    return [
        {
            "kind": c.kind,
            "devices": c.devices,
            "stride": c.stride,
            "bytes": list(c.bytes_),
            "seconds": list(c.seconds),
            "fit_residuals": [round(r, 3) for r in line.residuals(c)],
        }
        for c in hardware.curves
    ]


def text(table: Mapping, as_json: bool = False) -> str:
    """Write a table as TOML, or as JSON."""
    return json.dumps(table, indent=1) + "\n" if as_json else "\n".join(_toml(table)) + "\n"


def _toml(table: Mapping, path: str = "") -> list[str]:
    """Return the lines of a table: its values, then its tables, then its lists of tables."""
    plain = {k: v for k, v in table.items() if not isinstance(v, Mapping) and not _is_rows(v)}
    lines = [f"{key} = {_value(value)}" for key, value in plain.items()]
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{path}{key}]", *_toml(value, f"{path}{key}.")]
    for key, value in table.items():
        for row in value if _is_rows(value) else ():
            lines += ["", f"[[{path}{key}]]", *_toml(row, f"{path}{key}.")]
    return lines


def _is_rows(value: object) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _value(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return repr(int(value)) if value == int(value) and abs(value) < 2**53 else repr(value)
    if not isinstance(value, (str, bool, int)) or isinstance(value, float) and not math.isfinite(value):
        raise TypeError(f"{value!r} has no place in TOML")
    return json.dumps(value, ensure_ascii=False)
