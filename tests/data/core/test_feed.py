import dataclasses
import json
import logging
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import time
import types
import weakref
from pathlib import Path

import forks
import jax
import numpy as np
import pytest

from openpi_train.data.core.feed import RowFeed, differences
from openpi_train.data.core.workers import LocalBatches
from openpi_train.data.make.fake import FakeData
from openpi_train.data.robot.config import DataConfig, Dataset
from openpi_train.launch.processes import free_port
from openpi_train.robots.bridge import Bridge
from openpi_train.runtime import passing_errors
from openpi_train.runtime.exits import DataError, StorageError
from openpi_train.types import action_batch, flatten_rows

BATCH = 16
SMALL = FakeData(num_episodes=6, episode_length=9, image_height=12, image_width=16)


def sharding(*shape):
    axes = ("replica", "fsdp")[: len(shape)]
    devices = jax.devices()[: int(np.prod(shape))]
    mesh = jax.make_mesh(shape, axes, axis_types=(jax.sharding.AxisType.Auto,) * len(shape), devices=devices)
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axes))


def host(batch):
    return {name: np.asarray(value) for name, value in flatten_rows(batch).items()}


def equal(first, second):
    return first.keys() == second.keys() and all(np.array_equal(first[name], second[name]) for name in first)


@pytest.fixture
def feed_of():
    """Makes feeds and closes them."""
    feeds = []

    def make(rows, shape=(1,), **options):
        feeds.append(RowFeed(rows, batch_size=BATCH, sharding=sharding(*shape), **options))
        return feeds[-1]

    yield make
    for feed in feeds:
        feed.close()


@pytest.fixture
def rows(open_small, mixture_config):
    return open_small(mixture_config).train


@pytest.mark.slow
def test_the_global_batch_is_the_same_on_any_mesh_and_at_any_call(rows, feed_of):
    row = {"row": np.arange(BATCH, dtype=np.int32)}
    expected = [rows.batch(np.arange(step * BATCH, (step + 1) * BATCH))[0] | row for step in range(4)]
    for shape in ((1,), (8,), (2, 4)):
        feed = feed_of(rows, shape)
        for step in range(4):
            assert equal(host(feed.next()), expected[step])
            # By its number, whatever was asked for before.
            assert equal(host(feed.batch(3 - step)), expected[3 - step])


