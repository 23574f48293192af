"""From metadata to tars with both commands; all counts add up exactly."""

import json
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.download.__main__ import run as download
from precompute.select.__main__ import run as select
from tests.precompute.download.bad_server import BadServer, serve
from tests.precompute.select import laion

FILE_ROWS = 250_000


def make_metadata(folder: Path, num_rows: int, num_pictures: int, server: BadServer) -> Counter[str]:
    """Write `num_rows` rows, of which `num_pictures` pass; return how many rows each rule should drop."""
    random = np.random.default_rng(0)
    fates = ["aesthetic", "punsafe", "no punsafe", "min_side", "url_scheme", "duplicate"]
    fate = np.array([*["selected"] * num_pictures, *random.choice(fates, num_rows - num_pictures)])
    random.shuffle(fate[1:])  # the first row is selected, so that every duplicate has a predecessor
    urls = np.char.add(f"{server.address}/jpeg/", np.cumsum(fate == "selected").astype(str)).astype(object)
    urls[fate == "url_scheme"] = "ftp://example.com/x.jpg"
    table = pa.table(
        {
            "URL": urls,
            "TEXT": [f"row {i}" for i in range(num_rows)],
            "WIDTH": np.where(fate == "min_side", 255, 256).astype(np.int32),
            "HEIGHT": np.full(num_rows, 512, np.int32),
            "punsafe": pa.array(np.where(fate == "punsafe", 0.1, 0.05), mask=fate == "no punsafe"),
            "AESTHETIC_SCORE": np.where(fate == "aesthetic", 4.49, 4.5),
        }
    )
    for start in range(0, num_rows, FILE_ROWS):
        laion.write(folder / f"part-{start:08d}.parquet", table.slice(start, FILE_ROWS))
    return Counter(fate.tolist())


@pytest.mark.parametrize(
    ("num_rows", "num_pictures"), [(20_000, 90), pytest.param(1_000_000, 1_000, marks=pytest.mark.slow)]
)
def test_numbers_add_up_from_metadata_to_tars(num_rows: int, num_pictures: int, tmp_path: Path, no_plot: None) -> None:
    with serve() as server:
        expected = make_metadata(tmp_path / "metadata", num_rows, num_pictures, server)
        selected, tars = tmp_path / "selected", tmp_path / "tars"
        options = ["--metadata", str(tmp_path / "metadata"), "--output", str(selected), "--processes", "1"]
        select(["--config", "configs/select.yaml", *options, "--urls.allow_private_hosts", "true"])
        options = ["--input", str(selected), "--output", str(tars), "--rows_per_shard", "400", "--processes", "1"]
        download(["--config", "configs/download.yaml", *options, "--requests.allow_private_hosts", "true"])
        assert server.requests == Counter({f"/jpeg/{i}": 1 for i in range(1, num_pictures + 1)})

    funnel = json.loads((selected / "funnel.json").read_text())
    steps = {step["rule"]: step for step in funnel["rules"]}
    assert funnel["rows_in"] == num_rows and funnel["rows_out"] == num_pictures
    assert steps["punsafe"]["no_value"] == expected["no punsafe"]
    for rule in ("aesthetic", "punsafe", "min_side", "url_scheme", "duplicate"):
        assert steps[rule]["by_value"] == expected[rule]
    assert pq.read_table(selected / "selected-00000.parquet").num_rows == num_pictures

    report = json.loads((tars / "download_report.json").read_text())
    assert report["rows"] == report["successes"] == report["formats"]["jpeg"] == num_pictures
    pictures = 0
    for path in sorted(tars.glob("*.tar")):
        with tarfile.open(path) as archive:
            pictures += sum(name.endswith(".jpg") for name in archive.getnames())
    assert pictures == num_pictures
