"""Writes replay buffers with the zarr package, as diffusion_policy and RoboTwin do; run alone it makes `fixtures/`.

Values are a function of (seed, row), so that tests can say what any row must hold.
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import zarr
from numcodecs import Blosc
from zarr.codecs import BloscCodec

HEIGHT, WIDTH = 12, 16
LENGTHS = (9, 5, 13)


def arms(lengths=LENGTHS, dims=14, seed=0):
    """RoboTwin's arrays: pictures NCHW uint8; an action is the next state."""
    rng, rows = np.random.default_rng(seed), sum(lengths)
    joints = np.cumsum(rng.normal(0, 0.1, (rows + 1, dims)), axis=0).astype(np.float32)
    return {
        "head_camera": rng.integers(0, 256, (rows, 3, HEIGHT, WIDTH), dtype=np.uint8),
        "state": joints[:-1],
        "action": joints[1:],
    }


def push_t(lengths=LENGTHS, seed=0):
    """Push-T's arrays: pictures NHWC float32 of whole numbers; two dims of action in pixels."""
    rng, rows = np.random.default_rng(seed), sum(lengths)
    return {
        "img": rng.integers(0, 256, (rows, WIDTH, WIDTH, 3)).astype(np.float32),
        "keypoint": rng.uniform(0, 512, (rows, 9, 2)).astype(np.float32),
        "state": rng.uniform(0, 512, (rows, 5)).astype(np.float32),
        "action": rng.uniform(0, 512, (rows, 2)).astype(np.float32),
        "n_contacts": rng.integers(0, 3, (rows, 1)).astype(np.float32),
    }


def write(path, arrays, lengths=LENGTHS, form=2, chunk_rows=4, shards=False):
    """Write a store of zarr format `form`, in a folder or, for a path that ends so, a zip file; returns the path."""
    store = zarr.storage.ZipStore(path, mode="w") if str(path).endswith(".zip") else str(path)
    root = zarr.open_group(store, mode="w", zarr_format=form)
    blosc = Blosc(cname="zstd", clevel=3, shuffle=1) if form == 2 else BloscCodec(cname="zstd", clevel=3)
    options = {"compressors": blosc, "config": {"write_empty_chunks": True}}
    data, meta = root.create_group("data"), root.create_group("meta")
    for name, values in arrays.items():
        chunks = (chunk_rows, *values.shape[1:])
        if shards:
            options["shards"] = (3 * chunk_rows, *values.shape[1:])
        data.create_array(name, shape=values.shape, dtype=values.dtype, chunks=chunks, **options)[:] = values
    ends = np.cumsum(lengths).astype(np.int64)
    meta.create_array("episode_ends", shape=ends.shape, dtype=ends.dtype, chunks=ends.shape)[:] = ends
    if not isinstance(store, str):
        store.close()
    return Path(path)


def main():
    folder = Path(__file__).parent / "fixtures"
    shutil.rmtree(folder, ignore_errors=True)
    for dims in (10, 14, 16):
        write(folder / f"arms_{dims}.zarr", arms(dims=dims, seed=dims), form=3 if dims == 16 else 2, chunk_rows=27)
    write(folder / "push_t.zarr", push_t(), chunk_rows=27)


if __name__ == "__main__":
    sys.exit(main())
