"""What configs of policies of exact dims have in common: the robot's own states and actions, named cameras, no text.

Read next: `diffusion_policy.py`, `act.py`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
import tyro
from jax.typing import DTypeLike

from openpi_train.data.tokenizers.prompt_tokenizer import PromptTokenizer
from openpi_train.models.model_config import PolicyConfig, RowTransform
from openpi_train.types import ActionBatch, action_batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactPolicyConfig(PolicyConfig):
    """A policy whose states and actions have the robot's own dims, without padding."""

    reads_text: ClassVar[bool] = False

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

    def size_problems(self, *others: str) -> list[str]:
        """What is wrong with the sizes of rows, and with further fields that must be at least 1, as sentences."""
        names = ("action_dim", "action_horizon", *others, "image_height", "image_width")
        return [f"{name} {getattr(self, name)} must be at least 1" for name in names if getattr(self, name) < 1]

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
    def prompt_transform(self) -> RowTransform:
        """The host step that replaces a row's prompt by tokens (default: none)."""
        from openpi_train.data.robot.transforms import NoPrompt

        return NoPrompt()

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
                "state": spec(jnp.float32, *history, self.used_state_dim),
                "prompt_tokens": spec(jnp.int32, text),
                "prompt_mask": spec(jnp.bool_, text),
                "actions": spec(jnp.float32, self.action_horizon, self.action_dim),
                "action_mask": spec(jnp.bool_, self.action_horizon),
                "dim_mask": spec(jnp.bool_, self.action_dim),
                "row": spec(jnp.int32),
            }
        )

    def check_dims(self, num_state_dims: int, num_action_dims: int) -> None:
        from openpi_train.data.robot.transforms import ExactDims, blank_row

        ExactDims(self.action_dim, self.used_state_dim)(blank_row(num_state_dims, num_action_dims))

    def transforms(self, tokenizer: PromptTokenizer | None, text_length: int | None = None) -> tuple[RowTransform, ...]:
        # Imported here: image libraries are only needed where rows are made.
        from openpi_train.data.robot.transforms import ExactDims, ResizeImages

        del tokenizer, text_length
        resize = ResizeImages(self.image_height, self.image_width)
        return resize, self.prompt_transform, ExactDims(self.action_dim, self.used_state_dim)
