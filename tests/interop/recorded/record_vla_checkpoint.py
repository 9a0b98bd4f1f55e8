"""Records a checkpoint of the PaliGemma VLA's trainer: `python record_vla_checkpoint.py`, where transformers is.

`vla/best_model.pth` is what the trainer's `trainer_ddp.py` saves, of a model that has the modules of its `vla_model.py`
under their names: the PaliGemma in `../paligemma`, in bfloat16, around it small layers in place of resampler and head.
"""

import importlib.metadata
import json
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration

FOLDER = Path(__file__).resolve().parent / "vla"
BACKBONE = Path(__file__).resolve().parent.parent / "paligemma"


class OmegaConfAttrDict(dict):
    """The class of the trainer's config, which only its own program can import."""


def load_backbone() -> PaliGemmaForConditionalGeneration:
    """The PaliGemma in `../paligemma`; its tower's names differ between versions of transformers."""
    model = PaliGemmaForConditionalGeneration(PaliGemmaConfig.from_pretrained(BACKBONE))
    within = "vision_model." if any("vision_tower.vision_model." in name for name in model.state_dict()) else ""
    renamed = {"language_model.model.": "model.language_model.", "vision_tower.": f"model.vision_tower.{within}"}
    renamed["multi_modal_projector."] = "model.multi_modal_projector."
    tensors = {}
    for file in BACKBONE.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            prefix = next(prefix for prefix in renamed if name.startswith(prefix))
            tensors[renamed[prefix] + name.removeprefix(prefix)] = tensor
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"]
    model.load_state_dict(tensors)
    return model.to(torch.bfloat16)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    OmegaConfAttrDict.__module__ = "utils.config_utils"
    module = types.ModuleType("utils.config_utils")
    module.OmegaConfAttrDict = OmegaConfAttrDict
    sys.modules.update({"utils": types.ModuleType("utils"), "utils.config_utils": module})
    torch.manual_seed(0)
    model = nn.Module()
    model.device_param = nn.Parameter(torch.empty(0))
    model.paligemma_vlm = nn.Module()
    model.paligemma_vlm.paligemma_model = load_backbone()
    model.paligemma_vlm.vision_resampler = nn.Module()
    model.paligemma_vlm.vision_resampler.projector = nn.Linear(24, 32)
    model.action_head = nn.Linear(32, 7)
    optimizer = torch.optim.AdamW(model.action_head.parameters(), lr=2e-5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    model.action_head(torch.ones(1, 32)).sum().backward()
    optimizer.step()
    state = {
        "epoch": 3,
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "best_metric": 0.25,
        "lr_scheduler": scheduler.state_dict(),
        "config": OmegaConfAttrDict(data=OmegaConfAttrDict(batch_size=8)),
    }
    torch.save(state, FOLDER / "best_model.pth")
    versions = {package: importlib.metadata.version(package) for package in ("torch", "transformers")}
    (FOLDER / "recorded.json").write_text(json.dumps({"versions": versions}) + "\n")


if __name__ == "__main__":
    main()
