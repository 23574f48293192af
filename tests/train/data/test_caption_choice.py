"""Each step uses one of a sample's captions, chosen by seed, step and global slot only."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shards.format.encoding import EncodingRecord
from shards.format.towers import ONLY_TEXT
from shards.open import open_store
from shards.root.reading import read_part, text_latents
from tests.fixtures import encode_all, precompute_config
from tests.roots import part_of
from tests.tiny import TEXT_LENGTH, make_samples, make_tar
from train.data.batch import Batch, Collate
from train.data.draws import Draws, Purpose
from train.data.loader import Loader
from train.data.spec import DataConfig, StreamConfig, column_lengths
from train.data.streams import open_data
from train.objective.config import ValidationConfig
from train.objective.validation import find_validation, open_validation

FIELDS = ["txt", "json:blip", "json:human"]


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory, models: Path) -> dict[str, Path]:
    """Roots of 24 samples with one to three captions each, by text storage; the last has only the first one."""
    folder = tmp_path_factory.mktemp("several")
    samples = make_samples(0, 24, [(80, 64)])
    for i, (_, members) in enumerate(samples):
        metadata = json.loads(members["json"])
        for name in ("blip", "human")[: i % 3]:
            metadata[name] = f"{name} {i}" + "." * (i % 5)
        members["txt"] = f"t{i}".encode()
        members["json"] = json.dumps(metadata).encode()
    make_tar(folder / "tars", "00000", samples)
    roots = {}
    for name, storage, trim, fields in (
        ("float16", "float16", False, FIELDS),
        ("float8+trim", "float8", True, FIELDS),
        ("one", "float16", False, ["txt"]),
    ):
        text = {"storage": storage, "trim": trim}
        changes: dict[str, Any] = {"captions": fields, "text": text, "buckets": ["64x64"]}
        encode_all(precompute_config(models, folder / "tars", folder / name, **changes))
        roots[name] = folder / name
    return roots


def samples_of(root: Path) -> list[dict[str, Any]]:
    return list(read_part(part_of(root, "64x64", "00000")))


@pytest.mark.parametrize("storage", ["float16", "float8+trim"])
def test_the_chosen_rows_are_the_stored_captions(several: dict[str, Path], storage: str) -> None:
    samples, encoding = samples_of(several[storage]), EncodingRecord.load(open_store(several[storage]))
    lengths = column_lengths(encoding)
    batch = Collate(torch.arange(24), lengths)(samples)
    assert batch.num_captions is not None and batch.num_captions.tolist() == [1, 2, 3] * 8
    draws = Draws(7, 3, batch.slots)
    choice = draws.integers(Purpose.CAPTION_CHOICE, batch.num_captions)
    drawn = batch.draw_captions(draws)
    assert drawn.num_captions is None and drawn.columns["text_latents.text"].shape[:2] == (24, TEXT_LENGTH)
    for i, sample in enumerate(samples):
        expected = torch.tensor(text_latents(sample, encoding)[choice[i]][ONLY_TEXT])
        found = drawn.columns["text_latents.text"][i]
        if "text_scales.text" in drawn.columns:
            found = found.view(torch.float8_e4m3fn).float() * drawn.columns["text_scales.text"][i].float()[:, None]
        assert int(drawn.columns["num_tokens.text"][i]) == len(expected)
        assert found[: len(expected)].float().equal(expected) and not found[len(expected) :].any()
    # the share of a rank, for any slots
    for part in (slice(0, 8), slice(3, 4), slice(8, 24)):
        share = Collate(torch.arange(24)[part], lengths)(samples[part])
        assert (
            share.draw_captions(Draws(7, 3, share.slots))
            .columns["text_latents.text"]
            .equal(drawn.columns["text_latents.text"][part])
        )


def test_captions_are_chosen_uniformly() -> None:
    captions = torch.arange(4000) % 3 + 1
    choice = torch.stack(
        [Draws(1, step, torch.arange(4000)).integers(Purpose.CAPTION_CHOICE, captions) for step in range(9)]
    )
    for number in (1, 2, 3):
        drawn = choice[:, captions == number].flatten()
        counts = torch.bincount(drawn, minlength=number).double()
        expected = len(drawn) / number
        assert len(counts) == number
        assert ((counts - expected) ** 2 / expected).sum() < 13.9  # χ² with 2 degrees of freedom, p = 0.001
    # the choice differs between steps, and is independent of caption dropout
    assert not choice[0].equal(choice[1])
    dropped = Draws(1, 0, torch.arange(4000)).bernoulli(Purpose.CAPTION_DROPOUT, 0.5, 1)[:, 0]
    assert abs(torch.corrcoef(torch.stack([dropped.double(), choice[0].double()]))[0, 1]) < 4 / 4000**0.5


def test_a_batch_must_choose_captions_before_it_is_split() -> None:
    batch = Batch(["0"], torch.zeros(1), {"image_latents": torch.zeros(1)}, torch.tensor([2]))
    with pytest.raises(AssertionError):
        batch.take(slice(0, 1))


def test_roots_with_one_and_with_several_captions_can_be_mixed(several: dict[str, Path]) -> None:
    streams = [StreamConfig(root=several[name], bucket="64x64") for name in ("float16", "one")]
    config = DataConfig(streams=streams, num_workers=0, num_canonical_nodes=4)
    spec, slots = open_data(config, 16), torch.arange(16)
    assert spec.steps_per_epoch == 2
    stored = {name: {sample["key"]: sample for sample in samples_of(several[name])} for name in ("float16", "one")}
    seen = []
    for step, batch in zip(range(2), Loader(config, spec, 16, 0, 0, slots), strict=False):
        assert batch.num_captions is not None
        draws = Draws(0, step, slots)
        choice = draws.integers(Purpose.CAPTION_CHOICE, batch.num_captions)
        drawn = batch.draw_captions(draws)
        seen += batch.num_captions.tolist()
        for i, key in enumerate(batch.keys):
            # a sample with one caption has the same one in both roots
            expected = stored["float16"][key]["text_latents.text"][choice[i]]
            torch.testing.assert_close(drawn.columns["text_latents.text"][i], torch.tensor(expected), rtol=0, atol=0)
    assert len(seen) == 32 and seen.count(1) > 16  # all samples of one root, a third of the other


def test_validation_uses_the_first_caption(several: dict[str, Path]) -> None:
    found = []
    for name in ("float16", "one"):
        config = ValidationConfig(root=several[name], bucket="64x64", samples=24, batch_size=16)
        encoding = EncodingRecord.load(open_store(several["float16"]))
        found.append(open_validation(config, encoding, 0, find_validation(config), 0, 1).batches)
    for batch, of_one in zip(*found, strict=True):
        assert batch.num_captions is None and batch.keys == of_one.keys
        torch.testing.assert_close(
            batch.columns["text_latents.text"], of_one.columns["text_latents.text"], rtol=0, atol=0
        )
