"""Who holds up the others, from what each process tells of its steps."""

import pytest

from openpi_train.runtime.step_times import StepTimes
from openpi_train.training.lateness import Lateness
from openpi_train.training.slow_hosts import SlowHosts


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
