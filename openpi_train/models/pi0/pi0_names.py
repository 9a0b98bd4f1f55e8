"""Published names of pi0's parameters: the tree of openpi's checkpoints. Layouts are equal, so only names change.

Read next: `pi0.py`, and `interop/openpi.py`, which reads and writes files under these names.
"""

import math
import re
from collections.abc import Mapping

_IMAGE = {
    "patch_embedding": "embedding",
    "position_embedding": "pos_embedding",
    "norm": "Transformer/encoder_norm",
    "head": "head",
    "layers/attention_norm": "Transformer/encoderblock/LayerNorm_0",
    "layers/attention": "Transformer/encoderblock/MultiHeadDotProductAttention_0",
    "layers/mlp_norm": "Transformer/encoderblock/LayerNorm_1",
    "layers/mlp/up": "Transformer/encoderblock/MlpBlock_0/Dense_0",
    "layers/mlp/down": "Transformer/encoderblock/MlpBlock_0/Dense_1",
}
# {i} is "" for the language expert and "_1" for the action expert.
_EXPERT = {
    "attention_norm": "pre_attention_norm{i}",
    "mlp_norm": "pre_ffw_norm{i}",
    "query": "attn/q_einsum{i}",
    "key_value": "attn/kv_einsum{i}",
    "query_key_value": "attn/qkv_einsum{i}",
    "output": "attn/attn_vec_einsum{i}",
    "mlp/gate_up": "mlp{i}/gating_einsum",
    "mlp/down": "mlp{i}/linear",
}
_SUFFIX = {"language": "", "action": "_1"}

_VISION, _LANGUAGE = "image_encoder/.*", "transformer/(token_embedding|.*/language/.*)"
# Names of parts that `--freeze` takes in addition to patterns, with the patterns of our paths.
GROUPS = {"vision": _VISION, "language": _LANGUAGE, "backbone": f"{_VISION}|{_LANGUAGE}"}


def public_name(path: str) -> str:
    """openpi's name for a parameter of ours; the heads around the transformer have the same name in both."""
    root, _, rest = path.partition("/")
    if root == "image_encoder":
        return f"PaliGemma/img/{_replace_prefix(rest, _IMAGE)}"
    if root == "transformer":
        return f"PaliGemma/llm/{_transformer_name(rest)}"
    return path


def explain(pi05: bool, missing: list[str], extra: list[str], misshapen: list[str]) -> list[str]:
    """Advice for a checkpoint that does not fit a pi0 (or, with `pi05`, a pi0.5)."""
    found = []
    if "indicator" in extra:
        found.append("the checkpoint was told how good chunks were (by an indicator): give --model.indicator")
    if any(name.startswith("value_head/") for name in extra):
        found.append("the checkpoint has a critic (RL by PPO): give --model.critic")
    if any(name.startswith("return_head/") for name in extra):
        found.append("the checkpoint is a value function's (ReturnDistribution): give --model.return-bins 201")
    own, other = ("pi0.5", "pi0") if pi05 else ("pi0", "pi0.5")
    if any(name.startswith(_TIME_MLP[own]) for name in missing) and any(
        name.startswith(_TIME_MLP[other]) for name in extra
    ):
        flag = "--model.no-pi05" if pi05 else "--model.pi05"
        found.append(f"the checkpoint is {other}'s and the model {own}: give {flag}, or a checkpoint of {own}")
    elif (
        missing
        and not extra
        and all(name.startswith((*_TIME_MLP.values(), *_HEADS)) or "_1/" in name for name in missing)
    ):
        found.append("the checkpoint has the language model and the image tower only: the action expert is missing")
    return found + explain_sizes(misshapen)


def explain_fast(extra: list[str], misshapen: list[str]) -> list[str]:
    """Advice for a checkpoint that does not fit a pi0-FAST."""
    found = []
    if any(name.startswith((*_TIME_MLP.values(), *_HEADS)) for name in extra):
        found.append(
            "the checkpoint has an action expert, as pi0 and pi0.5 have, but the model predicts actions as tokens: "
            "name an experiment of these, or a checkpoint of pi0-FAST"
        )
    return found + explain_sizes(misshapen)


