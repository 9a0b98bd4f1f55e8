"""A run goes to openpi's form and is continued from it: the loss is that of the run that simply went on."""

import json

import pytest
from command import losses, openpi_train, train

FEW = ("--no-tensorboard", "--data.validation-fraction", "0")


@pytest.mark.slow
def test_training_goes_on_from_openpis_form_as_if_it_had_not_been_away(tmp_path):
    train(tmp_path, "debug", *FEW, "--num-train-steps", "2")
    theirs = tmp_path / "openpi" / "2"
    done = openpi_train("convert", tmp_path / "runs/debug/x", theirs)
    assert done.returncode == 0, done.stderr
    report = json.loads((theirs / "parity.json").read_text())
    assert report["parameters"]["bit_equal"] == report["parameters"]["leaves"] == 50
    assert report["outputs"]["velocity"]["largest_difference"] == 0
    # openpi's tree: step, two counts, two moments and the trained-on value beside the average, each of 50.
    assert report["training_state"] == {"leaves": 153, "left_out": []}
    train(tmp_path, "debug", *FEW, "--num-train-steps", "3", "--resume")
    (file,) = theirs.glob("assets/*/norm_stats.json")
    stats = json.loads(file.read_text())
    stats["norm_stats"]["state"]["mean"][1] += 1
    file.write_text(json.dumps(stats))
    weights = ("--weight-loader.params-path", theirs, "--weight-loader.continue-training")
    done = train(tmp_path, "debug", *FEW, "--num-train-steps", "3", *weights, exp_name="from_openpi")
    assert losses(tmp_path, exp_name="from_openpi") == {3: losses(tmp_path)[3]}
    assert "norm stats: this run's are not those of the training that it continues (state[1] has mean" in done.stderr
