"""A calibration of two gloo processes, and what is made of measurements."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch

from autopar import calibrate
from autopar.calibrate import fit, launch, measure
from autopar.calibrate.measure import EXCHANGED, Effort
from autopar.cli.calibrate import summary
from autopar.cli.main import main
from autopar.cost.collectives import CollectiveCost
from autopar.cost.product_seconds import ProductSeconds
from autopar.errors import HardwareError
from autopar.hardware import profile as hardware
from autopar.hardware.profile import KINDS, Curve
from autopar.ir.mesh import Mesh
from tests.helpers import gloo

TINY = Effort((2**12, 2**16, 2**20), 5, ("fp32",))
SIZES = (1e4, 1e6, 1e8)


def measure_tiny(rank: int) -> dict:
    return measure.everything(measure.Device(rank, "gloo"), TINY, rank, 2)


@pytest.mark.gloo
def test_two_gloo_processes(tmp_path):
    """Measured, written, loaded, and priced: every collective is there, and more bytes never take less time."""
    measured = gloo.run(2, measure_tiny)[0]
    profile = calibrate.to_profile(measured, hardware.load("cpu-gloo"), "mine", calibrate.fingerprint("gloo"))
    for suffix in (".toml", ".json"):
        file = tmp_path / f"mine{suffix}"
        file.write_text(calibrate.text(calibrate.to_table(profile), as_json=suffix == ".json"))
        assert hardware.load(file) == profile
    assert {(c.kind, c.devices, c.stride) for c in profile.curves} == {(kind, 2, 1) for kind in KINDS}
    cost, held = CollectiveCost(profile, Mesh.parse("a=2")), np.logspace(2, 9, 200)
    for kind in KINDS:
        seconds = cost.seconds(kind, ("a",), held)
        assert (np.diff(seconds) >= 0).all() and 0 < seconds[0] < seconds[-1] < 1e3
    assert cost.tier == "measured" and cost.relative_error == profile.curves_error
    assert (
        1e8 < profile.reached_flops_per_second("fp32") < 1e13 and 1e8 < profile.reached_memory_bytes_per_second < 1e12
    )
    assert calibrate.stale(profile, "gloo") == "" and "all_reduce of 2" in summary(profile)


def measured_exactly(world: int = 4, exchanged: float = 0.5, machine_ranks: int = 4) -> dict:
    """Return what machines of 1e11 FLOP/s, half of it at depth 32, and links of 1e-4 s and 1e9 bytes/s would show,
    100 times as slow between machines."""
    products = [
        {"rows": m, "depth": k, "columns": n, "dtype": "fp32", "seconds": 1e-6 + 2 * m * k * n * (k + 32) / k / 1e11}
        for m, k, n in measure.PRODUCTS[False]
    ]
    curves = []
    for devices, stride in measure.group_shapes(world):
        for kind in (*KINDS, EXCHANGED):
            sent = fit.SENT[kind if kind in KINDS else "reduce_scatter"](devices)
            slower = (exchanged if kind == EXCHANGED else 1.0) * (100 if devices * stride > machine_ranks else 1)
            seconds = [slower * (1e-4 + sent * b / 1e9) for b in SIZES]
            curves.append(
                {"kind": kind, "devices": devices, "stride": stride, "bytes": list(SIZES), "seconds": seconds}
            )
    return {"products": products, "functions_per_second": 4e8, "copy_bytes_per_second": 1e10, "launch_seconds": 1e-6,
            "memory_bytes": 8 * 10**9, "machine_ranks": machine_ranks, "cores_per_device": 0.5, "curves": curves,
            "overlap_slowdown": 1.3, "attention": {"dtype": "fp32", "head_dim": 64, "sequence": 128, "forward": 4e10,
                          "backward": 3e10}}  # fmt: skip


def test_fits_find_what_was_put_in():
    profile = calibrate.to_profile(measured_exactly(), hardware.load("cpu-gloo"), "mine", {"device": "d"})
    assert (profile.kernels.half_rows, profile.kernels.half_columns, profile.kernels.half_depth) == (0, 0, 32)
    assert profile.reached_flops_per_second("fp32") == pytest.approx(1e11, rel=1e-3)
    assert profile.reached_flops_per_second("fp64") == pytest.approx(
        62 / 128 * 1e11, rel=1e-3
    )  # not measured: the base's ratio
    flash = profile.attention["flash"]
    assert flash.head_dims == (64,) and not profile.products
    assert (*flash.shares, flash.backward) == (pytest.approx(0.4), pytest.approx(0.75))
    assert profile.kernels.functions_per_second == 4e8
    tier = profile.links[0]
    assert (tier.latency_seconds, tier.bytes_per_second) == (pytest.approx(1e-4), pytest.approx(1e9))
    assert tier.bucket_bytes == 2**20 and profile.reached_memory_bytes_per_second == 1e10
    assert (profile.overlap_slowdown, profile.reduce_scatter_lowering) == (1.3, "all_to_all")
    assert profile.cores_per_device == 0.5
    scatters = [c for c in profile.curves if c.kind == "reduce_scatter"]
    assert [(c.devices, c.stride) for c in scatters] == [(2, 1), (2, 2), (4, 1)]
    assert scatters[0].seconds[0] == pytest.approx(0.5 * (1e-4 + 1e4 / 2 / 1e9))
    native = calibrate.to_profile(measured_exactly(exchanged=2.0), hardware.load("cpu-gloo"), "mine", {"device": "d"})
    assert native.reduce_scatter_lowering == "native"


@pytest.mark.parametrize("base, name", [("cpu-gloo", "network"), ("h100", "InfiniBand NDR")])
def test_links_of_several_machines_are_two_tiers(base, name, tmp_path):
    """Groups within a machine are fitted, and those of one rank a machine; a ring over all ranks is of neither."""
    measured = measured_exactly(world=8, machine_ranks=4)
    if base == "h100":
        measured["products"] = [p | {"dtype": "bf16"} for p in measured["products"]]
        measured["attention"] |= {"dtype": "bf16", "head_dim": 128}
    profile = calibrate.to_profile(measured, hardware.load(base), "mine", {"device": "d"})
    closest, network = profile.links
    assert (closest.devices, network.devices, network.name) == (4, None, name)
    assert (closest.latency_seconds, closest.bytes_per_second) == (pytest.approx(1e-4), pytest.approx(1e9))
    assert (network.latency_seconds, network.bytes_per_second) == (pytest.approx(1e-2), pytest.approx(1e7))
    file = tmp_path / "mine.toml"
    file.write_text(calibrate.text(calibrate.to_table(profile)))
    assert hardware.load(file) == profile
    assert all(part in summary(profile) for part in (f"{closest.name} ", "10000 us and 0.01 GB/s sent"))
    cost = CollectiveCost(profile, Mesh.parse("dp=2,tp=4"))
    assert cost.seconds("all_reduce", ("dp",), 1e6) > 50 * cost.seconds("all_reduce", ("tp",), 1e6)


def test_a_gpu_keeps_its_peaks():
    """One H100 alone: the efficiency is that of the largest product, the links stay."""
    base = hardware.load("h100")
    measured = measured_exactly() | {"curves": [], "copy_bytes_per_second": 3e12}
    measured["attention"] = {"dtype": "bf16", "head_dim": 128, "sequence": 4096, "forward": 5e14, "backward": 4e14}
    measured["products"] = [
        {"rows": n, "depth": n, "columns": n, "dtype": "bf16", "seconds": 2 * n**3 / 7e14} for n in (4096, 8192)
    ]
    profile = calibrate.to_profile(measured, base, "mine", {"device": "NVIDIA H100 80GB HBM3"})
    assert profile.flops_per_second == base.flops_per_second and profile.kernels == base.kernels
    assert profile.reached_flops_per_second("bf16") == pytest.approx(7e14)
    assert profile.reached_memory_bytes_per_second == pytest.approx(3e12)
    served, others = profile.attention["cudnn"], profile.attention["flash"]  # of 4096 keys, heads of their own
    assert served.shares[1] == pytest.approx(5e14 / 989e12) and served.backward == pytest.approx(0.8)
    assert others.shares[1] / served.shares[1] == pytest.approx(0.366 / 0.594)
    large = ProductSeconds(replace(profile, sustained=1.0))((1, 8192, 8192, 8192), 989e12, 2)
    assert 2 * 8192**3 / large == pytest.approx(7e14, rel=0.02)
    assert profile.links == base.links and CollectiveCost(profile, Mesh.parse("a=8")).tier == "nccl"


@pytest.mark.parametrize("name", hardware.names())
def test_profiles_written_and_read_are_the_same(name, tmp_path):
    profile, file = hardware.load(name), tmp_path / f"{name}.toml"
    written = calibrate.text(calibrate.to_table(profile))
    file.write_text(written)
    assert hardware.load(file) == profile
    assert tomllib.loads(written)["links"][-1]["name"] == profile.links[-1].name


def test_points_that_neighbours_predict():
    line = Curve("send", 2, 1, SIZES, tuple(b / 1e9 for b in SIZES))
    assert fit.left_out_error([line]) == pytest.approx(0, abs=1e-9)
    assert fit.left_out_error([replace(line, seconds=(1e-5, 2e-3, 1e-1))]) == pytest.approx(0.5)
    assert fit.left_out_error([]) == 0


def test_elsewhere():
    here = calibrate.fingerprint("gloo")
    profile = replace(hardware.load("cpu-gloo"), fingerprint=here | {"torch": "1.0"})
    warning = calibrate.stale(profile, "gloo")
    assert (
        f"torch 1.0 (here {torch.__version__})" in warning
        and "device" not in warning
        and "autopar calibrate" in warning
    )
    assert calibrate.stale(hardware.load("h100"), "gloo") == ""  # from datasheets


def test_another_world_than_that_of_torchrun(monkeypatch, capsys, tmp_path):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(["calibrate", "--backend", "gloo", "--world", "2", "--out", str(tmp_path / "mine.toml")]) == 2
    assert "torchrun started 4 processes, not 2" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_too_few_gpus():
    with pytest.raises(HardwareError, match="nccl needs 2 GPUs, there are 0(.|\n)*--backend gloo"):
        launch.measurements("nccl", 2)
    with pytest.raises(HardwareError, match="no backend 'mpi'"):
        launch.check("mpi", 2)


def test_bad_file(capsys):
    assert main(["calibrate", "--backend", "gloo", "--out", "mine.txt"]) == 2
    assert "name it .toml or .json" in capsys.readouterr().err
