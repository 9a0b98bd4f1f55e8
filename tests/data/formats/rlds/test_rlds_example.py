"""The wire-format walk against the proto classes, on real records and on every legal encoding."""

import numpy as np
import pytest
from tensorflow_datasets.proto import tf_example_pb2

from openpi_train.data.formats.rlds.example import read_example
from openpi_train.data.formats.rlds.tfrecord import read_records


def assert_same_as_proto(payload: bytes):
    proto = tf_example_pb2.Example.FromString(payload).features.feature
    ours = read_example(payload)
    assert set(ours) == set(proto)
    for name, feature in proto.items():
        kind = feature.WhichOneof("kind")
        if kind is None:
            assert ours[name].kind == "empty"
        elif kind == "bytes_list":
            assert ours[name].values() == list(feature.bytes_list.value)
        else:
            values = feature.float_list.value if kind == "float_list" else feature.int64_list.value
            dtype = np.float32 if kind == "float_list" else np.int64
            np.testing.assert_array_equal(ours[name].numbers(), np.array(values, dtype), strict=True)


def test_real_records_parse_as_the_proto_does(bridge_sample):
    for record in read_records(bridge_sample / "bridge_dataset-val.tfrecord-00000-of-00001"):
        assert_same_as_proto(record.payload)


def test_numbers_of_any_size_and_sign_parse_as_the_proto_does():
    rng = np.random.default_rng(0)
    mixed = [0, 1, -1, 127, 128, 300, 2**31, -(2**31), 2**63 - 1, -(2**63), *(1 << np.arange(63)).tolist()]
    example = tf_example_pb2.Example()
    example.features.feature["mixed"].int64_list.value.extend(mixed)
    example.features.feature["small"].int64_list.value.extend([0, 1] * 50)
    example.features.feature["random"].int64_list.value.extend(rng.integers(-(2**63), 2**63 - 1, 500).tolist())
    example.features.feature["floats"].float_list.value.extend([0.0, -0.0, 1e-45, float("inf"), 3.5])
    example.features.feature["é/ü"].bytes_list.value.extend([b"", b"x" * 200, b"\xff\x00"])
    example.features.feature["no floats"].float_list.SetInParent()
    example.features.feature["no ints"].int64_list.SetInParent()
    example.features.feature["no kind"].SetInParent()
    assert_same_as_proto(example.SerializeToString())
    assert_same_as_proto(b"")


def length_prefixed(field: int, body: bytes) -> bytes:
    assert len(body) < 128
    return bytes([field << 3 | 2, len(body)]) + body


def one_feature(list_field: int, body: bytes) -> bytes:
    feature = length_prefixed(list_field, body)
    entry = length_prefixed(1, b"x") + length_prefixed(2, feature)
    return length_prefixed(1, length_prefixed(1, entry))


def test_unpacked_lists_and_lists_in_several_runs_parse_as_the_proto_does():
    floats = np.array([1.5, -2.25, 7.0], "<f4")
    unpacked = b"".join(b"\x0d" + value.tobytes() for value in floats)
    assert_same_as_proto(one_feature(2, unpacked))
    assert_same_as_proto(one_feature(2, length_prefixed(1, floats.tobytes()) + unpacked))
    assert_same_as_proto(one_feature(3, b"\x08\x05\x08\xac\x02" + length_prefixed(1, b"\x01\x96\x01")))


def test_cut_records_raise_value_error_or_hold_less_but_never_crash(bridge_sample):
    payload = next(iter(read_records(bridge_sample / "bridge_dataset-val.tfrecord-00000-of-00001"))).payload
    for size in range(1, 3000, 7):
        with pytest.raises(ValueError, match="record"):
            read_example(payload[:size])


def test_feature_of_two_kinds_is_refused():
    two = length_prefixed(2, b"") + length_prefixed(3, b"")
    entry = length_prefixed(1, b"x") + length_prefixed(2, two)
    with pytest.raises(ValueError, match="not a list"):
        read_example(length_prefixed(1, length_prefixed(1, entry)))
