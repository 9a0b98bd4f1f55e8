"""The strategy of a YAML config, and the DeepSpeed file beside it. Read next: `deepspeed/flags.py`."""

import dataclasses
from collections.abc import Mapping

from openpi_train.doors.config_file import ConfigFile, Flag, as_json, contradiction, words
from openpi_train.doors.deepspeed.flags import BATCH_KEYS, STRATEGIES, DeepSpeedFlags, note_file, translate_file
from openpi_train.doors.posttraining.yaml_config import YamlConfig
from openpi_train.runtime.exits import UsageError

_STRATEGY, _SAME_STRATEGY = "distributed_strategy", "hardware.distributed.strategy"
_FILE, _SAME_FILE = "deepspeed.config_path", "deepspeed_config"
_STAGE, _OFFLOAD = "deepspeed_zero_stage", "deepspeed_cpu_offload"
# Of which `rule` is what the tool means by auto, its rule by the number of parameters (`posttrain.py`).
_KINDS = ("ddp", "deepspeed", "auto", "rule")
_CHOSEN = "by memory and speed (`rule`: by parameters, as the tool does: under 1B ddp, 1B to 7B ZeRO-2, above ZeRO-3)"
_BATCH = ("batch-size", "keep-effective-batch-size")
_ROWS = frozenset({"micro-batch-size", "grad-accum"})
_KEEP_ONE = "keep one of them, or make them equal"
_MAKE_AUTO = (
    f'make them equal, or give "auto" for {", ".join(BATCH_KEYS)} in the DeepSpeed file: then the YAML file\'s count'
)
_SCHEDULE, _RATE = "lr-schedule.", "lr-schedule.peak-lr"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BesideDeepSpeed:
    """The DeepSpeed file at `path`, translated; None without a file."""

    path: str = ""
    translated: DeepSpeedFlags | None = None

    @property
    def flags(self) -> Mapping[str, Flag]:
        """The flags of the file by the field that they set."""
        found = {} if self.translated is None else self.translated.file.flags
        return {name: words(name, value) for name, value in found.items()}

    @property
    def lines(self) -> tuple[str, ...]:
        """A line per key of the file, under its name: what it gives the run, after `joined`."""
        return () if self.translated is None else (f"{self.path}:", *self.translated.lines)

    @property
    def has_total(self) -> bool:
        """Whether it gives the rows of all devices together."""
        return [name in self.flags for name in _BATCH] == [True, False]

    @property
    def batch(self) -> int | None:
        """The rows of a step, of all devices or of one, if it gives them."""
        return self._number("batch-size")

    @property
    def rows(self) -> int | None:
        """The rows of a micro-batch on a device, if it gives them."""
        return self._number("micro-batch-size")

    @property
    def accum(self) -> int | None:
        """The micro-batches of a step, if it gives them."""
        return self._number("grad-accum")

    def _given(self, name: str) -> str:
        """The keys of the file that give a flag, or the flag, if it is a default of DeepSpeed."""
        found = None if self.translated is None else self.translated.file
        return (_keys(found, name) if found else "") or f"the default is {' '.join(self.flags[name])}"

    def _number(self, name: str) -> int | None:
        return int(self.flags[name][1]) if name in self.flags else None

    def joined(self, file: YamlConfig) -> tuple[Flag, ...]:
        """The flags of both files, the YAML config's last.

        As in the tool, the YAML config's rate replaces that of the DeepSpeed file, its warm-up or schedule both of the
        other's, its interval of log lines the other's, and so do the strategies `auto` and `rule`. Raises UsageError if
        the files differ in anything else.
        """
        own = {name: words(name, value) for name, value in file.flags.items()}
        differ: dict[str, str] = {}
        for name, flag in own.items():
            replaces = (
                name.startswith(_SCHEDULE) or name in (*_BATCH, "log-interval") or flag[1:] in (("auto",), ("rule",))
            )
            if name in self.flags and not replaces and not _same(flag, self.flags[name]):
                differ[name] = f"{_keys(file, name)}, and in {self.path} {self._given(name)}"
        if differ:
            raise contradiction("; ".join(differ.values()), _MAKE_AUTO if _ROWS & differ.keys() else _KEEP_ONE)
        schedule = [key for name in own if _is_schedule(name) for key in file.origin[name]]
        for name, flag in self.flags.items():
            by = file.origin[name] if name in own else schedule if _is_schedule(name) else ()
            if self.translated and by and not (name in own and _same(own[name], flag)):
                self.translated.file.left_out(name, f"replaced by {', '.join(dict.fromkeys(by))}")
        return (*(flag for name, flag in self.flags.items() if name not in own), *own.values())


def _keys(file: ConfigFile, name: str) -> str:
    """The keys of a file that gave a flag, with their values."""
    return " and ".join(f"{key} is {as_json(file.values[key])}" for key in file.origin[name])


def _is_schedule(name: str) -> bool:
    """Whether a flag is of the schedule, and not the rate alone."""
    return name.startswith(_SCHEDULE) and name != _RATE


def translate_strategy(file: YamlConfig) -> BesideDeepSpeed:
    """Translate the keys of the strategy, and the DeepSpeed file that they name. Raises UsageError."""
    keys, paths = (_STRATEGY, _SAME_STRATEGY), (_FILE, _SAME_FILE)
    strategy, path = file.agreed(YamlConfig.word, *keys, allowed=_KINDS), file.agreed(YamlConfig.text, *paths)
    stage, offload = file.whole(_STAGE), file.boolean(_OFFLOAD)
    if stage is not None and stage not in STRATEGIES:
        raise UsageError(f"{_STAGE} is {stage}; allowed: 0, 1, 2, 3")
    if strategy == "ddp" and (beside := [key for key in (*paths, _STAGE, _OFFLOAD) if key in file.values]):
        raise contradiction(f"{_STRATEGY} is ddp and {beside[0]} is {file.values[beside[0]]}")
    if file.boolean("distributed") is False and strategy in ("ddp", "deepspeed"):
        raise contradiction(f"distributed is false and {_STRATEGY} is {strategy}")
    file.note("on all devices of the processes that are started", "distributed")
    if strategy in ("ddp", "auto", "rule"):
        file.flag("sharding.strategy", "replicated" if strategy == "ddp" else strategy, *keys)
        file.note(f"{strategy} chooses", _STAGE)
    else:
        file.flag("sharding.strategy", None if stage is None else STRATEGIES[stage], _STAGE)
        file.note(f"as {path or _STAGE} says" if path or stage is not None else _CHOSEN, *keys)
    if strategy == "auto":
        file.note(_CHOSEN, *keys)
    file.flag("sharding.offload", {None: None, True: "optimizer", False: "none"}[offload], _OFFLOAD)
    file.note("translated below", *paths)
    if path is None:
        return BesideDeepSpeed()
    translated = translate_file(path)
    note_file(path, translated)
    return BesideDeepSpeed(path=path, translated=translated)


def _same(one: Flag, other: Flag) -> bool:
    try:
        return float(one[-1]) == float(other[-1])
    except ValueError:
        return one == other
