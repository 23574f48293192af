"""The dataset card, and the lookup of samples, from encoding.json and receipts alone."""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from streaming import StreamingDataset

from bench.kit.roots import make_root
from shards.__main__ import run
from shards.base.durable import DamagedFile
from shards.format.encoding import EncodingRecord
from shards.format.models import hash_weights
from shards.open import open_store
from shards.root.reading import read_part
from shards.tools.card import size_category
from shards.tools.where import find_sample
from tests.roots import part_of, rejects


def test_of_every_stored_sample_its_tar_its_part_and_its_weights(latents: Path, tars: Path, models: Path) -> None:
    for bucket in ("64x64", "128x128"):
        for shard in ("00000", "00001"):
            folder = part_of(latents, bucket, shard)
            for row, sample in enumerate(read_part(folder)):
                (found,) = find_sample(open_store(latents), sample["key"])
                place = found["stored"][bucket]
                assert (place["folder"], place["row"]) == (str(folder), row)
                assert [place["width"], place["height"]] == sample["size"][:2].tolist()
                tar = tars / f"{shard}.tar"
                assert found["tar"]["address"] == str(tar)
                assert found["tar"]["sha256"] == hashlib.sha256(tar.read_bytes()).hexdigest()
    assert found["weights"]["image"]["sha256"] == hash_weights("vae", models / "vae").sha256
    assert found["encoding"]["id"] == EncodingRecord.load(open_store(latents)).id
    made = found["parts"]["64x64"]
    assert made["settings"]["batch_size"] == 8 and "torch" in made["software"]
    assert made["made_by"]["host"] == os.uname().nodename and len(made["made_by"]["source_sha256"]) == 64


def test_of_every_rejected_sample_its_reason(latents: Path) -> None:
    lost = rejects(latents, "00001")
    assert len(lost) == 8
    for row in lost:
        (found,) = find_sample(open_store(latents), row["key"])
        assert not found["stored"] and {r["reason"] for r in found["refused"].values()} == {row["reason"]}


def test_the_command_prints_both_kinds(latents: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["where", str(latents), "000000000"])
    printed = capsys.readouterr().out
    for text in ("sample 000000000 of shard 00000", "row 0 of", "refused: too_small (80x64)", "sha256", "batch_size 8"):
        assert text in printed
    run(["where", str(latents), "000000000", "--json"])
    assert json.loads(capsys.readouterr().out)[0]["stored"]["64x64"]["row"] == 0


@pytest.mark.parametrize("data", [b"", b"PAR1", None])
def test_a_damaged_table_is_named(root: Path, data: bytes | None) -> None:
    table = part_of(root, "64x64", "00000") / "samples.parquet"
    table.write_bytes(table.read_bytes()[::-1] if data is None else data)
    with pytest.raises(DamagedFile, match=rf"{table} is missing or damaged"):
        find_sample(open_store(root), "000000000")
    table.unlink()
    with pytest.raises(DamagedFile, match=rf"{table} is missing or damaged"):
        run(["where", str(root), "000000000"])


def test_a_score_that_is_absent_is_null(
    latents: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_table = pq.read_table

    def without_scores(*args: Any, **options: Any) -> pa.Table:
        table = read_table(*args, **options)
        if "aesthetic" not in table.column_names:
            return table
        nans = pa.array([float("nan")] * len(table), pa.float32())
        return table.set_column(table.column_names.index("aesthetic"), "aesthetic", nans)

    monkeypatch.setattr(pq, "read_table", without_scores)
    run(["where", str(latents), "000000000", "--json"])
    printed = capsys.readouterr().out
    assert "NaN" not in printed and json.loads(printed)[0]["stored"]["64x64"]["aesthetic"] is None
    run(["where", str(latents), "000000000"])
    assert "aesthetic none" in capsys.readouterr().out


def test_the_card(latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(["card", str(latents), "--output", str(tmp_path / "cards" / "README.md")])
    _, front, text = (tmp_path / "cards" / "README.md").read_text().split("---\n", 2)
    run(["card", str(latents), "--output", f"memory://{tmp_path.name}/README.md"])
    assert open_store(f"memory://{tmp_path.name}").read("README.md").decode().split("---\n", 2)[2] == text
    fields = yaml.safe_load(front)
    assert fields["license"] is None and fields["size_categories"] == ["n<1K"]
    assert [config["config_name"] for config in fields["configs"]] == ["64x64", "128x128"]
    for config in fields["configs"]:
        assert list(latents.glob(config["data_files"]))
    encoding = EncodingRecord.load(open_store(latents))
    assert all(weights.sha256 in text for weights in encoding.weights.values())
    for row in ("| 64x64 | 30 |", "| 128x128 | 20 |", "| too_small | 10 |", "| batch_size | 8 |"):
        assert row in text
    # the card's reading example runs unchanged
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(latents.parent)
    scope: dict[str, object] = {}
    exec(example, scope)
    assert isinstance(scope["dataset"], StreamingDataset) and len(scope["dataset"]) == 30


def test_a_card_reads_from_a_bucket_that_has_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["card", str(make_root(tmp_path / "root", {"64x64": [0], "128x128": [3]}))])
    card = capsys.readouterr().out
    configs = yaml.safe_load(card.split("---")[1])["configs"]
    assert [config["config_name"] for config in configs] == ["128x128"]
    assert 'StreamingDataset(local="root/128x128"' in card and "{root: root, bucket: 128x128}" in card
    assert "| 64x64 | 0 | 0 |" in card


def test_a_table_of_the_card_keeps_its_columns(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The name of a caption table with a fallback contains the character that separates columns."""
    encoding = EncodingRecord.load(open_store(root))
    tables = {"captions": ("table:long|txt",), "tables": {"long": "0" * 64}}
    encoding.model_copy(update=tables).save(open_store(root))
    run(["card", str(root)])
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "table:long" in line and line.startswith("|"))
    assert len(re.split(r"(?<!\\)\|", row)) == 4


@pytest.mark.parametrize(
    ("samples", "name"),
    [(0, "n<1K"), (999, "n<1K"), (1000, "1K<n<10K"), (790_000_000, "100M<n<1B"), (10**11, "100B<n<1T")],
)
def test_size_categories(samples: int, name: str) -> None:
    assert size_category(samples) == name
