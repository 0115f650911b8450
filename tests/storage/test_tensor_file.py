"""Our safetensors files against the safetensors package."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from autopar.errors import WeightsError
from autopar.storage import tensor_file
from autopar.storage.durable import digest_of
from autopar.storage.tensor_file import DTYPES, Form, TensorFile, TensorFileWriter, cut, in_order


def _values() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    wide = {name: (torch.rand(5, 3) * 9).to(dtype) for name, dtype in DTYPES.items()}
    return wide | {"number": torch.tensor(3.5), "empty": torch.empty(0, 4), "deep": torch.rand(4, 6, 5, 3)}


def _write(path, values):
    forms = {name: Form(tuple(v.shape), v.dtype) for name, v in values.items()}
    writer = TensorFileWriter(path, forms)
    for name in in_order(forms):
        writer.append(values[name])
    return writer.close()


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.shape == b.shape and a.dtype == b.dtype and bytes(tensor_file.bytes_of(a)) == bytes(tensor_file.bytes_of(b))
    )


def test_the_package_reads_what_is_written(tmp_path):
    values = _values()
    digest = _write(tmp_path / "a.safetensors", values)
    assert digest == digest_of(tmp_path / "a.safetensors")
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == values.keys() and all(_same(found[name], values[name]) for name in values)


def test_what_the_package_writes_is_read(tmp_path):
    values = _values()
    save_file(values, tmp_path / "a.safetensors")
    file = TensorFile(tmp_path / "a.safetensors")
    assert file.forms.keys() == values.keys() and all(_same(file.read(name), values[name]) for name in values)


@pytest.mark.parametrize("block_bytes", [1, 40, 1 << 20])
def test_slices(tmp_path, monkeypatch, block_bytes):
    """Any ranges of any dims, whether rows are read one by one or in blocks."""
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", block_bytes)
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    value = torch.arange(7 * 6 * 5 * 4, dtype=torch.float32).reshape(7, 6, 5, 4)
    _write(tmp_path / "a.safetensors", {"x": value, "y": value[0]})
    file = TensorFile(tmp_path / "a.safetensors")
    for _ in range(50):
        ranges = []
        for size in value.shape:
            ends = sorted(rng.sample(range(size + 1), rng.choice((2, 2, 4))))
            ranges.append(rng.choice(([(0, size)], list(zip(ends[::2], ends[1::2])))))
        assert torch.equal(file.read("x", ranges), cut(value, ranges)), ranges


def test_a_bad_file_is_a_weights_error(tmp_path):
    path = tmp_path / "a.safetensors"
    _write(path, {"a": torch.ones(4), "b": torch.ones(2, 2, dtype=torch.float16)})
    good = path.read_bytes()
    header = good.index(b"}}") + 2
    rng = random.Random(0)
    refused = 0
    for _ in range(300):
        bad = bytearray(good)
        bad[rng.randrange(header)] = rng.randrange(32, 127)
        path.write_bytes(bad[: rng.choice((len(bad), rng.randrange(len(bad))))])
        try:
            file = TensorFile(path)
            for name in file.forms:
                file.read(name)
        except WeightsError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 200
    path.unlink()
    with pytest.raises(WeightsError, match="cannot read"):
        TensorFile(path)


def test_every_tensor_is_written_once(tmp_path):
    writer = TensorFileWriter(tmp_path / "a", {"a": Form((2,), torch.float32), "b": Form((3,), torch.float32)})
    with pytest.raises(ValueError, match="expected"):
        writer.append(torch.ones(3))
    with pytest.raises(ValueError, match="not written"):
        writer.close()
