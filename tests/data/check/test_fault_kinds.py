"""Kinds of faults in demonstrations: each is found alone, with its place, and nothing is found in sound episodes."""

import dataclasses
import io
import logging

import av
import numpy as np
import pytest
from made_episodes import CAMERA, FPS, STATE, WRITERS, Hand, InMemory, sound

from openpi_train.data.check.examined import ExaminedData, columns_read
from openpi_train.data.check.fault_kinds import examine
from openpi_train.data.core.findings import Finding
from openpi_train.data.core.source import About, BadRecord
from openpi_train.data.formats.detection import source_at
from openpi_train.robots.bridge import Bridge
from openpi_train.robots.robotwin import RoboTwin


def not_finite(episodes):
    episodes[5].state[7, 1] = np.nan


def constant(episodes):
    for one in episodes:
        one.state[:, 2] = 0.25


def dead_at_zero(episodes):
    for one in episodes:
        one.state[:, 2] = 0


def stuck(episodes):
    episodes[3].state[:, 1] = episodes[3].state[0, 1]


def stuck_from_the_middle(episodes):
    episodes[3].state[12:, 1] = episodes[3].state[12, 1]


def stuck_for_a_while(episodes):
    episodes[4].state[6:28, 0] = episodes[4].state[6, 0]


def doubled(episodes):
    for one in episodes:
        for name in ("state", "action", "frames"):
            setattr(one, name, np.repeat(getattr(one, name), 2, axis=0)[: len(one.time)])


def doubled_for_a_while(episodes):
    for name in ("state", "action"):
        values = getattr(episodes[6], name)
        values[10:20] = np.repeat(values[10:20:2], 2, axis=0)


def zero_actions(episodes):
    episodes[2].action[:] = episodes[9].action[:] = 0


def some_in_degrees(episodes):
    for one in (episodes[5], episodes[11]):
        one.state[:] = np.rad2deg(one.state)
        one.action[:] = np.rad2deg(one.action)


def clipped_at_both_ends(episodes):
    for number, one in enumerate(episodes):
        one.state[:, 0] = np.clip(np.sin(np.arange(len(one.state)) / 3 + number), -0.7, 0.7)  # half of it is


def clipped(episodes):
    limit = np.quantile(np.concatenate([one.state[:, 0] for one in episodes]), 0.9)
    for one in episodes:
        one.state[:, 0] = np.minimum(one.state[:, 0], limit)


def spike(episodes):
    episodes[12].state[9, 0] = 5000.0


def next_states(episodes):
    for one in episodes:
        one.action[:-1] = one.state[1:]


def present_states(episodes):
    for one in episodes:
        one.action[:] = one.state


def previous_states(episodes):
    for one in episodes:
        one.action[1:] = one.state[:-1]


def copy(episodes):
    episodes[7] = dataclasses.replace(episodes[2])


def near_copy(episodes):
    cut = {name: getattr(episodes[2], name)[4:] for name in ("state", "action", "success")}
    jitter = np.random.default_rng(1).normal(0, 1e-7, cut["state"].shape).astype(np.float32)
    own = {"time": np.arange(len(cut["state"])) / FPS, "frames": episodes[7].frames[: len(cut["state"])]}
    episodes[7] = dataclasses.replace(episodes[7], **(cut | {"state": cut["state"] + jitter} | own))


def no_success(episodes):
    episodes[4].success[:] = episodes[6].success[:] = False


def dropped(episodes):
    episodes[6].time[10:] += 3 / FPS


def jump(episodes):
    episodes[8].time[10:] += 7.4 / FPS


def long_pause(episodes):
    episodes[8].time[10:] += 600


def no_time(episodes):
    episodes[8].time[10] = np.nan


def cut_off(episodes):
    for name in ("state", "action", "time", "success", "frames"):
        setattr(episodes[2], name, getattr(episodes[2], name)[-1:])


