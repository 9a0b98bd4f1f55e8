"""A language model that is evaluated while it trains and afterwards: the same values on any number of processes."""

import json

import chats
import markupsafe
import pytest
from command import ROOT, check, copy_without, losses, openpi_train, train
from text_models import write_model

from openpi_train.runtime.exits import DataError, UsageError
from openpi_train.tools import evaluate_policy, evaluate_text, report
from openpi_train.tools.requests import EvaluateRequest, EvaluateTextRequest, ReportRequest

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
ANSWERS, PAIRS = (f"{ROOT}/tests/runs/answer_runs.py:{name}" for name in ("answers", "pairs"))
PROMPT = "Is {} < {} & <b>&amp;</b>?"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The run on texts, of one process with two devices."""
    base = tmp_path_factory.mktemp("texts")
    chats.write(base / "tokenizer", template=chats.CHATML)
    with (base / "texts.jsonl").open("w") as file:
        for n in range(60):
            record = {"prompt": PROMPT.format(n, n % 7), "completion": f" It is.\n#### {n + n % 7}"}
            file.write(json.dumps(record) + "\n")
    train(base, ANSWERS, *places(base), devices=2, OPENPI_TRAIN_HOME=str(base / "home"))
    return base


def places(base, name="texts"):
    return "--data.datasets.0.path", base / f"{name}.jsonl", "--data.tokenizer", base / "tokenizer"


def evaluations(base):
    lines = (base / "runs" / "answers" / "x" / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line for line in map(json.loads, lines) if "val/loss" in line}


def samples(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]


METRICS = (
    *("loss", "log_prob", "token_accuracy", "perplexity", "number_match", "exact_match", "pass@2", "pass@4", "maj@4"),
    *("mean_length", "fraction_ended"),
)


def test_a_score_of_trls_form_is_given_the_columns_of_the_held_out_records(base, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENPI_TRAIN_HOME", str(tmp_path / "home"))
    folder, texts, scores = write_model(tmp_path / "model"), tmp_path / "other.jsonl", tmp_path / "columns_of_test.py"
    texts.write_text("".join(json.dumps({"question": f"{n}?", "answer": "x", "number": n}) + "\n" for n in range(5)))
    scores.write_text(
        "def number(prompts, completions, number, **kwargs):\n"
        "    assert prompts == [f'{n}?' for n in number] and len(completions) == 2\n"
        "    return [None if n == 0 else n for n in number]\n"
        "def lacking(completions, truth):\n    return [0.0] * len(completions)\n"
    )
    how = {"data": str(texts), "columns": ("prompt=question", "completion=answer"), "samples": 2}
    how |= {"temperature": 1.0, "max_new_tokens": 3}
    values = evaluated(folder, tmp_path / "out", scores=(f"{scores}:number",), **how)
    assert values["number"] == 2.5  # the mean of 1 to 4
    assert sorted(
        one["scores"]["number"] or 0 for line in samples(tmp_path / "out") for one in line["completions"]
    ) == [*(0, 0, 1, 1, 2, 2, 3, 3, 4, 4)]
    with pytest.raises(UsageError, match=r"the score lacking: it takes truth, and the dataset has no such column"):
        evaluated(folder, tmp_path / "none", scores=(f"{scores}:lacking",), **how)


def test_every_evaluation_measures_weights_and_average_and_writes_some_samples(base):
    found = evaluations(base)
    assert list(found) == [0, 2, 4]
    for line in found.values():
        names = {name for name in line if name.startswith("val/")}
        assert names == {f"val/{name}{suffix}" for name in METRICS for suffix in ("", "_ema")}
    assert found[4]["val/perplexity"] < found[0]["val/perplexity"]
    assert found[0]["val/fraction_ended"] < found[4]["val/fraction_ended"] and found[0]["val/mean_length"] <= 12
    for step in found:
        lines = samples(base / "runs" / "answers" / "x" / "eval" / str(step))
        assert len(lines) == 3 and all(len(line["completions"]) == 4 for line in lines)
        assert [line["prompt"] for line in lines] == [line["prompt"] for line in samples_of(base, 0)]
    for line in samples_of(base, 4):
        number = int(line["prompt"].split()[1])
        assert line["prompt"] == "<s>" + PROMPT.format(number, number % 7)
        assert line["reference"] == f" It is.\n#### {number + number % 7}"


def samples_of(base, step):
    return samples(base / "runs" / "answers" / "x" / "eval" / str(step))


def test_a_run_that_goes_on_in_two_processes_is_the_same_bit_for_bit_and_repeats_no_sample(base, tmp_path):
    copy_without(base, tmp_path, 4, "answers")
    home = {"OPENPI_TRAIN_HOME": str(base / "home")}
    train(tmp_path, ANSWERS, *places(base), "--resume", processes=2, **home)
    found, expected = evaluations(tmp_path), evaluations(base)
    assert list(found) == [0, 2, 4]
    for name in (name for name in found[4] if name.startswith("val/")):
        assert found[4][name] == expected[4][name], name
    assert list(losses(base, "answers")) == [1, 2, 3, 4]
    assert losses(tmp_path, "answers") == losses(base, "answers")
    assert samples_of(tmp_path, 4) == samples_of(base, 4)


def test_the_verb_measures_the_same_on_one_process_and_on_two(base, tmp_path):
    run, home = base / "runs" / "answers" / "x", {"OPENPI_TRAIN_HOME": str(base / "home")}
    done = openpi_train("eval", run, "--out", tmp_path / "one", **home)
    check(done, 0, "perplexity", "number_match", "fraction_ended", "written to")
    launch = ("launch", "local", "--processes", "2", "--log-dir", tmp_path, "--")
    check(openpi_train(*launch, "eval", run, "--no-average", "--out", tmp_path / "two", **home), 0, "pass@4")
    expected = evaluations(base)[4]
    for folder, suffix in (("one", "_ema"), ("two", "")):
        values = json.loads((tmp_path / folder / "texts.json").read_text())["values"]
        assert values.keys() == set(METRICS)
        for name, value in values.items():
            assert value == pytest.approx(expected[f"val/{name}{suffix}"], rel=1e-5), name
    assert len(samples(tmp_path / "one")) == 6
    assert samples(tmp_path / "one")[:3] == samples_of(base, 4)


def evaluated(checkpoint, out, *, data=None, policy=None, **texts):
    """The results of `eval` in this process."""
    request = EvaluateRequest(checkpoint=str(checkpoint), out=out, data=data, **(policy or {}))
    evaluate_policy.run(request, EvaluateTextRequest(**texts))
    return json.loads((out / "texts.json").read_text())["values"]


def test_a_folder_of_hugging_face_is_evaluated_on_any_texts(base, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPENPI_TRAIN_HOME", str(tmp_path / "home"))
    folder, texts = write_model(tmp_path / "model"), tmp_path / "other.jsonl"
    texts.write_text("".join(json.dumps({"question": f"{n}?", "answer": f" {n}"}) + "\n" for n in range(5)))
    how = {"data": str(texts), "columns": ("prompt=question", "completion=answer"), "max_new_tokens": 3}
    values = evaluated(folder, tmp_path / "out", scores=("number_match",), **how)
    assert values.keys() == {
        *("loss", "log_prob", "token_accuracy", "perplexity", "number_match", "mean_length", "fraction_ended")
    }
    found = samples(tmp_path / "out")
    assert [line["reference"].strip() for line in found] == [line["prompt"][3:-1] for line in found]
    assert len(found) == 5 and values["mean_length"] <= 3
    assert "number_match" in capsys.readouterr().out
    # Texts without prompts have no completions.
    texts.write_text(json.dumps({"text": "It is four."}) + "\n")
    assert "perplexity" in evaluated(folder, tmp_path / "plain", data=str(texts))
    assert "completions: the texts have no prompts" in capsys.readouterr().out
    for told, given in {
        "has no data: give texts with --data": {},
        "--columns: there is no --data that it is about": {"columns": ("prompt=question",)},
        "--only: for robots' policies": {"data": str(texts), "policy": {"only": "moving"}},
        "--env: for robots' policies": {"data": str(texts), "policy": {"env": "tabletop"}},
        "the held-out texts have no prompts": {"data": str(texts), "num_prompts": 2},
        "--samples 2 with --temperature 0": {**how, "samples": 2},
    }.items():
        with pytest.raises(UsageError, match=told):
            evaluated(folder, tmp_path / "none", **given)
    with pytest.raises(DataError, match="absent"):
        evaluated(folder, tmp_path / "none", data=str(tmp_path / "absent.jsonl"))
    texts.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    with pytest.raises(
        DataError, match=r"this run takes [^;:]*: name its columns of that type \(--columns text=COLUMN or [^)]*\)$"
    ):
        evaluated(folder, tmp_path / "none", data=str(texts))
    with pytest.raises(UsageError, match="lies in no run's directory"):
        evaluate_policy.run(EvaluateRequest(checkpoint=str(folder)))


@pytest.mark.parametrize(
    ("told", "here"),
    [
        ("train lm_sft on it, or name its columns (--data.datasets.N.columns a=B)", "name its columns (--columns a=B)"),
        ("--data.datasets.0.split x; give --data.datasets.0.path", "--split x; give --data"),
        ("--data.targets all; --data.max-length 8", "--targets all; --data.max-length 8"),
        ("give --data.datasets", "give --data"),
    ],
)
def test_messages_name_the_flags_of_eval(told, here):
    assert evaluate_text.in_flags_of_eval(told) == here


def test_preferences_have_a_pair_accuracy(base, tmp_path):
    with (base / "pairs.jsonl").open("w") as file:
        for n in range(40):
            file.write(json.dumps({"prompt": f"{n}?", "chosen": f" {n}", "rejected": f" {n + 1}"}) + "\n")
    home = {"OPENPI_TRAIN_HOME": str(tmp_path / "home")}
    train(tmp_path, PAIRS, *places(base, "pairs"), "--num-train-steps", "1", **home)
    run = tmp_path / "runs" / "pairs" / "x"
    *_, last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines() if "val/loss" in line]
    assert 0 <= last["val/pair_accuracy"] <= 1 and last["val/mean_length"] <= 4
    check(openpi_train("eval", run, "--experiment", PAIRS, **home), 0, "pair_accuracy", "exact_match")
    values = json.loads((run / "eval" / "1" / "texts.json").read_text())["values"]
    for name, value in values.items():
        assert value == pytest.approx(last[f"val/{name}"], rel=1e-5, abs=1e-7), name


def test_the_report_shows_samples_of_the_first_and_the_last_evaluation(base, tmp_path):
    run = base / "runs" / "answers" / "x"
    assert report.main(ReportRequest(runs=(run,), out=tmp_path / "report.html", batches=False)) == 0
    page = (tmp_path / "report.html").read_text()
    assert "Samples, step 0" in page and "Samples, step 4" in page and "Samples, step 2" not in page
    for title in ("perplexity", "number_match", "pass@4", "fraction_ended"):
        assert f"<figcaption>{title}" in page
    line = samples_of(base, 4)[0]
    for text in (line["prompt"], line["reference"], *(one["text"] for one in line["completions"])):
        assert f"<pre>{markupsafe.escape(text)}</pre>" in page
    assert "<b>&amp;</b>" not in page and "&lt;b&gt;&amp;amp;&lt;/b&gt;" in page
