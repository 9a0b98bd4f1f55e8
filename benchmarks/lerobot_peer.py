"""Measures lerobot's own loader, in an environment where lerobot is installed; `lerobot_feed.py` starts it.

Requests are JSON lines on stdin, answers JSON lines on the descriptor that the first argument names: {"loader": ...} or
{"decode": ...}, each with the arguments from `lerobot_feed.py`. Imports nothing of this project.
"""

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path


def loader(root, horizon, fps, indices, batch_size, workers, num_warm, size):
    """Samples/s and CPU ms for each, of a torch DataLoader over these rows in this order, scaled to `size` if given."""
    import torch
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from torchvision.transforms import v2

    chunk = {"action": [step / fps for step in range(horizon)]}
    scale = None if size is None else v2.Resize(size, antialias=True)
    dataset = LeRobotDataset("local/benchmark", root=root, delta_timestamps=chunk, image_transforms=scale)
    batches = iter(torch.utils.data.DataLoader(dataset, batch_size=batch_size, sampler=indices, num_workers=workers))
    for _ in range(num_warm):
        next(batches)
    started, cpu_s, num_samples = time.perf_counter(), _cpu_s(), 0
    # The workers end after the last batch, and their CPU time can then no longer be read.
    for _ in range(len(indices) // batch_size - num_warm - 2 * max(workers, 1)):
        num_samples += len(next(batches)["action"])
    elapsed_s, cpu_s = time.perf_counter() - started, _cpu_s() - cpu_s
    del batches
    return {"samples_per_s": num_samples / elapsed_s, "cpu_ms_per_sample": 1e3 * cpu_s / num_samples}


def decode(video, times, backend):
    """CPU milliseconds for decoding one frame, at each of these times in turn."""
    from lerobot.datasets.video_utils import decode_video_frames

    decode_video_frames(video, times[:1], 1e-4, backend)
    cpu_s = time.process_time()
    for moment in times:
        decode_video_frames(video, [moment], 1e-4, backend)
    return {"cpu_ms": 1e3 * (time.process_time() - cpu_s) / len(times)}


def _cpu_s():
    """CPU seconds of this process and its live workers."""
    total = time.process_time()
    for child in multiprocessing.active_children():
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def main():
    """Answer requests until there are no more."""
    import importlib.metadata

    with os.fdopen(int(sys.argv[1]), "w") as answers:
        names = ("lerobot", "torch", "torchcodec", "av")
        print(json.dumps({name: importlib.metadata.version(name) for name in names}), file=answers, flush=True)
        for line in sys.stdin:
            ((what, options),) = json.loads(line).items()
            print(json.dumps({"loader": loader, "decode": decode}[what](**options)), file=answers, flush=True)


if __name__ == "__main__":
    main()
