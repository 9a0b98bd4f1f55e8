"""What a robot's policy draws at one query of RL. Read next: `robot_actor.py`, `sampling/action_distribution.py`."""

from jaxtyping import Array, Float, Key

from openpi_train.evaluation.row_sampling import Draw
from openpi_train.models.model_config import PolicyConfig
from openpi_train.sampling.action_distribution import ActionDistribution, Kept
from openpi_train.types import Network, Observation

# The entry of the chunk itself, that of the values of it that were executed, and what those begin with that are kept of
# how it was drawn.
ACTIONS = "actions"
EXECUTED = "is_executed"
KEPT = "kept/"


def query(model: PolicyConfig, distribution: ActionDistribution) -> Draw:
    """A function that draws a chunk for each row by `distribution`; its result has `ACTIONS`, and what `kept` finds."""

    def draw(module: Network, observation: Observation, keys: Key[Array, " b"]) -> dict[str, Array]:
        chunk = model.rows.batch_spec(1, tuple(observation.images)).actions.shape[1:]
        actions, found = distribution.drawn(module, observation, keys, chunk)
        return {ACTIONS: actions, **{KEPT + name: value for name, value in found.items()}}

    return draw


def expectation(distribution: ActionDistribution) -> Draw:
    """A function that says what the critic expects from each row's observation on; it needs no keys."""

    def draw(module: Network, observation: Observation, keys: Key[Array, " b"]) -> Float[Array, " b"]:
        del keys
        return distribution.value(module, observation)

    return draw


def kept(columns: Kept) -> Kept:
    """What is kept of what was drawn, of all these entries."""
    return {name.removeprefix(KEPT): value for name, value in columns.items() if name.startswith(KEPT)}
