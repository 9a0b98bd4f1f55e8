"""A run directory that an older version wrote: it is resumed, and its checkpoint is served.

`recorded/run_of_8ba3e02.tar.xz` was written at that commit (jax 0.10.2, one CPU device):

    python -m openpi_train debug --exp-name old --num-train-steps 4 --save-interval 4 --keep-last 1 SIZES
        --checkpoint-base-dir runs --assets-base-dir assets --no-tensorboard --data.validation-fraction 0.2

The numbers below are what the same commit gave when it resumed and served it. They hold to float32's rounding on other
processors.
"""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from command import losses, train

from openpi_train.policy.loading import load_policy

RECORDED = Path(__file__).parent / "recorded" / "run_of_8ba3e02.tar.xz"
EXPERT = ("width 16", "depth 2", "mlp-dim 32", "num-heads 2", "num-kv-heads 1", "head-dim 8")
SIZES = " ".join(
    [
        *(f"--model.{expert}.{size}" for expert in ("language", "action-expert") for size in EXPERT),
        "--model.siglip.width 16 --model.siglip.mlp-dim 32 --model.vocab-size 300",
    ]
).split()
LOSSES = {5: 2.283493995666504, 6: 2.1215391159057617}
FIRST_ACTION = [
    -0.021037638187408447,
    0.005121627822518349,
    0.01676689274609089,
    0.003572788555175066,
    -0.020181989297270775,
    0.030965492129325867,
    -0.5326116681098938,
]


@pytest.fixture
def old(tmp_path):
    """The old run's directory, as `train` calls it."""
    with tarfile.open(RECORDED) as archive:
        archive.extractall(tmp_path, filter="data")
    run = tmp_path / "runs" / "debug" / "x"
    (tmp_path / "runs" / "debug" / "old").rename(run)
    return run


@pytest.mark.slow
def test_an_old_run_goes_on_as_its_own_version_would_have(old, tmp_path):
    lines = ("--num-train-steps", "6", "--save-interval", "4", "--keep-last", "1", "--no-tensorboard")
    # What the augmentation was before there was a choice; without the flag the resume warns that another one goes on.
    kind = ("--objective.augmentation.kind", "openpi_torch")
    train(tmp_path, "debug", "--resume", *lines, *kind, "--data.validation-fraction", "0.2", *SIZES)
    logged = losses(tmp_path)
    assert sorted(logged) == [1, 2, 3, 4, 5, 6]
    for step, loss in LOSSES.items():
        assert logged[step] == pytest.approx(loss, rel=1e-5)
    told = (old / "logs" / "process_0.log").read_text()
    assert "this run of 6 steps ends before its warm-up does" in told  # `training/run_length.py`
    # What it says of its learning, and what to type then (`evaluation/learning_verdict.py`).
    assert " has not learned: " in told
    assert all(f"next: python -m openpi_train {verb} {old}" in told for verb in ("report", "eval", "serve", "resume"))
    assert f"next: python -m openpi_train resume {old} --num-train-steps 12 --lr-schedule.peak-lr " in told
    _, start = json.loads((old / "environment.json").read_text())["starts"]
    assert not [name for name in start["changed"] if "used_token_len" in name or "fixed_groups" in name]


@pytest.mark.slow
def test_an_old_checkpoint_acts_as_in_its_own_version(old):
    image = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    state = np.linspace(-1, 1, 7).astype(np.float32)
    policy = load_policy(old)
    recorded = json.loads((old / "4" / "meta.json").read_text())["experiment"]["model"]["used_token_len"]
    assert policy.sampler.text_lengths == (recorded, policy.sampler.model.rows.text_limit)
    chunk = policy.infer({"observation/image_0": image, "observation/state": state, "prompt": "tidy up"})["actions"]
    assert np.shape(chunk) == (8, 7)
    np.testing.assert_allclose(chunk[0], FIRST_ACTION, rtol=0, atol=1e-5)
