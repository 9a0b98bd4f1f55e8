"""One process of the feed test: `feed_process.py <port> <processes> <index> <devices> <tokenizer> <assets>`.

Prints, for three steps, a digest of every row that this process holds, by row number. With a last argument `workers`:
prints the ids of its two data workers after the first batch, and waits to be killed.
"""

import hashlib
import json
import multiprocessing
import sys
import time

import jax
import numpy as np

PORT, COUNT, INDEX, DEVICES = (int(value) for value in sys.argv[1:5])
WORKERS = 2 if sys.argv[7:] == ["workers"] else 0


def main():
    jax.config.update("jax_num_cpu_devices", DEVICES)
    if WORKERS == 0:
        jax.distributed.initialize(f"127.0.0.1:{PORT}", COUNT, INDEX, cluster_detection_method="deactivate")
    from openpi_train.data.core.feed import RowFeed
    from openpi_train.data.make.fake import FakeData
    from openpi_train.data.robot.config import DataConfig, Dataset
    from openpi_train.data.robot.opened import open_data
    from openpi_train.data.robot.transforms import PadDims, ResizeImages, TokenizePrompt
    from openpi_train.data.robot.windows import WindowShape
    from openpi_train.data.tokenizers.tokenizer import load_tokenizer
    from openpi_train.robots.bridge import Bridge
    from openpi_train.types import flatten_rows
    from tests.data.conftest import HORIZON, PROMPT, SIZE, SMALL, WIDTH, batch_spec

    transforms = (ResizeImages(SIZE), TokenizePrompt(load_tokenizer(sys.argv[5]), PROMPT), PadDims(WIDTH))
    config = DataConfig(datasets=(Dataset(source=FakeData(**SMALL), robot=Bridge()),))
    opened = open_data(
        config, shape=WindowShape(horizon=HORIZON), seed=7, transforms=transforms, batch_spec=batch_spec,
        normalization="z_score", assets_dir=sys.argv[6],
    )  # fmt: skip
    axes = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((COUNT, DEVICES), ("replica", "fsdp"), axis_types=axes)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("replica", "fsdp")))
    feed = RowFeed(opened.train, batch_size=8, sharding=sharding, num_workers=WORKERS)
    if WORKERS:
        feed.next()
        print(json.dumps([child.pid for child in multiprocessing.active_children()]), flush=True)
        time.sleep(600)
    digests = {}
    for step in range(3):
        batch = flatten_rows(feed.next())
        for name, array in batch.items():
            assert array.shape[0] == 8, name
            for shard in array.addressable_shards:
                first = shard.index[0].indices(8)[0]
                for offset, value in enumerate(np.asarray(shard.data)):
                    key = f"{step}/{first + offset}/{name}"
                    digests[key] = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]
    feed.close()
    print(json.dumps(digests))


if __name__ == "__main__":
    main()
