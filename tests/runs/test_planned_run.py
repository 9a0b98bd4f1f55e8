"""`plan.json` of a run: the forecast of what is used, and the compiler's account of it."""

import json

import pytest
from command import train


@pytest.mark.slow
def test_a_run_writes_down_what_it_uses_and_the_compiled_state_is_the_forecast_one(tmp_path):
    flags = "--num-train-steps 1 --model.remat auto --sharding.strategy zero2 --sharding.min-shard-mib 0".split()
    flags += ("--data.validation-fraction", "0")
    done = train(tmp_path, "debug", *flags, devices=2)
    plan = json.loads((tmp_path / "runs/debug/x/plan.json").read_text())
    used = {name: plan[name] for name in ("strategy", "fsdp_devices", "remat", "grad_accum", "fits")}
    assert used == {"strategy": "zero2", "fsdp_devices": 2, "remat": "none", "grad_accum": 1, "fits": True}
    assert plan["flops_per_step"] > 0 and plan["sent_within_host_bytes_per_device"] > 0
    forecast, found = plan["bytes_per_device"], plan["compiled_bytes_per_device"]
    assert found["state"] == pytest.approx(forecast["state"], rel=0.02)
    assert found["total"] >= found["state"] + found["temporaries"] > found["state"]
    text = done.stdout + done.stderr
    assert "zero2, remat none, grad_accum 1" in text
    assert "else there was" not in text  # a step is small against the device: nothing is compared
    assert "the compiled step needs on each device: state" in text and "please report this" not in text
    # What was asked for stays on record: on other devices another policy may be chosen.
    assert json.loads((tmp_path / "runs/debug/x/experiment.json").read_text())["model"]["remat"] == "auto"
