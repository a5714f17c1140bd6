"""Reading safetensors strictly: every byte of the file is accounted for before an array is made.

The layout is that of safetensors: the header's length (uint64, little-endian), the header (JSON), the numbers. Where
that format leaves readers a choice, this one refuses: keys that stand twice, gaps, overlaps, bytes behind the last
tensor, empty tensors, numbers of a type that bundles never hold. Arrays are views of the file's bytes, so nothing is
allocated that a header asks for.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artifacts.errors import FormatError, shown
from artifacts.strict_json import parse_object

DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1",
}  # fmt: skip
HEADER_LIMIT = 1 << 20  # bytes; 1000 layers with six tensors a side take 1 MiB less a tenth
RANK_LIMIT = 8
LENGTH_BYTES = 8


def parse(data: bytearray | memoryview) -> dict[str, NDArray[np.generic]]:
    """Tensors by name, as views of `data`: a change of one changes the other. Raises FormatError for any other bytes
    than those of whole, gapless safetensors with types that numpy has."""
    view = memoryview(data)
    start = LENGTH_BYTES + _header_length(view)
    header = parse_object(bytes(view[LENGTH_BYTES:start]))
    _check_metadata(header.pop("__metadata__", {}))
    entries = {name: _Entry(name, entry, len(view) - start) for name, entry in header.items()}
    end = 0
    for entry in sorted(entries.values(), key=lambda entry: entry.begin):
        if entry.begin != end:
            raise FormatError(f"tensor {shown(entry.name)} begins at byte {entry.begin}, the one before ends at {end}")
        end = entry.end
    if end != len(view) - start:
        raise FormatError(f"{len(view) - start} bytes of numbers, but the tensors take {end}")
    return {name: entry.array(view[start:]) for name, entry in entries.items()}


def _header_length(view: memoryview) -> int:
    if len(view) < LENGTH_BYTES:
        raise FormatError(f"{len(view)} bytes are too few for the length of the header")
    length = int.from_bytes(view[:LENGTH_BYTES], "little")
    if not 2 <= length <= min(HEADER_LIMIT, len(view) - LENGTH_BYTES):
        raise FormatError(f"a header of {length} bytes in a file of {len(view)}; at most {HEADER_LIMIT} are allowed")
    if view[LENGTH_BYTES] != ord("{"):
        raise FormatError("the header does not begin with {")
    return length


def _check_metadata(metadata: Any) -> None:
    if not isinstance(metadata, Mapping) or not all(isinstance(text, str) for text in metadata.values()):
        raise FormatError("__metadata__ of the header must be a table of texts")


class _Entry:
    """One tensor as the header describes it, held against the bytes that there are."""

    def __init__(self, name: str, entry: Any, size: int):
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise FormatError(f"tensor {shown(name)} must have dtype, shape and data_offsets, not {shown(entry)}")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise FormatError(f"tensor {shown(name)} has dtype {shown(dtype)}: known are {', '.join(DTYPES)}")
        if not _is_sizes(shape) or len(shape) > RANK_LIMIT or not all(1 <= n <= size for n in shape):
            raise FormatError(f"tensor {shown(name)} has shape {shown(shape)} in {size} bytes")
        if not _is_sizes(offsets) or len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1] <= size:
            raise FormatError(f"tensor {shown(name)} lies at {shown(offsets)} of {size} bytes")
        self.name, self.dtype, self.shape = name, np.dtype(DTYPES[dtype]), tuple(shape)
        self.begin, self.end = offsets
        if prod(self.shape) * self.dtype.itemsize != self.end - self.begin:
            raise FormatError(f"tensor {shown(name)}: {dtype} {shape} does not take {self.end - self.begin} bytes")

    def array(self, numbers: memoryview) -> NDArray[np.generic]:
        return np.frombuffer(numbers[self.begin : self.end], self.dtype).reshape(self.shape)


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int for n in value)
