"""`--profile` on a run that ends before the traced steps do, and goes on later."""

import json

import command
import pytest

FLAGS = ("debug", "--num-workers", "auto", "--no-tensorboard", "--data.datasets.0.prompt", "tidy up")
FLAGS += ("--data.validation-fraction", "0")
# Per row: a picture of 2 x 2 patches, the prompt's letters with a begin and an end, the state, 8 actions.
TOKENS = 4 + len("tidy up") + 2 + 1 + 8


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_profile_is_written_where_the_run_ends_first_and_hinders_no_resume(tmp_path):
    done = command.train(tmp_path, *FLAGS, "--num-train-steps", "5", "--profile", "9")
    run = tmp_path / "runs" / "debug" / "x"
    assert f"wrote a profile to {run}/profile" in command.words(done)
    assert len(list((run / "profile").rglob("*.xplane.pb"))) == 1
    program = json.loads((run / "program.json").read_text())
    assert program["executed_flops"] > program["model_flops"] > 0
    assert program["sent_bytes"] == {}, "one device sends nothing"

    done = command.train(tmp_path, *FLAGS, "--num-train-steps", "7", "--profile", "9", "--resume")
    assert "the run ended before step 9" in command.words(done)
    assert len(list((run / "profile").rglob("*.xplane.pb"))) == 1
    assert list(command.losses(tmp_path)) == [1, 2, 3, 4, 5, 6, 7]
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    line = [line for line in lines if line.get("step") == 7 and "tokens_per_s" in line][-1]
    assert line["tokens_per_s"] / line["samples_per_s"] == pytest.approx(TOKENS)
    assert sum(value for name, value in line.items() if name.endswith("_share")) == pytest.approx(1.0)
