"""Robot policies whose programs compile in a fraction of pi0's time: for runs in which another part is tested."""

import dataclasses

from openpi_train import registry
from openpi_train.data.make.fake import FakeData
from openpi_train.models.diffusion_policy.diffusion_policy import DiffusionPolicyConfig, MlpSizes
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.robots.bridge import Bridge

_debug = registry.load("debug")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Poisoned(FakeData):
    """Noise whose actions are NaN at these control steps."""

    nan_steps: tuple[int, ...] = ()

    def open(self):
        source = super().open()
        source.columns["action"][list(self.nan_steps)] = float("nan")
        return source


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

_without_cameras = dataclasses.replace(_debug.data.datasets[0], robot=Bridge(cameras={}))
blind = dataclasses.replace(
    seeing,
    model=dataclasses.replace(seeing.model, cameras=()),
    data=dataclasses.replace(_debug.data, datasets=(_without_cameras,)),
)
"""From the state alone."""

_poisoned = dataclasses.replace(_debug.data.datasets[0], source=Poisoned(image_height=32, image_width=32))
poisoned = dataclasses.replace(seeing, data=dataclasses.replace(_debug.data, datasets=(_poisoned,)))
"""Actions with NaN in them."""
