"""The flags of the verbs that read another tool's config. Read next: `posttraining/posttrain.py`, `ript/ript.py`.

They are separate from the implementations, which need jax, so that `--help` does not wait for it.
"""

import dataclasses
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from openpi_train.command_line import Request
from openpi_train.fields import at_least


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSpeedRequest(Request):
    """Show the flag for every key of a DeepSpeed JSON config, or the reason why there is none.

    Batch sizes and accumulation are checked against each other. A run takes the file unchanged: python -m openpi_train
    debug --exp-name x --deepspeed FILE
    """

    # The JSON file.
    file: Annotated[str, Positional, arg(metavar="FILE")]
    # Devices of the run, to check batch sizes.
    devices: int | None = at_least(1, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PosttrainRequest(Request):
    """Train a language model as a YAML config of the PyTorch post-training tool says.

    The log says what every key became. Any field of the experiment may be set as in training, and takes precedence:
    posttrain --config config.yaml --algorithm sft --batch-size 64. More: docs/from/posttraining_yaml.md
    """

    # The YAML config.
    config: str = "config.yaml"
    # train; data_process: only encode the datasets.
    mode: Literal["train", "data_process", "eval"] = "train"
    # sft, rm (or reward), dpo, ppo or grpo; None: as the config says.
    algorithm: str | None = None
    # Parent of the run directories, in place of the config's.
    output_dir: str | None = None
    # The run's name, in place of the config's; None and none there: the config's file name.
    experiment_name: str | None = None
    # A checkpoint to continue from, in place of the config's.
    resume_from_checkpoint: str | None = None
    # A DeepSpeed JSON config, in place of the config's.
    deepspeed_config: str | None = None
    # Given by launchers of torch and DeepSpeed; the variable LOCAL_RANK is used.
    local_rank: int | None = None

    def check(self) -> list[str]:
        """A sentence for the mode that other verbs have."""
        if self.mode != "eval":
            return []
        return [
            "--mode eval: the loss on validation files is measured during training (eval_steps); `generate RUN --file "
            "prompts.jsonl --out FILE` completes prompts with the trained model"
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RiptRequest(Request):
    """Let a robot policy learn from its own episodes as a YAML config of the RIPT trainers for pi0 says.

    The log says what every key became. Any field of the experiment may be set as in training, and takes precedence:
    ript --config config.yaml --rl.group-size 8. More: docs/from/ript_yaml.md
    """

    # The YAML config.
    config: str
    # The experiment whose model, data and environment the policy has; None: that of the run at policy_path.
    experiment: str | None = None
    # The environment, in place of task.benchmark_name: tabletop, metaworld, gym:ID, FILE.py:FUNCTION, libero:SUITE,
    # maniskill:ID.
    env: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class VlaRequest(Request):
    """Train a PaliGemma policy with a flow head as a YAML config of the VLA's PyTorch trainer says.

    The log says what every key became. Any field of the experiment may be set as in training, and takes precedence:
    vla --config configs/vla_config.yaml --grad-accum 2. More: docs/from/vla_yaml.md
    """

    # The YAML config.
    config: Annotated[str, arg(aliases=("--config-path",))] = "configs/vla_config.yaml"
    # The experiment whose sizes, and robot if the dataset does not say it, the policy has.
    experiment: str = "paligemma_flow"
    # Rows of each GPU, in place of data.batch_size; with --keep-effective-batch-size of all together.
    batch_size: int | None = at_least(1, None)
    # The batch size counts the rows of all GPUs.
    keep_effective_batch_size: bool = False
    # Passes over the training data, in place of training.epochs.
    epochs: int | None = at_least(1, None)
    # The learning rate, in place of optimizer.lr.
    lr: float | None = None
    # Parent of the run directories, in place of training.checkpoint_dir.
    checkpoint_dir: str | None = None
    # The run's name, in place of training.experiment_name; None and none there: the config's file name.
    experiment_name: str | None = None
    # Start weights, in place of model.vlm_config.model_name_or_path.
    model_path_override: str | None = None
    # The dataset, in place of data.train_parquet_files; several with commas between them.
    train_data_override: str | None = None
    # In place of data.val_parquet_files.
    val_data_override: str | None = None
    # A checkpoint to go on from: this run's (a step, best_model.pth for its best), or another run's.
    resume_checkpoint: str | None = None
    # Log to Weights & Biases, which is off otherwise.
    use_wandb: bool = False
    # The project there.
    wandb_project_name: str | None = None
    # The team there.
    wandb_entity: str | None = None
