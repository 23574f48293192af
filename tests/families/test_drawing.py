"""The size of images that an exported pipeline draws by default."""

from collections.abc import Callable

import diffusers

from tests.families.small import Small
from tests.families.starting import begun
from train.export.pipeline import ExportConfig, write_pipeline


def test_an_exported_unet_draws_the_size_that_was_trained(small: Callable[[str], Small]) -> None:
    """Draw without height and width; the size in the U-Net's original config does not matter."""
    config, _ = begun(small("sd2"), "sized", sample_size=16)
    folder = write_pipeline(config.work, ExportConfig(weights="raw"))
    pipeline = getattr(diffusers, config.backbone.pipeline.class_name).from_pretrained(folder)
    assert pipeline("a", num_inference_steps=1, output_type="np").images.shape == (1, 64, 64, 3)
    assert "Without `height` and `width`, images have 64x64 pixels." in (folder / "README.md").read_text()
