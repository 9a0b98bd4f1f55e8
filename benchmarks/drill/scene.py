"""What a fault has before it: the run, its victim, the window. Read next: `harms.py`, `kinds.py`."""

import dataclasses
import random

from benchmarks.drill.laboratory import Laboratory
from benchmarks.drill.running import Running
from benchmarks.drill.windows import WINDOWS, Fired


class FaultFailed(Exception):
    """A requirement on the run was not met, or the fault could not be made."""


@dataclasses.dataclass(kw_only=True)
class Scene:
    """One fault of a run, in a window of the process `rank`; `token` is that of the start that is there before it.

    `is_next`: the fault waits for the start after that one. `fired` is set once the harm is done.
    """

    lab: Laboratory
    run: Running
    rng: random.Random
    rank: int
    window: str
    token: str
    is_next: bool
    fired: Fired | None = None
    # What must be taken away at the end, by number: processes that nobody could end.
    left_behind: list[int] = dataclasses.field(default_factory=list)

    def arm(self, harm: str, value: object, times: int) -> None:
        """Have the harm done at a random time within the window."""
        after_s = self.rng.uniform(0.0, WINDOWS[self.window].usual_s)
        not_token = self.token if self.is_next else ""
        self.lab.armed.arm(self.rank, self.window, harm, value, after_s=after_s, times=times, not_token=not_token)

    @property
    def host(self) -> int:
        """The number of the victim's host."""
        assert self.fired is not None
        return self.lab.index(self.fired.host)

    def another_host(self) -> int:
        """The number of the host of another process of the run."""
        others = sorted({one.host for one in self.run.present().values()} - {self.host})
        if not others:
            raise FaultFailed("no other host was there")
        return self.rng.choice(others)
