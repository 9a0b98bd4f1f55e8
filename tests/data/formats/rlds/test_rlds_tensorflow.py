"""Our reader against tensorflow-datasets with TensorFlow, bit for bit (needs the extra `rlds-check`).

TensorFlow decodes JPEG by libjpeg's fast integer DCT unless told otherwise; we by its accurate one, as pillow, OpenCV
and tfds' own numpy path do. So frames are compared with TensorFlow's accurate decode, and tfds' default frames with
our bytes decoded the fast way: both must be equal.
"""

import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from rlds_toy import toy_episodes, toy_source, write_toy

from openpi_train.data.formats.rlds import Rlds

pytestmark = pytest.mark.slow
if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("install .[rlds-check]", allow_module_level=True)


def equal_steps(path, source, split):
    """The number of steps, all read alike by both."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("read_by_tensorflow.py"))],
        input=pickle.dumps((path, source, split)),
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr.decode()[-5000:]
    return int(done.stdout)


@pytest.mark.parametrize("split", ["train", "val"])
def test_real_bridge_reads_as_tfds_reads_it(bridge_sample, tmp_path, split):
    source = Rlds(path=str(bridge_sample), split=split, cache_dir=str(tmp_path), wide_columns=("language_embedding",))
    assert equal_steps(bridge_sample, source, split) == source.open().num_steps


def test_dataset_that_we_wrote_reads_as_tfds_reads_it(tmp_path):
    path = write_toy(tmp_path, val=toy_episodes(range(2)))
    for split in ("train", "val"):
        source = toy_source(path, tmp_path / "cache", split=split)
        assert equal_steps(path, source, split) == source.open().num_steps
