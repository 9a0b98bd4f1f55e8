"""Records what diffusion_policy's own normaliser computes in the checkpoints that we write (`diffusion_exports.py`).

Run where torch, dill and omegaconf are installed, with its source (real-stanford/diffusion_policy) on PYTHONPATH and
the Python of a checkout of this package as argument (`../../../.venv/bin/python`). Writes
`diffusion_policy_actions.json`.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import dill
import torch

sys.modules.setdefault("zarr", mock.Mock())  # its normaliser names a type of it

from diffusion_policy.model.common.normalizer import LinearNormalizer

HERE = Path(__file__).resolve().parent
# Writes the checkpoints, and prints the inputs and the digests of the files.
_OURS = """
import json, sys
from pathlib import Path
import diffusion_exports as ours, lerobot_exports
said = {}
for name, (robot, _) in ours.CASES.items():
    ours.write(Path(sys.argv[1]) / name, name)
    inputs = {key: value.tolist() for key, value in lerobot_exports.inputs(robot).items()}
    said[name] = {"digest": ours.digest(Path(sys.argv[1]) / name), "inputs": inputs}
print(json.dumps(said))
"""


def recorded(file: Path, given: dict) -> dict:
    payload = torch.load(file, pickle_module=dill, weights_only=False)
    weights = payload["state_dicts"]["ema_model"]
    normalizer = LinearNormalizer()
    prefix = "normalizer."
    normalizer.load_state_dict({key[len(prefix) :]: value for key, value in weights.items() if key.startswith(prefix)})
    cfg = payload["cfg"]
    # The actions that its policies execute (`predict_action`): n_action_steps from the last observed step on.
    first = cfg.n_obs_steps - 1
    chunk = normalizer["action"].unnormalize(torch.tensor(given["output"])[None])
    return {
        "state": normalizer["agent_pos"].normalize(torch.tensor(given["state"])[None])[0].tolist(),
        "target": normalizer["action"].normalize(torch.tensor(given["target"])[None])[0].tolist(),
        "actions": chunk[0, first : first + cfg.n_action_steps].tolist(),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as work:
        environment = {**os.environ, "PYTHONPATH": f"{HERE.parent}:{HERE.parent.parent}", "JAX_PLATFORMS": "cpu"}
        run = subprocess.run(
            [sys.argv[1], "-c", _OURS, work], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        ours = json.loads(run.stdout.splitlines()[-1])
        cases = {
            name: {"digest": one["digest"], **recorded(Path(work) / name / "latest.ckpt", one["inputs"])}
            for name, one in ours.items()
        }
    versions = {"diffusion_policy": "5ba07ac", "torch": importlib.metadata.version("torch")}
    (HERE / "diffusion_policy_actions.json").write_text(json.dumps({"versions": versions, "cases": cases}) + "\n")


if __name__ == "__main__":
    main()
