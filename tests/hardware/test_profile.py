import dataclasses
import json
import tomllib

import pytest

from autopar import calibrate
from autopar.cost.collectives import CollectiveCost
from autopar.errors import HardwareError
from autopar.hardware import profile as hardware
from autopar.hardware.profile import Attention, Curve, Experts, Hardware, Kernels, Link, Products, Tier
from autopar.ir.mesh import Mesh

TOY = Hardware(
    name="toy",
    description="nodes of 4",
    source="invented",
    flops_per_second={"fp32": 1e12},
    flops_efficiency=0.5,
    memory_bytes_per_second=1e11,
    memory_efficiency=0.8,
    memory_bytes=10**9,
    launch_seconds=1e-6,
    links=(Tier("near", 4, 1e-6, 100.0, 64), Tier("rack", 16, 2e-6, 40.0, 32), Tier("far", None, 3e-6, 10.0, 16)),
    reduce_scatter_lowering="native",
)


@pytest.mark.parametrize("name", hardware.names())
def test_shipped_profiles(name):
    profile = hardware.load(name)
    assert profile.name == name
    assert {"bf16", "fp32", "fp64"} <= set(profile.flops_per_second)
    assert profile.flops_per_second["bf16"] >= 1e10
    assert 1e-7 < profile.launch_seconds < 1e-4
    assert profile.links[-1].devices is None
    for near, far in zip(profile.links, profile.links[1:]):
        assert near.bytes_per_second > far.bytes_per_second and near.latency_seconds <= far.latency_seconds
    sourced = {line.split(":")[0] for line in profile.source.splitlines()}
    besides = {"nccl", "kernels", "host", "products", "attention"} if profile.nccl else set()
    besides |= {"experts", "errors", "measured"} if profile.errors else set()
    besides |= {"published"} if profile.published_utilization else set()
    assert sourced == {"compute", "memory", "collectives", *besides, *(f"links.{tier.name}" for tier in profile.links)}
    assert (profile.reserve_bytes > 0) == (profile.host is not None) == (profile.nccl is not None)
    if host := profile.host:  # a host is larger and slower than what it serves
        assert profile.reserve_bytes < 0.05 * profile.memory_bytes < profile.memory_bytes < host.memory_bytes * 1.5
        assert host.link_bytes_per_second < host.memory_bytes_per_second * 2 < profile.memory_bytes_per_second
    assert all(0 < profile.published_utilization[dtype] < 1 for dtype in profile.published_utilization)
    assert profile.precision == ("fp32" if name in ("cpu-gloo", "v100") else "bf16")
    assert hash(profile) == hash(hardware.load(name))


@pytest.mark.parametrize("name", hardware.names())
def test_buckets_make_latency_a_small_share(name):
    for tier in hardware.load(name).links:
        transfer_seconds = tier.bucket_bytes / tier.bytes_per_second
        assert 0.03 < tier.latency_seconds / (tier.latency_seconds + transfer_seconds) < 0.15, tier


@pytest.mark.parametrize(
    "device, profile, gigabytes",
    [
        ("NVIDIA H100 80GB HBM3", "h100", 80),
        ("H100", "h100", 80),
        ("NVIDIA H200", "h200", 141),
        ("NVIDIA A100-SXM4-80GB", "a100", 80),
        ("NVIDIA A100-SXM4-40GB", "a100", 40),
        ("NVIDIA B200", "b200", 180),
        ("Tesla V100-SXM2-32GB", "v100", 32),
        ("Tesla V100-SXM2-16GB", "v100", 16),
        ("NVIDIA GeForce RTX 4090", "rtx4090", 24),
        ("NVIDIA H200 NVL", "h200-nvl", 141),
        ("NVIDIA H100 PCIe", "h100-pcie", 80),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie", 40),
        ("NVIDIA A100 80GB PCIe", "a100-pcie", 80),
        ("NVIDIA L40S", "l40s", 48),
    ],
)
def test_names_that_devices_call_themselves(device, profile, gigabytes):
    found = hardware.load(device)
    assert (found.name, found.memory_bytes) == (profile, gigabytes * 10**9)


def test_gloo_by_all_its_names():
    assert hardware.load("gloo") == hardware.load("cpu") == hardware.load("cpu-gloo")
    gloo = hardware.load("gloo")
    assert (gloo.memory_bytes, gloo.reduce_scatter_lowering) == (8 * 2**30, "all_to_all")
    assert hardware.load(gloo) is gloo


