"""What a run of its length would hardly learn is told, with the field to change; experiments get no such line."""

import dataclasses

import pytest
import small_runs

from openpi_train import registry
from openpi_train.optim import SGD, EmaWarmup, LRSchedule
from openpi_train.runtime.world import WorldFlags
from openpi_train.training.dry_run import dry_run
from openpi_train.training.run_length import length_in_words, unfit_for_length

SOUND = dataclasses.replace(
    small_runs.small, num_train_steps=40, ema_decay=None, lr_schedule=LRSchedule(warmup_steps=4, decay_steps=None)
)


def lines(**changes):
    return unfit_for_length(dataclasses.replace(SOUND, **changes))


def scheduled(**changes):
    return lines(lr_schedule=dataclasses.replace(SOUND.lr_schedule, **changes))


def test_a_run_that_ends_within_its_warm_up_is_told_how_far_it_comes():
    """openpi's defaults in 40 steps: rate 0 is a 1,001st of the peak, and each step adds as much: .041 in the end."""
    assert lines() == []
    (line,) = lines(lr_schedule=LRSchedule())
    assert line.startswith(
        "--lr-schedule.warmup-steps 1000: this run of 40 steps ends before its warm-up does, at 0.04 "
    )
    assert "set --lr-schedule.warmup-ratio 0.1" in line
    assert scheduled(warmup_ratio=0.1) == [] == scheduled(warmup_steps=39)
    assert scheduled(warmup_steps=40, decay_steps=50)
    # What is advised is enough, also beside the long warm-up that it replaces.
    assert lines(lr_schedule=LRSchedule(warmup_ratio=0.1)) == []


@pytest.mark.parametrize(
    ("schedule", "line"),
    [
        ({"peak_lr": 0.0, "decay_lr": 0.0}, "--lr-schedule.peak-lr 0: no step changes a parameter"),
        ({"decay_steps": 36, "decay_lr": 0.0}, "--lr-schedule.decay-steps 36: the last 4 of 40 steps change nothing"),
        ({"decay_steps": 10}, "--lr-schedule.decay-steps 10: the last 30 of 40 steps are at --lr-schedule.decay-lr"),
        ({"kind": "wsd", "decay_steps": 50}, "--lr-schedule.decay-steps 50: this run of 40 steps ends before the rate"),
    ],
)
def test_a_decay_that_does_not_fit_is_told(schedule, line):
    (found,) = scheduled(**schedule)
    assert found.startswith(line) and "; " in found


@pytest.mark.parametrize(
    "schedule",
    [
        {"decay_steps": 36},  # a tenth of the peak is still a rate
        {"decay_steps": 1_000_000},  # as openpi's pi05_libero: all but constant
        {"kind": "constant", "decay_steps": 10},
        {"kind": "rsqrt", "decay_steps": 10},
        {"kind": "wsd", "decay_steps": 43},  # falls from step 39 on
    ],
)
def test_what_may_well_be_meant_is_not_told(schedule):
    assert scheduled(**schedule) == []


def test_a_warm_up_that_is_shortened_is_told():
    (line,) = scheduled(warmup_steps=500, decay_steps=None, shorten_warmup=True)
    assert line.startswith("the warm-up of 500 steps fills this run of 40: it is shortened to 4 (--lr-schedule.warmup-")


def test_an_average_that_is_the_start_weights_is_told():
    """.999 to the 40th is .961; after 693 steps less than half is left."""
    (line,) = lines(ema_decay=0.999)
    assert line.startswith("--ema-decay 0.999: after 40 steps the average, which is saved and served, is 96% the ")
    assert lines(ema_decay=0.999, num_train_steps=692)
    assert lines(ema_decay=0.999, num_train_steps=693) == [] == lines(ema_decay=0.9)
    assert lines(ema_decay=0.999, ema_warmup=EmaWarmup(power=0.75)) == []


def test_a_rate_that_is_larger_than_the_weights_or_moves_nothing_is_told():
    (line,) = scheduled(peak_lr=0.5)
    assert line.startswith("--lr-schedule.peak-lr 0.5: a step moves each parameter by about as much, which is as large")
    (line,) = scheduled(peak_lr=1e-6, decay_lr=0.0)  # 40 steps of 1e-6
    assert "40 steps by 4e-05 in all, which changes nothing; give a larger rate" in line
    assert lines(optimizer=SGD(), lr_schedule=dataclasses.replace(SOUND.lr_schedule, peak_lr=0.5)) == []


def test_a_batch_larger_than_the_data_is_told():
    given = dataclasses.replace(SOUND, batch_size=64)
    (line,) = unfit_for_length(given, 63)
    assert line.startswith("--batch-size 64: there are 63 training samples") and "--batch-size 63 or less" in line
    assert unfit_for_length(given, 64) == []


def test_a_run_of_less_than_one_line_of_the_log_is_told():
    (line,) = lines(log_interval=41)
    assert line.startswith("--log-interval 41: this run of 40 steps") and line.endswith("give --log-interval 4")
    assert lines(log_interval=40) == []


def test_a_length_is_told_in_hours_and_in_passes_as_far_as_they_are_known():
    given = dataclasses.replace(SOUND, num_train_steps=20_000, batch_size=32)
    told = length_in_words(given, 0.9, 598)
    # 20,000 steps of 0.9 s are 5 hours; 640,000 rows of 598 are 1,070.2 passes.
    assert told.startswith("20,000 steps (--num-train-steps): about 5 hours, ")
    assert told.endswith("; their 640,000 rows are 1,070 passes over the 598 of the data")
    assert "hours" not in length_in_words(given, None, 598)
    assert "0.64 passes over the 1,000,000" in length_in_words(given, None, 1_000_000)
    assert "passes" not in length_in_words(given, 0.9, None)
    assert length_in_words(given, None, None) is None
    assert length_in_words(dataclasses.replace(given, num_epochs=2), 0.9, 598) is None


def test_a_dry_run_tells_it(tmp_path, capsys):
    """A start does so in `tests/runs/test_old_run.py`."""
    given = dataclasses.replace(
        SOUND,
        ema_decay=0.999,
        name="small",
        exp_name="x",
        checkpoint_base_dir=str(tmp_path),
        lr_schedule=LRSchedule(),
    )
    assert dry_run(given, WorldFlags(), None) == 0
    warned = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert warned == [f"warning: {line}" for line in unfit_for_length(given)] and len(warned) == 2


def test_no_experiment_but_the_trial_on_noise_is_unfit_for_its_length():
    found = [name for name in registry.entries() if unfit_for_length(registry.load(name, any_dims=True))]
    assert found == ["debug"]
