"""Files of weights that are damaged or made to harm: nothing but a CheckpointError, in bounded time and memory."""

import io
import json
import pickle
import random
import struct
import time
import tracemalloc
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from openpi_train.interop import safetensors_file
from openpi_train.interop.place import Place
from openpi_train.interop.stored_leaves import in_memory
from openpi_train.interop.torch_file import open_payload, open_torch_file
from openpi_train.runtime.exits import CheckpointError

FOLDER = Path(__file__).resolve().parent / "recorded" / "torch_files"
# Values that a reader may hold for a small file.
MOST_BYTES = 64 << 20


def read_torch(path):
    for leaf in open_torch_file(path).values():
        leaf.whole()


def read_payload(path):
    for leaves in open_payload(path)[0].values():
        for leaf in leaves.values():
            leaf.whole()


def read_safetensors(path):
    for leaf in safetensors_file.open_file(Place.of(path.parent), path.name).values():
        leaf.whole()


def zipped(content, compression=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("x/data.pkl", content)
    return file.getvalue()


def refused(read, path, content):
    """The message of the error, after checking that reading took little memory and time."""
    path.write_bytes(content)
    started = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            read(path)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 60  # a bound, no speed: without limits none of these ends
    return str(caught.value)


def nested(depth, width, opened, closed):
    """A pickle of a list or tuple of `width` times the same one, and so on: 12 bytes for a factor of `width`."""
    content = b"\x80\x02K\x01q\x00"
    for level in range(depth):
        content += opened + b"h" + bytes([level]) + (b"h" + bytes([level])) * (width - 1) + closed
        content += b"q" + bytes([level + 1])
    return content


ITSELF = b"\x80\x02]q\x00h\x00a."


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (zipped(b"\x80\x02" + b"]" * 3_000_000 + b".", zipfile.ZIP_DEFLATED), "is compressed"),
        (zipped(b"\x80\x02N" + b"0N" * 10_000 + b"."), "more than 20,000 operations"),
        (zipped(b"\x80\x02Nr\xff\xff\xff\x7f."), "no dictionary of tensors"),  # an index of the memo: 32 GB in `pickle`
        (zipped(b"\x80\x04\x8e" + b"\xff" * 7 + b"\x00abc."), "damaged"),  # a string of 2**56 bytes
        (zipped(nested(40, 12, b"(", b"t") + b"}h\x28Ns."), "has a tuple as a key"),  # hashed for 12**40 parts
        (zipped(nested(40, 12, b"(", b"t") + b"Q."), "refers to something that is no storage"),
        (zipped(b"\x80\x02" + b"(" * 9_000 + b"t" * 9_000 + b"."), "no dictionary of tensors"),
        (zipped(ITSELF), "no dictionary of tensors"),
        (zipped(b"."), "damaged"),
        (zipped(b"\x80\x02K\x01K\x02\x86K\x03R."), "calls"),
        (zipped(b"\x80\x02K\x01K\x02s."), "damaged"),
        (b"PK\x05\x06" + bytes(18), "without data.pkl"),
    ],
)
def test_a_torch_file_that_asks_for_memory_or_time_is_refused(content, message, tmp_path, monkeypatch):
    monkeypatch.setattr("openpi_train.interop.torch_pickle.MOST_OPERATIONS", 20_000)
    assert message in refused(read_torch, tmp_path / "x.pth", content)


@pytest.mark.parametrize("config", [nested(40, 12, b"(", b"l"), b"\x80\x02]q\x28h\x28a", b"\x80\x02}q\x28K\x01h\x28s"])
def test_a_config_that_holds_itself_or_too_much_is_refused(config, tmp_path, monkeypatch):
    monkeypatch.setattr("openpi_train.interop.torch_file._MOST_PLAIN", 10_000)
    content = config + b"0}X\x0b\x00\x00\x00state_dicts}sX\x03\x00\x00\x00cfgh\x28s."
    assert "may hold itself" in refused(read_payload, tmp_path / "x.ckpt", zipped(content))


