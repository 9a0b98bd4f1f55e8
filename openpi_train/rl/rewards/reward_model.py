"""The reward of a reward model: a checkpoint of a run or a folder in Hugging Face's form. Read next: `judge.py`."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from openpi_train.checkpoints import checkpoint_formats
from openpi_train.data.core.placement import local_rows, on_devices
from openpi_train.data.text.text_batches import one_text_per_row
from openpi_train.evaluation.measure import EvaluationContext
from openpi_train.interop.config_json import config_from_json
from openpi_train.interop.stored_leaves import Stored, place
from openpi_train.models.language import huggingface
from openpi_train.models.language.accompanied import policy_of
from openpi_train.models.language.reward import SCORE, RewardConfig
from openpi_train.models.model_config import ModelConfig
from openpi_train.parallel.params import ParamLeaves, Params, merge_module
from openpi_train.rl.rewards.text_reward import Completed
from openpi_train.runtime.exits import UsageError

logger = logging.getLogger(__name__)

_ROWS = 32  # of a device that are scored at a time


class ModelReward:
    """Scores prompts with their completions. All processes compute together, each with all completions.

    The parameters lie on the run's devices, split as the run's plan says, for the whole run. Activations have the
    dtype of the run's own model.

    Raises UsageError if the checkpoint is no reward model, or was trained with another tokenizer.
    """

    def __init__(self, where: str, running: EvaluationContext):
        stored, model = _opened(where)
        if stored.tokenizer is not None and stored.tokenizer != running.data.tokenizer:
            raise UsageError(
                f"{stored.where} was trained with another tokenizer than this run's: its tokens mean other text"
            )
        run_model = policy_of(running.trainer.model)
        dtype = model.language.dtype if run_model is None else run_model[0].dtype
        model = dataclasses.replace(model, language=dataclasses.replace(model.language, remat="none", dtype=dtype))
        model = model.with_compute(attention="auto")  # which every device has
        graphdef = nnx.split(nnx.eval_shape(lambda: model.build(nnx.Rngs(0))))[0]
        devices: Any = running.trainer.devices
        self._devices = devices = dataclasses.replace(devices, graphdef=graphdef, dtype=model.compute.dtype)
        leaves = checkpoint_formats.model_params(stored, model)
        self._params = {
            path: place(leaf, np.dtype(np.float32), devices.plan.tree("state", {path: leaf})[path])
            for path, leaf in leaves.items()
        }
        self._longest, self._where = model.context_length, stored.where
        num_params = sum(leaf.size for leaf in self._params.values())
        logger.info("%s: a reward model with %s parameters", stored.where, f"{num_params:,}")

        def of_rows(params: ParamLeaves, rows: Mapping[str, jax.Array], _: None) -> jax.Array:
            found: Any = merge_module(graphdef, params)
            return found.rewards(rows["tokens"], rows["positions"], rows["segments"], num_segments=1)[:, 0]

        def score(params: Params, rows: Mapping[str, jax.Array]) -> jax.Array:
            return jax.lax.with_sharding_constraint(devices.rows(of_rows, params, rows, None), devices.plan.replicated)

        self._score = jax.jit(score)

    def __call__(self, completed: Sequence[Completed]) -> list[float | None]:
        """The rewards. Every process must call it with the same completions. Raises UsageError for one too long."""
        longest = max(len(one.tokens) for one in completed)
        if longest > self._longest:
            raise UsageError(
                f"a prompt and its completion have {longest} tokens, and {self._where} takes {self._longest}"
            )
        plan = self._devices.plan
        at_once = _ROWS * plan.mesh.size
        length = -(-longest // 32) * 32  # few programs are compiled
        found: list[float | None] = []
        for start in range(0, len(completed), at_once):
            part = completed[start : start + at_once]
            columns = one_text_per_row([one.tokens for one in part], at_once, length)
            mine = local_rows(plan.batch, at_once)
            rows = {name: on_devices(column[mine], plan.batch, at_once, mine) for name, column in columns.items()}
            with jax.set_mesh(plan.real_mesh):
                found += jax.device_get(self._score(self._params, rows)).tolist()[: len(part)]
        return found


def _opened(where: str) -> tuple[Stored, RewardConfig]:
    """A checkpoint, and the reward model that it is of."""
    place_of = checkpoint_formats.open_place(where)
    if huggingface.recognises(place_of):
        stored = checkpoint_formats.open_checkpoint(where)
        if SCORE not in stored.params:
            raise UsageError(f"{stored.where} has no score head: it is no reward model")
        return stored, RewardConfig(language=huggingface.read_model(place_of))
    stored = checkpoint_formats.open_checkpoint(where)
    if stored.experiment is None:
        raise UsageError(f"{stored.where} does not say whose model it is: convert it with --to huggingface")
    model = config_from_json(stored.experiment["model"], ModelConfig, "model", {})
    if not isinstance(model, RewardConfig):
        raise UsageError(f"{stored.where} is a {type(model).__name__}, which is no reward model")
    return stored, model
