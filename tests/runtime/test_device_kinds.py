"""Devices by name, for plans made where there are none."""

import pytest

from openpi_train.runtime.device_kinds import KINDS, UNKNOWN, find_kind, kind_of
from openpi_train.runtime.device_limits import peak_flops
from openpi_train.runtime.exits import UsageError


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h100", "h100"),
        ("H100", "h100"),
        ("H100 SXM", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("h100_pcie", "h100-pcie"),
        ("A100-40GB", "a100-40gb"),
        ("RTX 4090", "rtx4090"),
        ("4090", "rtx4090"),
        # What drivers report.
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "b200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA A40", "a40"),
    ],
)
def test_a_kind_is_found_whatever_its_case_spaces_and_dashes(text, name):
    assert find_kind(text).name == name


def test_an_unknown_kind_is_refused_with_the_closest_and_all_that_there_are():
    with pytest.raises(UsageError) as error:
        find_kind("h10")
    text = str(error.value)
    assert "--device-kind 'h10' is unknown; did you mean h100" in text and "--device-gib" in text
    assert all(kind.name in text for kind in KINDS)


@pytest.mark.parametrize("name", ["h1000", "NVIDIA RTX A1000", "NVIDIA A400", "B2000"])
def test_a_kind_whose_name_contains_another_is_not_that_one(name):
    assert kind_of(name) is UNKNOWN
    with pytest.raises(UsageError, match="is unknown"):
        find_kind(name)


def test_every_row_is_whole_and_found_by_its_own_name():
    for kind in KINDS:
        assert min(kind.memory_gib, kind.memory_gb_s, kind.peak_tflops, kind.link_gb_s) > 0 and kind.source
        assert find_kind(kind.name) is kind


def test_what_is_not_in_the_table_has_no_peak():
    assert kind_of("cpu") is UNKNOWN and kind_of("NVIDIA RTX A4000") is UNKNOWN
    assert peak_flops("cpu") is None and peak_flops("NVIDIA H200") == 989e12


def test_products_of_float32_have_the_peak_of_tensorfloat_32():
    # H100 Tensor Core GPU data sheet: 989 TFLOP/s with sparsity; A100's: 156 without.
    assert peak_flops("NVIDIA H100 80GB HBM3", "float32") == 989e12 / 2
    assert peak_flops("NVIDIA A100-SXM4-80GB", "float32") == 156e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "float16") == 989e12
