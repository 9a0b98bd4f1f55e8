"""The sbatch file that `launch slurm` writes, on a real Slurm: what becomes of the job, for each way to end."""

import json
import re
import sys

import pytest
from jobs import Slurm
from runs.command import ROOT, losses, places, train
from small_runs import SMALL

from openpi_train.launch import slurm as slurm_form

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]
STEPS = 40
RUN = (SMALL, "--num-train-steps", str(STEPS), "--save-interval", "1000", "--batch-size", "16", "--data.pause-s", "0.3")
TWO_BY_TWO = ("--nodes", "2", "--gpus-per-node", "2", "--devices-per-process", "1", "--env", "MASTER_ADDR={host}")


@pytest.fixture(scope="module")
def actors(cluster, tmp_path_factory) -> Slurm:
    """For jobs whose four tasks are actors."""
    return Slurm(cluster, tmp_path_factory.mktemp("actors"))


@pytest.fixture(scope="module")
def play(actors):
    """Submit a job whose four tasks are actors: `play("2", "wait", ...)` returns its number."""

    def submit(*parts: str, afterwards: int = 0, max_restarts: int = 20, sbatch: tuple[str, ...] = ()) -> str:
        program = ("bash", str(ROOT / "tests" / "slurm" / "actor.sh"))
        job = slurm_form.Slurm(
            arguments=parts,
            program=program,
            nodes=2,
            processes_per_node=2,
            job_name="play",
            folder=actors.folder,
            output_dir=actors.folder,
            env=(f"AFTERWARDS={afterwards}",),
            max_restarts=max_restarts,
        )
        (actors.folder / "play.sh").write_text(slurm_form.script(job))
        return actors.run("sbatch", "--parsable", *sbatch, actors.folder / "play.sh")

    return submit


WAITING = ("wait", "wait", "wait", "wait")
SIGNALS = [["--signal=TERM"], ["--batch", "--signal=TERM"], ["--signal=USR1"]]
CANCEL = []


@pytest.fixture(scope="module")
def stopped(actors, play) -> dict[str, str]:
    """A job for each way to stop one: all wait for Slurm's schedule together. By what `scancel` is told, or "limit"."""
    # Slurm takes the command line's word over the file's. Who is not told ahead is killed at the limit, and the job's
    # state is TIMEOUT. Slurm tells once, up to 30 s before it is due: here 20 to 50 s after the start. Were it due at
    # the start, Slurm would sometimes tell before any task runs, and none would hear it.
    jobs = {"limit": play(*WAITING, sbatch=("--time=2", "--signal=TERM@70"))}
    for way in (*SIGNALS, CANCEL):
        jobs[" ".join(way)] = play(*WAITING)
    for way in (*SIGNALS, CANCEL):
        job = jobs[" ".join(way)]
        actors.wait_for(job, lambda job=job: actors.output(job).count("listening") == 4)
        actors.run("scancel", *way, job)
    return jobs


def test_a_job_is_requeued_only_where_that_helps(actors, play):
    saved = ("75", "75", "75", "75")
    expected = {
        play("0", "0", "0", "0"): ("COMPLETED", "0:0", "0"),
        # An error of one task is the job's, whatever the others make of their end.
        play("wait", "2", "wait", "wait"): ("FAILED", "2:0", "0"),
        play("70", "70", "4", "75"): ("FAILED", "4:0", "0"),
        # A task was killed, and the others say that they have lost it.
        play("70", "kill", "70", "70"): ("COMPLETED", "0:0", "1"),
        play("kill", "kill", "kill", "kill"): ("COMPLETED", "0:0", "1"),
        # Stopped before the program could listen.
        play("143", "143", "143", "143"): ("COMPLETED", "0:0", "1"),
        play(*saved, afterwards=3): ("FAILED", "3:0", "1"),
        play(*saved, afterwards=75, max_restarts=1): ("FAILED", "75:0", "1"),
        play(*saved, max_restarts=0): ("FAILED", "75:0", "0"),
    }
    ended = {job: actors.await_end(job) for job in expected}
    found = {job: (state["JobState"], state["ExitCode"], state["Restarts"]) for job, state in ended.items()}
    assert found == expected, "\n".join(actors.output(job) for job in expected if found[job] != expected[job])


def test_a_job_goes_on_without_a_node_whose_hardware_has_failed(actors):
    job = slurm_form.Slurm(
        arguments=("-c", 'echo "runs on $SLURMD_NODENAME"; [ "$SLURM_RESTART_COUNT" = 1 ] || exit 71'),
        program=("bash",),
        processes_per_node=1,
        job_name="hardware",
        folder=actors.folder,
        output_dir=actors.folder,
    )
    (actors.folder / "hardware.sh").write_text(slurm_form.script(job))
    number = actors.run("sbatch", "--parsable", actors.folder / "hardware.sh")
    ended = actors.await_end(number)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), actors.output(number)
    nodes = re.findall(r"runs on (node\d)", actors.output(number))
    assert len(nodes) == len(set(nodes)) == 2, actors.output(number)


