"""Blurring of boxes: against SciPy's Gaussian filter, in upright coordinates, and for any content of the JSON."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.ndimage import gaussian_filter

from precompute.input.reject import Reject
from precompute.pixels.blur import blur, boxes_of
from precompute.pixels.decode import LimitsConfig, PixelsConfig, decode
from shards.format.buckets import Bucket

BOX = (0.25, 0.3, 0.5, 0.6)


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8))


def test_it_is_a_gaussian_blur_that_fades_out_at_the_edges() -> None:
    image = noise(200, 100)
    found = np.asarray(blur(image, [BOX])).astype(float)
    pixels, mask = np.asarray(image).astype(float), np.zeros((100, 200))
    # the box is 50 × 30 pixels at (50, 30), and its longer side determines margin and blur
    mask[25:65, 45:105] = 1
    sigma = 5
    soft = gaussian_filter(mask, sigma)[..., None]
    expected = pixels * (1 - soft) + gaussian_filter(pixels, (sigma, sigma, 0)) * soft
    assert np.abs(found - expected).mean() < 1 and np.abs(found - expected).max() < 16
    np.testing.assert_array_equal(found[:5], pixels[:5])
    assert found[35:55, 60:90].std() < pixels.std() / 8


def test_no_boxes_no_change() -> None:
    image = noise(20, 10)
    assert blur(image, []) is image


@pytest.mark.parametrize("format", ["PNG", "TIFF"])  # Pillow itself rotates TIFFs
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_rotated_image_is_blurred_as_stored_and_upright(orientation: int, format: str) -> None:
    bucket = Bucket(64, 64)
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    noise(64, 64).save(file, format, exif=exif)
    arguments = (file.getvalue(), [bucket], PixelsConfig(), LimitsConfig())
    sharp, found = decode(*arguments).pixels[bucket], decode(*arguments, (), [BOX]).pixels[bucket]
    upright = (slice(22, 36), slice(18, 30))
    assert found[upright].std() < sharp[upright].std() / 2
    stored = Image.fromarray((found != sharp).any(axis=2))
    back = {1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}[orientation]
    changed = np.asarray(stored if back is None else stored.transpose(Image.Transpose(back)))
    assert changed[22:36, 18:30].mean() > 0.9
    assert (found == sharp).any()


@pytest.mark.parametrize("value", [[], [[0, 0, 1, 1]], "[[0.1, 0.2, 0.3, 0.4]]", [[-0.1, 0, 1.2, 1]]])
def test_boxes(value: object) -> None:
    assert all(len(box) == 4 for box in boxes_of({"faces": value}, "faces"))
    assert boxes_of({"faces": value}, None) == []


@pytest.mark.parametrize(
    "value",
    [
        "none",
        "[" * 5000,
        None,
        {},
        3,
        [[0, 0, 1]],
        [[9, 9, 50, 50]],
        [[0.5, 0, 0.1, 1]],
        [["0", 0, 1, 1]],
        [[float("nan")] * 4],
    ],
)
def test_anything_else_is_rejected(value: object) -> None:
    with pytest.raises(Reject) as caught:
        boxes_of({"faces": value}, "faces")
    assert caught.value.reason == "bad_boxes"


def test_a_sample_that_does_not_say_where_its_faces_are_is_rejected() -> None:
    with pytest.raises(Reject, match="the sample has no faces; for an image without boxes, it is an empty list"):
        boxes_of({"face": []}, "faces")


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists, max_leaves=10))
def test_any_json_gives_boxes_or_a_reject(value: object) -> None:
    try:
        boxes = boxes_of({"faces": value}, "faces")
    except Reject:
        return
    blur(noise(12, 8), boxes)
