"""Rewards of completions: each term, functions in their own process, sums, and what is wrong with one."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from openpi_train.rl.rewards.function_reward import FunctionReward
from openpi_train.rl.rewards.judge import RewardComputer
from openpi_train.rl.rewards.text_reward import Completed, TextReward
from openpi_train.runtime.exits import DataError
from openpi_train.runtime.preempt import StoppedError

REPO = Path(__file__).resolve().parents[2]
FUNCTIONS = """
    import os, signal, subprocess, sys, time
    from pathlib import Path

    def length(prompt, completion, reference):
        return len(completion) / 10 if completion else None

    def process(prompt, completion, reference):
        return os.getpid()

    def slow(prompt, completion, reference):
        time.sleep(600 if completion == "hang" else 0)
        return 1

    def wrong(prompt, completion, reference):
        return {"nan": float("nan"), "huge": 1e300, "raise": None}.get(completion) if completion != "raise" else 1 / 0

    def ends(prompt, completion, reference):
        os._exit(3)

    def killed(prompt, completion, reference):
        if completion == "end":
            os.kill(os.getpid(), signal.SIGKILL)
        return 1

    # Starts a program that lives on, in the way that the completion says; the reference is a file for its number.
    def starts(prompt, completion, reference):
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True)"
        code += "; time.sleep(600)"
        if "orphan" in completion:  # whoever started it has ended
            code = "import os; os.fork() and os._exit(0); os.setsid(); " + code
        alone = "session" in completion
        code = code.replace("'ready'", "os.getpid()").replace("import signal", "import os, signal")
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=alone)
        Path(reference).write_text(child.stdout.readline().decode())
        if "fork" in completion and not os.fork():  # a copy of this process, which holds its connection
            time.sleep(600)
        if "exit" in completion:
            os._exit(3)
        if "hang" in completion:
            time.sleep(600)
        return 1

    # How many of the variables that the completion names it sees.
    def sees(prompt, completion, reference):
        return sum(name in os.environ for name in completion.split())

    def limit(prompt, completion, reference):
        import resource
        return resource.getrlimit(getattr(resource, "RLIMIT_" + completion))[0]

    def large(prompt, completion, reference):
        return len(bytearray(int(completion)))

    class Harm:
        def __init__(self, file):
            self.file = file
        def __reduce__(self):
            return Path.touch, (Path(self.file),)

    # Answers by itself, in place of its return value.
    def answers(prompt, completion, reference):
        from multiprocessing.connection import Connection
        sockets = [fd for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and is_socket(fd)]
        connection = Connection(int(sockets[0]))
        if completion == "pickle":
            connection.send((Harm(reference), None))
        else:
            connection.send_bytes(completion.encode())
        time.sleep(600)

    def is_socket(fd):
        try:
            return os.readlink("/proc/self/fd/" + fd).startswith("socket")
        except FileNotFoundError:
            return False

    # Comes back once the file of its reference is there: by then nobody may wait for its answer.
    def late(prompt, completion, reference):
        while not Path(reference).exists():
            time.sleep(0.001)
        return 1 / 0 if completion == "raise" else 1

    # Goes on when its program ends.
    def goes_on(prompt, completion, reference):
        subprocess.run(["sleep", "600"])
        Path(reference).write_text("went on")

    def words(prompt, completion, reference):
        return "0.5"

    def two(prompt, completion):
        return 1
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    file = tmp_path_factory.mktemp("rewards") / "own_rewards.py"
    file.write_text(textwrap.dedent(FUNCTIONS))
    return file


def completed(text, reference="", num_new_tokens=5, most_new_tokens=20):
    return Completed(
        prompt="1+1=",
        text=text,
        reference=reference,
        tokens=(1,) * (num_new_tokens + 3),
        num_new_tokens=num_new_tokens,
        most_new_tokens=most_new_tokens,
    )


def judged(rewards, given, timeout_s=60.0, on_timeout="error"):
    terms = [TextReward(name=name, weight=weight) for name, weight in rewards]
    judge = RewardComputer(terms, None, timeout_s=timeout_s, on_timeout=on_timeout)
    try:
        return judge(given)
    finally:
        judge.close()


def test_answers_are_compared_as_in_evaluations():
    found = judged(
        [("number_match", 1.0), ("exact_match", 1.0)], [completed("it is 2.0", "#### 2"), completed("2", "2")]
    )
    assert found.outcomes.tolist() == [1, 1] and found.total.tolist() == [1, 2]


def test_a_form_is_that_of_the_whole_text():
    form = "regex:<think>.*</think>\\s*\\d+"
    texts = ["<think>a\nb</think>\n 7 ", "x <think></think>7", "<think></think>", "<think></think>7"]
    assert judged([(form, 1.0)], [completed(text) for text in texts]).total.tolist() == [1, 0, 0, 1]


