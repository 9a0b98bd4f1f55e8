"""What is kept of compiled programs, and what must not be: what a program that is loaded does wrong on CPUs."""

import json
import types

import jax
import jax.numpy as jnp
import pytest
from jax._src import compiler
from jax.sharding import AxisType, PartitionSpec

from openpi_train.runtime import compile_cache

# A process's programs, and whether it found any of them in the cache.
TWO_PROGRAMS = """
from jax import monitoring
from jax.sharding import AxisType, NamedSharding, PartitionSpec
hits = []
monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None)
mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
rows = jax.jit(lambda: jax.numpy.ones(4), out_shardings=NamedSharding(mesh, PartitionSpec("x")))()
def sends_at_top(rows):
    return jax.lax.psum(rows, "x")
def sends_within_a_loop(rows):
    return jax.lax.fori_loop(0, 2, lambda _, x: x + jax.lax.psum(jax.numpy.sin(x), "x"), rows)
for program in (sends_at_top, sends_within_a_loop):
    before = len(hits)
    specs = {"in_specs": PartitionSpec("x"), "out_specs": PartitionSpec("x"), "check_vma": False}
    found = jax.jit(jax.shard_map(program, mesh=mesh, **specs))(rows)
    print(json.dumps([float(found.addressable_shards[0].data[0]), len(hits) > before]))
"""


def test_the_compilation_cache_is_the_users_or_one_per_kind_of_machine():
    assert compile_cache.compilation_cache_dir({"JAX_COMPILATION_CACHE_DIR": "/x"}) == "/x"
    assert compile_cache.compilation_cache_dir({"XDG_CACHE_HOME": "/y"}).startswith("/y/openpi_train/compiled/")


@pytest.mark.multiprocess
def test_an_earlier_starts_programs_are_loaded_in_every_process_but_none_that_sends_within_a_loop(
    run_processes, tmp_path
):
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    for is_second in (False, True):
        results = run_processes(TWO_PROGRAMS, 2, devices=2, **cache)
        assert [result.returncode for result in results] == [0, 0], results
        for result in results:
            (at_top, is_found), (_, is_looped_found) = map(json.loads, result.stdout.splitlines()[-2:])
            assert at_top == 4.0
            assert is_found == is_second and not is_looped_found
    assert any("sends_at_top" in path.name for path in tmp_path.iterdir())
    assert not any("sends_within_a_loop" in path.name for path in tmp_path.iterdir())


def looped(body):
    return lambda x: jax.lax.fori_loop(0, 2, lambda _, x: body(x), x)


PROGRAMS = {
    "a loop that sends": (looped(lambda x: jax.lax.psum(jnp.sin(x), "x")), True),
    "a loop that gathers": (looped(lambda x: jax.lax.all_gather(jnp.sin(x), "x", tiled=True)[:1]), True),
    "a branch that sends": (
        lambda x: jax.lax.cond(x.shape[0] < jax.lax.psum(x, "x").sum(), lambda x: jax.lax.psum(x, "x"), jnp.sin, x),
        True,
    ),
    "sums around a loop": (lambda x: jax.lax.psum(looped(jnp.sin)(jax.lax.psum(x, "x")), "x"), False),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_sending_within_a_called_part_of_a_program_is_seen(name):
    program, expected = PROGRAMS[name]
    mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
    specs = {"in_specs": PartitionSpec("x"), "out_specs": PartitionSpec("x"), "check_vma": False}
    compiled = jax.jit(jax.shard_map(program, mesh=mesh, **specs)).lower(jnp.ones(2)).compile()
    assert compile_cache.sends_within_loops(compiled.runtime_executable()) == expected


def program_of(computation, num_devices=2):
    """What jax's cache handles, of this text."""
    module = types.SimpleNamespace(to_string=lambda: f"HloModule m\n\n{computation}")
    return types.SimpleNamespace(hlo_modules=lambda: [module], local_devices=lambda: [None] * num_devices)


@pytest.mark.parametrize("opcode", ["all-to-all", "reduce-scatter", "collective-permute", "all-reduce-start"])
def test_every_way_to_send_is_known(opcode):
    assert compile_cache.sends_within_loops(
        program_of(f"%body () -> f32[] {{\n  %y = (f32[2]{{0}}, f32[]) {opcode}(%x)")
    )


def test_one_device_of_several_processes_may_send_and_one_alone_does_not(monkeypatch):
    program = program_of("%body () -> f32[] {\n  %y = f32[] all-reduce(%x)", num_devices=1)
    assert not compile_cache.sends_within_loops(program)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert compile_cache.sends_within_loops(program)


def test_a_kept_program_that_sends_within_a_loop_is_not_loaded(monkeypatch):
    """An earlier version kept such programs."""
    sum_of_all = "() -> f32[] {\n  %y = f32[] all-reduce(%x)\n}"
    kept = {
        "at top": (program_of(f"ENTRY %main {sum_of_all}"), 3),
        "in a loop": (program_of(f"%body {sum_of_all}"), 3),
        "absent": (None, None),
    }
    written = []
    monkeypatch.setattr(compiler, "_cache_read", lambda name, *_: kept[name])
    monkeypatch.setattr(compiler, "_cache_write", lambda *arguments: written.append(arguments[2]))
    compile_cache.fit_for_cpus()
    compile_cache.fit_for_cpus()
    assert compiler._cache_read("at top", "key") == kept["at top"]
    assert compiler._cache_read("in a loop", "key") == compiler._cache_read("absent", "key") == (None, None)
    for name in ("at top", "in a loop"):
        compiler._cache_write("key", 3.0, name, None, kept[name][0], [])
    assert written == ["at top"]
