"""Makes the folders beside it with `transformers` and torch: `python make.py`, in an environment of its own.

    pip install torch==2.13.0 transformers==5.23.0 safetensors==0.8.0

A language model of tiny sizes of each family, every parameter random and kept in bfloat16, written by
`save_pretrained` (Llama's in shards). In `io.npz`: two rows of tokens, longer than any window; the scores in float32
and in bfloat16; of Gemma 3 also the mean cross entropy of some of its tokens and the gradient.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import safetensors
import torch
import transformers
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
TOKENS, VOCABULARY, WINDOW = 12, 32, 5
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
LOCAL_AND_GLOBAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e3},
}
KINDS = ["sliding_attention", "full_attention"]
CASES = {
    "gemma": ("GemmaConfig", {"head_dim": 8}),
    "gemma2": ("Gemma2Config", {
        "head_dim": 8, "sliding_window": WINDOW, "layer_types": KINDS, "query_pre_attn_scalar": 11,
        "attn_logit_softcapping": 4.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3TextConfig", {
        "head_dim": 8, "sliding_window": WINDOW, "layer_types": KINDS, "query_pre_attn_scalar": 11,
        "rope_parameters": LOCAL_AND_GLOBAL}),
    "llama": ("LlamaConfig", {"head_dim": 8, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
                              "rope_parameters": LLAMA3}),
    "smollm2": ("LlamaConfig", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5,
                                "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True,
                              "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": ("Qwen3Config", {"head_dim": 8, "tie_word_embeddings": False,
                              "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "mistral": ("MistralConfig", {"head_dim": 8, "sliding_window": WINDOW, "tie_word_embeddings": False,
                                  "rms_norm_eps": 1e-5}),
}  # fmt: skip


def build(kind: str, given: dict):
    """The model, its parameters drawn in float32 and rounded to bfloat16."""
    config = getattr(transformers, kind)(**SIZES, **given)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 8
            noise = torch.randn(parameter.shape, generator=generator) * fan_in**-0.5
            # Tables are drawn larger than they are trained to be, so that the scores are of some size.
            noise = noise * 4 if "embed_tokens" in name or "lm_head" in name else noise
            drawn = parameter + noise if "norm" in name else noise
            parameter.copy_(drawn.bfloat16().float())
    return model


def main() -> None:
    for name, (kind, given) in CASES.items():
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model = build(kind, given)
        tokens = torch.from_numpy(np.random.default_rng(0).integers(3, VOCABULARY, (2, TOKENS)))
        with torch.no_grad():
            found = {"tokens": tokens.int().numpy(), "float32": model(tokens).logits.numpy()}
        if name == "gemma3":
            # Ragged: six targets of the first row, three of the second.
            labels = torch.full_like(tokens, -100)
            labels[0, 6:], labels[1, 4:7] = tokens[0, 6:], tokens[1, 4:7]
            loss = torch.nn.functional.cross_entropy(
                model(tokens).logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1), ignore_index=-100
            )
            loss.backward()
            found |= {"labels": labels.int().numpy(), "loss": loss.detach().numpy()}
            found |= {f"gradient/{path}": leaf.grad.numpy() for path, leaf in model.named_parameters()}
        model = model.to(torch.bfloat16)
        with torch.no_grad():
            found["bfloat16"] = model(tokens).logits.float().numpy()
        model.save_pretrained(folder, max_shard_size="5KB" if name == "llama" else "50GB")
        np.savez_compressed(folder / "io.npz", **found)
    versions = {module.__name__: module.__version__ for module in (torch, transformers, safetensors, np)}
    (HERE / "made_with.json").write_text(json.dumps({"versions": versions}, indent=1) + "\n")


if __name__ == "__main__":
    main()
