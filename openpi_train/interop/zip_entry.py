"""Where the content of an entry of a ZIP file begins, so that an uncompressed one can be read in place.

Read next: `torch_file.py`; `models/paligemma/big_vision.py`.
"""

import struct
import zipfile
from typing import BinaryIO

# Header of an entry, followed by its name and an extra field (APPNOTE.TXT 6.3.10, section 4.3.7).
_HEADER = struct.Struct("<26xHH")


def values_offset(file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    """Where in the file the content of an entry begins."""
    file.seek(entry.header_offset)
    return entry.header_offset + _HEADER.size + sum(_HEADER.unpack(file.read(_HEADER.size)))
