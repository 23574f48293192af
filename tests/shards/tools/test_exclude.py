"""Samples excluded by key, URL or hash are in no batch of later runs; running ones keep theirs."""

import hashlib
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bench.kit.roots import make_root
from shards.__main__ import run as shards
from shards.base.durable import DamagedFile
from shards.base.errors import RequestError
from shards.base.store import LocalStore
from shards.root.exclusions import exclusion_ids, load_exclusion, make_exclusion
from tests.roots import part_of
from tests.runs import curve, run_module, train_fields, write_config
from train.data.draws import global_slots
from train.data.loader import Loader
from train.data.spec import DataConfig
from train.data.streams import open_data
from train.run.checkpoints.checkpoint import newest_checkpoint

pytestmark = pytest.mark.heavy


def keys(root: Path, **fields: Any) -> set[str]:
    """Return the keys of the samples that pass, in index order."""
    streams = [{"root": str(root), "bucket": "64x64"}]
    spec = open_data(DataConfig.model_validate({"streams": streams, "num_workers": 0, **fields}), 4)
    (stream,) = spec.streams
    rows = np.concatenate([table_keys(root, part["folder"].decode()) for part in stream.files.parts])
    if stream.selection is None:
        return set(rows.tolist())
    return set(rows[np.unpackbits(stream.selection.mask, count=len(rows)).view(bool)].tolist())


def batch_keys(root: Path) -> set[str]:
    """Return the keys of every sample of an epoch, in batches of one."""
    streams = {"streams": [{"root": str(root), "bucket": "64x64"}]}
    data = DataConfig.model_validate({**streams, "num_workers": 0, "num_canonical_nodes": 1})
    spec = open_data(data, 1)
    with closing(iter(Loader(data, spec, 1, 0, 0, global_slots(1, 0, 1, 1)))) as batches:
        return {key for batch in islice(batches, spec.steps_per_epoch) for key in batch.keys}


def table_keys(root: Path, part: str) -> np.ndarray:
    return np.array(pq.read_table(root / "64x64" / part / "samples.parquet")["key"].to_pylist())


