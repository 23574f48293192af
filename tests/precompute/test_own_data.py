"""From each kind of input to a latents root, with the same command."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from precompute.__main__ import run as command
from shards.root.reading import read_part
from tests.kinds import KINDS
from tests.roots import part_of, precompute_arguments
from tests.runs import run_module, train_fields, write_config
from tests.tiny import make_samples
from train.__main__ import run as train
from train.run.reporting.json_lines import read_json_lines

SAMPLES = make_samples(0, 10, [(80, 64), (200, 150)])


def encoded(root: Path) -> dict[str, dict[str, object]]:
    """Return the stored columns of each image in both buckets, by bucket and SHA-256 of the image, without its key."""
    found = {}
    for bucket in ("64x64", "128x128"):
        part = part_of(root, bucket, "00000")
        hashes = pq.read_table(part / "samples.parquet")["sha256"].to_pylist()
        for sha256, sample in zip(hashes, read_part(part), strict=True):
            found[f"{bucket} {sha256}"] = {
                name: value.tobytes() if hasattr(value, "tobytes") else value
                for name, value in sample.items()
                if name not in ("key", "scores")
            }
    return found


def test_an_image_has_the_same_latents_whichever_way_it_came_in(
    without_ray: None, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roots = {}
    for kind, make in KINDS.items():
        make(tmp_path / kind, SAMPLES)
        command(precompute_arguments(models, tmp_path / kind, tmp_path / f"{kind}-root"))
        roots[kind] = encoded(tmp_path / f"{kind}-root")
    assert len(roots["tar"]) == 15
    for kind, root in roots.items():
        assert root == roots["tar"], kind
    announced = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Input: ")]
    assert len(announced) == len(KINDS) and "parquet files with images (1 unit, 10 samples)" in "".join(announced)


def test_two_commands_lead_from_a_folder_to_a_model(models: Path, tmp_path: Path) -> None:
    """The commands of docs/how-to/your-own-data.md, with small encoders and a small U-Net."""
    KINDS["files"](tmp_path / "input", make_samples(0, 200, [(80, 64), (200, 150)]))
    root, own_models = tmp_path / "latents", shutil.copytree(models, tmp_path / "models")
    result = run_module("precompute", *precompute_arguments(own_models, tmp_path / "input", root))
    assert result.returncode == 0, result.stderr
    assert "(200 samples in, 200 accepted, 0 rejected)" in result.stdout
    shutil.rmtree(tmp_path / "input")  # not needed any more, like the encoders
    shutil.rmtree(own_models)
    fields = train_fields(root, tmp_path / "run", max_steps=2)
    result = run_module("train", "--config", str(write_config(tmp_path, fields)))
    assert result.returncode == 0, result.stderr
    assert [row["step"] for row in read_json_lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("kind", ["parquet", "tar", "mds"])
def test_the_same_commands_for_other_kinds(
    without_ray: None, kind: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which saves two thirds of the time."""
    KINDS[kind](tmp_path / "input", make_samples(0, 200, [(80, 64), (200, 150)]))
    command(precompute_arguments(models, tmp_path / "input", tmp_path / "latents"))
    assert "(200 samples in, 200 accepted, 0 rejected)" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "input")
    train(["--config", str(write_config(tmp_path, train_fields(tmp_path / "latents", tmp_path / "run", max_steps=2)))])
    assert [row["step"] for row in read_json_lines(tmp_path / "run" / "metrics.jsonl")] == [1, 2]
