"""openpi's framing byte by byte, and that nothing but numbers, truth values and text comes through it."""

import contextlib
import gc
import tracemalloc

import msgpack
import numpy as np
import pytest

from openpi_train.policy import wire

ARRAY = {b"__ndarray__": True, b"data": bytes(12), b"dtype": "<f4", b"shape": [3]}
# Numpy reads it, and fails with a SystemError where it is to become text.
NO_CHARACTERS = {b"__ndarray__": True, b"data": b"\xff\xff\xff\x7f", b"dtype": "<U1", b"shape": [1]}


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


def test_a_text_answer_is_an_error_with_the_text():
    with pytest.raises(wire.ServerError, match="the state has the shape of"):
        wire.decode("the state has the shape of 'state' [7]; expected [6]")


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
    "a type that is an array of no characters": msgpack.packb({**ARRAY, b"dtype": [NO_CHARACTERS]}),
    "a shape that holds an array of no characters": msgpack.packb({**ARRAY, b"shape": [NO_CHARACTERS]}),
    "a shape that is an array of no characters": msgpack.packb({**ARRAY, b"shape": NO_CHARACTERS}),
    "a scalar of bytes by their number": msgpack.packb({b"__npgeneric__": True, b"data": 10**12, b"dtype": "|S1"}),
    "a scalar that does not fit": msgpack.packb({b"__npgeneric__": True, b"data": 300, b"dtype": "|i1"}),
    "a scalar that is a list": msgpack.packb({b"__npgeneric__": True, b"data": [1], b"dtype": "<f4"}),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_message_is_refused(case):
    with pytest.raises(wire.WireError):
        wire.decode(BAD[case])


def maps_in_maps(count):
    return b"\xdd" + count.to_bytes(4, "big") + b"\x81\xa0\x00" * count


# What a message says that it holds is refused before a value of it is looked at: the rest is not msgpack at all.
@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\xdf" + (5_001).to_bytes(4, "big") + b"\xc1", "more than 10000 values"),
        (b"\xde\x13\x89\xc1", "more than 10000 values"),
        (b"\xdd" + (10_001).to_bytes(4, "big") + b"\xc1", "more than 10000 values"),
        (b"\xdc\x27\x11\xc1", "more than 10000 values"),
        (b"\x92\xdc\x13\x88" + b"\x00" * 5000 + b"\xdc\x13\x87\xc1", "more than 10000 values"),
        (b"\xdd\x00\x00\x0d\x06" + b"\xde\x0d\x06\xc1", "more than 10000 values"),
        (b"\x91" * 33 + b"\xc1", "more than 32 deep"),
        (b"\x81\xa0" * 33 + b"\xc1", "more than 32 deep"),
        (b"\x92" + (b"\xdb" + (1 << 17).to_bytes(4, "big") + b"a" * (1 << 17)) * 2, ""),
        (b"\x92" + (b"\xdb" + ((1 << 17) + 1).to_bytes(4, "big") + b"a" * ((1 << 17) + 1)) * 2, "bytes of text"),
        (b"\xdb" + ((1 << 18) + 1).to_bytes(4, "big"), "more than 262144 bytes of text"),
        (b"\x81\xc5\x01\x01" + bytes(257) + b"\x00", "not a key; keys are text, or at most 256 bytes"),
        (b"\x81\x01\x00", "a int is not a key"),
        (b"\x81\x90\x00", "a list is not a key"),
        (b"\xd4\x05\x00", "no value begins with 0xd4"),
        (b"\xd6\xff\x00\x00\x00\x00", "no value begins with 0xd6"),
        (b"{}", "1 bytes follow its end"),
        (b"\xc4\x05abc", "2 bytes are missing"),
    ],
)
def test_what_a_message_holds_is_bounded_before_it_is_built(data, says):
    if not says:
        assert [len(text) for text in wire.decode(data)] == [1 << 17] * 2
        return
    with pytest.raises(wire.WireError, match=says):
        wire.decode(data)


def test_the_most_that_is_allowed_is_read():
    assert wire.decode(b"\xdc\x27\x10" + b"\x07" * 10_000) == [7] * 10_000
    small = wire.Bounds(items=30)
    assert wire.decode(keys(15, 2), small) == {f"{n:02}": 0 for n in range(15)}
    assert wire.decode(maps_in_maps(10), small) == [{"": 0}] * 10
    deep = wire.decode(b"\x91" * 31 + b"\x90")
    for _ in range(31):
        (deep,) = deep
    assert deep == []
    assert wire.decode(b"\x81\xc5\x01\x00" + bytes(256) + b"\x00") == {bytes(256): 0}


