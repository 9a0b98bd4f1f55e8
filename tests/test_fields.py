"""The least value of a config's number stands at its field, wherever in the experiment that is."""

import dataclasses
import functools
from typing import Literal

import pytest
from openpi_train_configs.debug import debug

from openpi_train.fields import resume_verdict, setting, too_small

LEAST_1 = (
    "batch_size grad_accum num_train_steps fsdp_devices log_interval save_interval keep_last keep_period num_epochs "
    "reference_batch_size micro_batch_size eval.num_rows eval.num_sample_steps data.max_norm_stats_samples "
    "data.text_lengths eval.closed_loop.episodes_per_task eval.closed_loop.episodes_per_device "
    "eval.closed_loop.execute eval.closed_loop.max_steps local_checkpoints.interval sharding.tensor_devices "
    "timeouts.rendezvous_s timeouts.handshake_s timeouts.lost_s timeouts.stuck_s timeouts.phase_s "
    "timeouts.data_s timeouts.finish_s"
).split()
LEAST_0 = (
    "num_workers eval.interval eval.num_train_rows profile sharding.min_shard_mib eval.closed_loop.interval "
    "eval.closed_loop.num_videos"
).split()


def with_value(config, name, value):
    """The config with the field of this dotted name changed."""
    first, *rest = name.split(".")
    value = with_value(getattr(config, first), ".".join(rest), value) if rest else value
    return dataclasses.replace(config, **{first: value})


@pytest.mark.parametrize(("least", "name"), [*((1, name) for name in LEAST_1), *((0, name) for name in LEAST_0)])
def test_every_number_has_its_least_value(least, name):
    changed = functools.partial(with_value, debug, name)
    flag = name.replace("_", "-")
    assert too_small(changed(least - 1)) == [f"--{flag} {least - 1} must be at least {least}"]
    assert not too_small(changed(least))


def test_what_is_no_number_is_not_compared():
    assert not too_small(dataclasses.replace(debug, num_workers="auto", keep_period=None))


@dataclasses.dataclass(frozen=True)
class Switched:
    """A config with a switch that older runs have not."""

    new: bool = setting(False, on_resume="refuse")
    sizes: tuple[int, ...] = setting((1, 2), on_resume="refuse")
    kind: Literal["wide", "narrow"] = setting("wide", on_resume="refuse")
    other: Literal["wide", None] = setting("wide", on_resume="refuse")
    bins: int = setting(0, on_resume="refuse")
    some: int | None = setting(0, on_resume="refuse")


@pytest.mark.parametrize(
    ("saved", "given", "verdict"), [(None, False, "retired"), (None, True, "refuse"), (True, False, "refuse")]
)
def test_a_switch_that_the_runs_version_had_not_is_off_in_it(saved, given, verdict):
    assert resume_verdict(Switched(new=given), "new", saved, given) == verdict


@pytest.mark.parametrize(
    ("saved", "given", "verdict"), [(None, [1, 2], "retired"), (None, [1, 3], "refuse"), ([1, 3], [1, 2], "refuse")]
)
def test_a_tuple_that_the_runs_version_had_not_is_of_its_default_in_it(saved, given, verdict):
    assert resume_verdict(Switched(sizes=tuple(given)), "sizes", saved, given) == verdict


@pytest.mark.parametrize(
    ("name", "saved", "given", "verdict"),
    [
        ("kind", None, "wide", "retired"),
        ("kind", None, "narrow", "refuse"),
        ("kind", "narrow", "wide", "refuse"),
        ("other", None, "wide", "refuse"),  # which may have been None
        ("bins", None, 0, "retired"),
        ("bins", None, 2, "refuse"),
        ("bins", 2, 0, "refuse"),
        ("some", None, 0, "refuse"),
    ],
)
def test_a_choice_that_the_runs_version_had_not_is_its_default_in_it(name, saved, given, verdict):
    assert resume_verdict(Switched(**{name: given}), name, saved, given) == verdict
