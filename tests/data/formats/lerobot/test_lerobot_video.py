"""Single frames of a video, found and decoded packet by packet, against PyAV reading the file from its beginning."""

import os
import sys

import av
import numpy as np
import pytest

from openpi_train.data.formats.lerobot import lerobot_video
from openpi_train.data.formats.lerobot.encode import encode, open_encoders

# B frames in long groups; groups that refer to each other (open ones); hidden frames; what LeRobot writes.
ENCODINGS = {
    "libx264": {"g": "12", "bf": "3"},
    "libx265": {"x265-params": "log-level=none:open-gop=1:keyint=8:min-keyint=8:scenecut=0:bframes=3:b-adapt=0"},
    "libvpx-vp9": {"g": "9", "auto-alt-ref": "1", "lag-in-frames": "8"},
    "libsvtav1": {"g": "2", "crf": "30", "preset": "12"},
}
NUM_FRAMES = 30


@pytest.mark.parametrize("codec", ENCODINGS)
def test_every_frame_of_every_encoding_is_the_one_that_reading_from_the_beginning_gives(tmp_path, codec):
    path = tmp_path / "clip.mp4"
    random = np.random.default_rng(0)
    noise = random.integers(0, 60, (48, 64, 3))
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, 10, options=ENCODINGS[codec])
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        open_encoders(container)
        for number in range(NUM_FRAMES):
            picture = (np.roll(noise, 2 * number, axis=1) + 6 * number).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24")))
        container.mux(stream.encode())
    with av.open(str(path)) as container:
        expected = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(expected) == NUM_FRAMES
    scanned = lerobot_video.scan(path)
    assert not scanned.problem
    np.testing.assert_allclose(scanned.times, np.arange(NUM_FRAMES) / 10, atol=1e-6)
    if codec == "libx265":  # some frames are shown before the key frame that lies before them, and refer to both sides
        keys = set(scanned.frames[:, 0].tolist())
        assert any(first < key < own for first, own in scanned.frames.tolist() for key in keys)
    content = path.read_bytes()
    for number in random.permutation(NUM_FRAMES):
        first, own = scanned.frames[number]
        rows = scanned.packets[first : own + 1].tolist()
        packets = [(content[offset : offset + size], time) for offset, size, time in rows]
        time = int(scanned.packets[own, 2])
        assert scanned.encoding is not None
        np.testing.assert_array_equal(lerobot_video.decode(scanned.encoding, packets, {time})[time], expected[number])


def test_a_time_finds_the_nearest_frame_within_the_tolerance():
    clip = lerobot_video.Video(None, np.empty((0, 3), np.int64), np.array([0.0, 0.1, 0.2]), np.zeros((3, 2), np.int64))
    times = np.array([0.0, 0.10004, 0.19996, 0.2002, -0.05, 0.15])
    assert clip.find(times, 1e-4).tolist() == [0, 1, 2, -1, -1, -1]
    one = lerobot_video.Video(None, clip.packets, np.array([0.0]), clip.frames[:1])
    assert one.find(np.array([0.0, 0.1]), 1e-4).tolist() == [0, -1]


def test_a_file_that_is_no_video_says_so(tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"no video at all")
    assert "clip.mp4 is not a readable video" in lerobot_video.scan(path).problem


@pytest.mark.skipif(sys.platform != "linux", reason="there are no such priorities to ask for")
def test_an_encoder_takes_no_priority_over_the_rest_of_the_machine(tmp_path):
    def picture(number):
        policies.append({os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")})
        return np.full((48, 64, 3), 8 * number, np.uint8)

    policies = []
    assert encode(tmp_path / "clip.mp4", map(picture, range(20)), (48, 64), fps=10, codec="av1") == 20
    assert len(policies) == 20 and not set().union(*policies) & {os.SCHED_FIFO, os.SCHED_RR}
