"""The whole download: a misbehaving server, verified tars, and interrupted runs that resume."""

import errno
import hashlib
import io
import json
import shutil
import tarfile
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from precompute.download.__main__ import run
from precompute.download.config import DownloadConfig
from precompute.download.fetch import fetch_tar
from precompute.download.report import describe, write_report
from precompute.download.rows import PlannedTar, plan_download
from shards.base.errors import WorkError
from tests.precompute.download.bad_server import HTML, JPEG, PNG, BadServer
from tests.precompute.select import laion

pytestmark = pytest.mark.filterwarnings("ignore:.imghdr. is deprecated:DeprecationWarning")

# path → outcome in img2dataset's parquet file
OUTCOMES = {
    "jpeg/0": "success",
    "jpeg/1": "success",
    "png": "success",
    "redirect": "success",
    "slow/2": "success",
    "flaky": "success",
    "html": "success",  # rejecting images is up to stage 1
    "empty": "success",
    "noai-for-another": "success",
    "nowhere": "HTTP Error 404: Not Found",
    "error": "HTTP Error 500: Internal Server Error",
    "cut": "IncompleteRead(1028 bytes read, 100 more expected)",
    "huge": "too large: 10000000000000 bytes declared, 100000 allowed",
    "endless": "too large: more than the 100000 bytes allowed",
    "silent": "timed out",
    "trickle": "deadline: response not complete after 1 seconds",
    "noai": "Use of image disallowed by X-Robots-Tag directive",
    "noai-for-us": "Use of image disallowed by X-Robots-Tag directive",
}
LIMITS = {"timeout_seconds": 0.7, "deadline_seconds": 1.0, "max_bytes": 100_000, "allow_private_hosts": True}


def config(source: Path, output: Path, **fields: Any) -> DownloadConfig:
    base = {"input": source, "output": output, "threads": 8, "requests": LIMITS}
    return DownloadConfig.model_validate(base | fields)


@pytest.fixture(autouse=True)
def keep_opener(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urllib.request, "_opener", None)


