"""Restart a run after a failure that a restart can fix. Read next: `processes.py`, which runs one start.

The run continues from its last good checkpoint. Which faults these are: `../faults.py`.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from openpi_train import faults
from openpi_train.faults import Restart
from openpi_train.launch.options import at_least, option
from openpi_train.launch.processes import LaunchOutcome, stop_signals_to, tell
from openpi_train.launch.spec import VERBS_WITHOUT_RUN, without_going_back

_LONGEST_PAUSE_S = 60.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """One start of the run. `number` is 0 for the first; `in_vain` counts the starts without progress before it.

    `restarts` counts those since the last progress, of `Rules.max_restarts`. `missing`: hosts that earlier starts have
    lost and that have not come back; `broken`: those whose hardware has failed, which are not asked.
    """

    arguments: tuple[str, ...]
    hosts: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    number: int = 0
    in_vain: int = 0
    restarts: int = 0
    saved_step: int = 0

    @property
    def pause_s(self) -> float:
        """How long to wait before it: 1 s after progress, otherwise doubled each time, since the cause may last."""
        return min(2.0**self.in_vain, _LONGEST_PAUSE_S)

    def log_dir(self, base: Path) -> Path:
        """The folder for its processes' output: `base`, or one in there for each restart."""
        return base / f"restart_{self.number}" if self.number else base


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """The number of restarts without progress, and the minimum number of hosts (None: always as many as at first).

    `hosts`: all that may be used, those of the first start first; the others are spare. `sharing`: on which of these
    numbers of hosts the run can go on. `answers`: whether a lost host can be reached again.
    """

    max_restarts: int
    min_hosts: int | None = None
    hosts: tuple[str, ...] = ()
    num_hosts: int = 0
    answers: Callable[[str], bool] = lambda host: False
    sharing: Callable[[Sequence[int]], Sequence[int]] = lambda counts: counts


def max_restarts_option() -> Any:
    """The option of every launcher that can restart a run."""
    help = "restarts in a row without a new checkpoint, after a killed or lost process, failed hardware, or a stop not "
    help += "requested from this launcher (0)"
    return option(help, 0, type=at_least(0), metavar="N")


def supervise(begin: Callable[[Start], LaunchOutcome], start: Start, rules: Rules) -> int:
    """Start the run with `begin`, and restart it by the rules; returns the exit code of the last start.

    A signal during the wait between two starts also returns that code.
    """
    while True:
        outcome = begin(start)
        following = after(start, outcome, rules)
        if following is None:
            if rules.max_restarts and can_be_mended(outcome):
                tell(f"not restarted: {rules.max_restarts} in a row saved nothing new (--max-restarts)")
            return outcome.code
        if _stopped_within(following.pause_s, announcement(start, outcome, following, rules)):
            return outcome.code
        start = following


def after(start: Start, outcome: LaunchOutcome, rules: Rules) -> Start | None:
    """The start that follows one that ended so; None for no restart."""
    fewer = _one_less(start.hosts, outcome, rules)
    further = outcome.status.saved_step > start.saved_step
    restarts = 0 if further else start.restarts
    if restarts >= rules.max_restarts or not (fewer or can_be_mended(outcome)):
        return None
    hosts, missing = (fewer, start.missing) if fewer else _remaining(start, outcome, rules)
    return Start(
        # A start that ended before opening its directory may have left an older run there.
        arguments=resumed(start.arguments, has_saved=further) if outcome.status.opened else start.arguments,
        hosts=hosts,
        missing=missing,
        broken=tuple(host for host in (*start.broken, *outcome.broken_hosts) if host in missing),
        number=start.number + 1,
        in_vain=0 if further else start.in_vain + 1,
        restarts=restarts + 1,
        saved_step=max(outcome.status.saved_step, start.saved_step),
    )


def can_be_mended(outcome: LaunchOutcome) -> bool:
    """Whether a restart may help, by the table of faults; never after a stop that this launcher was asked for."""
    fault = faults.fault_of(outcome.code)
    return not outcome.asked and fault is not None and fault.restart in (Restart.SAME_HOSTS, Restart.OTHER_HOSTS)


def resumed(arguments: tuple[str, ...], *, has_saved: bool = False) -> tuple[str, ...]:
    """The arguments that continue the run started with these; once it has saved, it does not go back again.

    A verb that does not take --resume goes on, or begins again, with the same ones.
    """
    if arguments and arguments[0] in VERBS_WITHOUT_RUN:
        return arguments
    kept = tuple(word for word in arguments if word not in ("--overwrite", "--no-resume"))
    if has_saved:
        kept, _ = without_going_back(kept)
    return kept if "--resume" in kept else (*kept, "--resume")


def announcement(start: Start, outcome: LaunchOutcome, following: Start, rules: Rules) -> str:
    """The line with the reason, delay and hosts of a restart, and the restarts left."""
    left = rules.max_restarts - following.restarts
    without = [host for host in start.hosts if host not in following.hosts]
    hosts = f"; without {', '.join(without)}: on {', '.join(following.hosts)}" if without else ""
    if back := [host for host in following.hosts if host not in start.hosts]:
        hosts += f"; with {', '.join(back)}"
    restarts = f"{left} more restart{'' if left == 1 else 's'} left"
    return f"starting again in {following.pause_s:.0f} s ({restarts}): {outcome.reason}{hosts}"


def _one_less(hosts: tuple[str, ...], outcome: LaunchOutcome, rules: Rules) -> tuple[str, ...]:
    """All hosts but one if the run cannot divide its batch over this many; otherwise none."""
    fault = faults.fault_of(outcome.code)
    too_many = fault is not None and fault.restart is Restart.FEWER_HOSTS and not outcome.asked
    if not too_many or rules.min_hosts is None or len(hosts) <= rules.min_hosts:
        return ()
    return hosts[:-1]


def _remaining(start: Start, outcome: LaunchOutcome, rules: Rules) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The hosts to continue with, and those that are missing.

    As many as at first if there are enough, with spare ones and those that have come back; otherwise the largest number
    on which the run can go on. If too few would remain, all are tried again, since they may come back. If it can on
    none, the run itself reports why.
    """
    pool, number = rules.hosts or start.hosts, rules.num_hosts or len(rules.hosts or start.hosts)
    lost = [host for host in pool if host in (*start.missing, *outcome.lost_hosts)]
    # A host that was lost just now is asked, too: often a process is lost, and not its host.
    broken = (*start.broken, *outcome.broken_hosts)
    back = [host for host in lost if host not in broken and rules.answers(host)]
    missing = tuple(host for host in lost if host not in back)
    left = tuple(host for host in pool if host not in missing)
    if len(left) >= number:
        return left[:number], missing
    if rules.min_hosts is None or not rules.min_hosts <= len(left):
        return pool[:number], ()
    sharing = rules.sharing(range(len(left), rules.min_hosts - 1, -1))
    return (left[: sharing[0]] if sharing else left), missing


def _stopped_within(pause_s: float, reason: str) -> bool:
    """Print the reason and wait; returns whether this launcher was told to stop meanwhile."""
    told: list[int] = []
    with stop_signals_to(lambda signum, _: told.append(signum)):
        tell(reason)
        deadline = time.monotonic() + pause_s
        while not told and time.monotonic() < deadline:
            time.sleep(0.05)
    return bool(told)
