"""A whole training run in one file: data, model, objective, mesh, step and checkpoint, each the part of real runs.

It has no experiment, planner or launcher. A network learns which angles of two joints put an arm's hand where it is.
On one process, on two, and with another number of steps, for which it goes on from its last checkpoint:

    JAX_NUM_CPU_DEVICES=2 python examples/minimal_train.py /tmp/minimal
    for RANK in 0 1; do RANK=$RANK WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 \\
        python examples/minimal_train.py /tmp/other & done; wait
    python examples/minimal_train.py /tmp/other 300

On the same number of devices the losses are the same bits. Read next: `docs/understand/architecture.md`, where each
part lives.
"""

import dataclasses
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from openpi_train.checkpoints.checkpoint_store import Checkpoints
from openpi_train.data.core.feed import RowFeed
from openpi_train.data.core.interface import RowSource
from openpi_train.models.model_config import ModelConfig
from openpi_train.objectives.objective import Objective
from openpi_train.parallel.mesh import make_mesh
from openpi_train.parallel.state import TrainState
from openpi_train.parallel.strategy import Plan, ShardingConfig
from openpi_train.runtime import session
from openpi_train.runtime.world import WorldFlags, find_world
from openpi_train.training.init import StateLayout, create_state, lay_out
from openpi_train.training.step import Trainer
from openpi_train.types import pytree, tree_of

NUM_STEPS, SAVE_EVERY, BATCH_SIZE, SEED = 200, 50, 128, 7


# --- Data: rows by number. The feed shuffles nothing here; each process reads only the rows of its own devices.


@pytree
class Reaches:
    """A batch: where the hand is, and the two angles that put it there. `row` is the number of each row in the batch,
    from which its random numbers come, so that they do not depend on how rows lie on devices."""

    hand: Float[Array, "b 2"]
    angles: Float[Array, "b 2"]
    row: Int[Array, " b"]


class ArmRows(RowSource):
    """Positions of an arm with two links of length 1, computed from random angles; any number of rows."""

    num_samples = 10_000

    def __init__(self):
        self.identity = {"arm": self.num_samples}  # a resumed run compares it, so that it goes on with the same rows

    def batch(self, positions: np.ndarray) -> tuple[dict[str, np.ndarray], list[str]]:
        """The columns of these rows, and what was wrong with any of them (nothing)."""
        draws = [np.random.default_rng(position).uniform(0, np.pi / 2, size=2) for position in positions.tolist()]
        angles = np.stack(draws).astype(np.float32)
        first, second = angles[:, 0], angles.sum(1)
        hand = np.stack([np.cos(first) + np.cos(second), np.sin(first) + np.sin(second)], axis=1)
        return {"hand": hand, "angles": angles}, []


# --- Model: any Flax NNX module, and a config that builds it.


class Network(nnx.Module):
    """Two hidden layers."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.first = nnx.Linear(2, width, rngs=rngs)
        self.second = nnx.Linear(width, width, rngs=rngs)
        self.last = nnx.Linear(width, 2, rngs=rngs)

    def __call__(self, hand: Float[Array, "b 2"]) -> Float[Array, "b 2"]:
        return self.last(jax.nn.relu(self.second(jax.nn.relu(self.first(hand)))))


@dataclasses.dataclass(frozen=True)
class NetworkConfig(ModelConfig):
    """The sizes of the network."""

    width: int = 64

    def build(self, rngs: nnx.Rngs) -> nnx.Module:
        """The module, with new parameters."""
        return Network(self.width, rngs)


# --- Objective: what is divided by is counted on the whole batch, so losses of devices and micro-batches just add up.


class SquaredError(Objective):
    """The mean squared error of the angles; in training the hand is seen with a little noise."""

    def norms(self, batch: Reaches) -> dict[str, Array]:
        """The number of predicted values in the whole batch."""
        return {"values": jnp.float32(batch.angles.size)}

    def loss(self, model: nnx.Module, batch: Reaches, norms: dict, keys: Key[Array, " b"] | None, train: bool = True):
        """This part's share of the loss, and of the metrics."""
        hand = batch.hand
        if train and keys is not None:
            hand += 0.01 * jax.vmap(lambda key: jax.random.normal(key, (2,)))(keys)
        loss = jnp.square(model(hand) - batch.angles).sum() / norms["values"]
        return loss, {"loss": loss}


# --- A run: processes, mesh, state, step, loop.


def main(directory: Path, num_steps: int) -> None:
    """Train until so many steps. Every process calls it."""
    session.start(find_world(WorldFlags(), os.environ), facts={"width": NetworkConfig().width}, shared_folder=directory)

    # One mesh over all devices of all processes. Under zero3 parameters, moments and gradients are cut over them.
    mesh = make_mesh(fsdp_devices=jax.device_count())
    plan = ShardingConfig(strategy="zero3", min_shard_mib=0).plan(mesh, "zero3")
    config, schedule = NetworkConfig(), optax.constant_schedule(1e-2)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

    # Shapes and shardings of the state are known before an array is made.
    layout = lay_out(config, optimizer, is_frozen=lambda path: False, ema=False, plan=plan)
    trainer = make_trainer(config, layout, optimizer, schedule, plan)
    feed = RowFeed(
        ArmRows(),
        batch_size=BATCH_SIZE,
        sharding=plan.batch,
        assemble=lambda columns: tree_of(Reaches, **columns),
    )
    with jax.set_mesh(plan.real_mesh), Checkpoints(directory, keep_last=2) as checkpoints:
        state = first_state(layout, trainer, feed, checkpoints)
        train(trainer, layout, state, feed, checkpoints, num_steps)
    feed.close()
    session.stop()  # together: the first to leave would end the others


def make_trainer(config: ModelConfig, layout: StateLayout, optimizer, schedule: optax.Schedule, plan: Plan) -> Trainer:
    """All that the step needs besides state and batch."""
    return Trainer(
        graphdef=layout.graphdef,
        model=config,
        objective=SquaredError(),
        optimizer=optimizer,
        schedule=schedule,
        plan=plan,
        seed=SEED,
        grad_accum=2,  # micro-batches per step; the result is the same
    )


def first_state(layout: StateLayout, trainer: Trainer, feed: RowFeed, checkpoints: Checkpoints) -> TrainState:
    """The newest whole checkpoint's state, with the feed at its row; or a new one, each part made on its own device."""
    restored = checkpoints.restore(layout.abstract())
    if restored is None:
        return create_state(layout, layout.model, trainer.optimizer, lambda path: False, ema=False, seed=SEED)
    state, meta = restored
    feed.seek(meta["data_position"])
    return state


def train(
    trainer: Trainer, layout: StateLayout, state: TrainState, feed: RowFeed, checkpoints: Checkpoints, num_steps: int
) -> None:
    """The loop. The state is donated to each step, and saved in the background."""
    step_function = trainer.jitted_step(layout.shardings)
    for step in range(int(state.step) + 1, num_steps + 1):
        state, metrics = step_function(state, feed.next())
        loss = float(metrics["loss"])  # real runs read metrics later, so that devices never wait for Python
        if step % SAVE_EVERY == 0 and jax.process_index() == 0:
            print(f"step {step}: loss {loss:.7f}", flush=True)
        if step % SAVE_EVERY == 0 or step == num_steps:
            position = feed.position()
            checkpoints.save(state, data_position=position, experiment={}, norm_stats={})


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else NUM_STEPS)
