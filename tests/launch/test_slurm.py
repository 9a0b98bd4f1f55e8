import os
import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from launch.test_launchers import EXPERIMENT, run_distributed

from openpi_train.cli import VERBS
from openpi_train.launch import launchers
from openpi_train.launch.slurm import Slurm, resumed, script, time_limit_s
from openpi_train.launch.spec import VERBS_WITHOUT_RUN, LaunchError
from openpi_train.runtime.world import in_slurm_step

SMALL = ["slurm", "--nodes", "2", "--gpus-per-node", "4"]


def dry_run(capsys, *options: str, arguments: list[str] = EXPERIMENT) -> str:
    assert launchers.main([*SMALL, *options, "--dry-run", *arguments]) == 0
    return capsys.readouterr().out


def job_of(*arguments: str, **options) -> Slurm:
    """A job of one process."""
    usual = {"folder": Path("/"), "output_dir": Path("/tmp"), "processes_per_node": 1, "job_name": "a"}
    return Slurm(arguments=arguments, **{**usual, **options})


def headers(text: str) -> list[str]:
    """The options that Slurm reads from the file, without their quotes."""
    return [shlex.split(line)[1] for line in text.splitlines() if line.startswith("#SBATCH ")]


def step(text: str) -> list[str]:
    """The words of the srun line, its program included."""
    lines = text.replace("\\\n", " ").splitlines()
    (program,) = (line for line in lines if line.startswith("program=("))
    (srun,) = (line for line in lines if line.startswith("    srun "))
    return [*shlex.split(srun)[:-6], *shlex.split(program.removeprefix("program=(").removesuffix(")"))]


def test_every_option_is_in_the_file_and_bash_reads_it(capsys, tmp_path):
    options = {
        "--job-name": "try-1",
        "--cpus-per-task": "8",
        "--memory": "200G",
        "--time-limit": "1-12:00",
        "--partition": "gpu",
        "--account": "lab",
        "--qos": "high",
        "--output-dir": str(tmp_path / "out 100%"),
        "--stop-before-s": "90",
        "--sbatch-arg": "--comment=it's mine",
        "--env": "WORDS=a 'b' $HOME",
        "--max-restarts": "3",
    }
    text = dry_run(capsys, *(f"{name}={value}" for name, value in options.items()))
    assert set(headers(text)) == {
        "--job-name=try-1",
        "--nodes=2",
        "--ntasks-per-node=4",
        "--gpus-per-node=4",
        "--cpus-per-task=8",
        "--mem=200G",
        "--time=1-12:00",
        "--partition=gpu",
        "--account=lab",
        "--qos=high",
        f"--chdir={Path.cwd()}",
        f"--output={tmp_path}/out 100%%/%x_%j.out",
        "--open-mode=append",
        "--signal=TERM@90",
        "--requeue",
        "--comment=it's mine",
    }
    srun = "srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --cpus-per-task=8 --kill-on-bad-exit=1 --label".split()
    assert step(text) == [*srun, sys.executable, "-m", "openpi_train", *EXPERIMENT[1:], "--resume"]
    assert "\nmax_restarts=3\n" in text and "\nexport OPENPI_TRAIN_GRACE_S=90\n" in text
    (exported,) = (line for line in text.splitlines() if line.startswith("export WORDS"))
    shown = subprocess.run(["bash", "-c", f'{exported}; echo "$WORDS"'], capture_output=True, text=True, check=True)
    assert shown.stdout == "a 'b' $HOME\n"
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_what_is_not_said_is_left_to_the_cluster(capsys):
    names = [header.partition("=")[0] for header in headers(dry_run(capsys))]
    size = ["--job-name", "--nodes", "--ntasks-per-node", "--gpus-per-node", "--cpus-per-task"]
    assert names == [*size, "--chdir", "--output", "--open-mode", "--signal", "--requeue"]


