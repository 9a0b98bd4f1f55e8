"""The same run on any number of processes and devices, through the real command line."""

from pathlib import Path

import numpy as np
import pytest
from command import copy_without, losses, train
from small_runs import SMALL

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
FLAGS = "--num-train-steps 4 --save-interval 2 --fsdp-devices 2 --sharding.min-shard-mib 0".split()
# Losses of training alone: `test_pi0_fast_run.py` and `test_bridge_run.py` evaluate on two processes. pi0 itself:
# `test_text_lengths_run.py`.
NOTHING_HELD_OUT = ("--data.validation-fraction", "0")
BLIND = f"{Path(__file__).with_name('tiny_policies.py')}:blind"
RUN = (BLIND, *FLAGS, *NOTHING_HELD_OUT)
SMALL_RUN = (SMALL, *FLAGS, "--sharding.strategy", "zero3")


@pytest.fixture(scope="module")
def one_by_four(tmp_path_factory):
    base = tmp_path_factory.mktemp("one_by_four")
    train(base, *RUN, processes=1, devices=4)
    return base


@pytest.fixture(scope="module")
def small_one_by_four(tmp_path_factory):
    base = tmp_path_factory.mktemp("small_one_by_four")
    train(base, *SMALL_RUN, processes=1, devices=4)
    return base


@pytest.fixture(scope="module")
def small_four_by_one(tmp_path_factory):
    base = tmp_path_factory.mktemp("small_four_by_one")
    train(base, *SMALL_RUN, processes=4)
    return base


def expect_the_same(base, expected, processes, experiment="blind"):
    """The losses bit for bit, and a log of each process."""
    assert losses(base, experiment) == losses(expected, experiment)
    assert losses(base, experiment).keys() == {1, 2, 3, 4}
    output = (base / "runs" / experiment / "x" / "logs").iterdir()
    assert {path.name for path in output} == {f"process_{index}.log" for index in range(processes)}


def test_loss_is_the_same_bit_for_bit_with_two_processes_of_two_devices(tmp_path, one_by_four):
    train(tmp_path, *RUN, processes=2, devices=2)
    expect_the_same(tmp_path, one_by_four, 2)


def test_loss_is_the_same_bit_for_bit_with_four_processes_of_one_device(small_four_by_one, small_one_by_four):
    expect_the_same(small_four_by_one, small_one_by_four, 4, "small")


def test_one_device_agrees_to_rounding(tmp_path, one_by_four):
    train(tmp_path, BLIND, "--num-train-steps", "4", *NOTHING_HELD_OUT)
    expected, found = losses(one_by_four, "blind"), losses(tmp_path, "blind")
    assert found.keys() == expected.keys()
    # Sums in another order: float32's rounding at first, then what Adam's division by small moments makes of it.
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=1e-5)


def test_a_run_of_four_processes_goes_on_with_two_and_with_one(tmp_path, small_one_by_four, small_four_by_one):
    copy_without(small_four_by_one, tmp_path, 4, "small")
    done = train(tmp_path, *SMALL_RUN, "--resume", processes=2)
    assert "the run began on 4 devices and goes on on 2: same rows, same loss" in done.stdout
    assert "effective batch size 8: 2 rows x 2 devices x 2 micro-batches" in done.stdout
    resumed, expected = losses(tmp_path, "small"), losses(small_one_by_four, "small")
    assert resumed.keys() == expected.keys()
    np.testing.assert_allclose([resumed[step] for step in (3, 4)], [expected[step] for step in (3, 4)], rtol=1e-6)
    train(tmp_path, *SMALL_RUN[:2], "5", *SMALL_RUN[3:], "--resume", devices=2)
    assert set(losses(tmp_path, "small")) == {1, 2, 3, 4, 5}
