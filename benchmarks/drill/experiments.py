"""The runs of a drill: imitation, a language model, reinforcement learning; each compiles in seconds."""

import dataclasses

from benchmarks.launched import SMALL


@dataclasses.dataclass(frozen=True)
class Drilled:
    """An experiment and its flags; `save_interval` in steps. `is_local`: it also saves on the hosts' own disks."""

    words: tuple[str, ...]
    save_interval: int
    is_local: bool = False
    acts: bool = False

    @property
    def name(self) -> str:
        """The folder of its runs."""
        return self.words[0].rpartition(":")[2]


_LOCAL = ("--local-checkpoints.dir", "/tmp/local_checkpoints", "--local-checkpoints.interval")
_KEPT = ("--keep-last", "3", "--log-interval", "1", "--no-tensorboard")
_TINY = ("--model.sizes.width", "16", "--model.sizes.mlp-dim", "16", "--model.sizes.depth", "1")
_FAST = ("--lr-schedule.peak-lr", "1e-2", "--lr-schedule.decay-lr", "1e-2", "--lr-schedule.warmup-steps", "0")

EXPERIMENTS = {
    "imitation": Drilled(
        (SMALL, "--batch-size", "8", "--save-interval", "10", "--eval.interval", "15", *_KEPT, *_FAST),
        save_interval=10,
    ),
    "language": Drilled(
        (
            *("arithmetic_sft", "--batch-size", "16", "--save-interval", "10", "--eval.interval", "15", *_KEPT),
            *("--eval.num-rows", "16", "--eval.num-prompts", "0", *_TINY, *_FAST, *_LOCAL, "5"),
        ),
        save_interval=10,
        is_local=True,
    ),
    # An iteration is 2 epochs of 2 batches.
    "reinforcement": Drilled(
        (
            *("arithmetic_grpo", "--batch-size", "16", "--save-interval", "8", "--eval.interval", "12", *_KEPT),
            *("--rl.num-groups", "8", "--rl.group-size", "4", "--rl.epochs", "2"),
            *("--rl.mixed-only", "--rl.max-waves", "2", "--rl.skip-solved", "1"),
            *("--objective.distribution.top-k", "8", "--eval.num-prompts", "0", *_TINY, *_FAST),
        ),
        save_interval=8,
        acts=True,
    ),
}