def random_value(random, depth=0):
    """A value such as msgpack has a form for, of every size of header."""
    kinds = 6 if depth > 3 else 8
    kind = random.integers(kinds)
    size = int(random.choice([0, 3, 20, 40, 300]))
    if kind == 0:
        return [None, True, False][random.integers(3)]
    if kind in (1, 2):
        bits = int(random.choice([3, 6, 8, 15, 16, 31, 32, 62]))
        return int(random.integers(2**bits)) * int(random.choice([1, -1]))
    if kind == 3:
        return [float(random.normal()), float(np.float32(random.normal())), float("inf"), 2**64 - 1][random.integers(4)]
    if kind == 4:
        return "".join(random.choice(list("aé€😀"), size)) + "x" * int(random.choice([0, 70_000], p=[0.99, 0.01]))
    if kind == 5:
        return random.bytes(size) + bytes(int(random.choice([0, 70_000], p=[0.99, 0.01])))
    if kind == 6:
        return [random_value(random, depth + 1) for _ in range(size // 10)]
    return {random.choice(["a", "b", "é" * 40]) + str(n): random_value(random, depth + 1) for n in range(size // 10)}


def owned(value):
    """The same with bytes in place of views."""
    if isinstance(value, list):
        return [owned(one) for one in value]
    if isinstance(value, dict):
        return {key: owned(one) for key, one in value.items()}
    return bytes(value) if isinstance(value, memoryview) else value


def read_by_msgpack(data):
    """What msgpack's own reader makes of it; None where it refuses."""

    def refuse(code, data):
        raise ValueError("an extension")

    try:
        # Its times and the bounds of ours apart, both read the same.
        return None if b"\xff" in data else [msgpack.unpackb(data, ext_hook=refuse, max_str_len=1 << 18)]
    except (ValueError, msgpack.UnpackException, RecursionError):
        return None


def test_every_value_is_read_as_msgpacks_own_reader_does():
    random = np.random.default_rng(0)
    many = wire.Bounds(items=100_000, text_bytes=1 << 24)
    for number in range(150):
        data = msgpack.packb(random_value(random), use_single_float=bool(number % 2))
        assert repr(owned(wire.decode(data, many))) == repr(msgpack.unpackb(data))


def test_damaged_messages_are_read_as_msgpacks_own_reader_does_or_refused_by_both():
    random = np.random.default_rng(1)
    read = refused = 0
    for _ in range(1000):
        data = bytearray(msgpack.packb(random_value(random, depth=2))[:2000])
        for _ in range(random.integers(1, 4)):
            data[random.integers(len(data))] = random.integers(255)
        data = bytes(data[: random.integers(len(data)) + 1] if random.integers(2) else data)
        expected = read_by_msgpack(data)
        try:
            found = [owned(wire.decode(data, wire.Bounds(items=100_000)))]
        except wire.WireError:
            found = None
        if b"\xff" not in data:
            assert repr(found) == repr(expected), data[:100]
            read, refused = read + (found is not None), refused + (found is None)
    assert read > 100 and refused > 100


def held_while(action):
    """The most bytes that Python held at once during it, beyond what it held before."""
    gc.collect()
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_arrays_are_views_of_the_message_and_nothing_is_copied():
    image = np.random.default_rng(0).integers(0, 256, (1024, 1024, 3), np.uint8)
    data = wire.encode({"image": image, "state": np.zeros(7)})
    assert held_while(lambda: wire.decode(data)) < 1 << 18
    found = wire.decode(data)["image"]
    assert np.shares_memory(found, np.frombuffer(data, np.uint8)) and not found.flags.writeable
    np.testing.assert_array_equal(found, image)


def keys(count, size):
    """A map of so many keys."""
    return b"\xdf" + count.to_bytes(4, "big") + b"".join(b"\xd9%c%0*d\x00" % (size, size, n) for n in range(count))


# A tenth of what is allowed, since the suite's checks of types make reading slow.
BOMBS = {
    "a map of millions": keys(1 << 16, 7),
    "the most maps": maps_in_maps(333),
    "too many lists": b"\xdd\x00\x0f\xff\xff" + b"\x90" * 0xFFFFF,
    "the most texts of the widest letters": b"\x94" + (b"\xda\x19\x99" + b"a" * 0x1995 + "😀".encode()) * 4,
    "the longest keys": keys(500, 50),
}


@pytest.mark.parametrize("case", BOMBS)
@pytest.mark.slow
def test_reading_takes_no_more_than_the_message_and_as_much_as_its_bounds_say(case):
    def read():
        with contextlib.suppress(wire.WireError):
            wire.decode(BOMBS[case], wire.Bounds(items=1_000))

    assert held_while(read) < len(BOMBS[case]) + (2 << 20) / 10


@pytest.mark.parametrize("value", [np.array([None]), np.zeros(2, complex), np.zeros(1, "V4"), object()])
def test_what_has_no_form_is_not_sent(value):
    with pytest.raises(TypeError, match="cannot be sent"):
        wire.encode({"x": value})
