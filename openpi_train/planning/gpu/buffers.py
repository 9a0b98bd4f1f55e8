"""The buffers that are alive when a compiled program needs most memory, from the record that XLA writes of them.

With `xla_dump_to` set XLA writes, beside the program, how long every buffer lives
(xla/hlo/utils/hlo_live_range.cc), and which ones are alive at the peak: the program's arguments too, each by the
instruction that makes it.
Read next: `step_account.py`.
"""

import dataclasses
import re
from pathlib import Path

# The end of the record's name (jaxlib 0.10.2).
_RECORD = "*live-range.txt"
_PEAK = re.compile(r"^ *Live ranges at \d+ \(peak\):$")
_BUFFER = re.compile(r"^ +(\S+?)\{([\d,]*)\}: (\d+) bytes \(cumulative: \d+ bytes\)$")


@dataclasses.dataclass(frozen=True)
class LiveBuffer:
    """A buffer of `num_bytes`: the result of `instruction`, or its element `index` where that is a tuple."""

    num_bytes: int
    instruction: str
    index: tuple[int, ...] = ()


def buffers_at_peak(record: str) -> list[LiveBuffer]:
    """The buffers alive at the peak, largest first. Raises ValueError if the text is no such record."""
    lines = iter(record.splitlines())
    if not any(map(_PEAK.match, lines)):
        raise ValueError("XLA's record of live ranges has no peak: this jaxlib writes it in another way")
    found = []
    for line in lines:
        if (buffer := _BUFFER.match(line)) is None:
            break
        index = tuple(int(number) for number in buffer[2].split(",") if number)
        found.append(LiveBuffer(int(buffer[3]), buffer[1], index))
    return sorted(found, key=lambda one: -one.num_bytes)


def recorded_in(folder: Path) -> str:
    """The record of the largest program that XLA wrote to this folder. Raises ValueError if there is none."""
    files = sorted(folder.glob(_RECORD), key=lambda file: file.stat().st_size)
    if not files:
        raise ValueError(f"XLA wrote no record of live ranges ({_RECORD}): this jaxlib does it in another way")
    return files[-1].read_text()
