"""The `convert` verb: convert a checkpoint to another form, accounting for every key and comparing outputs.

Everything is written beside the target and read back before it gets its name, so a target is always complete.
Read next: `checkpoints/checkpoint_formats.py` (the forms), `checkpoints/parity.py` (the comparison),
`docs/howto/convert.md`.
"""

import dataclasses
import logging
import math
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from openpi_train.checkpoints import checkpoint_formats
from openpi_train.checkpoints.meta import check_asset_ids
from openpi_train.checkpoints.model_card import model_card
from openpi_train.checkpoints.parity import compare_leaves, compare_outputs, num_values
from openpi_train.data.core.files import read_json, write_json
from openpi_train.data.robot.config import DataConfig
from openpi_train.data.robot.normalize import norm_stats_json, read_norm_stats
from openpi_train.experiment import Experiment
from openpi_train.fields import as_json, changed_fields, resume_verdict
from openpi_train.interop import checkpoint_hub, native_format, openpi
from openpi_train.interop.lora_merge import merged_lora
from openpi_train.interop.parameter_matching import account
from openpi_train.interop.place import Place
from openpi_train.interop.robot_actions import check_action_dims, openpis_transforms
from openpi_train.interop.stored_leaves import Leaves, Stored, Writer
from openpi_train.interop.trained_with import check_same_training
from openpi_train.json_object import JsonObject
from openpi_train.models.model_config import ModelConfig, PolicyConfig
from openpi_train.models.pi0 import pi0_names
from openpi_train.runtime.device_limits import host_bytes_per_device
from openpi_train.runtime.exits import CheckpointError, UsageError
from openpi_train.runtime.versions import package_versions
from openpi_train.tools.atomic_output import check_draft, check_target, drafted, told_as
from openpi_train.tools.requests import ConvertRequest

logger = logging.getLogger(__name__)

REPORT = "parity.json"
# Memory per parameter for the comparison of outputs: in float32, and half as much for all else.
_OUTPUTS_BYTES = 6
# Fields of a model, or of the language model in it, that do not change what it computes.
_OF_THE_RUN = ("remat", "attention", "path")


def main(
    request: ConvertRequest,
    experiment: Experiment | None,
    recorded: Callable[[JsonObject], Experiment],
) -> int:
    """Convert, or only account for every key.

    Of a run of ours, `recorded` builds the experiment from the run's own record. Of other checkpoints it is
    `experiment`; with None, what they record.
    """
    if (run := _recorded(request)) is not None:
        experiment = recorded(run)
    if experiment is None:
        stored = checkpoint_formats.open_checkpoint(request.source, None, request.source_format)  # or what is wrong
        raise UsageError(
            f"{request.source} does not say whose model it is: name an experiment with --experiment (see `list`)\n"
            f"{_contents(stored)}"
        )
    conversion = plan(request, experiment)
    print(conversion.summary())
    is_pushed = checkpoint_hub.is_address(str(request.target))
    if not request.dry_run:
        print(_push(conversion) if is_pushed else conversion.run())
    elif is_pushed:
        checkpoint_hub.check_push(str(request.target), create=False)
    return 0


def _contents(stored: Stored) -> str:
    """What can be read of a checkpoint whose model is not known, for a message."""
    kinds = ", ".join(sorted({leaf.dtype.name for leaf in stored.params.values()}))
    lines = [f"It holds {len(stored.params)} parameters, {num_values(stored.params):,} values ({kinds})"]
    if flags := pi0_names.flags_of_sizes({name: leaf.shape for name, leaf in stored.params.items()}):
        lines.append(f"sizes: {' '.join(flags)}")
    for asset_id, content in stored.norm_stats.items():
        dims = [f"{name} {len(entry.get('mean', ()))} dims" for name, entry in content.get("norm_stats", {}).items()]
        lines.append(f"norm stats {asset_id}: {', '.join(dims) or 'none'}")
    return "\n  ".join(lines)


def _recorded(request: ConvertRequest) -> Mapping[str, Any] | None:
    """The experiment (its JSON) that the source records; None of what is no checkpoint of ours. Reads no arrays."""
    if request.source_format not in (None, "ours"):
        return None
    place = checkpoint_formats.open_place(request.source)
    return native_format.recorded_experiment(place)[0] if native_format.recognises(place) else None


