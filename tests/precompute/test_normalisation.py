"""Scale and shift of an autoencoder's latents are those of diffusers' pipelines, or the autoencoder is refused."""

import json
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import AutoencoderDC, AutoencoderKL, StableDiffusionXLImg2ImgPipeline

from precompute.config import describe_encoding
from shards.base.errors import RequestError
from shards.format.towers import ImageTower
from tests.fixtures import precompute_config
from tests.tiny import kl
from tests.tiny_towers import dc

KNOWN = "Use the folder of an AutoencoderKL, AutoencoderDC or AutoencoderKLHunyuanImage"
MEAN, STD = [0.5, -1.0, 0.0, 2.0], [2.0, 4.0, 1.0, 0.5]


def tower(models: Path, folder: Path, **changes: Any) -> ImageTower:
    """Describe the VAE in `folder`, with fields of its config.json changed, or removed by None."""
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    config = precompute_config(models, folder, folder / "root", vae=str(folder), buckets=["64x64"])
    return describe_encoding(config).image


@pytest.mark.parametrize(("make", "scale"), [(kl, 0.18215), (dc, 1.0)], ids=["AutoencoderKL", "AutoencoderDC"])
def test_a_missing_scaling_factor_is_the_default_of_its_class(
    make: Any, scale: float, models: Path, tmp_path: Path
) -> None:
    make().save_pretrained(tmp_path / "vae")
    found = tower(models, tmp_path / "vae", scaling_factor=None)
    loaded: Any = {"AutoencoderKL": AutoencoderKL, "AutoencoderDC": AutoencoderDC}[found.class_name]
    assert found.scale == (loaded.from_pretrained(tmp_path / "vae").config.scaling_factor,) * 4 == (scale,) * 4
    assert found.shift == (0.0,) * 4


def test_per_channel_statistics_and_the_scaling_factor_apply_as_in_the_pipeline(models: Path, tmp_path: Path) -> None:
    vae: Any = kl(scaling_factor=0.5, latents_mean=MEAN, latents_std=STD).eval()
    vae.save_pretrained(tmp_path / "vae")
    found = tower(models, tmp_path / "vae")
    pixels = torch.randn(1, 3, 64, 64)
    unused: list[Any] = [None] * 5  # text encoders, tokenizers and U-Net
    pipeline = StableDiffusionXLImg2ImgPipeline(vae, *unused, diffusers.EulerDiscreteScheduler())
    with torch.no_grad():
        vae.register_to_config(force_upcast=False)
        drawn = vae.encode(pixels).latent_dist.sample(torch.Generator().manual_seed(1))
        expected = pipeline.prepare_latents(
            pixels, None, 1, 1, torch.float32, "cpu", torch.Generator().manual_seed(1), add_noise=False
        )
    scale, shift = (torch.tensor(values)[:, None, None] for values in (found.scale, found.shift))
    torch.testing.assert_close((drawn - shift) * scale, expected)


def test_an_autoencoder_class_beyond_the_shipped_families(models: Path, tmp_path: Path) -> None:
    vae: Any = diffusers.AutoencoderKLHunyuanImage(3, 3, 4, (64, 64), 1, 2, 16, scaling_factor=0.75)
    vae.save_pretrained(tmp_path / "vae")
    found = tower(models, tmp_path / "vae")
    assert (found.scale, found.channels, found.downsampling) == ((0.75,) * 4, 4, 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *(
            # even if the constructor of the class has a scaling_factor
            ({"_class_name": name}, f"names the class {name}, so the scale and shift .* are unknown.*{KNOWN}")
            for name in ("AutoencoderKLFlux2", "AutoencoderRAE", "AutoencoderKLTemporalDecoder", "VQModel")
        ),
        ({"_class_name": None}, "has no `_class_name`"),
        ({"scaling_factor": "0.5"}, "has scaling_factor 0.5, so the scale .* is unknown"),
        ({"scaling_factor": 0}, "has scaling_factor 0, .* a number greater than 0"),
        ({"shift_factor": "a"}, "has shift_factor a, which is not a number"),
        ({"latents_mean": MEAN}, "has latents_mean but no latents_std"),
        ({"latents_std": STD}, "has latents_std but no latents_mean"),
        ({"latents_mean": MEAN[:3], "latents_std": STD}, "must have 4 numbers each"),
        ({"latents_mean": MEAN, "latents_std": [1, 1, 0, 1]}, "those of latents_std must be above 0"),
        ({"latents_mean": MEAN, "latents_std": STD, "shift_factor": 0.1}, "both shift_factor and latents_mean"),
    ],
)
def test_a_config_that_leaves_the_normalisation_open_is_refused(
    changes: dict[str, Any], words: str, models: Path, tmp_path: Path
) -> None:
    kl().save_pretrained(tmp_path / "vae")
    with pytest.raises(RequestError, match=words):
        tower(models, tmp_path / "vae", **changes)
