"""Roots with projected text: derived from full-width states, or written by stage 1 with the same projection."""

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from precompute.__main__ import run as precompute
from shards.__main__ import run as shards
from shards.base.errors import Preempted, RequestError, WorkError
from shards.base.store import LocalStore
from shards.derive.conversion import Conversion
from shards.derive.part import text_latents as states_of
from shards.format.encoding import EncodingRecord
from shards.format.projection import hash_order
from shards.format.towers import Projection, encode_matrix
from shards.root.committed import load_receipts
from shards.root.reading import read_part, text_latents
from shards.root.shared import load_uncond
from shards.tools.card import dataset_card
from shards.tools.verify import verify_root
from shards.tools.where import describe_sample, find_sample
from tests.fixtures import clip_tower, encode_all, folder_of, precompute_config
from tests.roots import ONE_BUCKET, part_of, parts, precompute_arguments, tree

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("in_threads")]


def derive(source: Path, out: Path, *options: str) -> Path:
    shards(["derive", str(source), str(out), *options])
    assert list(verify_root(LocalStore(out))) == []
    return out


def record(root: Path) -> EncodingRecord:
    return EncodingRecord.load(LocalStore(root))


def test_a_derived_root_equals_stage_1s_with_the_same_projection(
    latents: Path, models: Path, tars: Path, tmp_path: Path
) -> None:
    """tests/precompute/test_projection.py compares states in float16."""
    derived = derive(latents, tmp_path / "derived", "--text.width", "8", "--text.storage", "float8")
    text = {"width": 8, "projection": str(derived), "storage": "float8"}
    encode_all(config := precompute_config(models, tars, tmp_path / "direct", text=text))
    assert record(derived) == record(folder_of(config))
    assert parts(derived) == parts(folder_of(config))
    assert (derived / "uncond.safetensors").read_bytes() == (tmp_path / "direct" / "uncond.safetensors").read_bytes()


