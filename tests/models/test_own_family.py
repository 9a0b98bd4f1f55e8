"""A family of policies in a folder of its own, registered by one line, goes through all that a policy does."""

import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from runs.command import check, losses, openpi_train, train
from serve.stub import serving
from websockets.sync.client import connect

from openpi_train import families, load_policy
from openpi_train.checkpoints.checkpoint_formats import open_checkpoint
from openpi_train.policy import wire

pytestmark = pytest.mark.multiprocess
OBSERVATION = {"observation/state": np.linspace(-0.2, 0.3, 7, dtype=np.float32)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's own folder, with a run of the family, and its checkpoint as another project has it."""
    folder = tmp_path_factory.mktemp("own") / "family"
    shutil.copytree(Path(__file__).parent / "own_family", folder, ignore=shutil.ignore_patterns("__pycache__"))
    train(folder, clone_of(folder), devices=2)
    exported = ("--experiment", clone_of(folder), "--to", "actor")
    check(openpi_train("convert", folder / "runs/clone/x", folder / "exported", *exported), 0, "(actor)")
    return folder


def clone_of(folder):
    return f"{folder}/cloning_runs.py:clone"


@pytest.fixture
def clone(folder, monkeypatch):
    """The experiment's name; what an import of the user's files leaves in this process is undone."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(families, "_REGISTERED", dict(families._REGISTERED))
    yield clone_of(folder)
    for file in folder.glob("*.py"):
        sys.modules.pop(file.stem, None)


def test_it_learns_and_goes_on_bit_for_bit(folder, tmp_path):
    found = losses(folder, "clone")
    assert list(found) == list(range(1, 9)) and found[8] < 0.9 * found[1]
    shutil.copytree(folder / "runs", tmp_path / "runs")
    shutil.rmtree(tmp_path / "runs/clone/x/8")
    done = train(tmp_path, clone_of(folder), "--resume", devices=2)
    assert "continuing from step 4 of 8" in done.stderr and losses(tmp_path, "clone") == found


@pytest.mark.slow
def test_it_is_evaluated_on_held_out_episodes(folder, tmp_path):
    words = ("--experiment", clone_of(folder), "--held-out", "1", "--out", tmp_path / "eval")
    check(openpi_train("eval", folder / "runs/clone/x", *words), 0, "closed loop: the experiment names no environment")
    assert (tmp_path / "eval/open_loop.json").is_file()


def test_its_run_and_its_export_are_one_policy_that_answers_as_the_formula_does(folder, clone):
    policies = [
        load_policy(folder / place, experiment=clone, batch_sizes=(1,)) for place in ("runs/clone/x", "exported")
    ]
    ours, exported = (policy.infer(OBSERVATION, draw=0)["actions"] for policy in policies)
    np.testing.assert_array_equal(ours, exported)
    # torch's Linear is x W^T + b; normalised and denormalised by mean and deviation, as openpi does it.
    net = safetensors.numpy.load_file(folder / "exported/actor.safetensors")
    (content,) = open_checkpoint(folder / "exported", policies[0].sampler.model).norm_stats.values()
    (x_mean, x_std), (y_mean, y_std) = (
        [np.array(content["norm_stats"][name][key]) for key in ("mean", "std")] for name in ("state", "actions")
    )
    x = (OBSERVATION["observation/state"] - x_mean) / (x_std + 1e-6)
    x = np.tanh(x @ net["net.0.weight"].T + net["net.0.bias"]) @ net["net.2.weight"].T + net["net.2.bias"]
    np.testing.assert_allclose(exported, x.reshape(4, 7) * (y_std + 1e-6) + y_mean, rtol=1e-4, atol=1e-5)


def test_it_is_served(folder, clone):
    policy = load_policy(folder / "exported", experiment=clone, batch_sizes=(1,))
    served = types.SimpleNamespace(metadata=policy.metadata, prepare=policy.prepare, answer=policy.answer)
    with serving(served) as (port, _), connect(f"ws://127.0.0.1:{port}", compression=None) as connection:
        assert wire.decode(connection.recv())["robot"] == "Bridge"
        connection.send(wire.encode(OBSERVATION))
        answer = wire.decode(connection.recv(timeout=60))
    np.testing.assert_array_equal(answer["actions"], policy.infer(OBSERVATION, draw=0)["actions"])


@pytest.mark.slow
def test_an_export_starts_a_run_and_converts_back(folder, tmp_path):
    start = ("--weight-loader.params-path", folder / "exported", "--num-train-steps", "1")
    done = train(tmp_path, clone_of(folder), *start)
    assert f"start weights: 4 parameters from {folder}/exported (actor)" in done.stderr
    check(
        openpi_train("convert", folder / "exported", tmp_path / "back", "--experiment", clone_of(folder)), 0, "(ours)"
    )


def test_what_does_not_fit_is_refused(folder, tmp_path):
    said = (tmp_path / "out", "--experiment", clone_of(folder))
    check(openpi_train("convert", folder / "exported", *said, "--model.width", "16"), 4, "net.0.weight is (32, 7)")
    done = openpi_train("convert", folder / "runs/clone/x", *said, "--to", "lerobot")
    check(done, 2, "CloningConfig is not a policy of LeRobot; allowed: pi0,")