def test_overlong_completions_lose_up_to_one():
    given = [completed("", num_new_tokens=number) for number in (1, 12, 14, 18, 20)]
    np.testing.assert_allclose(judged([("overlong:8", 1.0)], given).total, [0, 0, -0.25, -0.75, -1])


def test_terms_are_added_with_their_weights_and_the_first_is_the_outcome(functions):
    found = judged(
        [("exact_match", 1.0), (f"{functions}:length", -2.0)], [completed("abcde", "abcde"), completed("abc", "")]
    )
    np.testing.assert_allclose(found.total, [1 - 2 * 0.5, -2 * 0.3])
    assert found.outcomes.tolist() == [1, 0]
    assert list(found.parts) == ["reward/0_exact_match", "reward/1_length"]


def test_a_completion_without_any_reward_has_none(functions):
    found = judged([(f"{functions}:length", 1.0)], [completed(""), completed("abc")])
    assert np.isnan(found.total[0]) and np.isnan(found.outcomes[0]) and found.total[1] == pytest.approx(0.3)
    found = judged([(f"{functions}:length", 1.0), ("exact_match", 2.0)], [completed("", "")])
    assert np.isnan(found.outcomes[0]) and found.total[0] == 2


def test_a_function_runs_in_one_process_of_its_own(functions):
    found = judged([(f"{functions}:process", 1.0)], [completed("a"), completed("b")])
    assert found.total[0] == found.total[1] != os.getpid()


@pytest.mark.slow
def test_a_function_that_hangs_is_killed_and_named(functions):
    started = time.monotonic()
    with pytest.raises(
        DataError, match=r"process 0: the reward .*:slow of a completion of '1\+1=' took longer than 1 s"
    ):
        judged([(f"{functions}:slow", 1.0)], [completed("hang")], timeout_s=1.0)
    assert time.monotonic() - started < 60


@pytest.mark.slow
def test_a_completion_may_be_without_reward_where_the_function_hangs(functions):
    found = judged([(f"{functions}:slow", 1.0)], [completed("a"), completed("hang"), completed("b")], 1.0, "none")
    assert found.total[[0, 2]].tolist() == [1, 1] and np.isnan(found.total[1])


def test_a_function_that_ends_its_process_leaves_the_completion_without_reward_if_asked(functions, caplog):
    given = [completed(text) for text in ("a", "end", "b", "end")]
    found = judged([(f"{functions}:killed", 1.0)], given, on_timeout="none").total
    assert found[[0, 2]].tolist() == [1, 1] and np.isnan(found[[1, 3]]).all()
    assert caplog.text.count("has ended its process (killed by SIGKILL") == 2


def test_a_function_that_always_ends_its_process_is_an_error(functions, monkeypatch):
    monkeypatch.setattr("openpi_train.rl.rewards.function_reward._MOST_DEATHS", 2)
    with pytest.raises(DataError, match=r"exit code 3\), as 1 completions before it in a row: mend the function"):
        judged([(f"{functions}:ends", 1.0)], [completed("a")] * 3, on_timeout="none")


def test_a_process_that_is_killed_between_two_calls_is_started_again(functions):
    reward = FunctionReward(f"{functions}:process", timeout_s=60.0)
    (process,) = reward([("", "", "")])
    os.kill(int(process), signal.SIGKILL)
    assert reward._process is not None
    os.waitid(os.P_PID, reward._process.pid, os.WEXITED | os.WNOWAIT)
    (other,) = reward([("", "", "")])
    assert other != process
    reward.close()


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until_ended(pid):
    deadline = time.monotonic() + 20
    while is_running(pid):
        assert time.monotonic() < deadline, f"{pid} is still there"
        time.sleep(0.01)


ALONE = ["hang", "hang session", "returns", "returns session", "exit", "exit fork"]
ORPHANS = [*ALONE, "hang orphan", "exit session orphan"] if sys.platform == "linux" else ALONE


# What a function starts ignores SIGTERM.
@pytest.mark.parametrize("how", ORPHANS)
def test_programs_end_with_the_function_that_started_them(functions, tmp_path, how):
    timeout_s = 1.0 if "hang" in how else 60.0
    reward = FunctionReward(f"{functions}:starts", timeout_s=timeout_s, on_timeout="none")
    assert reward([("", how, str(tmp_path / "pid"))]) == [1 if "returns" in how else None]
    child = int((tmp_path / "pid").read_text())
    assert "returns" not in how or is_running(child)
    reward.close()
    until_ended(child)


