"""Episodes in plain parquet files. Read next: `parquet_index.py`, which says what they hold."""

from openpi_train.data.formats.parquet.parquet_index import Parquet

__all__ = ["Parquet"]
