import pytest

from openpi_train.launch.spec import LaunchSpec, commands
from openpi_train.runtime.exits import UsageError
from openpi_train.runtime.world import WorldFlags, find_world, first_slurm_host, slurm_counts, split_address

SLURM_JOB = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SLURM_STEP = {
    **SLURM_JOB,
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[07-08,11]",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}
TORCH = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
OPENMPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.0.0.7,192.168.1.7:46299",
    "OMPI_MCA_ess_base_jobid": "1531576321",
}
KUBERNETES = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "JOB_COMPLETION_INDEX": "2",
    "OPENPI_TRAIN_NUM_PROCESSES": "4",
    "OPENPI_TRAIN_COORDINATOR": "run-0.run:29500",
}
FLAGS = WorldFlags(coordinator="node0:1234", num_processes=3, process_id=2)


def place(world):
    return (world.source, world.process_index, world.process_count, world.local_index, world.local_count)


@pytest.mark.parametrize(
    ("flags", "environ", "expected", "coordinator"),
    [
        (WorldFlags(), {}, ("alone", 0, 1, 0, 1), None),
        (FLAGS, {**TORCH, **SLURM_STEP}, ("flags", 2, 3, 0, 1), "node0:1234"),
        (WorldFlags(), TORCH, ("environment", 5, 8, 0, 1), "10.0.0.1:29500"),
        (WorldFlags(), {**TORCH, "MASTER_ADDR": "127.0.0.1"}, ("environment", 5, 8, 5, 8), "127.0.0.1:29500"),
        (WorldFlags(), {**TORCH, "LOCAL_RANK": "1"}, ("environment", 5, 8, 1, None), "10.0.0.1:29500"),
        # torchrun's own store is on MASTER_PORT.
        (
            WorldFlags(),
            {**TORCH, "TORCHELASTIC_USE_AGENT_STORE": "True"},
            ("environment", 5, 8, 0, 1),
            "10.0.0.1:29501",
        ),
        (
            WorldFlags(),
            {**TORCH, "TORCHELASTIC_USE_AGENT_STORE": "False"},
            ("environment", 5, 8, 0, 1),
            "10.0.0.1:29500",
        ),
        (
            WorldFlags(),
            {**TORCH, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", **SLURM_STEP},
            ("environment", 5, 8, 1, 4),
            "10.0.0.1:29500",
        ),
        (WorldFlags(), {"RANK": "0", "WORLD_SIZE": "1"}, ("environment", 0, 1, 0, 1), None),
        (WorldFlags(), {"WORLD_SIZE": "1"}, ("alone", 0, 1, 0, 1), None),
        (WorldFlags(), SLURM_STEP, ("slurm", 9, 11, 1, 3), f"gpu07:{12000 + 4711}"),
        (WorldFlags(), {**SLURM_STEP, **OPENMPI}, ("slurm", 9, 11, 1, 3), f"gpu07:{12000 + 4711}"),
        (WorldFlags(), {**SLURM_STEP, "MASTER_ADDR": "10.1.0.7"}, ("slurm", 9, 11, 1, 3), "10.1.0.7:16711"),
        (WorldFlags(), {**SLURM_STEP, "MASTER_ADDR": "{host}-ib"}, ("slurm", 9, 11, 1, 3), "gpu07-ib:16711"),
        (WorldFlags(), {**SLURM_STEP, "MASTER_PORT": "30000"}, ("slurm", 9, 11, 1, 3), "gpu07:30000"),
        (WorldFlags(), {**OPENMPI, "MASTER_PORT": "30000"}, ("openmpi", 3, 4, 1, 2), "10.0.0.7:30000"),
        (WorldFlags(), KUBERNETES, ("kubernetes", 2, 4, 0, 1), "run-0.run:29500"),
        (WorldFlags(), {**KUBERNETES, **OPENMPI, "MASTER_PORT": "30000"}, ("openmpi", 3, 4, 1, 2), "10.0.0.7:30000"),
        (WorldFlags(), {**KUBERNETES, "OPENPI_TRAIN_NUM_PROCESSES": "1"}, ("kubernetes", 0, 1, 0, 1), None),
        (WorldFlags(), {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, ("alone", 0, 1, 0, 1), None),
    ],
)
def test_the_first_source_that_speaks_is_believed(flags, environ, expected, coordinator):
    world = find_world(flags, environ)
    assert place(world) == expected
    assert world.coordinator == coordinator


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        (WorldFlags(), {"RANK": "0"}, r"says RANK=0 but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT: set them too"),
        (WorldFlags(), {"WORLD_SIZE": "4"}, "says WORLD_SIZE=4 but not RANK, MASTER_ADDR, MASTER_PORT"),
        (WorldFlags(), {**TORCH, "RANK": "one"}, "RANK='one' in the environment is not a whole number"),
        (WorldFlags(), {**TORCH, "RANK": "8"}, "process 8 of 8 .* cannot be"),
        (WorldFlags(), {**TORCH, "LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "4"}, "local process 4 of 4"),
        (WorldFlags(), {**TORCH, "MASTER_PORT": "65536"}, "port from 1 to 65535"),
        (
            WorldFlags(),
            {"JOB_COMPLETION_INDEX": "2"},
            "pod with JOB_COMPLETION_INDEX=2 but without OPENPI_TRAIN_NUM_PROCESSES, OPENPI_TRAIN_COORDINATOR: set "
            "OPENPI_TRAIN_NUM_PROCESSES=<number of pods>, or 1 for .*; OPENPI_TRAIN_COORDINATOR=<name of the pod",
        ),
        (
            WorldFlags(),
            {name: value for name, value in KUBERNETES.items() if name != "JOB_COMPLETION_INDEX"},
            "without JOB_COMPLETION_INDEX: set `completionMode: Indexed` in the Job's spec",
        ),
        (WorldFlags(), {**KUBERNETES, "JOB_COMPLETION_INDEX": "4"}, r"process 4 of 4 \(from kubernetes\) cannot be"),
        (WorldFlags(num_processes=2), {}, "--num-processes given without --coordinator, --process-id"),
        (WorldFlags(), {"SLURM_STEP_NODELIST": "a"}, "a Slurm step without SLURM_JOB_ID"),
        (WorldFlags(), {**SLURM_STEP, "MASTER_ADDR": "localhost"}, "MASTER_ADDR=localhost in a Slurm step on 3 hosts"),
        (WorldFlags(), {**SLURM_STEP, "MASTER_PORT": "x"}, "is not host:port"),
        (
            WorldFlags(),
            {name: value for name, value in OPENMPI.items() if name != "OMPI_MCA_orte_hnp_uri"},
            "mpirun -x MASTER_ADDR",
        ),
        (WorldFlags(), {"PMI_RANK": "2", "PMI_SIZE": "4"}, "PMI_RANK=2 PMI_SIZE=4: started by MPICH or Intel MPI"),
    ],
)
def test_a_source_that_says_too_little_is_refused_with_what_to_do(flags, environ, message):
    with pytest.raises(UsageError, match=message):
        find_world(flags, environ)


LEFT_OVER = {"RANK": "0", "WORLD_SIZE": "1"}
HAND_SET = {**TORCH, "RANK": "0", "WORLD_SIZE": "4"}
FEW_TASKS = {**SLURM_STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {**LEFT_OVER, **SLURM_STEP},
            "RANK=0 WORLD_SIZE=1 contradicts the Slurm step, SLURM_PROCID=9 SLURM_STEP_NUM_TASKS=11: .* one of 1 by "
            "the first and one of 11 by the second. Unset RANK and WORLD_SIZE for one run of 11 .* --coordinator",
        ),
        # As they are exported for one GPU.
        ({**TORCH, **LEFT_OVER, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", **SLURM_STEP}, "contradicts the Slurm"),
        ({**HAND_SET, **SLURM_STEP}, "one of 4 by the first and one of 11 by the second"),
        ({**LEFT_OVER, **OPENMPI}, "contradicts Open MPI, OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4"),
        ({**LEFT_OVER, **KUBERNETES}, "an Indexed Job, JOB_COMPLETION_INDEX=2 OPENPI_TRAIN_NUM_PROCESSES=4"),
        ({**LEFT_OVER, "PMI_RANK": "2", "PMI_SIZE": "4"}, "contradicts MPICH or Intel MPI, PMI_RANK=2 PMI_SIZE=4"),
        (
            {"JAX_NUM_PROCESSES": "8", "JAX_PROCESS_ID": "3", "JAX_COORDINATOR_ADDRESS": "a:1"},
            "^JAX_PROCESS_ID=3 JAX_NUM_PROCESSES=8 JAX_COORDINATOR_ADDRESS=a:1: neither jax nor this program reads",
        ),
    ],
)
def test_two_sources_that_contradict_each_other_are_an_error_that_names_both(environ, message):
    with pytest.raises(UsageError, match=message):
        find_world(WorldFlags(), environ)
    assert find_world(FLAGS, environ).source == "flags"  # which were given for this process


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        # torchrun in a step of one task, or of one per host.
        ({**TORCH, **FEW_TASKS, "SLURM_STEP_NUM_TASKS": "1"}, ("environment", 5, 8)),
        ({**TORCH, **FEW_TASKS, "TORCHELASTIC_RUN_ID": "x"}, ("environment", 5, 8)),
        # Variables that a script makes of the step's.
        ({**TORCH, "RANK": "1", "WORLD_SIZE": "2", **FEW_TASKS}, ("environment", 1, 2)),
        # Runs of one process each, which torchrun and ours have started.
        ({**LEFT_OVER, "TORCHELASTIC_RUN_ID": "x", **SLURM_STEP}, ("environment", 0, 1)),
        ({**LEFT_OVER, "OPENPI_TRAIN_JOB_TOKEN": "x", **SLURM_STEP}, ("environment", 0, 1)),
        # Left over from mpirun, or from scripts for jax: the step says who this is.
        ({**SLURM_STEP, **OPENMPI, "OMPI_COMM_WORLD_SIZE": "1"}, ("slurm", 9, 11)),
        ({**SLURM_STEP, "JAX_NUM_PROCESSES": "11", "JAX_COORDINATOR_ADDRESS": "a:1"}, ("slurm", 9, 11)),
        ({**SLURM_STEP, "PMI_RANK": "9", "PMI_SIZE": "11"}, ("slurm", 9, 11)),
        ({**SLURM_STEP, "WORLD_SIZE": "1"}, ("slurm", 9, 11)),
        # A batch script or an ssh login is no task.
        ({**LEFT_OVER, **SLURM_JOB}, ("environment", 0, 1)),
        ({**LEFT_OVER, **SLURM_STEP, "SLURM_STEP_ID": "4294967290"}, ("environment", 0, 1)),
        ({**LEFT_OVER, **FEW_TASKS, "SLURM_STEP_NUM_TASKS": "1"}, ("environment", 0, 1)),
        ({"JAX_NUM_PROCESSES": "1"}, ("alone", 0, 1)),
    ],
)
def test_launchers_within_a_task_and_what_agrees_are_believed(environ, expected):
    world = find_world(WorldFlags(), environ)
    assert (world.source, world.process_index, world.process_count) == expected


