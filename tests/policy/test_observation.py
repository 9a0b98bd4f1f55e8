"""What openpi's examples send for ALOHA, DROID and LIBERO is understood as it is; no model is needed for that."""

import tracemalloc

import numpy as np
import pytest

from openpi_train.data.robot.windows import WindowShape
from openpi_train.policy.observation import ObservationError, ObservationForm, _tell_overshoot, stack_history
from openpi_train.robots.aloha import Aloha
from openpi_train.robots.bridge import Bridge
from openpi_train.robots.droid import Droid
from openpi_train.robots.libero import Libero
from openpi_train.robots.ur5 import UR5

RANDOM = np.random.default_rng(0)


def image(*shape):
    return RANDOM.integers(0, 256, shape, np.uint8)


def form(robot, **options):
    options = {"window": WindowShape(horizon=4), "image_size": (224, 224), "reads_prompt": True, **options}
    return ObservationForm(robot=robot, **options)


def aloha():
    names = ("cam_high", "cam_low", "cam_left_wrist", "cam_right_wrist")
    return {"state": RANDOM.uniform(size=14), "images": {name: image(3, 6, 8) for name in names}, "prompt": "go"}


def droid():
    return {
        "observation/exterior_image_1_left": image(6, 8, 3),
        "observation/wrist_image_left": image(6, 8, 3),
        "observation/joint_position": RANDOM.uniform(size=7),
        "observation/gripper_position": RANDOM.uniform(size=1),
        "prompt": "go",
    }


def libero():
    return {
        "observation/image": image(6, 8, 3),
        "observation/wrist_image": image(6, 8, 3),
        "observation/state": RANDOM.uniform(size=8),
        "prompt": "go",
    }


def ur5():
    gripper = np.float64(0.5)
    return {"joints": np.arange(6), "gripper": gripper, "base_rgb": image(6, 8, 3), "wrist_rgb": image(6, 8, 3)}


def test_alohas_images_have_channels_first_and_one_camera_more():
    sent = aloha()
    row, state = form(Aloha(adapt_to_pi=False)).row(sent)
    np.testing.assert_array_equal(row["image/base_0_rgb"], np.moveaxis(sent["images"]["cam_high"], 0, -1))
    np.testing.assert_array_equal(row["image/right_wrist_0_rgb"].shape, (6, 8, 3))
    np.testing.assert_array_equal(state, sent["state"].astype(np.float32))


def test_alohas_state_comes_to_the_model_in_its_units_and_back_to_the_client_in_the_robots():
    sent, robot = aloha(), Aloha()
    row, state = form(robot).row(sent)
    np.testing.assert_array_equal(row["state"], robot.to_model(sent["state"].astype(np.float32))[0])
    assert not np.allclose(row["state"], state)


def test_droids_state_comes_in_parts():
    sent = droid()
    row, state = form(Droid()).row(sent)
    parts = sent["observation/joint_position"], sent["observation/gripper_position"]
    np.testing.assert_array_equal(state, np.concatenate(parts).astype(np.float32))
    np.testing.assert_array_equal(row["image/left_wrist_0_rgb"], sent["observation/wrist_image_left"])
    with pytest.raises(ObservationError, match="lacks 'observation/gripper_position'"):
        form(Droid()).row({key: value for key, value in sent.items() if "gripper" not in key})
    with pytest.raises(ObservationError, match=r"'observation/joint_position' \[6\].*expected \[8\]: joint_1_rad"):
        form(Droid()).row({**sent, "observation/joint_position": np.zeros(6)})


def test_liberos_names_have_a_folder_that_its_dataset_has_not():
    sent = libero()
    row, state = form(Libero()).row(sent)
    np.testing.assert_array_equal(row["image/base_0_rgb"], sent["observation/image"])
    np.testing.assert_array_equal(state, sent["observation/state"].astype(np.float32))


def test_a_part_may_be_a_scalar_and_the_prompt_may_be_known():
    row, state = form(UR5(), prompt="fold the towel").row(ur5())
    np.testing.assert_array_equal(state, [0, 1, 2, 3, 4, 5, 0.5])
    assert row["prompt"] == "fold the towel"
    with pytest.raises(ObservationError, match="lacks 'prompt'"):
        form(UR5()).row(ur5())


