"""A tiny language model in Hugging Face's form, with a tokenizer and a chat template."""

from pathlib import Path

import chats
import numpy as np
from flax import nnx

from openpi_train.interop.openpi import parameter_names
from openpi_train.interop.stored_leaves import Stored, in_memory
from openpi_train.models.language import LanguageConfig, huggingface
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.parallel.params import module_params

MODEL = LanguageConfig(
    sizes=DecoderSizes(
        vocab_size=400, width=16, depth=2, mlp_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, tied=False
    ),
    context_length=256,
    dtype="float32",
)


def write_model(folder: Path, config: LanguageConfig = MODEL, seed: int = 0, **files: object) -> Path:
    """A folder with the config's model, whose parameters are large enough that tokens differ in probability."""
    params = module_params(config.build(nnx.Rngs(seed)))
    names = parameter_names(config)
    scaled = {path: leaf * 30 if path in ("token_embedding", "head") else leaf for path, leaf in params.items()}
    stored = Stored(
        where="memory",
        format="ours",
        params={names[path]: in_memory(np.asarray(leaf)) for path, leaf in scaled.items()},
    )
    huggingface.write(folder, stored, config)
    chats.write(folder, **({"template": chats.CHATML, "eos_token": "<|im_end|>"} | files))
    return folder
