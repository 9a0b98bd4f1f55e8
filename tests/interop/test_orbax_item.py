"""Arrays in chunks: any part of one is read, with few chunks in memory at a time."""

import json
import shutil
import time

import numpy as np
import pytest
import tensorstore

from openpi_train.interop import orbax_item
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import StoredLeaf
from openpi_train.runtime.exits import CheckpointError

VALUES = np.arange(7 * 10, dtype=np.float32).reshape(7, 10)


@pytest.fixture
def leaf(tmp_path):
    metadata = {"shape": VALUES.shape, "chunks": (3, 4), "dtype": "<f4"}
    store = {"driver": "ocdbt", "base": f"{tmp_path.as_uri()}/", "path": "params.w/"}
    tensorstore.open({"driver": "zarr", "kvstore": store, "metadata": metadata, "create": True}).result()[...] = VALUES
    keys = [{"key": key, "key_type": 2} for key in ("params", "w")]
    entry = {"key_metadata": keys, "value_metadata": {"value_type": "jax.Array"}}
    (tmp_path / "_METADATA").write_text(json.dumps({"tree_metadata": {"": entry}}))
    return orbax_item.open_item(Place.of(tmp_path))["params/w"]


@pytest.mark.parametrize("limit", [1, 100, 1 << 20])
def test_parts_that_lie_across_chunks_are_put_together(leaf, monkeypatch, limit, tmp_path):
    monkeypatch.setattr(orbax_item, "_CHUNKS_BYTES", limit)
    leaf = orbax_item.open_item(Place.of(tmp_path))["params/w"]
    assert (leaf.shape, leaf.chunk) == (VALUES.shape, (3, 4))
    for part in (np.s_[0:7, 0:10], np.s_[2:4, 3:9], np.s_[3:6, 4:8], np.s_[6:7, 9:10], np.s_[2:2, 0:3]):
        np.testing.assert_array_equal(leaf.read(part), VALUES[part])


def test_a_save_that_fails_makes_no_file_afterwards(tmp_path):
    def torn(_):
        raise CheckpointError("torn")

    sound = {f"sound_{n}": np.ones((400, 400), np.float32) for n in range(20)}
    lost = StoredLeaf(shape=(8,), dtype=np.dtype(np.float32), read=torn)
    with pytest.raises(CheckpointError):
        orbax_item.save_item(tmp_path / "params", {**sound, "torn": lost})
    shutil.rmtree(tmp_path / "params")
    time.sleep(0.3)  # what was on its way would be there by now
    assert not (tmp_path / "params").exists()


def bytes_read() -> int:
    (metric,) = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return metric["values"][0]["value"]


def test_the_index_of_a_store_is_not_read_anew_for_every_leaf(tmp_path):
    values = {f"leaf_{n}": np.random.default_rng(n).standard_normal(50).astype(np.float32) for n in range(100)}
    orbax_item.save_item(tmp_path / "item", values)
    before = bytes_read()
    for name, leaf in orbax_item.open_item(Place.of(tmp_path / "item")).items():
        np.testing.assert_array_equal(leaf.read(leaf.everything), values[name])
    everything = sum(path.stat().st_size for path in (tmp_path / "item").rglob("*") if path.is_file())
    assert bytes_read() - before <= everything
