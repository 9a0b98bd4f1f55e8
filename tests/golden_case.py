"""A case of openpi's reference numbers as our config, parameters and inputs. Every size is read from `meta.json`."""

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from openpi_train.interop.openpi import parameter_shapes
from openpi_train.models.pi0 import Pi0Config
from openpi_train.models.pi0_fast import Pi0FastConfig
from openpi_train.nn.gemma_sizes import VARIANTS, GemmaOverrides
from openpi_train.nn.siglip import SiglipConfig
from openpi_train.objectives.flow_matching import FlowMatching
from openpi_train.parallel.params import merge_module
from openpi_train.types import TOKEN_MASKS, ActionBatch, Observation

# As in `conftest.py`, which cannot be imported by name: there are several.
GOLDEN = Path(os.environ.get("OPENPI_TRAIN_GOLDEN", Path(__file__).resolve().parents[2] / "shared" / "golden"))

# The golden README's: openpi against itself in two programs differs by about 1e-6.
FLOAT32 = {"rtol": 1e-4, "atol": 1e-5}


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedFlow(FlowMatching):
    """Flow matching whose draws are the recorded ones, row by row and the same in every step; all else is its own."""

    noise: np.ndarray
    time: np.ndarray

    def draw(self, batch, keys):
        return jnp.asarray(self.noise)[batch.row][:, None], jnp.asarray(self.time)[batch.row][:, None]


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
    def batch(self) -> ActionBatch:
        """The recorded rows, all of whose steps and dims count; actions of zero where none are recorded."""
        rows, horizon, dims = len(self.observation.state), self.config.action_horizon, self.config.action_dim
        return ActionBatch(
            observation=self.observation,
            actions=jnp.asarray(self.io.get("in/actions", np.zeros((rows, horizon, dims), np.float32))),
            action_mask=jnp.ones((rows, horizon), bool),
            dim_mask=jnp.ones((rows, dims), bool),
            row=jnp.arange(rows, dtype=jnp.int32),
        )

    @property
    def objective(self) -> "RecordedFlow":
        """Flow matching at the recorded noise and times."""
        return RecordedFlow(augment=False, noise=self.io["in/noise"], time=self.io["in/time"])

    @property
    def bfloat16(self) -> bool:
        return self.config.dtype == "bfloat16"

    def model(self, params: Any = None) -> Any:
        return merge_module(self.graphdef, self.params if params is None else params)

    def float32_twin(self) -> "GoldenCase":
        """The case with the same parameters and inputs in float32."""
        same = [
            name
            for name, case in read_meta()["cases"].items()
            if case["params_file"] == self.meta["params_file"] and case["config"]["dtype"] == "float32"
        ]
        assert same, f"{self.name} has no case in float32 beside it: nothing says how far rounding takes it"
        return load_case(same[0])

    def noise(self, name: str, where: Any = ...) -> float:
        """Root mean square of what rounding to bfloat16 changed in openpi's own `name`, there."""
        return root_mean_square(self.io[name][where] - self.float32_twin().io[name][where])


def root_mean_square(values: Any) -> float:
    return float(np.sqrt(np.mean(np.square(np.asarray(values, np.float64)))))


def assert_same_prefix(case: GoldenCase, ours: Any, name: str) -> None:
    """The prefix's tokens are openpi's `out/<name>`: in bfloat16, rounded in the same places.

    A text token is rounded once, and equal. An image's goes through some forty roundings. Where all casts stand in the
    same places, a rounding falls differently only if float32 sums in another order lie on two sides of a tie, which is
    rare: most images are equal to the bit. Where it happens once, attention carries it to all tokens of the image, and
    the layers after it round other values: D**2, the squared distance of the two, is then .2 to .9 of E**2, how far
    openpi is from its float32 twin, and more the more layers follow. So D**2 / E**2 of a whole case tells how many
    images met a tie, and not where casts stand. Behind a cast that stands elsewhere no image is equal.

    Measured on 2026-11-29 (2 CPU cores): openpi's own `models/siglip.py` (15a9616) by jax 0.5.3 and flax 0.10.2 against
    this tower by jax 0.10.2, random weights and images: of two layers 32 of 36 images are equal in 99 % of the elements
    or more, nearly all of them to the bit, the other four in 33 to 51 % (D**2 / E**2 .31 to .72); of four layers 3 of 8
    are, the others in 26 to 92 % (up to .93). Of the six images of pi0_bf16 five are, of pi05_bf16's four. With the
    layer norm's scale or bias rounded, or softmax or gelu in float32, none of either is: 29 to 40 % of the elements.
    """
    expected, ours = case.io[f"out/{name}"], np.asarray(ours, np.float32)
    if not case.bfloat16:
        np.testing.assert_allclose(ours, expected, **FLOAT32, err_msg=name)
        return
    num_text = case.observation.prompt_tokens.shape[1]
    np.testing.assert_array_equal(ours[:, -num_text:], expected[:, -num_text:], err_msg=name)
    images = slice(None), slice(0, ours.shape[1] - num_text)
    if jax.default_backend() != "cpu":  # its sums have other orders throughout
        assert root_mean_square(ours[images] - expected[images]) < np.sqrt(1 / 2) * case.noise(f"out/{name}", images)
        return
    rows, width = len(ours), ours.shape[-1]
    equal = (ours == expected)[images].reshape(rows * len(case.observation.images), -1, width).all((1, 2))
    assert equal.mean() >= 0.5, f"{name}: of {len(equal)} images {equal.sum()} are openpi's to the bit"


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
    names = {path: config.param_rules.public_name(path) for path in parameter_shapes(config)}
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
