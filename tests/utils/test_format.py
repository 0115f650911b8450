import pytest

from autopar.utils.format import byte_column, column, ms, percent, size, table


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0.000 ms"),
        (3.2e-6, "0.003 ms"),
        (7.926e-3, "7.93 ms"),
        (0.2806, "280.6 ms"),
        (9.5, "9500.0 ms"),
        (61.5, "61.50 s"),
    ],
)
def test_ms(seconds, text):
    assert ms(seconds) == text


@pytest.mark.parametrize(
    "bytes_, text", [(0, "0 B"), (512, "512 B"), (1536, "1.50 KiB"), (80e9, "74.51 GiB"), (3e12, "2.73 TiB")]
)
def test_size(bytes_, text):
    assert size(bytes_) == text


def test_percent():
    assert [percent(p, 1000) for p in (0, 0.1, 22, 1000)] == ["0.0%", "<0.1%", "2.2%", "100.0%"]
    assert percent(1, 0) == "0.0%"


def test_a_column_has_one_number_of_decimals_and_no_noise():
    assert column([12.345, 1.0, 0.001, 0.0, None]) == ["12.35", "1.00", "<0.01", "-", "-"]
    assert column([]) == []


def test_a_byte_column_has_the_unit_of_its_largest():
    assert byte_column([2**30, 2**29, 1.0, 0.0]) == ("GiB", ["1.00", "0.50", "<0.01", "-"])
    assert byte_column([4.0, 0.0]) == ("B", ["4", "-"])
    assert byte_column([2**30, 2**19], 2**19) == ("MiB", ["1024.0", "0.5"])


def test_table():
    assert table(["a", "n"], [["long", "1"], ["x", "200"]]) == ["a       n", "long    1", "x     200"]
