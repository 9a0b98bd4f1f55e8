"""Records LeRobot's SmolVLA: tiny random weights, saved by LeRobot itself, and what its modules compute with them.

Run where `lerobot` and `transformers` are installed (the tests do not need them): `python record_lerobot_smolvla.py`.
`lerobot_smolvla/` beside this file becomes the policy's folder that LeRobot wrote (config.json, model.safetensors,
processors), `tokenizer/` a small tokenizer, and `io.npz`: inputs; loss, gradients' norms and chunk for given noise and
flow times; what LeRobot's processors make of instructions; images as LeRobot scales them. The policy's language model
is transformers' SmolVLM with tiny sizes: these stand in place of the published ones, which LeRobot reads from the hub.

Losses, gradients and chunks are computed in float64, also where LeRobot and transformers widen to float32;
`recorded.json` says how far from them the same modules are in float32, and holds names and shapes of all tensors at the
published sizes.
"""

import importlib.metadata
import json
import types
from pathlib import Path
from unittest import mock

import numpy as np
import tokenizers
import torch
import transformers
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.common.vla_utils import resize_with_pad
from lerobot.policies.smolvla import modeling_smolvla, smolvlm_with_expert
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.processor_smolvla import make_smolvla_pre_post_processors
from lerobot.processor import tokenizer_processor

FOLDER = Path(__file__).resolve().parent / "lerobot_smolvla"
CAMERAS, SEEN, IMAGE = ("camera1", "camera2", "camera3"), ("camera1", "camera2"), 16
STATE_DIM, ACTION_DIM, PADDED_DIM, HORIZON, BATCH, TOKENS = 4, 3, 6, 5, 3, 8
TEXT = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}
VOCAB, LAYERS, USED_LAYERS, SHUFFLE, MULTIPLIER = 64, 5, 4, 2, 0.5
# Gradients' norms that are less are compared with this: some are zero.
LEAST = 1e-3
TEXTS = ("pick up the red block", "open the drawer\n", "Put  the_spoon on the towel, then the pot into the sink")
# SmolVLM2-500M-Video-Instruct's config.json.
PUBLISHED_TEXT = {"hidden_size": 960, "intermediate_size": 2560, "num_attention_heads": 15, "num_key_value_heads": 5}
PUBLISHED_TEXT |= {"head_dim": 64, "num_hidden_layers": 32, "vocab_size": 49280}
PUBLISHED_VISION = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
PUBLISHED_VISION |= {"patch_size": 16, "image_size": 512}


def vlm_config(text: dict, vision: dict, scale_factor: int) -> transformers.SmolVLMConfig:
    return transformers.SmolVLMConfig(
        text_config={"model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, **text},
        vision_config=vision,
        scale_factor=scale_factor,
        tie_word_embeddings=False,
        image_token_id=3,
        pad_token_id=0,
    )


def build(vlm: transformers.SmolVLMConfig, config: SmolVLAConfig) -> modeling_smolvla.SmolVLAPolicy:
    words = types.SimpleNamespace(fake_image_token_id=1, global_image_token_id=2)
    with (
        mock.patch.object(smolvlm_with_expert.AutoConfig, "from_pretrained", lambda _: vlm),
        mock.patch.object(
            smolvlm_with_expert.AutoProcessor, "from_pretrained", lambda _: types.SimpleNamespace(tokenizer=words)
        ),
    ):
        return modeling_smolvla.SmolVLAPolicy(config)


def features(image: int, state_dim: int, action_dim: int) -> dict:
    visual = {f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, image, image)) for name in CAMERAS}
    return {
        "input_features": visual | {"observation.state": PolicyFeature(FeatureType.STATE, (state_dim,))},
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (action_dim,))},
    }


