"""Bad input through the real command line: the exit code, and a message that says what was given, what is allowed or
there, and what to do; never a traceback. Most cases end before anything is compiled.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from bad_files import SOURCE, shard_of, small_disk, write_all
from command import ROOT, check, environment, openpi_train, places

from openpi_train import cli
from openpi_train.runtime.device_kinds import GIB
from openpi_train.runtime.device_limits import host_bytes_per_device
from openpi_train.runtime.exits import CHECKPOINT, DATA, INDIVISIBLE, USAGE

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A folder with good and bad files of every kind."""
    return write_all(tmp_path_factory.mktemp("bad_input"))


def case(name: str, arguments: str, code: int, *says: str, exp_name: str = "--exp-name x", **variables: str):
    """One command line (`HERE` is the folder above) and what its message must hold."""
    return pytest.param(f"{arguments} {exp_name}", code, says, variables, id=name)


TINY = Path(__file__).with_name("tiny_policies.py")
ARM, ROBOT = "HERE/bad_input_experiments.py:arm", "--data.datasets.0.robot"
CASES = [
    case("experiment", "debgu", USAGE, "'debgu'", "did you mean debug", "list"),
    case("flag", "debug --batchsize 4", USAGE, "--batchsize", "--batch-size INT", "--help"),
    case("nested flag", "debug --model.action-horizn 3", USAGE, "--model.action-horizn", "--model.action-horizon INT"),
    case("type", "debug --batch-size twelve", USAGE, "--batch-size", "'twelve'", "INT", "--help"),
    case("choice", "debug --on-nan panic", USAGE, "'panic'", "--on-nan", "'stop', 'skip'"),
    case("no exp-name", "debug", USAGE, "--exp-name NAME is missing", exp_name=""),
    case("exp-name with a slash", "debug", USAGE, "'a/b'", "path separator", exp_name="--exp-name a/b"),
    case(
        "batch",
        "debug --batch-size 12 --devices-per-process 8",
        INDIVISIBLE,
        "--batch-size 12 is not a multiple of the 8 devices; try 8 or 16",
    ),
    case(
        "fsdp",
        "debug --fsdp-devices 3 --devices-per-process 4",
        USAGE,
        "--fsdp-devices 3 does not divide the 4 devices",
        "allowed: 1, 2, 4",
    ),
    case(
        "resume and overwrite",
        "debug --resume --overwrite",
        USAGE,
        "--resume and --overwrite exclude each other",
        "continue the run, or move it aside?",
    ),
    case(
        "rising rate",
        "debug --lr-schedule.decay-lr 1.0",
        USAGE,
        "decay_lr 1.0 is above lr_schedule.peak_lr 2.5e-05",
        "lower --lr-schedule.decay-lr",
    ),
    case("image size", "debug --model.image-size 30", USAGE, "image_size 30", "multiple of siglip.patch_size 16"),
    case("model size", "debug --model.action-dim 0", USAGE, "action_dim 0 must be at least 1"),
    case("draws", "debug --objective.num-flow-draws 0", USAGE, "num_flow_draws 0 must be at least 1"),
    case("devices", "debug --devices-per-process 0", USAGE, "--devices-per-process", "0 must be at least 1"),
    case("held-out share", "debug --data.validation-fraction 1.5", USAGE, "1.5 must lie in [0, 1)", "0 holds nothing"),
    case("RANK alone", "debug", USAGE, "RANK=0 but not WORLD_SIZE, MASTER_ADDR", "set them too, or unset", RANK="0"),
    case("file", "HERE/absent.py:try7", USAGE, "absent.py' does not exist", "looked in"),
    case("name in file", "HERE/bad_input_experiments.py:try8", USAGE, "as file.py:name", "has arm, noise"),
    case("no experiment", "HERE/bad_input_experiments.py:number", USAGE, "is a int, not an Experiment"),
    case("file that does not parse", "HERE/unfinished.py:try7", USAGE, "unfinished.py line 1 does not parse"),
    case(
        "dataset",
        f"{ARM} {SOURCE}.path HERE/absent",
        DATA,
        "/absent holds no RLDS dataset",
        "neither dataset_info.json nor a version folder",
        "Give <data_dir>/<name>/<version>",
    ),
    case("split", f"{ARM} {SOURCE}.split test", DATA, "'test' is not in", "it has train (8 episodes)", "Join splits"),
    case(
        "feature",
        f"{ARM} {SOURCE}.path HERE/stateless",
        DATA,
        "reads the column 'observation/state'",
        "the dataset has action",
    ),
    case(
        "camera",
        f"{ARM} {ROBOT}.cameras.base-0-rgb observation/wrist",
        DATA,
        "camera base_0_rgb reads the image feature 'observation/wrist'",
        "it has observation/image_0",
        "set --data.datasets.0.robot.cameras.base-0-rgb observation/image_0",
    ),
    case(
        "robot wider than the model",
        f"{ARM} --model.action-dim 4 --data.validation-fraction 0.5",
        DATA,
        "robot has 7 state dims, the model takes 4",
        "set --model.action-dim 7 or more",
    ),
    case(
        "torn record",
        f"{ARM} {SOURCE}.path HERE/torn",
        DATA,
        "3 episodes of",
        "record 5 (episode 5 of that file): the file is truncated",
        "--data.on-bad-record skip",
    ),
    case(
        "flipped byte",
        f"{ARM} {SOURCE}.path HERE/flipped",
        DATA,
        "1 episodes of",
        "checksum does not match its bytes",
        "--data.on-bad-record skip",
    ),
    case(
        "tokenizer file",
        "debug --data.tokenizer HERE/unfinished.py",
        DATA,
        "unfinished.py is not a SentencePiece model",
        "give its `.model` file",
    ),
    case(
        "tokenizer's vocabulary",
        "debug --model.vocab-size 100",
        DATA,
        "tokenizer bytes has 261 pieces, the model's vocabulary only 100",
        "--data.tokenizer",
    ),
    case("no tokenizer file", "debug --data.tokenizer HERE/t.model", DATA, "no tokenizer at", "give the path of a"),
    case(
        "neither data nor their tokenizer",
        f"{ARM} {SOURCE}.path HERE/nowhere --data.tokenizer HERE/nowhere/t.model",
        DATA,
        "/nowhere",
        "dataset_info.json",
    ),
    case(
        "tokenizer of the hub, offline",
        "debug --data.offline --data.tokenizer google/paligemma-nowhere",
        DATA,
        "google/paligemma-nowhere",
        "hub",
        "give the path of a SentencePiece model with --data.tokenizer",
    ),
    case(
        "norm stats of another width",
        "debug --data.datasets.0.norm-stats HERE/narrow.json",
        DATA,
        "mismatched norm stats: 2 dims for 7 named (x_m",
        "omit --data.datasets.N.norm-stats",
    ),
    case("norm stats NaN", "debug --data.datasets.0.norm-stats HERE/nan.json", DATA, "nan.json: mean or std of state"),
    case("no norm stats", "debug --data.datasets.0.norm-stats HERE/none.json", DATA, "no norm stats at", "or none to"),
    case(
        "NaN in a column",
        f"{TINY}:poisoned {SOURCE}.nan-steps 40",
        DATA,
        "actions: the columns hold NaN or infinity",
        "1 of ",
        "record 1, episode 1, step",
        "--on-nan skip",
    ),
    case(
        "remote weights",
        "debug --weight-loader.params-path ftp://bucket/params",
        CHECKPOINT,
        "ftp://bucket/params: addresses with ftp:// are not supported",
        "allowed: a path, or one of gs://",
    ),
    case(
        "nothing to convert",
        "convert HERE/absent HERE/out",
        CHECKPOINT,
        "no checkpoint at",
        "there is no such directory; check the path",
    ),
    case(
        "no weights",
        "debug --weight-loader.params-path HERE/absent",
        CHECKPOINT,
        "no checkpoint at",
        "there is no such directory",
    ),
    case(
        "damaged weights",
        "debug --weight-loader.params-path HERE/damaged",
        CHECKPOINT,
        "damaged/model.safetensors is not a safetensors file",
    ),
]


