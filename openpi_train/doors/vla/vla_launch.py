"""The launcher of the PaliGemma VLA's PyTorch trainer, `main_train_ddp.py`: its options as those of `launch local`.

Read next: `this_host.py`, `scripts/main_train_ddp.py`, `scripts/run_ddp_training.sh`.
"""

import argparse
import sys
from collections.abc import Sequence

from openpi_train import faults
from openpi_train.doors import guide_files
from openpi_train.doors.this_host import this_host
from openpi_train.launch import launchers
from openpi_train.launch.options import LaunchParser
from openpi_train.launch.spec import DEFAULT_PORT, LaunchError

_PROGRAM = "main_train_ddp.py"
# Options of the trainer that are the run's, and not the launcher's (`door_requests.py`).
OF_THE_RUN = (
    "--experiment --batch_size --keep_effective_batch_size --epochs --lr --checkpoint_dir --experiment_name "
    "--model_path_override --train_data_override --val_data_override --resume_checkpoint --use_wandb "
    "--wandb_project_name --wandb_entity"
).split()


def main(argv: Sequence[str]) -> int:
    """Start the processes of this host; options that are not the launcher's go to `vla`. Returns the exit code."""
    options, arguments = launchers.split_arguments(list(argv))
    given, others = _parser().parse_known_args(options)
    try:
        config = given.config_path if given.dry_run else guide_files.required(given.config_path)
    except LaunchError as error:
        sys.stderr.write(f"{_PROGRAM}: {error}\n")
        return faults.USAGE
    share = this_host(
        # A process without GPUs of its own uses all of its host.
        processes=given.world_size or 1,
        num_hosts=1,
        host=0,
        master_addr=None,
        master_port=given.port,
        default_port=DEFAULT_PORT,
        addr_option="--master-addr",
        devices_per_process=given.devices_per_process,
        log_dir=given.log_dir,
        dry_run=given.dry_run,
    )
    return launchers.main([*share, "--", "vla", "--config", config, *others, *arguments])


def _parser() -> argparse.ArgumentParser:
    parser = LaunchParser(
        prog=_PROGRAM,
        description="Train a PaliGemma policy by a YAML config, on the GPUs of this host.",
        epilog=f"Other options go to `python -m openpi_train vla`, whose --help explains them: {' '.join(OF_THE_RUN)}",
    )
    parser.add_argument("--config_path", "--config-path", "--config", default="configs/vla_config.yaml")
    parser.add_argument(
        "--world_size", "--world-size", type=int, help="processes, a GPU each (default: one with all GPUs)"
    )
    parser.add_argument("--port", type=int, help="a free port (default: any)")
    parser.add_argument("--devices_per_process", "--devices-per-process", type=int, help="CPU devices of each process")
    parser.add_argument("--log_dir", "--log-dir", help="folder for the processes' output (default: a temporary one)")
    parser.add_argument("--dry_run", "--dry-run", action="store_true", help="print the command lines, start nothing")
    return parser
