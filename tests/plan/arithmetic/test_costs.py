"""Costs and sizes, compared with definitions and with written parts."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.kit.roots import encoding_record
from plan.arithmetic import costs
from shards.format.buckets import Bucket
from shards.format.text import TextLatents
from shards.format.towers import ImageStorage, TextStorage
from shards.root.writing import Caption, PartWriter, Sample

positive = st.floats(1e-3, 1e6)


@given(positive, st.floats(0, 100), st.floats(0, 100))
def test_storing_for_nothing_pays_from_the_first_pass(encode: float, storage: float, more: float) -> None:
    assert costs.break_even_passes(encode, 0, encode) == 1
    assert costs.break_even_passes(encode, storage + more, encode) >= costs.break_even_passes(encode, storage, encode)


def test_speedup_is_per_doubling() -> None:
    assert costs.speedup_per_doubling(8, 2, 8, 32) == 2
    assert costs.speedup_per_doubling(8, 8, 8, 32) == 1


def test_egress_counts_other_regions() -> None:
    assert costs.egress_bytes(100, {"here": 0.7, "there": 0.2, "beyond": 0.1}, "here") == pytest.approx(30)


def test_checkpoint_bytes() -> None:
    assert costs.checkpoint_bytes(865_910_724, ema=False) == 10_390_928_688
    assert costs.checkpoint_bytes(865_910_724, ema=True) == 13_854_571_584


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("storage", ["float16", "float8"])
@pytest.mark.parametrize("image_storage", ["float16", "int8"])
def test_sample_bytes_are_those_of_a_written_part(
    image_storage: ImageStorage, storage: TextStorage, trim: bool, tmp_path: Path
) -> None:
    num_samples, tokens, width = 50, 20, 1024
    written = part_bytes(tmp_path / "part", num_samples, tokens, width, storage, trim, image_storage)
    (tower,) = encoding_record(77, width, storage=storage, trim=trim).texts.values()
    planned = costs.sample_bytes(8, (32, 32), costs.text_bytes(tower, tokens), 21, image_storage, channels=4)
    assert 0 <= written - num_samples * planned < 1000  # the file's header


def test_a_small_sample_is_as_small_as_is_said(tmp_path: Path) -> None:
    """256 px of Stable Diffusion 2 and a caption of 20 tokens: 174 kB as float16, under 30 kB with all its moments."""
    assert part_bytes(tmp_path / "exact", 50, 20, 1024, "float16", False, "float16") / 50 > 174_000
    assert part_bytes(tmp_path / "small", 50, 20, 1024, "float8", True, "int8") / 50 < 30_000
    mean = part_bytes(tmp_path / "mean", 50, 20, 1024, "float8", True, "int8", posterior="mean") / 50
    assert mean < 25_000


def test_large_text_towers_are_small_where_they_are_masked(tmp_path: Path) -> None:
    """512 px of a 16-channel autoencoder with T5-XXL and a pooled CLIP: masked and trimmed, and as FLUX has it."""
    assert 205_000 < t5_bytes(tmp_path / "masked", "float8", True, "int8") < 220_000
    assert 4_400_000 < t5_bytes(tmp_path / "flux", "float16", False, "float16") < 4_500_000


def t5_bytes(folder: Path, storage: TextStorage, trim: bool, image_storage: ImageStorage) -> float:
    """Return the bytes of such a sample, with all moments and 20 real tokens of 512."""
    record = encoding_record(512, 4096, storage=storage, trim=trim, masked=trim, class_name="T5EncoderModel")
    channels = {"channels": 16, "scale": (1.0,) * 16, "shift": (0.0,) * 16, "storage": image_storage}
    pooled = encoding_record(77, 768, storage="float16", states=False, pooled=768).texts["text"]
    texts = {"t5": record.texts["text"], "clip": pooled}
    image = record.image.model_copy(update=channels)
    encoding = record.model_copy(update={"image": image, "texts": texts})
    writer = PartWriter(folder, encoding, Bucket(512, 512))
    latents = {
        "t5": TextLatents(torch.zeros(512, 4096), 20),
        "clip": TextLatents(None, 20, torch.zeros(768)),
    }
    caption = Caption("a red square in front of a blue wall, oil on canvas", latents, frozenset())
    sample = Sample("000000042", [caption], torch.zeros(32, 64, 64), (0, 0, 0, 0), np.zeros(4, np.float32))
    for _ in range(4):
        writer.write(sample)
    writer.finish()
    return (folder / "shard.00000.mds").stat().st_size / 4


def part_bytes(
    folder: Path,
    num_samples: int,
    tokens: int,
    width: int,
    storage: TextStorage,
    trim: bool,
    image_storage: ImageStorage,
    posterior: str = "moments",
) -> int:
    """Return the bytes of the MDS file of a part with such samples."""
    encoding = encoding_record(77, width, storage=storage, trim=trim)
    image = encoding.image.model_copy(update={"storage": image_storage, "posterior": posterior})
    encoding = encoding.model_copy(update={"image": image})
    writer = PartWriter(folder, encoding, Bucket(256, 256))
    latents = TextLatents(torch.zeros(77, width), tokens)
    for _ in range(num_samples):
        sample = Sample(
            key="000000042",
            captions=[Caption("a red square", {"text": latents}, frozenset())],
            image_latents=torch.zeros(image.num_planes, 32, 32),
            size=(0, 0, 0, 0),
            scores=np.zeros(4, np.float32),
        )
        writer.write(sample)
    writer.finish()
    return (folder / "shard.00000.mds").stat().st_size
