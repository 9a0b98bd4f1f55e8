"""Checkpoints of LeRobot and PyTorch are opened to serve and to evaluate as they are, with their experiment."""

import dataclasses

import exchanged
import numpy as np
import pytest
from openpi_train_configs.debug import debug
from test_convert_dry_run import EXPERIMENTS, WIDTHS

from openpi_train.checkpoints import checkpoint_formats
from openpi_train.fields import as_json
from openpi_train.models.diffusion_policy import diffusion_policy_checkpoint, lerobot_diffusion
from openpi_train.policy.loading import _norm_stats
from openpi_train.policy.restore import open_run
from openpi_train.runtime.exits import CheckpointError, UsageError

KINDS = {"lerobot": "keypoints", "diffusion_policy": "images", "openpi_torch": "pi0"}


@pytest.fixture(params=KINDS)
def form(request):
    return checkpoint_formats.named(request.param)


@pytest.fixture
def written(form, tmp_path, monkeypatch):
    """The experiment, its parameters, and a folder of the form with them."""
    for module in (lerobot_diffusion, diffusion_policy_checkpoint):
        monkeypatch.setattr(module, "WIDTHS", WIDTHS)
    experiment = EXPERIMENTS[KINDS[form.name]]
    params = exchanged.made_up(experiment)
    content = {
        name: {**stats, "min": [0.0] * 7, "max": [2.0] * 7} for name, stats in exchanged.STATS["norm_stats"].items()
    }
    stored = exchanged.as_stored(params, experiment=as_json(experiment))
    stored = dataclasses.replace(stored, norm_stats={"robot": {"norm_stats": content}})
    form.write(tmp_path / "theirs", stored, experiment.model)
    return experiment, params, tmp_path / "theirs"


def test_another_trainers_checkpoint_opens_with_the_sizes_of_its_experiment(form, written):
    experiment, params, folder = written
    with pytest.raises(UsageError, match=r"does not hold the sizes of its layers: .*--experiment NAME"):
        open_run(folder)
    stored, run = open_run(folder, experiment)
    assert run is experiment and stored.params.keys() == params.keys()
    for name, leaf in stored.params.items():
        np.testing.assert_array_equal(leaf.whole(), params[name])
    # The norm stats of forms that do not name them are any robot's.
    names = ("robot",) if form.name == "openpi_torch" else ("robot", "arm")
    for name in names:
        assert _norm_stats(stored, name)["state"].mean.tolist() == [1.0] * 7
    if names == ("robot",):
        with pytest.raises(CheckpointError, match=r"no norm stats for 'arm', only for \['robot'\]"):
            _norm_stats(stored, "arm")


@pytest.mark.parametrize("form", ["lerobot", "diffusion_policy"], indirect=True)  # PyTorch's says nothing of it
def test_a_policy_that_was_trained_otherwise_is_not_opened(form, written):
    experiment, _, folder = written
    other = dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, normalization="z_score"))
    with pytest.raises(UsageError, match=r"was trained otherwise.*\n.*--data.normalization min_max"):
        open_run(folder, other)


def test_a_folder_of_an_experiments_name_is_of_that_experiment(tmp_path):
    checkpoint_formats.named("openpi_torch").write(
        tmp_path / "debug", exchanged.as_stored(exchanged.made_up(debug)), debug.model
    )
    assert open_run(tmp_path / "debug")[1].name == "debug"
