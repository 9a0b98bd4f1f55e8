"""Records LeRobot's ACT: tiny random weights, saved by LeRobot itself, and what its modules compute with them.

Run where `lerobot` is installed (the tests do not need it): `python record_lerobot_act.py`. `lerobot_act/` beside this
file becomes the policy's folder that LeRobot wrote (config.json, model.safetensors, processors) and `io.npz`: inputs;
loss, its parts and the gradient's norms of one training step without dropout, for a given latent noise; a chunk as it
is sampled; what the processors make of a row; and executed actions of the temporal ensemble. Losses, gradients and
chunks are computed in float64; `recorded.json` says how far from them the same modules are in float32. The ResNet-18
is torchvision's with narrow stages, since the widths are fixed in its code; the forward passes are the libraries' own.
"""

import importlib.metadata
import json
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torchvision
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.act import modeling_act
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.processor_act import make_act_pre_post_processors

FOLDER = Path(__file__).resolve().parent / "lerobot_act"
CAMERAS, HEIGHT, WIDTH, WIDTHS = ("top", "wrist"), 36, 44, (16, 16, 24, 32)
STATE_DIM, ACTION_DIM, HORIZON, BATCH = 4, 3, 6, 3
SIZES = {"dim_model": 16, "n_heads": 2, "dim_feedforward": 24, "n_encoder_layers": 2, "n_decoder_layers": 2}
SIZES |= {"n_vae_encoder_layers": 1, "latent_dim": 4}
COEFFICIENT = 0.1
# Gradients' norms that are less are compared with this: some are zero.
LEAST = 1e-3


class NarrowResNet(torchvision.models.ResNet):
    """torchvision's ResNet-18 with stages of these widths."""

    def __init__(self, norm_layer, **_):
        super().__init__(torchvision.models.resnet.BasicBlock, [2, 2, 2, 2], norm_layer=norm_layer)
        self.inplanes = WIDTHS[0]
        self.conv1 = torch.nn.Conv2d(3, WIDTHS[0], 7, stride=2, padding=3, bias=False)
        self.bn1 = norm_layer(WIDTHS[0])
        for stage, width in enumerate(WIDTHS):
            setattr(self, f"layer{stage + 1}", self._make_layer(self.block(), width, 2, 2 if stage else 1))
        self.fc = torch.nn.Linear(WIDTHS[-1], 1)

    @staticmethod
    def block():
        return torchvision.models.resnet.BasicBlock


def build() -> modeling_act.ACTPolicy:
    visual = {f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, HEIGHT, WIDTH)) for name in CAMERAS}
    config = ACTConfig(
        device="cpu",
        chunk_size=HORIZON,
        n_action_steps=HORIZON,
        dropout=0.0,
        pretrained_backbone_weights=None,
        input_features=visual | {"observation.state": PolicyFeature(FeatureType.STATE, (STATE_DIM,))},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))},
        **SIZES,
    )
    with mock.patch("torchvision.models.resnet18", NarrowResNet):
        policy = modeling_act.ACTPolicy(config)
    draw(policy)
    # The latent zero is float32 in its code, whatever the policy's type.
    latent = policy.model.encoder_latent_input_proj
    latent.register_forward_pre_hook(lambda module, given: (given[0].to(module.weight.dtype),))
    return policy


