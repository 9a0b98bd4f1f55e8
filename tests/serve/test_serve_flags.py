"""What `serve` understands of its command line: defaults, limits to the last number, and which verb it becomes."""

import re

import pytest

from openpi_train import cli
from openpi_train.serve import main
from openpi_train.serve.request import ServeRequest

# What docs/howto/serve.md and `serve --help` promise where a flag is not given.
DEFAULTS = {
    "experiment": None,
    "dataset": None,
    "prompt": None,
    "num_sample_steps": None,
    "guidance": None,
    "dtype": None,
    "average": True,
    "merge_lora": True,
    "seed": None,
    "tokenizer": None,
    "cut_prompts": False,
    "real_time_chunking": False,
    "reset_pose": None,
    "vla_eval_names": (),
    "vla_eval_execute": None,
    "host": "127.0.0.1",
    "port": 8000,
    "api_key_file": None,
    "tls_cert": None,
    "tls_key": None,
    "max_batch": 16,
    "batch_wait_ms": 5.0,
    "max_queue": 64,
    "max_clients": 64,
    "max_message_mib": 32,
    "idle_s": 3600.0,
    "drain_s": 30.0,
    "record": None,
    "replay": None,
}
GIVEN = {
    "experiment": ("runs.py:mine", "runs.py:mine"),
    "dataset": ("1", "1"),
    "prompt": ("close the drawer", "close the drawer"),
    "num_sample_steps": ("3", 3),
    "guidance": ("2.5", 2.5),
    "dtype": ("bfloat16", "bfloat16"),
    "average": ("--no-average", False),
    "merge_lora": ("--no-merge-lora", False),
    "seed": ("7", 7),
    "tokenizer": ("/a.model", "/a.model"),
    "cut_prompts": ("--cut-prompts", True),
    "real_time_chunking": ("--real-time-chunking", True),
    "reset_pose": ("0,-1.5,2e-1", (0.0, -1.5, 0.2)),
    "vla_eval_names": ("image=front,state=joint_state", ("image=front", "state=joint_state")),
    "vla_eval_execute": ("5", 5),
    "host": ("0.0.0.0", "0.0.0.0"),
    "port": ("8001", 8001),
    "api_key_file": ("key", "key"),
    "max_batch": ("5", 5),
    "batch_wait_ms": ("2.5", 2.5),
    "max_queue": ("6", 6),
    "max_clients": ("7", 7),
    "max_message_mib": ("8", 8),
    "idle_s": ("9.5", 9.5),
    "drain_s": ("0.25", 0.25),
    "record": ("file", "file"),
    "replay": ("file", "file"),
}
# Those of language models.
TEXT_DEFAULTS = {"model_name": None, "max_length": None, "chat_template": None, "request_s": 600.0}
TEXT_GIVEN = {"model_name": "m", "max_length": 64, "chat_template": "chat.jinja", "request_s": 1.5}
AT_LEAST_ONE = ("max_batch", "max_queue", "max_clients", "max_message_mib")
TIMES = ("batch_wait_ms", "idle_s", "drain_s")


@pytest.fixture
def parsed(monkeypatch):
    """A function from a command line to the verb it becomes and the flags that this one is given."""
    found = []
    monkeypatch.setattr(main, "run", lambda flags, texts: found.append(("run", flags, texts)) or 0)
    monkeypatch.setattr(main, "replay", lambda flags, file: found.append(("replay", flags, None)) or 0)

    def parse(*words) -> tuple[str, ServeRequest]:
        assert cli.run(["serve", "checkpoint", *map(str, words)]) == 0
        *parsed, parse.texts = found.pop()
        return tuple(parsed)

    return parse


@pytest.fixture
def refusal(parsed, capsys):
    """A function from a command line that is refused to what is said of it, in one line and without frames."""

    def refuse(*words) -> str:
        try:
            code = cli.run(["serve", "checkpoint", *map(str, words)])
        except SystemExit as ending:
            code = ending.code
        assert code == 2
        return " ".join(re.sub(r"│|-{4,}|─+", " ", capsys.readouterr().err).split())

    return refuse


def option(name):
    return f"--{name.replace('_', '-')}"


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_flag_that_is_not_given_has_the_promised_value(parsed, name):
    verb, flags = parsed()
    assert (verb, getattr(flags, name)) == ("run", DEFAULTS[name])


def test_every_flag_has_a_promised_value(parsed):
    assert vars(parsed()[1]) == {"checkpoint": "checkpoint", **DEFAULTS}


@pytest.mark.parametrize("name", GIVEN)
def test_a_flag_that_is_given_changes_its_own_value_alone(parsed, name):
    word, value = GIVEN[name]
    verb, flags = parsed(*([word] if word.startswith("--") else [option(name), word]))
    assert vars(flags) == {"checkpoint": "checkpoint", **DEFAULTS, name: value}
    assert verb == ("replay" if name == "replay" else "run")


