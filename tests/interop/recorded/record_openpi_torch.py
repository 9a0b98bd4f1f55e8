"""Records openpi's PyTorch pi0 and pi0.5: tiny random weights in its own file, and what its module computes with them.

Run where `openpi` is installed as its README says for PyTorch (transformers 4.53.2 with its replacements); the tests
do not need it. Sizes, inputs and weights are made as in `record_lerobot.py`, which says more.
"""

import importlib.metadata
import json
from types import SimpleNamespace

import numpy as np
import openpi.models_pytorch.gemma_pytorch as gemma
import openpi.models_pytorch.pi0_pytorch as pi0
import safetensors.torch
import torch
from record_lerobot import ACTION, ACTION_DIM, HERE, HORIZON, LANGUAGE, SIZES, draw, inputs, prefix_of, small_configs


def build(name: str) -> torch.nn.Module:
    gemma.CONFIG_MAPPING = small_configs()
    pi0._gemma = SimpleNamespace(
        get_config={"gemma_2b": SimpleNamespace(**LANGUAGE), "gemma_300m": SimpleNamespace(**ACTION)}.get
    )
    config = SimpleNamespace(
        pi05=name == "pi05",
        paligemma_variant="gemma_2b",
        action_expert_variant="gemma_300m",
        dtype="float32",
        action_dim=ACTION_DIM,
        action_horizon=HORIZON,
        pytorch_compile_mode=None,
    )
    model = pi0.PI0Pytorch(config).eval()
    draw(model, f"openpi {name}")
    return model


def main() -> None:
    for name in ("pi0", "pi05"):
        folder = HERE / f"openpi_torch_{name}"
        folder.mkdir(exist_ok=True)
        model, arrays = build(name), inputs()
        safetensors.torch.save_model(model, str(folder / "model.safetensors"))
        given = {key: torch.from_numpy(value) for key, value in arrays.items()}
        # Its preprocessing resizes to 224 pixels and draws augmentations: neither is looked at here.
        model._preprocess_observation = lambda observation, train: observation
        with torch.no_grad():
            observation = (*prefix_of(given), given["in/state"])
            loss = model.forward(observation, given["in/actions"], given["in/noise"], given["in/time"])
            model._preprocess_observation = lambda observation, train: observation.all
            asked = SimpleNamespace(state=given["in/state"], all=observation)
            sampled = model.sample_actions(torch.device("cpu"), asked, noise=given["in/noise"].clone(), num_steps=4)
        arrays |= {"out/loss": loss.numpy(), "out/sample_actions_4": sampled.numpy()}
        np.savez_compressed(folder / "io.npz", **arrays)
        versions = {
            package: importlib.metadata.version(package) for package in ("torch", "transformers", "safetensors")
        }
        record = {"type": name, "versions": {"openpi": "15a9616", **versions}, "sizes": SIZES}
        (folder / "recorded.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
