"""Datasets that are not LAION's: recognised by their columns, or described in the config."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.download.config import DownloadConfig
from precompute.download.rows import plan_download, read_rows
from precompute.select.datasets import COLUMNS, DatasetConfig
from precompute.select.job import select
from shards.base.errors import RequestError, WorkError
from tests.precompute.select import laion

pytestmark = pytest.mark.usefixtures("no_plot")

NUMBER = 6
URLS = [f"http://example.com/{i}.jpg" for i in range(NUMBER)]
TEXTS = [f"picture {i}" for i in range(NUMBER)]
BOXES = [[[0.1, 0.2, 0.3, 0.4]] if i % 2 else [] for i in range(NUMBER)]
DATACOMP: dict[str, list[Any]] = {
    "uid": [f"{i:032x}" for i in range(NUMBER)],
    "url": URLS,
    "text": TEXTS,
    "original_width": [640] * NUMBER,
    "original_height": [480] * NUMBER,
    "clip_b32_similarity_score": [0.1 * i for i in range(NUMBER)],
    "clip_l14_similarity_score": [0.05 * i for i in range(NUMBER)],
    "face_bboxes": BOXES,
    "sha256": [hashlib.sha256(bytes([i])).hexdigest() for i in range(NUMBER)],
}
COYO: dict[str, list[Any]] = {
    "id": list(range(NUMBER)),
    "url": URLS,
    "text": TEXTS,
    "width": [640] * NUMBER,
    "height": [480] * NUMBER,
    "image_phash": [f"{i:016x}" for i in range(NUMBER)],
    "text_length": [9] * NUMBER,
    "num_faces": [i % 2 for i in range(NUMBER)],
    "clip_similarity_vitb32": [0.1 * i for i in range(NUMBER)],
    "clip_similarity_vitl14": [0.05 * i for i in range(NUMBER)],
    "nsfw_score_opennsfw2": [0.01] * (NUMBER - 1) + [0.9],
    "nsfw_score_gantman": [0.02 * i for i in range(NUMBER)],
    "watermark_score": [0.3] * NUMBER,
    "aesthetic_score_laion_v2": [3.0] + [5.0] * (NUMBER - 1),
}
PD12M: dict[str, list[Any]] = {
    "id": [f"id {i}" for i in range(NUMBER)],
    "url": URLS,
    "caption": TEXTS,
    "width": [640] * NUMBER,
    "height": [480] * NUMBER,
    "mime_type": ["image/jpeg"] * NUMBER,
    "hash": [hashlib.md5(bytes([i])).hexdigest() for i in range(NUMBER)],
    "license": ["CC0" if i % 2 else "PDM" for i in range(NUMBER)],
    "source": ["a museum"] * NUMBER,
}
NO_SCORES = {"min_aesthetic": None, "max_punsafe": None}


def selected(tmp_path: Path, columns: dict[str, list[Any]], **fields: Any) -> pa.Table:
    laion.write(tmp_path / "in" / "a.parquet", pa.table(columns))
    select(laion.config(tmp_path / "in", tmp_path / "out", **fields))
    return pq.read_table(tmp_path / "out" / "selected-00000.parquet")


def test_datacomp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = selected(tmp_path, DATACOMP, filters=NO_SCORES | {"min_similarity": 0.1}).to_pydict()
    said = capsys.readouterr().out
    assert "Metadata: 1 file. Columns: DataComp. Its authors ask users to blur faces" in said
    rows = [2, 3, 4, 5]
    assert table["URL"] == [URLS[i] for i in rows] and table["source_key"] == [DATACOMP["uid"][i] for i in rows]
    assert table["face_bboxes"] == [BOXES[i] for i in rows] and table["sha256"] == [DATACOMP["sha256"][i] for i in rows]
    for name in ("clip_l14_similarity_score", "clip_b32_similarity_score"):
        assert table[name] == pytest.approx([DATACOMP[name][i] for i in rows])
    assert "similarity" not in table and table["LANGUAGE"] == [None] * 4


def test_coyo(tmp_path: Path) -> None:
    """Its scores have their own names, and LAION's filters apply to them."""
    filters = {"scores": {"nsfw_score_gantman": {"max": 0.07}, "aesthetic_score_laion_v2": {"max": 5}}}
    laion.write(tmp_path / "in" / "a.parquet", pa.table(COYO))
    funnel = select(laion.config(tmp_path / "in", tmp_path / "out", filters=filters))
    dropped = {step["keeps"]: step["by_value"] for step in funnel["rules"] if step["by_value"]}
    assert dropped == {
        "aesthetic_score_laion_v2 ≥ 4.5": 1, "nsfw_score_opennsfw2 < 0.1": 1, "nsfw_score_gantman ≤ 0.07": 1
    }  # fmt: skip
    table = pq.read_table(tmp_path / "out" / "selected-00000.parquet").to_pydict()
    assert table["URL"] == URLS[1:4] and table["image_phash"] == COYO["image_phash"][1:4]
    assert table["num_faces"] == [1, 0, 1] and table["source_key"] == ["1", "2", "3"]
    assert not {"AESTHETIC_SCORE", "punsafe", "pwatermark", "similarity", "text_length"} & table.keys()