@pytest.mark.parametrize(("arguments", "code", "says", "variables"), CASES)
def test_refused_with_what_was_given_what_is_allowed_and_what_to_do(here, tmp_path, arguments, code, says, variables):
    line = arguments.replace("HERE", str(here)).split()
    done = openpi_train(*line, *places(tmp_path)[2:], **variables)
    check(done, code, *says)
    assert not list((tmp_path / "runs").glob("*/*/experiment.json"))  # what was corrected starts under the same name


def test_all_numbers_out_of_range_are_told_at_once(tmp_path):
    given = {
        "--fsdp-devices": "0", "--batch-size": "0", "--grad-accum": "0", "--num-workers": "-1", "--keep-period": "0",
        "--eval.num-rows": "0", "--lr-schedule.warmup-steps": "-1", "--optimizer.clip-gradient-norm": "0.0",
        "--data.datasets.0.weight": "0.0",
    }  # fmt: skip
    done = openpi_train("debug", *places(tmp_path), *(word for pair in given.items() for word in pair))
    check(done, USAGE, *(f"{flag} {value} must be" for flag, value in given.items()))


@pytest.mark.parametrize("name", ["torn", "flipped"])
def test_bad_records_are_left_out_and_named_where_that_is_asked_for(here, caplog, name):
    flags = [f"{SOURCE}.path", f"{here}/{name}", "--data.on-bad-record", "skip", *places(here)]
    experiment = cli.parse_experiment(f"{here}/bad_input_experiments.py:arm", flags)
    with caplog.at_level("WARNING"):
        data = experiment.open_data()
    kept = {"torn": 5, "flipped": 7}[name]
    assert data.train.windows[0].source.num_episodes == kept
    assert f"{8 - kept} episodes of" in caplog.text
    assert "are left out" in caplog.text
    assert shard_of(here / name / "1.0.0").name in caplog.text