@pytest.mark.parametrize("robot", [Aloha(), Bridge(), Droid(), Libero(), UR5()], ids=lambda robot: type(robot).__name__)
@pytest.mark.parametrize("history", [1, 2])
def test_a_request_can_be_built_from_the_spec_alone(robot, history):
    spec = form(robot, window=WindowShape(horizon=4, history=history)).spec()
    built = {key: "go" if one["dtype"] == "str" else np.zeros(one["shape"], one["dtype"]) for key, one in spec.items()}
    row, state = form(robot, window=WindowShape(horizon=4, history=history)).row(built)
    assert {f"image/{slot}" for slot in robot.cameras} <= row.keys()
    assert state.shape == (len(robot.state_names),)


@pytest.mark.parametrize("value", [memoryview(bytes(7)), bytes(7), [b"a"] * 7, "1234567"])
def test_a_state_of_bytes_or_text_is_none(value):
    with pytest.raises(ObservationError, match=r"'state' is .*; expected numbers"):
        form(Bridge()).row({"observation/image_0": image(6, 8, 3), "state": value, "prompt": "go"})


# Numpy would give every text of a list the length of the longest, and every number the width of the widest.
@pytest.mark.parametrize(
    "value",
    [
        ["a"] * 2000 + ["x" * 20_000],
        [["a"], *[[["a"]]] * 2000, "x" * 20_000],
        ["a"] * 2000 + [np.array("x" * 20_000)],
        [0] * 2000 + [np.array("x" * 20_000)],
        [np.zeros(20_000, np.int8)] * 100 + [np.zeros(20_000)],
        [np.zeros(20_000, np.int8)] * 100 + [0.5],
    ],
    ids=["texts", "nested", "an array of text", "numbers and text", "arrays of two types", "arrays and a number"],
)
def test_lists_of_unlike_values_are_refused_before_they_are_joined(value):
    tracemalloc.start()
    with pytest.raises(ObservationError, match="'state' is a list; expected numbers"):
        ask(form(Bridge()), state=value)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held < 1 << 20


def test_lists_of_numbers_and_of_arrays_alike_are_read():
    for state in ([0, 1.5, *[np.float32(2)] * 5], tuple(np.array(float(n)) for n in range(7))):
        np.testing.assert_array_equal(ask(form(Bridge()), state=state)[1], np.array(state, np.float32))
    rows = [np.full((8, 3), n, np.uint8) for n in range(6)]
    row, _ = ask(form(Bridge()), **{"observation/image_0": rows})
    np.testing.assert_array_equal(row["image/base_0_rgb"], np.stack(rows))


def test_a_misspelt_key_is_guessed():
    with pytest.raises(ObservationError, match=r"lacks 'observation/image_0' \(is 'observation/image0' meant for it"):
        form(Bridge()).row({"observation/image0": image(6, 8, 3), "state": np.zeros(7), "prompt": "go"})


def test_a_key_that_is_expected_itself_is_no_guess_for_another():
    two = Bridge(cameras={"base_0_rgb": "observation/image_0", "left_wrist_0_rgb": "observation/image_1"})
    with pytest.raises(ObservationError, match=r"lacks 'observation/image_1'\. It has observation/image_0"):
        form(two).row({"observation/image_0": image(6, 8, 3), "state": np.zeros(7), "prompt": "go"})


def nested(depth, key="a"):
    return {key: nested(depth - 1, key)} if depth else {}


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (nested(900), "more than 8 deep"),
        (nested(5, "b" * 100_000), "has 100000 characters"),
        ({f"observation/imag{number}": 0 for number in range(2000)}, "more than 1000 keys"),
        ({"prompt": "\udcff"}, "'prompt' is not valid text"),
        ({"prompt": np.array("\udcff")}, "'prompt' is not valid text"),
    ],
    ids=["deep", "long key", "many keys", "no unicode", "no unicode in an array"],
)
def test_what_no_robot_sends_is_refused_at_once_and_in_few_words(sent, says):
    with pytest.raises(ObservationError, match=says) as refused:
        form(Bridge()).row({"observation/image_0": image(6, 8, 3), "state": np.zeros(7), "prompt": "go", **sent})
    assert len(str(refused.value)) < 300


def ask(form, **changes):
    return form.row({"observation/image_0": image(6, 8, 3), "state": np.zeros(7), "prompt": "go", **changes})


