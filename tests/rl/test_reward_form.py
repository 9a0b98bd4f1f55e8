"""Reward functions of TRL's form: how they are called, and what is refused before they are."""

import ast
import dataclasses
import inspect
import json
import textwrap

import numpy as np
import pytest

from openpi_train import registry
from openpi_train.data.text.prompt_records import PromptRecord
from openpi_train.data.text.reward_form import form_of, signature_in
from openpi_train.data.text.text_data import TextDataset
from openpi_train.rl.rewards.function_reward import FunctionReward, file_problem
from openpi_train.rl.rewards.judge import RewardComputer
from openpi_train.rl.rewards.text_reward import Completed, TextReward
from openpi_train.runtime.exits import DataError

# The first five as in TRL's documentation of custom reward functions.
FUNCTIONS = """
    import time

    def length(completions, **kwargs):
        return [float(len(completion)) for completion in completions]

    def ids(completion_ids, **kwargs):
        return [float(len(one)) for one in completion_ids]

    def form(completions, **kwargs):
        return [float(completion[0]["content"].startswith("<think>")) for completion in completions]

    def right(prompts, completions, ground_truth, **kwargs):
        return [float(one == truth) for one, truth in zip(completions, ground_truth, strict=True)]

    def maths(prompts, completions, task, **kwargs):
        return [1.0 if kind == "math" else None for kind in task]

    async def later(completions, **kwargs):
        return [float(len(completions))] * len(completions)

    def best(prompts, completions):
        assert len(set(map(str, prompts))) == 1
        longest = max(map(len, completions))
        return [float(len(one) == longest) for one in completions]

    def columns(completions, **kwargs):
        return [float(len(kwargs))] * len(completions)

    def few(completions, **kwargs):
        return [1.0]

    def one_number(completions, **kwargs):
        return 1.0

    def slow(completions, **kwargs):
        time.sleep(600 if "hang" in completions else 0)
        return [1.0] * len(completions)

    def of_trainer(completions, trainer_state, **kwargs):
        return [1.0] * len(completions)

    def two(prompt, completion):
        return 1

    def alone(completions, /, **kwargs):
        return [1.0] * len(completions)

    def own(prompt, completion, reference):
        return 1
"""
OWN, TRL = "own", "trl"
FORMS = {
    **dict.fromkeys(("length", "ids", "form", "right", "maths", "later", "best", "columns", "few", "of_trainer"), TRL),
    "own": OWN,
    "two": "too many positional arguments",
    "alone": "completions cannot be given by name",
}


@pytest.fixture(scope="module")
def functions(tmp_path_factory):
    file = tmp_path_factory.mktemp("rewards") / "trl_rewards.py"
    file.write_text(textwrap.dedent(FUNCTIONS))
    return file


def told(signature):
    try:
        return OWN if form_of(signature) is None else TRL
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("name", FORMS)
def test_the_form_is_seen_before_the_file_is_run_and_is_the_same_then(name, functions):
    module = ast.parse(textwrap.dedent(FUNCTIONS))
    (node,) = [one for one in module.body if getattr(one, "name", None) == name]
    there: dict = {}
    exec(textwrap.dedent(FUNCTIONS), there)
    ahead, later = told(signature_in(node)), told(inspect.signature(there[name]))
    assert ahead == later and ahead.startswith(FORMS[name])
    assert bool(file_problem(f"{functions}:{name}")) == (FORMS[name] not in (OWN, TRL))


def completed(texts, prompt, group, **columns):
    return [
        Completed(
            prompt=str(prompt),
            text=text,
            reference="",
            tokens=(1, 2, 3, *range(len(text))),
            num_new_tokens=len(text),
            most_new_tokens=20,
            group=group,
            record=PromptRecord(prompt, columns),
        )
        for text in texts
    ]


def judged(functions, name, given, **options):
    how = {"timeout_s": 60.0, "on_timeout": "error", **options}
    judge = RewardComputer([TextReward(name=f"{functions}:{name}")], None, **how)
    try:
        return judge(given).total.tolist()
    finally:
        judge.close()


def test_completions_prompts_tokens_and_columns_are_given_by_name(functions):
    given = completed(["4", "five"], "2+2=", 7, ground_truth="4", task="math")
    given += completed(["<think>", "x"], "Hi", 8, ground_truth="x", task="talk")
    assert judged(functions, "length", given) == judged(functions, "ids", given) == [1, 4, 7, 1]
    assert judged(functions, "right", given) == [1, 0, 0, 1]
    np.testing.assert_array_equal(judged(functions, "maths", given), [1, 1, np.nan, np.nan])
    # prompts and completion_ids, ground_truth and task: all that is there.
    assert judged(functions, "columns", given) == [4, 4, 4, 4]


def test_a_call_has_all_completions_of_one_prompt(functions):
    given = [*completed(["a", "abc"], "one", 3), *completed(["ab", "a", "ab"], "two", 4)]
    assert judged(functions, "best", given) == [0, 1, 1, 0, 1]
    assert judged(functions, "later", given) == [2, 2, 3, 3, 3]


def test_completions_of_conversations_are_messages(functions):
    given = completed(["<think>", "x"], [{"role": "user", "content": "Hi"}], 0)
    assert judged(functions, "form", given) == [1, 0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("few", "returned 1 rewards, and there are 2 completions"),
        ("one_number", "it returned 1.0; needed is a list with a reward for each completion"),
        ("slow", "the 2 completions of 'p' took longer than 1 s and was killed"),
    ],
)
def test_what_is_wrong_with_an_answer_is_told(functions, name, message):
    with pytest.raises(DataError, match=message):
        judged(functions, name, completed(["hang", "x"], "p", 0), timeout_s=0.5)


def test_a_group_that_takes_too_long_has_no_reward(functions):
    given = [*completed(["hang", "x"], "p", 0), *completed(["a", "b"], "q", 1)]
    found = judged(functions, "slow", given, timeout_s=0.5, on_timeout="none")
    np.testing.assert_array_equal(found, [np.nan, np.nan, 1, 1])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("right", "it takes ground_truth, and the dataset has no such column: it has prompt, solution"),
        ("of_trainer", "it takes trainer_state of TRL's trainer, which is not here: give a default"),
        ("length", None),
    ],
)
def test_columns_that_the_data_lack_are_told_before_a_start(functions, tmp_path, name, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "a", "solution": "b"}) + "\n")
    own = registry.load("lm_grpo")
    rl = dataclasses.replace(own.rl, rewards=(TextReward(name=f"{functions}:{name}"),))
    data = dataclasses.replace(own.data, datasets=(TextDataset(path=str(file)),))
    problems = rl.check(objective=own.objective, model=own.model, data=data, batch_size=own.batch_size)
    assert [one.partition(": ")[2][: len(message or "")] for one in problems] == ([message] if message else [])


def test_a_function_that_is_made_at_import_is_asked_when_it_is_started(tmp_path):
    file = tmp_path / "made_rewards.py"
    file.write_text(
        "def make(n):\n    def f(completions, **kwargs):\n        return [n]\n    return f\nmade = make(3)\n"
    )
    assert not file_problem(f"{file}:made")
    function = FunctionReward(f"{file}:made", timeout_s=60.0)
    function.start()
    assert function.form is not None
    arguments = {"prompts": ["p"], "completions": ["c"], "completion_ids": [[1]]}
    assert function.of_group("p", arguments) == [3.0]
    function.close()
