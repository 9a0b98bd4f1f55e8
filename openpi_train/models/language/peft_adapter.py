"""Low-rank adapters of language models in PEFT's format, read and written: a folder as its `save_pretrained` writes it.

    adapter_config.json          rank, scale, adapted weights, the base model's name
    adapter_model.safetensors    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight, ...

Every factor of ours is a factor of PEFT's. Ours adapt all attention weights, all feed-forward weights, or both. A
weight that an adapter of PEFT leaves out has factors of zeros here, whose gradients are zero, too, and is left out when
the adapter is written. Read next: `nn/lora.py`, `huggingface.py`, and `weights.py`, which starts runs from adapters.
"""

import dataclasses
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from openpi_train.data.core.files import write_json
from openpi_train.data.core.hub import SCHEME, Address
from openpi_train.data.tokenizers.text_tokenizer import FILES
from openpi_train.interop import safetensors_file
from openpi_train.interop.checkpoint_tokenizer import copy_token_files
from openpi_train.interop.lora_merge import merged_lora
from openpi_train.interop.openpi import parameter_names
from openpi_train.interop.openpi_torch import layouts_of
from openpi_train.interop.parameter_matching import account
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Leaves, Stored, StoredLeaf, Writer, in_memory
from openpi_train.interop.torch_names import TensorLayout, tensors_of
from openpi_train.json_object import JsonObject
from openpi_train.models.language import huggingface
from openpi_train.models.language.language_part import language_of, with_language
from openpi_train.models.language.reward import SCORE, RewardConfig
from openpi_train.models.model_config import ModelConfig
from openpi_train.nn.lora import AdapterConfig
from openpi_train.runtime.exits import CheckpointError, UsageError

logger = logging.getLogger(__name__)

