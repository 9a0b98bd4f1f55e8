"""`serve` as a user starts it, and openpi's unmodified client at the other end of the socket."""

import contextlib
import signal
import subprocess
import sys
import time
import urllib.request

import jax
import numpy as np
import openai
import pytest
from saved_runs import save_run
from text_models import write_model

from benchmarks import openpi_peer
from benchmarks.serving import talk
from openpi_train import cli, load_policy, registry
from openpi_train.policy.record import RequestRecorder, read_record
from openpi_train.runtime.exits import DataError, UsageError
from openpi_train.serve import main

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return save_run(registry.load("debug"), tmp_path_factory.mktemp("run"))


@contextlib.contextmanager
def served(*arguments):
    """A server process that is ready, and its port."""
    command = [sys.executable, "-m", "openpi_train", "serve", *map(str, arguments), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if "ready after" in line:
                yield process, int(line.split("://127.0.0.1:")[1].split(",")[0])
                break
        else:
            pytest.fail("".join(lines))
    finally:
        process.kill()
        process.wait(20)
        process.stderr.close()


@pytest.fixture(scope="module")
def client():
    """openpi's client is there; the test is skipped where it cannot be had."""
    try:
        openpi_peer.environment()
    except openpi_peer.Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("client")
def test_openpis_client_drives_it_and_what_was_recorded_is_answered_the_same_again(run, tmp_path):
    key, record = tmp_path / "key", tmp_path / "record"
    key.write_text("s3cret\n")
    flags = ("--api-key-file", key, "--record", record, "--max-batch", "2")
    with served(run.directory, *flags) as (process, port):
        said = talk(port, 3, 3, "s3cret")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10) as response:
            assert response.read() == b"OK\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert said["numpy"].startswith("1.") and said["again"]["shape"] == [8, 7]
    assert said["metadata"]["robot"] == "Bridge" and said["metadata"]["control_hz"] == 5.0
    assert said["metadata"]["observation"]["prompt"] == {"shape": [], "dtype": "str"}
    assert "lacks 'observation/image_0'" in said["error"] and "Traceback" not in said["error"]
    assert sorted(one["draw"] for one in said["answers"]) == list(range(1, 10))
    assert {(one["dtype"], tuple(one["shape"])) for one in said["answers"]} == {("<f4", (8, 7))}

    header, batches = read_record(record)
    recorded = {draw: actions for one in batches for draw, actions in zip(one["draws"], one["actions"], strict=True)}
    assert header["batch_sizes"] == [1, 2]
    assert len(recorded) == 11
    for one in said["answers"]:
        assert float(recorded[one["draw"]].sum()) == one["sum"]
    policy = load_policy(run.directory, devices=jax.devices()[:1], batch_sizes=(1, 2))
    replayed = policy.replay(record)
    assert (replayed.answers, replayed.different) == (11, ())


def test_a_language_model_is_served_over_openais_api(tmp_path):
    folder = write_model(tmp_path / "tiny")
    with served(folder, "--max-length", "32", "--max-batch", "1") as (process, port):
        url = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=60) as client:
            first, second = (
                client.completions.create(model="tiny", prompt="What is", max_tokens=6, seed=3) for _ in range(2)
            )
            stream = client.completions.create(model="tiny", prompt="What is", max_tokens=20, stream=True)
            chunks = [next(stream)]  # which may be the last one
            process.send_signal(signal.SIGTERM)
            chunks += stream
            assert chunks[-1].choices[0].finish_reason in ("length", "stop")
        assert process.wait(30) == 0
    assert first.choices[0].text == second.choices[0].text and first.usage.completion_tokens > 0


def test_another_policy_answers_otherwise_and_a_torn_record_is_told(run, tmp_path):
    policy, path = load_policy(run.directory, devices=jax.devices()[:1], batch_sizes=(4,)), tmp_path / "record"
    recorder = RequestRecorder(path, policy)
    observation = run.observation(0)
    answer = policy.infer(observation)
    recorder.write([observation], [answer])
    recorder.write([observation], [{**answer, "actions": np.nextafter(answer["actions"], 1)}])
    recorder.close()
    assert policy.replay(path).different == (0,)
    with pytest.raises(UsageError, match="was recorded with seed 42, the policy has 7"):
        load_policy(run.directory, devices=jax.devices()[:1], batch_sizes=(4,), seed=7).replay(path)
    with pytest.raises(UsageError, match="exists"):
        RequestRecorder(path, policy)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match="ends in the middle"):
        policy.replay(path)
    (tmp_path / "other").write_bytes(b"something else altogether")
    with pytest.raises(DataError, match=r"ends in the middle|no record"):
        policy.replay(tmp_path / "other")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("/nowhere",), "no checkpoint at /nowhere: there is no such directory"),
        (("/nowhere", "--port", "99999"), "--port 99999 is not a port: give 0"),
        (("/nowhere", "--host", "203.0.113.1"), "--host 203.0.113.1 --port 8000 cannot be listened on"),
        (("/nowhere", "--api-key-file", "/no/key"), "--api-key-file /no/key cannot be read"),
        (("/nowhere", "--record", "/no/folder/record"), "there is no folder /no/folder"),
        (("/nowhere", "--tls-cert", "x"), "--tls-cert and --tls-key must both be given"),
        (("/nowhere", "--max-batch", "0"), "--max-batch 0 must be at least 1"),
        (("/nowhere", "--replay", "/no/file"), "/no/file cannot be read"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_loaded(flags, says, capsys, monkeypatch):
    monkeypatch.setattr(main, "_start", lambda: None)  # this process's log and cache are the suite's
    started = time.monotonic()
    try:
        code = cli.run(["serve", *flags])
    except SystemExit as ending:
        code = ending.code
    assert code in (2, 3, 4) and says in capsys.readouterr().err
    assert time.monotonic() - started < 20
