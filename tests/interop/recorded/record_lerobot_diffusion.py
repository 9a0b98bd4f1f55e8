"""Records LeRobot's diffusion policy: tiny random weights, saved by LeRobot itself, and what its modules compute.

Run where `lerobot` and `diffusers` are installed (the tests do not need them): `python record_lerobot_diffusion.py`.
`lerobot_diffusion/` beside this file becomes the policy's folder that LeRobot wrote (config.json, model.safetensors,
processors) and `io.npz`: inputs; the loss for given noise and diffusion steps, with centred crops; a whole chunk by
DDIM from given noise; and what the processors make of a row. All is computed in float64; `recorded.json` says how far
from that the same modules are in float32. The ResNet-18 is torchvision's with two narrow stages, since the widths are
fixed in its code; the forward passes are the libraries' own. Its weights are bfloat16, to keep the file small.
"""

import importlib.metadata
import json
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torchvision
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.diffusion import modeling_diffusion
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
from lerobot.policies.diffusion.processor_diffusion import make_diffusion_pre_post_processors

FOLDER = Path(__file__).resolve().parent / "lerobot_diffusion"
# Not in the order of their names.
CAMERAS, HEIGHT, WIDTH, CROP, WIDTHS = ("wrist", "head"), 22, 28, (18, 25), (16, 16)
STATE_DIM, ACTION_DIM, BATCH = 4, 3, 3
SIZES = {"n_obs_steps": 2, "horizon": 8, "n_action_steps": 5, "down_dims": (8, 16), "kernel_size": 3, "n_groups": 4}
SIZES |= {"diffusion_step_embed_dim": 8, "spatial_softmax_num_keypoints": 4}
NUM_STEPS = 4
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class NarrowResNet(torchvision.models.ResNet):
    """torchvision's ResNet-18 with two stages of these widths."""

    def __init__(self, **_):
        block = torchvision.models.resnet.BasicBlock
        super().__init__(block, [2, 2, 2, 2])
        self.inplanes = WIDTHS[0]
        self.conv1 = torch.nn.Conv2d(3, WIDTHS[0], 7, stride=2, padding=3, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(WIDTHS[0])
        for stage, width in enumerate(WIDTHS):
            setattr(self, f"layer{stage + 1}", self._make_layer(block, width, 2, 2 if stage else 1))
        self.layer3 = self.layer4 = torch.nn.Identity()


def build() -> modeling_diffusion.DiffusionPolicy:
    visual = {f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, HEIGHT, WIDTH)) for name in CAMERAS}
    config = DiffusionConfig(
        device="cpu",
        pretrained_backbone_weights=None,
        use_group_norm=True,
        crop_shape=CROP,
        noise_scheduler_type="DDIM",
        num_inference_steps=NUM_STEPS,
        input_features=visual | {"observation.state": PolicyFeature(FeatureType.STATE, (STATE_DIM,))},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))},
        **SIZES,
    )
    with mock.patch("torchvision.models.resnet18", NarrowResNet):
        policy = modeling_diffusion.DiffusionPolicy(config)
    draw(policy)
    policy.eval()
    return policy


