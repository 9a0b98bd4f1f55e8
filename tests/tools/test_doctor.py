import dataclasses
import json
import os
import shutil
import socket
import stat
from pathlib import Path

import numpy as np
import pytest
from runs.bad_files import SOURCE, shard_of, small_disk, write_arm, write_experiments
from runs.command import check, openpi_train, places

from openpi_train import cli
from openpi_train.data.robot.normalize import NormStats, write_norm_stats
from openpi_train.launch.processes import free_port
from openpi_train.runtime import xla
from openpi_train.runtime.exits import DONE, USAGE
from openpi_train.runtime.world import WorldFlags, find_world
from openpi_train.tools import check_host, check_run
from openpi_train.tools.check_host import CheckResult

GPU_ROW = "NVIDIA H100 80GB HBM3, 570.86.10, 81559, 4\n"


def lines(findings, *levels: str) -> list[str]:
    """What the findings of these levels (all where none is given) say, with their advice."""
    return [f"{f.level} {f.topic}: {f.text} -> {f.advice}" for f in findings if not levels or f.level in levels]


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Put a program of this name, which prints `out` and ends with `code`, first on the search path."""

    def make(name: str, out: str, code: int = 0):
        file = tmp_path / "programs" / name
        file.parent.mkdir(exist_ok=True)
        file.with_suffix(".txt").write_text(out)
        file.write_text(f"#!/bin/sh\ncat {file}.txt\nexit {code}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{file.parent}{os.pathsep}{os.environ['PATH']}")

    return make


def experiment(name: str, base: Path, *flags: str):
    return cli.parse_experiment(name, [*places(base), *flags])


@pytest.mark.slow
def test_a_sound_experiment_gets_no_failure_and_code_0(tmp_path):
    stats = openpi_train("stats", "debug", *places(tmp_path)[2:])
    assert stats.returncode == DONE, stats.stderr
    done = openpi_train("doctor", "debug", *places(tmp_path)[2:], "--devices-per-process", "2")
    text = check(done, DONE, "ok collectives", "over 2 devices on 1 host", "ok memory", "ok norm stats", " 0 fail")
    assert "ok disk" in text and "written at" in text
    assert not (tmp_path / "runs").exists(), "it makes nothing"


@pytest.mark.slow
def test_a_full_disk_and_a_missing_dataset_are_told_together_with_code_2(tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    arm = f"{write_experiments(tmp_path / 'bad_input_experiments.py')}:arm"
    flags = ("--checkpoint-base-dir", full, "--assets-base-dir", tmp_path, f"{SOURCE}.path", tmp_path / "absent")
    done = openpi_train("doctor", arm, *flags, "--json", prefix=small_disk(full, "1m"))
    assert done.returncode == USAGE, done.stderr
    found = json.loads(done.stdout)
    assert not found["ok"]
    (process,) = found["processes"]
    failed = lines([CheckResult(**finding) for finding in process["findings"]], "fail")
    assert any(
        f"are free in {full}, two checkpoints need" in line and "--checkpoint-base-dir" in line for line in failed
    )
    assert any("/absent holds no RLDS dataset" in line and f"{SOURCE}.path" in line for line in failed)
    assert len(failed) == 2


@pytest.mark.slow
@pytest.mark.multiprocess
def test_all_processes_of_a_run_look_together(tmp_path):
    launch = ("launch", "local", "--processes", "2", "--devices-per-process", "2", "--log-dir", tmp_path / "output")
    done = openpi_train(*launch, "--", "doctor", "--json")
    assert done.returncode == DONE, done.stdout + done.stderr
    found = json.loads("".join(line.removeprefix("[0] ") for line in done.stdout.splitlines(True) if line[:3] == "[0]"))
    assert [process["who"].split(" on ")[0] for process in found["processes"]] == ["process 0", "process 1"]
    for process in found["processes"]:
        texts = {finding["topic"]: finding["text"] for finding in process["findings"]}
        assert "over 4 devices" in texts["collectives"] and "all processes agree" in texts["clock"]


def test_an_experiments_field_without_an_experiment_is_refused(capsys):
    assert cli.run(["doctor", "--exp-name=x"]) == USAGE
    assert "--exp-name=x is a field of an experiment: name the experiment first" in capsys.readouterr().err
    assert cli.run(["doctor", "debug", "other"]) == USAGE
    assert "name one experiment, not debug, other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("versions", "num_gpus", "says"),
    [
        ({"jax": "0.10.2", "jaxlib": "0.10.2"}, 0, "ok versions: jax 0.10.2, jaxlib 0.10.2"),
        ({"jax": "0.10.2", "jaxlib": "0.10.1"}, 0, "warn versions: jax 0.10.2 with jaxlib 0.10.1 -> pip install jax=="),
        (
            {"jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda12-plugin": "0.10.1", "jax-cuda12-pjrt": "0.10.2"},
            8,
            "fail versions: jax-cuda12-plugin 0.10.1 with jaxlib 0.10.2: jax will not use the GPUs -> "
            "pip install jax-cuda12-plugin==0.10.2",
        ),
        ({"jax": "0.10.2", "jaxlib": "0.10.2"}, 8, "fail versions: 8 GPUs, but jax has no plugin for them"),
        ({"jax": "0.10.2", "jaxlib": "0.10.2", "jax-cuda13-plugin": "0.10.2"}, 8, "ok versions: jax 0.10.2, jaxlib"),
    ],
)
def test_jax_jaxlib_and_the_plugin_must_be_of_one_release(monkeypatch, versions, num_gpus, says):
    def version(package):
        if package not in versions:
            raise check_host.importlib.metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(check_host.importlib.metadata, "version", version)
    found = lines(check_host.pairing(check_host.installed(), num_gpus))
    assert found[0].startswith(says)


@pytest.mark.parametrize(
    ("out", "code", "plugin", "says"),
    [
        (GPU_ROW * 8, 0, "jax-cuda12-plugin", ["ok driver: 570.86.10, 8 x NVIDIA H100 80GB HBM3"]),
        (
            GPU_ROW,
            0,
            "jax-cuda13-plugin",
            ["fail driver: 570.86.10 is older than 580, which the installed plugin needs"],
        ),
        (
            "Failed to initialize NVML: Driver/library version mismatch",
            18,
            "",
            ["fail driver: nvidia-smi: Failed to init"],
        ),
        ("No devices were found", 0, "", ["fail driver: nvidia-smi: No devices were found"]),
        (
            "NVIDIA A100, 570.1, 40960, 20480\n",
            0,
            "",
            ["ok driver: 570.1, 1 x NVIDIA A100", "warn driver: GPU 0: 20.0 of 40.0 GiB are in use already"],
        ),
    ],
)
def test_the_driver_is_judged_by_what_nvidia_smi_says(program, out, code, plugin, says):
    program("nvidia-smi", out, code)
    found = lines(check_host.driver({plugin: "0.10.2"}))
    assert len(found) == len(says)
    assert all(line.startswith(start) for line, start in zip(found, says, strict=True)), found


def test_a_machine_without_nvidia_smi_has_no_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert lines(check_host.driver({})) == ["ok driver: no nvidia-smi here: no NVIDIA GPU -> "]


def test_what_xla_is_told_is_shown_with_reason_and_source(monkeypatch):
    monkeypatch.setattr(xla.xla_flags, "rejected", lambda flags: "")
    found = lines(check_host.settings("gpu", {"NCCL_DEBUG": "INFO", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "hosts"))
    assert "XLA_CLIENT_MEM_FRACTION=0.9 (training has the GPU to itself" in found[0] and "docs.jax.dev" in found[0]
    assert any("NCCL_DEBUG=INFO (yours)" in line for line in found)
    assert found[-1].startswith("warn xla: memory is taken piece by piece")


def test_a_taken_port_is_named():
    port = free_port()
    assert lines(check_host.ports(port, chosen=True)) == [f"ok ports: {port} is free here -> "]
    with socket.create_server(("", port)):
        (found,) = lines(check_host.ports(port, chosen=True))
        assert found.startswith(f"fail ports: port {port} cannot be used here (Address already in use) -> use another")
        assert lines(check_host.ports(port, chosen=False))[0].startswith("warn")


def test_a_name_that_leads_back_to_this_machine_is_warned_of(monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    (found,) = lines(check_host.own_name("cpu"))
    assert found.startswith("warn name") and "127.0.1.1, which other hosts cannot reach" in found and "gloo" in found
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.7")
    assert lines(check_host.own_name("cpu"))[0].startswith("ok name")

    def unknown(name):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert lines(check_host.own_name("cpu"))[0].startswith("fail name"), "gloo cannot start without it"
    assert lines(check_host.own_name("gpu"))[0].startswith("warn name")


def test_other_hosts_are_resolved_and_connected_to(free_port_pair):
    listening, silent = free_port_pair
    hosts = [
        f"localhost:{listening}",
        f"localhost:{silent}",
        "localhost",
        "host.invalid",
        f"host.invalid:{silent}",
        "a:b",
    ]
    found = lines(check_host.reach(hosts, default_port=silent))
    starts = ["ok reach: localhost", "warn reach: localhost", "ok reach: localhost", *["fail reach"] * 3]
    assert [line.startswith(start) for line, start in zip(found, starts, strict=True)] == [True] * 6, found
    assert f"answers on port {listening}" in found[0] and "nothing listens" in found[1]
    assert "'host.invalid' does not resolve here" in found[3]


@pytest.fixture
def free_port_pair():
    """A port that somebody listens on, and one that nobody does."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as other:
        other.bind(("127.0.0.1", 0))  # bound, and so nobody else's, but not listening
        yield server.getsockname()[1], other.getsockname()[1]