@pytest.mark.parametrize(
    ("options", "cores"),
    [
        ("--gpus-per-node 4", 8),
        ("--gpus-per-node 4 --processes-per-node 1", 32),
        ("--gpus-per-node 4 --cpus-per-task 6", 6),
        ("--gpus-per-node 4 --cpus-per-task 0", None),
        ("--processes-per-node 4", None),
    ],
)
def test_a_process_has_cores_for_its_gpus(capsys, options, cores):
    """One core, which clusters often give, would decode the pictures of a GPU."""
    assert launchers.main(["slurm", *options.split(), "--dry-run", *EXPERIMENT]) == 0
    text = capsys.readouterr().out
    found = [header for header in headers(text) if "cpus-per-task" in header]
    assert found == ([] if cores is None else [f"--cpus-per-task={cores}"])
    assert (f"--cpus-per-task={cores}" in step(text)) == (cores is not None)


def test_gpus_are_those_of_all_nodes_as_slurm_counts_them(capsys):
    assert launchers.main(["slurm", "--nodes", "2", "--gpus", "8", "--dry-run", *EXPERIMENT]) == 0
    told = capsys.readouterr()
    assert "--gpus-per-node=4" in headers(told.out) and "--gpus 8 in all: 4 on each of 2 nodes" in told.err
    for words in ("--nodes 2 --gpus 5", "--nodes 2 --gpus 4 --gpus-per-node 4"):
        assert launchers.main(["slurm", *words.split(), "--dry-run", *EXPERIMENT]) == 2
        assert "counts the GPUs of all 2 nodes together" in capsys.readouterr().err


def test_no_restarts_means_that_slurm_requeues_neither(capsys):
    assert "--no-requeue" in headers(dry_run(capsys, "--max-restarts", "0"))


def test_cpu_devices_are_asked_for_by_variables_that_every_task_gets(capsys):
    text = dry_run(capsys, "--processes-per-node", "2", "--devices-per-process", "3")
    assert "export JAX_PLATFORMS=cpu\nexport JAX_NUM_CPU_DEVICES=3\n" in text
    assert "--ntasks-per-node=2" in headers(text)


def test_the_tasks_of_the_file_meet_at_the_address_that_was_chosen(tmp_path):
    """From the file to the process: other launchers' variables are gone, those of --env have come through bash."""
    task = {"SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    task |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
    ask = "import os; from openpi_train.runtime.world import *; world = find_world(WorldFlags(), os.environ); "
    ask += "print(world.source, world.process_index, world.coordinator)"
    variables = ("MASTER_ADDR={host}-ib", "MASTER_PORT=4000")
    job = job_of(ask, program=(sys.executable, "-c"), env=variables, output_dir=tmp_path)
    done = play(script(job), MASTER_ADDR="localhost", RANK="0", WORLD_SIZE="1", **task)
    assert done.stdout.splitlines()[0] == "slurm 1 gpu07-ib:4000", done.stderr


def test_a_virtual_environment_is_activated(capsys, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    text = dry_run(capsys, "--venv", str(tmp_path))
    assert f"\nsource {tmp_path}/bin/activate || exit\n" in text
    assert step(text)[-6:] == ["python", "-m", "openpi_train", *EXPERIMENT[1:], "--resume"][-6:]


def test_containers_see_the_working_folder_and_what_is_mounted(capsys):
    options = ["--container", "image.sqsh", "--container-mount", "/data:/data"]
    program = ["python", "-m", "openpi_train", *EXPERIMENT[1:], "--resume"]
    here = str(Path.cwd())
    words = step(dry_run(capsys, *options))
    assert words[-len(program) :] == program
    assert {"--container-image=image.sqsh", f"--container-mounts={here}:{here},/data:/data"} < set(words)
    assert {f"--container-workdir={here}", "--no-container-entrypoint"} < set(words)

    words = step(dry_run(capsys, *options, "--container-runtime", "apptainer"))
    binds = ["--bind", here, "--bind", "/data:/data", "--pwd", here]
    assert words[words.index("apptainer") :] == ["apptainer", "exec", "--nv", *binds, "image.sqsh", *program]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nodes", "0"], "--nodes 0: there must be at least one"),
        (["--processes-per-node", "3"], "3 processes per node cannot share 4 GPUs equally"),
        (["--env", "NOT_SET_HERE"], "it has no value here"),
        (["--env", "1A=b"], "'1A' is not the name of a variable"),
        (["--env", "RANK=3"], "--env RANK: the launcher sets it for each process"),
        (["--cpus-per-task", "-1"], "--cpus-per-task -1"),
        (["--memory", "lots"], "--memory 'lots' is not a number"),
        (["--sbatch-arg", "exclusive"], "--sbatch-arg 'exclusive' is not an option of sbatch"),
        (["--job-name", "a b"], "--job-name 'a b' has other characters"),
        (["--sbatch-arg=--comment=a\nb"], "has a line break"),
        (["--time-limit", "one day"], "--time-limit 'one day' is not Slurm's"),
        (["--time-limit", "3"], "leaves the run no time: it is told to stop 120 s before its end"),
        (["--max-restarts", "-1"], "--max-restarts must be 0 or more"),
        (["--venv", "/nowhere"], "/nowhere/bin/activate does not exist"),
    ],
)
def test_what_cannot_be_is_refused_with_code_2(options, message, capsys):
    assert launchers.main([*SMALL, *options, "--dry-run", *EXPERIMENT]) == 2
    assert message in capsys.readouterr().err