@pytest.mark.parametrize("name", [None, *TEXT_GIVEN])
def test_flags_of_language_models_are_their_own(parsed, name):
    words = [] if name is None else [option(name), TEXT_GIVEN[name]]
    assert vars(parsed(*words)[1]) == {"checkpoint": "checkpoint", **DEFAULTS}
    assert vars(parsed.texts) == TEXT_DEFAULTS | ({} if name is None else {name: TEXT_GIVEN[name]})
    assert parsed.texts.given() == ([] if name is None else [option(name)])


@pytest.mark.parametrize("name", GIVEN)
def test_flags_that_only_robots_have_are_known(parsed, name):
    word = GIVEN[name][0]
    _, flags = parsed(*([word] if word.startswith("--") else [option(name), word]))
    shared = ("experiment", "dtype", "average", "merge_lora", "tokenizer", "host", "port", "api_key_file")
    shared += (*AT_LEAST_ONE, "idle_s", "drain_s")
    assert flags.only_of_robots() == ([] if name in shared else [option(name)])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--request-s=0",), "--request-s 0.0 is not a valid time"),
        (("--request-s=nan",), "--request-s nan is not a valid time"),
        (("--request-s=inf",), "--request-s inf is not a valid time"),
        (("--max-length=1",), "--max-length 1 must be at least 2"),
        (("--model-name=",), "--model-name is empty"),
    ],
)
def test_flags_of_language_models_have_limits(refusal, words, says):
    assert says in refusal(*words)


def test_something_of_a_chunk_is_executed(refusal):
    assert "--vla-eval-execute 0 must be at least 1" in refusal("--vla-eval-execute=0")


@pytest.mark.parametrize("name", AT_LEAST_ONE)
def test_counts_begin_at_one(parsed, refusal, name):
    assert getattr(parsed(f"{option(name)}=1")[1], name) == 1
    for number in (0, -1):
        assert f"{option(name)} {number} must be at least 1" in refusal(f"{option(name)}={number}")
    assert f"Error parsing {option(name)}: 1.5 is not a whole number" in refusal(option(name), "1.5")


@pytest.mark.parametrize("name", TIMES)
def test_times_are_finite_and_may_be_zero(parsed, refusal, name):
    assert getattr(parsed(f"{option(name)}=0")[1], name) == 0
    assert getattr(parsed(f"{option(name)}=1e9")[1], name) == 1e9
    for number in ("-0.001", "inf", "-inf", "nan"):
        assert f"{option(name)} {float(number)} is not a valid time" in refusal(f"{option(name)}={number}")


def test_ports_are_0_to_65535(parsed, refusal):
    assert [parsed("--port", port)[1].port for port in (0, 65535)] == [0, 65535]
    for port in (-1, 65536):
        assert f"--port {port} is not a port: give 0" in refusal(f"--port={port}")


@pytest.mark.parametrize("name", ["tls_cert", "tls_key"])
def test_a_certificate_and_its_key_go_together(refusal, name):
    assert "--tls-cert and --tls-key must both be given" in refusal(option(name), "file.pem")


def test_each_of_certificate_and_key_is_its_own(parsed):
    flags = parsed("--tls-cert", "cert.pem", "--tls-key", "key.pem")[1]
    assert (flags.tls_cert, flags.tls_key) == ("cert.pem", "key.pem")


def test_what_is_recorded_is_not_replayed_at_the_same_time(refusal):
    assert "--record and --replay exclude each other" in refusal("--record", "a", "--replay", "b")


def test_parameters_are_held_in_two_types(parsed, refusal):
    assert [parsed("--dtype", name)[1].dtype for name in ("float32", "bfloat16")] == ["float32", "bfloat16"]
    said = refusal("--dtype", "float16")
    assert "invalid choice 'float16' for argument '--dtype'" in said and "'bfloat16'" in said


@pytest.mark.parametrize("pair", ["image", "=front", "image=", ""])
def test_names_are_pairs_with_commas(refusal, pair):
    said = refusal(f"--vla-eval-names=state=joint_state,{pair}")
    assert f"{pair!r} is not NAME=ENTRY: a key of the policy, and the benchmark's name of it" in said


def test_a_pose_is_numbers_with_commas(parsed, refusal):
    assert parsed("--reset-pose=-1")[1].reset_pose == (-1.0,)
    for text in ("1,,2", "1 2", "1,x", ""):
        assert f"{text!r} is not a list of numbers separated by commas" in refusal("--reset-pose", text)


def test_a_flag_is_written_in_full_and_others_are_unknown(refusal):
    assert "Unrecognized options: --api-key=secret" in refusal("--api-key=secret")
    assert "Unrecognized options: --max-b=2" in refusal("--max-b=2")
    said = refusal("--max-bach", "2")
    assert "Unrecognized options: --max-bach, 2" in said and "Perhaps you meant: --max-batch" in said