@pytest.fixture(scope="module")
def downloaded(server: BadServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[DownloadConfig, PlannedTar]:
    """Download a tar with every kind of response, and publish it."""
    folder = tmp_path_factory.mktemp("download")
    urls = [f"{server.address}/{path}" for path in OUTCOMES]
    table = laion.rows(len(urls), URL=urls, TEXT=[None, *(f"caption {i}" for i in range(1, len(urls)))])
    laion.write(folder / "in.parquet", table.append_column("key", pa.array([f"k{i}" for i in range(len(urls))])))
    request = config(folder / "in.parquet", folder / "out", rows_per_shard=100)
    [shard] = plan_download(request)
    fetch_tar(request, shard)
    return request, shard


def members(tar: Path) -> dict[str, bytes]:
    with tarfile.open(tar) as archive:
        return {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]


def test_every_row_has_its_outcome(downloaded: tuple[DownloadConfig, PlannedTar]) -> None:
    rows = pq.read_table(downloaded[0].output / "00000.parquet").to_pylist()
    found = {row["url"].split("/", 3)[3]: row["error_message"] or row["status"] for row in rows}
    assert found == OUTCOMES


def test_the_bytes_are_the_originals(downloaded: tuple[DownloadConfig, PlannedTar]) -> None:
    content = members(downloaded[0].output / "00000.tar")
    for number, path in enumerate(OUTCOMES):
        key = f"00000{number:02d}"
        assert (f"{key}.jpg" in content) == (OUTCOMES[path] == "success")
        if OUTCOMES[path] != "success":
            continue
        expected = {"png": PNG, "html": HTML, "empty": b"", "flaky": JPEG, "noai-for-another": JPEG}
        suffix = {"redirect": b"/jpeg/redirected"}.get(path, b"/" + path.encode())
        data = content[f"{key}.jpg"]
        assert data == expected[path] if path in expected else data.startswith(JPEG) and suffix[-3:] in data
        meta = json.loads(content[f"{key}.json"])
        assert meta["sha256"] == hashlib.sha256(data).hexdigest()
        assert meta["source_key"] == f"k{number}" and meta["WIDTH"] == 640 and meta["AESTHETIC_SCORE"] == 5.5
        assert content[f"{key}.txt"].decode() == (f"caption {number}" if number else "")
    assert json.loads(content["0000000.json"])["caption"] is None


def test_the_report_adds_up(downloaded: tuple[DownloadConfig, PlannedTar]) -> None:
    request, shard = downloaded
    report = write_report(request.output, [shard], {}, 1, 2.0)
    assert report["rows"] == report["published_rows"] == len(OUTCOMES)
    assert report["successes"] + sum(report["failures"].values()) == len(OUTCOMES)
    assert report["failures"] == {
        "too_large": 2,
        "robots": 2,
        "http_404": 1,
        "http_5xx": 1,
        "cut": 1,
        "timeout": 1,
        "deadline": 1,
    }
    assert report["formats"] == {"jpeg": 6, "png": 1, "html": 1, "empty": 1}
    assert json.loads((request.output / "download_report.json").read_text()) == report
    text = describe(report)
    assert "1 of 1 tars are complete, 1 of them downloaded in this run (2.0 s); 0 failed." in text
    assert "18 rows: 9 images (50.0 %)" in text and "jpeg 6, empty 1, html 1, png 1" in text


def test_nothing_else_is_left_in_the_output(downloaded: tuple[DownloadConfig, PlannedTar]) -> None:
    found = {path.name for path in downloaded[0].output.iterdir()} - {"download_report.json", ".attempts"}
    assert found == {"00000.tar", "00000.parquet", "00000_stats.json", "download_plan.json"}


def test_a_shard_with_too_few_successes_fails(server: BadServer, tmp_path: Path) -> None:
    laion.write(tmp_path / "in.parquet", laion.rows(4, URL=[f"{server.address}/nowhere/{i}" for i in range(4)]))
    request = config(tmp_path / "in.parquet", tmp_path / "out", min_success_share=0.25)
    [shard] = plan_download(request)
    message = r"0 of 4 images were downloaded, but min_success_share requires 1; the most frequent error is: HTTP Error"
    with pytest.raises(WorkError, match=message):
        fetch_tar(request, shard)
    assert [path.name for path in (tmp_path / "out").glob("0*")] == []
    fetch_tar(request.model_copy(update={"min_success_share": 0.0}), shard)
    assert members(tmp_path / "out" / "00000.tar") == {}


def test_exactly_the_required_share_is_enough(server: BadServer, tmp_path: Path) -> None:
    """In floating point, 0.28 * 25 is more than 7."""
    urls = [f"{server.address}/{'jpeg' if i < 7 else 'nowhere'}/{i}" for i in range(25)]
    laion.write(tmp_path / "in.parquet", laion.rows(25, URL=urls))
    request = config(tmp_path / "in.parquet", tmp_path / "out", min_success_share=0.28)
    fetch_tar(request, plan_download(request)[0])
    assert len(members(tmp_path / "out" / "00000.tar")) == 7 * 3


@pytest.mark.parametrize("algorithm", ["md5", "sha256"])
def test_images_that_are_not_those_of_the_metadata_fail(server: BadServer, tmp_path: Path, algorithm: str) -> None:
    digest = hashlib.new(algorithm, PNG).hexdigest()
    jpeg = hashlib.new(algorithm, JPEG + b"/jpeg/redirected").hexdigest()
    other = hashlib.new(algorithm, b"other").hexdigest()
    cases = {
        "png/0": digest,
        "png/1": digest.upper(),
        "png/2": other,
        "png/3": None,
        "png/4": "unknown",
        "redirect": jpeg,
    }
    table = laion.rows(len(cases), URL=[f"{server.address}/{path}" for path in cases])
    laion.write(tmp_path / "in.parquet", table.append_column(algorithm, pa.array(cases.values(), pa.string())))
    request = config(tmp_path / "in.parquet", tmp_path / "out")
    [shard] = plan_download(request)
    fetch_tar(request, shard)
    rows = pq.read_table(tmp_path / "out" / "00000.parquet").sort_by("key").to_pylist()
    assert [row["status"] == "success" for row in rows] == [True, True, False, True, True, True]
    assert rows[2]["error_message"] == "hash mismatch"
    assert [row[f"source_{algorithm}"] for row in rows] == list(cases.values())
    assert write_report(tmp_path / "out", [shard], {}, 1, 1.0)["failures"] == {"hash_mismatch": 1}
    unchecked = config(tmp_path / "in.parquet", tmp_path / "unchecked", verify=False)
    fetch_tar(unchecked, *plan_download(unchecked))
    assert len(members(tmp_path / "unchecked" / "00000.tar")) == 3 * len(cases)


def test_characters_that_urls_must_escape(server: BadServer, tmp_path: Path) -> None:
    """The hash is found by the URL in the row."""
    paths = {"jpeg/ü b.jpg?q=й": "jpeg/%C3%BC%20b.jpg?q=%D0%B9", "jpeg/%C3%BC%20b.jpg": "jpeg/%C3%BC%20b.jpg"}
    digests = [hashlib.sha256(JPEG + f"/{sent}".encode()).hexdigest() for sent in paths.values()]
    table = laion.rows(3, URL=[f"{server.address}/{path}" for path in (*paths, "jpeg/ä")])
    table = table.append_column("sha256", pa.array([*digests, "0" * 64]))
    request = config(laion.write(tmp_path / "in.parquet", table), tmp_path / "out")
    fetch_tar(request, *plan_download(request))
    rows = pq.read_table(tmp_path / "out" / "00000.parquet").sort_by("key").to_pylist()
    assert [row["error_message"] for row in rows] == [None, None, "hash mismatch"]


def test_shrinking_pictures(server: BadServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    sizes = {}
    for name, size in (("large", (300, 150)), ("small", (60, 90))):
        buffer = io.BytesIO()
        image.new("RGB", size, "green").save(buffer, "PNG")
        sizes[name] = buffer.getvalue()
    monkeypatch.setattr(
        "tests.precompute.download.bad_server._Handler._picture",
        lambda self: self._answer(sizes[self.path[9:]]),
        raising=False,
    )
    urls = [f"{server.address}/picture/{name}" for name in sizes] + [f"{server.address}/html"]
    laion.write(tmp_path / "in.parquet", laion.rows(3, URL=urls))
    images = {"mode": "keep_ratio_largest", "max_side": 100}
    request = config(tmp_path / "in.parquet", tmp_path / "out", images=images)
    [shard] = plan_download(request)
    fetch_tar(request, shard)
    content = members(tmp_path / "out" / "00000.tar")
    found = {name: image.open(io.BytesIO(data)).size for name, data in content.items() if name.endswith("jpg")}
    assert found == {"000000000.jpg": (100, 50), "000000001.jpg": (60, 90)}
    for key in ("000000000", "000000001"):  # so that stage 1 can check the images
        recorded = json.loads(content[f"{key}.json"])["sha256"]
        assert recorded == hashlib.sha256(content[f"{key}.jpg"]).hexdigest()
    report = write_report(tmp_path / "out", [shard], {}, 1, 1.0)
    assert report["failures"] == {"not_an_image": 1} and report["formats"] == {"jpeg": 2}
    # a tar that could not be downloaded again is not complete, whatever is left of the earlier one
    (tmp_path / "out" / "00000_stats.json").write_text("{")
    report = write_report(tmp_path / "out", [shard], {"00000": "damaged"}, 0, 1.0)
    assert report["shards"]["published"] == report["successes"] == 0


def test_a_log_on_a_full_disk_does_not_stall_the_download(
    server: BadServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """img2dataset requests a few rows ahead. If there are more rows, and it fails to write to its log, it hangs."""
    urls = [f"{server.address}/jpeg/{number}" for number in range(8)]
    laion.write(tmp_path / "in.parquet", laion.rows(8, URL=urls))
    request = config(tmp_path / "in.parquet", tmp_path / "out", threads=1)
    [shard] = plan_download(request)
    (request.output / "00000.log").symlink_to("/dev/full")
    ended = threading.Event()

    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fetch() -> None:
        with pytest.raises(WorkError, match="the row counts differ"):
            fetch_tar(request, shard)
        ended.set()

    monkeypatch.setattr(tarfile.TarFile, "addfile", fail)
    threading.Thread(target=fetch, daemon=True).start()
    assert ended.wait(300)  # it takes about a second, unless it hangs


def test_a_full_disk_is_reported(server: BadServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    laion.write(tmp_path / "in.parquet", laion.rows(1, URL=[f"{server.address}/nowhere"]))
    request = config(tmp_path / "in.parquet", tmp_path / "out")
    [shard] = plan_download(request)
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="No space left on device") as caught:
        fetch_tar(request, shard)
    assert caught.value.errno == 28


def test_the_command_fetches_what_is_missing(
    server: BadServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], in_threads: None
) -> None:
    """Download in threads; tests/precompute/test_select_download.py downloads in a worker process."""
    urls = [f"{server.address}/jpeg/command-{i}" for i in range(5)]
    laion.write(tmp_path / "in.parquet", laion.rows(5, URL=urls))
    options = ["--config", "configs/download.yaml"]
    options += ["--input", str(tmp_path / "in.parquet"), "--output", str(tmp_path / "out"), "--rows_per_shard", "2"]
    options += ["--requests.allow_private_hosts", "true", "--threads", "4", "--processes", "1"]

    run(options)
    assert "3 of 3 tars are complete, 3 of them downloaded in this run" in capsys.readouterr().out
    assert [server.requests[f"/jpeg/command-{i}"] for i in range(5)] == [1] * 5
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("0000[02]*")}
    (tmp_path / "out" / "00001_stats.json").unlink()  # as after a kill while publishing
    (tmp_path / "out" / ".attempts" / "00001-123").mkdir(parents=True)
    run(options)
    assert "2 of 3 tars are complete, with 1 left to download" in capsys.readouterr().out
    assert [server.requests[f"/jpeg/command-{i}"] for i in range(5)] == [1, 1, 2, 2, 1]
    assert times == {path: path.stat().st_mtime_ns for path in times}
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {f"0000{i}{end}" for i in range(3) for end in (".tar", ".parquet", "_stats.json")} | {
        "download_plan.json",
        "download_report.json",
        ".lock",
    }


def test_the_error_names_only_the_first_failed_tars(tmp_path: Path, in_threads: None) -> None:
    laion.write(tmp_path / "in.parquet", laion.rows(7, URL=[f"http://127.0.0.1:1/{i}" for i in range(7)]))
    options = ["--input", str(tmp_path / "in.parquet"), "--output", str(tmp_path / "out"), "--rows_per_shard", "1"]
    with pytest.raises(WorkError, match=r"^7 of 7 tars .* 00004: only 0 .*; and 2 more, see .*report\.json") as caught:
        run([*options, "--processes", "1", "--shard_attempts", "1"])
    assert "00005" not in str(caught.value)
    assert len(json.loads((tmp_path / "out" / "download_report.json").read_text())["shards"]["failed"]) == 7
