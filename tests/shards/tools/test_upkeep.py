"""recall, by-node and clean: effects and refusals."""

import json
import os
import re
import shutil
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path
from typing import Any

import fsspec
import pytest

from bench.kit.roots import make_root
from shards.__main__ import run
from shards.base.durable import read_sealed_json, write_sealed_json
from shards.base.errors import RequestError, exit_code_of
from shards.base.scratch import attempt_folder
from shards.format.tables import read_tables
from shards.open import open_store
from shards.root import index
from shards.root.commit import recall
from shards.root.committed import load_receipts
from shards.root.index import write_streaming
from shards.root.manifest import newest_manifest
from shards.root.publish import Publisher
from shards.tools.recall import node_totals
from shards.tools.stats import root_stats
from shards.tools.verify import verify_root
from tests.fixtures import encode_all, precompute_config
from tests.random_roots import random_root
from tests.roots import load_tars, tree


def words(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output on stderr, joined to one line."""
    return capsys.readouterr().err.replace("\n", " ")


def test_what_is_recalled_is_made_anew_and_its_part_stays(
    models: Path, tars: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = {name: data for name, data in tree(root).items() if "x" in name.split("/")[0]}
    host = os.uname().nodename
    run(["recall", str(root), "--node", host, "--dry-run"])
    assert "Would recall 4 parts with 50 samples" in capsys.readouterr().out
    assert len(load_receipts(open_store(root))) == 4
    for nobody in (["--node", "another"], ["--gpu", "GPU-1"], ["--since", "2999-01-01"]):
        run(["recall", str(root), *nobody])
        assert "No part matches that is not yet recalled" in capsys.readouterr().out
    run(["recall", str(root), "--node", host, "--since", "2020-01-01T10:00"])
    assert "Recalled 4 parts with 50 samples" in capsys.readouterr().out
    assert load_receipts(open_store(root)) == []
    now = tree(root)
    assert {name: now[name] for name in parts} == parts  # a run that started with them continues to read them
    encode_all(precompute_config(models, tars, root))
    assert [receipt.generation for receipt in load_receipts(open_store(root))] == [1] * 4
    assert (root / "commits" / "64x64" / "00000.g1.json").is_file()
    assert list(verify_root(open_store(root))) == []


def test_an_older_manifest_does_not_replace_the_index_json_of_a_newer_one(root: Path) -> None:
    """Two jobs finish at the same time, and the one that published first writes index.json last."""
    store = open_store(root)
    before = newest_manifest(store)
    recalled = load_receipts(store)[0]
    recall(store, {recalled.name: recalled.token}, "a test")
    after = Publisher(store).publish()
    assert before is not None and before.buckets != after.buckets
    for manifest in (after, before):
        write_streaming(store, manifest)
    assert list(verify_root(store)) == []


def test_a_finished_job_does_not_write_index_json_as_long_as_others_publish(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = newest_manifest(open_store(root))
    assert manifest is not None
    numbers = count(manifest.number + 1)
    monkeypatch.setattr(index, "newest_manifest", lambda store: manifest.model_copy(update={"number": next(numbers)}))
    write_streaming(open_store(root), manifest)
    assert next(numbers) == manifest.number + 1 + index.MAX_PASSES


def test_a_single_damaged_part_is_made_anew(
    models: Path, tars: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged, *others = load_receipts(open_store(root))
    (root / damaged.folder / "shard.00000.mds").write_bytes(b"damaged")
    assert damaged.folder in "".join(verify_root(open_store(root)))
    run(["recall", str(root), "--part", f"{root}/{damaged.folder}/shard.00000.mds"])  # as in the message of `verify`
    assert f"{damaged.folder}\nRecalled 1 part with {damaged.samples} samples" in capsys.readouterr().out
    assert load_receipts(open_store(root)) == others
    encode_all(precompute_config(models, tars, root))
    assert sorted(receipt.generation for receipt in load_receipts(open_store(root))) == [0, 0, 0, 1]
    assert list(verify_root(open_store(root))) == []


def test_a_damaged_part_that_is_encoded_differently_is_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The damaged files stay after the recall, but `verify` fails only because of active parts."""
    root = make_root(tmp_path / "root", {"64x64": [5, 5]})
    damaged, other = load_receipts(open_store(root))
    (root / damaged.folder / "shard.00000.mds").write_bytes(b"damaged")
    run(["recall", str(root), "--part", damaged.folder])
    make_root(root, {"64x64": [5, 5]}, missing_every=2)
    new, same = load_receipts(open_store(root))
    assert new.generation == 1 and new.folder != damaged.folder and same == other
    capsys.readouterr()
    run(["verify", str(root)])
    note, conclusion = capsys.readouterr().out.splitlines()
    assert note.startswith(f"{root}/{damaged.folder}/shard.00000.mds is 7 bytes long")
    assert note.endswith("(recalled; only runs pinned to an older index read it)")
    assert conclusion.startswith(f"{root} is intact, apart from the recalled parts listed above: ")
    (root / new.folder / "shard.00000.mds").unlink()
    assert exit_code_of(lambda: run(["verify", str(root)])) == 1
    assert "has 1 problem, listed above" in words(capsys)


def test_by_node_counts_what_each_made(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = root / "commits" / "64x64" / "00001.json"
    receipt = read_sealed_json(path)
    receipt["made_by"] |= {"host": "gpu-17", "gpu": "H100", "gpu_uuid": "GPU-9"}
    write_sealed_json(path, receipt)
    run(["by-node", str(root), "--json"])
    found = {node["host"]: node for node in json.loads(capsys.readouterr().out)}
    assert found.keys() == {"gpu-17", os.uname().nodename}
    assert (found["gpu-17"]["parts"], found["gpu-17"]["samples"], found["gpu-17"]["samples_in"]) == (1, 15, 23)
    assert found["gpu-17"]["rejects"] == {"no_caption": 1, "no_image": 1, "not_an_image": 1}
    assert found[os.uname().nodename]["parts"] == 3
    assert found["gpu-17"]["samples_per_second"] > 0
    assert {"fetch", "decode", "encode", "write", "upload", "total"} <= found["gpu-17"]["seconds"].keys()
    run(["by-node", str(root)])
    assert "gpu-17  H100 GPU-9" in re.sub(" {2,}", "  ", capsys.readouterr().out)
    for gpu in ("H100", "GPU-9"):  # by name, and by UUID
        run(["recall", str(root), "--gpu", gpu, "--dry-run"])
        assert "Would recall 1 part with 15 samples" in capsys.readouterr().out
    run(["recall", str(root), "--gpu", "GPU-9"])
    left = load_receipts(open_store(root))
    assert len(left) == 3 and ("64x64", "00001") not in {(receipt.bucket, receipt.tar) for receipt in left}


def test_by_node_counts_a_reject_once_for_all_buckets(root: Path, tmp_path: Path) -> None:
    """One machine encoded the whole root, so its rejects are those of `stats`."""
    store = open_store(root)
    (node,) = node_totals(store)
    rejected = root_stats(store, 0)["rejected"]
    assert node["rejects"] == {reason: rejected[reason] for reason in rejected if reason != "too_small"} != {}
    # samples that one bucket rejects and another stores, or that both reject for different reasons
    store = open_store(random_root(tmp_path / "random", 0))
    expected: dict[str, Counter[str]] = {}
    for books in load_tars(store):
        seen = set()
        for part in books.parts.values():
            assert part.made_by is not None
            _, refused = read_tables(store, part.folder, part.files)
            who = part.made_by.gpu_uuid or ""
            seen |= {(who, key, why) for key, why in zip(refused["key"], refused["reason"], strict=True)}
        for who, _, why in seen:
            if why != "too_small":
                expected.setdefault(who, Counter())[why] += 1
    assert {node["gpu_uuid"]: node["rejects"] for node in node_totals(store)} == expected


def make_orphan(root: Path) -> Path:
    """Make a copy of a part that no receipt names."""
    (receipt, *_) = load_receipts(open_store(root))
    return shutil.copytree(root / receipt.folder, root / receipt.bucket / "00000.00000000")


def aged(root: Path, seconds: float) -> Path:
    """Make all files look this old."""
    then = time.time() - seconds
    for path in root.rglob("*"):
        os.utime(path, (then, then))
    return root


def test_clean_removes_what_no_receipt_names_and_nothing_else(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    orphan = make_orphan(root)
    run(["recall", str(root), "--since", "2020-01-01"])
    before = {name: data for name, data in tree(root).items() if orphan.name not in name}
    (root / ".unfinished" / "torn").write_text("x")
    aged(root, 3 * 86400)
    run(["clean", str(root), "--older-than", "7d"])
    assert "Removed 0 orphans" in capsys.readouterr().out and orphan.is_dir()
    run(["clean", str(root), "--older-than", "2d"])
    assert "Removed 2 orphans" in capsys.readouterr().out and not orphan.exists()
    assert tree(root) == before and not list((root / ".unfinished").glob("*"))


@pytest.mark.parametrize("lost", ["64x64/00000.json", "64x64", ""])
def test_clean_keeps_parts_whose_receipts_were_lost(root: Path, lost: str) -> None:
    gone = root / "commits" / lost
    num_lost = sum(path.is_file() for path in [gone, *gone.rglob("*")])
    gone.unlink() if gone.is_file() else shutil.rmtree(gone)
    before = tree(aged(root, 30 * 86400))
    problems = list(verify_root(open_store(root)))
    assert len(problems) == num_lost and all("is missing, although its part was published" in line for line in problems)
    with pytest.raises(RequestError, match=rf"receipts? of {num_lost} published parts?, such as commits/"):
        run(["clean", str(root)])
    assert tree(root) == before
    run(["index", str(root)])  # the newest index lacks these parts, but an older one has them
    aged(root, 30 * 86400)
    with pytest.raises(RequestError, match="has lost the receipts"):
        run(["clean", str(root)])


def test_clean_waits_until_nobody_writes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    aged(root, 30 * 86400)
    orphan = root / "64x64" / "00007.00000000"
    orphan.mkdir()
    for written, message in ((time.time() - 60, "a running job may have parts"), (time.time() + 5000, "was written")):
        (orphan / "index.json").write_text("{}")
        os.utime(orphan / "index.json", (written, written))  # one is in the future
        assert exit_code_of(lambda: run(["clean", str(root), "--older-than", "1h"])) == 2
        assert message in words(capsys) and orphan.is_dir()


def test_clean_gives_up_uploads_that_never_ended(
    s3: str, latents: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On S3, an attempt that is killed during an upload leaves pieces that no listing shows."""
    files = fsspec.filesystem("s3")
    bucket = s3.removeprefix("s3://")
    files.put(f"{latents}/", f"{bucket}/root/", recursive=True)
    now = datetime.now(UTC)
    ages = {"root/64x64/00000.0/a.mds": 8, "root/64x64/00001.0/b.mds": 6, "root/64x64/00002.0/c.mds": 9, "roots/d": 9}
    for key in ages:
        upload = files.call_s3("create_multipart_upload", Bucket=bucket, Key=key)["UploadId"]
        files.call_s3("upload_part", Bucket=bucket, Key=key, UploadId=upload, PartNumber=1, Body=b"x" * 1000)

    call = type(files).call_s3
    asked: list[str] = []

    def paged(self: object, method: str, **options: str) -> dict[str, Any]:
        """Return one upload per page, where S3 returns a thousand, with realistic ages, where moto dates all to
        2010."""
        page: dict[str, Any] = call(self, method, **options)
        if method != "list_multipart_uploads":
            return page
        uploads = sorted(page["Uploads"], key=lambda upload: str(upload["Key"]))
        asked.append(options.get("KeyMarker", ""))
        (first, *others) = [upload for upload in uploads if upload["Key"] > asked[-1]]
        first["Initiated"] = now - timedelta(days=ages[first["Key"]])
        following = {"NextKeyMarker": first["Key"], "NextUploadIdMarker": first["UploadId"]}
        return page | {"Uploads": [first], "IsTruncated": bool(others)} | following

    monkeypatch.setattr(type(files), "call_s3", paged)
    before = open_store(f"{s3}/root").files()
    assert exit_code_of(lambda: run(["clean", f"{s3}/root"])) == 2 and "a running job may have parts" in words(capsys)
    monkeypatch.setattr("shards.tools.clean.clock", lambda store: now.timestamp() + 3700)
    run(["clean", f"{s3}/root", "--older-than", "7d"])
    said = capsys.readouterr().out
    assert "64x64/00000.0/a.mds (unfinished upload)\n64x64/00002.0/c.mds (unfinished upload)\n" in said
    assert "Removed 2 orphans" in said
    assert asked == ["", "root/64x64/00000.0/a.mds", "root/64x64/00001.0/b.mds"]
    monkeypatch.setattr(type(files), "call_s3", call)
    left = call(files, "list_multipart_uploads", Bucket=bucket)["Uploads"]
    assert {upload["Key"] for upload in left} == {"root/64x64/00001.0/b.mds", "roots/d"}
    assert open_store(f"{s3}/root").files() == before


def test_finished_commands_do_not_block_clean(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the commands of docs/how-to/look-into-a-root.md in order."""
    orphan = make_orphan(root)
    aged(root, 30 * 86400)
    run(["card", str(root), "--output", str(root / "README.md")])
    run(["index", str(root)])
    run(["exclude", str(root), "--keys", "000000001"])
    run(["recall", str(root), "--since", "2020-01-01"])
    run(["clean", str(root)])
    assert "Removed 1 orphan " in capsys.readouterr().out and not orphan.exists()
    (root / "commits" / "64x64" / "00009.json").write_text("{}")
    with pytest.raises(RequestError, match=r"00009\.json was written \d s ago, so a running job may have parts"):
        run(["clean", str(root)])


def test_clean_removes_attempts_of_machines_that_never_came_back(root: Path) -> None:
    with attempt_folder(open_store(root), "00007") as alive:
        lost = root / ".attempts" / "00008.0123456789ab"
        lost.mkdir()
        (lost / ".owner").write_text(json.dumps({"host": "gone", "machine": "", "boot": "b"}))
        (lost / "shard.00000.mds").write_text("x")
        aged(root, 2 * 86400)
        run(["clean", str(root)])
        assert lost.exists()
        aged(root, 30 * 86400)
        run(["clean", str(root)])
        assert not lost.exists() and (alive / ".owner").exists()
