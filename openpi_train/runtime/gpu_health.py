"""What the driver and the kernel say of this host's GPUs, for the message of a run that ends by failed hardware.

Read next: `exits.py`, which asks.
"""

import re
import subprocess

_TIMEOUT_S = 20.0  # nvidia-smi hangs on some broken devices
# NVIDIA's names (`nvidia-smi --help-query-gpu`); errors that ECC could not correct since the driver was loaded.
_FIELDS = ("index", "uuid", "pci.bus_id", "ecc.errors.uncorrected.volatile.total")
# As the driver writes it: "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."
_XID = re.compile(r"NVRM: Xid \(PCI:[0-9a-fA-F:.]+\): \d+.*")
_MOST_LINES = 5


def gpu_faults() -> list[str]:
    """A line for each GPU that has errors, for what nvidia-smi complains of, and for the kernel's last Xid events.

    Empty if nothing is known: no NVIDIA GPU, no permission to read the kernel's log.
    """
    return [*_of_driver(), *_of_kernel()]


def _of_driver() -> list[str]:
    query = [f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return [f"nvidia-smi does not answer within {_TIMEOUT_S:.0f} s"]
    except OSError:
        return []
    found = []
    for line in (done.stdout + done.stderr).splitlines():
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
