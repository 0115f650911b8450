import itertools
from types import SimpleNamespace

import pytest
import torch

from autopar.errors import MeshError
from autopar.ir.mesh import Mesh, joined

MESHES = ["dp=1", "dp=3", "dp=2,tp=4", "pp=2,dp=3,tp=2"]


@pytest.mark.parametrize("text", MESHES)
def test_text_round_trip(text):
    assert str(Mesh.parse(text)) == text
    assert Mesh.parse(f" {text} ".replace(",", " , ").replace("=", " = ")) == Mesh.parse(text)


@pytest.mark.parametrize(
    "text", ["", "8", "dp", "dp=", "dp=two", "dp=2;tp=2", "dp=0", "dp=2,dp=2", "2=dp", "dp=-1", "dp=2.0"]
)
def test_malformed_text_is_refused(text):
    with pytest.raises(MeshError):
        Mesh.parse(text)


@pytest.mark.parametrize(
    "names, sizes", [((), ()), (("a",), (1, 2)), (("a", "a"), (2, 2)), (("a",), (0,)), (("a",), (2.0,))]
)
def test_impossible_meshes_are_refused(names, sizes):
    with pytest.raises(MeshError):
        Mesh(names, sizes)


def test_a_size_of_what_is_left(monkeypatch):
    assert Mesh.parse("dp=-1,tp=2", 8) == Mesh.parse("dp=4,tp=2") and Mesh.parse("dp=-1", 3).sizes == (3,)
    for wrong, devices, message in (("dp=-1,tp=3", 8, "3 does not divide 8"), ("dp=-1,tp=-1", 8, "positive"),
                                    ("dp=-1,tp=0", 8, "positive"), ("dp=-1,tp=2", None, "not known")):  # fmt: skip
        with pytest.raises(MeshError, match=message):
            Mesh.parse(wrong, devices)
    monkeypatch.setenv("WORLD_SIZE", "6")
    assert Mesh.of("dp=-1,tp=2") == Mesh.of({"dp": -1, "tp": 2}) == Mesh.parse("dp=3,tp=2")


def test_from_what_users_have():
    mesh = Mesh(("dp", "tp"), (2, 4))
    device_mesh = SimpleNamespace(mesh=torch.arange(8).reshape(2, 4), mesh_dim_names=("dp", "tp"))
    assert Mesh.of(mesh) is mesh
    assert Mesh.of("dp=2,tp=4") == Mesh.of({"dp": 2, "tp": 4}) == Mesh.of(device_mesh) == mesh
    device_mesh.mesh_dim_names = None
    assert Mesh.of(device_mesh).names == ("axis0", "axis1")
    with pytest.raises(MeshError, match="float"):
        Mesh.of(8.0)


@pytest.mark.parametrize("text", MESHES)
def test_ranks_are_row_major_and_the_last_axis_is_closest(text):
    mesh = Mesh.parse(text)
    grid = torch.arange(mesh.devices).reshape(mesh.sizes)
    for rank in range(mesh.devices):
        coordinate = mesh.coordinate(rank)
        assert tuple(coordinate) == mesh.names
        assert grid[tuple(coordinate.values())] == rank
        for i, axis in enumerate(mesh.names):
            line = grid.movedim(i, -1)[tuple(v for a, v in coordinate.items() if a != axis)]
            assert mesh.group((axis,), rank) == tuple(line.tolist())
    assert mesh.group(mesh.names, 0) == tuple(range(mesh.devices))


@pytest.mark.parametrize("text", ["dp=6", "pp=2,dp=3,tp=2", "a=2,b=4,c=3"])
def test_groups_are_those_of_all_ranks(text):
    """For any axes, in any order, and parts of them."""
    mesh = Mesh.parse(text)
    names = ("a", "b//2", "b%2", "c") if text.startswith("a") else mesh.names
    split = mesh.with_parts(names)
    for axes in (axes for count in range(len(names) + 1) for axes in itertools.permutations(names, count)):
        others = [tuple(split.coordinate(r)[name] for name in names if name not in axes) for r in range(mesh.devices)]
        groups = [tuple(r for r, place in enumerate(others) if place == mine) for mine in others]
        assert mesh.groups(axes) == sorted({*groups})
        assert [mesh.first_of_group(axes, rank) for rank in range(mesh.devices)] == [group[0] for group in groups]
        assert tuple(sorted(mesh.group(axes, mesh.devices - 1))) == groups[-1]
    for rank in range(mesh.devices):
        coordinate = mesh.coordinate(rank)
        assert mesh.rank_at(coordinate) == rank
        for axis in mesh.names:
            assert mesh.rank_at({axis: coordinate[axis]}) == mesh.group((axis,), 0)[coordinate[axis]]


def test_group_follows_the_order_of_the_axes():
    mesh = Mesh.parse("pp=2,dp=2,tp=2")
    assert mesh.group(("pp", "tp"), 2) == (2, 3, 6, 7)
    assert mesh.group(("tp", "pp"), 2) == (2, 6, 3, 7)
    assert mesh.group((), 5) == (5,)


@pytest.mark.parametrize(("mesh", "parts"), [
    ("dp=6", ("dp//2", "dp%2")), ("dp=6,tp=2", ("dp//3", "dp%3")), ("pp=2,dp=8", ("dp//2//2", "dp//2%2", "dp%2"))
])  # fmt: skip
def test_parts_of_an_axis_are_axes_of_the_same_devices(mesh, parts):
    """Positions on parts are what their names say of the position on the axis."""
    mesh = Mesh.parse(mesh)
    split = mesh.with_parts(parts)
    assert split.devices == mesh.devices and joined(split.names) == mesh.names
    for rank in range(mesh.devices):
        there, dp = split.coordinate(rank), mesh.coordinate(rank)["dp"]
        assert [there[part] for part in parts] == [eval(part, {"dp": dp}) for part in parts]
        assert mesh.group(parts, rank) == mesh.group(("dp",), rank)
        for part in parts:
            assert mesh.group((part,), rank) == split.group((part,), rank) and len(
                mesh.group((part,), rank)
            ) == mesh.size(part)
        assert mesh.with_parts(mesh.names) == mesh


@pytest.mark.parametrize("part", ["dp//4", "dp%5", "tp%2", "dp%", "dp//2x"])
def test_no_part_of_an_axis(part):
    with pytest.raises(MeshError):
        Mesh.parse("dp=6").size(part)


def test_unknown_axis_and_rank_are_refused():
    mesh = Mesh.parse("dp=2,tp=2")
    with pytest.raises(MeshError, match="no axis 'pp'(.|\n)*dp, tp"):
        mesh.size("pp")
    for rank in (-1, 4):
        with pytest.raises(MeshError, match=f"no rank {rank} in a mesh of 4"):
            mesh.coordinate(rank)


def test_hashable_and_equal_by_value():
    assert len({Mesh.parse("dp=2,tp=2"), Mesh.parse("dp=2,tp=2"), Mesh.parse("tp=2,dp=2")}) == 2
