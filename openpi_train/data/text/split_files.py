"""Which files of a folder are data, and of which split. Read next: `text_files.py`.

Not data, as in the `datasets` library: hidden files and what is in hidden folders (Jupyter's checkpoints, a desktop's
trash, caches), in folders whose name begins with two underscores (`__MACOSX`), and what Spark and Delta Lake write for
themselves.
"""

import json
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from openpi_train.data.core.source import BadRecord

logger = logging.getLogger(__name__)

# Words that mean the same split.
_WORDS = (
    {"train", "training"},
    {"validation", "valid", "val", "dev"},
    {"test", "testing", "eval", "evaluation"},
)
_LETTER, _DIGIT = r"[^\W\d_]", r"[^\W_]"
_NOT_DATA = ("_temporary", "_delta_log")
# What `save_to_disk` of the `datasets` library writes beside its arrow files: their names, in order.
_STATE, _ARROW = "state.json", ".arrow"
# What the library writes about a dataset, beside its files.
_ABOUT = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json")
# What it keeps of computations, beside the files of a dataset.
_CACHED = "cache-"


def data_files(root: Path, endings: Sequence[str]) -> dict[str, bool]:
    """The paths below `root` of its files of data with these endings, in order, and which are in a linked folder.

    Linked folders are entered, but none within itself.

    Raises BadRecord if a folder that `save_to_disk` wrote lacks a file.
    """
    found: dict[str, bool] = {}
    skipped: list[str] = []
    for folder, names, is_linked in _folders(root, skipped):
        own = [name for name in names if name.endswith(tuple(endings)) and not name.startswith((".", *_ABOUT))]
        if any(name.endswith(_ARROW) for name in own):
            own = _of_saved(root / folder, own)
        found |= {os.path.join(folder, name): is_linked for name in own}
    if skipped:
        shown = ", ".join(sorted(skipped)[:5]) + (", ..." if len(skipped) > 5 else "")
        logger.info("%s: not read, as hidden folders are no data: %s", root, shown)
    return dict(sorted(found.items()))


def read_once(root: Path, names: Mapping[str, bool]) -> list[str]:
    """Those of the files (of `data_files`) that are not the same as one before; a link gives way to its target."""
    places = {os.path.realpath(root / name) for name, is_linked in names.items() if not is_linked}
    kept = []
    for name, is_linked in names.items():
        place = os.path.realpath(root / name)
        if is_linked and place in places:
            continue
        places.add(place)
        kept.append(name)
    return kept


def _folders(root: Path, skipped: list[str]) -> Iterator[tuple[str, list[str], bool]]:
    """Each folder of data below `root`, the files in it, and whether it is reached by a link; "" is `root` itself.

    `pathlib` enters links or not according to Python's version.
    """
    waiting: list[tuple[str, tuple[str, ...], bool]] = [("", (os.path.realpath(root),), False)]
    while waiting:
        folder, above, is_linked = waiting.pop()
        files = []
        with os.scandir(root / folder) as entries:
            for entry in entries:
                path = os.path.join(folder, entry.name)
                if not entry.is_dir():
                    files += [entry.name] if entry.is_file() else []
                elif entry.name.startswith((".", "__")) or entry.name in _NOT_DATA:
                    skipped.append(path)
                elif (place := os.path.realpath(root / path)) not in above:  # else a link to a folder that it is in
                    waiting.append((path, (*above, place), is_linked or entry.is_symlink()))
        yield folder, files, is_linked


def _of_saved(folder: Path, names: list[str]) -> list[str]:
    """The files of a dataset that `save_to_disk` wrote: not those of an earlier one, nor what was computed of it."""
    if not (folder / _STATE).is_file():
        return [name for name in names if not (name.endswith(_ARROW) and name.startswith(_CACHED))]
    try:
        state = json.loads((folder / _STATE).read_bytes())
        listed = [str(one["filename"]) for one in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        told = f"{folder / _STATE} is none of a dataset that save_to_disk of the datasets library wrote ({error!r})"
        raise BadRecord(f"{told}; write it again") from error
    if state.get("_indices_data_files"):
        raise BadRecord(f"{folder} has only a selection of its rows (an old save_to_disk); write it again")
    if missing := [name for name in listed if name not in names]:
        raise BadRecord(f"{folder} lacks {', '.join(missing[:3])}, which its {_STATE} lists; copy or write it again")
    return listed


def of_split(names: Collection[str], split: str) -> list[str]:
    """Those of these files that are of a split.

    A split's name, or a word that means the same, is a word of the file's own name, or the whole name of a folder that
    it is in. The file's own name decides if it names one of the usual splits. Without a word of any split in all names,
    every file is of the training split.
    """
    wanted = _synonyms(split)
    found = [name for name in names if _is_of(name, wanted)]
    if wanted == _WORDS[0] and not found and not any(_is_of(name, words) for name in names for words in _WORDS[1:]):
        return list(names)
    if aside := [name for name in names if name not in found and wanted & set(_parents(name))]:
        logger.warning(
            "%s %s not read for the split %s: the file's own name says another, that of its folder %s",
            *(", ".join(aside[:3]) + (", ..." if len(aside) > 3 else ""), "is" if len(aside) == 1 else "are"),
            *(split, split),
        )
    return found


def _is_of(name: str, wanted: set[str]) -> bool:
    if _names(name, wanted):
        return True
    parents = _parents(name)
    if wanted not in _WORDS:
        return bool(wanted & set(parents))
    if any(_names(name, words) for words in _WORDS):
        return False
    nearest = next((parent for parent in reversed(parents) if any(parent in words for words in _WORDS)), None)
    return nearest in wanted


def _synonyms(split: str) -> set[str]:
    return next((words for words in _WORDS if split.lower() in words), {split.lower()})


def _names(name: str, words: set[str]) -> bool:
    """Whether the file's own name has one of the words, between other characters than letters."""
    own = Path(name).name.lower()
    return any(re.search(_whole(word), own) for word in words)


def _whole(word: str) -> str:
    """A pattern of the word that is no part of a longer one; of one that ends with a digit, of no longer number."""
    before, after = (_DIGIT if letter.isdigit() else _LETTER for letter in (word[0], word[-1]))
    return rf"(?<!{before}){re.escape(word)}(?!{after})"


def _parents(name: str) -> list[str]:
    """The names of the folders that a file is in, in lower case."""
    return [parent.lower() for parent in Path(name).parts[:-1]]