@pytest.mark.parametrize("processes", [1, 2])
def test_what_our_launcher_starts_within_a_task_is_believed(processes):
    spec = LaunchSpec(arguments=("x",), processes_per_host=processes, token="t")
    worlds = [find_world(WorldFlags(), {**SLURM_STEP, **one.env}) for one in commands(spec)]
    assert [place(world) for world in worlds] == [("environment", n, processes, n, processes) for n in range(processes)]


# An ssh login, and the shell that salloc opens as a step of its own.
@pytest.mark.parametrize("environ", [SLURM_JOB, {**SLURM_STEP, "SLURM_STEP_ID": "4294967290"}])
def test_a_login_into_a_slurm_job_is_explained_and_not_obeyed(environ):
    world = find_world(WorldFlags(), environ)
    assert place(world) == ("alone", 0, 1, 0, 1)
    assert "not in a step of it" in world.notes[0] and "srun" in world.notes[0]


def test_a_master_address_alone_is_explained_and_not_obeyed():
    world = find_world(WorldFlags(), {"MASTER_ADDR": "10.0.0.1", "NODE_RANK": "1"})
    assert place(world) == ("alone", 0, 1, 0, 1)
    assert world.notes == (
        "MASTER_ADDR, NODE_RANK set without RANK and WORLD_SIZE: not used, training alone in this process",
    )


