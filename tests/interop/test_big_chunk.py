"""Chunks that are too large to be decoded whole: any part of one comes piece by piece, the same values."""

import json

import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import tensorstore

from openpi_train.interop import big_chunk, orbax_item, stored_leaves
from openpi_train.interop.place import Place
from openpi_train.runtime.exits import CheckpointError

VALUES = np.random.default_rng(0).normal(size=(3, 4, 50, 6)).astype(np.float32)
PARTS = (np.s_[0:3, 0:4, 0:50, 0:6], np.s_[1:2, 2:4, 7:31, 2:5], np.s_[2:3, 3:4, 49:50, 5:6], np.s_[0:1, 0:1, 0:1, 0:6])


@pytest.fixture
def item(tmp_path, monkeypatch):
    """The values saved as one chunk, by Orbax, which must be read in pieces of 300 bytes."""
    with ocp.PyTreeCheckpointer() as writer:
        writer.save(tmp_path / "item", {"w": VALUES, "half": VALUES.astype(ml_dtypes.bfloat16), "none": VALUES * 0})
    monkeypatch.setattr(stored_leaves, "PIECE_BYTES", 300)
    monkeypatch.setattr(orbax_item, "PIECE_BYTES", 300)
    return tmp_path / "item"


@pytest.mark.parametrize(("name", "values"), [("w", VALUES), ("half", VALUES.astype(ml_dtypes.bfloat16))])
def test_a_part_of_a_big_chunk_is_read_in_pieces(item, name, values):
    leaf = orbax_item.open_item(Place.of(item))[name]
    assert leaf.chunk == VALUES.shape
    for part in PARTS:
        np.testing.assert_array_equal(leaf.read(part), values[part])
        sizes = [piece.nbytes for _, piece in leaf.pieces(part)]
        assert max(sizes) <= 300 and sum(sizes) == values[part].nbytes


def test_a_chunk_that_is_not_there_is_filling(tmp_path, monkeypatch):
    metadata = {"shape": [4, 100], "chunks": [4, 100], "dtype": "<f4", "compressor": {"id": "zstd"}, "fill_value": 2.5}
    spec = {"driver": "zarr", "kvstore": f"{tmp_path.as_uri()}/w/", "metadata": metadata, "create": True}
    array = tensorstore.open(spec).result()
    monkeypatch.setattr(stored_leaves, "PIECE_BYTES", 300)
    assert big_chunk.can_decode(array)
    found = list(big_chunk.decode(array, np.s_[1:3, 20:90], (4, 100)))
    part = stored_leaves.assembled(iter(found), np.s_[1:3, 20:90], np.float32)
    np.testing.assert_array_equal(part, np.full((2, 70), 2.5, np.float32))


def test_a_big_chunk_that_is_damaged_is_named(item):
    leaf = orbax_item.open_item(Place.of(item))["w"]
    data = max(item.rglob("d/*"), key=lambda path: path.stat().st_size)
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(CheckpointError, match="truncated or damaged: its leaf w cannot be read"):
        leaf.whole()


def test_a_leaf_is_laid_out_at_hand_and_nothing_is_left_of_it(item, tmp_path):
    leaf = orbax_item.open_item(Place.of(item))["w"]
    (tmp_path / "spool").mkdir()
    with stored_leaves.at_hand(leaf.cast(np.float16), tmp_path / "spool") as near:
        for part in PARTS:
            np.testing.assert_array_equal(near.read(part), VALUES[part].astype(np.float16))
        assert not list((tmp_path / "spool").iterdir())


def test_what_is_described_is_what_orbax_itself_describes(tmp_path):
    tree = {
        "step": np.asarray(5, np.int32),
        "params": {},
        "ema_params": None,
        "opt_state": (
            optax.EmptyState(),
            ({"mu": {"a": {"value": VALUES}}}, optax.EmptyState(), {"count": np.asarray(3, np.int32)}),
        ),
        "half": {"value": VALUES.astype(ml_dtypes.bfloat16)},
    }
    with ocp.PyTreeCheckpointer() as writer:
        writer.save(tmp_path / "theirs", tree)
    orbax_item.save_item(
        tmp_path / "ours", {**tree, "opt_state": ((), (tree["opt_state"][1][0], (), {"count": np.int32(3)}))}
    )
    theirs, ours = (json.loads((tmp_path / name / "_METADATA").read_text()) for name in ("theirs", "ours"))
    assert ours == theirs
    with ocp.PyTreeCheckpointer() as reader:
        restored = reader.restore(tmp_path / "ours")
    np.testing.assert_array_equal(restored["opt_state"][1][0]["mu"]["a"]["value"], VALUES)
    assert restored["half"]["value"].dtype == ml_dtypes.bfloat16 and int(restored["step"]) == 5
    items = [orbax_item.open_item(Place.of(tmp_path / name)) for name in ("ours", "theirs")]
    one, other = ({name: leaf.whole() for name, leaf in item.items()} for item in items)
    assert one.keys() == other.keys()
    for name, values in one.items():
        assert values.dtype == other[name].dtype and values.shape == other[name].shape
        np.testing.assert_array_equal(values, other[name])
