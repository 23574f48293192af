"""Stage 1 with projected text: several towers and captions, damaged input, new captions, and several jobs at once."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from cluster.fleet import Failed, News
from cluster.pool import Failure
from precompute.__main__ import run as precompute
from precompute.job import projection
from shards.__main__ import run as shards
from shards.base.errors import DamagedInput, Preempted, RequestError, WorkError
from shards.base.store import LocalStore
from shards.format.encoding import EncodingRecord
from shards.root.committed import load_receipts
from shards.root.reading import read_part, text_latents
from shards.tools.verify import verify_root
from tests.fixtures import ray_replaced
from tests.roots import BOTH_BUCKETS, ONE_BUCKET, part_of, precompute_arguments
from tests.tiny_towers import texts

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("without_ray")]
WIDTH = 6


def run(
    models: Path, tars: Path, root: Path, *more: str, towers: Path | None = None, captions: str = "txt"
) -> EncodingRecord:
    """Encode in float16, with one text tower or, if `towers` is given, three of them."""
    of_towers = texts(towers, models) if towers else {}
    options = {f"--texts.{name}.{key}": value for name, tower in of_towers.items() for key, value in tower.items()}
    words = [word for name, value in options.items() for word in (name, str(value))]
    buckets = BOTH_BUCKETS if "--source" in more else ONE_BUCKET  # the sources have both
    precompute(precompute_arguments(models, tars, root, *words, "--captions", captions, *more, buckets=buckets))
    assert list(verify_root(LocalStore(root))) == []
    return EncodingRecord.load(LocalStore(root))


@pytest.fixture(scope="module")
def whole(models: Path, tars: Path, towers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the full-width states of three towers. Tests must not modify it."""
    with ray_replaced():
        run(models, tars, root := tmp_path_factory.mktemp("roots") / "whole", towers=towers)
    return root


def states_of(root: Path) -> dict[str, list[dict[str, np.ndarray]]]:
    """Return key → its captions' states, by tower."""
    encoding, found = EncodingRecord.load(LocalStore(root)), {}
    for receipt in load_receipts(LocalStore(root)):
        for sample in read_part(part_of(root, receipt.bucket, receipt.tar)):
            found[sample["key"]] = text_latents(sample, encoding)
    return found


def check_projected(whole: Path, root: Path) -> None:
    """Check that every tower's states are those of a root with full-width states, projected as encoding.json says."""
    towers = EncodingRecord.load(LocalStore(root)).texts
    expected, found = states_of(whole), states_of(root)
    assert expected.keys() == found.keys() and len(found) > 20
    for key, captions in expected.items():
        for one, other in zip(captions, found[key], strict=True):
            for name, tower in towers.items():
                states = torch.tensor(one[name])
                if tower.projection is not None:
                    states = (states.double() @ torch.tensor(tower.projection.array).double()).half().float()
                np.testing.assert_array_equal(states, other[name])


def test_each_tower_has_its_own_projection(
    models: Path, tars: Path, tmp_path: Path, towers: Path, whole: Path, in_threads: None
) -> None:
    clip = EncodingRecord.load(LocalStore(whole)).texts["clip"]
    widths = ("--texts.clip.width", str(clip.width), "--texts.t5.width", "5")  # clip keeps its full width
    encoding = run(models, tars, tmp_path / "root", "--text.width", str(WIDTH), *widths, towers=towers)
    assert encoding.texts["clip"] == clip
    assert [encoding.texts[name].width for name in ("text", "t5")] == [WIDTH, 5]
    check_projected(whole, tmp_path / "root")
    with pytest.raises(
        RequestError, match=rf"latents \(dimensions: t5 5, text {WIDTH}\), but `text\.width` is not set"
    ):
        run(models, tars, tmp_path / "root", towers=towers)
    # the derived root has different calibration captions, but is projected in the same way
    shards(["derive", str(whole), str(tmp_path / "derived"), "--text.width", "6"])
    check_projected(whole, tmp_path / "derived")


def test_towers_are_projected_jointly(models: Path, tars: Path, tmp_path: Path, towers: Path, whole: Path) -> None:
    joint = '[["text", "clip"], ["t5"]]'
    encoding = run(models, tars, tmp_path / "root", "--text.width", "6", "--text.joint", joint, towers=towers)
    made = {name: tower.projection for name, tower in encoding.texts.items()}
    assert all(p is not None and p.joint == (("text", "clip"), ("t5",)) for p in made.values())
    check_projected(whole, tmp_path / "root")
    like = ("--text.projection", str(tmp_path / "root"), "--shards", "00000")
    assert run(models, tars, tmp_path / "like", *like, towers=towers) == encoding
    with pytest.raises(RequestError, match=r"with `text\.joint: \[\['text', 'clip'\], \['t5'\]\]`, but"):
        run(models, tars, tmp_path / "o", *like, "--text.joint", '[["text"], ["clip"], ["t5"]]', towers=towers)