def tiny() -> modeling_smolvla.SmolVLAPolicy:
    config = SmolVLAConfig(
        device="cpu",
        chunk_size=HORIZON,
        n_action_steps=HORIZON,
        max_state_dim=PADDED_DIM,
        max_action_dim=PADDED_DIM,
        resize_imgs_with_padding=(IMAGE, IMAGE),
        tokenizer_max_length=TOKENS,
        num_vlm_layers=USED_LAYERS,
        expert_width_multiplier=MULTIPLIER,
        **features(IMAGE, STATE_DIM, ACTION_DIM),
    )
    text = {**TEXT, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    policy = build(vlm_config(text, {**VISION, "image_size": IMAGE}, SHUFFLE), config)
    draw(policy)
    for parameter in policy.parameters():
        parameter.requires_grad = True
    return policy


def published() -> dict[str, list[int]]:
    """Names and shapes of all tensors at the published sizes; none of them is made."""
    with torch.device("meta"):
        policy = build(
            vlm_config(PUBLISHED_TEXT, PUBLISHED_VISION, 4), SmolVLAConfig(device="cpu", **features(512, 6, 6))
        )
    return {name: list(tensor.shape) for name, tensor in policy.state_dict().items()}


def draw(policy: torch.nn.Module) -> None:
    """Draw all parameters anew, none of them zero or one."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in policy.state_dict().items():
            values = torch.randn(tensor.shape, generator=generator)
            if "norm" in name and name.endswith("weight"):
                values = 1 + 0.2 * values
            elif "embed" in name:
                values = values * 0.3
            else:
                values = values * (0.1 if tensor.ndim == 1 else tensor[0].numel() ** -0.5)
            tensor.copy_(values.bfloat16())  # so that files of either type hold the same numbers


def small_tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = tokenizers.Tokenizer(tokenizers.models.BPE())
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<pad>", "<fake>", "<global>", "<image>"]
    )
    words.train_from_iterator([*TEXTS, "pick up the pot\n"], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")


def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    real = np.array([[HORIZON], [HORIZON - 2], [1]])
    masks = {name: np.ones(BATCH, bool) for name in SEEN}
    masks["camera2"][1] = False
    length = np.array([[TOKENS], [3], [5]])
    return {
        **{f"in/image/{name}": rng.integers(0, 256, (BATCH, IMAGE, IMAGE, 3), np.uint8) for name in SEEN},
        **{f"in/image_mask/{name}": mask for name, mask in masks.items()},
        "in/state": rng.normal(size=(BATCH, STATE_DIM)).astype(np.float32),
        "in/tokens": rng.integers(0, VOCAB, (BATCH, TOKENS)),
        "in/token_mask": np.arange(TOKENS)[None] < length,
        "in/actions": rng.normal(size=(BATCH, HORIZON, ACTION_DIM)).astype(np.float32),
        "in/action_mask": np.arange(HORIZON)[None] < real,
        "in/noise": rng.normal(size=(BATCH, HORIZON, PADDED_DIM)).astype(np.float32),
        "in/time": np.array([0.25, 0.96, 0.013], np.float32),
    }


def stats() -> dict[str, dict[str, np.ndarray]]:
    rng, found = np.random.default_rng(9), {}
    for key, dims in (("observation.state", STATE_DIM), ("action", ACTION_DIM)):
        low = rng.uniform(-2, -1, dims)
        found[key] = {"mean": rng.normal(size=dims), "std": rng.uniform(0.5, 2, dims), "min": low, "max": low + 5}
    return found


def wide(value: torch.Tensor) -> torch.Tensor:
    return value.double() if value.is_floating_point() else value


def outputs(policy: modeling_smolvla.SmolVLAPolicy, batch: dict, noise: torch.Tensor, time: torch.Tensor) -> dict:
    """Loss, gradients' norms, and the chunk of ten denoising steps. What no loss depends on has no gradient."""
    policy.train()
    policy.zero_grad()
    loss, _ = policy.forward(dict(batch), noise=noise, time=time)
    loss.backward()
    found = {"out/loss": loss.detach().numpy()}
    found |= {
        f"grad/{name}": np.zeros(()) if parameter.grad is None else parameter.grad.norm().numpy()
        for name, parameter in policy.named_parameters()
    }
    found["out/chunk"] = policy.predict_action_chunk(dict(batch), noise=noise).numpy()
    return {name: np.array(value, np.float64) for name, value in found.items()}


def scaled_images() -> dict[str, np.ndarray]:
    rng, found = np.random.default_rng(7), {}
    for name, shape in {
        "wide": (9, 20, 3),
        "high": (31, 13, 3),
        "small": (5, 7, 3),
        "square": (IMAGE, IMAGE, 3),
    }.items():
        image = rng.integers(0, 256, shape, np.uint8)
        given = torch.tensor(image).permute(2, 0, 1)[None].float() / 255
        found[f"scale/in/{name}"] = image
        found[f"scale/out/{name}"] = resize_with_pad(given, IMAGE, IMAGE, pad_value=0)[0].permute(1, 2, 0).numpy()
    return found


def main() -> None:
    policy = tiny()
    policy.save_pretrained(FOLDER)
    words = small_tokenizer()
    words.save_pretrained(FOLDER / "tokenizer")
    with mock.patch.object(tokenizer_processor.AutoTokenizer, "from_pretrained", lambda _: words):
        before, after = make_smolvla_pre_post_processors(policy.config, stats())
        before.save_pretrained(FOLDER)
        after.save_pretrained(FOLDER)
    arrays = inputs()
    # What the processors make of raw rows.
    raw = {f"observation.images.{name}": torch.tensor(arrays[f"in/image/{name}"]) for name in SEEN}
    raw = {name: image.permute(0, 3, 1, 2).float() / 255 for name, image in raw.items()}
    raw |= {"observation.state": torch.tensor(arrays["in/state"]), "action": torch.tensor(arrays["in/actions"])}
    normal = before({**raw, "task": list(TEXTS)})
    arrays |= {"norm/state": normal["observation.state"].numpy(), "norm/actions": normal["action"].numpy()}
    arrays["norm/back"] = after(normal["action"][:, 0]).numpy()
    arrays["text/tokens"] = normal["observation.language.tokens"].numpy()
    arrays["text/mask"] = normal["observation.language.attention_mask"].numpy()
    arrays |= scaled_images()
    # The network sees rows that are normalised already.
    batch = dict(raw)
    batch |= {f"observation.images.{name}_padding_mask": torch.tensor(arrays[f"in/image_mask/{name}"]) for name in SEEN}
    batch["observation.language.tokens"] = torch.tensor(arrays["in/tokens"])
    batch["observation.language.attention_mask"] = torch.tensor(arrays["in/token_mask"])
    batch["action_is_pad"] = ~torch.tensor(arrays["in/action_mask"])
    noise, time = torch.tensor(arrays["in/noise"]), torch.tensor(arrays["in/time"])
    rounded = outputs(policy, batch, noise, time)
    with mock.patch.object(torch, "float32", torch.float64):
        widened = {name: wide(value) for name, value in batch.items()}
        exact = outputs(policy.double(), widened, noise.double(), time.double())
    arrays |= exact
    apart = {
        name: float(np.abs(rounded[name] - value).max() / max(np.abs(value).max(), LEAST))
        for name, value in exact.items()
    }
    float32 = {name: apart[name] for name in ("out/loss", "out/chunk")}
    float32["grad"] = max(value for name, value in apart.items() if name.startswith("grad/"))
    np.savez_compressed(FOLDER / "io.npz", **arrays)
    packages = ("lerobot", "torch", "transformers", "tokenizers", "safetensors")
    versions = {package: importlib.metadata.version(package) for package in packages}
    sizes = {"text": TEXT, "vision": VISION, "vocab": VOCAB, "layers": USED_LAYERS, "shuffle": SHUFFLE, "image": IMAGE}
    sizes |= {"multiplier": MULTIPLIER, "padded_dim": PADDED_DIM, "horizon": HORIZON, "tokens": TOKENS, "least": LEAST}
    record = {"type": "smolvla", "versions": versions, "sizes": sizes, "seen": SEEN, "texts": TEXTS, "float32": float32}
    (FOLDER / "recorded.json").write_text(json.dumps(record, indent=1) + "\n")
    (FOLDER / "published.json").write_text(json.dumps(published(), indent=0) + "\n")


if __name__ == "__main__":
    main()