def test_nodes_without_a_number_of_processes_are_refused(capsys):
    assert launchers.main(["slurm", "--nodes", "2", "--dry-run", *EXPERIMENT]) == 2
    assert "say what each node runs" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--overwrite", "--no-resume"])
def test_a_job_that_would_move_its_own_run_aside_is_refused(word, capsys):
    assert launchers.main([*SMALL, "--dry-run", *EXPERIMENT, word]) == 2
    assert "would move its own run aside" in capsys.readouterr().err


def test_a_job_that_would_go_back_again_is_refused_and_one_that_begins_elsewhere_is_not(capsys):
    assert launchers.main([*SMALL, "--dry-run", *EXPERIMENT, "--resume-from", "40"]) == 2
    assert "--resume-from 40 cannot be used with Slurm" in capsys.readouterr().err
    assert launchers.main([*SMALL, "--dry-run", *EXPERIMENT, "--resume-from", "runs/debug/y"]) == 0
    assert "--resume-from runs/debug/y --resume" in capsys.readouterr().out


def test_a_verb_that_makes_no_run_does_not_get_resume():
    assert resumed(("eval", "checkpoints/debug/x")) == ("eval", "checkpoints/debug/x")
    assert resumed(("ript", "--config", "x.yaml")) == ("ript", "--config", "x.yaml", "--resume")
    assert set(VERBS) == {*VERBS_WITHOUT_RUN, "resume", "posttrain", "ript", "vla"}


def test_resume_is_said_once():
    assert resumed(("debug", "--resume")) == resumed(("debug",)) == ("debug", "--resume")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("1:30", 90), ("24:00:00", 86400), ("2-0", 172800), ("1-12:30", 131400), ("1-0:0:5", 86405)],
)
def test_time_limits_are_read_as_slurm_does(text, seconds):
    assert time_limit_s(text) == seconds


def test_no_time_limit_is_none():
    assert time_limit_s("UNLIMITED") is None


