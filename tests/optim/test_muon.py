"""Which parameters of every family Muon orthogonalises, by literal lists, and what it makes of each of their matrices.

A list has a letter per dim: b for many matrices, i for inputs, o for outputs, and a digit before o for as many
matrices side by side. `formulas.py` has the algorithm for one matrix.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from openpi_train import registry
from openpi_train.models.act import ActConfig
from openpi_train.models.diffusion_policy import DiffusionPolicyConfig
from openpi_train.models.diffusion_policy.denoisers import MlpSizes, TransformerSizes, UnetSizes
from openpi_train.models.language import LanguageConfig
from openpi_train.models.language.actor_critic import ActorCriticConfig
from openpi_train.models.language.reference import ReferencedConfig
from openpi_train.models.language.reward import RewardConfig
from openpi_train.models.paligemma import PaliGemmaFlowConfig
from openpi_train.models.pi0 import Pi0Config
from openpi_train.models.pi0_fast import Pi0FastConfig
from openpi_train.models.smolvla import SmolVlaConfig
from openpi_train.nn.decoder_sizes import DecoderSizes
from openpi_train.nn.gemma_sizes import GemmaOverrides
from openpi_train.nn.lora import AdapterConfig
from openpi_train.nn.siglip import SiglipConfig
from openpi_train.optim import LRSchedule, Muon
from openpi_train.optim.muon import num_parts
from openpi_train.optim.state_rules import is_stacked
from openpi_train.parallel.params import Gathering, module_params, param_kinds

SIZES = {"depth": 2, "mlp_dim": 12, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
LORA = {"lora_attention_rank": 3, "lora_mlp_rank": 3}
TINY_TOWER = SiglipConfig(width=8, depth=2, mlp_dim=12, num_heads=2, patch_size=8)
LANGUAGE = LanguageConfig(
    sizes=DecoderSizes(
        vocab_size=20, width=8, depth=2, mlp_dim=12, num_heads=4, num_kv_heads=2, head_dim=4, tied=False, biases=True,
        query_key_norms=True, post_norms=True,
    ),
    adapter=AdapterConfig(rank=3),
)  # fmt: skip
PLAIN = dataclasses.replace(LANGUAGE, adapter=AdapterConfig())
PI0 = Pi0Config(
    paligemma_variant="dummy", action_expert_variant="dummy", language=GemmaOverrides(width=8, **SIZES),
    action_expert=GemmaOverrides(width=6, **SIZES), siglip=TINY_TOWER, image_size=16, vocab_size=20, indicator=True,
)  # fmt: skip
DENOISING = DiffusionPolicyConfig(
    action_dim=5, cameras=("head_camera",), image_height=32, image_width=32, encoder_widths=(16, 32),
    pooling="spatial_softmax", num_keypoints=3, diffusion_step_embed_dim=4, unet=UnetSizes(widths=(8, 16)),
    transformer=TransformerSizes(width=8, depth=2, num_heads=2), mlp=MlpSizes(width=8, depth=2),
)  # fmt: skip
TINY = {
    "language": LANGUAGE,
    "reward": RewardConfig(language=PLAIN),
    "actor_critic": ActorCriticConfig(policy=PLAIN),
    "referenced": ReferencedConfig(policy=PLAIN),
    "pi0": PI0,
    "pi05_lora": dataclasses.replace(
        PI0, pi05=True, indicator=False, language=GemmaOverrides(width=8, **SIZES, **LORA),
        action_expert=GemmaOverrides(width=6, **SIZES, **LORA),
    ),
    "pi0_fast": Pi0FastConfig(
        paligemma_variant="dummy", language=GemmaOverrides(width=8, **SIZES | LORA | {"num_kv_heads": 2}),
        siglip=TINY_TOWER, image_size=16, vocab_size=20,
    ),
    "paligemma_flow": PaliGemmaFlowConfig(
        paligemma_variant="dummy", language=GemmaOverrides(width=8, **SIZES), head_variant="dummy",
        head=GemmaOverrides(width=6, **SIZES), siglip=TINY_TOWER, image_size=16, vocab_size=20,
    ),
    "smolvla": SmolVlaConfig(
        image_size=32, siglip=TINY_TOWER, pixel_shuffle=2, num_vlm_layers=2, width=16, mlp_dim=16, num_heads=3,
        num_kv_heads=1, head_dim=4, vocab_size=20,
    ),
    "act": ActConfig(
        image_height=32, image_width=32, backbone_widths=(4, 8), dim_model=8, n_heads=2, dim_feedforward=12,
        n_encoder_layers=2, n_vae_encoder_layers=2, latent_dim=4, action_horizon=6, action_dim=5, state_dim=5,
    ),
    "unet": DENOISING,
    "transformer": dataclasses.replace(DENOISING, denoiser="transformer"),
    "mlp": dataclasses.replace(DENOISING, denoiser="mlp"),
}  # fmt: skip

MLP = {"mlp/gate_up/weight": "bbio", "mlp/down/weight": "bio"}
DECODER = {
    "attention/query/weight": "bibo",
    "attention/key_value/weight": "bbibo",
    "attention/output/weight": "bbio",
    **MLP,
}
FACTORS = {
    "attention/query/lora_a": "bio",
    "attention/query/lora_b": "bibo",
    "attention/key_value/lora_a": "bbio",
    "attention/key_value/lora_b": "bbibo",
    "attention/output/lora_a": "bbio",
    "attention/output/lora_b": "bio",
    "mlp/gate_up/lora_a": "bbio",
    "mlp/gate_up/lora_b": "bbio",
    "mlp/down/lora_a": "bio",
    "mlp/down/lora_b": "bio",
}
EXPERT = {"query/weight": "bbio", "key_value/weight": "bbbio", "output/weight": "bbio", **MLP}
ADAPTED = EXPERT | {
    path.replace("weight", factor): dims for path, dims in EXPERT.items() for factor in ("lora_a", "lora_b")
}
FUSED = {path.replace("key_value", "query_key_value"): dims for path, dims in ADAPTED.items() if "query/" not in path}
MODULATED = {"attention_norm/modulation/kernel": "bi3o", "mlp_norm/modulation/kernel": "bi3o"}
TOWER = {
    "attention/query/kernel": "bibo",
    "attention/key/kernel": "bibo",
    "attention/value/kernel": "bibo",
    "attention/out/kernel": "bbio",
    "mlp/up/kernel": "bio",
    "mlp/down/kernel": "bio",
}
PACKED = {"project/kernel": "bi3o", "output/kernel": "bio"}
FEED_FORWARD = {"mlp/up/kernel": "bio", "mlp/down/kernel": "bio"}
RESNET = {
    "blocks/0/conv_1/kernel": "iiio",
    "blocks/0/conv_2/kernel": "iiio",
    "blocks/1/conv_1/kernel": "iiio",
    "blocks/1/conv_2/kernel": "iiio",
    "blocks/2/conv_1/kernel": "iiio",
    "blocks/2/conv_2/kernel": "iiio",
    "blocks/2/shortcut/kernel": "iiio",
    "blocks/3/conv_1/kernel": "iiio",
    "blocks/3/conv_2/kernel": "iiio",
}
KEYPOINTS = {"head/maps/kernel": "io", "head/outputs/kernel": "io"}
FILM = {"block_1/conv/kernel": "iio", "block_2/conv/kernel": "iio", "film/kernel": "i2o"}
WIDER = {**FILM, "shortcut/kernel": "iio"}
FIRST = {"block_2/conv/kernel": "iio", "film/kernel": "i2o"}  # its other convolutions read actions
ATTENTION = {"query/kernel": "bio", "key/kernel": "bio", "value/kernel": "bio", "output/kernel": "bio"}


def below(folder, *tables):
    return {f"{folder}/{path}": dims for table in tables for path, dims in table.items()}


SEEING = below("image_encoder/layers", TOWER) | {"image_encoder/head/kernel": "io"}
TIMED = {"time_mlp_in/kernel": "io", "time_mlp_out/kernel": "io"}
EXPERTS = "transformer/layers/experts"
MATRICES = {
    "language": below("layers", DECODER, FACTORS),
    "reward": below("decoder/layers", DECODER),
    "actor_critic": below("policy/layers", DECODER) | below("critic/decoder/layers", DECODER),
    "referenced": below("policy/layers", DECODER) | below("reference/layers", DECODER),
    "pi0": SEEING
    | below(f"{EXPERTS}/language", EXPERT)
    | below(f"{EXPERTS}/action", EXPERT)
    | {"action_time_mlp_in/kernel": "io", "action_time_mlp_out/kernel": "io"},
    "pi05_lora": SEEING
    | below(f"{EXPERTS}/language", ADAPTED)
    | below(f"{EXPERTS}/action", ADAPTED, MODULATED)
    | {"transformer/final_norm/action/modulation/kernel": "i3o"}
    | TIMED,
    "pi0_fast": SEEING | below(f"{EXPERTS}/language", FUSED),
    "paligemma_flow": below("backbone", SEEING, below(f"{EXPERTS}/language", EXPERT))
    | below(f"head/{EXPERTS}/action", EXPERT, MODULATED)
    | below("head", TIMED, {"context/layers/key_value/weight": "bbbio"})
    | {"head/transformer/final_norm/action/modulation/kernel": "i3o"},
    "smolvla": below("image_encoder/layers", TOWER)
    | below("language/layers", DECODER)
    | below("expert/across/0", DECODER)
    | below("expert/among", DECODER)
    | {"connector/kernel": "io", "action_time_mlp_in/kernel": "io", "action_time_mlp_out/kernel": "io"},
    "act": below("backbone", RESNET)
    | {"image/kernel": "iiio"}
    | below("encoder", below("attention", PACKED), FEED_FORWARD)
    | below("vae_layers", below("attention", PACKED), FEED_FORWARD)
    | below("decoder", below("among", PACKED), below("across", PACKED), FEED_FORWARD),
    "unet": below("encoders/head_camera", RESNET, KEYPOINTS)
    | below("denoiser", below("down/0/0", FIRST), below("down/0/1", FILM), below("down/1/0", WIDER))
    | below("denoiser", below("down/1/1", FILM), below("middle/0", FILM), below("middle/1", FILM))
    | below("denoiser", below("up/0/0", WIDER), below("up/0/1", FILM))
    | below("denoiser", {"shorten/0/kernel": "iio", "lengthen/0/kernel": "iio", "last_block/conv/kernel": "iio"})
    | below("denoiser", {"step_in/kernel": "io", "step_out/kernel": "io"}),
    "transformer": below("encoders/head_camera", RESNET, KEYPOINTS)
    | below("denoiser/layers/among", ATTENTION)
    | below("denoiser/layers/across", ATTENTION)
    | below("denoiser/layers", {"mlp_in/kernel": "bio", "mlp_out/kernel": "bio"})
    | below("denoiser", {"condition_in/kernel": "io", "condition_out/kernel": "io"}),
    "mlp": below("encoders/head_camera", RESNET, KEYPOINTS)
    | below("denoiser/layers", {"0/linear/kernel": "io", "1/linear/kernel": "io"}),
}

# What else has two dims, beside those of layers: for AdamW.
IMAGES = {
    "image_encoder/patch_embedding/kernel",
    "image_encoder/position_embedding",
    *(f"image_encoder/layers/attention/{name}/bias" for name in ("query", "key", "value")),
}
ROBOT = {"state_proj/kernel", "action_in_proj/kernel", "action_out_proj/kernel"}
TABLES = {
    "language": {"token_embedding", "head", "layers/attention/query_bias", "layers/attention/key_value_bias"},
    "pi0": {*IMAGES, *ROBOT, "transformer/token_embedding", "indicator"},
    "pi05_lora": {*IMAGES, *ROBOT - {"state_proj/kernel"}, "transformer/token_embedding"},
    "pi0_fast": {*IMAGES, "transformer/token_embedding"},
    "paligemma_flow": {f"backbone/{path}" for path in {*IMAGES, "transformer/token_embedding"}}
    | {f"head/{path}" for path in ROBOT},
    "smolvla": {*IMAGES, *ROBOT, "language/token_embedding", "language/head"},
    "act": {"backbone/stem/kernel", "action_positions", "token_positions", "vae_token"}
    | {f"{name}/kernel" for name in ("state", "action", "latent", "vae_state", "vae_action", "vae_latent")},
    "unet": {"encoders/head_camera/stem/kernel"}
    | {f"denoiser/{name}/kernel" for name in ("down/0/0/block_1/conv", "down/0/0/shortcut", "outputs")},
    "transformer": {"encoders/head_camera/stem/kernel", "denoiser/positions", "denoiser/condition_positions"}
    | {f"denoiser/{name}/kernel" for name in ("inputs", "condition", "outputs")},
    "mlp": {"encoders/head_camera/stem/kernel", "denoiser/inputs/kernel", "denoiser/outputs/kernel"},
}  # fmt: skip
TABLES["reward"] = {f"decoder/{path}" for path in TABLES["language"] - {"head"}} | {"score/weight"}
TABLES["actor_critic"] = {f"policy/{path}" for path in TABLES["language"]} | {
    f"critic/{path}" for path in TABLES["reward"]
}
TABLES["referenced"] = {f"{part}/{path}" for part in ("policy", "reference") for path in TABLES["language"]}


def abstract(config):
    """The shapes of a config's parameters by path, and the paths of stacks of layers, by what the model says."""
    module = nnx.eval_shape(lambda: config.build(nnx.Rngs(0)))
    stacked = {path for path, kind in param_kinds(module).items() if kind.gathering is Gathering.BY_LAYER}
    return module_params(module), stacked