def _push(conversion: "CheckpointConversion") -> str:
    """Convert into a temporary folder and push it with a model card; returns its address."""
    request = conversion.request
    address = str(request.target)
    checkpoint_hub.check_push(address, private=not request.public)
    with tempfile.TemporaryDirectory(prefix="openpi_train-push-") as folder:
        target = Path(folder) / "checkpoint"
        with told_as(target, address):
            dataclasses.replace(conversion, request=dataclasses.replace(request, target=target)).run()
        run = Path(conversion.wanted.where).parent
        results, environment = (_read_if_there(run / name) for name in ("results.json", "environment.json"))
        starts = (environment or {}).get("starts")
        command = ["python", "-m", "openpi_train", *starts[0]["argv"][1:]] if starts else None
        name = checkpoint_hub.Address.of(address).name
        card = model_card(conversion.wanted, conversion.form.name, name, results=results, command=command)
        return checkpoint_hub.push(target, address, card)


def _read_if_there(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None  # for a checkpoint copied out of its run, the card has only the checkpoint's own information


def plan(request: ConvertRequest, experiment: Experiment) -> "CheckpointConversion":
    """Open the source, account for every key, and check all that the conversion refuses; nothing is written.

    A dry run ends here. Raises CheckpointError and UsageError.
    """
    model = experiment.model
    stored = checkpoint_formats.open_checkpoint(request.source, model, request.source_format)
    check_target(request.target, stored.where)
    _check_same_model(stored, model)
    check_same_training(stored, experiment)
    robots = (
        {one.asset: one.robot for one in experiment.data.datasets} if isinstance(experiment.data, DataConfig) else {}
    )
    for robot in robots.values():
        check_action_dims(stored, robot)
    params = checkpoint_formats.model_params(stored, model)
    name = request.target_format or ("openpi" if stored.format == "ours" else "ours")
    form = checkpoint_formats.named(name)
    if form.prepare is None:
        written = ", ".join(one.name for one in checkpoint_formats.formats() if one.prepare is not None)
        raise UsageError(f"--to {name}: this form is only read; allowed: {written}")
    found = stored.train_state or {}
    if request.params_only or request.merge_lora or request.dtype:
        stored = dataclasses.replace(stored, train_state=None)
    stored = form.kept(stored, model)
    left_out = sorted(found.keys() - (stored.train_state or {}).keys())
    wanted_model = form.part(model)
    if request.merge_lora:
        if not any("lora" in path for path in params):
            raise UsageError(f"--merge-lora: {request.source} has no LoRA factors; leave the flag out")
        wanted_model = wanted_model.without_lora()
        merged, public_name = merged_lora(model.param_rules, params), wanted_model.param_rules.public_name
        every = {public_name(path): leaf for path, leaf in merged.items()}
    else:
        every = {public: stored.params[public] for public in openpi.parameter_names(wanted_model).values()}
    published = {name: leaf for name, leaf in every.items() if form.holds is None or re.fullmatch(form.holds, name)}
    rest = {name: leaf for name, leaf in every.items() if name not in published}
    if request.dtype is not None:
        published = {name: leaf.cast(jnp.dtype(request.dtype)) for name, leaf in published.items()}
    said = stored.experiment or as_json(experiment)
    if request.merge_lora:
        said = {**said, "model": as_json(wanted_model)}
    norm_stats = _norm_stats(request, stored)
    try:
        check_asset_ids(norm_stats)
    except ValueError as error:
        raise UsageError(f"--asset-id: {error}") from error
    _check_widths(norm_stats, experiment)
    without_place = [] if form.has_norm_stats else sorted(norm_stats)
    norm_stats = norm_stats if form.has_norm_stats else {}
    wanted = dataclasses.replace(stored, params=published, norm_stats=norm_stats, experiment=said, robots=robots)
    conversion = CheckpointConversion(
        request=request,
        form=form,
        model=model,
        params=params,
        wanted_model=wanted_model,
        wanted=wanted,
        writer=form.prepare(wanted, wanted_model),
        rest=rest,
        left_out=left_out,
        norm_stats_left_out=without_place,
        cameras=experiment.data.cameras if isinstance(model, PolicyConfig) else (),
    )
    if not checkpoint_hub.is_address(str(request.target)):
        check_draft(conversion.target, conversion.size_bytes, request.overwrite)
    return conversion


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConversion:
    """A checked conversion: what was opened, and what will be written.

    `rest` are the parameters of the wanted model that the form does not hold, by published name.
    """

    request: ConvertRequest
    form: checkpoint_formats.Format
    model: ModelConfig
    params: Leaves
    wanted_model: ModelConfig
    wanted: Stored
    writer: Writer
    rest: Leaves
    left_out: list[str]
    norm_stats_left_out: list[str]
    cameras: tuple[str, ...]

    @property
    def target(self) -> Path:
        """The directory that is written."""
        return self.request.target.expanduser().absolute()

    @property
    def size_bytes(self) -> int:
        """Bytes of all arrays in the result."""
        leaves = [*self.wanted.params.values(), *(self.wanted.train_state or {}).values()]
        return sum(leaf.size_bytes for leaf in leaves)

    def summary(self) -> str:
        """What is read and what is written, for the terminal."""
        wanted, state = self.wanted, self.wanted.train_state
        lines = [
            f"from {wanted.where} ({wanted.format}): {len(self.params)} parameters, {num_values(self.params):,} values",
            f"to {self.request.target} ({self.form.name}): {len(wanted.params)} parameters, "
            f"{f'{len(state)} leaves of training state' if state else 'no training state'}, "
            f"{self.size_bytes / 1e9:.3g} GB, norm stats: {', '.join(wanted.norm_stats) or 'none'}",
        ]
        said = {openpis_transforms(robot) for robot in wanted.robots.values()} - {None}
        if said and self.form.name.startswith("openpi"):
            lines.append(f"a config of openpi's for it needs {'; or '.join(sorted(map(str, said)))}")
        if self.left_out:
            lines.append(f"left out: {len(self.left_out)} leaves of training state")
        if self.norm_stats_left_out:
            lines.append(f"left out: the norm stats of {', '.join(self.norm_stats_left_out)}")
        if others := self._parameters_left_out():
            lines.append(
                f"left out: {len(others)} parameters that --to {self.form.name} does not hold ({others[0]}, ...)"
            )
        return "\n".join(lines)

    def _parameters_left_out(self) -> list[str]:
        """The published names of parameters that the form does not hold, and that are not merged into others."""
        names = (self.model.param_rules.public_name(path) for path in self.params)
        merged = self.request.merge_lora
        return [name for name in names if name not in self.wanted.params and not (merged and "lora" in name)]

    def run(self) -> Path:
        """Write the target, read it back, compare, report. A failure leaves nothing behind."""
        with drafted(self.target, self.size_bytes, self.request.overwrite) as draft:
            self.writer(draft)
            write_json(draft / REPORT, self._checked(draft))
        return self.target

    def _checked(self, draft: Path) -> dict[str, Any]:
        """The report on the result. Raises CheckpointError if it does not read back as intended."""
        result = self.form.open(Place.of(draft), self.wanted_model)
        source = {self.model.param_rules.public_name(path): leaf for path, leaf in self.params.items()}
        whole = dataclasses.replace(result, params={**self.rest, **result.params})
        params = checkpoint_formats.model_params(whole, self.wanted_model)
        again = _read_again(self.wanted.params, result.params, draft)
        if self.wanted.train_state is not None:
            state = result.train_state or {}
            account(state, self.wanted.train_state, where=f"the training state in {draft}")
            _read_again(self.wanted.train_state, state, draft)
        unchanged = all(source.get(name) is leaf for name, leaf in self.wanted.params.items())
        return {
            "source": {"where": self.wanted.where, "format": self.wanted.format},
            "result": {"format": self.form.name, "parameters": len(result.params), "values": num_values(result.params)},
            "made": {"at": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "versions": package_versions()},
            "parameters": again if unchanged else compare_leaves(source, result.params, draft),
            "merged_into_weights": sorted(source.keys() - result.params.keys() - set(self._parameters_left_out())),
            "parameters_left_out": sorted(self._parameters_left_out()),
            "training_state": {"leaves": len(result.train_state or {}), "left_out": self.left_out},
            "norm_stats": sorted(result.norm_stats),
            "norm_stats_left_out": self.norm_stats_left_out,
            "outputs": self._outputs(params),
        }

    def _outputs(self, params: Leaves) -> Any:
        """The difference of the models' outputs, or why it is unknown."""
        if not self.request.outputs:
            return "not compared (--no-outputs)"
        needed, free = _OUTPUTS_BYTES * num_values(self.params), _free_host_bytes()
        if needed > free:
            said = (
                f"not compared: it takes {needed / 1e9:.3g} GB of memory and {free / 1e9:.3g} GB are free; "
                "where there is more, convert the same again"
            )
            logger.warning("outputs are %s", said)
            return said
        found = compare_outputs((self.model, self.params), (self.wanted_model, params), self.cameras)
        return found or f"not compared: there is no probe for {sorted(self.model.provides)}"


def _free_host_bytes() -> float:
    """Free memory of the host; infinite if the system does not report it."""
    linux = Path("/proc/meminfo").is_file()
    return host_bytes_per_device() * jax.local_device_count() if linux else math.inf


def _read_again(wanted: Leaves, found: Leaves, draft: Path) -> dict[str, Any]:
    """The result of `compare_leaves`. Raises CheckpointError if a leaf is not bit-equal."""
    again = compare_leaves(wanted, found, draft)
    if again["bit_equal"] != len(wanted):
        raise CheckpointError(f"{again['at']} reads back with another value than was written; is the disk sound?")
    return again


def _check_same_model(stored: Stored, model: ModelConfig) -> None:
    """Raise UsageError if our checkpoint records another model."""
    if stored.experiment is None:
        return
    changed = changed_fields(stored.experiment["model"], as_json(model))
    changed = {
        name: values
        for name, values in changed.items()
        if name.rpartition(".")[2] not in _OF_THE_RUN and resume_verdict(model, name, *values) != "retired"
    }
    if changed:
        listing = "\n".join(
            f"  model.{name}: the run has {was!r}, given {given!r}" for name, (was, given) in changed.items()
        )
        raise UsageError(
            f"{stored.where} was trained with another model; leave the --model flags out, which are read from the run, "
            f"and name its own experiment or none:\n{listing}"
        )


def _norm_stats(request: ConvertRequest, stored: Stored) -> dict[str, Any]:
    """The norm stats of the result, by asset id."""
    if request.norm_stats is not None:
        if request.asset_id is None:
            raise UsageError("--norm-stats needs --asset-id: the name under which they lie in assets/")
        try:
            return {**stored.norm_stats, request.asset_id: norm_stats_json(read_norm_stats(request.norm_stats))}
        except (ValueError, OSError) as error:
            raise UsageError(f"--norm-stats: {error}") from error
    if request.asset_id is None:
        return dict(stored.norm_stats)
    if len(stored.norm_stats) != 1:
        raise UsageError(
            f"--asset-id {request.asset_id} renames the norm stats of a checkpoint that has one set; {stored.where} "
            f"has {sorted(stored.norm_stats) or 'none'}: give the file to put in with --norm-stats"
        )
    return {request.asset_id: next(iter(stored.norm_stats.values()))}


def _check_widths(norm_stats: JsonObject, experiment: Experiment) -> None:
    """Raise CheckpointError if norm stats are wider than the model's state or actions."""
    if not norm_stats:
        return
    spec = experiment.policy.rows.batch_spec(1, experiment.data.cameras)
    widths = {"state": spec.observation.state.shape[-1], "actions": spec.actions.shape[-1]}
    for asset_id, content in norm_stats.items():
        entries = content.get("norm_stats", {})
        for name, width in widths.items():
            if name not in entries or len(entries[name].get("mean", ())) > width:
                has = f"{len(entries[name].get('mean', ()))} dims" if name in entries else "nothing"
                raise CheckpointError(
                    f"the norm stats {asset_id!r} hold {has} for {name!r}, the model takes {width}: they belong to "
                    "another robot or model. Give others with --norm-stats and --asset-id"
                )