def tensor(shape, strides, size=4, offset=0):
    """A state dict of one tensor of a storage of four values, as torch writes it."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(
            "x/data.pkl", _Pickler.of({"a": (("storage", None, "0", "cpu", size), offset, shape, strides)})
        )
        archive.writestr("x/data/0", np.arange(4, dtype=np.float32).tobytes())
    return file.getvalue()


class _Pickler(pickle._Pickler):
    """Writes tuples that begin with a storage as tensors."""

    @classmethod
    def of(cls, content):
        file = io.BytesIO()
        cls(file, 2).dump(content)
        return file.getvalue()

    def save(self, obj, save_persistent_id=True):
        if isinstance(obj, tuple) and obj and obj[0] == "storage":
            self.write(b"(")
            for one in obj:
                self.write(b"ctorch\nFloatStorage\n") if one is None else super().save(one)
            self.write(b"tQ")
        elif isinstance(obj, tuple) and obj and isinstance(obj[0], tuple):
            self.write(b"ctorch._utils\n_rebuild_tensor_v2\n(")
            for one in obj:
                self.save(one)
            self.write(b"tR")
        else:
            super().save(obj, save_persistent_id)


def test_a_tensor_that_is_written_by_hand_is_read(tmp_path):
    (tmp_path / "x.pth").write_bytes(tensor((2, 3), (1, 0), offset=1))  # of strides like `expand`
    (leaf,) = open_torch_file(tmp_path / "x.pth").values()
    assert leaf.whole().tolist() == [[1, 1, 1], [2, 2, 2]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shape": (10**9, 10**9), "strides": (0, 0)}, "of a storage of 4"),
        ({"shape": (2, 2), "strides": (1,)}, "not as many strides as dims"),
        ({"shape": (2.0,), "strides": (1,)}, "no number of values"),
        ({"shape": ("2",), "strides": (1,)}, "no number of values"),
        ({"shape": (-2,), "strides": (1,)}, "no number of values"),
        ({"shape": (1,) * 100, "strides": (1,) * 100}, "at most 32"),
        ({"shape": 2, "strides": 1}, "no tuple"),
        ({"shape": (5,), "strides": (1,)}, "values lie beyond its end"),
        ({"shape": (5,), "strides": (1,), "size": 5}, "values lie beyond its end"),
    ],
)
def test_a_tensor_that_no_storage_holds_is_refused(given, message, tmp_path):
    assert message in refused(read_torch, tmp_path / "x.pth", tensor(**given))


def safetensors(header, values=bytes(16)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + values


def entry(begin, end, shape=None, dtype="F32"):
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"[" * 1_000_000, "damaged"),
        (b"[" + b"[]," * 6_000_000 + b"0]", "parts; the most are"),
        ([], "damaged"),
        ({"a": []}, "damaged"),
        ({"a": entry(0, 16), "b": entry(0, 16)}, "bytes of b overlap"),
        ({"a": entry(0, 12), "b": entry(8, 16)}, "bytes of b overlap"),
        ({"a": entry(4, 16)}, "leave 4 bytes before them"),
        ({"a": entry(-16, 16, [8])}, "whole numbers"),
        ({"a": entry(0, 16, [-2, -2])}, "whole numbers"),
        ({"a": entry(0, 16, [4.0])}, "whole numbers"),
        ({"a": entry(0, 16, [True, 4])}, "whole numbers"),
        ({"a": entry(0, 16, ["4"])}, "whole numbers"),
        ({"a": entry(0, 16, [4] + [1] * 40)}, "41 dims"),
        ({"a": entry(0, 16, [4], ["F32"])}, "its type is no text"),
        ({"a": {**entry(0, 16), "data_offsets": [0]}}, "damaged"),
        ({"a": {**entry(0, 16), "data_offsets": [0, 16.0]}}, "whole numbers"),
    ],
)
def test_a_header_of_safetensors_that_is_no_header_is_refused(header, message, tmp_path):
    assert message in refused(read_safetensors, tmp_path / "x.safetensors", safetensors(header))


@pytest.mark.parametrize(
    "index", [b"[" * 100_000, b'{"weight_map": {"a": 5}}', b'{"weight_map": {"a": "../x"}}', b"[]"]
)
def test_an_index_of_safetensors_that_is_none_is_refused(index, tmp_path):
    (tmp_path / safetensors_file.INDEX).write_bytes(index)
    with pytest.raises(CheckpointError, match="damaged"):
        safetensors_file.open_model(Place.of(tmp_path))


def made_safetensors(folder):
    leaves = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, ml_dtypes.bfloat16)}
    safetensors_file.write_file(
        folder / "made.safetensors", {name: in_memory(one) for name, one in leaves.items()}, {"format": "pt"}
    )
    return (folder / "made.safetensors").read_bytes()


OPERATIONS = [bytes([code]) for code in range(256)]
# Operations with an argument, which a random byte alone rarely makes.
OPERATIONS += [
    b"K\x01",
    b"h\x00",
    b"h\x01",
    b"q\x00",
    b"q\x01",
    b"\x94",
    b"X\x01\x00\x00\x00a",
    b"U\x07storage",
    b"U\x010",
]
OPERATIONS += [
    b"ctorch\nFloatStorage\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ccollections\nOrderedDict\n",
    b"cx\ny\n",
]
OPERATIONS += [b"(U\x07storagectorch\nFloatStorage\nU\x010U\x03cpuK\x04tQ", b"K\x02\x85", b"(K\x02K\x02t"]


def damaged(content, draw):
    """The content with a few bytes changed, left out, doubled, or cut off."""
    content = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(content))
        match draw.randrange(5):
            case 0:
                content[at] = draw.randrange(256)
            case 1:
                del content[at : at + draw.randint(1, 9)]
            case 2:
                content[at:at] = content[max(at - draw.randint(1, 40), 0) : at]
            case 3:
                content[at:at] = draw.choice(OPERATIONS)
            case _:
                content[at : at + 4] = draw.choice([b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", bytes(4)])
        if len(content) < 2:
            break
    return bytes(content[: draw.randrange(len(content))] if draw.random() < 0.1 and content else content)


def fuzzed(seed, sources, folder):
    """Read one made-up file: one of the sources damaged, or random operations of a pickle."""
    draw = random.Random(seed)
    kind = draw.choice(["zip", "old", "safetensors", "operations", "operations"])
    if kind == "operations":
        content = zipped(b"\x80\x02" + b"".join(draw.choices(OPERATIONS, k=draw.randint(1, 60))) + b".")
    else:
        content = damaged(sources[kind], draw)
    path = folder / "x.pth"
    path.write_bytes(content)
    for read in (read_safetensors,) if kind == "safetensors" else (read_torch, read_payload):
        try:
            read(path)
        except CheckpointError:
            continue


def sources_of(folder):
    return {
        "zip": (FOLDER / "zip.pth").read_bytes(),
        "old": (FOLDER / "old.pth").read_bytes(),
        "safetensors": made_safetensors(folder),
    }


def test_nothing_but_the_projects_error_comes_out_of_a_damaged_file(tmp_path):
    sources = sources_of(tmp_path)
    for seed in range(600):
        try:
            fuzzed(seed, sources, tmp_path)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
