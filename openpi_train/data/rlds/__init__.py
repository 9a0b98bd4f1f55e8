"""RLDS, the native dataset format. Read next: `source.py` reads, `index.py` locates images, `write.py` writes."""

from openpi_train.data.rlds.index import Rlds

__all__ = ["Rlds"]
