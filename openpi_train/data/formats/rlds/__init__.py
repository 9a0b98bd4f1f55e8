"""RLDS, the native dataset format.

Read next: `rlds_source.py` reads, `rlds_index.py` locates images, `rlds_writer.py` writes.
"""

from openpi_train.data.formats.rlds.rlds_index import Rlds

__all__ = ["Rlds"]
