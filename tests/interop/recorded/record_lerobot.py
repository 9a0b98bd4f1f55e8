"""Records LeRobot's own policies: tiny random weights, saved by LeRobot itself, and what its modules compute with them.

Run where `lerobot` with its `pi` extra is installed (the tests do not need it): `python record_lerobot.py [pi0 ...]`.
Each name becomes a folder beside this file: the policy folder that LeRobot wrote (config.json, model.safetensors,
processors) and `io.npz`, inputs and outputs. LeRobot fixes the large sizes in code, so they are replaced here before
its classes are built; the forward passes are its own.
"""

import importlib
import importlib.metadata
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from transformers.models.auto import CONFIG_MAPPING

HERE = Path(__file__).resolve().parent
VOCAB, IMAGE, PATCH = 24, 28, 14
# Eight heads: LeRobot writes that number into its attention.
LANGUAGE = {"width": 16, "depth": 2, "mlp_dim": 24, "num_heads": 8, "num_kv_heads": 1, "head_dim": 4}
ACTION = LANGUAGE | {"width": 12, "mlp_dim": 20}
TOWER = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
ACTION_DIM, HORIZON, BATCH, PROMPT = 6, 5, 2, 7
SIZES = {"language": LANGUAGE, "action": ACTION, "tower": TOWER, "vocab": VOCAB, "image": IMAGE, "patch": PATCH}
SIZES |= {"action_dim": ACTION_DIM, "horizon": HORIZON, "prompt": PROMPT}
CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
CLASSES = {
    "pi0": ("PI0", "modeling_pi0"),
    "pi05": ("PI05", "modeling_pi05"),
    "pi0_fast": ("PI0Fast", "modeling_pi0_fast"),
}


def kept(config, **sizes):
    """The config, which keeps these sizes whatever is assigned to them later."""
    kind = type(config)
    for name, size in sizes.items():
        setattr(config, name, size)
    if kind not in _ASSIGN:
        _ASSIGN[kind] = kind.__setattr__
        kind.__setattr__ = _assign
    _KEPT[id(config)] = (config, set(sizes))  # the config too, so that its id stays its own
    return config


_ASSIGN, _KEPT = {}, {}


def _assign(config, name, value):
    if id(config) not in _KEPT or name not in _KEPT[id(config)][1]:
        _ASSIGN[type(config)](config, name, value)


def small_configs():
    """Hugging Face's configs of the two models, with the sizes above."""
    vision = TOWER | {"patch_size": PATCH, "image_size": IMAGE, "projection_dim": LANGUAGE["width"]}

    def paligemma():
        config = CONFIG_MAPPING["paligemma"]()
        kept(config.text_config, vocab_size=VOCAB)
        kept(config.vision_config, **vision)
        return config

    return {"paligemma": paligemma, "gemma": lambda **given: CONFIG_MAPPING["gemma"](**given | {"vocab_size": VOCAB})}


def draw(module: torch.nn.Module, seed: str) -> None:
    """Draw all of the module's parameters anew, none of them zero or one."""
    generator = torch.Generator().manual_seed(sum(map(ord, seed)))
    with torch.no_grad():
        for parameter in module.parameters():
            scale = 0.1 if parameter.ndim == 1 else 0.3
            # Rounded to bfloat16, so that files of either type hold the same numbers.
            parameter.copy_((torch.randn(parameter.shape, generator=generator) * scale).bfloat16())


def build(name: str):
    prefix, module_name = CLASSES[name]
    module = importlib.import_module(f"lerobot.policies.{name}.{module_name}")
    configuration = importlib.import_module(f"lerobot.policies.{name}.configuration_{name}")
    from lerobot.configs import FeatureType, PolicyFeature

    images = {
        f"observation.images.{camera}": PolicyFeature(FeatureType.VISUAL, (3, IMAGE, IMAGE)) for camera in CAMERAS
    }
    config = getattr(configuration, f"{prefix}Config")(
        device="cpu",
        chunk_size=HORIZON,
        n_action_steps=HORIZON,
        max_action_dim=ACTION_DIM,
        max_state_dim=ACTION_DIM,
        image_resolution=(IMAGE, IMAGE),
        tokenizer_max_length=PROMPT,
        input_features=images | {"observation.state": PolicyFeature(FeatureType.STATE, (4,))},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (3,))},
    )
    module.CONFIG_MAPPING = small_configs()
    module.get_gemma_config = lambda variant: SimpleNamespace(**{"gemma_2b": LANGUAGE, "gemma_300m": ACTION}[variant])
    with (
        mock.patch("transformers.AutoTokenizer.from_pretrained"),
        mock.patch("transformers.AutoProcessor.from_pretrained"),
    ):
        policy = getattr(module, f"{prefix}Policy")(config).eval()
    draw(policy, name)
    with torch.no_grad():
        if name == "pi0_fast":  # as in openpi's weights; LeRobot keeps two copies
            paligemma = policy.model.paligemma_with_expert.paligemma
            paligemma.lm_head.weight.copy_(paligemma.model.language_model.embed_tokens.weight)
    return policy


