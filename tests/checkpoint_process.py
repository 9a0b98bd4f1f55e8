"""A process that saves or restores a small state, for the tests that need processes of their own (or to kill one).

python checkpoint_process.py save|restore|restore-older|full|refused|beside <directory> <process> <processes> <port>
python checkpoint_process.py die <directory> <moment>
python checkpoint_process.py fill <directory>

The first form writes a line "read <path>" for each file that it reads for a checksum.
"""

import dataclasses
import os
import shutil
import signal
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from openpi_train.checkpoints import checkpoint_store, copy_out
from openpi_train.checkpoints.checkpoint_store import Checkpoints
from openpi_train.interop import manifest
from openpi_train.parallel.state import TrainState
from openpi_train.runtime.exits import CheckpointError, StorageError

SAVED_WITH = {"data_position": {"step": 7}, "experiment": {"seed": 1}, "norm_stats": {"robot": {"norm_stats": {}}}}


def make_state(step: int, *, ema: bool = True, num_devices: int | None = None, rows: int = 16) -> TrainState:
    """A state cut over all devices, with the values that `step` stands for, bit for bit, on any devices."""
    mesh = jax.make_mesh((num_devices or jax.device_count(),), ("fsdp",), axis_types=(AxisType.Auto,))
    random = np.random.default_rng(step)

    def place(value):
        cut = PartitionSpec("fsdp") if value.ndim == 2 else PartitionSpec()
        return jax.make_array_from_callback(value.shape, NamedSharding(mesh, cut), lambda index: value[index])

    def kernel(dtype):
        return random.standard_normal((rows, 6), np.float32).astype(dtype)

    def params():
        return {"llm/layers/w": kernel(np.float32), "head/bias": random.standard_normal(3, np.float32)}

    values = params()
    rule = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-3, mask={"llm/layers/w": True, "head/bias": False})
    )
    opt_state = jax.tree.map(
        lambda leaf: np.int32(step) if leaf.ndim == 0 else random.standard_normal(leaf.shape, np.float32),
        jax.eval_shape(rule.init, values),
    )
    state = {
        "step": np.int32(step),
        "params": values,
        "frozen": {"img/w": kernel(jnp.bfloat16)},
        "ema": params() if ema else None,
        "opt_state": opt_state,
    }
    return TrainState(**jax.tree.map(lambda value: place(np.asarray(value)), state))


