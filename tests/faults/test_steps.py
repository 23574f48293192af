"""Real kills, and errors of the disk and S3, at each step of a commit; a full disk; two concurrent runs."""

import json
from pathlib import Path

import pytest

from tests.fixtures import Record
from tests.runs import run_module


def steps(folder: Path, models: Path, every: int, *options: str, module: str = "steps") -> dict[str, dict]:
    """Run `tests.faults.MODULE`, which fails on any inconsistency, and return its figures."""
    result = run_module(f"tests.faults.{module}", str(folder), str(models), str(every), *options, seconds=7200)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_every_step(models: Path, tmp_path: Path, record_property: Record) -> None:
    record_property("steps", steps(tmp_path, models, 1, "tar"))


def test_some_steps(models: Path, tmp_path: Path) -> None:
    steps(tmp_path, models, 97, "tar")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["files", "parquet", "mds"])
def test_many_steps_of_other_kinds(models: Path, tmp_path: Path, record_property: Record, kind: str) -> None:
    record_property(f"steps with {kind}", steps(tmp_path, models, 7, kind))


@pytest.mark.slow
def test_every_request_to_s3(models: Path, tmp_path: Path, record_property: Record) -> None:
    record_property("steps on S3", steps(tmp_path, models, 1, module="steps_s3"))


def test_some_requests_to_s3(models: Path, tmp_path: Path) -> None:
    steps(tmp_path, models, 320, module="steps_s3")


@pytest.mark.slow
def test_a_slow_store_costs_the_device_nothing(models: Path, tmp_path: Path, record_property: Record) -> None:
    figures = steps(tmp_path, models, 4, module="overlap")
    record_property("overlap with a slow S3", figures)
    assert figures["3 at once"]["device"] >= 0.95 > figures["1 at once"]["device"]
    assert figures["3 at once"]["grown_mib"] < 128
    # three tars' latents and two tars; both have about the size of a tar
    assert 0 < figures["3 at once"]["scratch_tars"] <= 3.1
