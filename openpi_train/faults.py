"""What can end a run: for each cause its exit code, and whether a launcher starts the run again. One table for all.

`runtime/exits.py` gives errors their codes; the launchers, the Slurm script and the manifests of Kubernetes decide from
`FAULTS`; docs/reference/exit_codes.md shows `as_markdown()`. The numbers never change their meaning. Standard library
only, since launchers run without the rest of the project.
"""

import dataclasses
import enum

DONE = 0
BUG = 1
USAGE = 2
DATA = 3
CHECKPOINT = 4
NUMBERS = 5
INDIVISIBLE = 6
PEER_LOST = 70
HARDWARE = 71
NO_PROGRESS = 72
PREEMPTED = 75
INTERRUPTED = 130  # what a shell reports after Ctrl-C
CLOSED_OUTPUT = 141
KILLED_BY = 128  # and the signal's number: what a shell and a launcher report


class Restart(enum.Enum):
    """Whether another start may end better, and where."""

    NEVER = "ends the run"
    FEWER_HOSTS = "with `--min-nodes`: again on fewer hosts; otherwise ends the run"
    SAME_HOSTS = "again"
    OTHER_HOSTS = "again, without that host if enough are left"


@dataclasses.dataclass(frozen=True)
class Fault:
    """One cause of an end of a run."""

    cause: str
    code: int
    meaning: str
    remedy: str
    restart: Restart = Restart.NEVER


FAULTS = (
    Fault("own bug", BUG, "an unexpected exception: the traceback is the message", "report it"),
    Fault(
        "user",
        USAGE,
        "wrong command line, configuration or environment (a package that is missing, such as the hub's client), or "
        "not enough memory",
        "read the message",
    ),
    Fault(
        "data",
        DATA,
        "data error; a dataset or a tokenizer that the hub does not give; `data check` found more than notes",
        "as the message, or the table, says",
    ),
    Fault(
        "checkpoint",
        CHECKPOINT,
        "none usable, no such model on the hub, or no disk space for a first one",
        "free disk space, restore a copy, check the name",
    ),
    Fault(
        "numbers",
        NUMBERS,
        "NaN or Inf in an update (it was not applied)",
        "the message lists the batch's rows; `--on-nan skip` skips such updates",
    ),
    Fault(
        "user",
        INDIVISIBLE,
        "the batch size is not divisible by the number of devices",
        "as the message says; `launch ssh --min-nodes` tries fewer hosts",
        Restart.FEWER_HOSTS,
    ),
    Fault(
        "network",
        PEER_LOST,
        "another process or the network to it was lost, or it is stuck",
        "restart with `--resume`",
        Restart.SAME_HOSTS,
    ),
    Fault(
        "host",
        PEER_LOST,
        "the host has no memory, threads or descriptors left for steps like those before",
        "restart with `--resume`; look at what else runs there, and at `ulimit -n`",
        Restart.SAME_HOSTS,
    ),
    Fault(
        "storage",
        PEER_LOST,
        "a file system failed to read or write for minutes, or was full for several saves in a row",
        "free disk space; restart with `--resume`",
        Restart.SAME_HOSTS,
    ),
    Fault(
        "hardware",
        HARDWARE,
        "a device has failed: CUDA reports an uncorrectable ECC error, an illegal address, a failed launch, no device, "
        "or the like; it has no memory for a step like those before; a host's own disk (`--local-checkpoints.dir`) "
        "cannot be written at the start; or a restart finds fewer devices than the run had",
        "restart with `--resume`, without that host if it fails again",
        Restart.OTHER_HOSTS,
    ),
    Fault(
        "no progress",
        NO_PROGRESS,
        "started again and again without a new checkpoint, more often than the launcher allows",
        "read the causes in the log; the step and the rows of the batch are named there",
    ),
    Fault(
        "preemption",
        PREEMPTED,
        "stopped on request, after saving a complete checkpoint",
        "restart with `--resume`",
        Restart.SAME_HOSTS,
    ),
    Fault("user", INTERRUPTED, "Ctrl-C", "steps since the last checkpoint are lost"),
    Fault("user", CLOSED_OUTPUT, "nobody reads the output any more, as after a pipe to `head`; nothing is said", ""),
)
# Ctrl-C and a closed output apart, which stand above.
KILLED = Fault(
    "host",
    KILLED_BY,
    "ended by signal n, as a launcher sees it: killed for memory, crashed, or its host went down",
    "read the process's own log",
    Restart.SAME_HOSTS,
)


def fault_of(code: int) -> Fault | None:
    """The cause of an end with this code; None for a good end. Unknown codes are bugs."""
    if code == DONE:
        return None
    known = {fault.code: fault for fault in FAULTS}
    return known.get(code, KILLED if code > KILLED_BY else known[BUG])


def codes_with(*restarts: Restart) -> list[int]:
    """The exit codes whose faults have one of these rules, ascending. Those of signals are not among them."""
    return sorted({fault.code for fault in FAULTS if fault.restart in restarts})


def as_markdown() -> str:
    """The table of docs/reference/exit_codes.md."""
    rows = ["| code, cause | meaning | what to do | a launcher |", "|---|---|---|---|", "| 0 | done | | |"]
    for fault in (*FAULTS, KILLED):
        code = "128 + n" if fault is KILLED else str(fault.code)
        rows.append(f"| {code}, {fault.cause} | {fault.meaning} | {fault.remedy} | {fault.restart.value} |")
    return "\n".join(rows)