def test_a_torn_file_of_the_bridge_sample_is_named(here, tmp_path, bridge_sample):
    shutil.copytree(bridge_sample, tmp_path / "bridge" / "1.0.0", copy_function=shutil.copyfile)
    shard = shard_of(tmp_path / "bridge" / "1.0.0")
    shard.chmod(0o644)
    os.truncate(shard, 2_000_000)
    arguments = (f"{here}/bad_input_experiments.py:arm", f"{SOURCE}.path", tmp_path / "bridge", *places(tmp_path))
    check(openpi_train(*arguments), DATA, shard.name, "record 14", "the file is truncated", "--data.on-bad-record skip")


@pytest.mark.parametrize("verb", ["data index PATH", f"stats {ARM} {SOURCE}.path PATH"], ids=["data", "stats"])
def test_verbs_about_data_end_with_the_code_for_data(here, tmp_path, verb):
    line = verb.replace("HERE", str(here)).replace("PATH", f"{tmp_path}/nowhere")
    check(openpi_train(*line.split()), DATA, f"{tmp_path}/nowhere", "dataset_info.json")


@pytest.mark.parametrize("flags", [(), ("--dry-run",)], ids=["run", "dry run"])
def test_a_model_that_does_not_fit_is_refused_before_anything_is_allocated(tmp_path, flags):
    sample = Path(os.environ.get("OPENPI_TRAIN_DATA", ROOT.parent / "shared" / "data")) / "bridge_dataset"
    # So many rows that no machine holds them: the test must not depend on this one's memory.
    state_fits = host_bytes_per_device() * jax.local_device_count() > 64 * GIB  # of one device
    if state_fits and not flags and not sample.is_dir():
        pytest.skip("this machine holds pi0's state, and a run then opens its data: there is no Bridge sample here")
    # The published tokenizer is on the hub, and that there is no network is told first.
    words = ("--batch-size", "65536", f"{SOURCE}.path", sample, "--data.tokenizer", "bytes", *flags)
    arguments = ("pi0_bridge_traj", *places(tmp_path), *words)
    # Started from a small process: Linux counts the memory of whoever forks towards the child's peak.
    small = (
        "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]); "
        "print('peak KiB', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(code)"
    )
    command = [sys.executable, "-c", small, sys.executable, "-m", "openpi_train", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT, check=False)
    text = check(
        done,
        USAGE,
        "pi0_bridge_traj does not fit. Bytes needed on each device: state 48.3 GiB",
        # A run is refused before it opens its data, where the state alone is too large; a dry run says all.
        "--grad-accum 2" if flags or state_fits else "no activations yet",
        "train low-rank adapters only, as pi0_lora: ",
    )
    assert re.search(r"together \d+\.\d GiB\. There are \d+\.\d GiB on each of 1 device", text)
    assert re.search(r"more devices .* with --fsdp-devices \d+", text)
    assert ("total" in text and "available" in text) == bool(flags)
    peak = re.search(r"peak KiB (\d+)", text)
    assert peak is not None
    assert int(peak[1]) < 2 * 2**20, f"{peak[1]} KiB: something was allocated"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("flag", "code"), [("--checkpoint-base-dir", USAGE), ("--assets-base-dir", DATA)])
def test_a_directory_that_cannot_be_written_is_named_with_its_flag(here, tmp_path, flag, code):
    file = here / "unfinished.py"
    check(openpi_train("debug", *places(tmp_path), flag, file), code, str(file), "another", flag)


def test_too_little_shared_memory_is_told_before_the_workers_start(tmp_path):
    done = openpi_train("debug", *places(tmp_path), "--num-workers", "2", prefix=small_disk(Path("/dev/shm"), "64k"))
    text = check(done, DATA, "2 data workers need about", "of /dev/shm", "use --num-workers 0 (threads), or enlarge it")
    assert "compiling" not in text


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        ("debug --batch-size 3", INDIVISIBLE, "--batch-size 3 is not a multiple of the 2 devices; try 2 or 4"),
        # Only process 0 reads at first, while the other waits for it.
        (f"{ARM} {SOURCE}.path HERE/absent", DATA, "Give <data_dir>/<name>/<version>"),
    ],
    ids=["by both", "by the first"],
)
def test_what_several_processes_are_refused_stands_last_on_the_screen(here, tmp_path, flags, code, says):
    launch = ("launch", "local", "--processes", "2", "--log-dir", tmp_path / "output", "--")
    done = openpi_train(*launch, *flags.replace("HERE", str(here)).split(), *places(tmp_path))
    check(done, code)
    message, where = done.stderr.strip().splitlines()[-2:]
    assert says in message
    assert f"failed with exit code {code}: see {tmp_path}" in where
