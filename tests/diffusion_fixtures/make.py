"""Writes `torch.npz` and `torch.json`: what diffusion_policy's and robomimic's networks and diffusers' samplers give.

Run by hand, outside of the project's environment:

    pip install torch==2.13.0 torchvision==0.28.0 diffusers==0.42.1 einops==0.8.2
    python make.py <checkout of real-stanford/diffusion_policy at 5ba07ac> <checkout of ARISE-Initiative/robomimic>
"""

import ast
import json
import logging
import sys
import types
from pathlib import Path

import numpy as np
import torch
from fixed_values import model_output, parameter, values

# The CPU build of torch lacks the operators (none of a ResNet) that torchvision registers shapes for.
torch.library.register_fake = lambda *_, **__: lambda function: function
import diffusers
import torchvision
from diffusers import DDIMScheduler, DDPMScheduler
from diffusers.schedulers import scheduling_ddpm

HERE = Path(__file__).resolve().parent
logging.disable(logging.WARNING)


def fill(module):
    """The module with parameters by their names."""
    with torch.no_grad():
        for name, leaf in module.named_parameters():
            leaf.copy_(torch.from_numpy(parameter(name, tuple(leaf.shape))))
    return module.eval()


def count(module):
    return sum(leaf.numel() for leaf in module.parameters())