def abstract(state: TrainState) -> TrainState:
    """Shapes and shardings of a state."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


def same_bits(one: TrainState, two: TrainState) -> bool:
    """Whether two states have the same structure, and the same bytes in every shard that this process holds."""
    if jax.tree.structure(one) != jax.tree.structure(two):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return all(
        a.dtype == b.dtype
        and a.sharding == b.sharding
        and all(
            np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes()
            for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True)
        )
        for a, b in pairs
    )


def save_and_die(directory: str, moment: str) -> None:
    """Save step 1 whole, then be killed (SIGKILL) at a moment of saving step 2."""
    checkpoints = Checkpoints(directory)
    checkpoints.save(make_state(1), **SAVED_WITH)
    checkpoints.wait()

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "arrays":
        convert, asked_for = copy_out._Data.__array__, []

        def convert_or_die(data, *arguments, **named):
            asked_for.append(data)
            return die() if len(asked_for) == 2 else convert(data, *arguments, **named)

        copy_out._Data.__array__ = convert_or_die
    elif moment == "manifest":
        checkpoint_store.write_manifest = die
    elif moment == "clean-up":
        checkpoint_store.shutil.rmtree = die
    checkpoints.save(make_state(2), **SAVED_WITH)
    checkpoints.wait()


def fill_the_disk(directory: str) -> None:
    """Run out of space while step 2 is written (the check beforehand is told a lie), then save step 3."""
    checkpoints = Checkpoints(directory)
    checkpoints.save(make_state(1), **SAVED_WITH)
    checkpoints.wait()
    checkpoint_store.shutil.disk_usage = lambda _: shutil._ntuple_diskusage(10**9, 0, 10**9)
    try:
        checkpoints.save(make_state(2, rows=100_000), **SAVED_WITH)
        checkpoints.wait()
    except StorageError as error:
        print(error)
    assert checkpoints.steps() == [1]
    checkpoints.save(make_state(3), **SAVED_WITH)
    checkpoints.close()
    assert checkpoints.steps() == [3]
    sys.stdout.flush()
    os._exit(0)  # past the exceptions of Orbax's own threads


def save_where_one_is_refused(checkpoints: Checkpoints, process: int) -> None:
    """Save three steps: process 1 cannot write its part of the first, process 0 not that of the second."""
    write = copy_out.ocp.PyTreeCheckpointHandler.save

    def fail(*_, **__):
        raise ValueError("UNKNOWN: Error writing local file: Input/output error [os_error_code='5']")

    for step, victim in ((3, 1), (4, 0)):
        copy_out.ocp.PyTreeCheckpointHandler.save = fail if process == victim else write
        checkpoints.save(make_state(step), **SAVED_WITH)
        try:
            checkpoints.wait()
            raise AssertionError(f"process {process} believes that {step} was saved")
        except StorageError as error:
            print(error)
    copy_out.ocp.PyTreeCheckpointHandler.save = write
    checkpoints.save(make_state(5), **SAVED_WITH)
    checkpoints.wait()
    assert checkpoints.steps() == [5]
    restored = checkpoints.restore(abstract(make_state(0)))
    assert restored is not None and same_bits(restored[0], make_state(5))


def save_beside_steps(checkpoints: Checkpoints) -> None:
    """Save every few steps, which need all devices, go on at once, and look at what the last save holds."""
    compiling, meet = set(), multihost_utils.sync_global_devices

    def note_thread(event, *_, **__):
        if "compile" in event:
            compiling.add(threading.current_thread())

    def refuse(name):
        raise AssertionError(f"Orbax meets the other process for {name} through the devices that the steps need")

    def advance(state):
        shift = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(state.params)) * 1e-3
        moved = jax.tree.map(lambda leaf: leaf + shift.astype(leaf.dtype), state)
        return dataclasses.replace(moved, step=state.step + 1)

    state = make_state(0, rows=40_000)
    advance = jax.jit(advance, donate_argnums=0, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, state))
    multihost_utils.sync_global_devices = refuse
    jax.monitoring.register_event_duration_secs_listener(note_thread)
    for _ in range(4):
        for _ in range(5):
            state = advance(state)
        saved = jax.tree.map(jnp.copy, state)
        checkpoints.save(state, **SAVED_WITH)
    for _ in range(100):
        state = advance(state)
    checkpoints.wait()
    assert compiling == {threading.main_thread()}, compiling
    multihost_utils.sync_global_devices = meet
    restored = checkpoints.restore(abstract(saved))
    assert restored is not None
    assert restored[1]["step"] == 20
    assert same_bits(restored[0], saved)


def tell_what_is_read() -> None:
    """Print the path of each file that is read for its checksum."""
    read = manifest._size_and_crc32

    def tell_and_read(path):
        os.write(1, f"read {path}\n".encode())  # of several threads, each line whole
        return read(path)

    manifest._size_and_crc32 = tell_and_read


def main() -> None:
    """Run one process."""
    action, directory, *rest = sys.argv[1:]
    if action == "fill":
        fill_the_disk(directory)
    if action == "die":
        save_and_die(directory, *rest)
        return
    process, processes, port = map(int, rest)
    tell_what_is_read()
    jax.distributed.initialize(
        f"127.0.0.1:{port}", processes, process, cluster_detection_method="deactivate", shutdown_timeout_seconds=30
    )
    # As the training loop does: inside a mesh.
    jax.set_mesh(make_state(0).step.sharding.mesh)
    checkpoints = Checkpoints(directory)
    if action == "full":
        if process == 0:  # only process 0 looks at the disk, yet all must stop
            checkpoint_store.shutil.disk_usage = lambda _: shutil._ntuple_diskusage(10**6, 10**6, 0)
        try:
            checkpoints.save(make_state(3), **SAVED_WITH)
        except CheckpointError as error:
            print(error)
    elif action == "refused":
        save_where_one_is_refused(checkpoints, process)
    elif action == "save":
        checkpoints.save(make_state(3), **SAVED_WITH)
        checkpoints.wait()
        checkpoints.save(make_state(4), **SAVED_WITH)
    elif action == "beside":
        save_beside_steps(checkpoints)
    else:
        expected_step = 4 if action == "restore" else 3
        restored = checkpoints.restore(abstract(make_state(0)))
        assert restored is not None
        assert restored[1]["step"] == expected_step, restored[1]["step"]
        assert same_bits(restored[0], make_state(expected_step))
    checkpoints.close()
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