def explain_sizes(misshapen: list[str]) -> list[str]:
    """Advice for parameters of other shapes."""
    found = []
    in_llm = [name for name in misshapen if name.startswith("PaliGemma/llm/")]
    action = [name for name in misshapen if (name in in_llm and "_1/" in name) or name.startswith(_HEADS)]
    language = [name for name in in_llm if name not in action]
    if language:
        found.append(
            "the language expert has other sizes: --model.paligemma-variant, --model.language.width (also .depth, "
            ".mlp-dim, .num-heads, .num-kv-heads, .head-dim), --model.vocab-size"
        )
    if action:
        found.append(
            "the action expert or its heads have other sizes: --model.action-expert-variant, "
            "--model.action-expert.width (also .depth, .mlp-dim), --model.action-dim"
        )
    tower = [name for name in misshapen if name.startswith(_TOWER) and not name.startswith(f"{_TOWER}head")]
    if tower:
        of_layers = [name for name in tower if name not in (_PATCHES, _POSITIONS)]
        sizes = "--model.siglip.width (also .depth, .mlp-dim, .num-heads), " if of_layers else ""
        found.append(f"the image tower has other sizes: {sizes}--model.siglip.patch-size, --model.image-size")
    return found


def flags_of_sizes(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The sizes of the image tower and of the actions as flags, from shapes by published name; none of other models."""
    query = f"{_TOWER}Transformer/encoderblock/MultiHeadDotProductAttention_0/query/kernel"
    up = f"{_TOWER}Transformer/encoderblock/MlpBlock_0/Dense_0/kernel"
    if not {query, up, _PATCHES, _POSITIONS} <= shapes.keys():
        return []
    depth, width, num_heads, _ = shapes[query]
    patch, per_side = shapes[_PATCHES][0], math.isqrt(shapes[_POSITIONS][1])
    sizes = {"width": width, "depth": depth, "mlp-dim": shapes[up][2], "num-heads": num_heads, "patch-size": patch}
    flags = [f"--model.siglip.{name} {size}" for name, size in sizes.items()]
    flags.append(f"--model.image-size {patch * per_side}")
    if (actions := shapes.get("action_in_proj/kernel")) is not None:
        flags.append(f"--model.action-dim {actions[0]}")
    return flags


_TOWER = "PaliGemma/img/"
_PATCHES, _POSITIONS = f"{_TOWER}embedding/kernel", f"{_TOWER}pos_embedding"
_TIME_MLP = {"pi0": "action_time_mlp", "pi0.5": "time_mlp"}
_HEADS = ("action_in_proj", "action_out_proj", "state_proj")


def _transformer_name(path: str) -> str:
    if path == "token_embedding":
        return "embedder/input_embedding"
    if match := re.fullmatch(r"final_norm/(\w+)/(.*)", path):
        return f"final_norm{_SUFFIX[match[1]]}/{_norm_leaf(match[2])}"
    match = re.fullmatch(r"layers/experts/(\w+)/(.*)", path)
    if match is None:
        raise KeyError(f"no published name for the transformer parameter {path!r}")
    name = _replace_prefix(match[2], _EXPERT).format(i=_SUFFIX[match[1]])
    if name.startswith("mlp"):  # openpi's MLP holds its weights itself: no level for `w`, factors by suffix
        name = re.sub(r"/(lora_[ab])$", r"_\1", name.removesuffix("/weight"))
    return f"layers/{_norm_leaf(re.sub('/weight$', '/w', name))}"


def _norm_leaf(name: str) -> str:
    return name.replace("modulation/", "Dense_0/")


def _replace_prefix(path: str, table: dict[str, str]) -> str:
    for ours in sorted(table, key=len, reverse=True):
        if path == ours or path.startswith(f"{ours}/"):
            return table[ours] + path.removeprefix(ours)
    raise KeyError(f"no published name for the parameter {path!r}")