CONFIG, FILE, _PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
# The published names that an adapter may hold.
HELD = rf".*/lora_[ab]|{SCORE}"
_PREFIX = "base_model.model."
# Settings under which an adapter computes something else. Each may be absent, empty or false.
_OTHER_KINDS = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "monteclora_config",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
)
# Ways to draw the first factors that leave the base model as it is; others change its weights.
_DRAWN = (True, False, None, "gaussian", "orthogonal", "eva")
_HEADS = {"score", "classifier"}
_OTHER_SIZES = ["it is an adapter of a model of other sizes: give its base model"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """An opened adapter: its settings, and its leaves by published name; a reward model's has its score, too.

    `base` is the model that it says it was trained on, a name on the hub or a path; None: it does not say.
    """

    where: str
    base: str | None
    settings: AdapterConfig
    leaves: Leaves

    def onto(self, model: ModelConfig, params: Leaves) -> dict[str, StoredLeaf]:
        """The parameters of `model` by path, with this adapter: as its factors, or folded into the weights if it has
        no adapter.

        Raises CheckpointError if the model's adapter is of another kind.
        """
        language = language_of(model)
        assert language is not None, "an adapter is opened for a model with a language model in it"
        own = language.adapter
        adapted = model if own.enabled else with_language(model, dataclasses.replace(language, adapter=self.settings))
        paths = {name: path for path, name in parameter_names(adapted).items()}
        factors = {paths[name]: leaf for name, leaf in self.leaves.items() if name in paths}
        if own.enabled:
            self._check(own)
            return {**params, **factors}
        # Sums are made, and kept, in float32.
        wide = {path: leaf.cast(np.dtype(np.float32)) for path, leaf in params.items()}
        merged = merged_lora(adapted.param_rules, wide | factors)
        weights = {path.replace("/lora_a", "/weight") for path in factors}
        return {path: leaf if path in weights or path == SCORE else params[path] for path, leaf in merged.items()}

    def warn_of_another_base(self, where: str) -> None:
        """Log a warning if the weights at `where`, a path or an address, have another name than the adapter's base."""
        if self.base and _last_name(self.base) != _last_name(where):
            logger.warning(
                "the adapter %s says that it was trained on %s, and is added to %s: give its base model as "
                "--weight-loader.params-path, unless both are the same model",
                self.where,
                self.base,
                where,
            )

    def _check(self, ours: AdapterConfig) -> None:
        theirs = self.settings
        flags = {
            "rank": (ours.rank, theirs.rank),
            "alpha": (ours.alpha, theirs.alpha),
            "rslora": (ours.rslora, theirs.rslora),
            # A part that it does not adapt stays without addition; one that it does needs a place.
            "attention": (ours.attention or not theirs.attention, True),
            "mlp": (ours.mlp or not theirs.mlp, True),
        }
        if differ := {name: given for name, (own, given) in flags.items() if own != given}:
            raise CheckpointError(
                f"{self.where} is another adapter than the experiment's; give its settings: "
                + " ".join(f"--model.adapter.{name} {value}" for name, value in differ.items())
            )


def recognises(place: Place) -> bool:
    """Whether the folder has an adapter's config and its tensors."""
    return place.has(CONFIG) and (place.has(FILE) or place.has(_PICKLED))


def open_adapter(place: Place, model: ModelConfig) -> Adapter:
    """The adapter in a folder, for this model. Raises CheckpointError if it is of another kind or another model."""
    language = language_of(model)
    if language is None:
        raise CheckpointError(f"{place} is an adapter of a language model, and this is for a {type(model).__name__}")
    said = place.json(CONFIG)
    where = f"{place}/{CONFIG}"
    _refuse_others(said, where, is_reward=isinstance(model, RewardConfig))
    if not place.has(FILE):
        raise CheckpointError(f"{place} has only {_PICKLED}, which is not read: save it as safetensors")
    rank, alpha = said.get("r"), said.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise CheckpointError(f"{where} needs r and lora_alpha, and says {rank!r} and {alpha!r}; fetch it again")
    settings = AdapterConfig(rank=rank, alpha=float(alpha), rslora=bool(said.get("use_rslora")))
    found = safetensors_file.open_file(place, FILE)
    whole = model if isinstance(model, RewardConfig) else language
    adapted = with_language(whole, dataclasses.replace(language, adapter=settings))
    layouts = layouts_of(adapted, _layout, without=rf"(?!({HELD})$).*")
    expected = {name: one.tensor_shape for one in layouts.values() for name in one.tensors.values()}
    if others := sorted(found.keys() - expected.keys()):
        raise CheckpointError(
            f"{place}/{FILE} holds {others[0]} ({len(others)} such tensors): ours adapt the weights of attention and "
            "feed-forward layers, not tables or heads, and not of other models; merge it into its base model by PEFT"
        )
    partners = {
        name.replace("lora_A", "lora_B") if "lora_A" in name else name.replace("lora_B", "lora_A") for name in found
    }
    if alone := sorted(partners - found.keys()):
        raise CheckpointError(f"{place}/{FILE} lacks {alone[0]}, the other factor of one that it holds; fetch it again")
    _check_rank(place, found, rank)
    wanted = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in expected.items()}
    account(
        found, wanted, where=f"{place}/{FILE}", may_miss=".*", explain=lambda *names: _OTHER_SIZES if names[-1] else []
    )
    has = {
        part: any(f".{part}." in name for name in found if name.startswith(_PREFIX)) for part in ("self_attn", "mlp")
    }
    settings = dataclasses.replace(settings, attention=has["self_attn"], mlp=has["mlp"])
    _tell_absent(place, found, expected, language.adapter)
    leaves, own = {}, language.adapter
    for name, one in layouts.items():
        there = any(tensor in found for tensor in one.tensors.values())
        in_part = own.attention if "/self_attn/" in name else own.mlp
        if there or (name != SCORE and own.enabled and in_part):
            zeros = in_memory(np.zeros(one.tensor_shape, np.float32))
            leaves[name] = one.joined({**dict.fromkeys(one.tensors.values(), zeros), **found})
    base = said.get("base_model_name_or_path")
    return Adapter(where=str(place), base=base if isinstance(base, str) else None, settings=settings, leaves=leaves)


def open_checkpoint(place: Place, model: ModelConfig | None = None) -> Stored:
    """The factors alone, by published name: the weights that they are added to are elsewhere. Raises as `open_adapter`.

    Raises UsageError without the model.
    """
    if model is None:
        raise UsageError(
            f"{place} holds an adapter, without the weights that it is added to: train or convert a model that starts "
            f"from both, with --weight-loader.params-path BASE --weight-loader.adapter-path {place}"
        )
    adapter = open_adapter(place, model)
    return Stored(where=str(place), format="peft", params=adapter.leaves)


def write(directory: Path, stored: Stored, model: ModelConfig | None = None) -> None:
    """Check and write, as `prepare`."""
    prepare(stored, model)(directory)


