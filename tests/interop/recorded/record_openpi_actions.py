"""Records what openpi's own transforms make of observations, with the norm stats in a checkpoint that we wrote for it.

Run with the Python of a checkout of this package, openpi's source (Physical-Intelligence/openpi) and numpydantic:
`PYTHONPATH=OPENPI/src:OPENPI/packages/openpi-client/src:NUMPYDANTIC:.. python record_openpi_actions.py`. Writes
`openpi_actions.json`. Modules of openpi that only its models and tokenizers need are left out.
"""

import hashlib
import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

HERE = Path(__file__).resolve().parent
KINDS = SimpleNamespace(PI0="pi0", PI05="pi05", PI0_FAST="pi0_fast")
# Names of types alone.
sys.modules["openpi.shared.array_typing"] = mock.MagicMock(typecheck=lambda function: function)
sys.modules["openpi.models.tokenizer"] = mock.Mock()
sys.modules["openpi.models.model"] = mock.Mock(ModelType=KINDS)

from openpi import transforms
from openpi.policies import aloha_policy, droid_policy, libero_policy
from openpi.shared import normalize

sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]
import openpi_exports as ours

PICTURE = np.zeros((8, 8, 3), np.uint8)


def aloha(adapt):
    def given(state):
        return {"state": state, "images": {"cam_high": PICTURE.transpose(2, 0, 1)}}

    return given, [aloha_policy.AlohaInputs(adapt_to_pi=adapt)], [aloha_policy.AlohaOutputs(adapt_to_pi=adapt)]


def droid():
    def given(state):
        cameras = dict.fromkeys(("observation/exterior_image_1_left", "observation/wrist_image_left"), PICTURE)
        return {"observation/joint_position": state[:7], "observation/gripper_position": state[7:], **cameras}

    return given, [droid_policy.DroidInputs(model_type=KINDS.PI0)], [droid_policy.DroidOutputs()]


def libero():
    def given(state):
        return {"observation/state": state, "observation/image": PICTURE, "observation/wrist_image": PICTURE}

    return given, [libero_policy.LiberoInputs(model_type=KINDS.PI0)], [libero_policy.LiberoOutputs()]


def plain():
    """A robot without transforms of its own in openpi's package."""
    return lambda state: {"state": state}, [], []


# By the names of our cases: the robot's transforms, and the mask of its DeltaActions (training/config.py).
OPENPIS = {
    "aloha": (aloha(True), (6, -1, 6, -1)),
    "aloha-absolute": (aloha(True), None),
    "aloha-as-recorded": (aloha(False), (6, -1, 6, -1)),
    "droid-velocity": (droid(), None),
    "droid-position": (droid(), (7, -1)),
    "libero": (libero(), None),
    "libero-extra-delta": (libero(), (6, -1)),
    "ur5": (plain(), (6, -1)),
    "bridge-trajectory": (plain(), (6, -1)),
    "all": (plain(), (3,)),
}


def recorded(name: str, folder: Path) -> dict:
    ours.write(folder, name)
    stats = normalize.load(folder / "assets" / "robot")
    (given, before, after), mask = OPENPIS[name]
    mask = None if mask is None else transforms.make_bool_mask(*mask)
    found = {}
    for quantiles in (False, True):
        inputs = [*before, transforms.DeltaActions(mask), transforms.Normalize(stats, use_quantiles=quantiles)]
        outputs = [transforms.Unnormalize(stats, use_quantiles=quantiles), transforms.AbsoluteActions(mask), *after]
        values = {key: value.astype(np.float64) for key, value in ours.inputs(name).items()}
        row = transforms.compose(inputs)({**given(values["state"]), "actions": values["target"]})
        answer = transforms.compose(outputs)({"state": row["state"], "actions": values["output"]})
        kind = "quantile" if quantiles else "z_score"
        actions = {"state": row["state"], "target": row["actions"], "actions": answer["actions"]}
        found[kind] = {key: np.asarray(value).tolist() for key, value in actions.items()}
    return {"digest": ours.digest(folder), **found}


def main() -> None:
    with tempfile.TemporaryDirectory() as work:
        cases = {name: recorded(name, Path(work) / name) for name in OPENPIS}
    source = Path(transforms.__file__).read_bytes()
    record = {
        "openpi": "15a9616",
        "transforms.py": hashlib.sha256(source).hexdigest(),
        "numpy": importlib.metadata.version("numpy"),
        "cases": cases,
    }
    (HERE / "openpi_actions.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
