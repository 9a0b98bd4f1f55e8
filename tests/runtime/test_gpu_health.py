"""What is told of a host's GPUs when one has failed.

There is no broken GPU here: `nvidia-smi` and `dmesg` are stand-ins that print what NVIDIA's documents show
(https://docs.nvidia.com/deploy/xid-errors, `nvidia-smi --help-query-gpu`).
"""

import os

import pytest

from openpi_train.runtime.gpu_health import gpu_faults

WELL = "0, GPU-11111111-aaaa, 00000000:17:00.0, 0\n1, GPU-22222222-bbbb, 00000000:3B:00.0, [N/A]\n"
LOST = "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost. Reboot the system to recover this GPU"
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus."


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Put programs of these names on the path, which print these texts."""

    def put(**texts):
        for name, text in texts.items():
            program = tmp_path / name.replace("_", "-")
            (tmp_path / f"{name}.txt").write_text(text)
            program.write_text(f'#!/bin/sh\nwhile read -r line; do echo "$line"; done < {tmp_path / name}.txt\n')
            program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + "/nowhere")

    return put


def test_a_gpu_with_errors_is_named_with_its_index_uuid_and_place(tools):
    tools(nvidia_smi=WELL.replace("[N/A]", "3"), dmesg=f"[ 12.5] eth0: link up\n[99.1] {XID}\n")
    assert gpu_faults() == ["GPU 1 (GPU-22222222-bbbb, 00000000:3B:00.0): 3 uncorrected memory errors", XID]


def test_a_gpu_that_is_lost_is_told_in_the_drivers_words(tools):
    tools(nvidia_smi=LOST + "\n")
    assert gpu_faults() == [f"nvidia-smi: {LOST}"]


def test_of_gpus_that_are_well_nothing_is_told(tools):
    tools(nvidia_smi=WELL, dmesg="[ 12.5] eth0: link up\n")
    assert gpu_faults() == []


def test_without_the_tools_nothing_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_faults() == []
