"""Objects of the tabletop: sizes, colours, tasks and the state of one episode.

Read next: `tabletop_physics.py` (how a state changes), `tabletop_env.py` (initial states and success).

Metres and radians. x points right, y away from the base camera, z up; the table's centre is the origin. A scene holds
three round blocks, a shallow bowl and a flat plate. Block 0 is always the first block in the instruction; block 1 is
the second, or a distractor.
"""

import dataclasses
import enum

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from openpi_train.types import pytree

NUM_BLOCKS = 3
TABLE_HALF_M = 0.24
BLOCK_RADIUS_M = 0.03
BLOCK_HEIGHT_M = 0.05
# Maximum distance of a block's centre from the origin, along x and along y: whole blocks stay on the table.
BLOCK_LIMIT_M = TABLE_HALF_M - BLOCK_RADIUS_M
BOWL_RADIUS_M = 0.065
# Equal to the lowest fingertip height: fingers pass over the rim, but blocks on the table do not.
BOWL_RIM_M = 0.012
PLATE_RADIUS_M = 0.055

FINGER_RADIUS_M = 0.01
# From fingertip to palm.
FINGER_LENGTH_M = 0.06
PALM_RADIUS_M = 0.03
# Distance between the fingers' inner faces when fully open.
GAP_M = 0.09
# Opening at which the fingers touch a block that they hold.
HELD_OPENING = 2 * BLOCK_RADIUS_M / GAP_M

MAX_MOVE_M = 0.03
MAX_TURN_RAD = 0.15
# Largest change of the opening (0 closed, 1 open) in one control step.
MAX_OPENING_CHANGE = 0.5
GRIPPER_LOW = (-TABLE_HALF_M, -TABLE_HALF_M, BOWL_RIM_M)
GRIPPER_HIGH = (TABLE_HALF_M, TABLE_HALF_M, 0.22)
TURN_LIMITS_RAD = (0.3, 0.3, 0.8)

COLOURS = ("red", "green", "blue", "yellow", "purple")
COLOUR_RGB = ((214, 39, 40), (44, 160, 60), (40, 90, 220), (245, 205, 40), (150, 60, 190))


class Kind(enum.IntEnum):
    """The kind of a task."""

    REACH = 0
    PICK = 1
    PUSH_LEFT = 2
    PUSH_RIGHT = 3
    PLATE = 4
    BOWL = 5
    STACK = 6
    LEFT_OF = 7
    RIGHT_OF = 8


PHRASES = {
    Kind.REACH: "move to the {block} block",
    Kind.PICK: "pick up the {block} block",
    Kind.PUSH_LEFT: "push the {block} block to the left",
    Kind.PUSH_RIGHT: "push the {block} block to the right",
    Kind.PLATE: "put the {block} block on the plate",
    Kind.BOWL: "put the {block} block in the bowl",
    Kind.STACK: "stack the {block} block on the {reference} block",
    Kind.LEFT_OF: "put the {block} block left of the {reference} block",
    Kind.RIGHT_OF: "put the {block} block right of the {reference} block",
}
KINDS_WITH_REFERENCE = (Kind.STACK, Kind.LEFT_OF, Kind.RIGHT_OF)


@dataclasses.dataclass(frozen=True)
class Task:
    """One task: its kind, the colour of its block, and, for some kinds, the colour of a reference block."""

    # What is to be done.
    kind: Kind
    # The colour of the block that is moved or reached.
    block: str
    # The colour of the block that it is put on or beside, for tasks that have one.
    reference: str | None = None

    def __post_init__(self):
        named = (self.block,) if self.reference is None else (self.block, self.reference)
        if unknown := [colour for colour in named if colour not in COLOURS]:
            raise ValueError(f"unknown block colour {unknown[0]!r}; colours are {', '.join(COLOURS)}")
        if (self.kind in KINDS_WITH_REFERENCE) != (self.reference is not None) or self.block == self.reference:
            wants = "a second, different" if self.kind in KINDS_WITH_REFERENCE else "no second"
            raise ValueError(f"a {self.kind.name} task takes {wants} colour, given {named}")

    @property
    def name(self) -> str:
        """Kind and colours, joined by underscores."""
        return "_".join(filter(None, (self.kind.name.lower(), self.block, self.reference)))

    @property
    def instruction(self) -> str:
        """The task in words."""
        return PHRASES[self.kind].format(block=self.block, reference=self.reference)


DEFAULT_TASKS = (
    Task(Kind.REACH, "red"),
    Task(Kind.REACH, "blue"),
    Task(Kind.PICK, "yellow"),
    Task(Kind.PICK, "purple"),
    Task(Kind.PUSH_LEFT, "green"),
    Task(Kind.PUSH_RIGHT, "red"),
    Task(Kind.PLATE, "blue"),
    Task(Kind.PLATE, "yellow"),
    Task(Kind.BOWL, "green"),
    Task(Kind.BOWL, "purple"),
    Task(Kind.STACK, "red", "blue"),
    Task(Kind.STACK, "yellow", "green"),
    Task(Kind.LEFT_OF, "purple", "red"),
    Task(Kind.RIGHT_OF, "blue", "yellow"),
)


@pytree
class Scene:
    """The state of one episode (under `vmap`: a batch of them).

    `tip` is the point between the fingertips; `turn` is roll, pitch, yaw. `blocks` holds each block's centre in x and
    y and its bottom in z. `held` is the held block's number or -1, `grip` its offset from the tip along the gripper's
    own x and along z. `starts` is `blocks` at reset, `lifted` marks blocks that have left the table since. `colours`
    indexes COLOURS. `goal_steps` counts the consecutive steps for which the goal has held.
    """

    tip: Float[Array, "*b 3"]
    turn: Float[Array, "*b 3"]
    opening: Float[Array, "*b"]
    blocks: Float[Array, "*b n 3"]
    held: Int[Array, "*b"]
    grip: Float[Array, "*b 2"]
    bowl: Float[Array, "*b 2"]
    plate: Float[Array, "*b 2"]
    colours: Int[Array, "*b n"]
    task: Int[Array, "*b"]
    kind: Int[Array, "*b"]
    starts: Float[Array, "*b n 3"]
    lifted: Bool[Array, "*b n"]
    goal_steps: Int[Array, "*b"]
    num_steps: Int[Array, "*b"]


def finger_axis(yaw: Float[Array, ""]) -> Float[Array, "2"]:
    """The horizontal direction along which the fingers open (y when yaw is 0)."""
    return jnp.stack([-jnp.sin(yaw), jnp.cos(yaw)])


def forward_axis(yaw: Float[Array, ""]) -> Float[Array, "2"]:
    """The horizontal direction across the fingers (x when yaw is 0)."""
    return jnp.stack([jnp.cos(yaw), jnp.sin(yaw)])
