"""What configs of policies of exact dims have in common: the robot's own states and actions, named cameras, no text.

Read next: `diffusion_policy.py`, `act.py`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import jax
import jax.numpy as jnp
import tyro
from jax.typing import DTypeLike

from openpi_train.data.robot.row_format import RowFormat
from openpi_train.data.robot.windows import WindowShape
from openpi_train.data.tokenizers.prompt_tokenizer import PromptTokenizer
from openpi_train.models.model_config import PolicyConfig, RowTransform, below_one
from openpi_train.types import ActionBatch, action_batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactPolicyConfig(PolicyConfig):
    """A policy whose states and actions have the robot's own dims, without padding."""

    # Dims of an action: those of the robot, without padding.
    action_dim: int = 14
    # Dims of a state; None: as many as of an action.
    state_dim: int | None = None
    # Camera slots of the run's robots.
    cameras: tuple[str, ...] = ()
    # Height of the images in pixels.
    image_height: int = 240
    # Width of the images in pixels.
    image_width: int = 320
    # No text is read but, in some, the index of an instruction.
    vocab_size: Annotated[int, tyro.conf.Suppress] = 512

    def problems(self) -> list[str]:
        return below_one(self, "action_dim", "action_horizon", "image_height", "image_width")

    @property
    def known_slots(self) -> None:
        """Those of the robot: none is left out."""
        return None

    def for_robot(self, num_state_dims: int, num_action_dims: int, cameras: Sequence[str]) -> "ExactPolicyConfig":
        """This config with the robot's dims and cameras, these in the order of their names."""
        return dataclasses.replace(
            self, action_dim=num_action_dims, state_dim=num_state_dims, cameras=tuple(sorted(cameras))
        )

    @property
    def used_state_dim(self) -> int:
        """`state_dim` with its default filled in."""
        return self.action_dim if self.state_dim is None else self.state_dim

    @property
    def rows(self) -> "ExactRows":
        return ExactRows(
            window=WindowShape(horizon=self.action_horizon),
            vocab_size=self.vocab_size,
            action_dim=self.action_dim,
            state_dim=self.used_state_dim,
            cameras=self.cameras,
            image_height=self.image_height,
            image_width=self.image_width,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactRows(RowFormat):
    """Rows of the robot's own dims.

    Attributes:
        reads_text: as in `RowFormat`; here it is told by numbers at most.
        action_dim, state_dim: dims of an action and of a state.
        cameras: the slots of the robot.
        image_height, image_width: in pixels.
        instructions: those that the model tells apart, each by its number in place of tokens; none: text is left out.
    """

    reads_text: bool = False
    action_dim: int
    state_dim: int
    cameras: tuple[str, ...]
    image_height: int
    image_width: int
    instructions: tuple[str, ...] = ()

    @property
    def text_limit(self) -> int | None:
        """1, the number of the instruction, if there are instructions."""
        return 1 if self.instructions else None

    def batch_spec(self, batch_size: int, cameras: Sequence[str], text_length: int | None = None) -> ActionBatch:
        del text_length
        if sorted(cameras) != sorted(self.cameras):
            raise ValueError(
                f"the model has encoders for the cameras {', '.join(sorted(self.cameras)) or '(none)'}, the run's "
                f"robots fill {', '.join(sorted(cameras)) or '(none)'}: set --model.cameras {' '.join(sorted(cameras))}"
            )

        def spec(dtype: DTypeLike, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((batch_size, *shape), dtype)

        history = () if self.window.history == 1 else (self.window.history,)
        text = self.text_limit or 0
        return action_batch(
            {
                **{
                    f"image/{slot}": spec(jnp.uint8, *history, self.image_height, self.image_width, 3)
                    for slot in cameras
                },
                **{f"image_mask/{slot}": spec(jnp.bool_) for slot in cameras},
                "state": spec(jnp.float32, *history, self.state_dim),
                "prompt_tokens": spec(jnp.int32, text),
                "prompt_mask": spec(jnp.bool_, text),
                "actions": spec(jnp.float32, self.window.horizon, self.action_dim),
                "action_mask": spec(jnp.bool_, self.window.horizon),
                "dim_mask": spec(jnp.bool_, self.action_dim),
                "row": spec(jnp.int32),
            }
        )

    def check_dims(self, num_state_dims: int, num_action_dims: int) -> None:
        from openpi_train.data.robot.transforms import ExactDims, blank_row

        ExactDims(self.action_dim, self.state_dim)(blank_row(num_state_dims, num_action_dims))

    def transforms(self, tokenizer: PromptTokenizer | None, text_length: int | None = None) -> tuple[RowTransform, ...]:
        # Imported here: image libraries are only needed where rows are made.
        from openpi_train.data.robot.transforms import ExactDims, NoPrompt, NumberPrompt, ResizeImages

        del tokenizer, text_length
        resize = ResizeImages(self.image_height, self.image_width)
        prompt = NumberPrompt(self.instructions) if self.instructions else NoPrompt()
        return resize, prompt, ExactDims(self.action_dim, self.state_dim)