@pytest.mark.parametrize("unknown, near", [("h10", "h100"), ("NVIDIA H100 NVL", "NVIDIA H100"), ("glo", "gloo")])
def test_unknown_names_get_the_nearest(unknown, near):
    """A card on a bridge is not the same card on a switch: no guess."""
    with pytest.raises(HardwareError, match=f"no hardware profile for '{unknown}'(.|\n)*{near}"):
        hardware.load(unknown)


def test_reached_speeds():
    assert TOY.reached_flops_per_second("fp32") == 0.5e12
    assert TOY.reached_memory_bytes_per_second == pytest.approx(0.8e11)
    with pytest.raises(HardwareError, match="toy has no speed for 'bf16'(.|\n)*fp32"):
        TOY.reached_flops_per_second("bf16")


@pytest.mark.parametrize(
    "mesh, tiers",
    [
        ("a=4", ["near"]),
        ("a=5", ["rack"]),
        ("a=2,b=2", ["near", "near"]),
        ("a=2,b=4", ["rack", "near"]),
        ("a=4,b=4,c=2", ["far", "rack", "near"]),
        ("a=17", ["far"]),
        ("a=4,b=1", ["near", "near"]),
        ("a=1,b=16", ["near", "rack"]),  # an axis of one device sends nothing
    ],
)
def test_an_axis_takes_the_closest_tier_that_joins_its_groups(mesh, tiers):
    found = TOY.tiers_for(Mesh.parse(mesh))
    assert list(found) == list(Mesh.parse(mesh).names)
    assert [tier.name for tier in found.values()] == tiers
    links = TOY.links_for(Mesh.parse(mesh))
    assert [link.latency_seconds for link in links.values()] == [tier.latency_seconds for tier in found.values()]


@pytest.mark.parametrize(
    "mesh, axis, link",
    [
        ("a=4", "a", Link(1e-6, 100.0)),
        ("a=4,b=4", "a", Link(2e-6, 40.0)),  # one member a node: its own outer link
        ("a=4,b=2", "a", Link(2e-6, 80.0, 40.0 * 3 / 2)),  # two members: two links a node; all-to-all 2 of 3 peers far
        ("a=8", "a", Link(2e-6, 100.0, 40.0 * 7 / 4)),  # four members: 160, but not faster than inside the node
        ("a=6,b=1", "a", Link(2e-6, 80.0, 40.0 * 5 / 4)),  # 6 over nodes of 4: some node holds only two
        ("a=32", "a", Link(3e-6, 100.0, 10.0 * 31 / 16)),  # 16 members a rack: 160, and 160 over a node's four links
        ("a=2,b=16", "a", Link(3e-6, 10.0)),  # one member a rack: its own share of what leads out of it
        (
            "a=8,b=4",
            "a",
            Link(3e-6, 40.0, 10.0 * 7 / 4),
        ),  # one a node, four a rack: 40 out of the rack as out of the node
    ],
)
def test_links_that_members_of_a_node_share(mesh, axis, link):
    found = TOY.links_for(Mesh.parse(mesh))[axis]
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(link))


def test_a_flat_mesh_of_h100_gathers_as_measured():
    """All-gathers reach 409.6 GB/s of result a GPU on 2 nodes of 8 and 385.5 on 32 (constants of AutoParallel's cost
    model, fitted to nccl-tests), (n - 1) / n of it sent: rings use all 8 network cards of a node, 50 GB/s each."""
    for size, result_bytes_per_second in ((16, 409.6e9), (256, 385.5e9)):
        link = hardware.load("h100").links_for(Mesh(("dp",), (size,)))["dp"]
        assert link.bytes_per_second == pytest.approx(result_bytes_per_second * (size - 1) / size, rel=0.06)


VALID = """
name = "mine"
description = "a test"
[compute]
flops_per_second = { fp32 = 1e12 }
efficiency = 1
launch_seconds = 1e-6
source = "a"
[memory]
bytes = 1e9
bytes_per_second = 1e11
efficiency = 0.5
source = "b"
[collectives]
reduce_scatter_lowering = "native"
source = "c"
[[links]]
name = "wire"
latency_seconds = 1e-6
bytes_per_second = 1e9
bucket_bytes = 1024
source = "d"
"""


