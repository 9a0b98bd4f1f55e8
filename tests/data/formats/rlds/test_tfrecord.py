"""TFRecord framing against files that TensorFlow wrote, and against damage of every kind."""

import struct

import google_crc32c
import pytest

from openpi_train.data.formats.rlds.tfrecord import FOOTER_BYTES, HEADER_BYTES, masked_crc, read_records, write_record

PAYLOADS = [b"first", b"", b"a" * 70_000, b"last"]


@pytest.fixture
def path(tmp_path):
    with open(tmp_path / "x.tfrecord", "wb") as file:
        for payload in PAYLOADS:
            write_record(file, payload)
    return tmp_path / "x.tfrecord"


def starts() -> list[int]:
    offsets, position = [], 0
    for payload in PAYLOADS:
        offsets.append(position)
        position += HEADER_BYTES + len(payload) + FOOTER_BYTES
    return offsets


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_checksum_is_crc32c_with_the_published_mask():
    crc = 0xE3069283  # of "123456789": RFC 3720, appendix B.4, and the usual check value of CRC-32C
    assert google_crc32c.value(b"123456789") == crc
    assert masked_crc(b"123456789") == (((crc >> 15) | (crc << 17 & 0xFFFFFFFF)) + 0xA282EAD8) % 2**32


def test_records_that_tensorflow_wrote_pass_their_checksums(bridge_sample):
    path = bridge_sample / "bridge_dataset-train.tfrecord-00000-of-00001"
    records = list(read_records(path))
    assert len(records) == 25
    assert not any(record.problem for record in records)
    # Rewritten by us, the file is the same byte for byte.
    copy = b"".join(
        struct.pack("<Q", len(record.payload))
        + struct.pack("<I", masked_crc(struct.pack("<Q", len(record.payload))))
        + record.payload
        + struct.pack("<I", masked_crc(record.payload))
        for record in records
    )
    assert copy == path.read_bytes()


def test_written_records_read_back_at_their_offsets(path):
    data = path.read_bytes()
    records = list(read_records(path))
    assert [record.payload for record in records] == PAYLOADS
    assert [record.number for record in records] == [0, 1, 2, 3]
    assert all(data[record.offset :][: len(record.payload)] == record.payload for record in records)


def test_damaged_payload_is_marked_and_the_following_records_are_read(path):
    flip(path, starts()[2] + HEADER_BYTES + 40_000)
    records = list(read_records(path))
    assert [bool(record.problem) for record in records] == [False, False, True, False]
    assert "checksum" in records[2].problem and not records[2].lost
    assert not any(record.problem for record in read_records(path, check_crc=False))


def test_damaged_length_ends_the_file_there(path):
    flip(path, starts()[2] + 1)
    records = list(read_records(path))
    assert [record.number for record in records] == [0, 1, 2]
    assert records[2].lost and "length does not match its checksum" in records[2].problem


@pytest.mark.parametrize("into_record", [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 100, HEADER_BYTES + 70_003])
def test_torn_file_gives_all_whole_records_and_says_where_it_is_torn(path, into_record):
    path.write_bytes(path.read_bytes()[: starts()[2] + into_record])
    records = list(read_records(path))
    assert [record.payload for record in records[:2]] == PAYLOADS[:2]
    assert len(records) == 3 and records[2].lost
    assert "truncated" in records[2].problem and f"at byte {starts()[2]} of" in records[2].problem
