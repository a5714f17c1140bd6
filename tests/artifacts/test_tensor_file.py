"""The strict safetensors reader: the library's own reader is the oracle for what it accepts."""

import json
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.numpy import load as library_load
from safetensors.numpy import save

from artifacts import FormatError
from artifacts.tensor_file import DTYPES, HEADER_LIMIT, parse

TENSORS = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8).filter(lambda n: n != "__metadata__"),
    arrays.arrays(
        st.sampled_from([np.dtype(d) for d in DTYPES.values()]), arrays.array_shapes(min_dims=0, max_dims=4, max_side=5)
    ),
    max_size=4,
)


def same(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor.dtype, tensor.shape, tensor.tobytes()) == (
            other[name].dtype,
            other[name].shape,
            other[name].tobytes(),
        )


@given(TENSORS)
def test_reads_what_the_library_writes(tensors):
    same(parse(bytearray(save(tensors))), tensors)


def test_arrays_are_writable_views():
    data = bytearray(save({"x": np.zeros(3, np.float32)}))
    parse(data)["x"][1] = 1
    assert parse(data)["x"].tolist() == [0, 1, 0]


@given(TENSORS, st.data())
def test_whatever_is_accepted_the_library_reads_alike(tensors, draws):
    """Flips, cuts and insertions: refused, or read as the library reads them."""
    data = bytearray(save(tensors))
    for _ in range(draws.draw(st.integers(1, 3))):
        at = draws.draw(st.integers(0, len(data) - 1))
        kind = draws.draw(st.sampled_from(["flip", "cut", "insert", "digit"]))
        if kind == "flip":
            data[at] ^= 1 << draws.draw(st.integers(0, 7))
        elif kind == "cut":
            data = data[:at] or bytearray(1)
        elif kind == "insert":
            data[at:at] = draws.draw(st.binary(max_size=9))
        else:
            data[at] = draws.draw(st.sampled_from(b'0123456789,:[]{}" '))
    try:
        read = parse(data)
    except FormatError:
        return
    same(read, library_load(bytes(data)))


def file_of(header, numbers=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return bytearray(struct.pack("<Q", len(text) if length is None else length) + text + numbers)


def entry(shape=(2,), begin=0, end=8, dtype="F32", **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]} | more


FOUR = bytes(16)
REFUSED = {
    "no length": (bytearray(7), "7 bytes are too few"),
    "header beyond the file": (file_of({}, length=100), "a header of 100 bytes in a file of 10"),
    "huge header": (file_of({}, length=2**64 - 1), "a header of 18446744073709551615 bytes"),
    "empty header": (file_of(b""), "a header of 0 bytes"),
    "header above the limit": (
        file_of(b"{}" + b" " * HEADER_LIMIT),
        f"a header of {HEADER_LIMIT + 2} bytes .* at most {HEADER_LIMIT}",
    ),
    "space first": (file_of(b" {}"), "does not begin with {"),
    "list": (file_of(b"[]"), "does not begin with {"),
    "a name twice": (
        file_of(b'{"x":' + json.dumps(entry()).encode() + b',"x":' + json.dumps(entry()).encode() + b"}", bytes(8)),
        "a key stands twice",
    ),
    "metadata that is no table": (file_of({"__metadata__": [1]}), "__metadata__"),
    "metadata that is no text": (file_of({"__metadata__": {"a": 1}}), "__metadata__"),
    "gap": (file_of({"x": entry(), "y": entry(begin=12, end=16, shape=(1,))}, FOUR), "begins at byte 12.* ends at 8"),
    "overlap": (file_of({"x": entry(), "y": entry(begin=4, end=12)}, bytes(12)), "begins at byte 4.* ends at 8"),
    "gap in front": (file_of({"x": entry(begin=8, end=16)}, FOUR), "begins at byte 8.* ends at 0"),
    "bytes behind": (file_of({"x": entry()}, FOUR), "16 bytes of numbers, but the tensors take 8"),
    "bytes without tensors": (file_of({}, FOUR), "16 bytes of numbers, but the tensors take 0"),
    "beyond the file": (file_of({"x": entry(end=24, shape=(6,))}, FOUR), r"lies at \[0, 24\] of 16 bytes|has shape"),
    "huge shape": (file_of({"x": entry(shape=(2**62, 2**62))}, FOUR), "has shape"),
    "shape of zero": (file_of({"x": entry(shape=(0,), end=0)}), "has shape"),
    "shape that is negative": (file_of({"x": entry(shape=(-2, -1))}, bytes(8)), "has shape"),
    "shape of true": (file_of({"x": entry(shape=(True, 2))}, bytes(8)), "has shape"),
    "shape of floats": (file_of({"x": entry(shape=(2.0,))}, bytes(8)), "has shape"),
    "rank": (file_of({"x": entry(shape=(1,) * 8 + (2,))}, bytes(8)), "has shape"),
    "sizes": (file_of({"x": entry(shape=(3,))}, bytes(8)), r"F32 \[3\] does not take 8 bytes"),
    "offsets the wrong way": (file_of({"x": entry(begin=8, end=0)}, bytes(8)), r"lies at \[8, 0\]"),
    "three offsets": (file_of({"x": entry() | {"data_offsets": [0, 4, 8]}}, bytes(8)), "lies at"),
    "dtype": (file_of({"x": entry(dtype="BF16", end=4)}, bytes(4)), "has dtype 'BF16': known are"),
    "dtype that is none": (file_of({"x": entry(dtype=["F32"])}, bytes(8)), "has dtype"),
    "entry": (file_of({"x": 1}), "must have dtype, shape and data_offsets, not 1"),
    "entry with more": (file_of({"x": entry(more=1)}, bytes(8)), "must have dtype, shape and data_offsets"),
    "huge integer": (file_of(b'{"x":' + b"9" * 5000 + b"}"), "is not a 64-bit integer"),
    "half a surrogate": (file_of(b'{"__metadata__":{"a":"\\ud800"}}'), "not valid JSON"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    data, message = REFUSED[name]
    with pytest.raises(FormatError, match=message):
        parse(data)


def test_messages_stay_short():
    with pytest.raises(FormatError) as info:
        parse(file_of({"n" * 100_000: {"dtype": "x" * 100_000, "shape": [], "data_offsets": [0, 0]}}))
    assert len(str(info.value)) < 1000
