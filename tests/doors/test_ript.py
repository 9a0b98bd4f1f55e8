"""The `ript` verb: the experiment that a YAML config becomes, and what is refused."""

import dataclasses
from pathlib import Path

import pytest
from openpi_train_configs import fast, tabletop_rl, tabletop_runs
from rl.reaching import REACHING, TABLETOP, reaching

from openpi_train import cli, train_verbs
from openpi_train.data.core.files import write_json
from openpi_train.doors.ript import ript
from openpi_train.elastic import adapt
from openpi_train.envs.tabletop_env import TabletopEnv
from openpi_train.experiment import Experiment
from openpi_train.fields import as_json
from openpi_train.objectives.policy_gradient import PolicyGradient
from openpi_train.optim import SGD, AdamW
from openpi_train.rl.estimator import AdvantageEstimator
from openpi_train.rl.robot_rl import RobotRL
from openpi_train.runtime.exits import UsageError
from openpi_train.sampling.action_token_distribution import ActionTokenDistribution
from openpi_train.sampling.denoising_distribution import DenoisingDistribution
from openpi_train.sampling.flow_distribution import FlowDistribution

ROOT = Path(__file__).resolve().parents[2]
CONFIG = """
output_dir: out
policy_path: run/2
algo: {rloo_batch_size: 4, data_batch_size: 2, num_epochs: 3, lr: 1e-4, lr_scaling: sqrt}
task: {task_names_to_use: [reach_blue]}
training: {num_train_steps: 5}
fault_tolerance: {checkpoint_interval: 2}
"""


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Runs that would have been started, in a folder with the checkpoint of a policy and a config."""
    write_json(
        tmp_path / "run" / "2" / "meta.json", {"experiment": as_json(dataclasses.replace(reaching, name="reach"))}
    )
    (tmp_path / "ours.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    runs = []
    monkeypatch.setattr(train_verbs, "_run", lambda experiment, process: runs.append(experiment) or 0)
    return runs


def run(started, *words) -> Experiment:
    assert cli.run(["ript", "--config", "ours.yaml", *words]) == 0
    return started[-1]


def test_a_run_learns_from_rollouts_as_its_config_says(started, caplog):
    caplog.set_level("INFO")
    found = run(started)
    assert "algo.rloo_batch_size: 4" in caplog.text and "model, robot and environment: those of reach" in caplog.text
    assert (found.name, found.exp_name, found.checkpoint_base_dir) == ("ript", "ours", "out")
    assert (found.model, found.data) == (reaching.model, reaching.data)
    assert found.weight_loader.params_path == "run/2"
    assert found.objective == PolicyGradient(distribution=FlowDistribution(num_steps=2, noise=1.0), average="rollouts")
    assert found.rl == RobotRL(
        env=TABLETOP,
        tasks=("reach_blue",),
        num_groups=2,
        group_size=4,
        epochs=3,
        advantages=AdvantageEstimator(kind="rloo"),
        mixed_only=True,
        execute=2,
        max_steps=2,
    )
    loop = dataclasses.replace(reaching.eval.closed_loop, tasks=("reach_blue",), interval=0)
    assert found.eval == dataclasses.replace(reaching.eval, interval=0, closed_loop=loop)
    assert (found.num_train_steps, found.save_interval, found.log_interval) == (15, 6, 3)
    assert found.optimizer == AdamW(b2=0.999, weight_decay=0.01)
    assert (found.keep_last, found.keep_period, found.ema_decay, found.resume) == (3, None, None, False)


@pytest.mark.parametrize(("devices", "rate"), [(1, 1e-4), (4, 2e-4)])
def test_groups_and_rate_grow_with_the_devices_and_the_length_stays(started, devices, rate):
    fitted, lines = adapt(run(started), devices, None)
    fitted.check(devices)
    assert (fitted.rl.num_groups, fitted.batch_size, fitted.num_train_steps) == (2 * devices, 8 * devices, 15)
    assert fitted.lr_schedule.kind == "constant" and fitted.lr_schedule.peak_lr == pytest.approx(rate)
    assert lines[-1].startswith(f"learning rate: peak {rate:g} = 0.0001 x {rate / 1e-4:g} (sqrt")


def test_flags_take_precedence(started):
    found = run(started, "--rl.epochs", "1", "--lr-schedule.peak-lr", "3e-4", "--exp-name", "other")
    assert (found.rl.epochs, found.lr_schedule.peak_lr, found.exp_name) == (1, 3e-4, "other")


def test_an_experiment_and_an_environment_may_be_named(started):
    assert run(started, "--experiment", REACHING).rl.env == TABLETOP
    Path("ours.yaml").write_text(CONFIG.replace("[reach_blue]", "[0, 9]"))
    found = run(started, "--env", "tabletop")
    assert found.rl.env == found.eval.closed_loop.env == TabletopEnv()
    Path("ours.yaml").write_text("training: {optimizer: {type: SGD, momentum: 0.5}}")
    found = run(started, "--experiment", "tabletop_few_rloo")
    # What learns from rollouts already goes on in its own way.
    own = tabletop_rl.tabletop_few_rloo
    assert found.objective == own.objective and found.rl.execute == own.rl.execute
    assert found.optimizer == SGD(momentum=0.5)


def test_the_distribution_is_that_of_what_the_policy_was_trained_with():
    diffusion = ript.learning(tabletop_runs.tabletop_dp, None)
    schedule = tabletop_runs.tabletop_dp.objective.noise_schedule
    assert diffusion.objective.distribution == DenoisingDistribution(num_steps=10, noise_schedule=schedule)
    tokens = ript.learning(fast.pi0_fast_tiny, TabletopEnv())
    assert isinstance(tokens.objective.distribution, ActionTokenDistribution)
    for found in (diffusion, tokens):
        counts = {"batch_size": 8, "num_train_steps": 8, "save_interval": 8}
        rl = dataclasses.replace(found.rl, num_groups=4, group_size=2)
        dataclasses.replace(found, exp_name="x", rl=rl, **counts).check(1)


def test_precision_of_a_diffusion_policy(started):
    for mixed, dtype in (("false", "float32"), ("true", "bfloat16")):
        Path("ours.yaml").write_text(f"training: {{use_mixed_precision: {mixed}}}")
        model = dataclasses.replace(tabletop_runs.tabletop_dp.model, dtype=dtype)
        assert run(started, "--experiment", "tabletop_dp").model == model


@pytest.mark.parametrize(
    ("config", "words", "message"),
    [
        ("seed: 1", (), "no policy: give policy_path in the config"),
        ("policy_path: nowhere", (), "RL begins from: name the run of one that is there"),
        (
            "policy_path: ./output/tabletop_few/quick_distributed_test",
            (),
            "./scripts/quick_distributed_test.sh makes this one",
        ),
        ("policy_path: .", (), "policy_path . is no run of ours: name the experiment"),
        ("seed: 1", ("--experiment", "tabletop_fwe"), "did you mean tabletop_few"),
        ("seed: 1", ("--experiment", "debug"), "debug has no environment to act in: give --env NAME"),
        ("task: {benchmark_name: libero_spatial}", ("--experiment", "tabletop_few"), "--env NAME takes its place"),
        ("task: {benchmark_name: tabletpo}", ("--experiment", "tabletop_few"), "did you mean tabletop?"),
        ("seed: 1", ("--experiment", "arithmetic_sft"), "this is for robot policies"),
        ("nothing", (), "is no YAML config"),
    ],
)
def test_what_cannot_be_is_refused(started, capsys, config, words, message):
    Path("ours.yaml").write_text(config)
    assert cli.run(["ript", "--config", "ours.yaml", *words]) != 0
    assert message in capsys.readouterr().err and not started


def test_the_config_of_the_quick_test_can_run_on_two_devices(monkeypatch, started):
    words = ("--config", str(ROOT / "scripts" / "quick_distributed_test.yaml"), "--experiment", "tabletop_few")
    assert cli.run(["ript", *words]) == 0
    fitted, _ = adapt(started[-1], 2, None)
    fitted.check(2)
    assert fitted.resume and fitted.rl.num_rollouts == 64


def test_tasks_that_are_not_there_are_refused_before_anything_starts(started):
    Path("ours.yaml").write_text(CONFIG.replace("[reach_blue]", "[0, 2]"))
    with pytest.raises(UsageError, match=r"--rl.tasks 0 2: there is no task 2; TabletopEnv has 0 reach_red, 1"):
        run(started).check(1)
