"""Published language models with at most 1.2 billion parameters: the sizes of each, and its address on the hub.

The sizes are those of the models' config.json files, which `tests/test_text_experiments.py` holds. Llama and Gemma are
gated: ask for access on their pages, then log in with `hf auth login`. Read next: `gsm8k_runs.py`.
"""

from openpi_train.models.language import LanguageConfig
from openpi_train.nn.decoder_sizes import DecoderSizes

SMOLLM2_135M = LanguageConfig(
    family="llama",
    sizes=DecoderSizes(
        vocab_size=49_152,
        width=576,
        depth=30,
        mlp_dim=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        norm_eps=1e-5,
        rope_base=100_000.0,
    ),
    context_length=8192,
)

QWEN25_05B = LanguageConfig(
    family="qwen2",
    sizes=DecoderSizes(
        vocab_size=151_936,
        width=896,
        depth=24,
        mlp_dim=4864,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        biases=True,
        rope_base=1_000_000.0,
    ),
    context_length=32_768,
)

LLAMA32_1B = LanguageConfig(
    family="llama",
    sizes=DecoderSizes(
        vocab_size=128_256,
        width=2048,
        depth=16,
        mlp_dim=8192,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        norm_eps=1e-5,
        rope_base=500_000.0,
        rope_factor=32.0,
        rope_original_length=8192,
    ),
    context_length=131_072,
)

GEMMA3_1B = LanguageConfig(
    family="gemma3_text",
    sizes=DecoderSizes(
        vocab_size=262_144,
        width=1152,
        depth=26,
        mlp_dim=6912,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        activation="gelu",
        norms_from_one=True,
        post_norms=True,
        scaled_embeddings=True,
        query_key_norms=True,
        query_divisor=256.0,
        window=512,
        # Every sixth layer attends to all tokens.
        sliding_layers=tuple(layer for layer in range(26) if layer % 6 != 5),
        rope_base=1_000_000.0,
        sliding_rope_base=10_000.0,
    ),
    context_length=32_768,
)

# Each with the address of its weights and tokenizer.
MODELS = (
    (SMOLLM2_135M, "hub:HuggingFaceTB/SmolLM2-135M"),
    (QWEN25_05B, "hub:Qwen/Qwen2.5-0.5B"),
    (LLAMA32_1B, "hub:meta-llama/Llama-3.2-1B"),
    (GEMMA3_1B, "hub:google/gemma-3-1b-pt"),
)