@pytest.mark.parametrize("completion", ["", "raise"])
def test_an_answer_that_comes_too_late_is_no_error_on_the_terminal(functions, tmp_path, completion, capfd):
    reward = FunctionReward(f"{functions}:late", timeout_s=60.0)
    reward.start()
    assert reward._connection is not None and reward._process is not None
    question = {"texts": ["", completion, str(tmp_path / "closed")], "timeout_s": 60.0}
    reward._connection.send_bytes(json.dumps(question).encode())
    reward._connection.close()
    (tmp_path / "closed").touch()
    reward._process.wait()
    assert capfd.readouterr().err == ""


def test_a_function_that_is_ended_does_not_see_its_program_end_first(functions, tmp_path, monkeypatch):
    killed = []

    def kill_and_wait(pid, signum, kill=os.kill):
        kill(pid, signum)
        if signum == signal.SIGKILL and not killed:  # the program's: leave its parent time to go on
            killed.append(pid)
            time.sleep(0.3)

    reward = FunctionReward(f"{functions}:goes_on", timeout_s=0.5, on_timeout="none")
    reward.start()
    monkeypatch.setattr("openpi_train.rl.rewards.process_group.os.kill", kill_and_wait)
    assert reward([("", "", str(tmp_path / "file"))]) == [None]
    assert killed and not (tmp_path / "file").exists()