def test_a_profile_of_the_users_own(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(VALID)
    profile = hardware.load(file)
    assert (profile.name, profile.memory_bytes, profile.links[0].devices) == ("mine", 10**9, None)
    assert profile.source.splitlines() == ["compute: a", "memory: b", "collectives: c", "links.wire: d"]
    assert hardware.load(str(file)) == profile


NETWORK = """
[[links]]
name = "wire"
devices = 8
latency_seconds = 1e-6
bytes_per_second = 4e11
bucket_bytes = 1024
source = "d"
[[links]]
name = "leaf"
devices = 64
latency_seconds = 1e-5
bytes_per_second = 5e10
bucket_bytes = 1024
rails = 4
source = "e"
[[links]]
name = "spine"
latency_seconds = 2e-5
bytes_per_second = 5e10
bucket_bytes = 1024
rails = 4
oversubscription = 3
source = "f"
"""


def test_rails_and_oversubscription(tmp_path):
    """Eight devices share four cards of 50 GB/s: 25 GB/s each inside a group of switches, a third of that beyond. A
    gather of one device a node takes latency + (n - 1) b / speed; eight devices of a node lead out over all its
    cards."""
    file = tmp_path / "mine.toml"
    file.write_text(VALID[: VALID.index("[[links]]")] + NETWORK)
    profile = hardware.load(file)
    assert [tier.bytes_per_second for tier in profile.links] == [4e11, 2.5e10, pytest.approx(2.5e10 / 3)]
    held = 1e8
    for mesh, axis, seconds in (
        ("b=8,a=8", "b", 1e-5 + 7 * held / 2.5e10),
        ("c=4,b=8,a=8", "c", 2e-5 + 3 * held / (2.5e10 / 3)),
        ("b=64", "b", 1e-5 + 63 * held / 2e11),
        ("c=256", "c", 2e-5 + 255 * held / min(2e11, 64 * 2.5e10 / 3)),
        ("b=8,a=8", "a", 1e-6 + 7 * held / 4e11),
    ):
        found = CollectiveCost(profile, Mesh.parse(mesh)).seconds("all_gather", (axis,), held)
        assert found == pytest.approx(seconds), (mesh, axis)
    again = tmp_path / "again.toml"
    again.write_text(calibrate.text(calibrate.to_table(profile)))
    assert hardware.load(again).links == profile.links


@pytest.mark.parametrize(
    "before, after, complaint",
    [
        ("oversubscription = 3", "oversubscription = 0.5", r"links\[2\].oversubscription is 0.5"),
        ("rails = 4\nsource", "rails = 0\nsource", r"links\[1\].rails is 0"),
        ("devices = 8\n", "devices = 8\nrails = 2\n", "of the links inside a node"),
        ("rails = 4\nsource", "rail = 4\nsource", r"links\[1\].rail is not known"),
    ],
)
def test_bad_networks(tmp_path, before, after, complaint):
    assert NETWORK.count(before) == 1
    file = tmp_path / "mine.toml"
    file.write_text(VALID[: VALID.index("[[links]]")] + NETWORK.replace(before, after))
    with pytest.raises(HardwareError, match=complaint):
        hardware.load(file)


FULL = """
[kernels]
multiprocessors = 10
half_depth = 16
source = "e"
[products]
source = "h"
[products.dense]
share = 0.5
start_seconds = 1e-6
fill_seconds = 0
tile_bytes_per_second = 1e12
memory_bytes_per_second = 1e11
[attention]
source = "i"
[attention.flash]
head_dims = [64, 128]
shares = [0.5, 0.6]
backward = 0.9
[experts]
hidden_passes = 1
width_passes = 2
start_seconds = 0
source = "j"
[errors]
source = "k"
attention = { short = 0.1 }
[nccl]
generation = "hopper"
intra = "nvlink"
channels = 4
channel_bytes_per_second = 1e9
nvls = true
reached.all_gather = { devices = [2, 8], bytes_per_second = [3e9, 2e9] }
source = "f"
[measured]
median_error = 0.1
source = "g"
[[measured.curves]]
kind = "all_reduce"
devices = 2
stride = 4
bytes = [1024, 4096]
seconds = [1e-4, 2e-4]
[fingerprint]
torch = "2.13"
"""


def test_what_a_profile_may_say_besides(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(VALID + FULL)
    profile = hardware.load(file)
    assert profile.kernels == Kernels(10, half_depth=16)
    assert profile.products == {"dense": Products(0.5, 1e-6, 0, 1e12, 1e11)}
    assert profile.attention == {"flash": Attention((64, 128), (0.5, 0.6), backward=0.9)}
    assert (profile.experts, profile.errors) == (Experts(1, 2, 0), {"attention": {"short": 0.1}})
    assert profile.nccl.nvls and profile.nccl.reached == {"all_gather": ((2, 3e9), (8, 2e9))}
    assert profile.curves == (Curve("all_reduce", 2, 4, (1024, 4096), (1e-4, 2e-4)),) and profile.curves[0].span == 8
    assert (profile.curves_error, profile.fingerprint) == (0.1, {"torch": "2.13"})
    assert {line[-1] for line in profile.source.splitlines()} == set("abcdefghijk")
    same = tmp_path / "mine.json"
    same.write_text(json.dumps(tomllib.loads(VALID + FULL)))
    assert hardware.load(same) == profile
    same.write_text("[]")
    with pytest.raises(HardwareError, match="is not a table"):
        hardware.load(same)


@pytest.mark.parametrize(
    "before, after, complaint",
    [
        ("half_depth = 16", "attention = 0.5", "kernels.attention is not known(.|\n)*half_depth"),
        ("share = 0.5\n", "", "products.dense.share is missing"),
        ("fill_seconds = 0", "filled = 0", "products.dense.filled is not known"),
        ("shares = [0.5, 0.6]", "shares = [0.5]", r"attention.flash.shares is \[0.5\](.|\n)*2 positive numbers"),
        ("[attention.flash]\n", "", r"attention.backward is not known(.|\n)*cudnn, flash"),
        ("width_passes = 2", "", "experts.width_passes is missing"),
        ("short = 0.1", "short = -1", "errors.attention.short is -1"),
        ('"hopper"', '"fermi"', "nccl.generation is 'fermi'(.|\n)*volta or ampere"),
        ("reached.all_gather", "reached.gather", "nccl.reached.gather is no collective"),
        ("[2, 8], b", "[8, 2], b", "nccl.reached.all_gather.devices is(.|\n)*each larger"),
        ("[3e9, 2e9]", "[3e9]", "nccl.reached.all_gather.bytes_per_second is"),
        ("devices = 2\nstride", "devices = 1\nstride", r"measured.curves\[0\].devices is 1"),
        ("bytes = [1024, 4096]", "bytes = [4096, 1024]", r"measured.curves\[0\].bytes is"),
        ("seconds = [1e-4, 2e-4]", "seconds = [1e-4, -1]", r"measured.curves\[0\].seconds is"),
        ('torch = "2.13"', "torch = 2.13", "fingerprint.torch is 2.13"),
    ],
)
def test_bad_entries_besides(tmp_path, before, after, complaint):
    assert FULL.count(before) == 1
    file = tmp_path / "mine.toml"
    file.write_text(VALID + FULL.replace(before, after))
    with pytest.raises(HardwareError, match=complaint):
        hardware.load(file)


@pytest.mark.parametrize(
    "before, after, complaint",
    [
        ("[compute]", "[computer]", "compute is missing"),
        ("fp32 = 1e12", "fp32 = 0", "compute.flops_per_second.fp32 is 0"),
        ("{ fp32 = 1e12 }", "{}", "compute.flops_per_second is {}"),
        ("efficiency = 1\n", "efficiency = 1.1\n", "compute.efficiency is 1.1"),
        ("bytes = 1e9", "bytes = '80GB'", "memory.bytes is '80GB'"),
        ("bytes = 1e9", "bytes = 0.5", "memory.bytes is 0.5"),
        ('source = "b"', 'source = " "', "memory.source is ' '"),
        ('"native"', '"ring"', "reduce_scatter_lowering is 'ring'"),
        ("latency_seconds = 1e-6\nb", "b", r"links\[0\].latency_seconds is missing"),
        ('name = "wire"', 'name = "wire"\ndevices = 8', "not rising to any number"),
        ("[[links]]", "[links]", "links is {"),
        ("efficiency = 0.5", "efficiency = ", "is not TOML"),
    ],
)
def test_bad_profiles_name_the_entry(tmp_path, before, after, complaint):
    assert VALID.count(before) == 1
    file = tmp_path / "mine.toml"
    file.write_text(VALID.replace(before, after))
    with pytest.raises(HardwareError, match=complaint):
        hardware.load(file)


def test_a_missing_file():
    with pytest.raises(HardwareError, match="cannot read no/such.toml"):
        hardware.load("no/such.toml")
