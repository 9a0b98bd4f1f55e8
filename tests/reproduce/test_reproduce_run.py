"""An entry as a whole, by real commands: made once, gone on with, and checked on another number of processes."""

import importlib.util
import json
import subprocess
import sys
import textwrap

import pytest

from openpi_train.launch import processes

# An entry of two steps, as the board has them; what it learns does not matter.
PROGRAM = textwrap.dedent(
    """
    import sys
    from openpi_train import cli
    from openpi_train.reproduce.board import BOARD
    from openpi_train.reproduce.reproduction import Reproduction

    if __name__ == "__main__":
        BOARD["small"] = Reproduction(
            name="small",
            what="reaches",
            data={"{data}.zarr": "data collect fetch:reach --out {data}.zarr --episodes-per-task 2"},
            train="act --dataset {data}.zarr --model.dim-model 8 --model.n-heads 2 --model.dim-feedforward 8 "
            "--model.n-encoder-layers 1 --model.no-use-vae --model.dtype float32 --model.action-horizon 2 "
            "--num-train-steps 2 --log-interval 1 --eval.interval 2 --batch-size 4 --num-workers 0 "
            "--data.validation-fraction 0.5",
            evaluations={"reach": "eval {run} --env fetch:reach --episodes 2 --max-steps 4 --held-out 0 --videos 0"},
        )
        sys.exit(cli.run(["reproduce", "small", *sys.argv[1:]]))
    """
)


def start(folder, *words):
    command = [sys.executable, str(folder / "program.py"), *map(str, words)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(folder, *words):
    process = start(folder, *words)
    said, _ = process.communicate(timeout=600)
    return process.returncode, said


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.skipif(not importlib.util.find_spec("gymnasium_robotics"), reason="gymnasium-robotics is missing")
def test_an_entry_goes_on_and_equals_its_record_on_two_processes(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    code, said = run(tmp_path)
    assert code == 0, said
    folder = tmp_path / "reproduce" / "small"
    record = json.loads((folder / "record.json").read_text())
    assert "reach: 0 of 2 episodes" in said and record["success"]["reach"]["trials"] == 2
    assert record["losses"]["count"] >= 2 and record["environment"]["process_count"] == 1
    stages = json.loads((folder / "stages.json").read_text())
    assert {"data", "train", "eval reach"} <= {*stages}

    # Interrupted before the evaluation: the rest is not made again.
    (folder / "record.json").unlink()
    (folder / "stages.json").write_text(json.dumps({name: s for name, s in stages.items() if name != "eval reach"}))
    code, said = run(tmp_path)
    assert code == 0 and "compiling the training step" not in said and "making reproduce" not in said, said
    again = json.loads((folder / "record.json").read_text())
    same = ("commands", "data", "losses", "parameters", "success")
    assert {name: again[name] for name in same} == {name: record[name] for name in same}

    # Anew, on two processes with a device each in place of one with two.
    where = ["--coordinator", f"127.0.0.1:{processes.free_port()}", "--num-processes", 2, "--process-id"]
    both = [start(tmp_path, "--check", folder / "record.json", *where, index) for index in (0, 1)]
    said = [process.communicate(timeout=600)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert "equal: every result, bit for bit" in said[0] and "process_count" in said[0]

    # A record of another result is told, with the code of wrong data.
    record["losses"]["sha256"] = "0" * 64
    (tmp_path / "other.json").write_text(json.dumps(record))
    code, said = run(tmp_path, "--check", "other.json")
    assert code == 3 and "different: losses.sha256" in said and "is complete" in said, said
