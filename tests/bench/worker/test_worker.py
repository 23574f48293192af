"""The simple script that the worker is compared with does the same work, and the command deletes only its own files."""

from pathlib import Path

import numpy as np
import pytest
from streaming import LocalDataset

import bench.worker.__main__ as command
from bench.worker.alone import Options
from bench.worker.comparison import Case, Runner, Way, photograph_case
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
    exact, default = (sum(path.stat().st_size for path in (tmp_path / way).rglob("*.mds")) for way, *_ in WAYS)
    assert default < 0.6 * exact


def apart(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the relative RMS error."""
    return float(np.linalg.norm(found - expected.astype(np.float32)) / np.linalg.norm(expected.astype(np.float32)))


def test_the_demos_images_have_all_formats() -> None:
    suffixes = {suffix for _, suffix, _ in demo_pictures(60)}
    assert suffixes == {"jpg", "png", "webp"}


def test_the_folders_other_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(options: Options) -> str:
        (options.folder / "tars").mkdir()
        return "measured"

    (tmp_path / "mine.txt").write_text("mine")
    monkeypatch.setattr(command, "SECTIONS", {"alone": ("A stage 1 worker", measure)})
    monkeypatch.setattr("sys.argv", ["bench.worker", "--folder", str(tmp_path)])
    command.main()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
