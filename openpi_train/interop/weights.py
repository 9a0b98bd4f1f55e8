"""Start weights: where a run's first parameters come from. Read next: `openpi.py`, which reads the files."""

import abc
import dataclasses
import logging
from collections.abc import Mapping

import numpy as np

from openpi_train.models.base import ModelConfig

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightLoader(abc.ABC):
    """Named after openpi's field, so that `--weight-loader.params-path` pastes over."""

    @abc.abstractmethod
    def load(self, model: ModelConfig) -> Mapping[str, np.ndarray]:
        """Parameters by path; what is not in it keeps its fresh value. Raises ValueError, FileNotFoundError."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointWeightLoader(WeightLoader):
    """The parameters of an openpi checkpoint, or of one of ours. An empty path starts from fresh weights.

    Every parameter must be there, save those that `model` adds for LoRA.
    """

    # A checkpoint's step directory, or the `params` directory in it.
    params_path: str = ""

    def load(self, model: ModelConfig) -> Mapping[str, np.ndarray]:
        """All of the checkpoint's parameters, under our paths."""
        if not self.params_path:
            logger.warning(
                "start weights: none, every parameter is freshly initialised; "
                "fine-tune with --weight-loader.params-path <checkpoint>/params"
            )
            return {}
        if "://" in self.params_path:
            raise ValueError(
                f"--weight-loader.params-path {self.params_path!r} is remote; copy it to a local or shared disk first, "
                f"for instance: gcloud storage cp -r {self.params_path} <directory>"
            )
        from openpi_train.interop import openpi

        return openpi.load_params(self.params_path, model, allow_missing=r".*lora.*")
