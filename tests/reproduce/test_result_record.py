"""Records: what counts in their digests, how two are compared, and what is said beside a published figure."""

import hashlib
import json

import pytest

from openpi_train.reproduce import result_record
from openpi_train.reproduce.result_record import compare, comparison, in_words, losses_digest, read_record, success_of
from openpi_train.runtime.exits import DataError, UsageError

LINES = [
    {"step": 0, "val/loss": 2.0, "val/action_mse": 3.0},
    {"step": 1, "loss": 0.5, "grad_norm": 7.0, "time/step_s": 0.1},
    {"step": 2, "loss": 0.25, "skipped_steps": 0.0},
]


def written(path, lines):
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def record(**changed):
    made = {
        "name": "small",
        "commands": ["act"],
        "data": {"d": "1"},
        "losses": {"sha256": "a"},
        "parameters": {"sha256": "b"},
        "success": {"env": {"successes": 9, "trials": 10, "sha256": "c"}},
        "published": None,
        "environment": {"versions": {"jax": "1"}, "git": None, "process_count": 1, "devices": {"count": 2}},
    }
    return {**made, **changed}


def test_the_digest_of_losses_has_their_steps_names_and_bits_and_nothing_else(tmp_path):
    """Hexadecimal of a half is 0x1p-1: written out by hand."""
    found = losses_digest(written(tmp_path / "metrics.jsonl", LINES))
    text = "0 val/loss 0x1.0000000000000p+1\n1 loss 0x1.0000000000000p-1\n2 loss 0x1.0000000000000p-2\n"
    assert found == {"sha256": hashlib.sha256(text.encode()).hexdigest(), "count": 3, "first": 0.5, "last": 0.25}
    slower = [*LINES[:2], {**LINES[2], "time/step_s": 9.0}]
    assert losses_digest(written(tmp_path / "slower.jsonl", slower)) == found
    last_bit = [*LINES[:2], {**LINES[2], "loss": 0.25 + 2**-54}]
    assert losses_digest(written(tmp_path / "other.jsonl", last_bit))["sha256"] != found["sha256"]
    with pytest.raises(DataError, match="no losses"):
        losses_digest(written(tmp_path / "none.jsonl", [{"step": 1, "grad_norm": 1.0}]))


def test_success_has_a_digest_of_every_outcome(tmp_path):
    def evaluated(second):
        outcomes = [{"number": 0, "success": True, "steps": 4}, {"number": 1, "success": second, "steps": 9}]
        share = {"successes": 1 + second, "trials": 2, "rate": 0.5, "low": 0.1, "high": 0.9, "mean_steps": 4}
        (tmp_path / "closed_loop.json").write_text(json.dumps({"overall": share, "episodes": outcomes, "settings": {}}))
        return success_of(tmp_path)

    one, other = evaluated(False), evaluated(True)
    assert (one["successes"], one["trials"], one["low"]) == (1, 2, 0.1)
    assert one["sha256"] != other["sha256"] and evaluated(False) == one


def test_results_have_to_agree_and_facts_of_the_machine_need_not():
    there = {**record()["environment"], "process_count": 2}
    here = record(losses={"sha256": "z"}, environment=there)
    verdicts = {one.name: one.verdict for one in compare(record(), here)}
    assert verdicts["losses.sha256"] == "DIFFERS" and verdicts["process_count"] == "differs, and may"
    assert {verdicts[name] for name in ("parameters.sha256", "success.env.successes", "commands")} == {"equal"}
    assert sum(verdict != "equal" for verdict in verdicts.values()) == 2
    assert all(one.verdict == "equal" for one in compare(record(), record()))
    # A result that only one of them has.
    assert "DIFFERS" in {one.verdict for one in compare(record(), record(success={}))}
    table = comparison(compare(record(), here)).splitlines()
    assert table[0].split() == ["what", "in", "the", "record", "here"]
    assert any(line.split() == ["losses.sha256", '"a"', '"z"', "DIFFERS"] for line in table)


@pytest.mark.parametrize(
    ("successes", "said"),
    [(20, "ours is below it"), (55, "lies within our interval"), (95, "ours is above it")],
)
def test_the_published_figure_is_judged_by_the_interval(successes, said):
    published = {"success": 0.5, "source": "a paper"}
    one = {"successes": successes, "trials": 100, "sha256": ""}
    told = in_words(record(success={"env": one}, published=published))
    assert said in told and "50.00%" in told and "a paper" in told and f"{successes} of 100" in told


def test_several_evaluations_are_told_one_by_one_and_together():
    one = {"successes": 1, "trials": 2, "sha256": ""}
    assert "all: 2 of 4 episodes, 50.0%" in in_words(record(success={"first": one, "second": one}))
    assert "all:" not in in_words(record())


@pytest.mark.parametrize("text", ["no json", "[]", '{"name": "small"}'])
def test_what_is_no_record_is_refused_in_a_line(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UsageError, match="is no record of `reproduce`"):
        read_record(tmp_path / "x.json")
    with pytest.raises(UsageError, match="is no record"):
        read_record(tmp_path / "none.json")
    assert result_record.overall({}) == (0, 0)
