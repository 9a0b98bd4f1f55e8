"""Files that torch.save wrote (`recorded/torch_files`): their tensors, what is refused, and a backbone from one."""

import collections
import datetime
import pickle
import zipfile
from pathlib import Path

import act_case
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from openpi_train.checkpoints.weights import CheckpointWeightLoader
from openpi_train.interop.torch_file import open_torch_file
from openpi_train.nn.resnet import ResNet18
from openpi_train.parallel.params import merge_module
from openpi_train.runtime.exits import CheckpointError

FOLDER = Path(__file__).resolve().parent / "recorded" / "torch_files"
VALUES = dict(np.load(FOLDER / "values.npz"))
SMALL = act_case.config(backbone_widths=(4,))


@pytest.mark.parametrize("name", ["zip.pth", "old.pth"])
def test_tensors_are_those_that_torch_saved(name):
    found = open_torch_file(FOLDER / name)
    assert found.keys() == {key for key in VALUES if not key.startswith("resnet/")}
    for key, leaf in found.items():
        assert leaf.shape == VALUES[key].shape
        np.testing.assert_array_equal(leaf.whole().astype(np.float32), VALUES[key], err_msg=key)
    np.testing.assert_array_equal(found["turned"].read((slice(1, 3), slice(0, 1))), VALUES["turned"][1:3, :1])
    assert [str(found[key].dtype) for key in ("parameter", "half", "count")] == ["float64", "bfloat16", "int64"]


class Harmful:
    def __init__(self, place: Path):
        self.place = place

    def __reduce__(self):
        return Path.touch, (self.place,)


def test_code_in_a_file_is_refused_and_not_run(tmp_path):
    for name in ("plain.pth", "zip.pth"):
        content = pickle.dumps({"weight": Harmful(tmp_path / "touched")}, protocol=2)
        if name == "plain.pth":
            (tmp_path / name).write_bytes(content)
        else:
            with zipfile.ZipFile(tmp_path / name, "w") as archive:
                archive.writestr("x/data.pkl", content)
        with pytest.raises(CheckpointError, match=r"it holds \S+, which is not needed for tensors"):
            open_torch_file(tmp_path / name)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("protocol", [2, 4])
def test_objects_beside_the_tensors_are_blanks_and_their_code_is_not_run(protocol, tmp_path):
    others = [collections.deque([1]), collections.Counter("ab"), datetime.date(2024, 12, 1), Path, Harmful]
    content = {"state_dict": {}, "config": [*others, Harmful(tmp_path / "touched")], "epoch": 3}
    with zipfile.ZipFile(tmp_path / "x.pth", "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps(content, protocol=protocol))
    assert open_torch_file(tmp_path / "x.pth") == {}
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("name", ["zip.pth", "old.pth"])
@pytest.mark.parametrize("kept", [0, 100, -40])
def test_a_damaged_file_is_an_error_that_names_it(name, kept, tmp_path):
    (tmp_path / name).write_bytes((FOLDER / name).read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=f"{name} "):
        for leaf in open_torch_file(tmp_path / name).values():
            leaf.whole()


def test_a_backbone_starts_from_torchvisions_file_and_computes_the_same():
    params = CheckpointWeightLoader(params_path=str(FOLDER / "resnet.pth")).load(SMALL)
    assert all(path.startswith("backbone/") for path in params) and len(params) == 25
    abstract = nnx.eval_shape(lambda: ResNet18(widths=(4,), norm="frozen_batch", rngs=nnx.Rngs(0)))
    arrays = {path.removeprefix("backbone/"): jnp.asarray(leaf.whole()) for path, leaf in params.items()}
    model = merge_module(nnx.split(abstract)[0], arrays)
    found = model.feature_map(jnp.asarray(VALUES["resnet/images"]).transpose(0, 2, 3, 1))
    assert np.abs(VALUES["resnet/map"]).max() > 0.5
    np.testing.assert_allclose(found.transpose(0, 3, 1, 2), VALUES["resnet/map"], atol=1e-5)


def test_a_backbone_of_another_size_or_model_is_refused():
    loader = CheckpointWeightLoader(params_path=str(FOLDER / "resnet.pth"))
    with pytest.raises(CheckpointError, match="of another shape"):
        loader.load(act_case.config(backbone_widths=(8,)))
    with pytest.raises(CheckpointError, match="only ACT with cameras starts from"):
        loader.load(act_case.config(cameras=()))
    with pytest.raises(CheckpointError, match=r"zip\.pth: its tensors are of no model that is read from such a file"):
        CheckpointWeightLoader(params_path=str(FOLDER / "zip.pth")).load(SMALL)
