"""SFT steps of Llama-3.2-1B's size by torch and transformers on the local GPU, as set `llama` of `gpu_steps.py` takes.

Random weights in float32, products in bfloat16 (autocast), attention by torch's fused kernels, AdamW in its fused form,
gradients clipped, 16 rows of 768 tokens, each a target. Needs torch and transformers and nothing of this project:
`python benchmarks/gpu_language_peer.py [--compile] [--checkpointing]`.
"""

import argparse
import time

ROWS, LENGTH, VOCAB = 16, 768, 128_256
WARM_UP, SAMPLES, STEPS = 3, 5, 3


def main() -> None:
    """Print milliseconds per step, lowest to highest, and the most memory that torch held."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--compile", action="store_true", help="by torch.compile")
    parser.add_argument("--checkpointing", action="store_true", help="layers are computed again in the backward pass")
    flags = parser.parse_args()

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        max_position_embeddings=131_072,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        use_cache=False,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).train()
        tokens = torch.randint(3, VOCAB, (ROWS, LENGTH))
    if flags.checkpointing:
        model.gradient_checkpointing_enable()
    forward = torch.compile(model) if flags.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, fused=True)

    def steps(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = forward(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began) / count

    steps(WARM_UP)
    taken = sorted(steps(STEPS) for _ in range(SAMPLES))
    held = torch.cuda.max_memory_allocated() / 2**30
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {taken} ms, {held:.1f} GiB")


if __name__ == "__main__":
    main()
