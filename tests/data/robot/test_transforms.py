import pickle
import tracemalloc

import numpy as np
import pytest
from PIL import Image

from openpi_train.data.robot.normalize import NormStats
from openpi_train.data.robot.resize import resize_with_pad
from openpi_train.data.robot.transforms import Normalize, PadDims, ResizeImages, TokenizePrompt, Unnormalize
from openpi_train.data.tokenizers.tokenizer import load_tokenizer

STATS = NormStats(mean=np.ones(3), std=np.full(3, 2.0), q01=np.zeros(3), q99=np.full(3, 4.0))


def test_padding_adds_zeros_and_says_which_dims_are_real():
    row = PadDims(5)({"state": np.ones(3, np.float32), "actions": np.ones((2, 3), np.float32), "prompt": "x"})
    assert row["state"].tolist() == [1, 1, 1, 0, 0]
    assert row["actions"].tolist() == [[1, 1, 1, 0, 0]] * 2
    assert row["dim_mask"].tolist() == [True, True, True, False, False]
    assert row["prompt"] == "x"
    assert "actions" not in PadDims(5)({"state": np.ones(3)})


def test_a_robot_wider_than_the_model_is_an_error():
    with pytest.raises(ValueError, match=r"robot has 7 state dims, the model takes 5: set --model.action-dim 7"):
        PadDims(5)({"state": np.ones(7)})


@pytest.mark.parametrize("form", ["z_score", "quantile"])
def test_normalize_and_unnormalize_are_inverse_in_float32(form):
    row = {"state": np.array([1.0, 2.0, 3.0], np.float32), "actions": np.ones((4, 3), np.float32)}
    normalized = Normalize({"state": STATS, "actions": STATS}, form)(row)
    assert normalized["state"].dtype == np.float32
    back = Unnormalize({"state": STATS, "actions": STATS}, form)(normalized)
    for name, value in row.items():
        np.testing.assert_allclose(back[name], value, rtol=1e-6)
    assert "actions" not in Normalize({"state": STATS, "actions": STATS}, form)({"state": row["state"]})


def test_images_of_a_history_are_resized_and_right_sizes_left_alone():
    images = np.random.default_rng(0).integers(0, 256, (3, 6, 9, 3), np.uint8)
    row = ResizeImages(12)({"image/base_0_rgb": images, "state": np.ones(2)})
    assert row["image/base_0_rgb"].shape == (3, 12, 12, 3)
    assert np.array_equal(row["image/base_0_rgb"][1], resize_with_pad(images[1], 12, 12))
    # 9 wide becomes 12, 6 high becomes 8: two black rows above and below.
    assert not row["image/base_0_rgb"][:, :2].any()
    assert not row["image/base_0_rgb"][:, 10:].any()
    assert row["image/base_0_rgb"][:, 2:10].any(axis=(0, 2, 3)).all()
    assert ResizeImages(12)(row)["image/base_0_rgb"] is row["image/base_0_rgb"]


def test_float_images_are_refused():
    with pytest.raises(ValueError, match="images must be uint8"):
        resize_with_pad(np.zeros((4, 4, 3), np.float32), 8, 8)


def test_prompt_tokens_replace_the_prompt(tokenizer_path):
    tokenizer = load_tokenizer(str(tokenizer_path))
    row = {"prompt": "close the drawer", "state": np.array([0.5, -0.5], np.float32)}
    plain = TokenizePrompt(tokenizer, 40)(row)
    assert "prompt" not in plain
    assert tokenizer.decode(plain["prompt_tokens"][plain["prompt_mask"]]) == "close the drawer\n"
    spelled = TokenizePrompt(tokenizer, 80, discrete_state=True)(row)
    text = tokenizer.decode(spelled["prompt_tokens"][spelled["prompt_mask"]])
    assert text == "Task: close the drawer, State: 192 64;\nAction: "
    past = row | {"state": np.stack([np.zeros(2, np.float32), row["state"]])}
    again = TokenizePrompt(tokenizer, 80, discrete_state=True)(past)
    assert np.array_equal(again["prompt_tokens"], spelled["prompt_tokens"])
    with pytest.raises(ValueError, match="no prompt"):
        TokenizePrompt(tokenizer, 40)({"state": np.ones(2)})


def test_transforms_travel_to_workers(tokenizer_path):
    tokenizer = load_tokenizer(str(tokenizer_path))
    row = {"prompt": "close the drawer", "state": np.ones(3, np.float32), "actions": np.ones((2, 3), np.float32)}
    for transform in (
        TokenizePrompt(tokenizer, 20),
        PadDims(5),
        Normalize({"state": STATS}, "z_score"),
        ResizeImages(8),
    ):
        for name, value in transform(row).items():
            assert np.array_equal(pickle.loads(pickle.dumps(transform))(row)[name], value)


def test_large_images_are_scaled_to_pillows_own_pixels_and_no_copy_of_the_whole_is_made():
    image = np.random.default_rng(0).integers(0, 256, (1200, 1500, 3), np.uint8)
    expected = np.asarray(Image.fromarray(image).resize((100, 80), Image.Resampling.BILINEAR))
    for given in (image, np.moveaxis(np.ascontiguousarray(np.moveaxis(image, -1, 0)), 0, -1)):
        tracemalloc.start()
        scaled = resize_with_pad(given, 80, 100)
        held = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        np.testing.assert_array_equal(scaled, expected)
        assert held < image.nbytes / 2


@pytest.mark.parametrize("size", [(1, 5000), (5000, 1)])
def test_a_picture_that_is_hardly_there_keeps_a_pixel(size):
    resized = resize_with_pad(np.full((*size, 3), 200, np.uint8), 12, 12)
    assert resized.shape == (12, 12, 3)
    assert (resized == 200).all(axis=-1).sum() == 12