def test_the_projection_is_computed_from_the_states_of_the_source(latents: Path, tmp_path: Path) -> None:
    derived, whole = derive(latents, tmp_path / "derived", "--text.width", "8"), record(latents)
    states = []
    for receipt in load_receipts(LocalStore(latents)):
        part = part_of(latents, receipt.bucket, receipt.tar)
        states += [text_latents(sample, whole)[0]["text"] for sample in read_part(part)]
    empty, copies = load_uncond(LocalStore(latents))["text"].states, -(-len(states) // 10)
    assert empty is not None
    energy = np.linalg.svd(np.concatenate(states + [empty.numpy()] * copies).astype(np.float64), compute_uv=False) ** 2
    projection = record(derived).texts["text"].projection
    assert projection is not None and projection.calibration_captions == len(states) + copies
    np.testing.assert_allclose(projection.energy_shares, energy[:8] / energy.sum(), atol=1e-6)


def test_a_resumed_derivation_reuses_the_projection(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = derive(latents, tmp_path / "once", "--text.width", "8")
    again = tmp_path / "again"
    shutil.copytree(once, again)
    for receipt in load_receipts(LocalStore(again)):
        if receipt.tar == "00001":
            (again / receipt.name).unlink()
            shutil.rmtree(again / receipt.folder)
    monkeypatch.setattr("shards.derive.job.compute_from_root", None)
    derive(latents, again, "--text.width", "8")
    assert (
        parts(again) == parts(once) and (again / "encoding.json").read_bytes() == (once / "encoding.json").read_bytes()
    )


def test_a_smaller_width_truncates_the_projection(latents: Path, tmp_path: Path) -> None:
    wide = derive(latents, tmp_path / "wide", "--text.width", "12", "--text.storage", "float16")
    narrow = derive(wide, tmp_path / "narrow", "--text.width", "text=5")
    direct = derive(latents, tmp_path / "direct", "--text.width", "5")
    assert parts(narrow) == parts(direct) and record(narrow) == record(direct)
    like = derive(latents, tmp_path / "like", "--text.projection", str(narrow))
    assert parts(like) == parts(direct)
    with pytest.raises(RequestError, match=r"already stores full-width states of text"):
        derive(latents, derive(latents, tmp_path / "whole"), "--text.width", "5")
    with pytest.raises(RequestError, match=r"keeps only 5 dimensions of text, so 6 are not available"):
        derive(narrow, tmp_path / "wider", "--text.width", "6")


def test_stage_1_computes_a_projection_from_calibration_captions(
    latents: Path, models: Path, tars: Path, tmp_path: Path, without_ray: None
) -> None:
    root = tmp_path / "root"
    arguments = precompute_arguments(models, tars, root, "--text.width", "8", "--shards", "00000", buckets=ONE_BUCKET)
    precompute(arguments)
    tower = record(root).texts["text"]
    assert tower.projection is not None and tower.width == 8 and tower.projection.energy_kept > 0.8
    before = tree(root)
    precompute(arguments)
    assert tree(root) == before
    with pytest.raises(RequestError, match=r"stores text in 8 dimensions, but 9 are requested"):
        precompute(precompute_arguments(models, tars, root, "--text.width", "9"))
    with pytest.raises(RequestError, match=r"stores text in 8 dimensions, but 6 are requested"):
        precompute(precompute_arguments(models, tars, root, "--text.width", "6"))
    whole = tmp_path / "whole"
    shutil.copytree(latents, whole)
    with pytest.raises(RequestError, match=r"already stores full-width states of text"):
        precompute(precompute_arguments(models, tars, whole, "--text.width", "6"))


def test_the_hash_order_depends_only_on_the_names() -> None:
    names = [f"{number:05d}" for number in range(100)]
    assert hash_order(names) == hash_order(reversed(names)) != names


def test_a_damaged_part_is_not_in_the_calibration_and_a_pooled_tower_is_left_as_it_is(
    models: Path, tars: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As for FLUX.1, whose CLIP tower stores no states. Without a name, the width applies to all towers with states."""
    clip = clip_tower(models) | {"states": False, "pooled": True, "storage": "float16"}
    texts = {"text": clip_tower(models), "clip": clip}
    encode_all(config := precompute_config(models, tars, tmp_path / "source", texts=texts))
    source = folder_of(config)
    part = part_of(source, "64x64", "00000")
    (part / "shard.00000.mds").write_bytes(b"damaged")
    with pytest.raises(WorkError, match=r"1 of 2 tars could not be derived"):
        derive(source, tmp_path / "out", "--text.width", "6")
    assert "Computing the projection from stored states." in capsys.readouterr().err
    towers = record(tmp_path / "out").texts
    assert (towers["text"].width, towers["clip"].projection) == (6, None)
    assert towers["text"].projection is not None and towers["text"].projection.calibration_captions > 20


def test_a_bad_request_is_refused_before_the_projection_is_computed(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shards.derive.job.compute_from_root", None)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for out, options, message in (
        (latents, (), "cannot be derived from itself|already stores full-width states"),
        (tmp_path / "full", (), "is neither empty nor a latents root"),
        (tmp_path / "out", ("--buckets", "512x512"), "has no samples in 512x512"),
        (tmp_path / "out", ("--text.projection", str(latents)), "does not project any of text"),
    ):
        with pytest.raises(RequestError, match=message):
            derive(latents, out, "--text.width", "6", *options)


def test_a_stop_signal_ends_the_computation_of_a_projection(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("shards.derive.projection.check_part", stop)
    with pytest.raises(Preempted, match="before the projection was computed"):
        derive(latents, tmp_path / "out", "--text.width", "6")
    assert not (tmp_path / "out").exists()


def test_states_that_are_too_large_once_projected_are_refused(latents: Path, tmp_path: Path) -> None:
    """A token's projection can be longer than any of its numbers."""
    derived = derive(latents, tmp_path / "derived", "--text.width", "6")
    source, target = record(latents), record(derived)
    rows = [{"text_latents.text": np.full((16, 16), 60_000, np.float16)}]
    projection = target.texts["text"].projection
    assert projection is not None
    ones = Projection(**projection.model_dump() | {"matrix": encode_matrix(np.ones((16, 6)))})
    tower = target.texts["text"].with_projection(ones)
    how = Conversion(source, target.model_copy(update={"texts": {"text": tower}}), frozenset())
    with pytest.raises(OverflowError, match="not finite in float16 once projected"):
        states_of("text", how, ["a"], rows)


def test_the_card_and_where_do_not_print_the_matrix(latents: Path, tmp_path: Path) -> None:
    derived = derive(latents, tmp_path / "derived", "--text.width", "6")
    card = dataset_card(LocalStore(derived))
    assert "projected from 16 dimensions (" in card and "texts.text.projection.input_width" in card
    key = next(read_part(part_of(derived, "64x64", "00000")))["key"]
    where = "\n".join(map(describe_sample, find_sample(LocalStore(derived), key)))
    projection = record(derived).texts["text"].projection
    assert projection is not None
    for text in (card, where):
        assert projection.matrix not in text and "energy_shares" not in text
