"""Random streams: what trains, evaluates, acts and learns from rollouts with one seed draws from keys of its own."""

import collections
import inspect
import itertools
import re
import types
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import openpi_train
from openpi_train.envs.closed_loop import ClosedLoop, episode_keys
from openpi_train.envs.tabletop_env import TabletopEnv
from openpi_train.evaluation.sums import numbered_keys
from openpi_train.keys import for_purpose, row_keys
from openpi_train.rl.initial_states import InitialStates
from openpi_train.sampling.action_sampler import sample_keys

SEED, ROWS, ENV = 7, 16, TabletopEnv()
# What is drawn from a row's key, by objectives, augmentation, samplers and distributions.
USES = (
    "noise", "time", "delay", "latent", "dropout", "indicator", "demonstrations", "denoising", "token",
    "augment/base_0_rgb", "augment/left_wrist_0_rgb", "augment/right_wrist_0_rgb",
)  # fmt: skip
EPISODES = ("env/reset", "env/policy")


def at_queries(keys):
    """The keys of the first queries of episodes, as `envs/rollout.py` makes them."""
    policy = for_purpose(keys, "env/policy")
    return jnp.concatenate([jax.vmap(jax.random.fold_in, (0, None))(policy, taken) for taken in (0, 4, 8)])


def streams():
    """Keys by who uses them: of one seed, and of the same steps, rows, tasks and rollouts where there are any."""
    rows, numbers = jnp.arange(ROWS), np.arange(ROWS)
    evaluated = episode_keys(ClosedLoop(env=ENV, seed=SEED), numbers)
    # One state per number of an evaluated rollout, and states without numbers.
    trained = InitialStates(ENV.tasks, 8, SEED), InitialStates(ENV.tasks, None, SEED)
    found = {f"training step {step}": row_keys(SEED, step, rows) for step in range(3)}
    # Without the run-time type check: of a trainer only the seed is read.
    trainer, batch = types.SimpleNamespace(seed=SEED), types.SimpleNamespace(row=rows)
    found["held-out rows"] = inspect.unwrap(numbered_keys)(trainer, batch, 0, "validation")
    found["sampled actions"] = sample_keys(SEED, rows)
    found["evaluated episodes"] = at_queries(evaluated)
    found["episodes of RL"] = at_queries(trained[0].noise_keys(np.repeat(numbers, 2), np.tile(np.array([0, 1]), ROWS)))
    resets = {"evaluated": evaluated, "trained": trained[0].reset_keys(np.arange(8 * len(ENV.tasks)))}
    return {f"{who}: {use}": for_purpose(keys, use) for who, keys in found.items() for use in USES} | {
        f"{who} initial states": for_purpose(keys, "env/reset") for who, keys in resets.items()
    }


def words(keys):
    return {tuple(key) for key in np.asarray(jax.random.key_data(keys)).tolist()}


def test_no_two_uses_of_a_seed_share_a_key():
    found = {name: words(keys) for name, keys in streams().items()}
    assert [pair for pair in itertools.combinations(found, 2) if found[pair[0]] & found[pair[1]]] == []
    assert all(len(keys) >= ROWS for keys in found.values())


def test_evaluations_are_of_other_initial_states_than_rl_without_a_number_of_them():
    trained = InitialStates(ENV.tasks, None, SEED).reset_keys(np.arange(200))
    evaluated = episode_keys(ClosedLoop(env=ENV, seed=SEED), np.arange(200))
    assert len(words(trained)) == len(words(evaluated)) == 200
    assert not words(trained) & words(evaluated)


def test_every_use_has_a_name_of_its_own_and_is_compared_here():
    """By the text of the package: a name that a module gives twice would be one stream for two things."""
    folder = Path(openpi_train.__file__).parent
    names = collections.defaultdict(list)
    for file in sorted(folder.rglob("*.py")):
        for name in re.findall(r'for_purpose\([^"\n]*f?"([^"]+)"\)', file.read_text(encoding="utf-8")):
            names[file.relative_to(folder).as_posix()].append(name)
    names["nn/augment.py"].remove("augment/{slot}")  # of two classes, of which one is used
    assert [file for file, given in names.items() if len(set(given)) != len(given)] == []
    known = {re.sub("augment/.*", "augment/{slot}", name) for name in (*USES, *EPISODES, "validation/sample")}
    assert {name for given in names.values() for name in given} == known
    assert len({zlib.crc32(name.encode()) for name in (*USES, *EPISODES)}) == len(USES) + len(EPISODES)
