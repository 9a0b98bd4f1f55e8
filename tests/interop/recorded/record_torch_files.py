"""Records small files by `torch.save`, in its two forms: `python record_torch_files.py`, where torch is installed.

`torch_files/` beside this file gets a state dict with tensors of several types, one transposed, one that begins within
its storage and two that share one; the same without zip; and their values as numpy saved them. `resnet.pth` is the
state dict of a ResNet of one stage of 4 channels, made of torchvision's blocks, with the first map that it computes.
"""

import importlib.metadata
import json
from pathlib import Path

import numpy as np
import torch
from torchvision.models.resnet import BasicBlock

FOLDER = Path(__file__).resolve().parent / "torch_files"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    shared = torch.arange(12, dtype=torch.float32) / 3
    tensors = {
        "turned": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
        "end": shared[7:],
        "begin": shared[:4].reshape(2, 2),
        "parameter": torch.nn.Parameter(torch.tensor([0.5, -2.0], dtype=torch.float64)),
        "half": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        "count": torch.tensor(7),
    }
    torch.save(tensors, FOLDER / "zip.pth")
    torch.save({"state_dict": tensors, "epoch": 3}, FOLDER / "old.pth", _use_new_zipfile_serialization=False)
    values = {name: tensor.detach().float().numpy() for name, tensor in tensors.items()}
    torch.manual_seed(0)
    net = torch.nn.Module()
    net.conv1 = torch.nn.Conv2d(3, 4, 7, stride=2, padding=3, bias=False)
    net.bn1 = torch.nn.BatchNorm2d(4)
    net.layer1 = torch.nn.Sequential(BasicBlock(4, 4), BasicBlock(4, 4))
    net.fc = torch.nn.Linear(4, 2)
    for name, tensor in net.state_dict().items():
        if "running" in name or ("bn" in name and name.endswith("bias")):
            tensor.copy_(torch.rand(tensor.shape) + 0.5 * ("bias" in name))
    torch.save(net.state_dict(), FOLDER / "resnet.pth")
    images = torch.rand(1, 3, 18, 22) * 2 - 1
    with torch.no_grad():
        net.eval()
        x = torch.nn.functional.max_pool2d(net.bn1(net.conv1(images)).relu(), 3, 2, 1)
        values |= {"resnet/images": images.numpy(), "resnet/map": net.layer1(x).numpy()}
    np.savez(FOLDER / "values.npz", **values)
    versions = {package: importlib.metadata.version(package) for package in ("torch", "torchvision")}
    (FOLDER / "recorded.json").write_text(json.dumps({"versions": versions}) + "\n")


if __name__ == "__main__":
    main()