def as_matrices(array, dims):
    """The array as (matrices, inputs, outputs)."""
    digit = re.search(r"\d", dims)
    if digit:
        array = array.reshape(*array.shape[:-1], int(digit[0]), -1)
        dims = dims.replace(digit[0], "b")
    order = [place for letter in "bio" for place, one in enumerate(dims) if one == letter]
    inputs = np.prod([size for size, letter in zip(array.shape, dims, strict=True) if letter == "i"], dtype=int)
    return np.asarray(array).transpose(order).reshape(-1, inputs, array.shape[-1])


def test_every_family_of_the_registry_has_its_lists():
    families = set()
    for name in registry.entries():
        model = registry.load(name, any_dims=True).model
        families.add((type(model), getattr(model, "denoiser", None)))
    assert families <= {(type(model), getattr(model, "denoiser", None)) for model in TINY.values()}


@pytest.mark.parametrize("family", TINY)
def test_muon_gets_the_matrices_of_hidden_layers_and_adamw_the_rest(family):
    shapes, stacked = abstract(TINY[family])
    found = {path for path, dims in Muon().matrices(shapes).items() if dims is not None}
    assert found == MATRICES[family].keys()
    for path, dims in MATRICES[family].items():
        matrix = Muon().matrices(shapes)[path]
        assert num_parts(path) == int(next(iter(re.findall(r"\d", dims)), 1)), path
        places = re.sub(r"\d", "b", dims)
        letters = dict.fromkeys(range(len(places)), "b")
        for letter, axes in (("i", matrix.reduction_axis), ("o", matrix.output_axis)):
            letters |= {int(axis) % len(places): letter for axis in np.atleast_1d(axes)}
        assert "".join(letters.values()) == places, path
    rest = shapes.keys() - found
    assert {path for path in rest if len(shapes[path].shape) - (path in stacked) > 1} == TABLES[family]
    assert {path for path in shapes if is_stacked(path)} == stacked


