"""Which share of the peak a matrix product reaches, by its size."""

from dataclasses import replace
from random import Random

import pytest

from autopar.cost.products import HALF_TILE, LARGE, MISALIGNED, Shares
from autopar.hardware.profile import Kernels, load, names

PLAIN = Kernels(multiprocessors=100, tile=(128, 128))  # no ramp


def shares(name: str) -> Shares:
    hardware = load(name)
    return Shares(hardware.kernels, hardware.flops_efficiency)


@pytest.mark.parametrize("name", names())
def test_a_large_product_reaches_the_efficiency_of_the_profile(name):
    assert shares(name)((1, LARGE, LARGE, LARGE), 2) == pytest.approx(load(name).flops_efficiency)


def test_h200_as_measured():
    """790 TFLOP/s in bf16 with 8192 cubed."""
    assert shares("h200")((1, 8192, 8192, 8192), 2) * 989e12 == pytest.approx(790e12, rel=0.01)


def test_waves():
    """A tile more than the multiprocessors is a second wave, unless smaller tiles fill it better."""
    share = Shares(replace(PLAIN, multiprocessors=1), 0.5)
    full, half = share((1, 1280, 1280, 4096), 4), share((1, 128, 64, 4096), 4)
    assert full == pytest.approx(0.5)
    assert half == pytest.approx(0.5 * HALF_TILE)
    share = Shares(PLAIN, 0.5)
    exact, more = share((1, 1280, 1280, 64), 4), share((1, 1280, 1281, 64), 4)
    assert exact / share((1, LARGE, LARGE, LARGE), 4) == pytest.approx(1 / (4096 / 4100), rel=1e-6)
    assert 0.5 * exact < more < exact


def test_tensor_parallelism_of_a_small_matrix_loses():
    """Eight devices with an eighth of the columns each take more than an eighth of the time."""
    share, whole, part = shares("h100"), (1, 2048, 2048, 512), (1, 2048, 256, 512)
    assert share(part, 2) < 0.8 * share(whole, 2)
    assert share((1, 2048, 2048, 64), 2) < 0.8 * share(whole, 2)  # little depth, as of a row-parallel layer


def test_a_deep_product_of_little_output_is_split():
    """The gradient of a small weight over many tokens."""
    assert shares("h100")((1, 512, 512, 65536), 2) > 0.3 * shares("h100")((1, LARGE, LARGE, LARGE), 2)


def test_alignment():
    share = shares("a100")
    for product in ((1, 4096, 4095, 4096), (1, 4096, 4096, 4095)):
        assert share(product, 2) == pytest.approx(MISALIGNED * share((1, 4096, 4096, 4096), 2), rel=0.01)
        assert share(product, 4) > 0.95 * share((1, 4096, 4096, 4096), 4)


def test_a_cpu_has_the_same_share_for_all_shapes_unless_measured():
    assert {shares("cpu-gloo")(p, 4) for p in ((1, 1, 1, 1), (7, 33, 5, 1000), (1, LARGE, LARGE, LARGE))} == {0.9}
    fitted = Shares(Kernels(half_rows=10.0, half_depth=30.0), 0.9)
    assert fitted((1, 10, LARGE, 30), 4) == pytest.approx(0.9 / 4, rel=0.01)


def test_shares_are_shares():
    seed = Random().randrange(2**31)
    random = Random(seed)
    print(f"seed {seed}")
    for name in names():
        share = shares(name)
        for _ in range(50):
            product = (random.choice([1, 1, 8, 64]), *(int(2 ** random.uniform(0, 15)) for _ in range(3)))
            assert 0 < share(product, 2) <= 1, (name, product)
