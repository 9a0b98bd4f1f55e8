"""Zarr replay buffers. Read next: `source.py` reads, `store.py` describes the files, `merge.py` joins several."""

from openpi_train.data.zarr.index import Zarr

__all__ = ["Zarr"]
