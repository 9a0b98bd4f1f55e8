"""What diffusion policies exchange with other projects: LeRobot's policies, and diffusion_policy's checkpoints."""

from openpi_train.interop.checkpoint_format import Format
from openpi_train.interop.exchange import Exchange
from openpi_train.models.diffusion_policy import diffusion_policy_checkpoint
from openpi_train.models.diffusion_policy.diffusion_policy import DiffusionPolicyConfig
from openpi_train.models.diffusion_policy.lerobot_diffusion import LEROBOT

DIFFUSION_POLICY = Exchange(
    family="diffusion_policy",
    models=(DiffusionPolicyConfig,),
    lerobot=LEROBOT,
    formats=(
        Format(
            name="diffusion_policy",
            summary="diffusion_policy's: a file by torch.save (latest.ckpt), or the folder of one",
            recognises=diffusion_policy_checkpoint.recognises,
            open=diffusion_policy_checkpoint.open_checkpoint,
            prepare=diffusion_policy_checkpoint.prepare,
            asset_id=diffusion_policy_checkpoint.ASSET_ID,
        ),
    ),
)
