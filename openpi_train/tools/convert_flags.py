"""The flags of `convert`, understood before anything heavy is imported. Read next: `convert.py`."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from openpi_train.runtime import logs


def main(argv: Sequence[str], parse_experiment: Callable[[str, Sequence[str]], Any]) -> int:
    """Run `convert` with these words; `parse_experiment` gives the experiment of a name and its flags."""
    parser = argparse.ArgumentParser(
        prog="python -m openpi_train convert",
        description="Convert a checkpoint: ours to openpi's form, others' to ours. Every key is accounted for, what is "
        "written is read again, and its outputs are compared with the source's (TARGET/parity.json).",
        epilog="Fields of the experiment's model may be set as in training: --experiment debug --model.action-dim 8. "
        "`convert deepspeed FILE` shows what a DeepSpeed config is as flags. More: docs/exchange.md",
        allow_abbrev=False,
    )
    parser.add_argument(
        "source", help="a checkpoint: a run's directory, a step's, one of another form; or gs://, s3://, hub:USER/NAME"
    )
    parser.add_argument(
        "target", type=Path, help="directory to make (a step's number suits openpi's trainer), or hub:USER/NAME"
    )
    parser.add_argument("--from", dest="source_format", metavar="FORMAT", help="form of SOURCE (default: seen from it)")
    parser.add_argument(
        "--to", dest="target_format", metavar="FORMAT", help="form of TARGET (openpi; of others' files: ours)"
    )
    parser.add_argument("--experiment", metavar="NAME", help="whose model it is (default: what a run of ours says)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="type of the parameters in TARGET")
    parser.add_argument("--merge-lora", action="store_true", help="fold low-rank adapters into the weights")
    parser.add_argument("--params-only", action="store_true", help="leave the training state out")
    parser.add_argument("--norm-stats", metavar="FILE", help="a norm_stats.json to put in, as --asset-id")
    parser.add_argument("--asset-id", metavar="NAME", help="name of the norm stats in TARGET")
    parser.add_argument("--overwrite", action="store_true", help="move what TARGET holds aside")
    parser.add_argument("--no-outputs", dest="outputs", action="store_false", help="do not compare the models' outputs")
    parser.add_argument("--public", action="store_true", help="a repository that a push makes is for all to see")
    parser.add_argument("--dry-run", action="store_true", help="account for every key and write nothing")
    known, rest = parser.parse_known_args(argv)
    fields = vars(known)
    name, dry_run = fields.pop("experiment"), fields.pop("dry_run")
    from openpi_train.policy.experiment_json import experiment_from_json
    from openpi_train.tools import convert as tool

    logs.configure(0)
    words = ["--exp-name", "convert", *rest]
    experiment = parse_experiment(name, words) if name else None

    def recorded(said: Mapping[str, Any]) -> Any:
        return parse_experiment(said["name"], words) if rest else experiment_from_json(said)

    return tool.main(tool.Request(**fields), experiment, recorded, dry_run)