def backwards(episodes):
    episodes[9].time[12:] -= 1 / FPS


def other_script(episodes):
    episodes[1].prompt = "толкни красный блок"


def black(episodes):
    episodes[10].frames[:] = 3


def one_colour(episodes):
    episodes[10].frames[:] = 200


def frozen(episodes):
    episodes[11].frames[:] = episodes[11].frames[0]


# Kind, count, and what the place says.
ALONE = {
    not_finite: ("not finite", 1, "episode 5, step 7 of"),
    constant: ("constant dims", 1, ""),
    dead_at_zero: ("constant dims", 1, ""),
    stuck: ("stuck dims", 1, "episode 3, step 0"),
    stuck_from_the_middle: ("stuck dims", 1, "episode 3, step 12"),
    stuck_for_a_while: ("stuck dims", 1, "episode 4, step 6"),
    doubled: ("steps doubled", None, "episode 0, step 1"),
    doubled_for_a_while: ("steps doubled", 5, "episode 6, step 11"),
    zero_actions: ("zero actions in some episodes", 2, "episode 2, step 0"),
    clipped: ("clipped sensors", None, ""),
    clipped_at_both_ends: ("clipped sensors", None, ""),
    some_in_degrees: ("units mixed", 2, "episode 5, step 0"),
    spike: ("spike", 1, "episode 12, step 9"),
    next_states: ("actions are the next states", None, ""),
    present_states: ("actions are the present states", None, ""),
    previous_states: ("actions are the previous states", None, ""),
    copy: ("copies of episodes", 1, "episode 7, step 0"),
    near_copy: ("near-copies of episodes", 1, "episode 7, step 0"),
    no_success: ("flags in some episodes only", 2, "episode 4, step 0"),
    dropped: ("dropped frames", 1, "episode 6, step 10"),
    jump: ("time stamps that jump", 1, "episode 8, step 10"),
    long_pause: ("time stamps that jump", 1, "episode 8, step 10"),
    no_time: ("time stamps that jump", 2, "episode 8, step 10"),
    cut_off: ("episodes of one step", 1, "episode 2, step 0 of 1"),
    backwards: ("time stamps that go back", 1, "episode 9, step 12"),
    other_script: ("languages mixed", 1, "episode 1, step 0"),
    black: ("black pictures", 8, "episode 10, step 0"),
    one_colour: ("pictures of one colour", 8, "episode 10, step 0"),
    frozen: ("frozen pictures", None, "episode 11"),
}
# Faults that lie in different episodes can be in one dataset.
TOGETHER = (not_finite, stuck, spike, near_copy, no_success, dropped, jump, backwards, other_script, black, frozen)


def found(source, robot=None, **options):
    return {
        finding.kind: finding for finding in examine(ExaminedData(name="made", source=source, robot=robot, **options))
    }


