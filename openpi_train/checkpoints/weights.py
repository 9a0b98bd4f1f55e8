"""Start weights: the source of a run's initial parameters. Read next: `checkpoint_formats.py`, which opens files."""

import abc
import contextlib
import dataclasses
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from openpi_train.checkpoints.checkpoint_formats import model_params, named, open_checkpoint, open_place
from openpi_train.interop.checkpoint_hub import is_address, is_cached
from openpi_train.interop.native_format import recognises, recorded_experiment, recorded_tokenizer, without_sums
from openpi_train.interop.openpi import cache_folder, parameter_names, state_leaves
from openpi_train.interop.stored_leaves import Leaves
from openpi_train.models.language import peft_adapter
from openpi_train.models.language.accompanied import AccompaniedConfig
from openpi_train.models.language.language_part import language_flags, language_of
from openpi_train.models.language.reward import SCORE
from openpi_train.models.model_config import Base, ModelConfig
from openpi_train.runtime.exits import CheckpointError, UsageError

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightLoader(abc.ABC):
    """Source of start weights. Named after openpi's field, so that `--weight-loader.params-path` works unchanged."""

    @abc.abstractmethod
    def load(self, model: ModelConfig) -> Leaves:
        """Parameters by path, opened but not read; missing ones keep their initial values.

        Raises CheckpointError.
        """

    def check(self, model: ModelConfig) -> None:
        """Raise what `load` would raise, as far as it is soon known. Called before anything of a run is written."""
        del model

    def remote(self) -> list[str]:
        """A sentence for each part that is not on this machine: that a start fetches it, and where a copy may lie."""
        return []

    def tokenizer(self) -> str | None:
        """`tokens_fingerprint` of the tokenizer that the weights were trained with; None if not recorded."""
        return None

    def objective(self) -> Mapping[str, Any] | None:
        """The objective (its JSON) that the weights were trained by; None if not recorded."""
        return None

    def load_state(self, model: ModelConfig) -> Leaves | None:
        """The whole training state to continue from, by our names (`openpi.state_leaves`); None: a new one."""
        del model
        return None

    def norm_stats(self, model: ModelConfig) -> Mapping[str, Any]:
        """The norm stats of a training that is continued, as its files hold them, by asset id; empty: none is."""
        del model
        return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointWeightLoader(WeightLoader):
    """The parameters of a checkpoint in any format of `checkpoints/checkpoint_formats.py`.

    An empty path starts from fresh weights. Every parameter must be there, save those that `model` adds for LoRA, and
    to a base model that it starts from (`ModelConfig.base`: a reward model's decoder, a policy and its reference).
    """

    # A checkpoint: a directory, or an address in a bucket (gs://, s3://), in any format of docs/howto/convert.md.
    params_path: str = ""
    # Also restore its training state: step, optimizer and average; for our checkpoints and those of openpi's trainer.
    continue_training: bool = False
    # A low-rank adapter by PEFT on that language model: a folder, or hub:USER/NAME. A run's adapter starts from it;
    # without one it is added to the weights.
    adapter_path: str = ""

    def load(self, model: ModelConfig) -> Leaves:
        """All parameters of the checkpoint, by our paths."""
        if not self.params_path:
            if self.adapter_path:
                raise UsageError(
                    "--weight-loader.adapter-path needs the weights that the adapter is added to: "
                    "--weight-loader.params-path"
                )
            logger.warning("start weights: none, every parameter is randomly initialised; %s", model.start_advice)
            return {}
        try:
            return self._loaded(model)
        except CheckpointError as error:
            # A language model names its flags as those of a run that trains it alone.
            told = re.sub(r"--model\.(?=sizes\.|adapter\.)", language_flags(model), str(error))
            raise CheckpointError(told + self._of_other_model(model)) from error

    def _of_other_model(self, model: ModelConfig) -> str:
        """A line that says with which --model.path the run of these weights was trained, if `model` has another."""
        own, place = language_of(model), open_place(self.params_path)
        if own is None or not recognises(place):
            return ""
        with contextlib.suppress(CheckpointError):  # of which the error tells that has brought us here
            trained, _ = recorded_experiment(place)
            path = _model_path((trained or {}).get("model"))
            if path is not None and path != own.path:
                return f"\n  -> the run of these weights was started with --model.path {path}: give that here, too"
        return ""

    def _loaded(self, model: ModelConfig) -> Leaves:
        """As `load`, of a checkpoint that is given."""
        base = model.base
        stored = open_checkpoint(self.params_path, model if base is None else base.model)
        if stored.format == "peft":
            raise UsageError(
                f"--weight-loader.params-path {self.params_path} is an adapter, without the weights that it is added "
                "to: give it as --weight-loader.adapter-path, and its base model here"
            )
        may_miss = named(stored.format).lacks or r".*lora.*"
        if base is not None and _has_own(stored.params, model, base.model):
            base = None
        params = model_params(stored, model if base is None else base.model, may_miss)
        logger.info("start weights: %d parameters from %s (%s)", len(params), stored.where, stored.format)
        if self.adapter_path:
            return self._adapted(model, base, params)
        return params if base is None else base.start(params)

    def _adapted(self, model: ModelConfig, base: Base | None, params: Leaves) -> Leaves:
        """The start of `model` from the parameters of its base, or its own, with the adapter added to them."""
        part = model if base is None else base.model
        if isinstance(part, AccompaniedConfig):
            raise UsageError(
                f"--weight-loader.adapter-path {self.adapter_path}: {self.params_path} has a reference beside the "
                "policy, and an adapter is added to a language model: convert it with --to huggingface first"
            )
        adapter = peft_adapter.open_adapter(open_place(self.adapter_path), model)
        adapter.warn_of_another_base(self.params_path)
        found = adapter.onto(part, params)
        logger.info("start weights: with the adapter %s of rank %d", adapter.where, adapter.settings.rank)
        if base is None:
            return found
        # A reward model's adapter has its score, which a language model lacks.
        score = {path: leaf for path, leaf in adapter.leaves.items() if path == SCORE}
        return {**base.start(found), **score}

    def check(self, model: ModelConfig) -> None:
        """Open what `load` opens, and forget it, without devices or the values of parameters.

        Addresses are not looked at, of a bucket only whether it is there.
        """
        if is_address(self.params_path) or not (self.params_path or self.adapter_path):
            return
        if self.params_path and open_place(self.params_path).local is None:
            return
        here = dataclasses.replace(self, adapter_path="") if is_address(self.adapter_path) else self
        with _silence(), without_sums():  # the start itself says what it finds
            if here.load_state(model) is None:
                here.load(model)

    def remote(self) -> list[str]:
        """Addresses of a bucket without openpi's cached copy, and of the hub that are not in its client's cache."""
        given = {"--weight-loader.params-path": self.params_path, "--weight-loader.adapter-path": self.adapter_path}
        found = []
        for flag, where in given.items():
            if is_address(where):
                if not is_cached(where):
                    found.append(
                        f"{where} is not in the hub client's cache (HF_HOME): a start downloads it; a folder on this "
                        f"machine is given with {flag}"
                    )
            elif "://" in where:
                copy = cache_folder(where)
                if copy is None or not copy.is_dir():
                    place = f"put one at {copy}, openpi's cache, or " if copy is not None else ""
                    found.append(
                        f"{where} is not on this machine: a start reads it over the network; where there is none, "
                        f"bring a copy: {place}give its folder with {flag}"
                    )
        return found

    def tokenizer(self) -> str | None:
        """The fingerprint in one of our checkpoints; None for other formats."""
        if not self.params_path:
            return None
        return recorded_tokenizer(open_place(self.params_path))

    def objective(self) -> Mapping[str, Any] | None:
        """That of one of our checkpoints; None for other formats."""
        place = open_place(self.params_path) if self.params_path and not is_address(self.params_path) else None
        if place is None or not recognises(place):
            return None
        experiment, _ = recorded_experiment(place)
        return None if experiment is None else experiment.get("objective")

    def load_state(self, model: ModelConfig) -> Leaves | None:
        """With `continue_training` the checkpoint's state; the learning rate schedule continues at its step."""
        if not self.continue_training:
            return None
        if not self.params_path:
            raise UsageError("--weight-loader.continue-training needs --weight-loader.params-path: a step's directory")
        return state_leaves(open_checkpoint(self.params_path, model), parameter_names(model))

    def norm_stats(self, model: ModelConfig) -> Mapping[str, Any]:
        """Those beside the checkpoint, with `continue_training`."""
        return open_checkpoint(self.params_path, model).norm_stats if self.continue_training else {}


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _model_path(model: object) -> str | None:
    """The `--model.path` of a recorded model, or of the language model in it; None if it was not given."""
    if not isinstance(model, Mapping):
        return None
    if "sizes" in model:
        return model.get("path")
    return next((path for part in model.values() if (path := _model_path(part)) is not None), None)


def _has_own(names: Collection[str], model: ModelConfig, base: ModelConfig) -> bool:
    """Whether these are published names of `model` itself, some of which `base` does not have."""
    own = set(parameter_names(model).values()) - set(parameter_names(base).values())
    return not own.isdisjoint(names)
