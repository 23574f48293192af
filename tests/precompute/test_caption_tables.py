"""Captions from tables: when encoding, and as new captions for latents that exist."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from precompute.__main__ import run as command
from precompute.config import describe_encoding
from shards.__main__ import run as shards
from shards.base.errors import RequestError, WorkError
from shards.format.text import unpack
from shards.root.reading import read_part
from tests.fixtures import precompute_config, ray_replaced
from tests.roots import ONE_BUCKET, part_of, precompute_arguments, receipts_of_tar
from tests.tiny import make_samples, make_tar, table_of
from train.data.loader import Loader
from train.data.spec import DataConfig, StreamConfig
from train.data.streams import open_data

SAMPLES = make_samples(0, 8, [(200, 150)])
KEYS = [key for key, _ in SAMPLES]
NEW = {key: f"a new text about {key}" for key in KEYS[:6]}


def stored(root: Path, bucket: str = "64x64") -> dict[str, dict[str, Any]]:
    return {sample["key"]: sample for sample in read_part(part_of(root, bucket, "00000"))}


def captions_option(*sources: object) -> list[str]:
    return ["--captions", json.dumps(sources)]


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("captioned") / "tars"
    make_tar(folder, "00000", SAMPLES)
    return folder


def encoded(models: Path, tars: Path, root: Path, *options: str) -> Path:
    with ray_replaced():
        command(precompute_arguments(models, tars, root, *options))
    return root


@pytest.fixture(scope="module")
def old(models: Path, tars: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the captions of the tars. Tests must not modify it."""
    return encoded(models, tars, tmp_path_factory.mktemp("old") / "root", "--captions", "txt")


