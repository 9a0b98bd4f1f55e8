"""`Format`: how checkpoints of one form are recognised, opened and written.

Read next: `checkpoints/checkpoint_formats.py`, the table of all; `exchange.py`.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import Stored, Writer
from openpi_train.models.model_config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Format:
    """A checkpoint format.

    Attributes:
        name: its name in `--from` and `--to`.
        summary: one line of help: what such a checkpoint looks like.
        recognises: whether a place holds one; looks at few files.
        by_ending: whether the ending of a name says it: such formats are asked first, as others look into folders.
        open: opens one, with published names; gets the model, if known, for formats with other layouts.
        prepare: checks that a checkpoint of a model can be written in this format, and returns what writes it into a
            directory that does not exist yet; None if the format is read only.
        keeps: the parts of an opened checkpoint that the format can hold; None: all but the training state.
        lacks: a regular expression for published names that such a base checkpoint does not have.
        part: the part of a model that such a checkpoint holds; default: all of it.
        holds: a regular expression for the published names of the parameters that it holds of that part; None: all.
        has_norm_stats: whether it can hold norm stats.
        asset_id: the name under which norm stats are opened that have no robot's name; None: they have.
        library: the library that loads what is written, by its name on the hub.
        loading: a command that loads it with that library, in which `{name}` is that of the repository.
        start_flag: the flag with which a run starts from it.
    """

    name: str
    summary: str
    recognises: Callable[[Place], bool]
    open: Callable[[Place, ModelConfig | None], Stored]
    by_ending: bool = False
    prepare: Callable[[Stored, ModelConfig | None], Writer] | None = None
    keeps: Callable[[Stored, ModelConfig], Stored] | None = None
    lacks: str | None = None
    part: Callable[[ModelConfig], ModelConfig] = lambda model: model
    holds: str | None = None
    has_norm_stats: bool = True
    asset_id: str | None = None
    library: str = "openpi_train"
    loading: str | None = None
    start_flag: str = "--weight-loader.params-path"

    def write(self, directory: Path, stored: Stored, model: ModelConfig | None = None) -> None:
        """Check and write into a directory that does not exist yet. Raises UsageError if it cannot be written."""
        assert self.prepare is not None, f"{self.name} is only read"
        self.prepare(stored, model)(directory)

    def kept(self, stored: Stored, model: ModelConfig) -> Stored:
        """The parts of the model's checkpoint that can be written in this format."""
        if stored.train_state is None:
            return stored
        return self.keeps(stored, model) if self.keeps else dataclasses.replace(stored, train_state=None)