def test_a_picture_with_an_endless_side_is_refused_before_it_is_scaled():
    for shape in ((1, 8193, 3), (8193, 1, 3), (3, 1, 8193)):
        with pytest.raises(ObservationError, match="sides are at most 8192"):
            ask(form(Bridge()), **{"observation/image_0": np.zeros(shape, np.uint8)})
    row, _ = ask(form(Bridge()), **{"observation/image_0": np.zeros((1, 8192, 3), np.uint8)})
    assert row["image/base_0_rgb"].shape == (1, 8192, 3)


def test_a_prompt_that_no_model_reads_is_refused_before_it_becomes_tokens():
    assert ask(form(Bridge()), prompt="x" * 20_000)[0]["prompt"] == "x" * 20_000
    for prompt in ("x" * 20_001, np.array("x" * 20_001)):
        with pytest.raises(ObservationError, match="has 20001 characters, more than 20000"):
            ask(form(Bridge()), prompt=prompt)


def test_fractions_become_bytes_row_by_row_as_openpi_rounds_them():
    fractions = RANDOM.random((2, 512, 512, 3), np.float32)
    seen = form(Bridge(), window=WindowShape(horizon=4, history=2))
    sent = {"observation/image_0": fractions, "state": np.zeros((2, 7))}
    tracemalloc.start()
    row, _ = ask(seen, **sent)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(row["image/base_0_rgb"], np.floor(fractions * np.float32(255)))
    assert held < fractions.nbytes / 2, "a whole image of products would be as large as what was sent"


def test_fractions_that_overshoot_by_rounding_are_clipped_and_told_once(caplog):
    picture = np.zeros((4, 4, 3))
    picture[0], picture[1], picture[2] = 1 + 1e-6, -1e-6, 1 + 9e-4
    _tell_overshoot.cache_clear()
    for _ in range(2):
        row, _ = ask(form(Bridge()), **{"observation/image_0": picture})
        assert row["image/base_0_rgb"][:, 0, 0].tolist() == [255, 0, 255, 0]
    assert caplog.text.count("'observation/image_0' has fractions below 0 or above 1, by at most 0.001: clipped") == 1
    for wrong in (1.01, -0.01, np.nan):
        picture[3] = wrong
        with pytest.raises(
            ObservationError, match=r"'observation/image_0' is float64 from .* or fractions from 0 to 1"
        ):
            ask(form(Bridge()), **{"observation/image_0": picture})


@pytest.mark.parametrize("kind", [np.int64, np.uint16, np.int32])
def test_whole_numbers_of_any_type_are_pixels(kind):
    row, _ = ask(form(Bridge()), **{"observation/image_0": np.full((4, 4, 3), 200, kind)})
    assert row["image/base_0_rgb"].dtype == np.uint8 and (row["image/base_0_rgb"] == 200).all()
    with pytest.raises(ObservationError, match="from 256 to 256"):
        ask(form(Bridge()), **{"observation/image_0": np.full((4, 4, 3), 256, kind)})


def test_parts_of_a_state_that_are_too_large_are_not_joined():
    sent = droid() | {"observation/joint_position": np.zeros(1 << 20, np.float32)}
    tracemalloc.start()
    with pytest.raises(ObservationError, match=r"'observation/joint_position' \[1048576\].*expected \[8\]"):
        form(Droid()).row(sent)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert held < 1 << 20


def test_a_key_that_is_no_text_is_told_in_few_words():
    with pytest.raises(ObservationError, match="is a bytes; keys must be strings") as refused:
        ask(form(Bridge()), more={bytes(250): 1})
    assert len(str(refused.value)) < 100


def test_history_is_stacked_as_training_pads_it():
    steps = [{"state": np.full(2, n), "nested": {"image": np.full((2, 2, 3), n)}, "prompt": "go"} for n in range(4)]
    stacked = stack_history(steps[:2], 3)
    assert stacked["state"][:, 0].tolist() == [0, 0, 1] and stacked["prompt"] == "go"
    assert stack_history(steps, 3)["nested/image"][:, 0, 0, 0].tolist() == [1, 2, 3]
    assert stack_history(steps, 1)["state"].tolist() == [3, 3]
    with pytest.raises(ObservationError, match="no observations to stack"):
        stack_history([], 3)