def networks(robomimic):
    from diffusion_policy.common.pytorch_util import replace_submodules
    from diffusion_policy.model.diffusion.conditional_unet1d import ConditionalUnet1D
    from diffusion_policy.model.diffusion.transformer_for_diffusion import TransformerForDiffusion
    from diffusion_policy.model.vision.model_getter import get_resnet

    arrays, counts = {}, {}

    def resnet():
        return replace_submodules(
            get_resnet("resnet18"),
            lambda x: isinstance(x, torch.nn.BatchNorm2d),
            lambda x: torch.nn.GroupNorm(x.num_features // 16, x.num_features),
        )

    counts["resnet"] = count(resnet())
    images = torch.from_numpy(np.tanh(values("images", (2, 48, 64, 3)))).permute(0, 3, 1, 2)
    arrays["resnet"] = fill(resnet())(images)

    def unet(dims, condition, step, widths):
        return ConditionalUnet1D(
            dims,
            global_cond_dim=condition,
            diffusion_step_embed_dim=step,
            down_dims=widths,
            kernel_size=5,
            n_groups=8,
            cond_predict_scale=True,
        )

    for dims in (10, 14, 16):
        counts[f"unet {dims}"] = count(unet(dims, 3 * (512 + dims), 128, (256, 512, 1024)))
    counts["unet pusht"] = count(unet(2, 2 * (512 + 2), 128, (512, 1024, 2048)))
    steps = torch.tensor([0, 57])
    small = fill(unet(3, 2 * 5, 16, (16, 32, 64)))
    for horizon in (8, 16):
        noisy = torch.from_numpy(values("noisy", (2, horizon, 3)))
        arrays[f"unet {horizon}"] = small(noisy, steps, global_cond=torch.from_numpy(values("condition", (2, 10))))

    def transformer(dims, condition, horizon, obs, width, depth, heads):
        return TransformerForDiffusion(
            dims,
            dims,
            horizon,
            n_obs_steps=obs,
            cond_dim=condition,
            n_layer=depth,
            n_head=heads,
            n_emb=width,
            causal_attn=True,
        )

    counts["transformer"] = count(transformer(14, 526, 8, 3, 256, 8, 4))
    small = fill(transformer(3, 5, 8, 2, 16, 2, 2))
    noisy, condition = torch.from_numpy(values("noisy", (2, 8, 3))), torch.from_numpy(values("condition", (2, 2, 5)))
    arrays["transformer"] = small(noisy, steps, condition)

    tree = ast.parse((robomimic / "robomimic/models/base_nets.py").read_text())
    (kind,) = [node for node in tree.body if getattr(node, "name", "") == "SpatialSoftmax"]
    space = {"torch": torch, "np": np, "F": torch.nn.functional, "ConvBase": torch.nn.Module}
    exec(compile(ast.Module([kind], []), "base_nets.py", "exec"), space)
    softmax = fill(space["SpatialSoftmax"]((16, 3, 5), num_kp=4))
    arrays["keypoints"] = softmax(torch.from_numpy(values("features", (2, 3, 5, 16))).permute(0, 3, 1, 2) * 3)
    return {name: array.detach().numpy() for name, array in arrays.items()}, counts


def exactly(scheduler):
    """The scheduler in float64 from its (float32) betas on: its own rounding of 1 - 0.9999 would hide ours."""
    scheduler.betas = scheduler.betas.double()
    scheduler.alphas = 1 - scheduler.betas
    scheduler.alphas_cumprod = torch.cumprod(scheduler.alphas, 0)
    scheduler.one = torch.tensor(1.0, dtype=torch.float64)
    return scheduler


def samplers():
    arrays = {}
    noise = {}
    scheduling_ddpm.randn_tensor = lambda shape, **_: torch.from_numpy(noise["now"])
    for schedule in ("squaredcos_cap_v2", "linear"):
        for prediction in ("epsilon", "sample", "v_prediction"):
            for clip in (True, False):
                settings = {"beta_schedule": schedule, "prediction_type": prediction, "clip_sample": clip}
                ddpm = DDPMScheduler(100, **settings)
                ddim = DDIMScheduler(100, **settings, set_alpha_to_one=True, steps_offset=0)
                arrays[f"{schedule}/betas"], arrays[f"{schedule}/acp"] = ddpm.betas, ddpm.alphas_cumprod
                ddpm, ddim = exactly(ddpm), exactly(ddim)
                for name, scheduler, num_steps in (
                    ("ddpm", ddpm, 100),
                    ("ddpm", ddpm, 10),
                    ("ddim", ddim, 100),
                    ("ddim", ddim, 8),
                ):
                    scheduler.set_timesteps(num_steps)
                    x = torch.from_numpy(values("start", (2, 3))).double()
                    for index, step in enumerate(scheduler.timesteps):
                        noise["now"] = values(f"noise {index}", (2, 3))
                        x = scheduler.step(model_output(x, int(step)), step, x).prev_sample
                    arrays[f"{schedule}/{prediction}/{clip}/{name}/{num_steps}"] = x
        steps = torch.tensor([0, 99, 49])
        clean, eps = torch.from_numpy(values("clean", (3, 4))), torch.from_numpy(values("eps", (3, 4)))
        ddpm = DDPMScheduler(100, **settings)
        arrays[f"{schedule}/noisy"] = ddpm.add_noise(clean, eps, steps)
        arrays[f"{schedule}/velocity"] = ddpm.get_velocity(clean, eps, steps)
    return {name: array.numpy() for name, array in arrays.items()}


def ema():
    from diffusion_policy.model.diffusion.ema_model import EMAModel

    found = []
    for after in (0, 3):
        model = EMAModel(torch.nn.Identity(), update_after_step=after, power=0.75)
        found += [[after, k, model.get_decay(k)] for k in (0, 1, 2, 3, 4, 5, 6, 100, 10_000, 300_000)]
    return found


def main(diffusion_policy: Path, robomimic: Path):
    sys.path.insert(0, str(diffusion_policy))
    # Imported by modules that are used here, for what is not.
    for name in ("diffusion_policy.model.common.module_attr_mixin",):
        module = types.ModuleType(name)
        module.ModuleAttrMixin = torch.nn.Module
        sys.modules[name] = module
    arrays, counts = networks(robomimic)
    np.savez_compressed(HERE / "torch.npz", **arrays, **samplers())
    versions = {module.__name__: module.__version__ for module in (torch, torchvision, diffusers)}
    facts = {"versions": versions, "parameters": counts, "ema": ema()}
    (HERE / "torch.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