@pytest.mark.parametrize("fault", ALONE, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_with_its_place_and_nothing_else_is(fault):
    kind, count, where = ALONE[fault]
    episodes = sound()
    fault(episodes)
    findings = found(InMemory(episodes))
    assert set(findings) == {kind}
    assert count in (None, findings[kind].count)
    assert where in findings[kind].where


@pytest.mark.parametrize("form", WRITERS)
def test_nothing_is_found_in_sound_data_of_any_format(form, tmp_path, caplog):
    path = WRITERS[form](tmp_path / "made", sound())
    config = dataclasses.replace(source_at(str(path)), cache_dir=str(tmp_path / "index"))
    assert not found(config.open())
    assert not [line for line in caplog.records if line.levelno >= logging.WARNING]


@pytest.mark.parametrize("form", WRITERS)
def test_faults_are_found_in_every_format_and_told_at_its_opening(form, tmp_path, caplog):
    episodes = sound()
    for fault in TOGETHER:
        fault(episodes)
    path = WRITERS[form](tmp_path / "made", episodes)
    config = dataclasses.replace(source_at(str(path)), cache_dir=str(tmp_path / "index"))
    findings = found(config.open())
    assert set(findings) == {ALONE[fault][0] for fault in TOGETHER}
    for fault in TOGETHER:
        kind, count, where = ALONE[fault]
        assert count in (None, findings[kind].count)
        assert where in findings[kind].where and str(tmp_path) in findings[kind].where
    # The second opening reads no column, and tells the same.
    caplog.clear()
    caplog.set_level(logging.INFO)
    assert {finding.kind for finding in config.open().findings} <= set(findings)
    told = [(line.getMessage(), line.levelno) for line in caplog.records if line.levelno >= logging.INFO]
    for kind in ("not finite", "stuck dims", "near-copies of episodes", "dropped frames", "languages mixed"):
        level = logging.INFO if kind == "languages mixed" else logging.WARNING  # it is a note
        assert [found for line, found in told if kind in line] == [level]
    assert not any("black" in line or "one colour" in line for line, _ in told)  # no picture is read for it


@pytest.mark.parametrize("form", WRITERS)
@pytest.mark.parametrize("fault", [clipped, next_states, constant, copy], ids=lambda fault: fault.__name__)
def test_faults_of_whole_datasets_are_found_in_every_format(form, fault, tmp_path):
    episodes = sound()
    fault(episodes)
    path = WRITERS[form](tmp_path / "made", episodes)
    config = dataclasses.replace(source_at(str(path)), cache_dir=str(tmp_path / "index"))
    assert set(found(config.open())) == {ALONE[fault][0]}


def test_a_gripper_is_compared_with_the_range_that_its_robot_reads():
    assert not found(InMemory(sound()), Hand())
    percent, metres = sound(), sound()
    for one in percent:
        one.state[:, -1] *= 100
    finding = found(InMemory(percent), Hand())["gripper outside its range"]
    assert "state: gripper_fraction from 0 to 100, where its robot reads 0 to 1" in finding.what
    assert "episode 0, step 0 of" in finding.where
    for one in metres:
        one.state[:, -1] *= 0.04
    assert set(found(InMemory(metres), Hand())) == {"gripper uses little of its range"}


def test_what_a_reader_told_is_shown_and_what_opening_looked_for_is_looked_for_again():
    source = InMemory(sound())
    told = {"count": 3, "unit": "episodes", "training": "", "remedy": ""}
    source.findings = [Finding(kind="no instruction", **told), Finding(kind="stuck dims", **told)]
    assert set(found(source)) == {"no instruction"}


def test_zeros_in_state_and_action_alike_are_padding():
    episodes = sound()
    for one in episodes:
        one.state[:, 2] = one.action[:, 2] = 0
    source = InMemory(episodes)
    assert not found(source)
    source.about = lambda: About(dim_names={STATE: ("x", "y", "z", "gripper")})
    assert "observation/state: z = 0" in found(source)["constant dims"].what


def test_next_states_are_no_fault_where_the_robots_data_have_them_by_convention():
    episodes = sound()
    next_states(episodes)

    class ByConvention(Hand):
        actions_are_next_states = True

    assert set(found(InMemory(episodes), Hand())) == {"actions are the next states"}
    assert not found(InMemory(episodes), ByConvention())
    assert RoboTwin.actions_are_next_states


def test_a_dim_that_seldom_moves_has_no_spikes():
    episodes = sound()
    for one in episodes:
        one.state[:, 0] = 1e-6 * np.random.default_rng(0).normal(size=len(one.state))
    for one in episodes[::4]:
        one.state[5:9, 0] = 1
    assert not found(InMemory(episodes))


@pytest.mark.parametrize(
    ("kind", "width"), [("float16", 3), ("int64", 3), ("uint8", 3), ("float32", (2, 7)), ("float32", ())]
)
def test_columns_of_any_type_and_shape_are_measured(kind, width):
    source = InMemory(sound())
    shape = (source.num_steps, *([width] if isinstance(width, int) else width))
    walk = np.cumsum(np.random.default_rng(0).integers(-2, 3, shape), axis=0)
    source.columns[STATE] = (walk - walk.min()).astype(kind)
    assert not found(source)
    source.columns[STATE][:] = 1
    assert set(found(source)) == {"constant dims"}


@pytest.mark.filterwarnings("error")
def test_absurd_numbers_break_nothing():
    source = InMemory(sound())
    source.columns = {STATE: source.columns[STATE].astype(np.float64) * 1e300, "action": source.columns["action"]}
    assert not found(source)
    source.columns[STATE] = np.full((source.num_steps, 4), np.nan)
    assert set(found(source)) == {"not finite"}
    source.columns = {}
    assert not found(source)


def test_a_hand_at_its_stop_and_a_start_at_the_end_of_the_range_are_not_clipped():
    episodes = sound()
    for one in episodes:
        one.state[:8, 0] = 2.0  # all begin at home, for a while
    assert not found(InMemory(episodes))


def test_flags_and_cameras_of_the_robot_are_compared_with_the_dataset():
    robot = Hand(cameras={"base_0_rgb": "observation/image_0"})
    finding = found(InMemory(sound()), robot)["missing cameras"]
    assert "observation/image_0 (base_0_rgb)" in finding.what and CAMERA in finding.what
    # A camera that no robot reads is not looked at.
    episodes = sound()
    black(episodes)
    assert not found(InMemory(episodes), Hand())


def test_a_robot_that_does_not_fit_hides_no_other_fault():
    episodes = sound()
    black(episodes)
    findings = found(InMemory(episodes), Bridge(cameras={"base_0_rgb": CAMERA}))
    assert set(findings) == {"robot does not fit", "black pictures"}
    assert "reads 7 dims" in findings["robot does not fit"].what


def test_only_the_columns_that_a_robot_reads_are_looked_at():
    source = InMemory(sound())
    source.columns["observation/state_of_another"] = np.full((source.num_steps, 3), 7.0)
    assert set(found(source)) == {"constant dims"}
    assert columns_read(Hand(), source) == {STATE, "action"}
    assert not found(source, Hand())


def test_a_picture_that_cannot_be_read_is_a_finding():
    source = InMemory(sound())
    read = source.frames

    def frames(steps, camera):
        if steps[0] == 0:
            raise BadRecord("a.parquet, row 0: torn")
        return read(steps, camera)

    source.frames = frames
    finding = found(source)["unreadable pictures"]
    assert finding.count == 1 and finding.where == "a.parquet, row 0: torn"


def test_a_camera_that_was_recorded_twice_is_found():
    source = InMemory(sound())
    source.cameras = (CAMERA, "observation/images/wrist")
    finding = found(source)["cameras alike"]
    assert (finding.count, finding.total) == (128, 128) and "front and observation/images/wrist" in finding.what


def test_a_hand_that_the_camera_does_not_see_freezes_no_picture():
    episodes = sound()
    one = episodes[11]
    one.state[10:20, :-1] = one.state[10, :-1]
    one.state[10:15, -1], one.state[15:20, -1] = 0, 1
    one.frames[10:20] = one.frames[10]
    source = InMemory(episodes)
    source.about = lambda: About(dim_names={STATE: ("x", "y", "z", "gripper")})
    assert not found(source)


def recoded(frames, **options):
    """Frames as H.264 keeps them, and PyAV reads them."""
    content = io.BytesIO()
    with av.open(content, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=FPS, options=options)
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    content.seek(0)
    with av.open(content, "r") as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


@pytest.mark.parametrize(("gop", "quality"), [("2", "30"), ("5", "23")])
def test_a_video_that_freezes_is_found_though_its_encoder_changes_it(gop, quality):
    episodes, random = sound(6, 40), np.random.default_rng(0)
    background = (128 + 60 * np.sin(np.arange(64) / 9)[:, None, None] + random.normal(0, 6, (64, 64, 3))).astype(
        np.uint8
    )
    for number, one in enumerate(episodes):
        one.state[:, :2] = one.state[:1, :2] + np.linspace(0, 1, len(one.state))[:, None]
        one.frames = np.repeat(background[None], len(one.state), axis=0)
        for step in range(len(one.state)):
            place = 10 if number == 4 and step >= 10 else step  # frozen from there on
            one.frames[step, 24:36, place : place + 8] = 230
        one.frames = recoded(one.frames, g=gop, crf=quality)
    finding = found(InMemory(episodes))["frozen pictures"]
    still = episodes[4].frames
    seen = still[[12, 18, 24, 31, 37, 43]]
    assert (seen[1:] != seen[:-1]).any()  # not to the last pixel
    assert finding.count >= 4 and "episode 4" in finding.where
    assert set(found(InMemory(episodes[:4]))) == set()
    episodes[5].frames = recoded(np.zeros_like(episodes[5].frames), g=gop, crf=quality)
    assert set(found(InMemory(episodes))) == {"frozen pictures", "black pictures"}


def test_still_robots_have_still_pictures():
    episodes = sound()
    for name in ("state", "frames"):
        values = getattr(episodes[11], name)
        values[10:20] = values[10]
    assert not found(InMemory(episodes))


def test_a_smaller_reach_in_some_episodes_is_no_other_unit():
    episodes = sound()
    for one in (episodes[5], episodes[11]):
        one.state[:] = one.state / 6
    assert "units mixed" not in found(InMemory(episodes))


def test_rows_that_are_equal_where_the_arm_has_come_to_rest_are_not_doubled():
    episodes = sound()
    one = episodes[6]
    for start in range(0, len(one.state) - 4, 5):
        one.state[start + 1] = one.state[start + 2] = one.state[start] + 1e-4
        one.action[start + 2] = one.action[start + 1]
    assert "steps doubled" not in found(InMemory(episodes))


def test_idle_episodes_of_states_that_are_relative_to_their_start_have_no_other_unit():
    episodes, random = sound(length=40), np.random.default_rng(5)
    for one in episodes:
        one.state[:, :3] -= one.state[:1, :3]
    degrees, idle = episodes[6], (3, 9)
    for one in (episodes[number] for number in idle):
        one.state[:, :3] = random.normal(0, 2e-4, one.state[:, :3].shape)
        one.action[:, :3] = 0
    assert "units mixed" not in found(InMemory(episodes))
    episodes = [one for number, one in enumerate(episodes) if number not in idle]
    degrees.state[:], degrees.action[:] = np.rad2deg(degrees.state), np.rad2deg(degrees.action)
    assert found(InMemory(episodes))["units mixed"].count == 1


def test_a_spike_of_a_dim_in_radians_is_no_unit():
    episodes = sound()
    episodes[12].state[9, 0] = 5000.0
    source = InMemory(episodes)
    source.about = lambda: About(dim_names={STATE: ("a_rad", "b_rad", "c_rad", "gripper")})
    assert set(found(source)) == {"spike"}
    episodes[12].state[:, 0] = np.rad2deg(sound()[12].state[:, 0]) + 90
    other = InMemory(episodes)
    other.about = source.about
    assert set(found(other)) == {"units mixed"}


def wide_arm(episodes):
    """Seven joints, three of which are those of `episodes`."""
    random = np.random.default_rng(9)
    for one in episodes:
        moves = random.normal(0, 0.02, (len(one.state), 7)).astype(np.float32)
        states = random.normal(0, 0.4, 7) + np.cumsum(moves, axis=0)
        one.state, one.action = states.astype(np.float32), moves
    return episodes


@pytest.mark.parametrize("with_actions", [False, True])
def test_degrees_in_some_of_the_dims_are_found(with_actions):
    episodes = wide_arm(sound(length=40))
    assert not found(InMemory(episodes))
    for one in (episodes[2], episodes[7], episodes[8]):
        one.state[:, 2:5] = np.rad2deg(one.state[:, 2:5])
        if with_actions:
            one.action[:, 2:5] = np.rad2deg(one.action[:, 2:5])
    findings = found(InMemory(episodes))
    finding = findings["units mixed"]
    assert finding.count == 3 and "episode 2, step 0" in finding.where
    assert "observation/state[2], observation/state[3], observation/state[4] is about" in finding.what
    assert set(findings) == {"units mixed"}


def test_rotations_that_only_some_tasks_need_have_no_other_unit():
    episodes = wide_arm(sound(length=40))
    for number, one in enumerate(episodes):
        one.state -= one.state[:1]
        if number < 6:  # they rest, and their sensors do not quite
            one.action[:, 3:6] = 0
            one.state[:, 3:6] = np.random.default_rng(number).normal(0, 2e-3, one.state[:, 3:6].shape)
    assert "units mixed" not in found(InMemory(episodes))
    for one in episodes[6:]:  # an operator's hand turns a little where the task needs no turn
        one.state[:, 3:6], one.prompt = 57 * one.state[:, 3:6], "pour"
        one.action[:, 3:6] *= 57
    for one in episodes[:6]:
        one.action[:, 3:6] = np.random.default_rng(1).normal(0, 0.02, one.action[:, 3:6].shape)
        one.state[:, 3:6] = np.cumsum(one.action[:, 3:6], axis=0)
    assert "units mixed" not in found(InMemory(episodes))
    for one in episodes:
        one.prompt = "one task"
    assert "units mixed" in found(InMemory(episodes))


def test_a_dim_that_is_stuck_for_a_while_in_most_episodes_is_found():
    episodes = sound(length=40)
    for one in episodes[:13]:
        one.state[6:28, 1] = one.state[6, 1]
    finding = found(InMemory(episodes))["stuck dims"]
    # Of the 13 those in which the arm is held elsewhere than at its lowest or highest value.
    held = [one for one in episodes[:13] if one.state[:, 1].min() < one.state[6, 1] < one.state[:, 1].max()]
    assert 8 < finding.count <= len(held)


def test_a_dead_band_in_most_episodes_is_how_the_dim_is():
    episodes, random = sound(length=60), np.random.default_rng(2)
    for one in episodes:
        one.action[:, 1] = np.repeat(random.normal(0, 0.02, 3), 30)[: len(one.action)]
        one.action[:, 1] += 0.015 * np.sin(np.arange(len(one.action)))
        one.state[:, 1] = np.repeat(np.cumsum(random.normal(0, 0.1, 10)), 20)[: len(one.state)]
        one.action[0, 1] = 0.2
    assert "stuck dims" not in found(InMemory(episodes))


def test_cameras_that_are_exchanged_in_some_episodes_are_found():
    episodes, random = sound(12), np.random.default_rng(4)
    front, wrist = (random.integers(0, 256, (8, 8, 3)) for _ in range(2))
    pictures = {}
    for camera, scene in ((CAMERA, front), ("observation/images/wrist", wrist)):
        shown = scene + random.normal(0, 20, (InMemory(episodes).num_steps, 8, 8, 3))
        pictures[camera] = np.clip(shown, 0, 255).astype(np.uint8)
    source = InMemory(episodes)
    source.cameras = tuple(pictures)
    source.frames = lambda steps, camera: pictures[camera][steps]
    assert not found(source)
    one, other = pictures.values()
    for number in (4, 9):
        steps = source.steps_of(number)
        rows = slice(steps.start, steps.stop)
        one[rows], other[rows] = other[rows].copy(), one[rows].copy()
    findings = found(source)
    assert set(findings) == {"cameras exchanged"}
    assert findings["cameras exchanged"].count == 2 and "episode 4, step 0" in findings["cameras exchanged"].where
