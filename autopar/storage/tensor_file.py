"""Safetensors files, read by slices and written tensor by tensor.

Such a file is the length of its header in 8 bytes, a JSON header (name -> dtype, shape, begin and end) and the values,
row-major. The package of that name wants all tensors of a file in memory to write it, and maps the file to read it, so
that what was read stays in the process's resident memory, and a file cut short meanwhile ends the process. Here plain
reads and writes do both.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from ..errors import WeightsError
from .durable import Digest, Writer

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16,
    "U8": torch.uint8, "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LONGEST_HEADER = 100 << 20  # bytes, as the format demands
BLOCK_BYTES = 1 << 20  # rows of less than this are read several at once, cut or not

Ranges = Sequence[Sequence[tuple[int, int]]]  # a dim each: (start, stop) pairs, in order


@dataclass(frozen=True)
class Form:
    """Shape and dtype of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes_(self) -> int:
        """Return the bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


def in_order(forms: Mapping[str, Form]) -> list[str]:
    """Return names in the order in which their tensors lie in a file: wide dtypes first, so that every value is
    aligned."""
    return sorted(forms, key=lambda name: -forms[name].dtype.itemsize)


class TensorFile:
    """A file to read from; `forms` says what is in it. Raises WeightsError if it is not such a file, or ends too
    early."""

    def __init__(self, path: Path):
        self.path = path
        self.forms: dict[str, Form] = {}
        self._begin: dict[str, int] = {}
        try:
            self._file = open(path, "rb", buffering=0)
        except OSError as error:
            raise WeightsError(
                f"cannot read {path}: {error.strerror}", fix="see that all files of the folder are there"
            ) from error
        try:
            self._read_header()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
            self.close()
            raise WeightsError(f"{path} is not a safetensors file: {error}", fix="fetch or save it again") from error

    def _read_header(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        (length,) = struct.unpack("<Q", os.pread(self._file.fileno(), 8, 0))
        if length > min(LONGEST_HEADER, size - 8):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header = json.loads(os.pread(self._file.fileno(), length, 8))
        header.pop("__metadata__", None)
        spans = []
        for name, entry in header.items():
            form = Form(tuple(entry["shape"]), DTYPES[entry["dtype"]])
            begin, end = entry["data_offsets"]
            if any(type(n) is not int or n < 0 for n in (*form.shape, begin)) or end - begin != form.bytes_:
                raise ValueError(f"{name} of {form.bytes_} bytes lies in {begin}:{end}")
            self.forms[name], self._begin[name] = form, 8 + length + begin
            spans.append((begin, end))
        spans.sort()
        if any(a[1] > b[0] for a, b in pairwise(spans)) or (spans and 8 + length + max(e for _, e in spans) > size):
            raise ValueError(f"its tensors overlap, or go beyond its {size} bytes")

    def read(self, name: str, ranges: Ranges | None = None) -> Tensor:
        """Return the elements of a tensor that lie in `ranges` of every dim (None: all), as a CPU tensor of its own.

        What is in memory is the result and at most a row, or BLOCK_BYTES, more."""
        form = self.forms[name]
        ranges = [[(0, size)] for size in form.shape] if ranges is None else ranges
        result = torch.empty([sum(b - a for a, b in dim) for dim in ranges], dtype=form.dtype)
        self._fill(result, ranges, form.shape, self._begin[name])
        return result

    def _fill(self, result: Tensor, ranges: Ranges, shape: Sequence[int], offset: int) -> None:
        if not shape:
            return self._read_into(result, offset)
        inner = shape[1:]
        row_bytes = math.prod(inner) * result.element_size()
        at = 0
        for start, stop in ranges[0]:
            rows = result[at : at + stop - start]
            at += stop - start
            if all(list(r) == [(0, size)] for r, size in zip(ranges[1:], inner)):
                self._read_into(rows, offset + start * row_bytes)
            elif row_bytes >= BLOCK_BYTES:
                for i, row in enumerate(rows, start):
                    self._fill(row, ranges[1:], inner, offset + i * row_bytes)
            else:
                step = BLOCK_BYTES // max(row_bytes, 1)
                for low in range(start, stop, step):
                    block = torch.empty((min(step, stop - low), *inner), dtype=result.dtype)
                    self._read_into(block, offset + low * row_bytes)
                    rows[low - start : low - start + len(block)] = cut(block, ranges[1:], 1)

    def _read_into(self, result: Tensor, offset: int) -> None:
        view = bytes_of(result)
        while len(view):
            count = os.preadv(self._file.fileno(), [view[: 1 << 30]], offset)
            if not count:
                raise WeightsError(f"{self.path} ends before its last tensor", fix="fetch or save it again")
            view, offset = view[count:], offset + count

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorFileWriter:
    """A file to write tensors of these forms to, in the order of `in_order(forms)`."""

    def __init__(self, path: Path, forms: Mapping[str, Form]):
        self.forms, self._left = forms, in_order(forms)
        header: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in self._left:
            begin, end = end, end + forms[name].bytes_
            header[name] = {
                "dtype": NAMES[forms[name].dtype],
                "shape": list(forms[name].shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._writer = Writer(path)
        self._writer.write(struct.pack("<Q", len(text)) + text)

    def append(self, tensor: Tensor) -> None:
        """Write the next tensor, which is whole. Raises ValueError if it is of another form than that."""
        form = self.forms[self._left.pop(0)]
        if (tuple(tensor.shape), tensor.dtype) != (form.shape, form.dtype):
            raise ValueError(f"expected {form}, got {tuple(tensor.shape)} {tensor.dtype}")
        self._writer.write(bytes_of(tensor.detach().cpu().contiguous()))

    def close(self) -> Digest:
        """Close the file and return its Digest. Raises ValueError if a tensor is missing."""
        if self._left:
            raise ValueError(f"{self._left} were not written")
        return self._writer.close()

    def abandon(self) -> None:
        """Remove a file that will not be finished."""
        self._writer.abandon()


class FileForLater:
    """Takes what a TensorFileWriter takes: copies it to the host, and writes the file when `write` is called."""

    def __init__(self, path: Path, forms: Mapping[str, Form]):
        self.path, self.forms, self._tensors = path, forms, list[Tensor]()

    def append(self, tensor: Tensor) -> None:
        """Copy the next tensor."""
        self._tensors.append(tensor.detach().to("cpu", copy=True))

    def close(self) -> FileForLater:
        """Return the file, with all tensors in it, to be written."""
        return self

    def write(self) -> Digest:
        """Write the file, let go of each tensor that it has, and return its Digest."""
        writer = TensorFileWriter(self.path, self.forms)
        while self._tensors:
            writer.append(self._tensors.pop(0))
        return writer.close()

    def abandon(self) -> None:
        """Let go of all tensors."""
        self._tensors.clear()


def cut(tensor: Tensor, ranges: Ranges, first_dim: int = 0) -> Tensor:
    """Return the elements that lie in `ranges` of the dims from `first_dim` on."""
    for dim, wanted in enumerate(ranges, first_dim):
        slices = [tensor.narrow(dim, a, b - a) for a, b in wanted]
        tensor = slices[0] if len(slices) == 1 else torch.cat(slices, dim)
    return tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy()) if tensor.numel() else memoryview(bytearray())
