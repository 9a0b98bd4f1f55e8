"""Start weights: where a run's first parameters come from. Read next: `checkpoint_formats.py`, which opens files."""

import abc
import dataclasses
import logging

from openpi_train.interop.checkpoint_formats import model_params, named, open_checkpoint, open_place
from openpi_train.interop.openpi import parameter_names
from openpi_train.interop.openpi_state import state_leaves
from openpi_train.interop.ours import recorded_tokenizer
from openpi_train.interop.stored_leaves import Leaves
from openpi_train.models.base import ModelConfig
from openpi_train.runtime.exits import UsageError

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightLoader(abc.ABC):
    """Named after openpi's field, so that `--weight-loader.params-path` pastes over."""

    @abc.abstractmethod
    def load(self, model: ModelConfig) -> Leaves:
        """Parameters by path, opened but not read; what is not in it keeps its fresh value.

        Raises CheckpointError.
        """

    def tokenizer(self) -> str | None:
        """`tokens_fingerprint` of what the weights were trained with; None if that is not recorded."""
        return None

    def load_state(self, model: ModelConfig) -> Leaves | None:
        """The whole training state to go on from, by our names (`openpi_state.state_leaves`); None: a new one."""
        del model
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointWeightLoader(WeightLoader):
    """The parameters of a checkpoint of any form in `interop/checkpoint_formats.py`.

    An empty path starts from fresh weights. Every parameter must be there, save those that `model` adds for LoRA, and
    to a base model that it starts from.
    """

    # A checkpoint: a directory, or an address in a bucket (gs://, s3://); what forms are read, docs/exchange.md says.
    params_path: str = ""
    # Go on with its whole training state, too: step, optimizer and average; of ours or as openpi's trainer saves it.
    continue_training: bool = False

    def load(self, model: ModelConfig) -> Leaves:
        """All of the checkpoint's parameters, under our paths."""
        if not self.params_path:
            logger.warning(
                "start weights: none, every parameter is freshly initialised; "
                "fine-tune with --weight-loader.params-path <checkpoint>/params"
            )
            return {}
        stored = open_checkpoint(self.params_path, model)
        params = model_params(stored, model, may_miss=named(stored.format).lacks or r".*lora.*")
        logger.info("start weights: %d parameters from %s (%s)", len(params), stored.where, stored.format)
        return params

    def tokenizer(self) -> str | None:
        """What a checkpoint of ours says; other forms say nothing."""
        if not self.params_path:
            return None
        return recorded_tokenizer(open_place(self.params_path))

    def load_state(self, model: ModelConfig) -> Leaves | None:
        """With `continue_training` the checkpoint's state; the learning rate's schedule goes on at its step."""
        if not self.continue_training:
            return None
        if not self.params_path:
            raise UsageError("--weight-loader.continue-training needs --weight-loader.params-path: a step's directory")
        return state_leaves(open_checkpoint(self.params_path, model), parameter_names(model))
