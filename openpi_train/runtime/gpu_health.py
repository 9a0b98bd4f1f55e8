"""What the driver and the kernel say of this host's GPUs: of those that failed, and of one that computes slowly.

By `nvidia-smi`, and not by NVML in this process: both hang on some broken devices, and a program can be ended.
Read next: `exits.py` and `training/device_speed.py`, which ask.
"""

import re
import subprocess
from collections.abc import Sequence

_TIMEOUT_S = 20.0  # nvidia-smi hangs on some broken devices
# NVIDIA's names (`nvidia-smi --help-query-gpu`); errors that ECC could not correct since the driver was loaded.
_FIELDS = ("index", "uuid", "pci.bus_id", "ecc.errors.uncorrected.volatile.total")
# As the driver writes it: "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."
_XID = re.compile(r"NVRM: Xid \(PCI:[0-9a-fA-F:.]+\): \d+.*")
_MOST_LINES = 5
_STATE = ("temperature.gpu", "clocks.sm", "clocks.max.sm", "power.draw", "power.limit")
# Named so since driver 535; a name that the driver does not know fails the whole query.
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
# Bits of NVML's `nvmlClocksEventReasons`, of which idleness says nothing of a device that computes.
_REASON_WORDS = {
    0x02: "set clocks",
    0x04: "its power limit",
    0x08: "the hardware",
    0x10: "another GPU (sync boost)",
    0x20: "heat",
    0x40: "heat (hardware)",
    0x80: "its power supply (brake)",
}


def gpu_faults() -> list[str]:
    """A line for each GPU that has errors, for what nvidia-smi complains of, and for the kernel's last Xid events.

    Empty if nothing is known: no NVIDIA GPU, no permission to read the kernel's log.
    """
    return [*_of_driver(), *_of_kernel()]


def gpu_state(gpu: str) -> str:
    """Temperature, clock and power of a GPU (its index or UUID), and what slows it; empty if that is not known."""
    for reasons in _REASONS:
        try:
            said = _ask((*_STATE, reasons), "-i", gpu)
        except subprocess.TimeoutExpired:
            return f"nvidia-smi does not answer within {_TIMEOUT_S:.0f} s"
        cells = [cell.strip() for cell in said.splitlines()[0].split(",")] if said else []
        if len(cells) == len(_STATE) + 1 and cells[0].isdecimal():
            break
    else:
        return ""
    heat, clock, most_clock, power, most_power, bits = cells
    words = [f"{heat} C", f"{clock} of {most_clock} MHz", f"{power} of {most_power} W"]
    try:
        slowed = [word for bit, word in _REASON_WORDS.items() if int(bits, 16) & bit]
    except ValueError:  # [N/A]
        slowed = []
    return ", ".join([*words, f"slowed by {' and '.join(slowed)}"] if slowed else words)


def _ask(fields: Sequence[str], *words: str) -> str:
    """What nvidia-smi prints for these fields; empty without it. Raises subprocess.TimeoutExpired."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except OSError:
        return ""
    return done.stdout + done.stderr


def _of_driver() -> list[str]:
    try:
        said = _ask(_FIELDS)
    except subprocess.TimeoutExpired:
        return [f"nvidia-smi does not answer within {_TIMEOUT_S:.0f} s"]
    found = []
    for line in said.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_FIELDS):
            found += [f"nvidia-smi: {line.strip()}"] if line.strip() else []  # "GPU is lost", "Unable to determine ..."
        elif cells[3].isdecimal() and int(cells[3]):
            found.append(f"GPU {cells[0]} ({cells[1]}, {cells[2]}): {cells[3]} uncorrected memory errors")
        elif "Unknown Error" in line or "GPU is lost" in line:
            found.append(f"GPU {cells[0]} ({cells[1]}, {cells[2]}) does not answer")
    return found[:_MOST_LINES]


def _of_kernel() -> list[str]:
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return _XID.findall(done.stdout)[-_MOST_LINES:]
