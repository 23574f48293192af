"""The simple script that the worker is compared with does the same work, and both are timed."""

from pathlib import Path

import numpy as np
import pytest
from streaming import LocalDataset

from bench.worker.comparison import Case, Runner, Way, demo_case, photograph_case, row
from bench.worker.inputs import demo_pictures
from shards.root.reading import image_latents, read_part, text_latents

PICTURES = 2
WAYS: tuple[tuple[Way, float, float], ...] = (("exact", 0.02, 1e-3), ("default", 0.03, 0.04))
"""Tolerance: one level of 255 in some pixels, and the rounding of the storage."""


def test_the_worker_stores_the_same_as_the_simple_script(tmp_path: Path) -> None:
    """Compare the outputs. The script uses nothing of the product except the names of columns."""
    case = Case("", photograph_case(tmp_path, PICTURES), ("256x256", "512x512"), free=False, threads=1, batch_size=2)
    Runner(case, "plain").encode(tmp_path / "plain")
    for way, latents_off, states_off in WAYS:
        worker = Runner(case, way)
        worker.encode(tmp_path / way)
        for bucket in case.buckets:
            parts = (tmp_path / way / bucket).iterdir()
            ours = {sample["key"]: sample for part in parts for sample in read_part(part)}
            theirs = {sample["key"]: sample for sample in LocalDataset(str(tmp_path / "plain" / bucket))}
            assert ours.keys() == theirs.keys() and ours
            for key, sample in theirs.items():
                assert (
                    ours[key]["caption"] == sample["caption"] and ours[key]["size"].tolist() == sample["size"].tolist()
                )
                assert apart(image_latents(ours[key])[:4], sample["image_latents"][:4]) < latents_off
                (states,) = text_latents(ours[key], worker.record)
                assert apart(states["text"], sample["text_latents.text"]) < states_off


def apart(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the relative RMS error."""
    return float(np.linalg.norm(found - expected.astype(np.float32)) / np.linalg.norm(expected.astype(np.float32)))


def test_all_ways_are_timed_on_the_demos_images(tmp_path: Path) -> None:
    pictures = 60
    case = Case("demo", demo_case(tmp_path, pictures), ("64x64", "128x128"), free=True, threads=1)
    found = {way: np.array([Runner(case, way)()]) for way in ("plain", "exact", "default")}
    seconds, processor, written = (np.stack(list(found.values()))[:, 0, column] for column in range(3))
    assert (seconds > 0).all() and (processor > 0).all()
    # float16 takes the same bytes, except for unusual images that only one of them rejects
    assert written[0] == pytest.approx(written[1], rel=0.1) and written[2] < 0.6 * written[1]
    assert len(row(case, pictures, found)) == 6 and not list(tmp_path.glob("exact"))  # type: ignore[arg-type]


def test_the_demos_images_have_all_formats() -> None:
    suffixes = {suffix for _, suffix, _ in demo_pictures(60)}
    assert suffixes == {"jpg", "png", "webp"}
