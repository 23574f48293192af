"""Both stages on S3: tars and latents at s3:// URLs, with the users' commands."""

import json
import os
import re
from pathlib import Path
from typing import Any

import boto3  # type: ignore[import-untyped]
import fsspec
import pytest
import torch
import yaml
from streaming import StreamingDataset
from streaming.base.util import clean_stale_shared_memory

from precompute.__main__ import run as precompute
from precompute.preview import run as preview
from shards.__main__ import run as shards
from shards.dataset import LatentDataset
from shards.open import open_store
from tests.fixtures import precompute_config
from tests.roots import comparable
from tests.runs import curve, train_fields, write_config
from train.__main__ import run as train
from train.run.reporting.json_lines import read_json_lines


def test_tars_and_latents_on_s3(
    s3: str, latents: Path, models: Path, tars: Path, tmp_path: Path, without_ray: None
) -> None:
    fsspec.filesystem("s3").put(f"{tars}/", f"{s3}/tars/", recursive=True)
    fields = precompute_config(models, tars, f"{s3}/latents").model_dump(mode="json") | {"input": f"{s3}/tars"}
    (config := tmp_path / "precompute.yaml").write_text(yaml.safe_dump(fields))

    precompute(["--config", str(config)])
    elsewhere = ("input", "tar")  # fields with addresses
    assert comparable(f"{s3}/latents", *elsewhere) == comparable(latents, *elsewhere)
    receipt = json.loads(open_store(f"{s3}/latents").read("commits/64x64/00000.json"))
    assert receipt["input"]["address"] == f"{s3}/tars/00000.tar"
    shards(["verify", f"{s3}/latents"])
    preview([f"{s3}/latents", "--output", str(tmp_path / "page.html")])
    assert (tmp_path / "page.html").stat().st_size > 10_000

    curves = []
    for name, root, data in (("near", latents, {}), ("far", f"{s3}/latents", {"cache": str(tmp_path / "cache")})):
        streams = {"streams": [{"root": str(root), "bucket": "64x64"}]}
        validation = {"root": str(root), "bucket": "64x64", "samples": 8, "every": 3}
        changes = {"max_steps": 3, "validation": validation}
        run = write_config(tmp_path, train_fields(latents, tmp_path / name, data=streams | data, **changes))
        train(["--config", str(run)])
        val_losses: list[Any] = [row.get("val_loss") for row in read_json_lines(tmp_path / name / "metrics.jsonl")]
        curves.append((*curve(tmp_path / name), val_losses))
    assert curves[0] == curves[1] and curves[0][-1][2] > 0


def test_streamings_own_reader_reads_a_root_at_an_address(
    s3: str, latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("S3_ENDPOINT_URL", os.environ["AWS_ENDPOINT_URL"])  # streaming's name for the file
    fsspec.filesystem("s3").put(f"{latents}/", f"{s3}/read/", recursive=True)
    clean_stale_shared_memory()
    plain = StreamingDataset(remote=f"{s3}/read/64x64", local=str(tmp_path / "plain"), batch_size=1)
    near = LatentDataset(latents, "64x64", posterior_mean=True, batch_size=1)
    far = LatentDataset(f"{s3}/read", "64x64", posterior_mean=True, local=str(tmp_path / "far"), batch_size=1)
    assert len(plain) == len(far) == len(near) == 30
    for i in range(30):
        assert plain[i]["key"] == far[i]["key"] == near[i]["key"]
        torch.testing.assert_close(far[i]["image_latents"], near[i]["image_latents"], rtol=0, atol=0)
        torch.testing.assert_close(far[i]["text.text"], near[i]["text.text"], rtol=0, atol=0)


def test_a_large_file_goes_up_in_pieces(s3: str, tmp_path: Path) -> None:
    """S3's ETag of an object contains the number of pieces."""
    with (tmp_path / "large").open("wb") as file:
        file.truncate(40 << 20)
    store = open_store(f"{s3}/pieces")
    store.put({"large": tmp_path / "large"})
    entry = store.listing()["large"]
    assert entry.bytes == 40 << 20 and entry.etag.strip('"').endswith("-3")


def test_the_rule_that_a_page_gives_a_bucket(s3: str) -> None:
    """S3 accepts the page's JSON, which removes unfinished uploads after a week."""
    page = Path("docs/how-to/s3.md").read_text()
    (rules,) = re.findall(r"--lifecycle-configuration '([^']+)'", page)
    client, bucket = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"]), s3.removeprefix("s3://")
    client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=json.loads(rules))
    (rule,) = client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]
    assert rule["Status"] == "Enabled" and rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 7}
