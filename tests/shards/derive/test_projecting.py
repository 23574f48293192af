"""Roots with projected text: derived from whole states, or written by stage 1 with the same projection."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from precompute.__main__ import run as precompute
from shards.__main__ import run as shards
from shards.base.errors import RequestError
from shards.base.store import LocalStore
from shards.format.encoding import EncodingRecord
from shards.format.projection import sample_order
from shards.root.committed import load_receipts
from shards.root.reading import read_part, text_latents
from shards.root.shared import load_uncond
from shards.tools.verify import verify_root
from tests.conftest import encode_all, folder_of, precompute_config
from tests.roots import part_of, precompute_arguments, tree

pytestmark = pytest.mark.heavy


@pytest.fixture(autouse=True)
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.base.pool.start_pool", lambda most, *_: ThreadPoolExecutor(most))


def derive(source: Path, out: Path, *options: str) -> Path:
    shards(["derive", str(source), str(out), *options])
    assert list(verify_root(LocalStore(out))) == []
    return out


def parts(root: Path) -> dict[str, str]:
    """Return folder of a part, which is named by its content, → bitmap of its samples."""
    return {receipt.folder: receipt.stored for receipt in load_receipts(LocalStore(root))}


def record(root: Path) -> EncodingRecord:
    return EncodingRecord.load(LocalStore(root))


@pytest.mark.parametrize("storage", ["float16", "float8"])
def test_it_is_what_stage_1_writes_with_the_same_projection(
    latents: Path, models: Path, tars: Path, tmp_path: Path, storage: str
) -> None:
    derived = derive(latents, tmp_path / "derived", "--text.width", "8", "--text.storage", storage)
    text = {"width": 8, "projection": str(derived), "storage": storage}
    encode_all(config := precompute_config(models, tars, tmp_path / "direct", text=text), models)
    assert record(derived) == record(folder_of(config))
    assert parts(derived) == parts(folder_of(config))
    assert (derived / "uncond.safetensors").read_bytes() == (tmp_path / "direct" / "uncond.safetensors").read_bytes()


def test_the_states_are_those_of_the_source_projected_by_the_svd_of_its_sample(latents: Path, tmp_path: Path) -> None:
    derived = derive(latents, tmp_path / "derived", "--text.width", "8")
    whole, tower = record(latents), record(derived).texts["text"]
    states = []
    for receipt in load_receipts(LocalStore(latents)):
        part = part_of(latents, receipt.bucket, receipt.tar)
        states += [text_latents(sample, whole)[0]["text"] for sample in read_part(part)]
    empty = load_uncond(LocalStore(latents))["text"].states
    assert empty is not None
    copies = -(-len(states) // 10)
    _, singular, vectors = np.linalg.svd(np.concatenate(states + [empty.float().numpy()] * copies).astype(np.float64))
    assert tower.projection is not None and tower.width == 8 and tower.projection.captions == len(states) + copies
    matrix = tower.projection.array.astype(np.float64)
    np.testing.assert_allclose(np.abs((matrix * vectors[:8].T).sum(axis=0)), 1, atol=1e-3)
    np.testing.assert_allclose(tower.projection.energy, (singular[:8] ** 2).sum() / (singular**2).sum(), atol=1e-6)
    (part,) = {part_of(derived, "64x64", receipt.tar) for receipt in load_receipts(LocalStore(derived))} - {
        part_of(derived, "64x64", "00001")
    }
    for sample, old in zip(read_part(part), read_part(part_of(latents, "64x64", "00000")), strict=True):
        expected = torch.tensor(text_latents(old, whole)[0]["text"] @ matrix).half()
        np.testing.assert_array_equal(text_latents(sample, record(derived))[0]["text"], expected.float())
    stored_empty = load_uncond(LocalStore(derived))["text"].states
    assert stored_empty is not None
    torch.testing.assert_close(stored_empty, (empty.double() @ torch.tensor(matrix)).half())


def test_an_interrupted_derivation_continues_with_the_projection_of_its_root(
    latents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = derive(latents, tmp_path / "once", "--text.width", "8")
    again = tmp_path / "again"
    shutil.copytree(once, again)
    for receipt in load_receipts(LocalStore(again)):
        if receipt.tar == "00001":
            (again / receipt.name).unlink()
            shutil.rmtree(again / receipt.folder)
    monkeypatch.setattr("shards.derive.job.learn_from_root", None)
    derive(latents, again, "--text.width", "8")
    assert (
        parts(again) == parts(once) and (again / "encoding.json").read_bytes() == (once / "encoding.json").read_bytes()
    )


def test_fewer_dimensions_are_the_first_ones(latents: Path, tmp_path: Path) -> None:
    wide = derive(latents, tmp_path / "wide", "--text.width", "12", "--text.storage", "float16")
    narrow = derive(wide, tmp_path / "narrow", "--text.width", "text=5")
    direct = derive(latents, tmp_path / "direct", "--text.width", "5")
    assert parts(narrow) == parts(direct) and record(narrow) == record(direct)
    like = derive(latents, tmp_path / "like", "--text.projection", str(narrow))
    assert parts(like) == parts(direct)
    with pytest.raises(RequestError, match=r"stores the whole states of text, so they cannot be projected now"):
        derive(latents, derive(latents, tmp_path / "whole"), "--text.width", "5")
    with pytest.raises(RequestError, match=r"states of text in 5 dimensions, so they are not available in 6"):
        derive(narrow, tmp_path / "wider", "--text.width", "6")


def test_stage_1_projects_onto_the_directions_of_a_sample_of_its_captions(
    latents: Path, models: Path, tars: Path, tmp_path: Path, without_ray: None
) -> None:
    """All captions are in the sample, including those of rejected pictures, unlike in a derived root."""
    root = tmp_path / "root"
    arguments = precompute_arguments(models, tars, root, "--text.width", "8")
    precompute(arguments)
    tower = record(root).texts["text"]
    assert tower.projection is not None and tower.width == 8 and tower.projection.energy > 0.8
    before = tree(root)
    precompute(arguments)
    assert tree(root) == before
    with pytest.raises(RequestError, match=r"states of text in 8 dimensions, so they are not available in 9"):
        precompute(precompute_arguments(models, tars, root, "--text.width", "9"))
    with pytest.raises(RequestError, match=r"texts\.text\.width: 8 ≠ 6"):
        precompute(precompute_arguments(models, tars, root, "--text.width", "6"))
    whole = tmp_path / "whole"
    shutil.copytree(latents, whole)
    with pytest.raises(RequestError, match=r"stores the whole states of text, so they cannot be projected now"):
        precompute(precompute_arguments(models, tars, whole, "--text.width", "6"))


def test_the_order_of_a_sample_depends_on_nothing_but_the_names() -> None:
    names = [f"{number:05d}" for number in range(100)]
    assert sample_order(names) == sample_order(reversed(names)) != names
