"""Tests that a matrix product takes the seconds that its size tells."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from autopar.cost.product_seconds import MISALIGNED, ProductSeconds, product_seconds, tiled_seconds
from autopar.errors import HardwareError
from autopar.hardware.profile import Products, load, names

LARGE = 8192
PLAIN = Products(share=0.5, start_seconds=0, fill_seconds=0, tile_bytes_per_second=1e30, memory_bytes_per_second=1e30)


def share(name: str, *product: int, dtype: str = "bf16", element_bytes: int = 2) -> float:
    """Return the share of the peak that a product reaches."""
    hardware = load(name)
    peak = hardware.peak_flops_per_second(dtype)
    return 2 * np.prod(product, dtype=float) / peak / ProductSeconds(hardware)((1, *product), peak, element_bytes)


@pytest.mark.parametrize("name", names())
def test_a_large_product_reaches_the_efficiency_of_the_profile(name):
    dtype = "fp16" if name == "v100" else "bf16"
    hardware = load(name)
    reached = hardware.flops_efficiency * hardware.sustained
    assert share(name, LARGE, LARGE, LARGE, dtype=dtype) == pytest.approx(reached, abs=0.01)


@pytest.mark.parametrize("name, flops_per_second", [("a100", 258e12), ("h100", 730e12), ("h200", 730e12)])
def test_what_a_device_sustains(name, flops_per_second):
    """Products of 8192 cubed for minutes, as the sources of the profiles have them."""
    peak = load(name).peak_flops_per_second("bf16")
    assert share(name, LARGE, LARGE, LARGE) * peak == pytest.approx(flops_per_second, rel=0.01)


def test_h200_as_measured():
    """790 TFLOP/s in bf16 with 8192 cubed; nothing was fitted to it."""
    alone = product_seconds(load("h200"), np.array([[1, LARGE, LARGE, LARGE]], float), 989e12, 2)[0]
    assert 2 * LARGE**3 / alone == pytest.approx(790e12, rel=0.05)


def plain(m: int, n: int, k: int, waves: float = 1.0, many: int = 1) -> float:
    return float(tiled_seconds(replace(PLAIN, whole_waves=waves), many, 1e12, np.array([[1, m, n, k]]), 4)[0])


def test_waves():
    """A tile more than the multiprocessors is a second wave, unless smaller tiles fill it better; of waves that are
    not waited for only the tiles count."""
    assert plain(256, 256, 4096) == pytest.approx(2 * 256 * 256 * 4096 / 0.5e12)
    hundred, more = plain(1280, 1280, 64, many=100), plain(1280, 1281, 64, many=100)
    assert hundred == pytest.approx(2 * 1280 * 1280 * 64 / 0.5e12)
    assert hundred < more < 2 * hundred
    assert plain(1280, 1281, 64, 0.0, 100) < more


def test_the_formula_by_hand():
    """One tile on one of two multiprocessors, its depth in one part: loads are slower than multiplications."""
    constants = Products(1.0, 1e-6, 2e-6, 1e9, 1e30, split_seconds=1.0)
    found = tiled_seconds(constants, 2, 1e15, np.array([[1, 16, 128, 64]]), 2)[0]
    assert found == pytest.approx(1e-6 + 2e-6 + 64 * (64 + 64) * 2 * 2 / 1e9)  # two tiles
    quantized = replace(constants, row_seconds=1e-3, element_seconds=1e-4, padding_seconds=7.0, least_seconds=100.0)
    assert tiled_seconds(quantized, 2, 1e15, np.array([[1, 16, 128, 64]]), 2)[0] == pytest.approx(107.0)
    memory = replace(constants, memory_bytes_per_second=1.0)
    assert tiled_seconds(memory, 2, 1e15, np.array([[1, 16, 128, 64]]), 2)[0] == pytest.approx(
        1e-6 + 2 * (16 * 64 + 64 * 128 + 16 * 128)
    )


def test_tensor_parallelism_of_a_small_matrix_loses():
    """Eight devices with an eighth of the columns each take more than an eighth of the time."""
    whole = share("h100", 2048, 2048, 512)
    assert share("h100", 2048, 256, 512) < 0.8 * whole
    assert share("h100", 2048, 2048, 64) < 0.8 * whole  # little depth, as of a row-parallel layer


def test_a_deep_product_of_little_output_is_split():
    """The gradient of a small weight over many tokens."""
    assert share("h100", 512, 512, 65536) > 0.3 * share("h100", LARGE, LARGE, LARGE)


def test_alignment():
    whole = share("a100", 4096, 4096, 4096)
    for product in ((4096, 4095, 4096), (4096, 4096, 4095)):
        assert share("a100", *product) == pytest.approx(MISALIGNED * whole, rel=0.15)
        assert share("a100", *product, dtype="fp32", element_bytes=4) > 0.8


def test_a_cpu_has_the_same_share_for_all_shapes_unless_measured():
    cpu = load("cpu-gloo")
    for product in ((1, 1, 1), (7, 33, 1000), (LARGE, LARGE, LARGE)):
        assert share("cpu-gloo", *product, dtype="fp32", element_bytes=4) == pytest.approx(0.9)
    fitted = replace(cpu, kernels=replace(cpu.kernels, half_rows=10.0, half_depth=30.0))
    found = product_seconds(fitted, np.array([[1.0, 10, LARGE, 30]]), 1e12, 4)[0]
    assert found == pytest.approx(4 * 2 * 10 * LARGE * 30 / 0.9e12)


def test_kinds_that_a_profile_lacks():
    with pytest.raises(HardwareError, match="a100 has no products of kind fp8(.|\n)*products.fp8"):
        product_seconds(load("a100"), np.ones((1, 4)), 1e12, 1, "fp8")
    one = np.array([[8.0, 64, 512, 512]])
    assert product_seconds(load("b200"), one, 1e15, 2, "grouped") == product_seconds(load("b200"), one, 1e15, 2)


@pytest.mark.parametrize("name", names())
def test_larger_products_take_as_long_or_longer(name):
    """Doubled in any size, a product takes no less time, and no product is faster than the peak allows."""
    seed = Random().randrange(2**31)
    random = Random(seed)
    print(f"seed {seed}")
    hardware = load(name)
    peak = hardware.peak_flops_per_second("fp16")
    seconds = ProductSeconds(hardware)
    for _ in range(50):
        product = [random.choice([1, 1, 8, 64]), *(8 * int(2 ** random.uniform(0, 12)) for _ in range(3))]
        found = seconds(tuple(product), peak, 2)
        assert found >= 2 * np.prod(product, dtype=float) / peak / 1.05, product
        for i in range(4):
            twice = tuple(size * 2 if i == d else size for d, size in enumerate(product))
            assert seconds(twice, peak, 2) >= found * 0.999, (product, twice)
