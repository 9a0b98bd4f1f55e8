"""What a run becomes on another number of devices: always the same rows per step, never more on a device at a time."""

import dataclasses

import pytest

from openpi_train import registry
from openpi_train.elastic import adapt
from openpi_train.parallel.strategy import ShardingConfig

BASE = dataclasses.replace(registry.load("debug"), exp_name="x", batch_size=64)


def changed(**fields):
    return dataclasses.replace(BASE, **fields)


def test_a_new_run_is_as_given_and_says_how_large_its_batch_is():
    experiment, lines = adapt(BASE, 8, None)
    assert experiment == BASE
    assert lines == ["effective batch size 64: 8 rows x 8 devices x 1 micro-batches", "learning rate: peak 2.5e-05"]


def test_of_a_batch_that_is_refused_no_share_is_told():
    assert adapt(changed(batch_size=7), 2, None)[1] == ["learning rate: peak 2.5e-05"]


@pytest.mark.parametrize("given", [1, 2, 4])
@pytest.mark.parametrize("began_on", [2, 4, 8, 16])
@pytest.mark.parametrize("num_devices", [1, 2, 4, 8, 16, 32])
def test_rows_at_a_time_never_exceed_those_of_the_first_start(given, began_on, num_devices):
    experiment, lines = adapt(changed(grad_accum=given), num_devices, began_on)
    assert experiment.batch_size == 64
    assert 64 % (num_devices * experiment.grad_accum) == 0
    assert 64 // (num_devices * experiment.grad_accum) <= 64 // (began_on * given)
    fewer = [n for n in range(1, experiment.grad_accum) if 64 % (num_devices * n) == 0]
    assert num_devices == began_on or all(64 // (num_devices * n) > 64 // (began_on * given) for n in fewer)
    assert any("the run began on" in line for line in lines) == (num_devices != began_on)


def test_a_tensor_group_counts_as_one_device():
    grouped = changed(sharding=ShardingConfig(tensor_devices=2), fsdp_devices=4)
    experiment, lines = adapt(grouped, 4, 8)
    assert (experiment.grad_accum, experiment.fsdp_devices) == (2, 2)
    assert "effective batch size 64: 16 rows x 2 groups of 2 devices x 2 micro-batches" in lines


def test_accumulation_stays_where_one_asks_for_that():
    experiment, lines = adapt(changed(elastic=False, grad_accum=2), 4, 8)
    assert experiment.grad_accum == 2
    assert lines[1] == "effective batch size 64: 8 rows x 4 devices x 2 micro-batches"


def test_a_batch_that_does_not_divide_is_left_for_the_check_to_refuse():
    experiment, _ = adapt(BASE, 6, 8)
    assert experiment.grad_accum == 1
    with pytest.raises(Exception, match=r"--batch-size 64 is not a multiple of the 6 devices; try 60 or 66"):
        experiment.check(6)


def test_numbers_that_cannot_be_are_left_for_the_check_to_refuse():
    given = changed(fsdp_devices=0, grad_accum=0)
    assert adapt(given, 4, 8) == (given, [])


def test_devices_that_share_a_copy_become_the_most_that_divide():
    experiment, lines = adapt(changed(fsdp_devices=8, batch_size=60), 12, 8)
    assert experiment.fsdp_devices == 6
    assert "fsdp_devices 6 instead of 8, which does not divide 12" in lines


def test_batch_per_device_grows_with_the_first_devices_and_never_again():
    given = changed(batch_size=8, keep_effective_batch_size=False)
    assert adapt(given, 4, None)[0].batch_size == 32
    resumed, _ = adapt(given, 2, 4)
    assert (resumed.batch_size, resumed.grad_accum) == (32, 2)


def test_groups_of_rl_are_of_one_device_where_the_batch_is():
    """An iteration has the same number of steps on any devices."""
    given = dataclasses.replace(registry.load("arithmetic_ppo"), exp_name="x", keep_effective_batch_size=False)
    experiment, _ = adapt(given, 4, None)
    assert (experiment.batch_size, experiment.rl.num_groups) == (4 * 256, 4 * 256)
    assert adapt(given, 2, 4)[0].rl == experiment.rl
    assert adapt(dataclasses.replace(given, keep_effective_batch_size=True), 4, None)[0].rl == given.rl


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_learning_rate_goes_with_the_batch(scaling, factor):
    experiment, lines = adapt(changed(lr_scaling=scaling, reference_batch_size=16), 8, None)
    assert experiment.lr_schedule.peak_lr == pytest.approx(BASE.lr_schedule.peak_lr * factor)
    assert experiment.lr_schedule.decay_lr == pytest.approx(BASE.lr_schedule.decay_lr * factor)
    assert experiment.lr_schedule.warmup_lr is None
    warm = dataclasses.replace(BASE.lr_schedule, warmup_lr=1e-6)
    scaled, _ = adapt(changed(lr_schedule=warm, lr_scaling=scaling, reference_batch_size=16), 8, None)
    assert scaled.lr_schedule.warmup_lr == pytest.approx(1e-6 * factor)
    assert lines[-1].startswith(f"learning rate: peak {2.5e-5 * factor:g} = 2.5e-05 x {factor:g} ({scaling}")


@pytest.mark.parametrize("fields", [{"lr_scaling": "sqrt"}, {"reference_batch_size": 16}])
def test_scaling_without_a_reference_or_the_reverse_is_refused(fields):
    with pytest.raises(Exception, match="give both"):
        changed(**fields).check(8)


def test_groups_of_rl_per_device_grow_with_the_batch_so_that_an_iteration_has_as_many_steps():
    found = registry.load("tabletop_few_rloo")
    given = dataclasses.replace(
        found,
        exp_name="x",
        batch_size=16,
        rl=dataclasses.replace(found.rl, num_groups=16),
        keep_effective_batch_size=False,
    )
    for devices, first in ((1, None), (4, None), (2, 4)):
        experiment, _ = adapt(given, devices, first)
        began_on = first or devices
        assert (experiment.batch_size, experiment.rl.num_groups) == (16 * began_on, 16 * began_on)
        assert experiment.rl.steps_per_iteration(experiment.batch_size) == 8
        dataclasses.replace(experiment, num_train_steps=16, save_interval=8).check(devices)
    kept, _ = adapt(dataclasses.replace(given, keep_effective_batch_size=True), 4, None)
    assert kept.rl == given.rl


@pytest.mark.parametrize(("num_devices", "groups_of"), [(8, 4), (6, 3), (2, 2), (1, 1)])
def test_tensor_groups_are_as_large_as_the_devices_allow(num_devices, groups_of):
    grouped = changed(sharding=ShardingConfig(tensor_devices=4), batch_size=24)
    experiment, lines = adapt(grouped, num_devices, 16)
    assert experiment.sharding.tensor_devices == groups_of
    told = f"tensor_devices {groups_of} instead of 4, which does not divide {num_devices}"
    assert (told in lines) == (groups_of < 4)
