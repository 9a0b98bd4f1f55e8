"""The text of a compiled program, read: loops, groups of devices in HLO's three notations, arrays."""

import pytest

from openpi_train.planning.hlo_text import HloArray, HloInstruction, endless, read_hlo, runs

LOOPS = """
HloModule m, is_scheduled=true
%inner (p: f32[8]) -> f32[8] {
  ROOT %i = f32[8]{0} negate(%p)
}
%fused (p: f32[8]) -> f32[8] {
  ROOT %never = f32[8]{0} exponential(%p)
}
%body (p: f32[8]) -> f32[8] {
  %f = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused
  ROOT %w2 = f32[8]{0} while(%f), condition=%cond, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
}
%cond (p: f32[8]) -> pred[] {
  ROOT %c = pred[] constant(true)
}
ENTRY %main.1 (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0), metadata={op_name="state.params"}
  %k = f32[8]{0} conditional(%p, %p, %p), branch_computations={%inner, %fused}
  %w1 = f32[8]{0} while(%k), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %w3 = f32[8]{0} while(%w1), condition=%cond, body=%inner
}
"""


def test_what_runs_counts_as_often_as_its_loops_turn():
    program = read_hlo(LOOPS)
    found = [(where, one.name, times) for where, one, times in runs(program)]
    assert found == [
        *(("main.1", "p", 1), ("main.1", "k", 1), ("inner", "i", 1), ("fused", "never", 1)),
        *(("main.1", "w1", 1), ("body", "f", 3), ("body", "w2", 3), ("inner", "i", 15)),
        *(("main.1", "w3", 1), ("inner", "i", 1)),
    ]
    assert [loop.name for loop in endless(program)] == ["w3"]
    assert program.operands("main.1", program.computations["main.1"]["w1"]) == ((HloArray("f32", (8,)),),)
    assert program.computations["main.1"]["p"].op_name == "state.params"


def test_a_text_without_a_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        read_hlo("HloModule m\n")


def collective(groups: str) -> HloInstruction:
    text = f"ENTRY %m (p: f32[8]) -> f32[8] {{\n  %a = f32[8]{{0}} all-reduce(%p), {groups}, to_apply=%add\n}}\n"
    return read_hlo(text).computations["m"]["a"]


@pytest.mark.parametrize(
    ("notation", "expected"),
    [
        ("replica_groups={{0,1,2},{3,4,5}}", [[0, 1, 2], [3, 4, 5]]),
        ("replica_groups=[2,3]<=[6]", [[0, 1, 2], [3, 4, 5]]),
        # Of a grid "2 3", transposed: its columns.
        ("replica_groups=[3,2]<=[2,3]T(1,0)", [[0, 3], [1, 4], [2, 5]]),
        ("replica_groups=mesh['a'=2,'b'=3] {'a'}", [[0, 3], [1, 4], [2, 5]]),
        ("replica_groups=mesh['a'=2,'b'=3] {'b'}", [[0, 1, 2], [3, 4, 5]]),
        ("replica_groups=mesh['a'=2,'b'=3] {'a','b'}", [[0, 1, 2, 3, 4, 5]]),
        # Of four devices along a, the outer two, and the inner two.
        ("replica_groups=mesh['a'=4] {'a':(1)2}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", [[0, 1], [2, 3]]),
        ("channel_id=1", [[0, 1, 2, 3, 4, 5]]),
    ],
)
def test_groups_of_devices_are_the_same_in_every_notation(notation, expected):
    assert collective(notation).groups(6).tolist() == expected


def test_arrays_have_types_sizes_and_a_place():
    text = """
ENTRY %m (p: f32[8]) -> f32[8] {
  %s = ((bf16[2,3]{1,0:T(8,128)}, pred[]), /*index=1*/s4[5]{0:S(5)}, token[]) custom-call(%p, %p.1), window={size=3}
}
"""
    one = read_hlo(text).computations["m"]["s"]
    assert one.results == (HloArray("bf16", (2, 3)), HloArray("pred", ()), HloArray("s4", (5,), on_host=True))
    assert [array.num_bytes for array in one.results] == [12, 1, 2.5] and one.result_bytes == 15.5
    assert one.operands == ("p", "p.1") and one.opcode == "custom-call"
