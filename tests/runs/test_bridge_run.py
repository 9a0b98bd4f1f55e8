"""The main experiments on real BridgeData, shrunk on the command line, on several devices: of two processes, or one."""

import json

import pytest
from command import losses, train

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
SHRUNK = """
    --model.paligemma-variant dummy --model.action-expert-variant dummy --model.image-size 64
    --model.siglip.width 32 --model.siglip.depth 2 --model.siglip.mlp-dim 64 --model.siglip.num-heads 2
    --model.siglip.patch-size 16 --model.vocab-size 512 --model.max-token-len 64
    --data.tokenizer bytes --data.validation-fraction 0.2 --batch-size 8
    --num-train-steps 2 --log-interval 1 --save-interval 2 --eval.num-sample-steps 2
    --data.text-lengths 1 --eval.num-rows 16 --objective.no-augment
""".split()


@pytest.mark.parametrize(("experiment", "processes"), [("pi0_bridge_traj", 2), ("pi05_bridge", 1)])
def test_shrunk_experiment_trains_on_the_real_sample(tmp_path, bridge_sample, experiment, processes):
    source = ("--data.datasets.0.source.path", bridge_sample, "--data.datasets.0.source.cache-dir", tmp_path / "index")
    train(tmp_path, experiment, *source, *SHRUNK, "--num-workers", str(processes - 1), processes=processes, devices=2)
    run = tmp_path / "runs" / experiment / "x"
    assert set(losses(tmp_path, experiment)) == {1, 2}
    results = json.loads((run / "results.json").read_text())
    assert set(results) == {"config", "training_metrics", "distributed_info", "summary"}
    where, summary = results["distributed_info"], results["summary"]
    assert (where["processes"], where["devices"]) == (processes, 2 * processes)
    assert (summary["step"], summary["checkpoints"]) == (2, [2])
    assert results["training_metrics"]["last"]["loss"] == losses(tmp_path, experiment)[2]
    evaluations = results["training_metrics"]["evaluations"]
    assert [entry["step"] for entry in evaluations] == [0, 2]
    # 5 Hz chunks of 50 steps on episodes of 10: nearly every row is cut short, and the loss must still be a number.
    assert all(entry["val/loss"] > 0 for entry in evaluations)
    asset = next((run / "2" / "assets").iterdir())
    stats = json.loads((asset / "norm_stats.json").read_text())["norm_stats"]
    assert len(stats["actions"]["mean"]) == 7
