"""Scores that stage 1's config names reach every file and filter, from JSON and from tables, also in a derived root."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.__main__ import run as command
from shards.__main__ import run as shards
from shards.base.config import load_config
from shards.base.durable import read_sealed_json
from shards.base.errors import Outage, RequestError
from shards.format.encoding import EncodingRecord
from shards.format.scores import LAION_SCORES
from shards.open import open_store
from shards.root.reading import read_parts
from tests.fixtures import ray_replaced
from tests.roots import part_of, precompute_arguments, receipts_of_tar
from tests.tiny import make_samples, make_tar
from train.config import DataConfig
from train.data.streams import open_data

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("without_ray")]

HPS = {i: i / 10 for i in range(12) if i % 3}
"""Sample number → new score; every third sample lacks it."""
RANK = {i: float(i) for i in range(9)}
"""Sample number → score of the table, which lacks the last samples."""


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scored")
    samples = make_samples(0, 12, [(64, 64)])
    for number, value in HPS.items():
        members = samples[number][1]
        members["json"] = json.dumps(json.loads(members["json"]) | {"hps": value}).encode()
    make_tar(folder / "tars", "00000", samples)
    keys = [samples[number][0] for number in RANK]
    pq.write_table(pa.table({"key": keys, "rank": list(RANK.values())}), folder / "ranks.parquet")
    return folder / "tars"


def scores_option(scored: Path) -> list[str]:
    table = {"table": str(scored.parent / "ranks.parquet"), "column": "rank"}
    return ["--scores", json.dumps(["aesthetic", "hps", table])]


@pytest.fixture(scope="module")
def root(scored: Path, models: Path) -> Path:
    """A root with a score of LAION's, one from the samples' JSON and one from a table."""
    root = scored.parent / "root"
    with ray_replaced():
        command(precompute_arguments(models, scored, root, *scores_option(scored)))
    return root


def expected() -> np.ndarray:
    """(samples, 2): hps and rank."""
    return np.array([[HPS.get(i, np.nan), RANK.get(i, np.nan)] for i in range(12)], np.float32)


def test_scores_are_stored_in_the_table_and_in_the_mds_files(root: Path) -> None:
    store, part = open_store(root), part_of(root, "64x64", "00000")
    table = pq.read_table(part / "samples.parquet")
    columns = np.stack([table[name].to_numpy() for name in ("aesthetic", "hps", "rank")], axis=1)
    np.testing.assert_array_equal(columns[:, 1:], expected())
    stored = np.stack([sample["scores"] for sample in read_parts(store, "64x64", [part.name])])
    np.testing.assert_array_equal(stored, columns)
    assert stored.dtype == np.float32
    settings = receipts_of_tar(root, "00000").parts["64x64"].settings
    assert settings["tables.rank.found"] == len(RANK)


def test_training_filters_by_any_score_that_the_root_stores(root: Path, latents: Path) -> None:
    def num_samples(place: Path, *options: str) -> int:
        streams = json.dumps([{"root": str(place), "bucket": "64x64"}])
        config = load_config(DataConfig, None, ["--streams", streams, "--num_workers", "0", *options], "test")
        return open_data(config, 2).streams[0].num_samples

    assert num_samples(root, "--filter.hps.min", "0.5") == sum(value >= 0.5 for value in HPS.values())
    assert num_samples(root, "--filter.rank.max=3", "--filter.missing", "keep") == 4 + 3
    assert num_samples(root, "--filter.hps", "null", "--filter", '{"rank": {"min": 5}}') == 4
    with pytest.raises(RequestError, match=r"The filter uses hps, but .* stores only width, height, aesthetic, simil"):
        num_samples(latents, "--filter.hps.min", "0.5")
    with pytest.raises(RequestError, match=r"filter.hps.*set min, max or both"):
        num_samples(root, "--filter", '{"hps": {}}')


def test_the_tools_show_the_scores(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards(["verify", str(root)])
    assert "is intact" in capsys.readouterr().out
    shards(["card", str(root)])
    assert "`ndarray:float32:3`: aesthetic, hps, rank; NaN" in capsys.readouterr().out
    shards(["stats", str(root)])
    assert "rank in 64x64: 0.4 / 4 / 7.6 (5 / 50 / 95 % of 9 samples)" in capsys.readouterr().out


def test_new_scores_for_existing_latents(scored: Path, models: Path, root: Path, tmp_path: Path) -> None:
    """The derived root equals one that is encoded with these scores."""
    old, derived = tmp_path / "old", tmp_path / "derived"
    arguments = ("--captions", "txt")
    command(precompute_arguments(models, scored, old, *arguments, "--scores", "aesthetic,hps"))
    options = (*arguments, *scores_option(scored))
    command(precompute_arguments(models, scored, derived, "--source", str(old), *options))
    parts = [part_of(place, "64x64", "00000") for place in (derived, root)]
    assert parts[0].name == parts[1].name  # named by a hash of the content
    with pytest.raises(RequestError, match="scores: absent is neither from a table nor stored"):
        other = precompute_arguments(models, scored, tmp_path / "other", "--source", str(old), *arguments)
        command([*other, "--scores", "absent"])


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        (["key"], "a score cannot have the name 'key'"),
        (["hps", "hps"], "a score is listed twice in hps, hps"),
        ([{"column": "rank"}], "set either `field` or `table`"),
        ([{"table": "absent.parquet", "column": "rank"}], r"absent\.parquet does not exist"),
    ],
)
def test_scores_that_make_no_sense(models: Path, scored: Path, tmp_path: Path, scores: list[object], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        command(precompute_arguments(models, scored, tmp_path / "root", "--scores", json.dumps(scores)))


def test_a_score_that_no_sample_has_is_reported(
    models: Path, scored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command(precompute_arguments(models, scored, tmp_path / "root", "--scores", "json:hps,beauty"))
    assert "warning: no sample of tar 00000 has the score beauty." in capsys.readouterr().err


def test_an_outage_during_the_check_for_warnings_does_not_end_the_job(
    models: Path, scored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise Outage("The store does not answer.")

    monkeypatch.setattr("precompute.job.run.read_tables", fail)
    command(precompute_arguments(models, scored, tmp_path / "root", "--scores", "json:hps,beauty"))
    assert "has the score" not in capsys.readouterr().err


def test_texts_are_not_scores(models: Path, scored: Path, tmp_path: Path) -> None:
    path = tmp_path / "texts.parquet"
    pq.write_table(pa.table({"key": ["a"], "rank": ["high"]}), path)
    with pytest.raises(RequestError, match=r"The column rank of .* has values of type string, not numbers"):
        scores = json.dumps([{"table": str(path), "column": "rank"}])
        command(precompute_arguments(models, scored, tmp_path / "root", "--scores", scores))


def test_scores_are_part_of_the_encoding(latents: Path) -> None:
    record = EncodingRecord.load(open_store(latents))
    more = record.model_copy(update={"scores": (*LAION_SCORES, "hps")})
    assert more.id != record.id == read_sealed_json(latents / "encoding.json")["id"]
    assert EncodingRecord.parse(more.sealed(), "encoding.json") == more
    assert record.differences(more) == [f"scores: {[*LAION_SCORES]} ≠ {[*LAION_SCORES, 'hps']}"]
