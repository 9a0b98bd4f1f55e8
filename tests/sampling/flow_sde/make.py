"""Makes `recorded.json` beside it with the published code of Flow-SDE, in an environment of its own.

    pip install torch==2.14.1 diffusers==0.42.1
    git clone https://github.com/RLinf/RLinf            # a3816b5
    git clone https://github.com/yifan123/flow_grpo     # ac4c86e
    python make.py RLinf/rlinf/models/embodiment/openpi_rlinf/utils/rl_sampler.py \
        flow_grpo/flow_grpo/diffusers_patch/sd3_sde_with_logprob.py

Mean and standard deviation of the actions after every denoising step, from given actions and velocities: those of
RLinf's `sample_mean_var`, and of Flow-GRPO's `sde_step_with_logprob`, whose numbers must be the same.
"""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import diffusers
import numpy as np
import torch

NOISE, CHUNK = 0.5, (2, 3)


def module(path: str):
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def main(rlinf: str, flow_grpo: str) -> None:
    sampler, patch = module(rlinf), module(flow_grpo)
    recorded = {}
    for num_steps in (1, 4, 10):
        random = np.random.default_rng(num_steps)
        noisy, velocity = (torch.tensor(random.normal(size=(num_steps, *CHUNK)).round(3)).float() for _ in range(2))
        number = torch.arange(num_steps)
        mean, std = sampler.sample_mean_var(
            noisy, velocity, number, noise_method="flow_sde", noise_level=NOISE, num_steps=num_steps
        )
        sigmas = torch.cat([torch.linspace(1, 1 / num_steps, num_steps), torch.zeros(1)])
        # Of diffusers' scheduler only these are read.
        scheduler = SimpleNamespace(sigmas=sigmas, index_for_timestep=lambda step: int(step))
        _, _, other_mean, other_std = patch.sde_step_with_logprob(
            scheduler, velocity[:, None], number, noisy[:, None], noise_level=NOISE
        )
        other_std = other_std.reshape(-1) * (sigmas[:-1] - sigmas[1:]).sqrt()
        torch.testing.assert_close(other_mean[:, 0], mean)
        torch.testing.assert_close(other_std, std[:, 0, 0])
        recorded[str(num_steps)] = {
            "noisy": noisy.tolist(),
            "velocity": velocity.tolist(),
            "mean": mean.tolist(),
            "std": std[:, 0, 0].tolist(),
        }
    versions = {
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "RLinf": "a3816b5",
        "flow_grpo": "ac4c86e",
    }
    found = {"versions": versions, "noise": NOISE, "steps": recorded}
    (Path(__file__).parent / "recorded.json").write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
