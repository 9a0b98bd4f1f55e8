"""What simulators keep in a host's memory, by hand from the numbers of episodes that the flags give."""

import dataclasses
import logging

import pytest

from openpi_train import cli
from openpi_train.envs.gym_env import GymEnv
from openpi_train.envs.in_processes import ProcessEnv
from openpi_train.envs.libero_env import LiberoEnv
from openpi_train.envs.metaworld_env import MetaWorldEnv
from openpi_train.evaluation.eval_config import EvalConfig
from openpi_train.planning.simulators import simulators_of
from openpi_train.training import start_check
from openpi_train.training.start_check import tell_simulators

PARSED = ("--exp-name", "x", "--eval.closed-loop.episodes-per-device", "12")


def with_env(env, *flags, name="tabletop_act"):
    experiment = cli.parse_experiment(name, [*PARSED, *flags])
    assert isinstance(experiment.eval, EvalConfig)
    loop = dataclasses.replace(experiment.eval.closed_loop, env=env)
    return dataclasses.replace(experiment, eval=dataclasses.replace(experiment.eval, closed_loop=loop))


def test_each_episode_at_a_time_on_each_device_has_one_in_worker_processes_too():
    # 12 episodes on each of 8 devices, 0.7 GiB each.
    (found,) = simulators_of(with_env(ProcessEnv(env=LiberoEnv(suite="libero_90"))), 8)
    assert found.per_host == 96 and found.gib == pytest.approx(67.2)
    assert found.words() == (
        "simulators for evaluations: 96 of libero_90 on each host, about 67.2 GiB of its memory "
        "(--eval.closed-loop.episodes-per-device)"
    )
    assert found.as_json()["bytes_per_host"] == int(67.2 * 2**30)


def test_of_an_environment_of_ones_own_the_number_is_known_and_not_the_size():
    (found,) = simulators_of(with_env(GymEnv(source="gymnasium:Pusher-v5")), 1)
    assert found.per_host == 12 and found.gib is None and found.as_json()["bytes_per_host"] is None
    assert "12 of gymnasium:Pusher-v5 on each host, their size is not known" in found.words()


def test_episodes_that_are_arrays_and_texts_have_none():
    assert not simulators_of(cli.parse_experiment("tabletop_act", ["--exp-name", "x"]), 8)
    assert not simulators_of(cli.parse_experiment("arithmetic_grpo", ["--exp-name", "x"]), 8)


def test_rollouts_have_their_own_beside_those_of_evaluations():
    flags = ("--rl.episodes-per-device", "4", "--rl.num-groups", "8", "--rl.group-size", "8")
    experiment = with_env(MetaWorldEnv(), *flags, name="metaworld_rloo")
    assert experiment.rl is not None
    acting = dataclasses.replace(experiment.rl, env=ProcessEnv(env=MetaWorldEnv()))  # which has two slots
    evaluations, rollouts = simulators_of(dataclasses.replace(experiment, rl=acting), 2)
    assert evaluations.per_host == 24 and rollouts.per_host == 2 * 4 * 2
    assert rollouts.gib == pytest.approx(16 * 0.03)
    # No more than an iteration has: 64 rollouts.
    many = dataclasses.replace(acting, episodes_per_device=100)
    assert simulators_of(dataclasses.replace(experiment, rl=many), 2)[1].per_host == 64


@pytest.mark.parametrize(("available_gib", "is_told"), [(8, True), (9, False)])
def test_a_start_warns_of_more_than_the_host_has(monkeypatch, caplog, available_gib, is_told):
    monkeypatch.setattr(start_check, "host_available_bytes", lambda: available_gib * 2**30)
    with caplog.at_level(logging.WARNING):
        tell_simulators(simulators_of(with_env(LiberoEnv()), 1))  # 12 of 0.7 GiB are 8.4
    assert ("12 of libero_spatial" in caplog.text and "8.0 GiB are available" in caplog.text) is is_told