@pytest.fixture(scope="module")
def weighted(models: Path, tars: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with captions of weight 3 from a table beside it, and those of the tars. Tests must not modify it."""
    folder = tmp_path_factory.mktemp("weighted")
    table = table_of(folder / "captions.parquet", {"of no sample": "x"} | NEW, row_group_size=2)
    source = {"table": str(table), "column": "vlm", "weight": 3}
    return encoded(models, tars, folder / "root", *captions_option(source, "txt"))


def test_encoding_with_captions_from_a_table_and_weights(models: Path, tars: Path, weighted: Path) -> None:
    found = stored(weighted)
    assert [json.loads(found[key]["caption"]) for key in KEYS] == [
        [NEW.get(key), f"picture {key} of {i} blobs"] for i, key in enumerate(KEYS)
    ]
    weights = [found[key]["caption_weights"].tolist() for key in KEYS]
    assert weights == [[3, 1]] * 6 + [[1]] * 2
    assert [len(unpack(found[key])) for key in KEYS] == [4] * 6 + [1] * 2
    first, second, third, last = (row["text_latents.text"] for row in unpack(found[KEYS[0]]))
    assert np.array_equal(first, second) and np.array_equal(first, third) and not np.array_equal(first, last)
    settings = receipts_of_tar(weighted, "00000").parts["64x64"].settings
    assert settings["tables.vlm"] == str(weighted.with_name("captions.parquet"))
    assert settings["tables.vlm.found"] == 6
    shards(["verify", str(weighted)])
    with pytest.raises(RequestError, match="are from a table"):
        command(precompute_arguments(models, tars, weighted))


def test_roots_with_different_caption_sources_can_be_mixed(weighted: Path, old: Path) -> None:
    streams = [StreamConfig(root=root, bucket="64x64") for root in (weighted, old)]
    config = DataConfig(streams=streams, num_workers=0, num_canonical_nodes=1)
    loader = Loader(config, open_data(config, 4), 4, 0, 0, torch.arange(4))
    batches = [batch for batch, _ in zip(loader, range(4), strict=False)]
    counts = [torch.ones(4) if batch.num_captions is None else batch.num_captions for batch in batches]
    assert sorted(torch.cat(counts).tolist()) == [1] * 10 + [4] * 6


@pytest.mark.usefixtures("without_ray")
@pytest.mark.parametrize("fallback", [None, "txt"])
def test_new_captions_for_existing_latents(
    models: Path, tars: Path, tmp_path: Path, old: Path, fallback: str | None
) -> None:
    """The derived root equals one that is encoded with the new captions, and all samples are accounted for."""
    table = table_of(tmp_path / "captions.parquet", NEW)
    source = {"table": str(table), "column": "vlm"} | ({"fallback": fallback} if fallback else {})
    derived, direct = tmp_path / "derived", tmp_path / "direct"
    for _ in range(2):  # the second time, nothing is left to do
        command(precompute_arguments(models, tars, derived, "--source", str(old), *captions_option(source)))
    command(precompute_arguments(models, tars, direct, *captions_option(source)))
    for bucket in ("64x64", "128x128"):
        before, after, expected = (stored(root, bucket) for root in (old, derived, direct))
        assert list(after) == (KEYS if fallback else KEYS[:6]) == list(expected)
        for key, sample in after.items():
            assert np.array_equal(sample["image_latents"], before[key]["image_latents"])
            assert sample["caption"] == NEW.get(key, before[key]["caption"]) == expected[key]["caption"]
            assert np.array_equal(sample["text_latents.text"], expected[key]["text_latents.text"])
        parts = [receipts_of_tar(root, "00000").parts[bucket] for root in (derived, direct)]
        assert [part.samples for part in parts] == [len(after)] * 2
        assert [part.refused.get("no_caption", 0) for part in parts] == [0 if fallback else 2] * 2
        assert "derived.tables.vlm" in parts[0].settings and parts[0].settings["derived.tables.vlm.found"] == len(NEW)
    shards(["verify", str(derived)])


@pytest.mark.usefixtures("without_ray")
def test_old_captions_can_stay_beside_new_ones(models: Path, tars: Path, tmp_path: Path, old: Path) -> None:
    table = table_of(tmp_path / "captions.parquet", NEW)
    derived = tmp_path / "derived"
    source = {"table": str(table), "column": "vlm"}
    options = ("--source", str(old), *captions_option(source, {"field": "txt", "weight": 2}))
    command(precompute_arguments(models, tars, derived, *options, buckets=ONE_BUCKET))
    before, after = stored(old), stored(derived)
    for key in KEYS:
        rows = unpack(after[key])
        assert len(rows) == (3 if key in NEW else 2)
        assert np.array_equal(rows[-1]["text_latents.text"], before[key]["text_latents.text"])
    with pytest.raises(RequestError, match="json:absent is not stored in the source, which has txt"):
        again = precompute_arguments(models, tars, tmp_path / "other", "--source", str(old))
        command([*again, *captions_option(source, "absent")])


def test_the_encoding_depends_on_the_tables_key_column(models: Path, tars: Path, tmp_path: Path) -> None:
    table = tmp_path / "captions.parquet"
    pq.write_table(pa.table({"key": ["a", "b"], "other": ["b", "a"], "vlm": ["x", "y"]}), table)
    records = []
    for key in ("key", "other"):
        source = {"table": str(table), "key": key, "column": "vlm"}
        records.append(describe_encoding(precompute_config(models, tars, tmp_path / "root", captions=[source])))
    assert records[0].id != records[1].id
    assert records[1].tables["vlm"] == f"{records[0].tables['vlm']} by other"


def test_a_table_that_cannot_be_used_is_refused_before_anything_is_written(
    models: Path, tars: Path, tmp_path: Path
) -> None:
    good = table_of(tmp_path / "good.parquet", NEW)
    (tmp_path / "text.parquet").write_text("key,vlm\n")
    numbers = tmp_path / "numbers.parquet"
    pq.write_table(pa.table({"key": ["a"], "vlm": [0.5]}), numbers)
    twice = tmp_path / "twice.parquet"
    pq.write_table(pa.table({"key": ["a", "b", "a"], "vlm": ["x", "y", "z"]}), twice)
    for source, said in (
        ({"table": str(tmp_path / "absent.parquet"), "column": "vlm"}, r"absent\.parquet does not exist"),
        ({"table": str(tmp_path / "text.parquet"), "column": "vlm"}, "is not a readable parquet file"),
        ({"table": str(good), "column": "blip"}, "has no column blip; its columns are key, vlm"),
        ({"table": str(numbers), "column": "vlm"}, "has values of type double, not text"),
        ({"table": str(twice), "column": "vlm"}, r"key 'a' twice, in rows 0 and 2 \(counted from 0\)"),
        ({"table": str(good)}, "set `table` and `column` together"),
        ({"field": "txt", "fallback": "txt"}, "`fallback` requires `table`"),
        ({"table": str(good), "column": "vlm", "weight": 0}, "greater than or equal to 1"),
    ):
        with pytest.raises(RequestError, match=said):
            command(precompute_arguments(models, tars, tmp_path / "root", *captions_option(source)))
    assert not (tmp_path / "root").exists()


@pytest.mark.usefixtures("without_ray")
def test_a_changed_table_is_a_new_encoding(models: Path, tars: Path, tmp_path: Path) -> None:
    """A root never has captions from two versions of a table; a derived root takes the new ones."""
    table = table_of(tmp_path / "captions.parquet", NEW)
    option = captions_option({"table": str(table), "column": "vlm"})
    root, derived = tmp_path / "root", tmp_path / "derived"
    command(precompute_arguments(models, tars, root, *option, buckets=ONE_BUCKET))
    newer = {key: f"an even newer text about {key}" for key in KEYS}
    table_of(table, newer)
    with pytest.raises(RequestError, match=r"tables\.vlm"):
        command(precompute_arguments(models, tars, root, *option, buckets=ONE_BUCKET))
    command(precompute_arguments(models, tars, derived, "--source", str(root), *option, buckets=ONE_BUCKET))
    found = stored(derived)
    assert {key: sample["caption"] for key, sample in found.items()} == {key: newer[key] for key in NEW}


@pytest.mark.usefixtures("without_ray")
def test_a_table_with_other_keys_is_reported(
    models: Path, tars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = table_of(tmp_path / "captions.parquet", {f"of no sample {key}": "x" for key in KEYS})
    source = {"table": str(table), "column": "vlm", "fallback": "txt"}
    command(precompute_arguments(models, tars, tmp_path / "root", *captions_option(source), buckets=ONE_BUCKET))
    warning = f"warning: {table} has no vlm for any of the 8 samples of tar 00000."
    assert warning in capsys.readouterr().err
    with pytest.raises(WorkError, match="Nothing was accepted"):
        options = captions_option(source | {"fallback": None})
        command(precompute_arguments(models, tars, tmp_path / "none", *options, buckets=ONE_BUCKET))
    assert warning in capsys.readouterr().err


@pytest.mark.usefixtures("without_ray")
def test_derived_parts_count_their_own_tables(
    models: Path, tars: Path, tmp_path: Path, old: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table without any of the keys is reported, and a later one is not blamed for it."""
    wrong = table_of(tmp_path / "wrong.parquet", {"of no sample": "x"})
    right = table_of(tmp_path / "right.parquet", NEW)
    source = {"column": "vlm", "fallback": "txt"}
    roots = [tmp_path / name for name in ("first", "second")]
    first = ("--source", str(old), *captions_option(source | {"table": str(wrong)}, "txt"))
    command(precompute_arguments(models, tars, roots[0], *first, buckets=ONE_BUCKET))
    assert f"warning: {wrong} has no vlm for any of the 8 samples" in capsys.readouterr().err
    second = ("--source", str(roots[0]), *captions_option(source | {"table": str(right)}))
    command(precompute_arguments(models, tars, roots[1], *second, buckets=ONE_BUCKET))
    assert "warning" not in capsys.readouterr().err
    settings = receipts_of_tar(roots[1], "00000").parts["64x64"].settings
    tables = {name: value for name, value in settings.items() if "tables." in name}
    assert tables == {"derived.tables.vlm": str(right), "derived.tables.vlm.found": len(NEW)}