def test_a_directory_that_does_not_exist_yet_is_measured_where_it_would_be(tmp_path):
    (found,) = lines(check_host.writing(tmp_path / "a" / "b", "--checkpoint-base-dir"))
    assert "free, written at" in found and "MB/s" in found
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_file_in_the_way_and_too_little_room_are_failures(tmp_path):
    (tmp_path / "file").write_text("x")
    (found,) = lines(check_host.writing(tmp_path / "file" / "runs", "--checkpoint-base-dir"))
    assert found.startswith("fail disk") and "is a file -> choose another directory with --checkpoint-base-dir" in found
    found = lines(check_host.writing(tmp_path, "--checkpoint-base-dir", shutil.disk_usage(tmp_path).total))
    assert found[0].startswith("fail disk") and "two checkpoints need" in found[0]


@pytest.fixture(scope="module")
def arm(tmp_path_factory):
    """An experiment on an RLDS dataset that was never indexed."""
    base = tmp_path_factory.mktemp("arm")
    write_arm(base, "arm")
    return experiment(f"{write_experiments(base / 'doctor_experiments.py')}:arm", base)


def with_source(given, **changes):
    (dataset,) = given.data.datasets
    dataset = dataclasses.replace(dataset, source=dataclasses.replace(dataset.source, **changes))
    return dataclasses.replace(given, data=dataclasses.replace(given.data, datasets=(dataset,)))