def draw(policy: torch.nn.Module) -> None:
    """Draw all parameters anew, none of them zero or one."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in policy.named_parameters():
            values = torch.randn(tensor.shape, generator=generator)
            if tensor.ndim == 1:
                # The scale of a norm, or a bias.
                is_norm = name.endswith("weight")
                values = 1 + 0.2 * values if is_norm else 0.2 * values
            else:
                values = values * 0.8 / tensor[0].numel() ** 0.5
            tensor.copy_(values.bfloat16())


def inputs() -> dict[str, np.ndarray]:
    rng, steps = np.random.default_rng(3), SIZES["n_obs_steps"]
    chunk = (BATCH, SIZES["horizon"], ACTION_DIM)
    return {
        **{f"in/image/{name}": rng.integers(0, 256, (BATCH, steps, HEIGHT, WIDTH, 3), np.uint8) for name in CAMERAS},
        "in/state": rng.uniform(-1, 1, (BATCH, steps, STATE_DIM)).astype(np.float32),
        "in/actions": rng.uniform(-1, 1, chunk).astype(np.float32),
        "in/noise": rng.normal(size=chunk).astype(np.float32),
        "in/start": rng.normal(size=chunk).astype(np.float32),
        "in/step": np.array([3, 40, 99]),
    }


def stats() -> dict[str, dict[str, np.ndarray]]:
    """Norm stats; of images those of ImageNet, which LeRobot's training puts in place of the dataset's."""
    rng, found = np.random.default_rng(9), {}
    for key, dims in (("observation.state", STATE_DIM), ("action", ACTION_DIM)):
        low = rng.uniform(-2, -1, dims)
        found[key] = {"mean": rng.normal(size=dims), "std": rng.uniform(0.5, 2, dims), "min": low, "max": low + 5}
    for name in CAMERAS:
        found[f"observation.images.{name}"] = {
            key: np.reshape(values, (3, 1, 1)) for key, values in (("mean", MEAN), ("std", STD))
        }
    return found


def outputs(policy: modeling_diffusion.DiffusionPolicy, arrays: dict, dtype: torch.dtype) -> dict[str, np.ndarray]:
    """The loss and the whole chunk, computed in this precision."""
    torch.set_default_dtype(dtype)
    policy.to(dtype)
    scheduler = policy.diffusion.noise_scheduler
    # diffusers makes the betas in float32, whatever torch's default is.
    scheduler.alphas = 1 - scheduler.betas.to(dtype)
    scheduler.alphas_cumprod = torch.cumprod(scheduler.alphas, 0)
    scheduler.final_alpha_cumprod = torch.tensor(1.0)
    given = {name: torch.tensor(arrays[name]).to(dtype) for name in ("in/state", "in/actions", "in/noise", "in/start")}
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (MEAN, STD))
    images = {
        f"observation.images.{name}": (torch.tensor(arrays[f"in/image/{name}"]).permute(0, 1, 4, 2, 3) / 255 - mean)
        / (std + 1e-8)
        for name in CAMERAS
    }
    batch = {**images, "observation.state": given["in/state"]}
    training = {**batch, "action": given["in/actions"], "action_is_pad": torch.zeros(BATCH, SIZES["horizon"]).bool()}
    with (
        mock.patch("torch.randn", lambda *_, **__: given["in/noise"]),
        mock.patch("torch.randint", lambda **_: torch.tensor(arrays["in/step"])),
    ):
        loss, _ = policy.forward(training)
    policy.reset()
    policy.config.n_action_steps = SIZES["horizon"] - SIZES["n_obs_steps"] + 1
    chunk = policy.predict_action_chunk(batch, noise=given["in/start"])
    policy.config.n_action_steps = SIZES["n_action_steps"]
    found = {"out/loss": loss.detach(), "out/chunk": chunk}
    return {name: np.array(value.numpy(), np.float64) for name, value in found.items()}


def main() -> None:
    policy = build()
    grids = [(module, module.pos_grid.clone()) for module in policy.modules() if hasattr(module, "pos_grid")]
    policy.to(torch.bfloat16).save_pretrained(FOLDER)
    for module, grid in grids:
        module.pos_grid = grid  # as LeRobot computes it, not rounded
    before, after = make_diffusion_pre_post_processors(policy.config, stats())
    before.save_pretrained(FOLDER)
    after.save_pretrained(FOLDER)
    arrays = inputs()
    # What the processors make of raw rows, states and actions in the robot's units.
    raw = {"observation.state": torch.tensor(arrays["in/state"]), "action": torch.tensor(arrays["in/actions"])}
    normal = before(raw)
    arrays |= {"norm/state": normal["observation.state"].numpy(), "norm/actions": normal["action"].numpy()}
    arrays["norm/back"] = after(normal["action"][:, 0]).numpy()
    with torch.no_grad():
        rounded = outputs(policy, arrays, torch.float32)
        exact = outputs(policy, arrays, torch.float64)
    arrays |= exact
    float32 = {name: float(np.abs(rounded[name] - one).max() / np.abs(one).max()) for name, one in exact.items()}
    np.savez_compressed(FOLDER / "io.npz", **arrays)
    packages = ("lerobot", "torch", "torchvision", "diffusers", "safetensors")
    versions = {package: importlib.metadata.version(package) for package in packages}
    sizes = {**SIZES, "widths": WIDTHS, "height": HEIGHT, "width": WIDTH, "crop": CROP, "cameras": CAMERAS}
    sizes |= {"state_dim": STATE_DIM, "action_dim": ACTION_DIM, "num_steps": NUM_STEPS, "mean": MEAN, "std": STD}
    record = {"type": "diffusion", "versions": versions, "sizes": sizes, "float32": float32}
    (FOLDER / "recorded.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