@pytest.mark.parametrize("how", ["returns", "hang session", *(["hang orphan"] if sys.platform == "linux" else [])])
def test_programs_end_with_the_run(functions, tmp_path, how):
    code = f"""
import time
from openpi_train.rl.rewards.function_reward import FunctionReward
if __name__ == "__main__":
    FunctionReward({f"{functions}:starts"!r}, timeout_s=600.0)([("", {how!r}, {str(tmp_path / "pid")!r})])
    time.sleep(600)
"""
    (tmp_path / "run.py").write_text(code)
    run = subprocess.Popen([sys.executable, tmp_path / "run.py"], env=os.environ | {"PYTHONPATH": str(REPO)})
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
        assert run.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    run.kill()  # as by the system
    run.wait()
    until_ended(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize(
    ("function", "text", "message"),
    [
        ("wrong", "nan", "is nan; needed is a finite number, below 1e"),
        ("wrong", "huge", r"is 1e\+300; needed is a finite number"),
        ("wrong", "raise", "ZeroDivisionError"),
        ("ends", "", r"has ended its process \(exit code 3\)\. Mend it, or .*--rl\.on-reward-timeout none"),
        ("killed", "end", r"has ended its process \(killed by SIGKILL, as the system does that has no memory left\)"),
        ("words", "", "it returned '0.5'; needed is a number"),
        ("missing", "", "has no function 'missing'"),
        ("two", "", r"two in .*: too many positional arguments; needed is \(prompt, completion, reference\)"),
        ("os", "", "has no function 'os'"),
    ],
)
def test_what_is_wrong_with_a_reward_is_named(functions, function, text, message):
    with pytest.raises(DataError, match=message) as caught:
        judged([(f"{functions}:{function}", 1.0)], [completed(text)])
    assert function in str(caught.value)


# In place of the package: an expression is a list, and some hang.
PARSER = """
    import time

    def parse(text, parsing_timeout=5):
        assert not parsing_timeout
        time.sleep(600 if "hang" in text else 0)
        return [text] if text else []

    def verify(gold, target, timeout_seconds=5):
        assert not timeout_seconds
        return gold == target
"""


@pytest.fixture
def parser(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text(textwrap.dedent(PARSER))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "math_verify", raising=False)


@pytest.mark.slow
def test_mathematics_that_hangs_is_killed_and_may_be_without_reward(parser):
    given = [completed("2", "#### 2"), completed("hang", "2"), completed("3", "2"), completed("2", "")]
    found = judged([("math_verify", 1.0)], given, 1.0, "none").total
    assert found[[0, 2]].tolist() == [1, 0] and np.isnan(found[[1, 3]]).all()
    with pytest.raises(DataError, match=r"the reward math_verify of a completion of .* took longer than 1 s"):
        judged([("math_verify", 1.0)], given[1:2], 1.0)


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    (problem,) = TextReward(name="math_verify").check(1)
    assert re.search(r"--rl\.rewards\.1\.name math_verify: .*math-verify is not installed", problem)
    assert "pip install 'openpi_train[math]'" in problem and TextReward(name="math_verify").compares


@pytest.mark.parametrize(("function", "text"), [("slow", "hang"), ("length", "quick")])
def test_a_stop_is_noticed_while_rewards_are_computed(functions, function, text, monkeypatch):
    monkeypatch.setattr("openpi_train.rl.rewards.text_reward.stop_noticed", lambda: True)
    monkeypatch.setattr("openpi_train.rl.rewards.function_reward._LOOK_S", 0.0)
    with pytest.raises(StoppedError):
        judged([(f"{functions}:{function}", 1.0)], [completed(text)])


def test_a_signal_to_the_group_of_a_run_leaves_the_function_to_the_run(functions):
    reward = FunctionReward(f"{functions}:process", timeout_s=60.0)
    (process,) = reward([("", "", "")])
    os.kill(int(process), signal.SIGTERM)
    assert reward([("", "", "")]) == [process]
    reward.close()


def test_a_process_ends_with_its_reward(functions):
    reward = FunctionReward(f"{functions}:process", timeout_s=60.0)
    (process,) = reward([("", "", "")])
    reward.close()
    until_ended(int(process))


def test_a_function_sees_no_key_of_the_run_unless_it_is_named(functions, monkeypatch):
    secret = ["OPENAI_API_KEY", "HF_TOKEN", "SLURM_JWT", "AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "SSH_AUTH_SOCK"]
    for name in secret:
        monkeypatch.setenv(name, "hidden")
    reward = FunctionReward(f"{functions}:sees", timeout_s=60.0, environment=("HF_TOKEN", "NOT_THERE"))
    assert reward([("", name, "") for name in (" ".join(secret), "HF_TOKEN", "PATH HOME")]) == [1, 1, 2]
    reward.close()


def test_a_function_and_what_it_starts_have_limits(functions):
    reward = FunctionReward(f"{functions}:limit", timeout_s=60.0, memory_gib=3.0)
    found = dict(zip(LIMITS, reward([("", name, "") for name in LIMITS]), strict=True))
    reward.close()
    assert found["DATA"] == 3 << 30 and found["CORE"] == 0
    assert 0 < found["NOFILE"] <= 4096
    assert 0 < found["FSIZE"] <= 64 << 30
    assert 4096 < found["NPROC"] < 100_000
    assert 60 < found["CPU"] < 60 * 1024 + 1000


LIMITS = ["DATA", "CORE", "NOFILE", "FSIZE", "NPROC", "CPU"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's memory")
def test_a_function_that_needs_too_much_memory_is_told_as_such(functions):
    large, small = ("", str(1 << 30), ""), ("", "1000", "")
    reward = FunctionReward(f"{functions}:large", timeout_s=60.0, memory_gib=0.5, on_timeout="none")
    assert reward([small, large, small]) == [1000, None, 1000]
    reward.close()
    reward = FunctionReward(f"{functions}:large", timeout_s=60.0, memory_gib=0.5)
    with pytest.raises(DataError, match=r"needed more than 0\.5 GiB of memory \(--rl\.reward-memory-gib\)"):
        reward([large])
    reward.close()


@pytest.mark.skipif(sys.platform != "linux", reason="the function looks into /proc")
@pytest.mark.parametrize("answer", ["pickle", "[" * 100_000, '{"value": "1"}', "x" * (2 << 20)])
def test_nothing_that_a_function_answers_is_run(functions, tmp_path, answer):
    reward = FunctionReward(f"{functions}:answers", timeout_s=60.0)
    with pytest.raises(DataError, match="its answers are no answers"):
        reward([("", answer, str(tmp_path / "harm"))])
    assert not (tmp_path / "harm").exists() and reward._process is None


def written(folder, text):
    (folder / "made.py").write_text(text)
    return folder / "made.py"


@pytest.mark.parametrize(
    "text",
    [
        "from math import cos as f",
        "f = abs",
        "if True:\n    async def f(): ...",
        "from math import *",
        "globals()['f'] = 1",
    ],
)
def test_a_function_that_the_file_may_have_is_not_refused_unseen(tmp_path, text):
    assert TextReward(name=f"{written(tmp_path, text)}:f").check(0) == []


def test_what_is_no_reward_is_refused_before_the_run_begins(functions, tmp_path):
    def problems(name, weight=1.0):
        return " ".join(TextReward(name=name, weight=weight).check(2))

    assert not any(map(problems, ("exact_match", "regex:a+", "overlong:5", f"{functions}:length")))
    assert "--rl.rewards.2.name 'exact' is no reward: allowed are exact_match" in problems("exact")
    assert "is no regular expression" in problems("regex:(")
    assert "overlong:TOKENS" in problems("overlong:few")
    assert "there is no file" in problems(f"{tmp_path}/none.py:f")
    assert f"{functions} has no function 'lenght'; did you mean length?" in problems(f"{functions}:lenght")
    assert "is no Python file: '(' was never closed" in problems(f"{written(tmp_path, 'f = (')}:f")
    assert f"there is no {tmp_path}/none" in problems(f"model:{tmp_path}/none") and not problems(f"model:{tmp_path}")
    assert "weight nan must be a finite number" in problems("exact_match", float("nan"))
