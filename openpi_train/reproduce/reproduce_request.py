"""The flags of the `reproduce` verb. Read next: `reproduce_run.py`."""

import dataclasses
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from openpi_train.command_line import Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReproduceRequest(Request):
    """Make a result of the board again: its data, the training, the evaluation, and a record of all that came out.

    Without a NAME it lists the board. The same command goes on where it was interrupted. With `launch ... -- reproduce
    NAME` several processes do it together. More: docs/howto/reproduce.md
    """

    # An entry of the board.
    name: Annotated[tuple[str, ...], Positional, arg(metavar="NAME")] = ()
    # List the board.
    show: Annotated[bool, arg(name="list")] = False
    # A record.json: make the result anew, and say what equals it bit for bit. Exit code 3 if a result differs.
    record: Annotated[Path | None, arg(name="check")] = None
    # The folder of data, run, evaluations and record; None: reproduce/NAME, or for --check reproduce/NAME.check, anew.
    out: Path | None = None

    @property
    def folder(self) -> Path:
        """The folder of the result."""
        name = self.name[0] if self.record is None else f"{self.name[0]}.check"
        return self.out or Path("reproduce") / name

    def check(self) -> list[str]:
        """A sentence for several names, and for flags without one."""
        # `name` is not `str | None`: see `tools/requests.py: DoctorRequest`.
        problems = [f"name one entry, not {', '.join(self.name)}"] if len(self.name) > 1 else []
        if not self.name and (self.record is not None or self.out is not None):
            problems.append("NAME is missing: --check and --out are for one entry (`reproduce --list` has all)")
        if self.name and self.record is not None and self.record.absolute() == (self.folder / "record.json").absolute():
            problems.append(f"--check {self.record} is the record of {self.folder} itself: give another --out")
        return problems