def draw(policy: torch.nn.Module) -> None:
    """Draw all parameters and buffers of the norms anew, none of them zero or one."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in policy.state_dict().items():
            if "pos_enc" in name:
                continue  # a fixed table
            values = torch.randn(tensor.shape, generator=generator)
            if any(part in name for part in (".bn", "downsample.1", "norm")):
                values = 1 + 0.2 * values if name.endswith(("weight", "var")) else 0.2 * values
            elif tensor.ndim == 4:
                values = values * 0.5 / tensor[0].numel() ** 0.5
            else:
                values = values * (0.1 if tensor.ndim == 1 else 0.3)
            tensor.copy_(values.bfloat16())  # so that files of either type hold the same numbers


def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    real = np.array([[HORIZON], [HORIZON - 2], [1]])
    return {
        **{f"in/image/{name}": rng.integers(0, 256, (BATCH, HEIGHT, WIDTH, 3), np.uint8) for name in CAMERAS},
        "in/state": rng.normal(size=(BATCH, STATE_DIM)).astype(np.float32),
        "in/actions": rng.normal(size=(BATCH, HORIZON, ACTION_DIM)).astype(np.float32),
        "in/action_mask": np.arange(HORIZON)[None] < real,
        "in/latent_noise": rng.normal(size=(BATCH, SIZES["latent_dim"])).astype(np.float32),
    }


def stats() -> dict[str, dict[str, np.ndarray]]:
    """Norm stats; of images those of ImageNet, which LeRobot's training puts in place of the dataset's."""
    rng, found = np.random.default_rng(9), {}
    for key, dims in (("observation.state", STATE_DIM), ("action", ACTION_DIM)):
        low = rng.uniform(-2, -1, dims)
        found[key] = {"mean": rng.normal(size=dims), "std": rng.uniform(0.5, 2, dims), "min": low, "max": low + 5}
    for name in CAMERAS:
        found[f"observation.images.{name}"] = {
            "mean": np.array([[[0.485]], [[0.456]], [[0.406]]]),
            "std": np.array([[[0.229]], [[0.224]], [[0.225]]]),
        }
    return found


def wide(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_floating_point() else value


def outputs(policy: modeling_act.ACTPolicy, batch: dict, noise: torch.Tensor) -> dict[str, np.ndarray]:
    """Loss, its parts, gradient's norms and the chunk for the latent zero."""
    policy.train()
    policy.zero_grad()
    with mock.patch("torch.randn_like", lambda _: noise):
        loss, parts = policy.forward(batch)
    loss.backward()
    found = {
        "out/loss": loss.detach().numpy(),
        "out/l1": np.array(parts["l1_loss"]),
        "out/kl": np.array(parts["kld_loss"]),
    }
    found |= {f"grad/{name}": parameter.grad.norm().numpy() for name, parameter in policy.named_parameters()}
    found["out/chunk"] = policy.predict_action_chunk(batch).numpy()
    return {name: np.array(value, np.float64) for name, value in found.items()}


def main() -> None:
    policy = build()
    policy.save_pretrained(FOLDER)
    before, after = make_act_pre_post_processors(policy.config, stats())
    before.save_pretrained(FOLDER)
    after.save_pretrained(FOLDER)
    arrays = inputs()
    # What the processors make of raw rows: images 0..1, states and actions in the robot's units.
    raw = {f"observation.images.{name}": torch.tensor(arrays[f"in/image/{name}"]) for name in CAMERAS}
    raw = {name: image.permute(0, 3, 1, 2).float() / 255 for name, image in raw.items()}
    raw |= {"observation.state": torch.tensor(arrays["in/state"]), "action": torch.tensor(arrays["in/actions"])}
    normal = before(raw)
    arrays |= {"norm/state": normal["observation.state"].numpy(), "norm/actions": normal["action"].numpy()}
    arrays["norm/back"] = after(normal["action"][:, 0]).numpy()
    # The network sees rows that are normalised already; only images are normalised on the way.
    batch = {name: normal[name] for name in raw if "images" in name}
    batch |= {"observation.state": torch.tensor(arrays["in/state"]), "action": torch.tensor(arrays["in/actions"])}
    batch["action_is_pad"] = ~torch.tensor(arrays["in/action_mask"])
    noise = torch.tensor(arrays["in/latent_noise"])
    rounded = outputs(policy, batch, noise)
    exact = outputs(policy.double(), {name: wide(value) for name, value in batch.items()}, noise.double())
    arrays |= exact
    apart = {
        name: float(np.abs(rounded[name] - value).max() / max(np.abs(value).max(), LEAST))
        for name, value in exact.items()
    }
    kinds = {"out/loss", "out/l1", "out/kl", "out/chunk"}
    float32 = {name: apart[name] for name in kinds}
    float32["grad"] = max(value for name, value in apart.items() if name not in kinds)
    # One executed action per step, of chunks that are random here.
    chunks = np.random.default_rng(4).normal(size=(9, BATCH, HORIZON, ACTION_DIM)).astype(np.float32)
    ensembler = modeling_act.ACTTemporalEnsembler(COEFFICIENT, HORIZON)
    executed = [ensembler.update(torch.tensor(chunk)).numpy().copy() for chunk in chunks]
    arrays |= {"ensemble/chunks": chunks, "ensemble/executed": np.stack(executed)}
    np.savez_compressed(FOLDER / "io.npz", **arrays)
    packages = ("lerobot", "torch", "torchvision", "safetensors")
    versions = {package: importlib.metadata.version(package) for package in packages}
    sizes = {**SIZES, "widths": WIDTHS, "height": HEIGHT, "width": WIDTH, "cameras": CAMERAS}
    sizes |= {
        "state_dim": STATE_DIM,
        "action_dim": ACTION_DIM,
        "horizon": HORIZON,
        "coefficient": COEFFICIENT,
        "least": LEAST,
    }
    record = {"type": "act", "versions": versions, "sizes": sizes, "float32": float32}
    (FOLDER / "recorded.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
