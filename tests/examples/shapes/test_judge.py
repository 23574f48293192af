"""The judge on ground truth, on VAE reconstructions, and on images without a shape."""

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image, ImageOps

from examples.shapes.judge import NOTHING, judge
from examples.shapes.models import MODELS
from examples.shapes.scenes import COLOURS, OUTLINES, Scene, draw_mask, draw_scene, sample_scene

ALL_COMBINATIONS = tuple((colour, shape) for colour in COLOURS for shape in OUTLINES)


def ground_truth(num_pictures: int, side: int) -> tuple[list[Scene], np.ndarray]:
    """Return scenes of every combination, and their images resized as in stage 1: (num_pictures, side, side, 3)."""
    rng = np.random.default_rng(side)
    scenes = [sample_scene(rng, (ALL_COMBINATIONS[i % len(ALL_COMBINATIONS)],)) for i in range(num_pictures)]
    pictures = []
    for scene in scenes:
        width, height = rng.integers(side, 2 * side, size=2).tolist()
        drawn = draw_scene(scene, width, height, rng)
        pictures.append(np.asarray(ImageOps.fit(drawn, (side, side), Image.Resampling.BICUBIC)))
    return scenes, np.stack(pictures)


def accuracy(scenes: list[Scene], pictures: np.ndarray) -> float:
    verdicts = [judge(picture) for picture in pictures]
    return float(np.mean([(v.colour, v.shape) == (s.colour, s.shape) for v, s in zip(verdicts, scenes, strict=True)]))


def test_correct_on_ground_truth() -> None:
    """For 64 px, the next test implies this."""
    assert accuracy(*ground_truth(160, 128)) >= 0.99


@pytest.mark.parametrize(("side", "num_pictures"), [(64, 128), (128, 32)])
def test_correct_after_a_round_trip_through_the_vae(side: int, num_pictures: int) -> None:
    scenes, pictures = ground_truth(num_pictures, side)
    vae = AutoencoderKL.from_pretrained(MODELS / "vae")
    pixels = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        decoded = [vae.decode(vae.encode(batch).latent_dist.mean).sample for batch in pixels.split(32)]
    rounded = ((torch.cat(decoded).clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    assert accuracy(scenes, rounded) >= 0.99


@pytest.mark.parametrize("side", [64, 128])
def test_recognises_nothing_in_noise_and_blank_images(side: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        assert judge(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)) == NOTHING
        coarse = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        assert judge(np.asarray(Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC))) == NOTHING
        assert judge(np.broadcast_to(rng.integers(0, 256, 3, dtype=np.uint8), (side, side, 3))) == NOTHING


def test_two_shapes_are_not_recognised() -> None:
    picture = np.full((64, 64, 3), COLOURS["red"], dtype=np.uint8)
    masks = [draw_mask("circle", 64, 64, np.array(middle), 11) for middle in ((18, 18), (44, 44))]
    picture[np.maximum(*masks) < 128] = 246
    assert judge(picture).shape is None


def test_an_unknown_colour_is_not_recognised() -> None:
    picture = np.full((64, 64, 3), 20, dtype=np.uint8)
    picture[20:44, 20:44] = 246
    assert judge(picture).colour is None and judge(picture).shape == "square"
