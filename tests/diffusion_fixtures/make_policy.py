"""Writes `policy.npz` and `policy.json`: losses and samples of diffusion_policy's own policy classes.

Run by hand, outside of the project's environment:

    pip install torch==2.13.0 torchvision==0.28.0 diffusers==0.42.1 einops==0.8.2
    python make_policy.py <checkout of real-stanford/diffusion_policy at 5ba07ac>

`DiffusionUnetImagePolicy`, `MultiImageObsEncoder`, `CropRandomizer`, `ConditionalUnet1D`, `TransformerForDiffusion` and
`LinearNormalizer` are the published ones, the schedulers diffusers'. Only these are ours: what torch draws at random
(noise, diffusion steps, corners of crops) is given; the ResNet has fewer channels and stages, of torchvision's blocks;
and `DiffusionTransformerHybridImagePolicy` gets that image encoder in place of robomimic's, of which nothing is
imported. All is computed in float64, so that what our tests see is our own rounding, and in float32: `policy.json` says
how far that takes torch itself from float64.
"""

import json
import logging
import sys
import types
from pathlib import Path
from unittest import mock

import fixed_values as given
import numpy as np
import torch

# The CPU build of torch lacks the operators (none of a ResNet) that torchvision registers shapes for.
torch.library.register_fake = lambda *_, **__: lambda function: function
import diffusers
import torchvision
from diffusers import DDIMScheduler, DDPMScheduler
from diffusers.schedulers import scheduling_ddpm
from torchvision.models import resnet

HERE = Path(__file__).resolve().parent
SAMPLERS = {
    "ddpm": (DDPMScheduler, 100, {}),
    "ddim": (DDIMScheduler, 16, {"set_alpha_to_one": True, "steps_offset": 0}),
}
logging.disable(logging.WARNING)


def small_resnet():
    """Two stages of torchvision's ResNet-18, narrower."""
    model = resnet.resnet18(num_classes=1)
    model.inplanes = 16
    model.conv1, model.bn1 = torch.nn.Conv2d(3, 16, 7, 2, 3, bias=False), torch.nn.BatchNorm2d(16)
    model.layer1 = model._make_layer(resnet.BasicBlock, 16, 2)
    model.layer2 = model._make_layer(resnet.BasicBlock, 32, 2, stride=2)
    model.layer3 = model.layer4 = model.fc = torch.nn.Identity()
    return model


def scheduler(sampler, prediction):
    kind, num_steps, more = SAMPLERS[sampler]
    settings = {"beta_schedule": "squaredcos_cap_v2", "prediction_type": prediction, "clip_sample": True, **more}
    made = kind(100, beta_start=0.0001, beta_end=0.02, **settings)
    # diffusers makes the betas in float32, whatever torch's default is.
    made.alphas = 1 - ours(made.betas)
    made.alphas_cumprod, made.one = torch.cumprod(made.alphas, 0), torch.tensor(1.0)
    return made, num_steps


def ours(array):
    """As a tensor of the precision that is recorded."""
    return torch.as_tensor(array).to(torch.get_default_dtype())


def policy(denoiser, sampler, prediction):
    from diffusion_policy.model.vision.multi_image_obs_encoder import MultiImageObsEncoder

    seen = {name: {"shape": (3, *given.IMAGE), "type": "rgb"} for name in given.CAMERAS}
    seen["state"] = {"shape": (given.STATE_DIM,)}
    shape_meta = {"action": {"shape": (given.ACTION_DIM,)}, "obs": seen}
    made, num_steps = scheduler(sampler, prediction)
    images = MultiImageObsEncoder(
        shape_meta, small_resnet(), crop_shape=given.CROP, random_crop=True, use_group_norm=True, imagenet_norm=False
    )
    sizes = {"horizon": given.HORIZON, "n_action_steps": given.EXECUTED, "n_obs_steps": given.HISTORY}
    if denoiser == "unet":
        from diffusion_policy.policy.diffusion_unet_image_policy import DiffusionUnetImagePolicy

        found = DiffusionUnetImagePolicy(
            shape_meta, made, images, **sizes, num_inference_steps=num_steps, diffusion_step_embed_dim=16,
            down_dims=(16, 32), kernel_size=5, n_groups=8, cond_predict_scale=True,
        )  # fmt: skip
    else:
        found = transformer_policy(made, images, num_steps, sizes)
    with torch.no_grad():
        for name, leaf in found.named_parameters():
            leaf.copy_(torch.from_numpy(given.parameter(name, tuple(leaf.shape))))
    found.set_normalizer(normalizer())
    return found