@pytest.mark.parametrize("way", SIGNALS)
def test_a_signal_reaches_the_tasks_and_not_their_wrappers(actors, stopped, way):
    job = stopped[" ".join(way)]
    ended = actors.await_end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), actors.output(job)


def test_a_cancelled_job_is_not_brought_back(actors, stopped):
    job = stopped[" ".join(CANCEL)]
    actors.wait_for(job, lambda: "not requeued" in actors.output(job))
    ended = actors.await_end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0"), actors.output(job)


def test_slurm_accepts_a_file_with_every_option(slurm, tmp_path):
    options = ["--time-limit=1-12:00", "--partition=all", "--account=lab", "--cpus-per-task=1", "--memory=100M"]
    options += ["--output-dir", str(tmp_path / "out 100%"), "--sbatch-arg=--comment=it's mine", "--max-restarts=0"]
    slurm.launch(*TWO_BY_TWO, *options, arguments=("debug", "--exp-name", "x"))
    slurm.run("sbatch", "--test-only", tmp_path / "out 100%" / "debug.sh")


def test_a_job_asks_for_no_more_cores_than_a_node_has(slurm):
    """The nodes have 2 cores and 2 GPUs each; 8 cores for a GPU would pend for ever, or be refused."""
    written = slurm.launch("--nodes", "1", "--gpus-per-node", "2", "--dry-run", arguments=("debug",))
    assert "#SBATCH --cpus-per-task=1\n" in written and "--cpus-per-task=1 " in written
    written = slurm.launch(
        *("--nodes", "1", "--gpus-per-node", "2", "--cpus-per-task", "3", "--dry-run"), arguments=("debug",)
    )
    assert "#SBATCH --cpus-per-task=3\n" in written


def test_an_allocation_starts_one_task_per_process(slurm):
    words = [
        sys.executable,
        "scripts/run_distributed.py",
        "--mode",
        "slurm",
        "--",
        "debug",
        "--exp-name",
        "x",
        "--help",
    ]
    output = slurm.run("salloc", "--nodes=2", "--ntasks-per-node=2", *words)
    assert {line[:2] for line in output.splitlines()} == {"0:", "1:", "2:", "3:"}


def test_the_file_that_the_older_guides_command_writes_trains(slurm, tmp_path):
    short = (*RUN[:2], "4", *RUN[3:], *places(tmp_path))
    options = [
        "--job-name",
        "distributed_training",
        "--num-nodes",
        "2",
        "--gpus-per-node",
        "1",
        "--time-limit",
        "24:00:00",
    ]
    options += ["--partition", "all", "--output-dir", str(tmp_path / "slurm_scripts"), "--devices-per-process", "1"]
    slurm.run(sys.executable, "scripts/run_distributed.py", "--mode", "create_slurm", *options, "--", *short)
    job = slurm.run("sbatch", "--parsable", tmp_path / "slurm_scripts" / "run_slurm.sh")
    ended = slurm.await_end(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), ended
    assert list(losses(tmp_path, "small")) == [1, 2, 3, 4]


def test_a_job_that_is_told_to_stop_saves_is_requeued_and_ends_as_if_undisturbed(slurm, tmp_path):
    job = slurm.submit(*TWO_BY_TWO, "--time-limit", "30", arguments=(*RUN, *places(tmp_path)))
    metrics = tmp_path / "runs" / "small" / "x" / "metrics.jsonl"
    slurm.wait_for(job, lambda: metrics.exists() and '"step": 3' in metrics.read_text())
    slurm.run("scancel", "--signal=TERM", job)
    slurm.wait_for(job, lambda: "requeueing" in slurm.output(job))
    (saved,) = (int(path.parent.name) for path in metrics.parent.glob("[0-9]*/manifest.json"))
    assert 3 <= saved < STEPS

    ended = slurm.await_end(job)
    output = slurm.output(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), output[-6000:]
    assert f"continuing from step {saved} of {STEPS}" in output
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines() if '"loss"' in line]
    assert steps == list(range(1, STEPS + 1))  # it went on where it had saved, and no step was done twice

    train(tmp_path / "undisturbed", *RUN, devices=4)
    assert losses(tmp_path, "small") == losses(tmp_path / "undisturbed", "small")


# Last: its job has begun long before.
def test_the_tasks_are_told_ahead_of_the_time_limit(actors, stopped):
    job = stopped["limit"]
    actors.wait_for(job, lambda: "requeueing" in actors.output(job))
    ended = actors.await_end(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), actors.output(job)
