"""Numbers in answers, and scores of completions: tables, GSM8K's own answers, and functions of the user's."""

import json
from fractions import Fraction

import pytest

from openpi_train.data.text.answer_numbers import number_of
from openpi_train.data.text.answer_scores import exact_match, number_match, score_named
from openpi_train.data.text.prompt_records import PromptRecord, trl_arguments
from openpi_train.runtime.exits import UsageError

NUMBERS = {
    # Plain ones, with signs of thousands, of currencies, of percent.
    "18": "18",
    "The answer is 18.": "18",
    "18.00": "18",
    "1,234,567": "1234567",
    "1,234.50": "2469/2",
    "$7": "7",
    "-$7": "-7",
    "$-7": "-7",
    "£1,000 a year": "1000",
    "50%": "50",
    ".5": "1/2",
    "3.14.": "157/50",
    "5kg": "5",
    "答案是18元": "18",
    # Signs, and what only looks like one.
    "-5": "-5",
    "+5": "5",
    "\u22125": "-5",
    "x=-4": "-4",
    "(-4)": "-4",
    "16-3": "3",
    "16 - 3": "3",
    "2016-05-06": "6",
    # Fractions.
    "3/4": "3/4",
    "-3/4": "-3/4",
    "3 / 4": "3/4",
    "1 1/2": "3/2",
    "-1 1/2": "-3/2",
    "16 24/4": "6",
    "1.5/3": "1/2",
    # No number of its own.
    "12,34": "34",
    "H2O is 3": "3",
    # The last one, and the marked one.
    "3 + 4 = 7, not 8": "8",
    "so 7\n#### 18": "18",
    "#### 18\nThen there are 7.": "18",
    "####18": "18",
    "#### $1,800 in total": "1800",
    "####\n18 apples": "18",
    "#### 5\nNo:\n#### 6": "6",
    "#### Step 2\nIt is \\boxed{7} of 9": "7",
    "### 3 #### none": "3",
    "\\boxed{7}, as 9 is no answer": "7",
    "\\boxed{x = 7} 9": "7",
    "\\boxed{x} 9": "9",
    "\\boxed{7": "7",
    # LaTeX.
    "\\boxed{\\frac{3}{4}}": "3/4",
    "\\boxed{-\\dfrac{ 1 }{2}}": "-1/2",
    "\\boxed{2\\tfrac{1}{2}}": "5/2",
    "\\frac12": "1/2",
    "\\boxed{1{,}000}": "1000",
    "\\boxed{1,\\!000}": "1000",
    "\\boxed{50\\%}": "50",
    "\\boxed{\\$12.5}": "25/2",
    "\\boxed{\\text{about } 12^\\circ}": "12",
}


@pytest.mark.parametrize(("text", "value"), NUMBERS.items())
def test_the_number_of_an_answer_is_read_exactly(text, value):
    assert number_of(text) == Fraction(value)
    assert number_match("", text, f"It is so.\n#### {value}") == 1
    assert number_match("", text, f"It is so.\n#### {Fraction(value) + 1}") == 0


@pytest.mark.parametrize("text", ["", "none", "H2O", "x2", "3/0", "####", "\\boxed{}", "9" * 5000, "1/" + "9" * 5000])
def test_what_has_no_number_is_never_right(text):
    assert number_of(text) is None
    assert number_match("", text, "18") == number_match("", "18", text) == number_match("", text, text) == 0


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_every_reference_of_gsm8k_is_right_for_itself_and_wrong_for_another(gsm8k):
    answers = [one["answer"] for name in ("train", "test") for one in lines(gsm8k / f"{name}.jsonl")]
    assert len(answers) == 7473 + 1319
    # As GSM8K's own code reads them.
    values = [int(answer.split("#### ")[1].replace(",", "")) for answer in answers]
    assert [number_of(answer) for answer in answers] == values
    for answer, value, other, wrong in zip(answers, values, answers[1:], values[1:], strict=False):
        assert number_match("", answer, answer) == exact_match("", answer, answer) == 1
        assert number_match("", other, answer) == (value == wrong)
        assert exact_match("", other, answer) == 0


