"""The descriptions of GPUs, against the table of kinds and the driver's names."""

import re

import pytest

from openpi_train.planning.gpu.targets import TARGETS, GpuTarget, has_target, target_of
from openpi_train.runtime.device_kinds import KINDS, kind_of
from openpi_train.runtime.exits import UsageError

NAMED = ("a100", "a100-40gb", "h100", "h200", "b200", "l40s", "rtx4090", "rtx6000-ada")


def test_every_promised_kind_has_a_description_with_its_source():
    assert sorted(target.kind for target in TARGETS) == sorted(NAMED)
    assert all(target.source for target in TARGETS)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.kind)
def test_a_description_is_of_the_kind_that_the_driver_names(target: GpuTarget):
    kind = kind_of(target.device_kind)
    assert kind.name == target.kind and has_target(kind) and target_of(kind) is target


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.kind)
def test_lanes_and_clock_give_the_data_sheets_float32_peak(target: GpuTarget):
    # NVIDIA's data sheets: TFLOP/s of float32 without tensor cores, at the boost clock.
    peak = {"a100": 19.5, "a100-40gb": 19.5, "h100": 67, "h200": 67, "b200": 75, "l40s": 91.6, "rtx4090": 82.6}
    found = 2 * target.num_cores * target.lanes_per_core * target.clock_ghz / 1e3
    assert found == pytest.approx(peak.get(target.kind, 91.1), rel=0.01)  # they round to two or three digits


def test_a_text_has_the_memory_that_is_planned_with():
    text = target_of(kind_of("NVIDIA H100 80GB HBM3")).text(123)
    assert re.findall(r"device_memory_size: (\d+)", text) == ["123"] and "major: 9 minor: 0" in text
    assert text.count("{") == text.count("}")


def test_a_kind_without_a_description_is_told_which_ones_have_one():
    a6000 = next(kind for kind in KINDS if kind.name == "a6000")
    assert not has_target(a6000)
    with pytest.raises(UsageError, match=r"no description of a6000 .*there are b200, h200, h100"):
        target_of(a6000)
