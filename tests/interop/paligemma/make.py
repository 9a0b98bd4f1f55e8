"""Makes the numbers in this folder with `transformers` and torch: `python make.py`, in an environment of its own.

    pip install torch==2.13.0 transformers==5.23.0 safetensors==0.8.0

A PaliGemma of tiny sizes, every parameter random, written by `save_pretrained` in shards; what it gives for two rows,
one with padding; a prefix alone, and a prefix with a suffix of which every token sees only those before it.
"""

import json
from pathlib import Path

import numpy as np
import safetensors
import torch
import transformers
from transformers import GemmaConfig, PaliGemmaConfig, PaliGemmaForConditionalGeneration, SiglipVisionConfig

HERE = Path(__file__).parent
IMAGE, PATCH, PROMPT, SUFFIX = 32, 8, 6, 5
SIZES = {
    "language": {"width": 32, "depth": 3, "mlp_dim": 48, "num_heads": 4, "num_kv_heads": 1, "head_dim": 8},
    "siglip": {"width": 24, "depth": 2, "mlp_dim": 40, "num_heads": 3, "patch_size": PATCH},
    "image_size": IMAGE,
    "vocab_size": 64,
}
IMAGE_TOKEN = 60


def build() -> PaliGemmaForConditionalGeneration:
    text, tower = SIZES["language"], SIZES["siglip"]
    config = PaliGemmaConfig(
        text_config=GemmaConfig(
            hidden_size=text["width"],
            num_hidden_layers=text["depth"],
            intermediate_size=text["mlp_dim"],
            num_attention_heads=text["num_heads"],
            num_key_value_heads=text["num_kv_heads"],
            head_dim=text["head_dim"],
            vocab_size=SIZES["vocab_size"],
        ),
        vision_config=SiglipVisionConfig(
            hidden_size=tower["width"],
            num_hidden_layers=tower["depth"],
            intermediate_size=tower["mlp_dim"],
            num_attention_heads=tower["num_heads"],
            patch_size=PATCH,
            image_size=IMAGE,
            vision_use_head=False,
        ),
        projection_dim=text["width"],
        hidden_size=text["width"],
        image_token_index=IMAGE_TOKEN,
        vocab_size=SIZES["vocab_size"],
    )
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = PaliGemmaForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 4
            noise = torch.randn(parameter.shape, generator=generator) * fan_in**-0.5
            parameter.copy_(parameter + noise if "norm" in name else noise)
    return model


def main() -> None:
    model = build()
    model.save_pretrained(HERE, max_shard_size="60KB")
    generator = np.random.default_rng(0)
    patches = (IMAGE // PATCH) ** 2
    images = generator.integers(0, 256, (2, IMAGE, IMAGE, 3), np.uint8)
    text = generator.integers(3, IMAGE_TOKEN, (2, PROMPT + SUFFIX))
    pixels = torch.from_numpy((images / np.float32(255) * 2 - 1).transpose(0, 3, 1, 2)).float()
    tokens = torch.from_numpy(np.concatenate([np.full((2, patches), IMAGE_TOKEN), text], axis=1))
    valid = torch.ones_like(tokens)
    prefix = slice(None, patches + PROMPT)
    lengths = np.array([PROMPT, PROMPT - 2])
    valid[1, patches + PROMPT - 2 : patches + PROMPT] = 0
    kinds = torch.zeros_like(tokens)
    kinds[:, patches + PROMPT :] = 1

    def run(model: PaliGemmaForConditionalGeneration, dtype: torch.dtype) -> dict[str, np.ndarray]:
        model, given = model.to(dtype), pixels.to(dtype)
        with torch.no_grad():
            alone = model(
                input_ids=tokens[:, prefix],
                pixel_values=given,
                attention_mask=valid[:, prefix],
                token_type_ids=kinds[:, prefix],
                output_hidden_states=True,
            )
            # No row of the second run has padding: positions run over padding here, and not in big_vision.
            both = model(
                input_ids=tokens, pixel_values=given, attention_mask=torch.ones_like(valid), token_type_ids=kinds
            )
        outputs = {
            "image_tokens": alone.image_hidden_states,
            "activations": alone.hidden_states[-1],
            "logits": alone.logits,
            "logits_with_suffix": both.logits,
        }
        return {name: value.float().numpy() for name, value in outputs.items()}

    found = {f"float32/{name}": value for name, value in run(model, torch.float32).items()}
    found |= {f"bfloat16/{name}": value.astype(np.float32) for name, value in run(model, torch.bfloat16).items()}
    np.savez_compressed(HERE / "io.npz", images=images, text=text.astype(np.int32), lengths=lengths, **found)
    versions = {module.__name__: module.__version__ for module in (torch, transformers, safetensors, np)}
    (HERE / "made_with.json").write_text(json.dumps({"versions": versions, "sizes": SIZES}, indent=1) + "\n")


if __name__ == "__main__":
    main()
