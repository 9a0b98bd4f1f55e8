"""Who holds up the others, from what each process tells of its steps."""

import dataclasses

import pytest

from openpi_train.runtime.step_times import StepTimes
from openpi_train.training.lateness import Lateness
from openpi_train.training.slow_hosts import SlowDevices, SlowHosts


def told(number, late_s, data_s=0.0, *, slow="process 2 on c"):
    """Four processes after `number` looks of ten steps each, of which one is late in every step."""
    names = [f"process {index} on {host}" for index, host in enumerate("abcd")]
    common = StepTimes(steps=10 * number, late_s=0.01 * number, data_s=0.02 * number)
    late = StepTimes(steps=10 * number, late_s=(10 * late_s + 0.01) * number, data_s=(10 * data_s + 0.02) * number)
    return {name: late if name == slow else common for name in names}


@pytest.mark.parametrize(
    ("data_s", "cause"), [(0.03, "waits for data"), (0.0, "is busy in its own code on the processor")]
)
def test_who_is_late_for_three_intervals_is_named_once_with_what_it_waits_for(data_s, cause):
    hosts = SlowHosts()
    lines = [hosts.look(told(number, 0.03, data_s), 0.2) for number in range(6)]
    assert lines == [[], [], [], [f"process 2 on c holds up the others by 30 ms of 200 ms a step: it {cause}"], [], []]


def test_what_programs_of_a_late_host_wait_for_is_told_if_those_elsewhere_do_not():
    hosts, lines = SlowHosts(), []
    for number in range(4):
        stalled = {
            who: {"cpu": 0.1 * number, "io": (1.9 if who.endswith("c") else 0.2) * number, "memory": 0.0}
            for who in told(number, 0.03)
        }
        # Two seconds a look, by clocks that do not agree.
        lines += hosts.look(
            {
                who: dataclasses.replace(times, at_s=2.0 * number + len(who), stalled_s=stalled[who])
                for who, times in told(number, 0.03, 0.03).items()
            },
            0.2,
        )
    (line,) = lines
    assert line.endswith("it waits for data; programs of its host wait for a disk 95% of the time (elsewhere 10%)")


def with_products(number, slow_s, *, place=1, state="88 C"):
    """Four processes of two devices after `number` timed products of 10 ms, of which one device's take longer."""
    names = [f"process {index} on {host}" for index, host in enumerate("abcd")]
    slow = tuple(slow_s if index == place else 0.01 for index in range(2))
    return {
        name: StepTimes(products=number, product_s=slow if name.endswith("c") else (0.01, 0.01), device=state)
        for name in names
    }


def test_a_device_that_computes_slowly_three_times_in_a_row_is_named_once_with_its_state():
    devices = SlowDevices()
    # The times of the third product come from one process late: no look.
    late = {**with_products(3, 0.0125), "process 0 on a": with_products(2, 0.01)["process 0 on a"]}
    looks = [
        with_products(1, 0.0125),
        with_products(2, 0.0125),
        late,
        late,
        *(with_products(n, 0.0125) for n in (3, 4)),
    ]
    said = "process 2 on c holds up the others: its device is slower, local device 1: products take 25% "
    said += "longer there than in the median of the others (the slowest there: 88 C)"
    assert [devices.look(told) for told in looks] == [[], [], [], [], [said], []]


def test_a_device_within_a_tenth_or_slow_for_a_moment_and_devices_that_are_not_timed_are_not_named():
    devices = SlowDevices()
    assert not any(devices.look(with_products(n, 0.0109)) for n in range(1, 9))
    assert not any(devices.look(with_products(n, 0.02 if n % 3 else 0.01)) for n in range(9, 20))
    assert not any(SlowDevices().look(told(n, 0.01)) for n in range(9))
    alone = SlowDevices()
    assert not any(alone.look({"process 0 on a": StepTimes(products=n, product_s=(0.01,))}) for n in range(9))
    # One process of several devices, and two processes of one.
    for make in (
        lambda n: {"process 0 on a": StepTimes(products=n, product_s=(0.01, 0.02))},
        lambda n: {f"process {k} on a": StepTimes(products=n, product_s=(0.01 * (k + 1),)) for k in (0, 1)},
    ):
        pair = SlowDevices()
        assert [len(pair.look(make(n))) for n in range(1, 6)] == [0, 0, 1, 0, 0]


def test_less_than_a_tenth_of_a_step_is_not_named():
    hosts = SlowHosts()
    assert not any(hosts.look(told(number, 0.019, 0.1), 0.2) for number in range(9))


def test_a_look_without_news_of_all_and_a_run_of_one_process_say_nothing():
    hosts = SlowHosts()
    for number in (0, 1, 1, 1, 1, 2):
        assert hosts.look(told(number, 0.03), 0.2) == []
    assert hosts.look(told(3, 0.03), 0.2) != []
    alone = SlowHosts()
    assert not any(alone.look({"process 0 on a": StepTimes(steps=n, late_s=n)}, 0.1) for n in range(9))


def test_late_is_the_time_from_the_end_of_all_steps_to_the_next_dispatch():
    now = [0.0]
    late = Lateness(lambda: now[0])

    def at(time, do, *arguments):
        now[0] = time
        do(*arguments)
        return late.late_s

    assert at(100.0, late.dispatching) == 0.0, "the first step waits for nobody"
    assert at(101.0, late.dispatching) == 0.0, "the host runs ahead"
    assert at(102.0, late._end, 1) == 0.0
    assert at(103.0, late.dispatching) == 0.0, "the second step is still running"
    at(104.0, late._end, 2)
    at(105.0, late._end, 3)
    assert at(107.5, late.dispatching) == 2.5
    at(108.0, late._end, 4)
    late.pause()
    assert at(200.0, late.dispatching) == 2.5, "an evaluation is no lateness"
    at(201.0, late._end, 5)
    assert at(202.0, late.dispatching) == 3.5
