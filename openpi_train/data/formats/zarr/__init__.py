"""Zarr replay buffers. Read next: `zarr_source.py` reads, `store.py` describes the files, `merge.py` joins several."""

from openpi_train.data.formats.zarr.zarr_index import Zarr

__all__ = ["Zarr"]
