"""The network of a diffusion policy: encodes images and states of the last steps, and denoises actions given these.

Read next: `diffusion_policy.py`, which configures and builds it, `objectives/diffusion.py`, which trains it.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from openpi_train.models.diffusion_policy.denoisers import DenoisingNetwork
from openpi_train.nn.resnet import ResNet18
from openpi_train.nn.return_head import ReturnHead
from openpi_train.nn.siglip import float_images, normalize_images
from openpi_train.nn.value_head import ValueHead
from openpi_train.sampling.indicator import NUM_TOLD
from openpi_train.types import Observation

# Mean and standard deviation of pixels in [0, 1] that stand for a scaling to [-1, 1].
UNIT_RANGE = (0.5, 0.5, 0.5)


class DiffusionPolicy(nnx.Module):
    """Image encoders and a denoising network.

    Args:
        encoders: by camera slot; the one named "shared" is used for all other slots.
        denoiser: from (noisy chunks, diffusion steps, condition per observation step) to a chunk.
        num_diffusion_steps: the diffusion step that corresponds to flow time 1, pure noise.
        num_instructions: number of instructions, indexed by the observation's one token; 0: no token is read.
        image_mean: what is subtracted from pixels in [0, 1], per colour.
        image_std: by what is divided then.
        relu_features: whether a ReLU follows the encoders.
        indicator_width: a velocity may be told whether its chunk is better than expected (`sampling/indicator.py`), by
            learned vectors of this width, which are added to the diffusion step's encoding, as class embeddings are to
            that of the time step (Dhariwal and Nichol 2021). They begin at 0. None: it cannot be told.
        value_head: says from the condition what the policy will earn; None: nothing does.
        return_head: says from the condition how likely each return is; None: nothing does.
    """

    def __init__(
        self,
        encoders: Mapping[str, ResNet18],
        denoiser: DenoisingNetwork,
        *,
        num_diffusion_steps: int,
        num_instructions: int = 0,
        image_mean: tuple[float, float, float] = UNIT_RANGE,
        image_std: tuple[float, float, float] = UNIT_RANGE,
        relu_features: bool = False,
        indicator_width: int | None = None,
        value_head: ValueHead | None = None,
        return_head: ReturnHead | None = None,
    ):
        self.encoders = nnx.Dict(encoders)
        self.denoiser = denoiser
        self.num_diffusion_steps, self.num_instructions = num_diffusion_steps, num_instructions
        self.image_mean, self.image_std, self.relu_features = image_mean, image_std, relu_features
        if indicator_width is not None:
            self.indicator = nnx.Param(jnp.zeros((NUM_TOLD, indicator_width)))
        if value_head is not None:
            self.value_head = value_head
        if return_head is not None:
            self.return_head = return_head

    @jax.named_scope("encode")
    def context(self, observation: Observation) -> Float[Array, "b o e"]:
        """The condition of each observation step, float32: features of every camera, sorted by slot, the one-hot
        instruction, then the state.

        Features of an absent camera are zeros.
        """
        features = []
        for slot in sorted(observation.images):
            encoder = self.encoders[slot if slot in self.encoders else "shared"]
            images = normalize_images(float_images(observation.images[slot]), self.image_mean, self.image_std)
            images = images if images.ndim == 5 else images[:, None]  # b o height width 3
            found = encoder(images.reshape(-1, *images.shape[2:])).reshape(*images.shape[:2], -1)
            found = nnx.relu(found) if self.relu_features else found
            features.append(jnp.where(observation.image_masks[slot][:, None, None], found, 0.0))
        state = observation.state if observation.state.ndim == 3 else observation.state[:, None]
        if self.num_instructions:
            told = jax.nn.one_hot(observation.prompt_tokens, self.num_instructions)  # b 1 n
            features.append(jnp.broadcast_to(told, (*state.shape[:2], self.num_instructions)))
        return jnp.concatenate([*features, state], axis=-1)

    def value(self, observation: Observation) -> Float[Array, " b"]:
        """What the critic expects from here on, float32; with a value head only."""
        context = self.context(observation)
        return self.value_head(context.reshape(len(context), -1))

    def return_logits(self, observation: Observation) -> Float[Array, "b bins"]:
        """How likely each return is from here on, float32 logits; with a return head only."""
        context = self.context(observation)
        return self.return_head(context.reshape(len(context), -1))

    def denoise(
        self,
        context: Float[Array, "b o e"],
        noisy_actions: Float[Array, "b r h a"],
        step: Float[Array, "b r"],
        told: Int[Array, "b r"] | None = None,
    ) -> Float[Array, "b r h a"]:
        """The network's prediction for `noisy_actions` at a diffusion step, float32; r draws of each row."""
        b, draws = step.shape
        repeated = jnp.repeat(context, draws, axis=0)
        added = None
        if told is not None:
            vectors = jnp.pad(self.indicator[...], ((1, 0), (0, 0)))  # who is told nothing has 0
            added = vectors[told.reshape(-1)]
        noisy = noisy_actions.reshape(b * draws, *noisy_actions.shape[2:])
        return self.denoiser(noisy, step.reshape(-1), repeated, added).reshape(noisy_actions.shape)

    def velocity(
        self,
        seen: Observation | Float[Array, "b o e"],
        noisy_actions: Float[Array, "b r h a"],
        time: Float[Array, "b r"],
        told: Int[Array, "b r"] | None = None,
    ) -> Float[Array, "b r h a"]:
        """For flow matching: d x_t / d t, given an observation or its context; `time` is 1 at noise, 0 at actions.

        `told` is what each draw is told of its chunk (`sampling/indicator.py`); None: nothing.
        """
        context = self.context(seen) if isinstance(seen, Observation) else seen
        return self.denoise(context, noisy_actions, time * self.num_diffusion_steps, told)