def test_pd12m(tmp_path: Path) -> None:
    table = selected(tmp_path, PD12M, filters=NO_SCORES).to_pydict()
    assert table["TEXT"] == TEXTS and table["md5"] == PD12M["hash"] and table["license"] == PD12M["license"]
    assert table["hash"] == [None] * NUMBER and table["source"] == PD12M["source"]
    names = {"id": "s3_key", "hash": "md5_hash", "license": "license_type"}
    older = {names.get(name, name): values for name, values in PD12M.items()} | {"id": list(range(NUMBER))}
    table = selected(tmp_path / "older", older, filters=NO_SCORES).to_pydict()
    assert table["md5"] == PD12M["hash"] and table["license"] == PD12M["license"]


def test_a_dataset_described_in_the_config(tmp_path: Path) -> None:
    columns: dict[str, list[Any]] = {
        "link": URLS,
        "alt": TEXTS,
        "w": [640] * NUMBER,
        "h": [480] * NUMBER,
        "beauty": [5.0] * 3 + [1.0] * 3,
        "year": list(range(NUMBER)),
        "hps": [0.1 * i for i in range(NUMBER)],
    }
    names = {"URL": "link", "TEXT": "alt", "WIDTH": "w", "HEIGHT": "h", "AESTHETIC_SCORE": "beauty"}
    filters = {"max_punsafe": None, "scores": {"hps": {"min": 0.1}}}
    found = selected(tmp_path, columns, dataset={"columns": names, "keep": ["year"]}, filters=filters)
    assert found.column_names[:4] == ["URL", "TEXT", "WIDTH", "HEIGHT"]
    assert found.select(["URL", "beauty", "year"]).to_pylist() == [
        {"URL": URLS[i], "beauty": 5.0, "year": i} for i in (1, 2)
    ]
    assert found["hps"].to_pylist() == pytest.approx([0.1, 0.2])


