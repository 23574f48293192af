"""Costs and sizes, compared with definitions and with written parts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench.kit.roots import encoding_record
from plan.arithmetic import costs
from plan.arithmetic.work import Work, build_towers
from plan.config import Plan
from plan.report import make_report
from shards.base.config import load_config
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.text import TextLatents
from shards.format.towers import ImageStorage, Projection, TextStorage, encode_matrix
from shards.root.writing import Caption, PartWriter, Sample


def test_checkpoint_bytes() -> None:
    assert costs.checkpoint_bytes(865_910_724, ema=False) == 10_390_928_688
    assert costs.checkpoint_bytes(865_910_724, ema=True) == 13_854_571_584


@pytest.mark.parametrize("trim", [False, True])
@pytest.mark.parametrize("storage", ["float16", "float8"])
@pytest.mark.parametrize("image_storage", ["float16", "int8"])
def test_sample_bytes_are_those_of_a_written_part(
    image_storage: ImageStorage, storage: TextStorage, trim: bool, tmp_path: Path
) -> None:
    written = part_bytes(tmp_path, storage, trim, image_storage)
    record = encoding_record(77, 1024, storage=storage, trim=trim)
    image = record.image.model_copy(update={"storage": image_storage})
    planned = costs.sample_bytes(image, record.texts, Bucket(256, 256), 20, 21)
    assert 0 <= written - planned < 1000 / 50  # the file's header


def part_bytes(folder: Path, storage: TextStorage, trim: bool, image_storage: ImageStorage) -> float:
    """Return the bytes per sample of a part with 50 samples of 256 px and captions of 20 of 77 tokens."""
    record = encoding_record(77, 1024, storage=storage, trim=trim)
    image = record.image.model_copy(update={"storage": image_storage})
    latents = {"text": TextLatents(torch.zeros(77, 1024), 20)}
    encoding = record.model_copy(update={"image": image})
    return written_bytes(folder, encoding, Bucket(256, 256), (image.num_planes, 32, 32), "a red square", latents, 50)


CLIPS = [("clip_l", 768, 0, 128), ("clip_g", 1280, 1280, 192)]
PROJECTED: dict[str, tuple[list[tuple[str, int, int, int]], dict[str, Any], int]] = {
    "sd2": ([("text", 1024, 0, 192)], {}, 25_000),
    "sdxl": (CLIPS, {}, 40_000),
    "pixart-sigma": ([("t5", 4096, 0, 256)], {"masked": True, "trim": True, "max_tokens": 300}, 60_000),
}
"""Family → its text towers (name, width, pooled width and width of the projection), their fields, and the maximum size
of a sample in bytes."""


@pytest.mark.parametrize("family", PROJECTED)
def test_planned_sizes_of_projected_text_are_those_of_written_parts(family: str, tmp_path: Path, sd2: Work) -> None:
    towers, fields, most = PROJECTED[family]
    length = fields.get("max_tokens", 77)
    whole = {
        name: encoding_record(length, width, pooled=pooled, storage="float8", **fields).texts["text"]
        for name, width, pooled, _ in towers
    }
    found = {name: Projection(**projection_fields(width, narrow)) for name, width, _, narrow in towers}
    texts = {name: tower.with_projection(found[name]) for name, tower in whole.items()}
    record = encoding_record(length, 1)
    image = record.image.model_copy(update={"storage": "int8"})
    latents = {
        name: TextLatents(torch.zeros(length, narrow), 20, torch.zeros(pooled) if pooled else None)
        for name, _, pooled, narrow in towers
    }
    encoding = record.model_copy(update={"image": image, "texts": texts})
    caption = "a red square in front of a blue wall, oil on canvas and then som"
    written = written_bytes(tmp_path, encoding, Bucket(256, 256), (8, 32, 32), caption, latents, 50)
    names = {name: f"networks.texts.{name}" if len(towers) > 1 else "text" for name in texts}
    overrides = [word for name, _, _, narrow in towers for word in (f"--{names[name]}.width", str(narrow))]
    plan = load_config(Plan, f"configs/{family}/plan.yaml", [*overrides, "--data.string_bytes", "73"], "plan")
    _, tower, encoders = build_towers(plan.networks)
    work = replace(sd2, image=tower, texts={name: text for name, (_, text) in encoders.items()})
    (planned,) = (bucket.sample_bytes for bucket in make_report(plan, work).buckets if bucket.bucket == "256x256")
    assert abs(written / planned - 1) < 0.01
    assert written < most


def projection_fields(width: int, narrow: int) -> dict[str, Any]:
    matrix = encode_matrix(np.zeros((width, narrow)))
    calibration = {"calibration_captions": 1, "calibration_sha256": "0"}
    return {"matrix": matrix, "input_width": width, "energy_shares": (1 / narrow,) * narrow, **calibration}


def written_bytes(
    folder: Path,
    encoding: EncodingRecord,
    bucket: Bucket,
    shape: tuple[int, int, int],
    caption: str,
    latents: dict[str, TextLatents],
    count: int,
) -> float:
    """Return the bytes per sample of the MDS file of a part with `count` equal samples."""
    captions: list[Caption | None] = [Caption(caption, latents, frozenset())]
    sample = Sample("000000042", captions, torch.zeros(shape), (0, 0, 0, 0), np.zeros(4, np.float32))
    writer = PartWriter(folder / "part", encoding, bucket)
    for _ in range(count):
        writer.write(sample)
    writer.finish()
    return (folder / "part" / "shard.00000.mds").stat().st_size / count