def test_a_dataset_is_told_missing_not_indexed_and_ready(arm, tmp_path):
    source = arm.data.datasets[0].source
    before = lines(check_run.data(arm))
    assert any("warn dataset" in line and "not indexed yet" in line and "data index" in line for line in before)
    assert any(line.startswith("warn norm stats: not looked at") for line in before)
    assert not Path(source.cache_dir).exists(), "looking builds no index"
    source.open()
    after = lines(check_run.data(arm))
    assert any(line.startswith("ok dataset: fake: 8 episodes") for line in after)
    assert any(line.startswith("warn norm stats: none of these data in") for line in after)
    changed = with_source(arm, cache_dir=str(tmp_path))
    shutil.copytree(source.cache_dir, tmp_path, dirs_exist_ok=True)
    assert any("ok dataset" in line for line in lines(check_run.data(changed)))
    shard = shard_of(next(Path(source.path).rglob("dataset_info.json")).parent)
    os.utime(shard, ns=(1, 1))
    assert any("changed since" in line for line in lines(check_run.data(changed), "warn"))
    shard.rename(shard.with_suffix(".away"))
    (failed,) = lines(check_run.data(changed), "fail")
    assert "shards that dataset_info.json names are missing" in failed and f"{SOURCE}.path" in failed


def test_an_unknown_split_is_a_failure(arm):
    (failed,) = lines(check_run.data(with_source(arm, split="test", cache_dir="/nonexistent")), "fail")
    assert "'test' is not in" in failed


def test_norm_stats_that_are_missing_or_degenerate_are_told_by_dim(tmp_path):
    file = tmp_path / "stats"
    given = experiment("debug", tmp_path, "--data.datasets.0.norm-stats", str(file))
    (failed,) = lines(check_run.data(given), "fail")
    assert "no norm stats at" in failed
    stats = NormStats(mean=np.zeros(7), std=np.ones(7), q01=-np.ones(7), q99=np.ones(7))
    write_norm_stats(file, {"state": stats, "actions": stats})
    assert lines(check_run.data(given), "ok")[-1].startswith("ok norm stats")
    still = dataclasses.replace(stats, std=np.array([0.0, 1, 1, 1, 1, 1, 1]))
    write_norm_stats(file, {"state": stats, "actions": still})
    (warned,) = lines(check_run.data(given), "warn")
    first = given.data.datasets[0].robot.action_names[0]
    assert f"actions {first} (std = 0: raised)" in warned


@pytest.mark.slow
def test_a_run_that_does_not_fit_is_told_before_it_is_started(tmp_path):
    world = find_world(WorldFlags(), {})
    assert not lines(check_run.needs(experiment("debug", tmp_path), world), "fail")
    too_large = experiment("debug", tmp_path, "--batch-size", str(2**32))
    (failed,) = lines(check_run.needs(too_large, world), "fail")
    assert "does not fit" in failed
    uneven = experiment("debug", tmp_path, "--fsdp-devices", "3")
    (failed,) = lines(check_run.needs(uneven, world), "fail")
    assert "--fsdp-devices 3 does not divide" in failed


@pytest.mark.slow
def test_what_a_start_would_refuse_is_told_by_the_doctor_too(tmp_path):
    world = find_world(WorldFlags(), {})
    nowhere = str(tmp_path / "nowhere")
    given = experiment("debug", tmp_path, "--weight-loader.params-path", nowhere)
    (failed,) = lines(check_run.needs(given, world), "fail")
    assert failed.startswith("fail start") and nowhere in failed
    texts = experiment("arithmetic_sft", tmp_path, "--data.datasets.0.path", nowhere)
    (failed,) = lines(check_run.data(texts), "fail")
    assert failed.startswith("fail dataset: there is no file or folder")


def test_every_finding_that_is_not_well_says_what_to_do():
    with pytest.raises(AssertionError, match="without what to do"):
        CheckResult("fail", "disk", "full")
    assert CheckResult("warn", "disk", "slow", "buy another").line().splitlines()[1].strip() == "-> buy another"
