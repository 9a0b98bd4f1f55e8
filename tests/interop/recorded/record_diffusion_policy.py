"""Records a checkpoint of diffusion_policy: its own classes, tiny random weights, saved by its own workspace.

Run where torch, torchvision, diffusers, hydra-core, omegaconf and dill are installed (the tests do not need them):
`python record_diffusion_policy.py <checkout of real-stanford/diffusion_policy at 5ba07ac>`. `diffusion_policy/` beside
this file gets `latest.ckpt`, whose average has the drawn weights and whose model has zeros, and `io.npz`: inputs in a
robot's units, the loss for given noise and diffusion steps, and a chunk by DDIM from given noise, in float64;
`recorded.json` says how far from that the same modules are in float32. The ResNet-18 is torchvision's with one narrow
stage, since its widths are fixed; the policy is built from its config by hydra, as the trainer builds it.
"""

import importlib.metadata
import json
import sys
import types
from pathlib import Path
from unittest import mock

import numpy as np
import torch

# The CPU build of torch lacks the operators (none of a ResNet) that torchvision registers shapes for.
torch.library.register_fake = lambda *_, **__: lambda function: function
import hydra
from omegaconf import OmegaConf
from torchvision.models import resnet

FOLDER = Path(__file__).resolve().parent / "diffusion_policy"
CAMERA, IMAGE, CROP, WIDTHS = "head_cam", (19, 23), (16, 18), (16,)
STATE_DIM, ACTION_DIM, ROWS, NUM_STEPS = 4, 3, 3, 4
SIZES = {"horizon": 8, "n_action_steps": 5, "n_obs_steps": 2, "diffusion_step_embed_dim": 8}
SIZES |= {"down_dims": [8, 8], "kernel_size": 3, "n_groups": 4}


def narrow_resnet(weights=None, **_):
    """One stage of torchvision's ResNet-18, narrower."""
    model = resnet.resnet18(num_classes=1)
    model.inplanes = WIDTHS[0]
    model.conv1, model.bn1 = torch.nn.Conv2d(3, WIDTHS[0], 7, 2, 3, bias=False), torch.nn.BatchNorm2d(WIDTHS[0])
    model.layer1 = model._make_layer(resnet.BasicBlock, WIDTHS[0], 2)
    model.layer2 = model.layer3 = model.layer4 = torch.nn.Identity()
    return model


