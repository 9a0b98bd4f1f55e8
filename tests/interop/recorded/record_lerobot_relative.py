"""Records what LeRobot's own processors compute in folders that `convert --to lerobot` writes (`lerobot_exports.py`).

Run where `lerobot` and transformers are installed, with the Python of a checkout of this package as argument:
`python record_lerobot_relative.py ../../../.venv/bin/python`. Writes `lerobot_relative.json`. Tokenizers, which the hub
has, are replaced: text is not compared here.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import torch
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.pi0 import processor_pi0  # noqa: F401  registers its steps, as the others do
from lerobot.policies.pi0_fast import processor_pi0_fast  # noqa: F401
from lerobot.policies.pi05 import processor_pi05  # noqa: F401

HERE = Path(__file__).resolve().parent
# Writes the folders, and prints the inputs and the digests of the files.
_OURS = """
import json, sys
from pathlib import Path
import lerobot_exports as ours
for name in ours.CASES:
    ours.write(Path(sys.argv[1]) / name, name)
said = {}
for name, (_, robot) in ours.CASES.items():
    inputs = {key: value.tolist() for key, value in ours.inputs(robot).items()}
    said[name] = {"digest": ours.digest(Path(sys.argv[1]) / name), "inputs": inputs}
print(json.dumps(said))
"""


def tokenizer(*_, **__):
    def encode(text, **_):
        rows = 1 if isinstance(text, str) else len(text)
        return {"input_ids": torch.zeros((rows, 2), dtype=torch.long), "attention_mask": torch.ones((rows, 2))}

    return mock.Mock(side_effect=encode)


def recorded(folder: Path, given: dict) -> dict:
    with (
        mock.patch("transformers.AutoTokenizer.from_pretrained", tokenizer),
        mock.patch("transformers.AutoProcessor.from_pretrained"),
    ):
        config = PreTrainedConfig.from_pretrained(str(folder))
        before, after = make_pre_post_processors(config, str(folder))
    state, output, target = (torch.tensor(given[name]) for name in ("state", "output", "target"))
    seen = before({"observation.state": state, "task": "go"})["observation.state"]
    actions = after(output[None])[0]
    # The steps that make training rows, without those of text: FAST's tokenizer reads the actions.
    before.steps = [step for step in before.steps if "okenizer" not in type(step).__name__]
    row = before({"observation.state": state[None], "action": target[None], "task": ["go"]})
    relative = getattr(config, "use_relative_actions", None)
    return {
        "config": relative,
        "state": seen[0].tolist(),
        "target": row["action"][0].tolist(),
        "actions": actions.tolist(),
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as work:
        environment = {**os.environ, "PYTHONPATH": f"{HERE.parent}:{HERE.parent.parent}", "JAX_PLATFORMS": "cpu"}
        run = subprocess.run(
            [sys.argv[1], "-c", _OURS, work], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        ours = json.loads(run.stdout.splitlines()[-1])
        cases = {
            name: {"digest": one["digest"], **recorded(Path(work) / name, one["inputs"])} for name, one in ours.items()
        }
    versions = {package: importlib.metadata.version(package) for package in ("lerobot", "torch", "transformers")}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items())
    (HERE / "lerobot_relative.json").write_text(f'{{"versions": {json.dumps(versions)},\n"cases": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()