def test_the_file_is_written_and_an_edited_one_moved_aside(capsys, tmp_path):
    options = [*SMALL, "--output-dir", str(tmp_path / "out")]
    file = tmp_path / "out" / "pi0_bridge_traj_tiny.sh"
    for _ in range(2):
        assert launchers.main([*options, *EXPERIMENT]) == 0
    assert capsys.readouterr().out == f"written: {file}\nsubmit it: sbatch {file}\n" * 2
    edited = file.read_text().replace("--nodes=2", "--nodes=3")
    file.write_text(edited)
    assert launchers.main([*options, *EXPERIMENT]) == 0
    (aside,) = set(file.parent.iterdir()) - {file}
    assert aside.read_text() == edited
    assert str(aside) in capsys.readouterr().out
    assert "--nodes=2" in file.read_text()


def test_submitting_without_slurm_says_what_to_do(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launchers.main([*SMALL, "--output-dir", str(tmp_path), "--submit", *EXPERIMENT]) == 2
    assert "submit" in (error := capsys.readouterr().err) and "from a login node" in error


def test_a_refusal_of_sbatch_is_shown(capsys, tmp_path, monkeypatch):
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'invalid partition' >&2; exit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert launchers.main([*SMALL, "--output-dir", str(tmp_path), "--submit", *EXPERIMENT]) == 2
    assert "invalid partition" in capsys.readouterr().err


# The line of the multi-host guide of the older tool.
GUIDE = ["--mode", "create_slurm", "--job-name", "distributed_training", "--num-nodes", "2", "--gpus-per-node", "4"]
GUIDE += ["--time-limit", "24:00:00", "--partition", "gpu", "--output-dir"]


@pytest.mark.slow
def test_create_slurm_looks_whether_the_guides_own_run_would_start(tmp_path):
    done = run_distributed(*GUIDE, str(tmp_path / "slurm_scripts"), HOME=str(tmp_path))
    assert done.returncode == 3 and not (tmp_path / "slurm_scripts").exists()
    assert "-- pi0_bridge_traj --exp-name multi_node_training" in done.stderr
    assert "bridge_dataset" in done.stderr and "--dataset PATH" in done.stderr and "--no-check" in done.stderr


def test_create_slurm_writes_the_file_of_the_guide(tmp_path):
    done = run_distributed(*GUIDE, str(tmp_path / "slurm_scripts"), "--no-check")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "slurm_scripts" / "run_slurm.sh").read_text()
    expected = "--job-name=distributed_training --nodes=2 --ntasks-per-node=4 --time=24:00:00 --partition=gpu".split()
    assert set(expected) < set(headers(text))
    assert step(text)[-4:] == ["pi0_bridge_traj", "--exp-name", "multi_node_training", "--resume"]


def test_create_slurm_takes_an_experiment(capsys):
    done = run_distributed(*GUIDE, "slurm_scripts", "--dry-run", *EXPERIMENT)
    options = ["--job-name", "distributed_training", "--time-limit", "24:00:00", "--partition", "gpu"]
    # The guide's `tail -f logs/training.log`.
    options += ["--env", "OPENPI_TRAIN_LINKS=logs/training.log=logs/process_0.log"]
    assert done.stdout == dry_run(capsys, *options)


SLURM_JOB = {"SLURM_JOB_ID": "4711"}
SLURM_TASK = {**SLURM_JOB, "SLURM_STEP_NODELIST": "node1", "SLURM_STEP_ID": "0"}


def test_mode_slurm_becomes_the_process_of_its_task():
    done = run_distributed("--mode", "slurm", "--dry-run", *EXPERIMENT, **SLURM_TASK)
    assert done.stdout == f"{sys.executable} -m openpi_train {' '.join(EXPERIMENT[1:])} --resume\n", done.stderr


@pytest.mark.parametrize("variables", [SLURM_JOB, {**SLURM_TASK, "SLURM_STEP_ID": "4294967290"}])
def test_mode_slurm_starts_the_tasks_from_a_batch_script_or_salloc(variables):
    words = ["--mode", "slurm", "--gpus-per-node", "4", "--devices-per-process", "1", "--dry-run"]
    done = run_distributed(*words, *EXPERIMENT, **variables)
    assert done.stdout == (
        "JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=1 srun --kill-on-bad-exit=1 --label --ntasks-per-node 4 "
        f"{sys.executable} -m openpi_train {' '.join(EXPERIMENT[1:])} --resume\n"
    ), done.stderr