@pytest.mark.slow
def test_solutions_of_models_are_judged_as_gsm8k_judged_them(gsm8k):
    judged = 0
    for record in lines(gsm8k / "example_model_solutions.jsonl"):
        for one in (value for value in record.values() if isinstance(value, dict)):
            assert number_match("", one["solution"], record["ground_truth"]) == one["is_correct"], one["solution"]
            judged += 1
    assert judged == 4 * 1319


def test_white_space_does_not_count_and_all_else_does():
    assert exact_match("", " It  is\n four.\n", "It is four.") == 1
    assert exact_match("", "it is four.", "It is four.") == 0
    assert exact_match("", "", "  ") == 1


def test_a_function_of_the_users_is_called_with_prompt_completion_and_reference(tmp_path):
    file = tmp_path / "scores_of_test.py"
    file.write_text(
        "def longer(prompt, completion, reference):\n    return len(prompt + completion) / len(reference)\n"
        "def broken(prompt, completion, reference):\n    raise KeyError('no answer')\n"
        "def absent(prompt, completion, reference):\n    return None\n"
        "def words(prompt, completion, reference):\n    return 'none'\n"
        "def two(prompt, completion):\n    return 1\n"
        "def infinite(prompt, completion, reference):\n    return float('inf')\n"
    )
    score = score_named(f"{file}:longer")
    assert score.name == "longer" and score.answer is None and score("ab", "cd", "ef") == 2
    for name, told in {"broken": "KeyError: 'no answer'", "words": "ValueError", "infinite": "returned inf"}.items():
        with pytest.raises(UsageError, match=rf"the score {name} of a completion of 'ab': .*{told}"):
            score_named(f"{file}:{name}")("ab", "cd", "ef")
    assert score_named(f"{file}:absent")("ab", "cd", "ef") is None
    with pytest.raises(ValueError, match=r"two: too many positional.*needed is \(prompt, completion, reference\)"):
        score_named(f"{file}:two")
    with pytest.raises(ValueError, match="has no function 'shorter'"):
        score_named(f"{file}:shorter")
    with pytest.raises(FileNotFoundError, match=r"the file of the score .* does not exist"):
        score_named(f"{tmp_path}/none.py:longer")


@pytest.mark.parametrize(("name", "meant"), [("number_mach", "; did you mean number_match?"), ("bleu", "file.py:f")])
def test_an_unknown_score_is_answered_with_the_known_ones(name, meant):
    with pytest.raises(ValueError, match=f"'{name}' is no score: allowed are exact_match, number_match") as error:
        score_named(name)
    assert meant in str(error.value)


def test_a_function_of_trls_form_is_called_once_for_the_completions_of_a_prompt(tmp_path):
    file = tmp_path / "trl_scores_of_test.py"
    file.write_text(
        "def short(completions, **kwargs):\n    return [-len(one) for one in completions]\n"
        "async def ground(prompts, completions, truth):\n"
        "    return [None if one is None else float(text == one) for text, one in zip(completions, truth)]\n"
        "def few(completions, **kwargs):\n    return [1.0]\n"
    )
    record = PromptRecord("ab", {"truth": "c", "other": 1})
    how = {"prompt": "<s>ab", "reference": "", "completions": ["c", "dd"]}
    how["arguments"] = trl_arguments(record, how["completions"], [[1], [2, 3]])
    assert score_named(f"{file}:short").of_prompt(**how) == [-1.0, -2.0]
    assert score_named(f"{file}:ground").of_prompt(**how) == [1.0, 0.0]
    absent = trl_arguments(PromptRecord("ab", {"truth": None}), how["completions"], [[1], [2, 3]])
    assert score_named(f"{file}:ground").of_prompt(**how | {"arguments": absent}) == [None, None]
    with pytest.raises(UsageError, match="few of a completion of '<s>ab': it returned 1 scores, and there are 2"):
        score_named(f"{file}:few").of_prompt(**how)


def test_a_pattern_is_a_score_of_the_whole_completion():
    score = score_named("regex:[0-9]+")
    assert (score.name, score("", " 12\n", ""), score("", "12 a", "")) == ("regex:[0-9]+", 1.0, 0.0)
    with pytest.raises(ValueError, match=r"'\(' is no regular expression"):
        score_named("regex:(")