def test_every_matrix_of_an_update_is_orthogonal():
    """Five Newton-Schulz iterations with Jordan's coefficients map singular values of .0016 to 1 to .6818 to 1.2024."""
    rng, dims_of, grads = np.random.default_rng(0), {}, {}
    for family, lists in MATRICES.items():
        shapes, _ = abstract(TINY[family])
        for path, dims in lists.items():
            if dims not in dims_of.values():  # one of each kind, so that the update compiles soon
                dims_of[path], grads[path] = dims, jnp.asarray(rng.normal(size=shapes[path].shape), jnp.float32)
    params = jax.tree.map(jnp.zeros_like, grads)
    rule = Muon(consistent_rms=None).create(LRSchedule(kind="constant", warmup_steps=0, peak_lr=1.0).create())
    updates, _ = jax.jit(rule.update)(grads, rule.init(params), params)
    for path, dims in dims_of.items():
        matrices = as_matrices(updates[path], dims)
        values = np.linalg.svd(matrices, compute_uv=False) / np.sqrt(max(1.0, matrices.shape[2] / matrices.shape[1]))
        before = np.linalg.svd(as_matrices(grads[path], dims), compute_uv=False)
        assert (before > 0.0016 * np.linalg.norm(before, axis=-1, keepdims=True)).all(), path
        assert 0.68 < values.min() <= values.max() < 1.21, path
