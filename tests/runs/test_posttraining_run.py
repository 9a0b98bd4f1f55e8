"""A project of the PyTorch post-training tool, run by the tool's own commands."""

import json
import math
import subprocess
import sys

import pytest
from posttraining_project import write_project
from runs.command import ROOT, check, environment, openpi_train

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """The project's folder; `absolute.yaml` is its config with whole paths, for commands that start elsewhere."""
    folder = write_project(tmp_path_factory.mktemp("project"))
    for name in ("config", "config_distributed_example"):
        text = (folder / f"{name}.yaml").read_text().replace('"./', f'"{folder}/')
        (folder / f"absolute_{name}.yaml").write_text(text)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Variables of a home folder, where the token cache is."""
    return {"OPENPI_TRAIN_HOME": str(tmp_path_factory.mktemp("home"))}


def script(project, home, name, *words):
    """A script, started in the project's folder as the tool's are."""
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / name), *words],
        cwd=project,
        env=environment(**home),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run):
    return {line["step"]: line["loss"] for line in metrics(run) if "loss" in line}


@pytest.fixture(scope="module")
def prepared(project, home):
    done = script(project, home, "prepare_datasets.py", "--config", "config.yaml")
    check(done, 0)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def trained(project, home, prepared):
    """The run of the guide's first command, and what it printed."""
    done = script(project, home, "main.py", "--config", "config.yaml", "--mode", "train", "--algorithm", "sft")
    check(done, 0)
    return project / "outputs" / "sft" / "one_device", done.stdout + done.stderr


def test_data_are_prepared_for_all_algorithms(prepared):
    assert "sft: 48 training samples are ready" in prepared
    assert "rm: 48 training samples are ready" in prepared and "dpo: 48 training samples are ready" in prepared


def test_the_command_of_the_guide_trains(trained):
    run, said = trained
    assert "encoded in" not in said, "the data were prepared before"
    for line in ("--lr-schedule.peak-lr 0.01", "no flag for data.max_prompt_length: 32", "for another algorithm"):
        assert line in said
    assert list(losses(run)) == list(range(1, 19))
    held_out = [line["val/loss"] for line in metrics(run) if "val/loss" in line]
    assert len(held_out) == 5 and held_out[-1] < 0.7 * held_out[0]
    experiment = json.loads((run / "experiment.json").read_text())
    assert (experiment["batch_size"], experiment["grad_accum"], experiment["seed"]) == (8, 2, 42)
    assert experiment["data"]["datasets"][0]["columns"] == ["prompt=prompt", "completion=response"]
    assert sorted(int(path.name) for path in run.glob("[0-9]*")) == [10, 18]


def test_it_goes_on_from_its_latest_checkpoint(trained, project, home):
    run, _ = trained
    latest = f"{project}/outputs/one_device/checkpoints/latest"
    words = ("--algorithm", "sft", "--resume_from_checkpoint", latest, "--num-epochs", "4")
    done = openpi_train("posttrain", "--config", project / "absolute_config.yaml", *words, **home)
    check(done, 0, "continuing from step 18 of 24")
    assert list(losses(run)) == list(range(1, 25))


def test_two_processes_train_as_one(project, home):
    words = ("--nproc_per_node", "2", "--devices_per_process", "1", "--algorithm", "sft", "--use_torchrun")
    done = script(project, home, "run_distributed.py", *words, "--config", "config_distributed_example.yaml")
    check(done, 0, "2 rows x 2 devices x 2 micro-batches")
    together = losses(project / "outputs" / "sft" / "distributed_training")
    # The same rows on one device.
    rows = ("--batch-size", "8", "--micro-batch-size", "4", "--exp-name", "alone")
    config = project / "absolute_config_distributed_example.yaml"
    check(openpi_train("posttrain", "--config", config, *rows, "--devices-per-process", "1", **home), 0)
    assert together == pytest.approx(losses(project / "outputs" / "sft" / "alone"), rel=1e-5)
    assert list(together) == [1, 2, 3, 4]


@pytest.mark.parametrize("algorithm", ["rm", "dpo"])
def test_a_run_is_the_start_of_the_next_algorithm(trained, project, home, algorithm):
    run, _ = trained
    config = project / f"{algorithm}.yaml"
    text = (project / "absolute_config.yaml").read_text().replace(f"{project}/model", str(run))
    config.write_text(text)
    words = ("--config", config, "--algorithm", algorithm, "--num-train-steps", "4")
    check(openpi_train("posttrain", *words, **home), 0, f"parameters from {run}")
    found = losses(project / "outputs" / algorithm / "one_device")
    # No difference between the completions, or between policy and reference, yet; then there is one.
    assert found[1] == pytest.approx(math.log(2), abs=1e-5) and abs(found[4] - math.log(2)) > 1e-4


def test_the_files_of_the_guide_hold_for_one_device_only(project, home):
    """32 rows are 4 x 8 x 1."""
    words = ("--config", "config_deepspeed_example.yaml", "--dry-run", "--devices-per-process")
    check(script(project, home, "main.py", *words, "1"), 0, "zero2")
    refused = script(project, home, "main.py", *words, "4")
    check(refused, 6, "--micro-batch-size 4 x 4 devices x --grad-accum 8 is 128 rows, not --batch-size 32")
