"""A tiny pi0 and its checkpoint in openpi's form, made once, for tests that convert it or spoil a copy of it."""

import dataclasses
from pathlib import Path

import numpy as np
from openpi_train_configs.debug import debug

from openpi_train.interop import openpi
from openpi_train.interop.stored_leaves import Stored, in_memory
from openpi_train.models.pi0 import Pi0Config
from openpi_train.nn.gemma_sizes import GemmaOverrides
from openpi_train.nn.siglip import SiglipConfig

EXPERT = GemmaOverrides(width=8, depth=1, mlp_dim=8, num_heads=2, num_kv_heads=1, head_dim=4)
LORA = dataclasses.replace(EXPERT, lora_attention_rank=2, lora_mlp_rank=2)
TINY = dataclasses.replace(
    debug,
    name="debug",
    exp_name="convert",
    model=Pi0Config(
        paligemma_variant="dummy",
        action_expert_variant="dummy",
        language=EXPERT,
        action_expert=EXPERT,
        siglip=SiglipConfig(width=8, depth=1, mlp_dim=8, num_heads=2, patch_size=16),
        image_size=32,
        action_dim=7,
        action_horizon=4,
        max_token_len=8,
        vocab_size=32,
        dtype="float32",
        remat="none",
    ),
)
WIDTH = 7
STATS = {
    "norm_stats": {name: dict.fromkeys(("mean", "std", "q01", "q99"), [1.0] * WIDTH) for name in ("state", "actions")}
}


def tiny(**model):
    """The experiment with these fields of its model changed."""
    return dataclasses.replace(TINY, model=dataclasses.replace(TINY.model, **model))


def made_up(experiment=TINY, seed: int = 0) -> dict[str, np.ndarray]:
    """Random parameters by published name."""
    random, names = np.random.default_rng(seed), openpi.parameter_names(experiment.model)
    shapes = openpi.parameter_shapes(experiment.model)
    return {names[path]: random.normal(size=shape).astype(np.float32) / 4 for path, shape in shapes.items()}


def as_stored(params, **fields) -> Stored:
    """Arrays of this host as an opened checkpoint."""
    leaves = {name: in_memory(value) for name, value in params.items()}
    return Stored(where="memory", format="openpi", params=leaves, norm_stats={"robot": STATS}, **fields)


def training_state(params, optimizer_of=None) -> dict[str, np.ndarray]:
    """What openpi's trainer would save beside an average of `params`, values made up."""
    trained = {name: value for name, value in params.items() if optimizer_of is None or optimizer_of(name)}
    moments = {
        f"opt_state/1/0/{kind}/{name}": np.square(value) + at
        for at, kind in enumerate(("mu", "nu"))
        for name, value in trained.items()
    }
    counts = {name: np.asarray(5, np.int32) for name in ("step", "opt_state/1/0/count", "opt_state/1/2/count")}
    return {**counts, **moments, **{f"params/{name}": value + 1 for name, value in params.items()}}


def write(directory: Path, params, **fields) -> Path:
    """A checkpoint of these parameters in openpi's form."""
    openpi.write(directory, as_stored(params, **fields))
    return directory