def test_a_new_tower_encodes_stored_captions_and_is_projected(
    models: Path, tars: Path, tmp_path: Path, towers: Path, whole: Path, latents: Path
) -> None:
    """The root's own states are projected as they are stored."""
    options = ("--text.width", "6", "--source", str(latents))
    encoding = run(models, tars, tmp_path / "root", *options, towers=towers)
    assert [encoding.texts[name].width for name in ("clip", "t5", "text")] == [6, 6, 6]
    check_projected(whole, tmp_path / "root")
    again = run(models, tars, tmp_path / "again", *options, "--shards", "00000", towers=towers)
    assert again == encoding


def test_a_projection_is_computed_from_new_captions(models: Path, tars: Path, tmp_path: Path, latents: Path) -> None:
    keys = list(states_of(latents))
    table = tmp_path / "captions.parquet"
    pq.write_table(pa.table({"key": keys, "vlm": [f"a new text about {key}" for key in keys]}), table)
    captions = json.dumps([{"table": str(table), "column": "vlm"}])
    options = ("--source", str(latents))
    run(models, tars, tmp_path / "whole", *options, captions=captions)
    encoding = run(models, tars, tmp_path / "root", "--text.width", "6", *options, captions=captions)
    made = encoding.texts["text"].projection
    stored = sum(receipt.samples for receipt in load_receipts(LocalStore(latents)))
    assert made is not None and made.calibration_captions == stored + -(-stored // 10)  # those of all buckets
    check_projected(tmp_path / "whole", tmp_path / "root")


def test_a_damaged_unit_is_not_in_the_calibration(models: Path, tars: Path, tmp_path: Path) -> None:
    shutil.copytree(tars, tmp_path / "tars")
    broken = tmp_path / "tars" / "00001.tar"
    broken.write_bytes(b"not a tar")
    with pytest.raises(DamagedInput, match=r"00001\.tar is damaged"):
        run(models, tmp_path / "tars", tmp_path / "root", "--text.width", "6")
    tower = EncodingRecord.load(LocalStore(tmp_path / "root")).texts["text"]
    assert tower.projection is not None and tower.projection.calibration_captions > 20


def test_a_root_created_by_a_concurrent_job_is_extended(
    models: Path, tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    options = ("--text.width", "6", "--shards", "00000")
    run(models, tars, first, *options)
    learn = projection.compute_projections

    def slow(*args: Any) -> Any:
        found = learn(*args)
        shutil.copytree(first, second)
        return {name: made.model_copy(update={"calibration_sha256": "different"}) for name, made in found.items()}

    monkeypatch.setattr("precompute.job.projection.compute_projections", slow)
    assert run(models, tars, second, *options) == EncodingRecord.load(LocalStore(first))


def test_a_root_with_full_width_states_created_by_a_concurrent_job_is_refused(
    latents: Path, models: Path, tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = projection.compute_projections

    def slow(*args: Any) -> Any:
        shutil.copytree(latents, tmp_path / "root")
        return compute(*args)

    monkeypatch.setattr("precompute.job.projection.compute_projections", slow)
    with pytest.raises(RequestError, match="already stores full-width states of text"):
        run(models, tars, tmp_path / "root", "--text.width", "6")


def test_a_failed_projection_writes_nothing(
    models: Path, tars: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = Failure(False, False, "no memory", "no memory")
    events: list[Any] = []
    monkeypatch.setattr("precompute.job.projection.Fleet", lambda *_: iter(events))
    events += [News("a node joined"), Failed("projection", None, "attempt 1 of 2 failed", failure, again=True)]
    with pytest.raises(Preempted, match="before the projection was computed"):
        run(models, tars, tmp_path / "root", "--text.width", "6")
    shown = capsys.readouterr().err
    assert "a node joined" in shown and "projection: attempt 1 of 2 failed: no memory" in shown
    events.append(Failed("projection", None, "attempt 2 of 2 failed", failure, again=False))
    with pytest.raises(WorkError, match=r"for `text\.width` could not be computed: no memory Nothing was written"):
        run(models, tars, tmp_path / "root", "--text.width", "6")
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text.width", "16"], r"`text\.width` 16 saves nothing"),
        (["--text.width", "6", "--shards", "00009"], "This unit does not exist: 00009"),
        (["--text.width", "6", "--text.projection", "none"], "none is not a latents root: it has no encoding"),
        (["--text.width", "6", "--text.joint", '[["text"], ["t5"]]'], "stored for text, but not for t5"),
    ],
)
def test_invalid_requests_are_refused_before_encoding(
    models: Path, tars: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        run(models, tars, tmp_path / "root", *options)
    assert not (tmp_path / "root").exists()
