"""From each kind of input to a latents root, with the same command."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from precompute.__main__ import run as command
from shards.root.reading import read_part
from tests.kinds import KINDS
from tests.roots import ONE_BUCKET, part_of, precompute_arguments
from tests.tiny import make_samples

SAMPLES = make_samples(0, 6, [(80, 64), (200, 150)])


def encoded(root: Path) -> dict[str, dict[str, object]]:
    """Return the stored columns of each image, by SHA-256 of the image, without its key."""
    found = {}
    part = part_of(root, "64x64", "00000")
    hashes = pq.read_table(part / "samples.parquet")["sha256"].to_pylist()
    for sha256, sample in zip(hashes, read_part(part), strict=True):
        found[sha256] = {
            name: value.tobytes() if hasattr(value, "tobytes") else value
            for name, value in sample.items()
            if name not in ("key", "scores")
        }
    return found


def test_an_image_has_the_same_latents_whichever_way_it_came_in(
    without_ray: None, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roots, kinds = {}, ("tar", "files", "parquet", "mds")  # images listed in tables are read like files
    for kind in kinds:
        KINDS[kind](tmp_path / kind, SAMPLES)
        command(precompute_arguments(models, tmp_path / kind, tmp_path / f"{kind}-root", buckets=ONE_BUCKET))
        roots[kind] = encoded(tmp_path / f"{kind}-root")
    assert len(roots["tar"]) == 6
    for kind, root in roots.items():
        assert root == roots["tar"], kind
    announced = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Input: ")]
    assert len(announced) == len(kinds) and "parquet files with images (1 unit, 6 samples)" in "".join(announced)