def config():
    shapes = {
        "obs": {CAMERA: {"shape": [3, *IMAGE], "type": "rgb"}, "agent_pos": {"shape": [STATE_DIM], "type": "low_dim"}},
        "action": {"shape": [ACTION_DIM]},
    }
    scheduler = {"_target_": "diffusers.schedulers.scheduling_ddim.DDIMScheduler", "num_train_timesteps": 100}
    scheduler |= {"beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "squaredcos_cap_v2", "clip_sample": True}
    scheduler |= {"set_alpha_to_one": True, "steps_offset": 0, "prediction_type": "epsilon"}
    encoder = {
        "_target_": "diffusion_policy.model.vision.multi_image_obs_encoder.MultiImageObsEncoder",
        "shape_meta": "${shape_meta}",
        "rgb_model": {
            "_target_": "diffusion_policy.model.vision.model_getter.get_resnet",
            "name": "resnet18",
            "weights": None,
        },
        "resize_shape": None,
        "crop_shape": list(CROP),
        "random_crop": True,
        "use_group_norm": True,
        "share_rgb_model": False,
        "imagenet_norm": True,
    }
    policy = {
        "_target_": "diffusion_policy.policy.diffusion_unet_image_policy.DiffusionUnetImagePolicy",
        "shape_meta": "${shape_meta}",
        "noise_scheduler": scheduler,
        "obs_encoder": encoder,
        "num_inference_steps": NUM_STEPS,
        "obs_as_global_cond": True,
        "cond_predict_scale": True,
        **SIZES,
    }
    found = OmegaConf.create({"shape_meta": shapes, "policy": policy, "training": {"seed": 0, "use_ema": True}})
    OmegaConf.resolve(found)  # as the trainers do before they save
    return found


def draw(policy) -> None:
    """Draw all weights anew, none of them zero or one."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in policy.named_parameters():
            if name.startswith("normalizer") or not tensor.numel():
                continue
            values = torch.randn(tensor.shape, generator=generator)
            if tensor.ndim == 1:
                values = 1 + 0.2 * values if name.endswith("weight") else 0.2 * values
            else:
                values = values * 0.8 / tensor[0].numel() ** 0.5
            tensor.copy_(values)


def inputs() -> dict[str, np.ndarray]:
    rng, steps, chunk = np.random.default_rng(3), SIZES["n_obs_steps"], (ROWS, SIZES["horizon"], ACTION_DIM)
    state = rng.normal(size=(ROWS, steps, STATE_DIM)) + 2
    state[..., -1] = 7.0  # at rest
    return {
        "in/image": rng.integers(0, 256, (ROWS, steps, *IMAGE, 3), np.uint8),
        "in/state": state,
        "in/actions": rng.normal(size=chunk),
        "in/noise": rng.normal(size=chunk).astype(np.float32),
        "in/start": rng.normal(size=chunk).astype(np.float32),
        "in/step": np.array([3, 40, 99]),
    }


def outputs(policy, arrays, dtype) -> dict[str, np.ndarray]:
    """The loss and the chunk, with centred crops, computed in this precision."""
    torch.set_default_dtype(dtype)
    policy.to(dtype).eval()
    scheduler = policy.noise_scheduler
    # diffusers makes the betas in float32, whatever torch's default is.
    scheduler.alphas_cumprod = torch.cumprod(1 - scheduler.betas.to(dtype), 0)
    scheduler.final_alpha_cumprod = torch.tensor(1.0)
    given = {name: torch.tensor(array).to(dtype) for name, array in arrays.items() if name != "in/step"}
    seen = {CAMERA: given["in/image"].permute(0, 1, 4, 2, 3) / 255, "agent_pos": given["in/state"]}
    with (
        mock.patch("torch.randn", side_effect=[given["in/noise"], given["in/start"].clone()]),
        mock.patch("torch.randint", side_effect=[torch.tensor(arrays["in/step"])]),
    ):
        loss = policy.compute_loss({"obs": seen, "action": given["in/actions"]})
        chunk = policy.predict_action(seen)["action_pred"]
    return {"out/loss": loss.numpy().astype(np.float64), "out/chunk": chunk.numpy().astype(np.float64)}


def imports(checkout) -> None:
    """The checkout's modules, without packages that are imported there for what is not used here."""
    sys.path.insert(0, str(checkout))
    for name in ("zarr", "robomimic"):
        sys.modules[name] = mock.MagicMock()
    sys.modules["zarr"].Array = types.new_class("Array")


def main(checkout) -> None:
    imports(checkout)
    from diffusion_policy.common.normalize_util import get_image_range_normalizer
    from diffusion_policy.model.common.normalizer import LinearNormalizer
    from diffusion_policy.workspace.base_workspace import BaseWorkspace

    class Workspace(BaseWorkspace):
        include_keys = ("global_step",)

    made = Workspace(config(), output_dir=str(FOLDER))
    with mock.patch("torchvision.models.resnet18", narrow_resnet):
        policy = hydra.utils.instantiate(made.cfg.policy)
        made.model = hydra.utils.instantiate(made.cfg.policy)
    draw(policy)
    arrays, normalizer = inputs(), LinearNormalizer()
    normalizer.fit({"agent_pos": arrays["in/state"] * 1.5, "action": arrays["in/actions"] * 1.5}, mode="limits")
    normalizer[CAMERA] = get_image_range_normalizer()
    for one in (policy, made.model):
        one.set_normalizer(normalizer)
    made.ema_model, made.global_step = policy, 5
    made.optimizer = torch.optim.AdamW(made.model.parameters())
    with torch.no_grad():
        zero = torch.zeros(1)
        for tensor in made.model.parameters():
            tensor.data = zero.expand(tensor.shape) if tensor.numel() else tensor.data  # a value for all
        made.save_checkpoint(path=FOLDER / "latest.ckpt", use_thread=False)
        rounded, exact = outputs(policy, arrays, torch.float32), outputs(policy, arrays, torch.float64)
    float32 = {name: float(np.abs(rounded[name] - one).max() / np.abs(one).max()) for name, one in exact.items()}
    np.savez_compressed(FOLDER / "io.npz", **arrays, **exact)
    packages = ("torch", "torchvision", "diffusers", "hydra-core", "omegaconf", "dill")
    versions = {package: importlib.metadata.version(package) for package in packages}
    sizes = {**SIZES, "widths": WIDTHS, "image": IMAGE, "crop": CROP, "camera": CAMERA, "num_steps": NUM_STEPS}
    sizes |= {"state_dim": STATE_DIM, "action_dim": ACTION_DIM}
    record = {"versions": versions, "diffusion_policy": "5ba07ac", "sizes": sizes, "float32": float32}
    (FOLDER / "recorded.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