def test_batches_lie_on_the_devices_as_the_sharding_says_and_images_are_uint8(rows, feed_of):
    batch = feed_of(rows, (2, 4)).next()
    image = batch.observation.images["base_0_rgb"]
    assert image.dtype == np.uint8
    assert image.sharding.shard_shape(image.shape) == (BATCH // 8, 8, 8, 3)
    assert {shard.data.shape[0] for shard in batch.actions.addressable_shards} == {BATCH // 8}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_processes_together_make_the_same_global_batch_for_any_number_of_them(rows, count):
    whole = LocalBatches(rows, BATCH, np.arange(BATCH))
    share = BATCH // count
    parts = [LocalBatches(rows, BATCH, np.arange(k * share, (k + 1) * share)) for k in range(count)]
    for step in (0, 3, 1000):
        together = [part[step]["columns"] for part in parts]
        assert equal({n: np.concatenate([part[n] for part in together]) for n in together[0]}, whole[step]["columns"])


@pytest.mark.slow
def test_restarting_at_any_step_continues_the_same_batches(rows, feed_of):
    straight = feed_of(rows)
    batches = [host(straight.next()) for _ in range(6)]
    assert straight.position()["step"] == 6
    for step in range(6):
        again = feed_of(rows)
        again.seek(json.loads(json.dumps(straight.position() | {"step": step})))
        assert equal(host(again.next()), batches[step])
        assert again.position()["step"] == step + 1
    straight.seek(straight.position() | {"step": 2})
    assert equal(host(straight.next()), batches[2])


def test_reading_ahead_before_the_first_batch_or_a_seek_changes_nothing(rows, feed_of):
    feed = feed_of(rows)
    feed.start()
    feed.start()
    assert feed.position()["step"] == 0
    assert equal(host(feed.next()), host(feed.batch(0)))
    feed.seek(feed.position() | {"step": 5})
    feed.start()
    assert equal(host(feed.next()), host(feed.batch(5)))


def test_a_position_of_other_data_is_refused_naming_what_changed(open_small, mixture_config, rows, feed_of):
    feed = feed_of(rows)
    first, second = mixture_config.datasets
    changed = dataclasses.replace(mixture_config, datasets=(first, dataclasses.replace(second, weight=2.0)))
    with pytest.raises(ValueError, match=r"data.datasets.1.weight: then 1.0, now 2.0"):
        feed_of(open_small(changed).train).seek(feed.position())
    with pytest.raises(ValueError, match=r"data.seed: then 7, now 8"):
        feed_of(open_small(mixture_config, seed=8).train).seek(feed.position())


@pytest.mark.parametrize("sizes", [(16, 8, 24), (16, 48, 16)])
def test_a_run_that_goes_on_with_another_batch_size_sees_every_row_once_and_in_order(rows, caplog, sizes):
    """Over the end of an epoch: the training split of both datasets has fewer rows than these steps."""
    seen, position = [], None
    for batch_size, num_steps in zip(sizes, (3, 2, 3), strict=True):
        feed = RowFeed(rows, batch_size=batch_size, sharding=sharding(1))
        if position is not None:
            with caplog.at_level(logging.INFO):
                feed.seek(json.loads(json.dumps(position)))
        for _ in range(num_steps):
            seen.append((host(feed.next()), feed.rows(feed.position()["step"] - 1)))
        share = feed.proportions()
        position = feed.position()
        feed.close()
    number = sum(steps * size for steps, size in zip((3, 2, 3), sizes, strict=True))
    assert number > rows.num_samples and position["step"] == 8 and position["rows"] == number
    assert [name for _, names in seen for name in names] == rows.describe(np.arange(number))
    expected, _ = rows.batch(np.arange(number))
    for name, column in expected.items():
        np.testing.assert_array_equal(np.concatenate([batch[name] for batch, _ in seen]), column)
    assert share == rows.proportions(number)
    told = f"had batches of {sizes[0]} rows and goes on with {sizes[1]}, behind the {3 * sizes[0]} rows that"
    assert told in caplog.text


def test_rows_of_steps_before_another_batch_size_are_not_named_wrongly(rows, feed_of):
    feed = feed_of(rows)
    feed.seek({**feed.position(), "step": 3, "batch_size": 8})
    assert feed.rows(2) == [] and feed.rows(3) == rows.describe(np.arange(24, 24 + BATCH))


def test_long_texts_are_shown_where_they_differ():
    robot = f"Arm(names=({'joint, ' * 40}), relative=%s, rate_hz=15.0{', joint' * 40})"
    (line,) = differences({"data": [{"robot": robot % False}]}, {"data": [{"robot": robot % True}]})
    assert line.startswith("data.0.robot: then '...") and len(line) < 240
    then, now = line.partition(": then ")[2].split(", now ")
    assert "relative=False, rate_hz=15.0" in then and "relative=True, rate_hz=15.0" in now
    assert differences("abcabc", "abc") == [": then 'abcabc', now 'abc'"]


def test_a_batch_that_does_not_divide_names_the_flag(rows):
    with pytest.raises(ValueError, match=r"12 rows does not divide .* --batch-size"):
        RowFeed(rows, batch_size=12, sharding=sharding(8))


def test_rows_of_a_batch_are_named_and_waiting_is_measured(rows, feed_of):
    feed = feed_of(rows)
    names = feed.rows(3)
    assert names == rows.describe(np.arange(3 * BATCH, 4 * BATCH))
    assert names[0].split(":")[0] in ("first", "second")
    assert feed.wait_s == 0.0
    feed.next()
    assert feed.wait_s > 0.0
    assert sum(feed.proportions().values()) == 1.0


def test_one_batch_is_put_on_the_devices_ahead_and_no_more(rows, feed_of):
    made = queue.Queue()

    def assemble(columns):
        made.put(weakref.ref(columns["actions"]))
        return action_batch(columns)

    feed = feed_of(rows, assemble=assemble)
    batches = [feed.next()]
    first, second = made.get(timeout=60), made.get(timeout=60)  # the second while nobody asks: a step may be running
    assert first() is batches[0].actions
    assert second() is not None
    time.sleep(0.2)
    assert made.empty(), "a third one waits until the second is taken"
    batches.append(feed.next())
    assert batches[1].actions is second()
    third = made.get(timeout=60)
    batches.clear()
    jax.block_until_ready(third())
    assert (first(), second()) == (None, None), "the feed itself keeps none that it has handed out"


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_reading_goes_on_across_epochs_without_a_new_start(rows, feed_of, monkeypatch, num_workers):
    starts, start_reading = [], RowFeed._start_reading

    def counted(feed, start):
        starts.append(start)
        return start_reading(feed, start)

    monkeypatch.setattr(RowFeed, "_start_reading", counted)
    feed = feed_of(rows, num_workers=num_workers)
    num_batches = 3 * rows.num_samples // BATCH + 2
    for _ in range(num_batches):
        feed.next()
    assert feed.rows(num_batches - 1)[-1].endswith(("(epoch 2)", "(epoch 3)"))
    assert starts == [0]


@pytest.mark.slow
def test_more_workers_while_training_change_no_batch(rows, feed_of, caplog):
    caplog.set_level(logging.INFO)
    expected = [rows.batch(np.arange(step * BATCH, (step + 1) * BATCH))[0] for step in range(9)]
    feed = feed_of(rows, num_workers="auto", cores=3)
    for step in range(9):
        found = host(feed.next())
        found.pop("row")
        assert equal(found, expected[step])
        if step == 4:  # a log line that tells of slow reading
            feed._read_s = lambda: 30.0
            feed.tune(step_s=25.0, wait_s=20.0)
    assert "reading in 2 worker processes from now on (before: 0)" in caplog.text
    assert feed.position()["step"] == 9


def bad_data(open_small, on_bad_record):
    source = dataclasses.replace(SMALL, bad_steps=tuple(range(0, 60, 7)))
    config = DataConfig(datasets=(Dataset(source=source, robot=Bridge()),), on_bad_record=on_bad_record)
    return open_small(config).train


def test_bad_records_are_counted_and_logged_when_skipped(open_small, feed_of, caplog):
    caplog.set_level(logging.WARNING)
    feed = feed_of(bad_data(open_small, "skip"))
    for _ in range(3):
        feed.next()
    assert feed.bad_records >= 3
    assert caplog.text.count("row replaced: fake data (seed 0), record") == feed.bad_records


def test_bad_records_end_the_run_otherwise_and_the_position_stays(open_small, feed_of):
    feed = feed_of(bad_data(open_small, "error"))
    with pytest.raises(DataError, match=r"record \d+, episode \d+, step \d+"):
        for _ in range(10):
            feed.next()
    stopped = feed.position()["step"]
    with pytest.raises(DataError):
        feed.next()
    assert feed.position()["step"] == stopped


@pytest.mark.slow
def test_a_batch_that_the_system_cannot_read_for_now_is_read_later(rows, feed_of, monkeypatch):
    expected = host(feed_of(rows).next())
    read, left = type(rows).batch, [2]

    def batch(*arguments):
        if left[0]:
            left[0] -= 1
            raise StorageError("step 3: a stale handle") from OSError(116, "Stale file handle", "x")
        return read(*arguments)

    monkeypatch.setattr(type(rows), "batch", batch)
    monkeypatch.setattr(passing_errors, "time", types.SimpleNamespace(sleep=lambda _: None, monotonic=time.monotonic))
    assert equal(host(feed_of(rows).next()), expected) and left == [0]


@pytest.mark.slow
def test_worker_processes_give_the_batches_that_threads_give(rows, feed_of):
    expected = [rows.batch(np.arange(step * BATCH, (step + 1) * BATCH))[0] for step in range(7)]
    for workers in (1, 2):
        feed = feed_of(rows, num_workers=workers)
        feed.seek(feed.position() | {"step": 2})
        for step in range(2, 7):
            found = host(feed.next())
            found.pop("row")
            assert equal(found, expected[step])


@pytest.mark.slow
def test_a_bad_record_in_a_worker_process_is_told_as_in_a_thread(open_small, feed_of):
    feed = feed_of(bad_data(open_small, "error"), num_workers=1)
    with pytest.raises(DataError, match=r"record \d+, episode \d+, step \d+"):
        for _ in range(10):
            feed.next()


def test_too_little_shared_memory_for_workers_is_told_before_they_die_of_it(rows, feed_of, monkeypatch):
    import shutil

    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DataError, match=r"2 data workers need .*--num-workers 0 \(threads\)"):
        feed_of(rows, num_workers=2).next()


def test_what_workers_unpickle_imports_neither_jax_nor_a_dataset_library():
    code = (
        "import sys, openpi_train.data.core.workers, openpi_train.data.make.fake, openpi_train.robots.bridge, "
        "openpi_train.data.robot.transforms; "
        "print([name for name in ('jax', 'tensorflow', 'tensorflow_datasets', 'grain') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def run_processes(count, devices, tokenizer_path, assets):
    port, script = free_port(), Path(__file__).parent / "feed_process.py"
    started = [forks.Script(script, port, count, index, devices, tokenizer_path, assets) for index in range(count)]
    outputs = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0] * count, "\n".join(outputs)
    return [json.loads(line) for output in outputs for line in output.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_real_processes_hold_the_rows_of_one_each_only_its_own(tmp_path, tokenizer_path):
    (alone,) = run_processes(1, 4, tokenizer_path, tmp_path)
    first, second = run_processes(2, 2, tokenizer_path, tmp_path)
    assert not set(first) & set(second)
    assert first | second == alone
    assert len(alone) == 3 * 8 * 9


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
@pytest.mark.multiprocess
def test_workers_end_when_the_process_that_started_them_is_killed(tokenizer_path, tmp_path):
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, str(Path(__file__).parent / "feed_process.py"), "0", "1", "0", "1"]
    process = subprocess.Popen(
        [*command, str(tokenizer_path), str(tmp_path), "workers"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert process.stdout is not None
    workers = json.loads(process.stdout.readline())
    assert len(workers) == 2
    assert all(alive(pid) for pid in workers)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 240
    while any(alive(pid) for pid in workers):
        assert time.monotonic() < deadline, "workers are still there four minutes after their parent was killed"
        time.sleep(0.1)


@pytest.mark.slow
def test_workers_outlive_requests_to_stop_sent_to_every_process_of_the_job(rows, feed_of):
    before = {child.pid for child in multiprocessing.active_children()}
    feed = feed_of(rows, num_workers=2)
    feed.next()
    workers = [child for child in multiprocessing.active_children() if child.pid not in before]
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
        os.kill(worker.pid, signal.SIGUSR1)
    expected = [rows.batch(np.arange(step * BATCH, (step + 1) * BATCH))[0] for step in range(1, 12)]
    for batch in expected:
        assert equal({name: value for name, value in host(feed.next()).items() if name != "row"}, batch)
    assert all(worker.is_alive() for worker in workers)