def test_by_key_url_and_hash(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    everything = keys(root)
    assert batch_keys(root) == everything
    one, two, three, four = sorted(everything)[3:20:5]
    path = tmp_path / "urls.txt"
    path.write_text(f"http://example.org/{two}\n\n  http://example.org/nobody \n", "utf-8-sig")
    (tmp_path / "latin").write_text("http://example.org/\u00e9", "latin-1")
    with pytest.raises(RequestError, match="latin cannot be read: it is not UTF-8 text"):
        shards(["exclude", str(root), "--urls", "--file", str(tmp_path / "latin")])
    shards(["exclude", str(root), "--keys", one])
    assert "64x64: 1 sample in 1 of 2 parts" in capsys.readouterr().out
    assert keys(root) == everything - {one}
    shards(["exclude", str(root), "--file", str(path), "--urls", f"http://example.org/{four}"])
    assert "(3 lines, matched by url)" in capsys.readouterr().out
    assert keys(root) == everything - {one, two, four}
    table = pq.read_table(part_of(root, "64x64", three[:5]) / "samples.parquet").to_pylist()
    (hash,) = (row["sha256"] for row in table if row["key"] == three)
    shards(["exclude", str(root), "--hashes", hash.upper()])
    assert keys(root) == batch_keys(root) == everything - {one, two, three, four}
    assert len(exclusion_ids(LocalStore(root))) == 3
    # adding the same list again changes nothing
    capsys.readouterr()
    shards(["exclude", str(root), "--hashes", hash])
    assert "Already present: exclusions/" in capsys.readouterr().out and len(exclusion_ids(LocalStore(root))) == 3


def test_a_url_matches_however_it_is_spelled(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """URLs match by the same rules as in the opt-out list of `select`."""
    everything = keys(root)
    one, two = sorted(everything)[:2]
    spelled = [f"HTTPS://user@EXAMPLE.org.:8443/a/../{one}#top", f"example.org/{two}"]
    spelled.append(f"http://example.org/%{ord(two[0]):x}{two[1:]}")
    shards(["exclude", str(root), "--urls", *spelled])
    said = capsys.readouterr().out
    assert "(2 lines, matched by url)" in said and "No sample matches" not in said
    assert keys(root) == everything - {one, two}


def test_a_host_excludes_all_its_samples_as_in_an_opt_out_list(root: Path) -> None:
    everything = len(keys(root))
    spelled = ["EXAMPLE.org.", "*.example.org", "example.org:8080", "//example.org/"]
    for entry in (*spelled, "http://example.org", "HTTP://example.org"):
        assert make_exclusion("url", [entry]).values.to_pylist() == ["example.org"]
    shards(["exclude", str(root), "--urls", "example.org", "elsewhere.org"])
    with pytest.raises(RequestError, match=rf"0 remain\. Samples that fail, by rule: excluded \({everything}\)"):
        keys(root)


def test_another_scheme_is_matched_as_it_is_written() -> None:
    rows = pa.table({"url": ["s3://mill/A.jpg", "s3://mill/a.jpg", None, "http://mill.org/a.jpg"]})
    exclusion = make_exclusion("url", ["s3://mill/A.jpg", "mill.org"])
    assert exclusion.hits(rows).tolist() == [True, False, False, True]
    assert exclusion.lines_of(rows).tolist() == [1, -1, -1, 0]


def test_a_key_is_never_matched_by_its_host() -> None:
    rows = pa.table({"key": ["http://mill.org/a.jpg", "mill.org"]})
    assert make_exclusion("key", ["mill.org"]).hits(rows).tolist() == [False, True]


def test_a_sample_on_two_lists_counts_once_and_the_error_blames_no_filter(root: Path) -> None:
    everything = sorted(keys(root))
    shards(["exclude", str(root), "--keys", *everything])
    shards(["exclude", str(root), "--urls", *(f"http://example.org/{key}" for key in everything)])
    with pytest.raises(RequestError) as caught:
        keys(root)
    assert f"0 remain. Samples that fail, by rule: excluded ({len(everything)})" in str(caught.value)
    assert "filter" not in str(caught.value)


def test_lines_that_match_nothing_are_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The complete list is kept, because later tars may contain the other pictures."""
    shards(["exclude", str(root), "--urls", "http://example.org/nobody"])
    assert "No sample matches the line 'example.org/nobody'." in capsys.readouterr().out
    shards(["exclude", str(root), "--keys", min(keys(root)), "nobody"])
    assert "No sample matches the line 'nobody'." in capsys.readouterr().out
    assert len(exclusion_ids(LocalStore(root))) == 2


def test_every_line_that_matches_a_sample_counts(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://example.org/{min(keys(root))}"
    shards(["exclude", str(root), "--urls", url, "example.org", "*.org", "www.example.org"])
    assert "No sample matches the line 'www.example.org'." in capsys.readouterr().out


def test_with_a_filter_both_hold(root: Path) -> None:
    fields = {"filter": {"aesthetic": {"min": 5.5}}}
    passing = keys(root, **fields)
    gone = min(passing)
    shards(["exclude", str(root), "--keys", gone])
    assert keys(root, **fields) == passing - {gone} < keys(root)


def test_a_run_under_way_keeps_its_samples_and_the_next_one_leaves_them_out(tmp_path: Path) -> None:
    """Check the batches that the runs were trained on."""
    root = make_root(tmp_path / "root", {"64x64": [13, 29, 17]})

    def train(name: str, steps: int, *more: str) -> tuple[list[float], list[list[str]]]:
        config = write_config(tmp_path, train_fields(root, tmp_path / name, max_steps=steps))
        result = run_module("train", "--config", str(config), *more)
        assert result.returncode == 0, result.stderr
        return curve(tmp_path / name)

    reference = train("reference", 8)
    train("run", 4)
    out = sorted({key for batch in reference[1][4:] for key in batch})[:20]
    shards(["exclude", str(root), "--keys", *out])
    assert train("run", 8) == reference
    _, batches = train("run", 12, "--data.index", "newest")
    assert not {key for batch in batches[8:] for key in batch} & set(out)
    assert not batch_keys(root) & set(out)  # a new run's epoch
    checkpoint = newest_checkpoint(tmp_path / "run")
    assert checkpoint is not None
    (stream,) = checkpoint.fingerprint["streams"]
    assert stream["exclusions"] == exclusion_ids(LocalStore(root)) and stream["samples"] == 59 - len(out)


def test_a_damaged_list_is_named(root: Path) -> None:
    shards(["exclude", str(root), "--keys", min(keys(root))])
    (id,) = exclusion_ids(LocalStore(root))
    (root / "exclusions" / f"{id}.txt").write_text("000000004\n")
    with pytest.raises(DamagedFile, match=rf"{id}\.txt is missing or damaged"):
        load_exclusion(LocalStore(root), id)
    with pytest.raises(DamagedFile):
        keys(root)


def test_a_list_is_named_by_its_content() -> None:
    one, other = make_exclusion("key", ["b", "a", " a ", ""]), make_exclusion("key", ["a", "b"])
    assert one.id == other.id == "key." + hashlib.sha256(b"a\nb\n").hexdigest()
