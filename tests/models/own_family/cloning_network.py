"""The network of behaviour cloning."""

import jax.numpy as jnp
from flax import nnx


class Cloning(nnx.Module):
    """chunk = tanh(state @ hidden) @ outputs."""

    def __init__(self, state_dim, width, chunk, rngs):
        self.shape = chunk
        self.hidden = nnx.Linear(state_dim, width, rngs=rngs)
        self.outputs = nnx.Linear(width, chunk[0] * chunk[1], rngs=rngs)

    def chunk(self, observation):
        """The normalised chunk, [b, h, a]."""
        return self.outputs(jnp.tanh(self.hidden(observation.state))).reshape(-1, *self.shape)

    def sample_actions(self, observation, noise, num_steps):
        """As `OwnSampler` calls it: nothing is drawn, and there are no denoising steps."""
        del noise, num_steps
        return self.chunk(observation)
