import pytest

from openpi_train.launch.spec import LaunchError, LaunchSpec, commands, share_of


def test_ranks_run_host_by_host():
    spec = LaunchSpec(arguments=("debug",), processes_per_host=2, hosts=("10.0.0.1", "10.0.0.2"), port=1234)
    environments = [command.env for command in commands(spec)]
    assert [env["RANK"] for env in environments] == ["0", "1", "2", "3"]
    assert [env["LOCAL_RANK"] for env in environments] == ["0", "1", "0", "1"]
    assert [env["NODE_RANK"] for env in environments] == ["0", "0", "1", "1"]
    assert {env["WORLD_SIZE"] for env in environments} == {"4"}
    assert {env["LOCAL_WORLD_SIZE"] for env in environments} == {"2"}
    assert {(env["MASTER_ADDR"], env["MASTER_PORT"]) for env in environments} == {("10.0.0.1", "1234")}
    assert [share_of(spec, node) for node in (0, 1)] == [commands(spec)[:2], commands(spec)[2:]]


def test_processes_of_several_hosts_know_all_of_them():
    spec = LaunchSpec(arguments=("debug",), processes_per_host=1, hosts=("10.0.0.1", "node2", "node3"))
    assert [command.env["OPENPI_TRAIN_HOSTS"] for command in commands(spec)] == ["10.0.0.1,node2,node3"] * 3


def test_devices_per_process_means_cpu_devices():
    (command,) = commands(LaunchSpec(arguments=("debug",), processes_per_host=1, devices_per_process=3))
    assert (command.env["JAX_PLATFORMS"], command.env["JAX_NUM_CPU_DEVICES"]) == ("cpu", "3")


def test_a_command_line_can_be_typed_into_a_shell():
    spec = LaunchSpec(arguments=("debug", "--exp-name", "a b"), processes_per_host=1, program=("python",), token="$w")
    (command,) = commands(spec)
    assert command.line() == (
        "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 NODE_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 "
        "OPENPI_TRAIN_JOB_TOKEN='$w' python debug --exp-name 'a b'"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arguments": ()}, "put the experiment after --"),
        ({"processes_per_host": 0}, "there must be one"),
        ({"port": 65536}, "not from 1 to 65535"),
        ({"devices_per_process": 0}, "at least one"),
    ],
)
def test_impossible_launches_are_refused(changes, message):
    fields = {"arguments": ("debug",), "processes_per_host": 1, **changes}
    with pytest.raises(LaunchError, match=message):
        LaunchSpec(**fields)
