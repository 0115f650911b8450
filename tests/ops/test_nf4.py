"""Quantized weights: the published code books, other libraries' bits, and shards that dequantize to shards."""

from __future__ import annotations

import itertools

import pytest
import torch

from autopar.ir.layout import Layout, is_legal, local_part
from autopar.ir.mesh import Mesh
from autopar.ops.nf4 import CODES, QUANT_TYPES, dequantize, forms_of_parts, quantize, tile_of
from autopar.rules import rule_of, strategies
from autopar.rules.numeric_check import make_node

PARTS = ("packed", "absmax", "scale", "offset")
# arXiv 2305.14314, appendix E
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def back(parts: dict[str, torch.Tensor], quant_type: str, dtype=torch.float32) -> torch.Tensor:
    return dequantize(*(parts.get(part) for part in PARTS), quant_type, dtype)


def test_nf4_is_the_published_code_book():
    assert CODES["nf4"] == NF4
    below, above = (torch.linspace(0.9677083, 0.5, n, dtype=torch.float64)[:-1] for n in (8, 9))  # quantiles, section 3
    values = torch.cat([-torch.special.ndtri(below), torch.zeros(1), torch.special.ndtri(above).flip(0)])
    torch.testing.assert_close(values / values.abs().max(), torch.tensor(NF4, dtype=torch.float64), atol=1e-6, rtol=0)


def test_codes_are_those_of_bitsandbytes():
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = normal(128, 256)
    for quant_type in CODES:
        packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type=quant_type, compress_statistics=False)
        mine = quantize(weight, quant_type, 64, False)
        assert torch.equal(packed.view(-1), mine["packed"].view(-1)) and torch.equal(
            state.absmax, mine["absmax"].view(-1)
        )
        assert torch.equal(functional.dequantize_4bit(packed, state), back(mine, quant_type))


def test_doubly_quantized_scales_are_those_of_torchao():
    """torchao's tiles are 256 neighbours in memory: ours are as well in a matrix of four blocks a row. Its code book is
    rounded to four digits, so a value between two codes may go to the other one."""
    nf4_tensor = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
    weight = normal(256, 256)
    theirs, mine = nf4_tensor.NF4Tensor.from_tensor(weight, 64, 256), quantize(weight, "nf4", 64, True)
    assert tile_of(256, 4) == (64, 4)
    assert torch.equal(theirs.quantized_scalers, mine["absmax"].view(-1)) and theirs.scaler_mean == mine["offset"]
    torch.testing.assert_close(1 / theirs.quantization_factor, mine["scale"].view(-1))
    same = theirs.quantized_data == mine["packed"].view(-1)
    assert same.float().mean() > 0.999
    error = (theirs.get_original_weight() - back(mine, "nf4")).abs().view(-1, 2)[same]
    assert error.max() <= 1e-4 * weight.abs().max()


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_values_go_to_the_nearest_code(quant_type):
    weight = torch.cat([normal(64, 128), torch.zeros(64, 64)], 1).double()
    parts = quantize(weight, quant_type, 64, False)
    found = back(parts, quant_type, torch.float64)
    codes = torch.tensor(CODES.get(quant_type) or [i / 127 for i in range(-127, 128)])
    choices = parts["absmax"].repeat_interleave(64, 1).unsqueeze(-1) * codes
    torch.testing.assert_close(
        (found - weight).abs(), (choices - weight.unsqueeze(-1)).abs().amin(-1), atol=1e-6, rtol=0
    )
    assert not found[:, 128:].any()
    doubly = back(quantize(weight, quant_type, 64, True), quant_type)
    assert (doubly - found).abs().max() <= 0.01 * weight.abs().max()


def test_blocks_of_nothing_and_narrow_types():
    for weight in (torch.zeros(64, 64), torch.full((64, 64), -2.5), normal(64, 64).bfloat16()):
        for double_quant in (False, True):
            found = back(quantize(weight, "nf4", 64, double_quant), "nf4", weight.dtype)
            assert found.dtype == weight.dtype and found.isfinite().all()
            assert (found - weight).abs().max() <= 0.16 * weight.abs().max()


@pytest.mark.parametrize("shape, block_size, double_quant", [
    ((256, 128), 16, True), ((384, 512), 32, True), ((512, 64), 64, True), ((2, 128, 128), 16, True),
    ((6, 128), 16, False), ((7, 96), 16, False),
])  # fmt: skip
@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_a_shard_dequantizes_to_the_shard(shape, block_size, double_quant, quant_type):
    parts = quantize(normal(*shape), quant_type, block_size, double_quant)
    tensors = [parts.get(part) for part in PARTS]
    node, inputs = make_node(torch.ops.autopar.dequantize.default, *tensors, quant_type, torch.float32)
    whole, seen = back(parts, quant_type), set()
    for text in ("x=2", "x=3", "x=4", "x=2,y=2", "x=3,y=2"):
        mesh = Mesh.parse(text)
        for strategy in strategies(rule_of(node), [x.shape for x in inputs], [whole.shape], mesh, {"o": (3,)}):
            seen |= set(strategy.choice)
            for rank in range(mesh.devices):
                coordinate = mesh.coordinate(rank)
                local = [local_part(x, layout, mesh, coordinate) for x, layout in zip(inputs, strategy.inputs)]
                found = dequantize(*local, *[None] * (4 - len(local)), quant_type, torch.float32)
                assert torch.equal(found, local_part(whole, strategy.outputs[0], mesh, coordinate)), strategy.text(mesh)
    assert "o" in seen or "i" in seen


def test_no_tile_is_cut():
    """192 rows are three tiles: two devices cannot hold them in halves, three can."""
    parts = quantize(normal(192, 256), "nf4", 64, True)
    node, inputs = make_node(
        torch.ops.autopar.dequantize.default, *(parts[part] for part in PARTS), "nf4", torch.float32
    )
    rows = Layout((("x",), ()))
    for devices, allowed in ((2, False), (3, True)):
        mesh = Mesh.parse(f"x={devices}")
        found = [s.inputs[0] for s in strategies(rule_of(node), [x.shape for x in inputs], [(192, 256)], mesh)]
        assert is_legal((192, 128), rows, mesh) and (rows in found) == allowed


def test_bits_a_weight():
    for (rows, columns), double_quant in itertools.product(
        [(4096, 4096), (1024, 4096), (896, 4864), (128, 896)], (True, False)
    ):
        forms = forms_of_parts((rows, columns), "nf4", 64, double_quant)
        bits = 8 * sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in forms.values()) / (rows * columns)
        assert bits <= 4.13 if double_quant else bits == 4.5
        made = quantize(torch.zeros(rows, columns), "nf4", 64, double_quant)
        assert {k: (tuple(v.shape), v.dtype) for k, v in made.items()} == forms
