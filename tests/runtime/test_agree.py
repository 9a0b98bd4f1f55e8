import json
import socket

import pytest


@pytest.mark.multiprocess
def test_values_arrive_in_process_order_call_after_call(run_processes):
    results = run_processes(
        """
        from jax._src import distributed

        class Counted:
            count = 0

            def __init__(self, client):
                self.client = client

            def __getattr__(self, name):
                Counted.count += 1
                return getattr(self.client, name)

        distributed.global_state.client = Counted(distributed.global_state.client)
        seen = [agree.gather("numbers", {"from": world.process_index, "call": call}) for call in range(5)]
        agree.barrier("halfway")
        word = agree.broadcast("word", "from process 0" if world.process_index == 0 else None)
        count = Counted.count
        large = [len(text) for text in agree.gather("more than a message of gRPC", "x" * 3_000_000)]
        left = len(distributed.global_state.client.key_value_dir_get("openpi_train/agree/"))
        agree.barrier("all have looked")
        print(json.dumps([seen, word, left, large, count]))
        """,
        3,
    )
    for process, result in enumerate(results):
        assert result.returncode == 0, result
        seen, word, left, large, count = json.loads(result.stdout.splitlines()[-1])
        assert seen == [[{"from": index, "call": call} for index in range(3)] for call in range(5)]
        assert word == "from process 0"
        assert left <= 2 * (3 + 1)  # what was said is forgotten at the next call
        assert large == [3_000_000] * 3
        # A call takes a process so many of the service, also in a run of a thousand: to say, to wait, to read.
        # Process 0 also reads for all, and forgets what was said before.
        assert count <= 7 * (5 if process == 0 else 3)


@pytest.mark.multiprocess
def test_a_time_out_names_who_is_missing(run_processes):
    results = run_processes(
        """
        agree.barrier("all are up")
        if world.process_index != 1:
            agree.barrier("save", timeout_s=5.0)
        time.sleep(200)  # until the others' end is told
        """,
        3,
    )
    for result in (results[0], results[2]):
        assert result.returncode == 70
        assert f"process 1 on {socket.gethostname()} did not reach 'save' within 5 s" in result.stderr


@pytest.mark.multiprocess
def test_processes_at_different_calls_say_so_at_once(run_processes):
    results = run_processes(
        """
        agree.barrier("save" if world.process_index == 0 else "restore", timeout_s=3600.0)
        """,
        2,
    )
    for result, (own, other) in zip(
        results, [("save", "process 1 at 'restore'"), ("restore", "process 0 at 'save'")], strict=True
    ):
        assert result.returncode == 70
        assert f"have gone different ways: this one is at '{own}', {other}" in result.stderr


@pytest.mark.multiprocess
def test_one_process_agrees_with_itself(run_processes):
    (result,) = run_processes(
        """
        agree.barrier("alone")
        print(json.dumps([agree.gather("x", (1, 2)), agree.broadcast("y", {"a": 1})]))
        """,
        1,
    )
    assert json.loads(result.stdout.splitlines()[-1]) == [[[1, 2]], {"a": 1}]