def test_mode_slurm_outside_a_job_is_refused():
    done = run_distributed("--mode", "slurm", *EXPERIMENT)
    assert done.returncode == 2 and "this is no Slurm job" in done.stderr


def test_a_step_is_what_srun_has_started():
    assert in_slurm_step(SLURM_TASK)
    assert not in_slurm_step(SLURM_JOB)
    assert not in_slurm_step({**SLURM_TASK, "SLURM_STEP_ID": "4294967290"})


def test_a_program_of_any_words_reaches_the_tasks_unchanged(tmp_path):
    words = ("debug", "--exp-name", "it's a $HOME; `x`")
    text = script(job_of(*words, program=("printf", "%s\n"), output_dir=tmp_path))
    # An srun that starts one task, and a Slurm that is not asked anything after exit code 0.
    stand_in = 'srun() { while [ "$1" != bash ]; do shift; done; "$@"; }\n'
    environ = {**os.environ, "SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}
    done = subprocess.run(["bash"], input=stand_in + text, env=environ, capture_output=True, text=True)
    assert done.stdout.splitlines()[: len(words)] == list(words)
    assert done.returncode == 0


def test_job_specifications_are_checked_without_the_command_line():
    with pytest.raises(LaunchError, match="exclude each other"):
        job_of("debug", venv=Path("/v"), container="image")
    with pytest.raises(LaunchError, match="is not one of"):
        job_of("debug", container="image", container_runtime="podman")


# Slurm as far as the batch script asks it: `srun` runs one task here (its exit code is Slurm's: that of the task), and
# what `squeue` and `scontrol` are asked is answered from variables, or written down.
STAND_INS = """
srun() { [ -n "${SRUN_CODE:-}" ] && return "$SRUN_CODE"; while [ "$1" != bash ]; do shift; done; "$@"; }
sleep() { :; }
# The tries are counted in a file, since squeue runs in a subshell.
away() { echo try >> "$job_files.tries"; [ "$(wc -l < "$job_files.tries")" -le "${AWAY:-0}" ]; }
squeue() { away && return 1; echo "$STATE"; }
scontrol() { away && return 1; echo "scontrol $*"; }
sinfo() { printf 'node%s\n' 1 2 3 3; }
"""


@pytest.mark.parametrize(
    ("task", "code", "start", "state", "requeued"),
    [
        ("exit 0", 0, 0, "RUNNING", False),
        ("exit 1", 1, 0, "RUNNING", False),
        ("exit 5", 5, 0, "RUNNING", False),
        ("exit 49", 49, 0, "RUNNING", False),
        ("exit 70", 70, 0, "RUNNING", True),
        ("exit 75", 75, 1, "RUNNING", True),
        ("exit 75", 75, 2, "RUNNING", False),  # --max-restarts 2
        ("exit 75", 75, 0, "COMPLETING", False),  # scancel
        ("exit 75", 75, 0, "", False),
        ("kill -TERM $$", 143, 0, "RUNNING", True),
        ("exit 71", 71, 0, "RUNNING", True),
        ("exit 72", 72, 0, "RUNNING", False),
        ("kill -SEGV $$", 139, 0, "RUNNING", True),
        ("kill -KILL $$", 137, 0, "COMPLETING", False),
        ("exit 130", 130, 0, "RUNNING", False),
        ("kill -XCPU $$", 152, 0, "RUNNING", True),  # 72 + 80
        ("exec /nowhere/python", 127, 0, "RUNNING", False),
    ],
)
def test_the_job_ends_with_the_runs_code_and_is_requeued_where_that_can_help(
    task, code, start, state, requeued, tmp_path
):
    job = job_of(task, program=("bash", "-c"), max_restarts=2, output_dir=tmp_path)
    (tmp_path / f"{job.name}_4711.restarts").write_text(f"100 {start}\n")
    done = play(script(job), SLURM_RESTART_COUNT=str(start), STATE=state)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("scontrol requeue 4711" in done.stdout) == requeued
    assert f"job 4711, start {start + 1}: exit code {code}, " in done.stdout


def play(text: str, **environment: str) -> subprocess.CompletedProcess:
    """Run the batch script as process 0 on node1, one of two nodes that the job needs of three."""
    of_slurm = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_PARTITION": "all"}
    environ = {**os.environ, **of_slurm, "SLURMD_NODENAME": "node1", "STATE": "RUNNING", **environment}
    return subprocess.run(["bash"], input=STAND_INS + text, env=environ, capture_output=True, text=True, timeout=120)


def test_restarts_of_a_job_are_counted_from_its_last_progress_on(tmp_path):
    saves = """echo '{"opened": true, "saved_step": '"$STEP"'}' > "$OPENPI_TRAIN_STATUS_FILE"; exit 70"""
    text = script(job_of(saves, program=("bash", "-c"), max_restarts=1, output_dir=tmp_path))
    requeued = ["scontrol requeue" in play(text, STEP=str(step)).stdout for step in (10, 20, 30, 30, 30)]
    assert requeued == [True, True, True, False, False]


def test_a_failure_of_sruns_own_is_a_lost_start(tmp_path):
    done = play(script(job_of("exit 0", program=("bash", "-c"), max_restarts=1, output_dir=tmp_path)), SRUN_CODE="1")
    assert done.returncode == 70 and "scontrol requeue 4711" in done.stdout
    assert "exit code 70, srun itself has failed, with 1" in done.stdout


def test_an_end_that_srun_alone_calls_good_is_a_lost_start(tmp_path):
    """Slurm 22.05 ended a step with 0 whose node had gone down."""
    text = script(job_of("exit 0", program=("bash", "-c"), max_restarts=1, output_dir=tmp_path))
    done = play(text, SRUN_CODE="0")
    assert done.returncode == 70 and "scontrol requeue 4711" in done.stdout
    assert "exit code 70, srun ended with 0, but not the run" in done.stdout
    assert play(text).returncode == 0 and not list(tmp_path.glob("*.ended_well"))


@pytest.mark.parametrize(("tries", "requeued"), [(3, False), (1000, True)])
def test_a_secret_that_a_full_disk_has_cut_is_written_again(tmp_path, tries, requeued):
    text = script(job_of("cat $OPENPI_TRAIN_JOB_TOKEN_FILE", program=("bash", "-c"), output_dir=tmp_path))
    full = f"""od() {{ echo >> {tmp_path}/tries; [ $(wc -l < {tmp_path}/tries) -gt {tries} ] && command od "$@"; }}\n"""
    done = play(full + text)
    assert ("scontrol requeue 4711" in done.stdout, done.returncode == 70) == (requeued, requeued)
    assert ("token cannot be written" in done.stdout) == requeued
    assert bool(re.search("[0-9a-f]{32}", done.stdout)) != requeued


@pytest.mark.parametrize(("remembered", "seen"), [("40 1", "40"), ("", "0"), ("4\\x00", "0"), ("40", "0")])
def test_a_start_knows_what_was_saved_before_it(remembered, seen, tmp_path):
    job = job_of("echo saved $OPENPI_TRAIN_SAVED_STEP", program=("bash", "-c"), max_restarts=1, output_dir=tmp_path)
    (tmp_path / f"{job.name}_4711.restarts").write_text(remembered)
    done = play(script(job))
    assert f"saved {seen}\n" in done.stdout and not done.stderr


@pytest.mark.parametrize("away", [2, 5])
def test_a_controller_that_is_away_for_a_moment_costs_no_job(tmp_path, away):
    text = script(job_of("exit 70", program=("bash", "-c"), max_restarts=1, output_dir=tmp_path))
    assert "scontrol requeue 4711" in play(text, AWAY=str(away)).stdout


@pytest.mark.parametrize(("needed", "excluded"), [("2", True), ("3", False)])
def test_a_node_whose_hardware_has_failed_is_left_out_where_enough_others_are_there(tmp_path, needed, excluded):
    text = script(job_of("exit 71", program=("bash", "-c"), max_restarts=1, output_dir=tmp_path))
    done = play(text, SLURM_JOB_NUM_NODES=needed)
    assert "scontrol requeue 4711" in done.stdout
    assert ("scontrol update JobId=4711 ExcNodeList=node1" in done.stdout) == excluded


def test_of_several_tasks_the_cause_has_the_highest_code(tmp_path):
    """srun ends with the highest code of its tasks. An error outranks a lost peer, which outranks a killed task."""
    codes = {}
    for task in ("exit 0", "kill -KILL $$", "exit 70", "exit 71", "exit 75", "exit 1", "exit 5", "exit 72"):
        text = script(job_of(task, program=("bash", "-c"), output_dir=tmp_path))
        done = play('srun() { while [ "$1" != bash ]; do shift; done; "$@"; echo "task $?"; }\n' + text)
        codes[task] = int(done.stdout.partition("task ")[2].split()[0])
    assert codes["exit 0"] == 0
    ranked = sorted(codes, key=codes.__getitem__)
    assert ranked == ["exit 0", "kill -KILL $$", "exit 70", "exit 71", "exit 75", "exit 1", "exit 5", "exit 72"]
    assert max(codes.values()) <= 255


def test_each_start_has_a_secret_of_its_own_in_a_file_for_its_tasks_alone(tmp_path):
    task = 'file=$OPENPI_TRAIN_JOB_TOKEN_FILE; ls -l "$file"; cat "$file"; echo; echo ".$OPENPI_TRAIN_JOB_TOKEN."'
    text = script(job_of(task, program=("bash", "-c"), output_dir=tmp_path))
    stand_in = 'umask 000; srun() { while [ "$1" != bash ]; do shift; done; "$@"; }\n'
    environ = {
        **os.environ,
        "SLURM_JOB_ID": "1",
        "SLURM_PROCID": "0",
        "OPENPI_TRAIN_JOB_TOKEN": "of the submitting shell",
    }
    tokens = set()
    for _ in range(2):
        done = subprocess.run(["bash"], input=stand_in + text, env=environ, capture_output=True, text=True, timeout=120)
        listed, token, given, *_ = done.stdout.splitlines()
        assert listed.startswith("-rw------- ") and listed.endswith(f"{tmp_path}/a_1.token") and given == ".."
        assert re.fullmatch("[0-9a-f]{32}", token) and token not in text
        tokens.add(token)
    assert len(tokens) == 2 and not (tmp_path / "a_1.token").exists()


def test_a_container_sees_the_output_folder_which_holds_the_secret(capsys, tmp_path):
    words = step(dry_run(capsys, "--container", "image.sqsh", "--output-dir", str(tmp_path)))
    assert f"--container-mounts={Path.cwd()}:{Path.cwd()},{tmp_path}:{tmp_path}" in words
    words = step(dry_run(capsys, "--container", "i", "--container-runtime", "apptainer", "--output-dir", str(tmp_path)))
    assert f"--bind {Path.cwd()} --bind {tmp_path} --pwd" in " ".join(words)


def test_a_variable_without_a_value_is_passed_on_and_not_written_down(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    job = job_of("debug", env=("WANDB_API_KEY", "A=b"), folder=tmp_path, output_dir=tmp_path, no_check=True)
    assert job.launch() == 0
    written = tmp_path / "a.sh"
    assert "hunter2" not in written.read_text() and "export A=b" in written.read_text()
    assert stat.S_IMODE(written.stat().st_mode) == 0o700
