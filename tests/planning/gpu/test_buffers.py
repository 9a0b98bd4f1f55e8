"""The buffers alive at the peak, from a record in XLA's form."""

import pytest

from openpi_train.planning.gpu.buffers import LiveBuffer, buffers_at_peak, recorded_in

RECORD = """HloLiveRange (max 3):
  InstructionSequence:
    0:param.1
    1:fusion.2
  BufferLiveRange:
    fusion.2{}:1-2
  Live ranges at 1 (peak):
    fusion.2{}: 100 bytes (cumulative: 100 bytes)
    param.1{}: 300000 bytes (cumulative: 300100 bytes)
    while.107{4}: 159744 bytes (cumulative: 459844 bytes)
    call.1{1,0}: 8 bytes (cumulative: 459852 bytes)
  Stack trace breakdown for peak usage: 459 852 bytes
    while.9{3}: 7 bytes (cumulative: 7 bytes)
"""


def test_those_alive_at_the_peak_are_told_largest_first():
    assert buffers_at_peak(RECORD) == [
        LiveBuffer(300_000, "param.1"),
        LiveBuffer(159_744, "while.107", (4,)),
        LiveBuffer(100, "fusion.2"),
        LiveBuffer(8, "call.1", (1, 0)),
    ]


def test_a_record_in_another_form_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no peak"):
        buffers_at_peak("HloLiveRange (max 3):\n")
    with pytest.raises(ValueError, match="wrote no record"):
        recorded_in(tmp_path)


def test_the_largest_program_is_the_step(tmp_path):
    (tmp_path / "module_0001.jit_iota.sm_9.0a-live-range.txt").write_text("small")
    (tmp_path / "module_0002.jit_step.sm_9.0a-live-range.txt").write_text("the step's")
    assert recorded_in(tmp_path) == "the step's"
