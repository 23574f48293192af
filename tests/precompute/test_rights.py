"""Licences are counted from the input to the card, and faces are blurred before encoding."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from precompute.__main__ import run as command
from shards.__main__ import run as shards
from shards.format.encoding import EncodingRecord
from shards.open import open_store
from shards.root.reading import read_part
from shards.root.writing import MAX_LICENSES, OTHER_LICENSES, license_counts
from tests.roots import part_of, precompute_arguments, receipts_of_tar
from tests.tiny import make_samples, make_tar

pytestmark = pytest.mark.usefixtures("without_ray")
SAMPLES = make_samples(0, 6, [(64, 64), (200, 150)])


def tars_with(folder: Path, fields: dict[int, dict[str, Any]]) -> Path:
    """Write a tar in which some samples have further fields in their JSON."""
    samples = []
    for number, (key, members) in enumerate(SAMPLES):
        metadata = json.loads(members["json"]) | fields.get(number, {})
        samples.append((key, members | {"json": json.dumps(metadata).encode()}))
    make_tar(folder, "00000", samples)
    return folder


def test_licences_reach_receipts_statistics_card_and_derived_roots(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], in_threads: None
) -> None:
    licenses = {0: "CC0", 1: "CC0", 2: "CC BY 4.0", 3: "all | rights"}
    tars = tars_with(tmp_path / "tars", {number: {"license": name} for number, name in licenses.items()})
    root, derived = tmp_path / "root", tmp_path / "derived"
    command(precompute_arguments(models, tars, root))
    small, large = (receipts_of_tar(root, "00000").parts[bucket] for bucket in ("64x64", "128x128"))
    assert small.licenses == {"CC0": 2, "CC BY 4.0": 1, "all | rights": 1}
    assert large.licenses == {"CC0": 1, "all | rights": 1}
    shards(["verify", str(root)])
    capsys.readouterr()
    shards(["card", str(root)])
    card = capsys.readouterr().out
    for row in ("| CC0 | 2 |", "| CC BY 4.0 | 1 |", r"| all \| rights | 1 |", "| not stated | 2 |"):
        assert row in card
    shards(["stats", str(root)])
    assert "licences: CC0 2, CC BY 4.0 1, all | rights 1" in capsys.readouterr().out

    key = SAMPLES[0][0]
    shards(["exclude", str(root), "--keys", key])
    shards(["derive", str(root), str(derived)])
    assert receipts_of_tar(derived, "00000").parts["64x64"].licenses == small.licenses | {"CC0": 1}
    shards(["verify", str(derived)])


def test_rare_licences_are_counted_together() -> None:
    counts = license_counts(["common"] * 5 + [""] * 3 + [f"rare {number}" for number in range(60)])
    assert len(counts) == MAX_LICENSES + 1 and counts["common"] == 5
    assert sum(counts.values()) == 65 and counts[OTHER_LICENSES] == 65 - 5 - (MAX_LICENSES - 1)


def test_faces_are_blurred_before_encoding(models: Path, tmp_path: Path) -> None:
    boxes: list[Any] = [[[0.2, 0.2, 0.7, 0.7]], [], [[3, 4, 90, 90]], [], []]
    tars = tars_with(tmp_path / "tars", {number: {"face_bboxes": found} for number, found in enumerate(boxes)})
    sharp, blurred = tmp_path / "sharp", tmp_path / "blurred"
    command(precompute_arguments(models, tars, sharp))
    command(precompute_arguments(models, tars, blurred, "--pixels.blur_boxes", "face_bboxes"))
    before, after = (
        {sample["key"]: sample["image_latents"] for sample in read_part(part_of(root, "64x64", "00000"))}
        for root in (sharp, blurred)
    )
    keys = [key for key, _ in SAMPLES]
    assert [key for key in keys if key not in after] == [keys[2], keys[5]]
    changed = [key for key in after if not np.array_equal(before[key], after[key])]
    assert changed == [keys[0]]
    refused = pq.read_table(part_of(blurred, "64x64", "00000") / "refused.parquet").to_pylist()
    assert [row["reason"] for row in refused] == ["bad_boxes"] * 2
    assert "as fractions of the image's size: [[3, 4, 90, 90]]" in refused[0]["detail"]
    assert "the sample has no face_bboxes" in refused[1]["detail"]
    records = [EncodingRecord.load(open_store(root)) for root in (sharp, blurred)]
    assert records[0].id != records[1].id and records[1].image.decoder.endswith(", face_bboxes blurred")
