"""Environments in worker processes: the same episodes, also where workers end or hang; and errors that name them."""

import contextlib
import gc
import os
import re
import signal
import threading

import jax
import numpy as np
import pytest
from envs.mortal import Mortal

from openpi_train.envs import in_processes
from openpi_train.envs.in_processes import ProcessEnv
from openpi_train.envs.rollout import rollout
from openpi_train.runtime.exits import DataError

KEYS = jax.random.split(jax.random.key(0), 5)
TASKS = np.array([0, 0, 1, 0, 1])


@pytest.fixture(autouse=True, scope="module")
def workers():
    yield
    in_processes.close_workers()


def acted(env):
    """What a policy sees in five episodes whose actions depend on what it sees, and how they end."""
    seen = []

    def policy(observation, keys):
        seen.append(jax.tree.map(np.asarray, observation))
        first = np.asarray(observation.state)[:, :1, None] % 7 + 1
        return first * np.array([[1.0, 20.0], [-1.0, 10.0]])

    outcome = rollout(policy, env, KEYS, TASKS, execute=2)
    return seen, outcome.success.tolist(), outcome.steps.tolist()


def assert_same(one, other):
    assert one[1:] == other[1:] and len(one[0]) == len(other[0])
    for first, second in zip(one[0], other[0], strict=True):
        jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.fixture(scope="module")
def alone():
    found = acted(Mortal())
    assert {*found[1]} == {True, False}
    return found


@pytest.mark.slow
def test_episodes_in_workers_are_the_same_and_leave_nothing_behind(alone):
    env = ProcessEnv(env=Mortal(), num_workers=2)
    assert_same(acted(env), alone)
    assert_same(acted(env), alone)
    pool = in_processes._POOLS[env]
    gc.collect()
    states = env.step(env.reset(KEYS[:1], TASKS[:1]), np.ones((1, 2)))
    plain = Mortal().step(Mortal().reset(KEYS[:1], TASKS[:1]), np.ones((1, 2)))
    assert env.has_reward and env.reward(states).tolist() == Mortal().reward(plain).tolist()
    assert list(pool._batches.values()) == [states.batch] and not pool.ended


@pytest.mark.slow
@pytest.mark.parametrize("fate", ["ends", "hangs"])
def test_a_lost_worker_is_replaced_and_changes_nothing(alone, fate, tmp_path, caplog):
    env = ProcessEnv(env=Mortal(fate=fate, once=str(tmp_path / "once")), num_workers=2, timeout_s=5.0)
    assert_same(acted(env), alone)
    # 5 s for each of its episodes: one worker has three, the other two, and either may come first.
    told = "its process has ended" if fate == "ends" else r"no answer in 1[05] s"
    assert caplog.text.count("it is started again") == 1 and re.search(told, caplog.text)


@pytest.mark.slow
def test_a_worker_that_says_too_late_that_it_has_forgotten_is_replaced(alone):
    env = ProcessEnv(env=Mortal(), num_workers=1, timeout_s=0.5)
    assert_same(acted(env), alone)
    pool = in_processes._POOLS[env]
    (worker,) = pool.workers
    worker._answered.add("forget")  # it has no longer time for the first one
    pid = worker._process.pid
    os.kill(pid, signal.SIGSTOP)

    def go_on():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    late = threading.Timer(1.5, go_on)  # while an answer to the next request is waited for
    late.start()
    pool.ended.append((0, {}))
    assert_same(acted(env), alone)
    late.cancel()
    assert pool.workers != [worker]


@pytest.mark.slow
def test_a_worker_that_keeps_ending_is_an_error_that_names_it():
    env = ProcessEnv(env=Mortal(fate="ends"), num_workers=1)
    message = (
        r"worker 0 of Mortal was started 3 times again .* 'step' after 2 control steps, with tasks 0, 1: .* code 7"
    )
    with pytest.raises(DataError, match=message):
        acted(env)
    assert env not in in_processes._POOLS


@pytest.mark.slow
def test_what_an_environment_raises_is_told_at_once(caplog):
    with pytest.raises(DataError, match=r"the environment has failed:\n(.*\n)*RuntimeError: the arm is broken"):
        acted(ProcessEnv(env=Mortal(fate="raises"), num_workers=1))
    assert "started again" not in caplog.text


@pytest.mark.slow
def test_states_that_were_stepped_are_refused():
    states = in_processes.RemoteEpisodes(batch=type("Batch", (), {"actions": [0, 0]})(), success=TASKS > 0, num_steps=1)
    with pytest.raises(RuntimeError, match="after 1 control steps of 2"):
        states.check_newest()
    with pytest.raises(ValueError, match=r"timeout_s 0.0 must be above 0"):
        ProcessEnv(env=Mortal(), timeout_s=0.0)