def test_a_score_may_have_the_name_of_another_filter(tmp_path: Path) -> None:
    """Both filters set a minimum for `side`."""
    columns: dict[str, list[Any]] = {
        "URL": URLS,
        "TEXT": TEXTS,
        "WIDTH": [640] * NUMBER,
        "HEIGHT": [480] * NUMBER,
        "side": [float(i) for i in range(NUMBER)],
    }
    filters = NO_SCORES | {"min_side": 256, "scores": {"side": {"min": 2}}}
    assert selected(tmp_path, columns, filters=filters)["URL"].to_pylist() == URLS[2:]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, r"no column for AESTHETIC_SCORE.*; no column for punsafe.*--filters.min_aesthetic null --filters.max_pun"),
        ({"dataset": {"columns": {"URL": "href"}}}, "in has no column href, which `dataset`"),
        ({"dataset": {"columns": {"Url": "url"}}}, "dataset.columns has the unknown name Url. Choose from URL, TEXT"),
        (
            {"filters": NO_SCORES | {"scores": {"source": {"min": 1}}}},
            "the column `source` has type string, so filters.scores.source cannot bound it",
        ),
        (
            {"filters": NO_SCORES | {"scores": {"caption": {"min": 1}}}},
            "the column `caption` has type string, so filters.scores.caption cannot bound it",
        ),
        (
            {"dataset": {"columns": {"license": "source"}, "keep": ["license"]}},
            "dataset.keep has the column license, but selected files have another column for this name",
        ),
        ({"dataset": {"keep": ["views"]}}, "in has no column views, which `dataset`"),
        ({"filters": NO_SCORES | {"scores": {"hps": {"min": 1}}}}, "has no column hps, which `dataset` or `filters.sc"),
    ],
)
def test_metadata_that_does_not_fit(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        selected(tmp_path, PD12M, **fields)


def test_two_datasets_are_not_mixed(tmp_path: Path) -> None:
    laion.write(tmp_path / "in" / "a.parquet", pa.table(COYO))
    laion.write(tmp_path / "in" / "b.parquet", pa.table(PD12M))
    with pytest.raises(
        RequestError, match=r"a.parquet and .*b.parquet belong to different datasets \(COYO-700M, and PD12"
    ):
        select(laion.config(tmp_path / "in", tmp_path / "out"))
    numbers = PD12M | {"source": list(range(NUMBER))}
    laion.write(tmp_path / "in" / "a.parquet", pa.table(numbers))
    with pytest.raises(RequestError, match=r"b.parquet has a column whose type differs from that in other files"):
        select(laion.config(tmp_path / "in", tmp_path / "out", filters=NO_SCORES))


def test_types_that_differ_only_in_width_are_unified(tmp_path: Path) -> None:
    """Such as integers that pandas wrote as floating-point numbers, and columns without any value."""
    faces = {"num_faces": pa.array([0.0, 1.0, None, 1.0, 0.0, 2.0])}
    laion.write(tmp_path / "in" / "a.parquet", pa.table(COYO))
    laion.write(tmp_path / "in" / "b.parquet", pa.table(COYO | faces | {"image_phash": pa.nulls(NUMBER)}))
    select(laion.config(tmp_path / "in", tmp_path / "out", urls={"drop_duplicates": False}))
    table = pq.read_table(tmp_path / "out" / "selected-00000.parquet")
    assert table["num_faces"].to_pylist() == [1, 0, 1, 0, 1, None, 1, 0]
    assert table["image_phash"].to_pylist() == [*COYO["image_phash"][1:5], None, None, None, None]


def test_a_score_without_any_value_drops_the_rows(tmp_path: Path) -> None:
    """pandas writes such a column with the null type."""
    laion.write(tmp_path / "in" / "a.parquet", pa.table(COYO))
    laion.write(tmp_path / "in" / "b.parquet", pa.table(COYO | {"nsfw_score_gantman": pa.nulls(NUMBER)}))
    config = laion.config(
        *(tmp_path / "in", tmp_path / "out"),
        urls={"drop_duplicates": False},
        filters={"scores": {"nsfw_score_gantman": {"max": 0.5}}},
    )
    select(config)
    urls = pq.read_table(tmp_path / "out" / "selected-00000.parquet")["URL"].to_pylist()
    assert urls and len(urls) == len(set(urls)) <= NUMBER


def test_a_bound_can_be_on_any_name_and_switched_off(tmp_path: Path) -> None:
    scores = {"original_width": {"min": 641}, "clip_b32_similarity_score": None}
    message = r"The rule `scores\.original_width\.min` \(original_width ≥ 641\) dropped the most"
    with pytest.raises(WorkError, match=message):
        selected(tmp_path, DATACOMP, filters=NO_SCORES | {"scores": scores})


def test_kept_columns_reach_the_tars(tmp_path: Path) -> None:
    selected(tmp_path, DATACOMP, filters=NO_SCORES)
    config = DownloadConfig.model_validate({"input": tmp_path / "out", "output": tmp_path / "tars"})
    [tar] = plan_download(config)
    rows = read_rows(tar, None)
    assert json.loads(json.dumps(rows["face_bboxes"].to_pylist())) == BOXES
    assert rows["source_sha256"].to_pylist() == DATACOMP["sha256"]
    assert set(rows.column_names) >= {"clip_b32_similarity_score", "source_key", "url", "caption"}


def test_string_views_reach_the_tars(tmp_path: Path) -> None:
    numbers = {name: PD12M[name] for name in ("width", "height")}
    views = {name: pa.array(PD12M[name], pa.string_view()) for name in ("url", "caption", "source")}
    selected(tmp_path, numbers | views, filters=NO_SCORES, dataset={"keep": ["source"]})
    [tar] = plan_download(DownloadConfig.model_validate({"input": tmp_path / "out", "output": tmp_path / "tars"}))
    rows = read_rows(tar, None)
    assert rows.select(["url", "caption", "source"]).to_pylist() == [
        {"url": url, "caption": text, "source": "a museum"} for url, text in zip(URLS, TEXTS, strict=True)
    ]


def test_every_name_that_a_dataset_may_give_is_documented() -> None:
    about = DatasetConfig.model_fields["columns"].description
    assert about is not None and all(name in about for name in COLUMNS)
