"""Makes `reward/` and `adapters/` beside it with transformers and PEFT: `python make_adapters.py`, after `make.py`.

    pip install torch==2.13.0 transformers==5.23.0 safetensors==0.8.0 peft==0.21.2

`reward/` is a tiny reward model as `save_pretrained` writes it, with the scores of two texts in `io.npz`, one of which
is padded. `adapters/` has low-rank adapters as PEFT writes them, of models beside it, with the outputs of model and
adapter in `io.npz`. Every parameter is random.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import peft
import safetensors
import torch
import transformers
from make import LLAMA3, SIZES, TOKENS, VOCABULARY
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

HERE = Path(__file__).parent
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# Of each adapter the folder of its base model, and its settings.
ADAPTERS = {
    "everything": ("qwen2", {"r": 3, "lora_alpha": 5, "target_modules": LINEAR}),
    # PEFT's own choice for Llama, in its other scale.
    "two_weights": ("llama", {"r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "v_proj"], "use_rslora": True}),
    "one_layer": ("gemma3", {"r": 2, "target_modules": ["gate_proj", "down_proj", "o_proj"], "layers_to_transform": 1}),
    "score": ("reward", {"r": 2, "lora_alpha": 4, "target_modules": LINEAR, "modules_to_save": ["score"]}),
}


def draw(parameters, seed: int) -> None:
    """Every parameter random, and a number of bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in parameters:
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 8
            noise = torch.randn(parameter.shape, generator=generator) * fan_in**-0.5
            parameter.copy_((parameter + noise if "norm" in name else 3 * noise).bfloat16().float())


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows of tokens, and where they are: the second ends early."""
    tokens = torch.from_numpy(np.random.default_rng(0).integers(3, VOCABULARY, (2, TOKENS)))
    lengths = torch.tensor([TOKENS, TOKENS - 4])
    is_token = torch.arange(TOKENS) < lengths[:, None]
    return torch.where(is_token, tokens, 0), is_token


def outputs(model, tokens, is_token) -> np.ndarray:
    with torch.no_grad():
        return model(tokens, attention_mask=is_token.long()).logits.float().numpy()


def main() -> None:
    tokens, is_token = texts()
    told = {"tokens": tokens.int().numpy(), "is_token": is_token.numpy()}
    folder = HERE / "reward"
    shutil.rmtree(folder, ignore_errors=True)
    config = LlamaConfig(**SIZES, head_dim=8, rms_norm_eps=1e-5, rope_parameters=LLAMA3, num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager", dtype=torch.float32)
    draw(model.named_parameters(), 1)
    scores = outputs(model.eval(), tokens, is_token)
    model.to(torch.bfloat16).save_pretrained(folder)
    np.savez_compressed(folder / "io.npz", **told, float32=scores)
    shutil.rmtree(HERE / "adapters", ignore_errors=True)
    for name, (base, settings) in ADAPTERS.items():
        kind = AutoModelForSequenceClassification if base == "reward" else AutoModelForCausalLM
        task = TaskType.SEQ_CLS if base == "reward" else TaskType.CAUSAL_LM
        model = kind.from_pretrained(HERE / base, attn_implementation="eager", dtype=torch.float32)
        adapted = get_peft_model(model, LoraConfig(task_type=task, **settings))
        draw(((path, leaf) for path, leaf in adapted.named_parameters() if leaf.requires_grad), 2)
        adapted.peft_config["default"].base_model_name_or_path = base
        adapted.eval().save_pretrained(HERE / "adapters" / name)
        (HERE / "adapters" / name / "README.md").unlink(missing_ok=True)
        np.savez_compressed(HERE / "adapters" / name / "io.npz", **told, float32=outputs(adapted, tokens, is_token))
    versions = {module.__name__: module.__version__ for module in (torch, transformers, safetensors, peft, np)}
    (HERE / "adapters" / "made_with.json").write_text(json.dumps({"versions": versions}, indent=1) + "\n")


if __name__ == "__main__":
    main()