def prepare(stored: Stored, model: ModelConfig | None = None) -> Writer:
    """The writer of an adapter for `PeftModel.from_pretrained`. In one process.

    Raises UsageError if the model has none.
    """
    language = None if model is None else language_of(model)
    factors = {name: leaf for name, leaf in stored.params.items() if re.fullmatch(HELD, name)}
    if language is None or not language.adapter.enabled or not any("lora" in name for name in factors):
        raise UsageError("--to peft writes low-rank adapters of language models, and this model has none")
    is_reward = isinstance(model, RewardConfig)
    base, revision = _base_of(stored.experiment or {})
    adapter, alpha = language.adapter, language.adapter.alpha
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if is_reward else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": adapter.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "use_rslora": adapter.rslora,
        "modules_to_save": ["score"] if is_reward else None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }

    def write(directory: Path) -> None:
        directory.mkdir(parents=True)
        copy_token_files(stored, directory, FILES)
        with tensors_of(factors, directory, _layout) as tensors:
            idle = _idle_modules(tensors)
            kept = {name: leaf for name, leaf in tensors.items() if _module(name) not in idle}
            safetensors_file.write_file(directory / FILE, kept, metadata={"format": "pt"})
        write_json(
            directory / CONFIG, {**config, "target_modules": sorted({_module(name) for name in kept} - {"score"})}
        )

    return write


def _layout(published: str, shape: tuple[int, ...]) -> TensorLayout:
    found = huggingface.hf_layout(published, shape)
    return dataclasses.replace(found, tensors={at: f"{_PREFIX}{name}" for at, name in found.tensors.items()})


def _refuse_others(said: JsonObject, where: str, *, is_reward: bool) -> None:
    """Raise CheckpointError for settings that are not computed here."""
    if (kind := said.get("peft_type")) != "LORA":
        raise CheckpointError(f"{where}: adapters of type {kind!r} are not known; known is LORA")
    others = {name: said[name] for name in _OTHER_KINDS if said.get(name)}
    if said.get("bias", "none") != "none":
        others["bias"] = said["bias"]
    if (drawn := said.get("init_lora_weights", True)) not in _DRAWN:
        others["init_lora_weights"] = drawn
    if set(said.get("modules_to_save") or ()) - (_HEADS if is_reward else set()):
        others["modules_to_save"] = said["modules_to_save"]
    if others:
        listed = ", ".join(f"{name} {value!r}" for name, value in others.items())
        raise CheckpointError(f"{where}: {listed} is not computed here; merge that adapter into its base model by PEFT")


def _tell_absent(place: Place, found: Leaves, expected: Mapping[str, object], ours: AdapterConfig) -> None:
    """Log which weights of the parts that the run adapts have no addition in this adapter."""
    parts = [part for part, on in ((".self_attn.", ours.attention), (".mlp.", ours.mlp)) if ours.enabled and on]
    absent = {_module(name) for name in expected if name not in found and any(part in name for part in parts)}
    if absent:
        names = ", ".join(sorted(absent))
        logger.warning("%s leaves out %s, in some layers or in all: they get no addition in this run", place, names)


def _check_rank(place: Place, found: Leaves, rank: int) -> None:
    """Raise CheckpointError if factors have another rank than the adapter's config says."""
    dims = (("lora_A", 0), ("lora_B", -1))
    ranks = {leaf.shape[dim] for name, leaf in found.items() for kind, dim in dims if kind in name and leaf.shape}
    if others := sorted(ranks - {rank}):
        raise CheckpointError(
            f"{place}/{CONFIG} says r {rank}, and {FILE} has factors of rank {', '.join(map(str, others))}: both are "
            "not of one adapter; correct r, or fetch the adapter again"
        )


def _last_name(where: str) -> str:
    """The last part of a path or an address, without scheme and revision."""
    return where.rstrip("/").rpartition("/")[2].removeprefix(SCHEME).partition("@")[0].lower()


def _module(tensor: str) -> str:
    """The weight that a tensor belongs to: q_proj, ..., or score."""
    name = tensor.removesuffix(".weight")
    return name.rpartition(".")[0].rpartition(".")[2] if "lora_" in name else name.rpartition(".")[2]


def _idle_modules(tensors: Leaves) -> set[str]:
    """The weights whose factors are zeros in all layers; none if all are."""
    modules = {_module(name) for name in tensors}
    used = {_module(name) for name, leaf in tensors.items() if leaf.whole().tobytes().strip(b"\0")} | {"score"}
    return modules - used if used - {"score"} else set()


def _base_of(experiment: JsonObject) -> tuple[str | None, str | None]:
    """The published model that a run started from, and its revision, by name on the hub or folder; None: not known."""
    model = experiment.get("model") or {}
    path = (model.get("language") or model).get("path")
    where = (experiment.get("weight_loader") or {}).get("params_path") or path or ""
    if where.startswith(SCHEME):
        address = Address.of(where)
        return address.name, address.revision
    if where and "://" not in where and huggingface.recognises(Place.of(where)):
        return where, None
    logger.warning("the base model is not a published one: set base_model_name_or_path in %s", CONFIG)
    return None, None
