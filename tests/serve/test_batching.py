"""Batches for the device go on, whoever has left and whatever fails."""

import asyncio
import threading

import pytest

from openpi_train.serve.batching import Batching

BAD = -1


class Doubling:
    """Doubles numbers; a batch with `BAD` in it fails. `gate` holds it up, `begun` says that it has begun."""

    def __init__(self):
        self.batches, self.begun, self.gate = [], threading.Event(), threading.Event()

    def __call__(self, requests):
        self.batches.append(list(requests))
        self.begun.set()
        assert self.gate.wait(20)
        if BAD in requests:
            raise RuntimeError("the device failed")
        return [2 * request for request in requests]


def run(conversation, answer, **limits):
    async def main():
        batching = Batching(
            answer, **{"max_batch": 4, "max_queue": 8, "wait_s": 0.0, "num_clients": lambda: 1, **limits}
        )
        batching.start()
        try:
            return await asyncio.wait_for(conversation(batching), 5)
        finally:
            await batching.close()

    return asyncio.run(main())


async def begun(answer):
    """Wait until a batch is on the device."""
    await asyncio.get_running_loop().run_in_executor(None, answer.begun.wait, 20)


@pytest.mark.parametrize("request_of_left", [1, BAD])
def test_the_next_batch_is_answered_after_one_whose_client_has_left(request_of_left):
    """Whether that batch succeeds or fails: nobody waits for what came of it."""
    answer = Doubling()

    async def conversation(batching):
        left = asyncio.create_task(batching.submit(request_of_left))
        await begun(answer)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        following = asyncio.create_task(batching.submit(5))
        answer.gate.set()
        return await following

    assert run(conversation, answer) == 10
    assert answer.batches == [[request_of_left], [5]]


def test_of_a_batch_that_fails_each_request_is_answered_by_itself():
    """One that cannot be answered fails alone, also beside one whose client has left."""
    answer = Doubling()

    async def conversation(batching):
        tasks = [asyncio.create_task(batching.submit(number)) for number in (1, BAD, 3, BAD)]
        await begun(answer)
        tasks[3].cancel()
        answer.gate.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        return [*found, await batching.submit(7)]

    one, failed, three, left, later = run(conversation, answer, wait_s=0.5, num_clients=lambda: 4)
    assert (one, three, later) == (2, 6, 14)
    assert isinstance(failed, RuntimeError) and str(failed) == "the device failed"
    assert isinstance(left, asyncio.CancelledError)
    assert answer.batches == [[1, BAD, 3, BAD], [1], [BAD], [3], [BAD], [7]]


def test_a_wrong_number_of_answers_is_an_error_and_the_next_batch_is_answered():
    def answer(requests):
        return [] if BAD in requests else [2 * request for request in requests]

    async def conversation(batching):
        with pytest.raises(RuntimeError, match="0 answers to 1 requests"):
            await batching.submit(BAD)
        return await batching.submit(4)

    assert run(conversation, answer) == 8


def test_requests_whose_clients_left_before_their_batch_are_not_computed():
    answer = Doubling()

    async def conversation(batching):
        first = asyncio.create_task(batching.submit(1))
        await begun(answer)
        left, kept = (asyncio.create_task(batching.submit(number)) for number in (2, 3))
        await asyncio.sleep(0)
        left.cancel()
        answer.gate.set()
        return await first, await kept

    assert run(conversation, answer) == (2, 6)
    assert answer.batches == [[1], [3]]
