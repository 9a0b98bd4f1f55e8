"""A case of openpi's reference numbers as our config, parameters and inputs. Every size is read from `meta.json`."""

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from openpi_train.interop.openpi import parameter_shapes
from openpi_train.models.pi0 import Pi0Config
from openpi_train.models.pi0_fast import Pi0FastConfig
from openpi_train.nn.gemma_sizes import VARIANTS, GemmaOverrides
from openpi_train.nn.params import merge_module
from openpi_train.nn.siglip import SiglipConfig
from openpi_train.types import TOKEN_MASKS, Observation

# As in `conftest.py`, which cannot be imported by name: there are several.
GOLDEN = Path(os.environ.get("OPENPI_TRAIN_GOLDEN", Path(__file__).resolve().parents[2] / "shared" / "golden"))


def read_meta() -> dict[str, Any]:
    """The golden folder's `meta.json`, or an empty one where there is no such folder."""
    path = GOLDEN / "meta.json"
    return json.loads(path.read_text()) if path.is_file() else {"cases": {}}


def flow_cases() -> list[str]:
    """Names of the pi0 and pi0.5 cases: those whose config says which of the two it is."""
    return [name for name, case in read_meta()["cases"].items() if "pi05" in case["config"]]


def token_cases() -> list[str]:
    """Names of the pi0-FAST cases."""
    return [name for name in read_meta()["cases"] if name.startswith("pi0_fast")]


def read_npz(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


def gemma_sizes(meta: dict[str, Any], variant: str, lora: dict[str, Any] | None) -> GemmaOverrides:
    """The sizes that the generator gave a variant's name; a name it did not define is one of openpi's own."""
    base, _, adapters = variant.partition("_lora")
    sizes = dict(meta[f"gemma_{base}"]) if f"gemma_{base}" in meta else dataclasses.asdict(VARIANTS[variant])
    sizes.pop("lora", None)
    if adapters and lora:
        entry = next(value for name, value in lora.items() if name.startswith(variant))
        attention = entry["attn"]
        sizes |= {"lora_attention_rank": attention["rank"], "lora_mlp_rank": entry["ffn"]["rank"]}
        sizes |= {"lora_alpha": attention["alpha"], "lora_rslora": attention.get("rslora", False)}
    return GemmaOverrides(**sizes)


def golden_config(meta: dict[str, Any], case: dict[str, Any], **changes: Any) -> Pi0Config | Pi0FastConfig:
    fields = {name: value for name, value in case["config"].items() if not name.endswith("_variant")}
    tower = {name: meta["vit"][name] for name in ("width", "depth", "mlp_dim", "num_heads")}
    patch, _ = meta["vit"]["patch_size"]
    sizes = {
        "language": gemma_sizes(meta, case["config"]["paligemma_variant"], case.get("lora")),
        "siglip": SiglipConfig(patch_size=patch, **tower),
        "vocab_size": meta["vocab"],
        "image_size": meta["vit"]["image"][0],
        "remat": "none",
    }
    if "pi05" not in fields:
        return Pi0FastConfig(**{**fields, **sizes, "camera_slots": tuple(case["images"]), **changes})
    action_expert = gemma_sizes(meta, case["config"]["action_expert_variant"], case.get("lora"))
    return Pi0Config(**{**fields, **sizes, "action_expert": action_expert, **changes})


@dataclasses.dataclass(frozen=True)
class GoldenCase:
    """`io` holds the recorded inputs and outputs, `params` openpi's parameters under our paths."""

    name: str
    meta: dict[str, Any]
    config: Any
    graphdef: nnx.GraphDef
    params: dict[str, jnp.ndarray]
    observation: Observation
    io: dict[str, np.ndarray]

    @property
    def bfloat16(self) -> bool:
        return self.config.dtype == "bfloat16"

    def model(self, params: Any = None) -> Any:
        return merge_module(self.graphdef, self.params if params is None else params)

    def float32_twin(self) -> str | None:
        """The case with the same parameters and inputs in float32, if there is one."""
        same = [
            name
            for name, case in read_meta()["cases"].items()
            if case["params_file"] == self.meta["params_file"] and case["config"]["dtype"] == "float32"
        ]
        return same[0] if same else None


@functools.cache
def load_case(name: str) -> GoldenCase:
    meta = read_meta()
    case = meta["cases"][name]
    config = golden_config(meta, case)
    module = nnx.eval_shape(lambda: config.build(nnx.Rngs(0)))
    stored = read_npz(GOLDEN / case["params_file"])
    io = read_npz(GOLDEN / f"{name}_io.npz")
    images = read_npz(GOLDEN / "images.npz")
    observation = Observation(
        images={slot: jnp.asarray(images[camera]) for slot, camera in case["images"].items()},
        image_masks={slot: jnp.asarray(io[f"in/image_mask/{slot}"]) for slot in case["images"]},
        state=jnp.asarray(io["in/state"]),
        prompt_tokens=jnp.asarray(io["in/tokenized_prompt"]),
        prompt_mask=jnp.asarray(io["in/tokenized_prompt_mask"]),
        **{name: jnp.asarray(io[f"in/{name}"], bool) for name in TOKEN_MASKS if f"in/{name}" in io},
    )
    names = {path: config.public_name(path) for path in parameter_shapes(config)}
    assert sorted(names.values()) == sorted(stored), "the case's parameters are not this model's"
    return GoldenCase(
        name=name,
        meta=case,
        config=config,
        graphdef=nnx.split(module)[0],
        params={path: jnp.asarray(stored[public]) for path, public in names.items()},
        observation=observation,
        io=io,
    )
