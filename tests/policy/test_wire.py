"""openpi's framing byte by byte, and that nothing but numbers, truth values and text comes through it."""

import msgpack
import numpy as np
import pytest

from openpi_train.policy import wire

ARRAY = {b"__ndarray__": True, b"data": bytes(12), b"dtype": "<f4", b"shape": [3]}


def test_the_bytes_are_those_of_the_format():
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    packed = msgpack.unpackb(wire.encode({"a": array, "b": np.float32(1.5), "c": "word"}))
    stand_in = {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": "<i2", b"shape": [2, 3]}
    assert packed == {"a": stand_in, "b": {b"__npgeneric__": True, b"data": 1.5, b"dtype": "<f4"}, "c": "word"}


@pytest.mark.parametrize("dtype", ["<f4", ">f8", "|u1", "<i8", "|b1", "<f2", "<U3", "|S2"])
def test_arrays_come_back_as_they_were(dtype):
    for shape in ((), (0, 4), (2, 3)):
        array = np.ones(shape, dtype)
        again = wire.decode(wire.encode({"x": array}))["x"]
        assert (again.dtype, again.shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(again, array)


def test_scalars_come_back_with_their_type():
    for value in (np.float32(0.5), np.int64(-3), np.bool_(True)):
        again = wire.decode(wire.encode({"x": value}))["x"]
        assert type(again) is type(value) and again == value


BAD = {
    "no msgpack": b"\xc1",
    "cut off": wire.encode({"x": np.ones(5)})[:-3],
    "more behind": wire.encode({}) + b"\x00",
    "a list too long for the bytes": b"\xdd\xff\xff\xff\xff",
    "a map too long for the bytes": b"\xdf\xff\xff\xff\xff",
    "nested too deep": b"\x91" * 100_000 + b"\xc0",
    "bad utf-8": b"\xa2\xff\xfe",
    "lists that take a hundred times their bytes": b"\xdd\x00\x0f\xff\xff" + b"\x90" * 0xFFFFF,
    "the same in shorter ones": b"\xdc\x00\x04" + (b"\xdc\xff\xff" + b"\x90" * 0xFFFF) * 4,
    "maps that do": b"\xdc\x00\x04" + (b"\xdc\xff\xff" + b"\x80" * 0xFFFF) * 4,
    "an object": msgpack.packb({**ARRAY, b"dtype": "|O"}),
    "a record": msgpack.packb({**ARRAY, b"dtype": "|V12", b"shape": [1]}),
    "a record by its fields": msgpack.packb({**ARRAY, b"dtype": "f4,f8", b"shape": [1]}),
    "a complex number": msgpack.packb({**ARRAY, b"dtype": "<c8"}),
    "a time": msgpack.packb({**ARRAY, b"dtype": "<M8[s]"}),
    "a dtype that is no text": msgpack.packb({**ARRAY, b"dtype": ["<f4"]}),
    "no dtype": msgpack.packb({b"__ndarray__": True, b"data": b"", b"shape": [0]}),
    "text without width, which numpy would give one": msgpack.packb(
        {b"__ndarray__": True, b"data": b"", b"dtype": "<U0", b"shape": [10**9]}
    ),
    "another size": msgpack.packb({**ARRAY, b"shape": [4]}),
    "a negative size": msgpack.packb({**ARRAY, b"shape": [-1, -3]}),
    "a size that is a truth value": msgpack.packb({**ARRAY, b"shape": [True, 3]}),
    "a size beyond all": msgpack.packb({**ARRAY, b"data": b"", b"shape": [0, 2**63]}),
    "too many dims": msgpack.packb({**ARRAY, b"shape": [1] * 40 + [3]}),
    "data that are text": msgpack.packb({**ARRAY, b"data": "x" * 12}),
    "a scalar of bytes by their number": msgpack.packb({b"__npgeneric__": True, b"data": 10**12, b"dtype": "|S1"}),
    "a scalar that does not fit": msgpack.packb({b"__npgeneric__": True, b"data": 300, b"dtype": "|i1"}),
    "a scalar that is a list": msgpack.packb({b"__npgeneric__": True, b"data": [1], b"dtype": "<f4"}),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_message_is_refused(case):
    with pytest.raises(wire.WireError):
        wire.decode(BAD[case])


@pytest.mark.parametrize("value", [np.array([None]), np.zeros(2, complex), np.zeros(1, "V4"), object()])
def test_what_has_no_form_is_not_sent(value):
    with pytest.raises(TypeError, match="no form on the wire"):
        wire.encode({"x": value})
