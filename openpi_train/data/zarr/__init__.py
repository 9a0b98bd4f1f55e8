"""Zarr replay buffers. Read next: `source.py` reads, `store.py` says what lies where, `merge.py` joins several."""

from openpi_train.data.zarr.index import Zarr

__all__ = ["Zarr"]
