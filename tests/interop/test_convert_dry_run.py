"""`convert --dry-run` against the conversion, over all forms: both refuse the same with the same words."""

import dataclasses
from pathlib import Path

import exchanged
import pytest
import text_models
from openpi_train_configs.robot_dp import robot_dp_tiny_14

from openpi_train.checkpoints import checkpoint_formats
from openpi_train.experiment import Experiment
from openpi_train.models.diffusion_policy import DiffusionPolicyConfig, diffusion_policy_checkpoint, lerobot_diffusion
from openpi_train.models.diffusion_policy.denoisers import UnetSizes
from openpi_train.runtime.exits import CheckpointError, UsageError
from openpi_train.tools import convert_checkpoint
from openpi_train.tools.requests import ConvertRequest

WIDTHS = (16,)
IMAGES = DiffusionPolicyConfig(
    action_dim=exchanged.WIDTH,
    image_height=16,
    image_width=16,
    encoder_widths=WIDTHS,
    unet=UnetSizes(widths=(8, 8), kernel_size=3, num_groups=4),
    diffusion_step_embed_dim=8,
)
KEYPOINTS = dataclasses.replace(IMAGES, pooling="spatial_softmax", num_keypoints=4, relu_features=True)
EXPERIMENTS = {
    "pi0": exchanged.TINY,
    "factors": exchanged.tiny(language=exchanged.LORA),
    "text": dataclasses.replace(exchanged.TINY, model=text_models.MODEL),
    "images": dataclasses.replace(robot_dp_tiny_14, model=IMAGES),
    "keypoints": dataclasses.replace(robot_dp_tiny_14, model=KEYPOINTS),
}
# The forms into which each can be written.
WRITTEN = {
    "pi0": {"ours", "openpi", "lerobot", "openpi_torch", "paligemma", "big_vision"},
    "factors": {"ours", "openpi"},
    "text": {"ours", "openpi", "huggingface"},
    "images": {"ours", "openpi", "diffusion_policy"},
    "keypoints": {"ours", "openpi", "lerobot"},
}


def converted(source: Path, target: Path, name: str, experiment: Experiment, dry_run: bool) -> str:
    """What the verb says when it refuses; "" if it does not."""
    request = ConvertRequest(
        source=str(source), target=target, target_format=name, dry_run=dry_run, outputs=False, params_only=True
    )
    try:
        return "" if convert_checkpoint.main(request, experiment, lambda _: experiment) == 0 else "?"
    except (CheckpointError, UsageError) as error:
        return str(error)


@pytest.mark.parametrize("kind", EXPERIMENTS)
def test_a_dry_run_refuses_what_the_conversion_refuses_and_writes_nothing(kind, tmp_path, monkeypatch):
    for module in (lerobot_diffusion, diffusion_policy_checkpoint):
        monkeypatch.setattr(module, "WIDTHS", WIDTHS)
    experiment = EXPERIMENTS[kind]
    extremes = {"min": [0.0] * exchanged.WIDTH, "max": [2.0] * exchanged.WIDTH}
    content = exchanged.STATS["norm_stats"]
    stats = {"norm_stats": {name: {**content[name], **extremes} for name in ("state", "actions")}}
    stored = dataclasses.replace(
        exchanged.as_stored(exchanged.made_up(experiment)), norm_stats={} if kind == "text" else {"robot": stats}
    )
    source = tmp_path / "source"
    checkpoint_formats.named("openpi").write(source, stored)
    there, written = list(tmp_path.rglob("*")), set()
    for form in checkpoint_formats.formats():
        target = tmp_path / "out" / form.name
        said = converted(source, target, form.name, experiment, dry_run=True)
        assert list(tmp_path.rglob("*")) == there
        assert converted(source, target, form.name, experiment, dry_run=False) == said
        if not said:
            written.add(form.name)
            assert "exists; give another directory" in converted(source, target, form.name, experiment, dry_run=True)
        there = list(tmp_path.rglob("*"))
    assert written == WRITTEN[kind]
