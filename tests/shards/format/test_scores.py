"""Scores are declared once: a new score reaches every file and filter, and does not affect roots without it."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from shards.__main__ import run as shards
from shards.base.durable import read_sealed_json
from shards.format.encoding import EncodingRecord
from shards.format.scores import LAION_SCORES, SCORES, score_fields
from shards.open import open_store
from shards.root.reading import read_parts
from tests.roots import part_of
from tests.runs import PYTHON, environment
from tests.tiny import make_samples, make_tar
from train.data.selection import FilterConfig

pytestmark = pytest.mark.heavy

HPS = {i: i / 10 for i in range(12) if i % 3}
"""Sample number → new score; every third sample lacks it."""


@pytest.fixture(scope="module")
def plugged(models: Path, latents: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A root that a program with an additional score has encoded, and the program's output."""
    folder = tmp_path_factory.mktemp("plugged")
    samples = make_samples(0, 12, [(64, 64)])
    for number, value in HPS.items():
        members = samples[number][1]
        members["json"] = json.dumps(json.loads(members["json"]) | {"hps_v2": value}).encode()
    make_tar(folder / "tars", "00000", samples)
    arguments = map(str, (models, folder / "tars", folder / "root", latents))
    command = [*PYTHON, "-m", "tests.shards.format.score_plugin", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=environment(PYTHONPATH="."), timeout=300)
    assert result.returncode == 0, result.stderr
    return folder / "root", json.loads(result.stdout.splitlines()[-1])


def test_a_new_score_is_stored_in_the_table_and_in_the_mds_files(plugged: tuple[Path, dict[str, Any]]) -> None:
    root, store = plugged[0], open_store(plugged[0])
    part = part_of(root, "64x64", "00000")
    table = pq.read_table(part / "samples.parquet")
    expected = np.array([HPS.get(number, np.nan) for number in range(12)], np.float32)
    np.testing.assert_array_equal(table["hps"].to_numpy(), expected)
    stored = np.stack([sample["scores"] for sample in read_parts(store, "64x64", [part.name])])
    np.testing.assert_array_equal(stored, np.stack([table[name].to_numpy() for name in (*LAION_SCORES, "hps")], axis=1))
    assert stored.dtype == np.float32


def test_the_filter_and_selection_know_a_new_score(plugged: tuple[Path, dict[str, Any]], latents: Path) -> None:
    found = plugged[1]
    assert found["passing"] == sum(value >= 0.5 for value in HPS.values()) == 5
    assert found["selected_from"] == "hps"
    assert found["refusal"].startswith(f"The filter uses hps, but {latents} stores only width, height, aesthetic")


def test_the_tools_read_a_root_with_a_score_that_they_do_not_know(
    plugged: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """The root's record suffices; this process has not declared the score."""
    root = plugged[0]
    shards(["verify", str(root)])
    assert "is intact" in capsys.readouterr().out
    shards(["card", str(root)])
    assert "`ndarray:float32:5`: aesthetic, similarity, punsafe, pwatermark, hps; NaN" in capsys.readouterr().out
    assert EncodingRecord.load(open_store(root)).scores == (*LAION_SCORES, "hps")
    with pytest.raises(ValidationError, match="hps"):
        FilterConfig.model_validate({"hps": {"min": 0.5}})


def test_roots_without_additional_scores_record_none(latents: Path) -> None:
    fields = read_sealed_json(latents / "encoding.json")
    assert "scores" not in fields
    record = EncodingRecord.load(open_store(latents))
    more = record.model_copy(update={"scores": (*LAION_SCORES, "hps")})
    assert more.id != record.id == fields["id"]
    assert EncodingRecord.parse(more.sealed(), "encoding.json") == more
    assert record.differences(more) == [f"scores: 'absent' ≠ {[*LAION_SCORES, 'hps']}"]


def test_json_fields() -> None:
    assert tuple(score.name for score in SCORES) == LAION_SCORES
    assert score_fields(("aesthetic", "hps")) == [("aesthetic", "AESTHETIC_SCORE", "aesthetic_score"), ("hps",)]