def save_processors(name: str, policy, folder: Path) -> dict[str, np.ndarray]:
    module = importlib.import_module(f"lerobot.policies.{name}.processor_{name}")
    rng = np.random.default_rng(7)
    stats = {}
    for key, dims in (("observation.state", 4), ("action", 3)):
        low = rng.uniform(-2, -1, dims)
        stats[key] = {"mean": rng.normal(size=dims), "std": rng.uniform(0.5, 2, dims), "min": low, "max": low + 5}
        stats[key] |= {"q01": low + 0.5, "q99": low + 4}
    with (
        mock.patch("transformers.AutoTokenizer.from_pretrained"),
        mock.patch("transformers.AutoProcessor.from_pretrained"),
    ):
        before, after = getattr(module, f"make_{name}_pre_post_processors")(policy.config, stats)
    before.save_pretrained(folder)
    after.save_pretrained(folder)
    # What its normaliser makes of a state and an action, and its inverse of the latter.
    step = next(step for step in before.steps if type(step).__name__ == "NormalizerProcessorStep")
    raw = {
        key: torch.tensor(rng.normal(size=(BATCH, dims)), dtype=torch.float32)
        for key, dims in (("state", 4), ("action", 3))
    }
    normal = step._normalize_observation({"observation.state": raw["state"]}, inverse=False)["observation.state"]
    action = step._normalize_action(raw["action"], inverse=False)
    return {
        "norm/state": raw["state"].numpy(),
        "norm/action": raw["action"].numpy(),
        "norm/state_normalized": normal.numpy(),
        "norm/action_normalized": action.numpy(),
    }


def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(11)
    lengths = np.array([[PROMPT], [PROMPT - 3]])
    return {
        **{f"in/image/{camera}": rng.integers(0, 256, (BATCH, IMAGE, IMAGE, 3), np.uint8) for camera in CAMERAS},
        **{f"in/image_mask/{camera}": np.array([True, camera != CAMERAS[2]]) for camera in CAMERAS},
        "in/tokens": rng.integers(0, VOCAB, (BATCH, PROMPT), np.int32),
        "in/token_mask": np.arange(PROMPT)[None] < lengths,
        "in/state": rng.normal(size=(BATCH, ACTION_DIM)).astype(np.float32),
        "in/actions": rng.normal(size=(BATCH, HORIZON, ACTION_DIM)).astype(np.float32),
        "in/noise": rng.normal(size=(BATCH, HORIZON, ACTION_DIM)).astype(np.float32),
        "in/time": np.array([0.25, 0.8], np.float32),
        "in/action_tokens": rng.integers(0, VOCAB, (BATCH, 6), np.int32),
        "in/action_token_mask": np.arange(6)[None] < np.array([[6], [4]]),
    }


def token_outputs(model, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Loss and logits at the action tokens; all images are there and no prompt is padded, where openpi's JAX agrees."""
    images, masks, tokens, token_mask = prefix_of(given)
    logits = []
    hook = model.paligemma_with_expert.paligemma.lm_head.register_forward_hook(lambda *call: logits.append(call[-1]))
    actions, action_mask = given["in/action_tokens"].long(), given["in/action_token_mask"]
    everything = [torch.ones_like(mask) for mask in masks]
    loss = model.forward(images, everything, tokens, torch.ones_like(token_mask), actions, action_mask)["loss"]
    hook.remove()
    return {"out/loss": loss, "out/logits": logits[0]}


def flow_outputs(model, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    prefix = prefix_of(given)
    state = (given["in/state"],) if hasattr(model, "state_proj") else ()
    loss = model.forward(*prefix, *state, given["in/actions"], given["in/noise"], given["in/time"])
    sampled = model.sample_actions(*prefix, *state, noise=given["in/noise"].clone(), num_steps=4)
    return {"out/loss": loss, "out/sample_actions_4": sampled}


def prefix_of(given: dict[str, torch.Tensor]) -> tuple:
    images = [(given[f"in/image/{camera}"].permute(0, 3, 1, 2).float() / 255 * 2 - 1) for camera in CAMERAS]
    masks = [given[f"in/image_mask/{camera}"] for camera in CAMERAS]
    return images, masks, given["in/tokens"].long(), given["in/token_mask"]


def main() -> None:
    for name in sys.argv[1:] or CLASSES:
        folder = HERE / f"lerobot_{name}"
        policy = build(name)
        policy.save_pretrained(folder)
        arrays = inputs() | save_processors(name, policy, folder)
        with torch.no_grad():
            outputs = (token_outputs if name == "pi0_fast" else flow_outputs)(
                policy.model, {key: torch.from_numpy(value) for key, value in arrays.items()}
            )
        arrays |= {key: value.float().numpy() for key, value in outputs.items()}
        np.savez_compressed(folder / "io.npz", **arrays)
        packages = ("lerobot", "torch", "transformers", "safetensors")
        versions = {package: importlib.metadata.version(package) for package in packages}
        record = {"type": name, "versions": versions, "sizes": SIZES}
        (folder / "recorded.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
