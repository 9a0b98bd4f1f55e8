"""What a trace says of communication: closed forms for devices' planes, and a real trace of two CPU devices."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from openpi_train.training.profiler import Profiler
from openpi_train.training.traced_steps import TracedSteps, covered, instruction_roles, read_trace, traced_steps

MS = 1_000_000
HLO = """HloModule jit_step

%body (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %psum.7 = f32[8]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
}

%wrapped (x: f32[4]) -> f32[8] {
  %x.1 = f32[4]{0} parameter(0)
  ROOT %gather.2 = f32[8]{0} all-gather(%x.1), replica_groups={{0,1}}, dimensions={0}
}

ENTRY %main (p: f32[4]) -> f32[8] {
  %p = f32[4]{0} parameter(0)
  %gather-start = ((f32[4]{0}), f32[8]{0}) async-start(%p), calls=%wrapped
  %gather-done = f32[8]{0} async-done(%gather-start)
  %turned = f32[8]{0} collective-permute-start(%gather-done), source_target_pairs={{0,1}}
  %turned.1 = f32[8]{0} collective-permute-done(%turned)
  %scaled = f32[8]{0} fusion(%turned.1), kind=kLoop, calls=%mul
  ROOT %loop = f32[8]{0} while(%scaled), condition=%less, body=%body
}
"""


def event(name, start, end, **stats):
    return types.SimpleNamespace(name=name, start_ns=start * MS, duration_ns=(end - start) * MS, stats=stats.items())


def plane(name, **lines):
    found = [types.SimpleNamespace(name=line.replace("_", " "), events=events) for line, events in lines.items()]
    return types.SimpleNamespace(name=name, lines=found)


def test_roles_are_read_from_the_compiled_program():
    roles = instruction_roles(HLO)
    assert {name: roles[name] for name in ("psum.7", "gather.2", "gather-start", "turned", "turned.1")} == {
        "psum.7": "all-reduce",
        "gather.2": "all-gather",
        "gather-start": "all-gather",
        "turned": "collective-permute",
        "turned.1": "collective-permute",
    }
    assert roles["loop"] is None
    assert "scaled" not in roles


@pytest.mark.parametrize("spans", [[], [(0, 2)], [(0, 5), (1, 2), (4, 7)], [(3, 4), (0, 1)], [(0, 1), (0, 1), (1, 2)]])
def test_covered_is_the_length_of_the_union(spans):
    assert covered(spans) == sum(any(start <= at < end for start, end in spans) for at in range(10))


def test_a_gpus_streams_overlap():
    """Two steps on two devices: the sums by hand, in milliseconds."""
    first = plane(
        "/device:GPU:0",
        Stream_13=[event("kernel", 0, 10, hlo_op="scaled"), event("kernel", 14, 20, hlo_op="scaled")],
        Stream_15=[event("ncclDevKernel_AllReduce", 8, 14, hlo_op="psum.7")],
        XLA_Ops=[event("scaled", 0, 99)],
    )
    second = plane(
        "/device:GPU:1",
        Stream_13=[event("kernel", 0, 4, hlo_op="scaled")],
        Stream_15=[event("x", 2, 4, hlo_op="gather-start"), event("x", 4, 8, hlo_op="psum.7")],
    )
    host = plane("/host:CPU", python=[event("train", 0, 99)], pool=[event("wait", 0, 9, device_ordinal=0)])
    found = traced_steps([host, first, second], instruction_roles(HLO), 2)
    assert found == TracedSteps(
        step_s=pytest.approx((20 + 8) / 4e3),
        kinds={"all-reduce": pytest.approx((6 + 4) / 4e3), "all-gather": pytest.approx(2 / 4e3)},
        communication_s=pytest.approx((6 + 6) / 4e3),
        exposed_s=pytest.approx((4 + 4) / 4e3),
    )
    assert "7.0 ms each on a device: 3.0 ms of communication, 2.0 of them" in found.line()
    assert found.metrics()["time/communication_exposed_s"] == pytest.approx(0.002)
    assert traced_steps([host], instruction_roles(HLO), 2) is None


def test_a_tpus_instructions_are_named_by_their_text():
    tpu = plane(
        "/device:TPU:0",
        XLA_Ops=[event("%scaled = f32[8]{0} fusion(%turned.1)", 0, 6), event("%loop = f32[8]{0} while()", 0, 50)],
        Async_XLA_Ops=[event("%turned = f32[8]{0} collective-permute-start()", 4, 8)],
        Steps=[event("1", 0, 99)],
    )
    found = traced_steps([tpu], instruction_roles(HLO), 1)
    assert (found.step_s, found.communication_s, found.exposed_s) == pytest.approx((0.008, 0.004, 0.002))


def test_a_trace_of_two_devices_has_their_sums(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))

    def body(rows):
        return jax.lax.fori_loop(0, 3, lambda _, row: row + jax.lax.psum(jnp.tanh(row @ row.T) @ row, "x"), rows)

    step = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    rows = jnp.ones((256, 128))
    compiled = step.lower(rows).compile()
    compiled(rows).block_until_ready()
    last = {}
    profiler = Profiler(tmp_path, 2, 1, lambda: last["step"].block_until_ready())
    last["step"] = compiled(rows)
    for number in range(1, 6):
        assert profiler.take_trace() is None
        with profiler.step(number):
            last["step"] = compiled(rows)
    file, steps = profiler.take_trace()
    assert profiler.take_trace() is None, "it is told once"
    assert steps == 2
    found = read_trace(file, instruction_roles(compiled.as_text()), steps)
    assert set(found.kinds) == {"all-reduce"}
    assert 0 < found.exposed_s <= found.communication_s < found.step_s
