"""The flags of `serve` that are the server's: each changes what a client meets at the socket, and nothing else does."""

import os
import socket
import ssl
import subprocess

import numpy as np
import pytest
from command_line import LoadedStub, admitted, answer, ask, metrics, serve
from stub import request
from websockets.exceptions import InvalidMessage

from openpi_train.policy import wire
from openpi_train.policy.record import read_record

KEY = "s3cret"
NOT_THE_KEY = (None, "", "s", KEY[:-1], KEY[1:], KEY + "2", f"{KEY} 2", KEY.upper(), "other")


def reachable(host, port):
    try:
        socket.create_connection((host, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.parametrize("source", ["file", "environment", "both"])
def test_only_the_whole_key_comes_in_from_a_file_or_the_environment(source, tmp_path):
    file = tmp_path / "key"
    file.write_text(f" {KEY}\n")
    words = () if source == "environment" else ("--api-key-file", file)
    environment = {"file": None, "environment": f"{KEY}\n", "both": "other"}[source]

    def talk(server):
        assert server.log[-1].endswith("with an API key")
        assert admitted(server, KEY)
        assert [key for key in NOT_THE_KEY if admitted(server, key)] == []
        assert 'outcome="unauthorized"} 9.0' in metrics(server)

    assert serve("run", "--port=0", *words, key=environment, talk=talk).code == 0


def test_without_a_key_everybody_comes_in_and_the_log_says_so():
    def talk(server):
        assert server.log[-1].endswith("without authentication")
        assert admitted(server) and admitted(server, "any")

    assert serve("run", "--port=0", talk=talk).code == 0


@pytest.mark.parametrize(
    ("content", "says"), [(b" \n", "is empty"), (b"\xff", "cannot be read")], ids=["empty", "no text"]
)
def test_a_key_file_that_holds_no_key_is_refused(content, says, tmp_path, capsys):
    (tmp_path / "key").write_bytes(content)
    # A key in the environment does not stand in for a file that was named.
    ended = serve("run", "--port=0", "--api-key-file", tmp_path / "key", key=KEY, load=never)
    assert ended.code == 2 and says in capsys.readouterr().err


def test_an_empty_key_in_the_environment_is_refused(capsys):
    assert serve("run", "--port=0", key=" ", load=never).code == 2
    assert "the API key in OPENPI_TRAIN_API_KEY is empty" in capsys.readouterr().err


# What `load_policy` is asked for where no flag says otherwise: its own defaults, and the programs of batches up to 16.
LOADED = {
    "experiment": None,
    "dataset": None,
    "prompt": None,
    "average": True,
    "dtype": None,
    "merge_lora": True,
    "num_sample_steps": None,
    "guidance": None,
    "batch_sizes": [1, 4, 16],
    "seed": None,
    "tokenizer": None,
    "cut_prompts": False,
}
CHANGED = {
    "none": ("", {}),
    "experiment": ("--experiment=runs.py:mine", {"experiment": "runs.py:mine"}),
    "dataset number": ("--dataset=1", {"dataset": 1}),
    "dataset name": ("--dataset=bridge_2", {"dataset": "bridge_2"}),
    "prompt": ("--prompt=go", {"prompt": "go"}),
    "empty prompt": ("--prompt=", {"prompt": ""}),
    "no average": ("--no-average", {"average": False}),
    "dtype": ("--dtype=bfloat16", {"dtype": "bfloat16"}),
    "no merge": ("--no-merge-lora", {"merge_lora": False}),
    "steps": ("--num-sample-steps=3", {"num_sample_steps": 3}),
    "guidance": ("--guidance=1.5", {"guidance": 1.5}),
    "batch": ("--max-batch=4", {"batch_sizes": [1, 4]}),
    "seed": ("--seed=0", {"seed": 0}),
    "tokenizer": ("--tokenizer=/a.model", {"tokenizer": "/a.model"}),
    "cuts": ("--cut-prompts", {"cut_prompts": True}),
}


@pytest.mark.parametrize("case", CHANGED)
def test_the_policy_is_loaded_as_the_flags_say(case):
    words, changed = CHANGED[case]

    def load(directory, **options):
        found.append((directory, options))
        return LoadedStub(directory, **options)

    found = []
    assert serve("run", "--port=0", *words.split(), load=load).code == 0
    assert found == [("run", LOADED | changed)]


@pytest.mark.parametrize(("words", "prefixes"), [((), None), (("--real-time-chunking",), True)])
def test_programs_for_prefixes_are_compiled_at_the_start_if_asked(words, prefixes):
    def load(directory, **options):
        loaded.append(LoadedStub(directory, **options))
        return loaded[-1]

    loaded = []
    assert serve("run", "--port=0", *words, load=load).code == 0
    assert [policy.options["prefixes"] for policy in loaded] == [prefixes]


def never(*given, **options):
    raise AssertionError("the policy was loaded")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Two certificates with their keys: folders with cert.pem and key.pem."""
    folders = [tmp_path_factory.mktemp("pair") for _ in range(2)]
    for folder in folders:
        command = (
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
        )
        subprocess.run(
            [*command.split(), "-keyout", "key.pem", "-out", "cert.pem"], cwd=folder, check=True, capture_output=True
        )
    return folders


def test_a_certificate_makes_it_wss_and_nothing_goes_in_the_clear(pairs):
    own, _ = pairs
    trust = ssl.create_default_context(cafile=str(own / "cert.pem"))

    def talk(server):
        assert server.scheme == "wss"
        with server.connect(ssl=trust, server_hostname="localhost") as connection:
            assert wire.decode(connection.recv(timeout=10))["robot"] == "Stub"
            assert ask(connection, request(1))["draw"] == 0
            assert not connection.socket.session.has_ticket
        served = ssl.get_server_certificate((server.host, server.port), timeout=10)
        assert ssl.PEM_cert_to_DER_cert(served) == ssl.PEM_cert_to_DER_cert((own / "cert.pem").read_text())
        server.scheme = "ws"
        with pytest.raises((InvalidMessage, ConnectionError, EOFError, TimeoutError)):
            server.connect()

    words = ("--tls-cert", own / "cert.pem", "--tls-key", own / "key.pem")
    assert serve("run", "--port=0", *words, talk=talk).code == 0


def test_without_a_certificate_it_is_plain():
    def talk(server):
        assert server.scheme == "ws" and admitted(server)

    assert serve("run", "--port=0", talk=talk).code == 0


@pytest.mark.parametrize(
    "files",
    [("0/cert.pem", "1/key.pem"), ("0/key.pem", "0/cert.pem"), ("0/cert.pem", "0/none.pem"), ("none", "0/key.pem")],
    ids=["another key", "swapped", "no key", "no certificate"],
)
def test_a_certificate_and_a_key_that_do_not_fit_are_refused(pairs, files, capsys):
    cert, key = (pairs[int(file[0])] / file[2:] if "/" in file else pairs[0] / file for file in files)
    assert serve("run", "--port=0", "--tls-cert", cert, "--tls-key", key, load=never).code == 2
    assert f"--tls-cert {cert} with --tls-key {key} cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told", "open_to"),
    [
        ((), "127.0.0.1", (True, False)),
        (("--host", "127.0.0.2"), "127.0.0.2", (False, True)),
        (("--host", "localhost"), "127.0.0.1", (True, False)),
        (("--host", "0.0.0.0"), "0.0.0.0", (True, True)),
    ],
    ids=["default", "other", "name", "all"],
)
def test_it_listens_where_it_is_told_and_nowhere_else(words, told, open_to):
    def talk(server):
        assert server.host == told
        assert tuple(reachable(host, server.port) for host in ("127.0.0.1", "127.0.0.2")) == open_to

    assert serve("run", "--port=0", *words, talk=talk).code == 0


def test_it_takes_the_port_it_is_told_and_takes_it_again_at_once():
    port = free_port()

    def talk(server):
        assert server.port == port
        return admitted(server)

    assert serve("run", "--port", port, talk=talk).talked
    assert serve("run", "--port", port, talk=talk).talked  # connections of before are still known to the system


def test_a_port_that_another_program_listens_on_is_told_before_anything_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert serve("run", "--port", port, load=never).code == 2
    said = capsys.readouterr().err
    assert f"--host 127.0.0.1 --port {port} cannot be listened on" in said
    assert f"Give another --port, or end what listens there, the process {os.getpid()}" in said


@pytest.mark.parametrize(("words", "pose"), [((), None), (("--reset-pose=0,-1.5,0.25",), [0.0, -1.5, 0.25])])
def test_clients_are_told_the_pose_to_begin_with(words, pose):
    def talk(server):
        with server.connect() as connection:
            return answer(connection)

    told = serve("run", "--port=0", *words, talk=talk).talked
    assert told == {**LoadedStub("", batch_sizes=[1], seed=1, num_sample_steps=1).metadata} | (
        {} if pose is None else {"reset_pose": pose}
    )


def three_answers(server):
    with server.connect() as connection:
        answer(connection)
        return [ask(connection, request(value))["actions"].tolist() for value in range(3)]


@pytest.fixture
def recorded(tmp_path):
    """A record of three answers of a server with flags of its own, and their actions."""
    path = tmp_path / "answers.rec"
    words = ("--seed=9", "--num-sample-steps=4", "--guidance=1.5", "--max-batch=3", "--record", path)
    ended = serve("run", "--port=0", *words, talk=three_answers)
    assert ended.code == 0
    return path, ended.talked


def test_the_record_holds_every_request_and_answer_in_their_order(recorded):
    path, actions = recorded
    header, batches = read_record(path)
    batches = list(batches)
    assert (header["seed"], header["num_sample_steps"], header["batch_sizes"]) == (9, 4, [1, 3])
    assert header["guidance"] == 1.5
    assert [batch["draws"] for batch in batches] == [[0], [1], [2]]
    assert [batch["observations"][0]["state"].tolist() for batch in batches] == [[0, 0], [1, 1], [2, 2]]
    assert [batch["actions"][0].tolist() for batch in batches] == actions == [[9, 9], [12, 12], [15, 15]]


@pytest.mark.parametrize(
    ("name", "says"), [("answers.rec", "exists"), ("no/file", "there is no folder")], ids=["taken", "no folder"]
)
def test_a_record_needs_a_folder_and_a_name_of_its_own(recorded, tmp_path, name, says, capsys):
    before = recorded[0].read_bytes()
    load = never if says == "there is no folder" else LoadedStub
    assert serve("run", "--port=0", "--record", tmp_path / name, load=load).code == 2
    assert says in capsys.readouterr().err and recorded[0].read_bytes() == before


def test_what_was_recorded_is_asked_again_as_it_was_sampled(recorded, capsys):
    loaded = []
    ended = serve(
        "run",
        "--replay",
        recorded[0],
        load=lambda *given, **options: loaded.append(options) or LoadedStub(*given, **options),
    )
    assert ended.code == 0 and capsys.readouterr().out == "all 3 answers are equal, bit for bit\n"
    (options,) = loaded
    assert (options["seed"], options["num_sample_steps"], options["batch_sizes"]) == (9, 4, [1, 3])
    assert options["guidance"] == 1.5


def test_answers_that_differ_are_counted_and_named_and_the_code_says_so(recorded, capsys):
    class Other(LoadedStub):
        def answer(self, prepared, draws=None):
            answers = super().answer(prepared, draws)
            for one in answers:
                if one["draw"] == 1:  # by the smallest step there is
                    one["actions"] = np.nextafter(one["actions"], np.float32(100), dtype=np.float32)
            return answers

    assert serve("run", "--replay", recorded[0], load=Other).code == 5
    assert capsys.readouterr().out == "1 of 3 answers differ: draws 1\n"
