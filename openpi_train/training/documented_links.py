"""Links at the places where other tools' guides say that a log or a checkpoint lies. Read next: `rundir.py`.

A door says them in `VARIABLE`, one PLACE=TARGET a line: the target lies in the run's directory, the place may have
{base} (the parent of all runs), {name} (the run's), {time} (of the start) and {process}: then it is a link for each.
"""

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import jax

from openpi_train.experiment import Experiment

logger = logging.getLogger(__name__)

VARIABLE = "OPENPI_TRAIN_LINKS"
_TIME = "{time}"


def documented(links: Mapping[str, str]) -> None:
    """Ask for these links, target by place, besides those that are asked for already."""
    before = os.environ.get(VARIABLE, "").splitlines()
    os.environ[VARIABLE] = "\n".join(dict.fromkeys([*before, *(f"{place}={to}" for place, to in links.items())]))


def link_documented(experiment: Experiment, directory: Path) -> None:
    """Make the links that are asked for, and log where they are. For process 0 only.

    A link of an earlier start is kept or replaced; a file that is no link is left alone, with a warning.
    """
    for line in _each_process(os.environ.get(VARIABLE, "").splitlines()):
        place, _, target = line.rpartition("=")
        place = place.replace("{base}", experiment.checkpoint_base_dir).replace("{name}", experiment.exp_name)
        try:
            link = _link(place, directory / target)
        except OSError as error:
            logger.warning("no link at %s, where a guide says that %s is: %s", place, target, error)
        else:
            logger.info("link: %s", link)


def _each_process(lines: Iterable[str]) -> Iterator[str]:
    """The lines, those about a process once for each."""
    for line in lines:
        for index in range(jax.process_count() if "{process}" in line else 1):
            yield line.replace("{process}", str(index))


def _link(place: str, target: Path) -> Path:
    """The link at this place to the target."""
    if _TIME in place:
        pattern = Path(place.replace(_TIME, "*"))
        root, *parts = Path(os.path.abspath(pattern)).parts
        for known in Path(root).glob(os.path.join(*parts)):
            if known.is_symlink() and _leads_to(known) == target:
                return known
    link = Path(place.replace(_TIME, time.strftime("%Y%m%d_%H%M%S"))).absolute()
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.is_symlink():
        link.unlink()
    elif link.exists():
        raise FileExistsError(f"{link} is a file of its own")
    link.symlink_to(os.path.relpath(target, link.parent))
    return link


def _leads_to(link: Path) -> Path:
    return Path(os.path.abspath(link.parent / os.readlink(link)))
