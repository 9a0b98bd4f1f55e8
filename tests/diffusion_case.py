"""What torch's networks, samplers and whole policies gave (`diffusion_fixtures/make.py`, `make_policy.py`), and our
modules with the same parameters.
"""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from diffusion_fixtures.fixed_values import parameter
from flax import nnx

from openpi_train.parallel.params import merge_module, module_params

_FIXTURES = Path(__file__).parent / "diffusion_fixtures"


def recorded(name: str = "torch.npz") -> dict[str, np.ndarray]:
    """The arrays by name."""
    with np.load(_FIXTURES / name) as file:
        return dict(file)


def facts() -> dict:
    """Versions, parameter counts and EMA decays."""
    return json.loads((_FIXTURES / "torch.json").read_text())


def count(make) -> int:
    """How many parameters the module that `make(rngs)` builds has."""
    shapes = module_params(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    return sum(int(np.prod(leaf.shape)) for leaf in shapes.values())


def with_torch_parameters(make, torch_name):
    """The module that `make(rngs)` builds, its parameters those that torch's had; `torch_name` translates paths."""
    abstract = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    params = {path: jnp.asarray(_parameter(path, leaf, torch_name)) for path, leaf in module_params(abstract).items()}
    return merge_module(nnx.split(abstract)[0], params)


def _parameter(path: str, leaf: jax.ShapeDtypeStruct, torch_name) -> np.ndarray:
    shape, name = leaf.shape, torch_name(path)
    if isinstance(name, list):  # a stack of layers
        return np.stack([_parameter(path, jax.ShapeDtypeStruct(shape[1:], leaf.dtype), lambda _, n=n: n) for n in name])
    if found := re.fullmatch(r"(.*in_proj_(?:weight|bias))\[(\d)\]", name):
        part = np.split(parameter(found[1], (3 * shape[-1], *shape[:-1][::-1])), 3)[int(found[2])]
        return part.T
    if name.endswith("pos_emb"):
        return parameter(name, (1, *shape))[0]
    if "up_modules" in name and name.endswith("2.conv.weight"):
        size, inputs, outputs = shape
        return parameter(name, (inputs, outputs, size)).transpose(2, 0, 1)[::-1]
    if len(shape) < 2:
        return parameter(name, shape)
    *window, inputs, outputs = shape
    found = parameter(name, (outputs, inputs, *window))
    return found.transpose(*range(2, found.ndim), 1, 0)


def policy_name(path: str, denoiser: str) -> str | list[str]:
    """diffusion_policy's name of a parameter of our `DiffusionPolicy`; a list for each layer of a stack."""
    part, rest = path.split("/", 1)
    if part == "encoders":
        camera, rest = rest.split("/", 1)
        return f"obs_encoder.key_model_map.{camera}.{resnet_name(rest)}"
    names = {"unet": unet_name, "transformer": transformer_name}[denoiser](rest)
    return [f"model.{name}" for name in names] if isinstance(names, list) else f"model.{names}"


def resnet_name(path: str) -> str:
    """torchvision's name of a parameter of our `ResNet18`."""
    path = path.replace("/scale", ".weight").replace("/kernel", ".weight").replace("/bias", ".bias")
    path = path.replace("stem_norm", "bn1").replace("stem", "conv1")

    def block(found: re.Match) -> str:
        number, name = int(found[1]), found[2]
        known = {"shortcut": "downsample.0", "shortcut_norm": "downsample.1"}
        known |= {f"conv_{i}": f"conv{i}" for i in (1, 2)} | {f"norm_{i}": f"bn{i}" for i in (1, 2)}
        return f"layer{1 + number // 2}.{number % 2}.{known[name]}"

    return re.sub(r"blocks/(\d+)/(\w+)", block, path)


def unet_name(path: str) -> str:
    """diffusion_policy's name of a parameter of our `ConditionalUnet1d`."""
    *modules, leaf = path.split("/")
    leaf = "bias" if leaf == "bias" else "weight"
    inner = {"conv": "0", "norm": "1"}
    match modules:
        case ["step_in"]:
            name = "diffusion_step_encoder.1"
        case ["step_out"]:
            name = "diffusion_step_encoder.3"
        case ["last_block", part]:
            name = f"final_conv.0.block.{inner[part]}"
        case ["outputs"]:
            name = "final_conv.1"
        case ["shorten" | "lengthen" as way, level]:
            name = f"{'down' if way == 'shorten' else 'up'}_modules.{level}.2.conv"
        case [where, *numbers, "block_1" | "block_2" as block, part]:
            name = f"{_module(where, numbers)}.blocks.{int(block[-1]) - 1}.block.{inner[part]}"
        case [where, *numbers, part]:
            name = f"{_module(where, numbers)}.{ {'film': 'cond_encoder.1', 'shortcut': 'residual_conv'}[part] }"
    return f"{name}.{leaf}"


def _module(where: str, numbers: list[str]) -> str:
    return ".".join([{"middle": "mid", "down": "down", "up": "up"}[where] + "_modules", *numbers])


def transformer_name(path: str, depth: int = 2) -> str | list[str]:
    """diffusion_policy's name of a parameter of our `DenoisingTransformer`; a list for each of its layers."""
    known = {"positions": "pos_emb", "condition_positions": "cond_pos_emb"}
    if path in known:
        return known[path]
    *modules, leaf = path.split("/")
    leaf = "bias" if leaf == "bias" else "weight"
    if modules[0] != "layers":
        known = {"inputs": "input_emb", "condition": "cond_obs_emb", "condition_in": "encoder.0"}
        known |= {"condition_out": "encoder.2", "last_norm": "ln_f", "outputs": "head"}
        return f"{known[modules[0]]}.{leaf}"
    match modules[1:]:
        case ["among" | "across" as which, part]:
            attention = {"among": "self_attn", "across": "multihead_attn"}[which]
            end = f"in_proj_{leaf}[{['query', 'key', 'value'].index(part)}]" if part != "output" else f"out_proj.{leaf}"
            end = f"{attention}.{end}"
        case [part]:
            known = {"mlp_in": "linear1", "mlp_out": "linear2", "norm_1": "norm1", "norm_2": "norm2", "norm_3": "norm3"}
            end = f"{known[part]}.{leaf}"
    return [f"decoder.layers.{layer}.{end}" for layer in range(depth)]