def transformer_policy(made, images, num_steps, sizes):
    """The published class with the attributes that its constructor gives it, but for the image encoder."""
    from diffusion_policy.model.common.normalizer import LinearNormalizer
    from diffusion_policy.model.diffusion.mask_generator import LowdimMaskGenerator
    from diffusion_policy.model.diffusion.transformer_for_diffusion import TransformerForDiffusion
    from diffusion_policy.policy import diffusion_transformer_hybrid_image_policy as module
    from diffusion_policy.policy.base_image_policy import BaseImagePolicy

    found = module.DiffusionTransformerHybridImagePolicy.__new__(module.DiffusionTransformerHybridImagePolicy)
    BaseImagePolicy.__init__(found)
    dims = given.ACTION_DIM
    found.model = TransformerForDiffusion(
        dims, dims, given.HORIZON, n_obs_steps=given.HISTORY, cond_dim=images.output_shape()[0], n_layer=2, n_head=2,
        n_emb=16, p_drop_emb=0.0, p_drop_attn=0.0, causal_attn=True, time_as_cond=True, obs_as_cond=True,
    )  # fmt: skip
    found.obs_encoder, found.noise_scheduler, found.normalizer = images, made, LinearNormalizer()
    found.mask_generator = LowdimMaskGenerator(dims, 0, given.HISTORY, fix_obs_steps=True, action_visible=False)
    found.action_dim, found.obs_feature_dim = dims, images.output_shape()[0]
    found.obs_as_cond, found.pred_action_steps_only, found.kwargs = True, False, {}
    found.num_inference_steps = num_steps
    for name, value in sizes.items():
        setattr(found, name, value)
    return found


def normalizer():
    from diffusion_policy.common.normalize_util import get_image_range_normalizer
    from diffusion_policy.model.common.normalizer import LinearNormalizer

    found = LinearNormalizer()
    fitted = {"state": given.told("state", (50,)), "action": given.told("actions", (50,))}
    found.fit(fitted, dtype=torch.get_default_dtype(), mode="limits")
    for name in given.CAMERAS:
        found[name] = get_image_range_normalizer()
    return found.to(torch.get_default_dtype())


def batch():
    seen = {name: torch.from_numpy(array) for name, array in given.seen().items()}
    images = {name: ours(seen[name]).permute(0, 1, 4, 2, 3) / 255.0 for name in given.CAMERAS}
    return {"obs": {**images, "state": ours(seen["state"])}, "action": ours(seen["actions"])}


def losses(found):
    """Of each draw of noise and steps, with crops as training has them (`train`) and as evaluation has them."""
    arrays = {}
    for mode in ("train", "eval"):
        found.train(mode == "train")
        # Training asks for the rows of each camera's corners, then for their columns, as shares of what they may be.
        room = np.subtract(given.IMAGE, given.CROP)
        shares = [(given.CORNERS[camera, :, axis] + 0.5) / room[axis] for camera in (0, 1) for axis in (0, 1)]
        shares = [torch.from_numpy(np.repeat(one, given.HISTORY)[:, None]) for one in shares] if mode == "train" else []
        for draw in range(given.DRAWS):
            noise = given.values(f"noise {draw}", (given.ROWS, given.HORIZON, given.ACTION_DIM))
            with (
                mock.patch("torch.rand", side_effect=list(shares)),
                mock.patch("torch.randn", side_effect=[ours(noise)]),
                mock.patch("torch.randint", side_effect=[torch.from_numpy(given.STEPS[draw])]),
            ):
                arrays[f"{mode} loss {draw}"] = found.compute_loss(batch())
    return arrays


def sample(found):
    """The whole chunk, normalised and in the robot's units, and the part of it that is executed."""
    shape = (given.ROWS, given.HORIZON, given.ACTION_DIM)
    fresh = iter(range(100))
    found.eval()
    with (
        mock.patch("torch.randn", side_effect=[ours(given.values("start", shape))]),
        mock.patch.object(
            scheduling_ddpm,
            "randn_tensor",
            lambda shape, **_: ours(given.values(f"fresh {next(fresh)}", tuple(shape))),
        ),
    ):
        told = found.predict_action(batch()["obs"])
    return {
        "chunk": found.normalizer["action"].normalize(told["action_pred"]),
        "in units": told["action_pred"],
        "executed": told["action"],
    }


def record(dtype):
    """Everything, computed in this precision."""
    torch.set_default_dtype(dtype)
    arrays = {}
    for denoiser, prediction in (("unet", "epsilon"), ("unet", "sample"), ("transformer", "epsilon")):
        key = f"{denoiser}/{prediction}"
        for sampler in SAMPLERS:
            found = policy(denoiser, sampler, prediction)
            arrays |= {f"{key}/{sampler}/{name}": array.numpy() for name, array in sample(found).items()}
        arrays |= {f"{key}/{name}": array.numpy() for name, array in losses(found).items()}
    return arrays


def main(checkout):
    sys.path.insert(0, str(checkout))
    # Imported by modules that are used here, for what is not.
    robomimic = ("algo", "algo.algo", "utils", "utils.obs_utils", "models", "models.base_nets")
    for name in ("zarr", "robomimic", *(f"robomimic.{part}" for part in robomimic)):
        sys.modules[name] = mock.MagicMock()
    sys.modules["diffusion_policy.common.robomimic_config_util"] = mock.MagicMock()
    sys.modules["zarr"].Array = types.new_class("Array")
    with torch.no_grad():
        rounded, arrays = record(torch.float32), record(torch.float64)
    np.savez_compressed(HERE / "policy.npz", **arrays)
    versions = {module.__name__: module.__version__ for module in (torch, torchvision, diffusers)}
    far = {name: float(f"{np.abs(rounded[name] - arrays[name]).max():.2g}") for name in arrays}
    facts = {"versions": versions, "diffusion_policy": "5ba07ac", "float32 from float64": far}
    (HERE / "policy.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
