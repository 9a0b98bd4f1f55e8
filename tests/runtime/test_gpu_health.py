"""What is told of a host's GPUs when one has failed.

There is no broken GPU here: `nvidia-smi` and `dmesg` are stand-ins that print what NVIDIA's documents show
(https://docs.nvidia.com/deploy/xid-errors, `nvidia-smi --help-query-gpu`).
"""

import os

import pytest

from openpi_train.runtime.gpu_health import gpu_faults, gpu_state

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


@pytest.mark.parametrize(
    ("known", "bits", "slowed"),
    [
        ("clocks_event_reasons.active", "0x0000000000000048", ", slowed by the hardware and heat (hardware)"),
        ("clocks_throttle_reasons.active", "0x0000000000000004", ", slowed by its power limit"),
        ("clocks_event_reasons.active", "0x0000000000000001", ""),
        ("clocks_event_reasons.active", "[N/A]", ""),
    ],
)
def test_the_state_of_a_gpu_is_told_with_what_slows_it_by_old_and_new_drivers(
    tmp_path, monkeypatch, known, bits, slowed
):
    program = tmp_path / "nvidia-smi"
    asked = f"temperature.gpu,clocks.sm,clocks.max.sm,power.draw,power.limit,{known}"
    program.write_text(
        f"""#!/bin/sh
case "$*" in
    "--query-gpu={asked} --format=csv,noheader,nounits -i 3") echo "88, 1005, 1980, 345.10, 700.00, {bits}";;
    *) echo "Field \\"$1\\" is not a valid field to query."; exit 2;;
esac
"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/nowhere")
    assert gpu_state("3") == f"88 C, 1005 of 1980 MHz, 345.10 of 700.00 W{slowed}"
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpu_state("3") == ""
