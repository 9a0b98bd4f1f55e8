"""Robot policies whose programs compile in a fraction of pi0's time: for runs in which another part is tested."""

import dataclasses

from openpi_train import registry
from openpi_train.models.diffusion_policy import DiffusionPolicyConfig, MlpSizes
from openpi_train.objectives.flow_matching import FlowMatching

_debug = registry.load("debug")

seeing = dataclasses.replace(
    _debug,
    model=DiffusionPolicyConfig(
        action_dim=7,
        n_obs_steps=1,
        cameras=("base_0_rgb",),
        image_height=32,
        image_width=32,
        encoder_widths=(16,),
        denoiser="mlp",
        mlp=MlpSizes(width=32, depth=1),
        diffusion_step_embed_dim=8,
    ),
    objective=FlowMatching(augment=False),
)
"""From one camera and the state."""

blind = dataclasses.replace(seeing, model=dataclasses.replace(seeing.model, cameras=()))
"""From the state alone."""
