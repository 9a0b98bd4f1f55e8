"""`doctor`'s checks that use the devices: collectives, and the needs of an experiment.

Read next: `doctor.py`, `../runtime/selftest.py`.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import jax

from openpi_train.data.make import embedded
from openpi_train.data.robot.config import DataConfig
from openpi_train.data.robot.norm_stats import Asset, assets
from openpi_train.data.robot.opened import open_windows
from openpi_train.experiment import Experiment
from openpi_train.runtime import agree, selftest
from openpi_train.runtime.device_kinds import GIB
from openpi_train.runtime.exits import DataError, ErrorCollector, NumbersError, UsageError
from openpi_train.runtime.world import World
from openpi_train.tools import check_host
from openpi_train.tools.check_host import CheckResult, fail, ok, warn
from openpi_train.training.settling import Settling, open_if_ready
from openpi_train.training.start_check import check_files, examine_data, remote_weights

_MOST_SKEW_S = 2.0


def devices(num_gpus: int) -> Iterator[CheckResult]:
    """Check the devices that jax found: the CPU if it could not use the GPUs."""
    local, kind = jax.local_devices(), jax.devices()[0].device_kind
    text = f"{jax.device_count()} x {kind}, {len(local)} of them in this process"
    if num_gpus and local[0].platform == "cpu":
        advice = "see `versions` and `driver`; JAX_PLATFORMS=cuda makes jax say why"
        yield fail("devices", f"{text}, although there are {num_gpus} GPUs", advice)
    else:
        yield ok("devices", text)


def collectives() -> Iterator[CheckResult]:
    """Run the self-test with which every run begins."""
    try:
        found = selftest.measure()
    except NumbersError as error:
        yield fail("collectives", str(error), "run without that host, and have it repaired")
        return
    yield ok("collectives", found.line() if found else "one device: nothing to do together")


def clocks() -> Iterator[CheckResult]:
    """Check that the clocks of all processes agree."""
    if jax.process_count() == 1:
        return
    agree.barrier("compare clocks")  # all leave it at about the same time
    times = agree.gather("clocks", time.time())
    skew_s = max(times) - min(times)
    if skew_s > _MOST_SKEW_S:
        text = f"the clocks of the hosts differ by {skew_s:.1f} s"
        yield warn("clock", text, "synchronise them (chrony, ntpd); only the times in logs depend on it")
    else:
        yield ok("clock", f"the clocks of all processes agree to {skew_s:.1f} s")


def needs(experiment: Experiment, world: World) -> Iterator[CheckResult]:
    """Check that the experiment fits the devices' memory and the disks, and that its packages and start weights are
    there."""
    checkpoint_bytes = 0
    settling = Settling.here(experiment, world, open_if_ready)
    try:
        shapes = jax.tree.leaves(settling.layout.shapes)
        checkpoint_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in shapes)
        settling.require_room()
        prepared = settling.prepared
        total, available = prepared.memory.total / GIB, prepared.available_bytes / GIB
        yield ok("memory", f"{experiment.name} needs {total:.2f} of {available:.2f} GiB on each device")
    except (UsageError, ValueError) as error:  # ValueError: from the mesh
        yield fail("memory", str(error), "as it says; `--dry-run` shows the same")
    except DataError:
        yield warn("memory", "not planned: the data cannot be opened", "see `dataset`, then run doctor again")
    wrong = ErrorCollector()
    check_files(experiment, settling.fitted, wrong)
    for error in wrong.errors:
        yield fail("start", str(error), "as it says; a run would end here too")
    if not wrong.errors:
        for line in remote_weights(experiment):
            text, _, advice = line.partition("; ")
            yield warn("start weights", text, advice)
    yield from check_host.writing(Path(experiment.checkpoint_base_dir), "--checkpoint-base-dir", checkpoint_bytes)
    yield from check_host.writing(experiment.assets_dir, "--assets-base-dir")


def data(experiment: Experiment) -> Iterator[CheckResult]:
    """Check that the experiment's datasets exist and are indexed, and that its norm stats exist and are valid."""
    config, ready = experiment.data, True
    if not isinstance(config, DataConfig):
        wrong = ErrorCollector()
        notes = examine_data(experiment, wrong)
        for error in wrong.errors:
            yield fail("dataset", str(error), "as it says; a run would end here too")
        if not wrong.errors and experiment.data_are_ready():
            yield ok("dataset", f"{type(config).__name__}: there, and ready to be opened")
            return
        for note in notes:
            yield warn("dataset", f"not checked: {note}", "the first start says what is wrong with it")
        return
    for number, dataset in enumerate(config.datasets):
        source = dataset.source
        if not source.location:
            continue
        flag = f"--data.datasets.{number}.source.path"
        try:
            fresh = source.is_ready()
        except (OSError, ValueError) as error:
            ready = False
            if embedded.missing(source.location):
                yield warn(
                    "dataset", f"{source.location}: an embedded dataset that is not written yet", "the first start does"
                )
                continue
            yield fail("dataset", str(error), f"give its place with {flag}")
            continue
        yield from check_host.reading(Path(source.location).expanduser())
        if not fresh:
            ready = False
            text = f"{source.location}: there, but not indexed yet, or changed since"
            yield warn("dataset", text, f"the first start reads all of it; or now: data index {source.location}")
    if not ready:
        advice = "see `dataset`, then run doctor again"
        yield warn("norm stats", "not looked at: the data are not ready", advice)
        return
    try:
        windows = open_windows(config, experiment.policy.rows.window)
        for window, dataset in zip(windows, config.datasets, strict=True):
            text = f"{dataset.asset}: {window.source.num_episodes} episodes, {len(window)} training samples"
            yield (
                ok("dataset", text) if len(window) else fail("dataset", text, "check its split and validation_fraction")
            )
        yield from _norm_stats(assets(config, windows, experiment.assets_dir), experiment.name)
    except (OSError, ValueError) as error:
        yield fail("dataset", str(error), "as it says")


def _norm_stats(found: list[Asset], name: str) -> Iterator[CheckResult]:
    for asset in found:
        where = asset.folder if asset.given is None else Path(asset.given)
        try:
            known = asset.known()
        except (OSError, ValueError) as error:
            yield fail("norm stats", str(error), "as it says, or give another --data.datasets.N.norm-stats")
            continue
        if known is None:
            text = f"none of these data in {where} yet"
            yield warn("norm stats", text, f"the first start computes them; or now: stats {name}, with the same flags")
            continue
        flat = [f"{name} {dim} ({text})" for name, dims in known[1].items() for dim, text in dims.items()]
        if flat:
            text = f"{where}: nearly constant or seldom moving dims: {', '.join(flat)}"
            yield warn(
                "norm stats", text, "fine if the robot is like that; else look at the data: `stats` shows a table"
            )
        else:
            yield ok("norm stats", str(where))