def test_half_of_what_mpirun_says_is_explained_and_not_obeyed():
    world = find_world(WorldFlags(), {"OMPI_COMM_WORLD_RANK": "1", "PMI_RANK": "1"})
    assert place(world) == ("alone", 0, 1, 0, 1)
    assert [note.split(":")[0] for note in world.notes] == [
        "OMPI_COMM_WORLD_RANK set without OMPI_COMM_WORLD_SIZE",
        "PMI_RANK set without PMI_SIZE",
    ]


def test_every_slurm_start_has_its_own_token_and_port():
    first = find_world(WorldFlags(), SLURM_STEP)
    requeued = find_world(WorldFlags(), {**SLURM_STEP, "SLURM_RESTART_COUNT": "1"})
    second_step = find_world(WorldFlags(), {**SLURM_STEP, "SLURM_STEP_ID": "1"})
    starts = (first, requeued, second_step)
    assert first.token and len({start.token for start in starts}) == 3
    assert len({start.coordinator for start in starts}) == 3
    assert first.token not in repr(first)


def test_a_pod_knows_the_token_of_its_job():
    token = find_world(WorldFlags(), {**KUBERNETES, "OPENPI_TRAIN_JOB_TOKEN": "uid-of-the-job"}).token
    assert token == "uid-of-the-job"
    other = {**KUBERNETES, "OPENPI_TRAIN_COORDINATOR": "other-0.other:29500"}
    assert find_world(WorldFlags(), KUBERNETES).token != find_world(WorldFlags(), other).token


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[1-3,7],x", "node1"),
        ("gpu-a[007-012]-ib,gpu-b1", "gpu-a007-ib"),
        ("rack[2,3]node[05-06]", "rack2node05"),
    ],
)
def test_first_host_of_a_slurm_node_list(nodelist, first):
    assert first_slurm_host(nodelist) == first


def test_slurm_task_counts_are_expanded():
    assert slurm_counts("4(x2),3") == [4, 4, 3]
    with pytest.raises(UsageError, match="not of the form"):
        slurm_counts("4x2")


@pytest.mark.parametrize(("address", "expected"), [("a:1", ("a", 1)), ("[fe80::1]:29500", ("fe80::1", 29500))])
def test_addresses_are_split(address, expected):
    assert split_address(address) == expected


@pytest.mark.parametrize("address", ["a", "a:", ":1", "a:b", "a:0", "a:-1"])
def test_addresses_without_host_or_port_are_refused(address):
    with pytest.raises(UsageError, match="is not host:port"):
        split_address(address)
