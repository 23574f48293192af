"""Custom training loops: columns from streaming's own reader, and LatentDataset's decoded samples."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from streaming import StreamingDataset

from bench.kit.roots import encoding_record
from shards.base.errors import RequestError
from shards.dataset import LatentDataset
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.text import TextLatents
from shards.format.towers import FeatureTower, TextTower
from shards.open import open_store
from shards.root.exclusions import add_exclusion, make_exclusion
from shards.root.reading import read_part, text_latents
from shards.root.writing import Caption, PartWriter, Sample

IMAGES = [("float16", False), ("float16", True), ("int8", True)]
LAYOUTS = [(*text, *of) for text in product(("float16", "float8"), (False, True), (False, True)) for of in IMAGES]
LENGTH, WIDTH, TOKENS = 6, 5, 16


def record(storage: Any, trim: bool, several: bool, image_storage: Any, more: bool) -> EncodingRecord:
    """Make a record with one text tower; `more` adds a pooled tower and a feature tower."""
    encoding = encoding_record(LENGTH, WIDTH, storage=storage, trim=trim)
    image = encoding.image.model_copy(update={"storage": image_storage})
    changes: dict[str, Any] = {"image": image}
    changes["captions"] = ("txt", "json:blip") if several else ("txt",)
    if more:
        text = encoding.texts["text"].model_dump()
        pooled = TextTower.model_validate(text | {"states": False, "pooled": 3, "trim": False})
        fields = {"class_name": "D", "weights": text["weights"], "mean": (0,) * 3, "std": (1,) * 3, "width": 4}
        features = FeatureTower.model_validate(fields | {"resize": 0.25, "patch": 4, "storage": storage})
        changes |= {"texts": {**encoding.texts, "clip": pooled}, "features": {"dino": features}}
    return encoding.model_copy(update=changes)


def write_root(root: Path, encoding: EncodingRecord) -> list[Sample]:
    """Write a bucket of seven samples with one or two captions as a single part."""
    random = torch.Generator().manual_seed(0)
    encoding.save(open_store(root))
    writer, samples = PartWriter(root / "64x64", encoding, Bucket(64, 64)), []
    for i in range(7):
        captions = []
        for j in range(1 + (encoding.several and i % 2)):
            latents = {"text": TextLatents(torch.randn(LENGTH, WIDTH, generator=random), 2 + (i + j) % 4)}
            if "clip" in encoding.texts:
                latents["clip"] = TextLatents(None, 2, torch.randn(3, generator=random))
            captions.append(Caption(f"caption {i} {j}", latents, frozenset()))
        present: list[Caption | None] = [*captions, *[None] * (len(encoding.captions) - len(captions))]
        sample = Sample(
            key=f"{i:09d}",
            captions=present,
            image_latents=torch.randn(8, 8, 8, generator=random),
            size=(64, 65, 1, 2),
            scores=np.array([5, 0.5, np.nan, 0], np.float32),
            features={name: torch.randn(TOKENS, 4, generator=random) for name in encoding.features},
        )
        writer.write(sample)
        samples.append(sample)
    writer.finish()
    return samples


@pytest.mark.parametrize(("storage", "trim", "several", "image_storage", "more"), LAYOUTS)
def test_every_layout_reads_alike(
    tmp_path: Path, storage: str, trim: bool, several: bool, image_storage: str, more: bool
) -> None:
    encoding = record(storage, trim, several, image_storage, more)
    samples = write_root(tmp_path / "root", encoding)
    ours = list(read_part(tmp_path / "root" / "64x64"))
    dataset = LatentDataset(tmp_path / "root", "64x64", posterior_mean=True, batch_size=1, shuffle=False)
    assert len(ours) == len(dataset) == len(samples)
    for i, sample in enumerate(samples):
        # compare our decoder with streaming's reader, column by column
        raw = StreamingDataset.__getitem__(dataset, i)
        assert raw.keys() == ours[i].keys() == encoding.columns(Bucket(64, 64)).keys()
        for name, value in raw.items():
            np.testing.assert_array_equal(ours[i][name], value)
        # compare the dataset's samples with the written ones
        found = dataset[i]
        exact = sample.image_latents[:4] * 0.5
        close = {"float16": 2e-3, "int8": 0.02}[encoding.image.storage]
        assert (found["image_latents"] - exact).abs().max() < close
        written = [caption for caption in sample.captions if caption is not None]
        assert found["captions"] == [caption.text for caption in written]
        for j, caption in enumerate(written):
            latents = caption.latents["text"]
            assert latents.states is not None
            kept = latents.num_tokens if trim else LENGTH
            assert found["text_mask.text"][j].tolist() == [place < kept for place in range(LENGTH)]
            error = (found["text.text"][j, :kept] - latents.states[:kept]).norm() / latents.states[:kept].norm()
            assert error < {"float16": 1e-3, "float8": 0.04}[storage] and not found["text.text"][j, kept:].any()
            if more:
                torch.testing.assert_close(
                    found["pooled.clip"][j], caption.latents["clip"].pooled, rtol=1e-3, atol=1e-3
                )
        if more:
            expected = sample.features["dino"]
            error = (found["features.dino"] - expected).norm() / expected.norm()
            assert error < {"float16": 1e-3, "float8": 0.04}[storage]


def test_a_root_with_exclusion_lists_is_refused(tmp_path: Path) -> None:
    write_root(tmp_path / "root", record("float16", False, False, "float16", False))
    add_exclusion(open_store(tmp_path / "root"), make_exclusion("key", ["000000003"]))
    with pytest.raises(
        RequestError, match=r"has exclusion lists \(exclusions/key\..*only latentmill's trainer applies"
    ):
        LatentDataset(tmp_path / "root", "64x64", batch_size=1)
    assert len(LatentDataset(tmp_path / "root", "64x64", include_excluded=True, batch_size=1)) == 7


def test_a_sample_is_drawn_from_the_posterior_afresh(latents: Path) -> None:
    """Every access draws a new sample, with the mean and deviation of diffusers' distribution."""
    dataset = LatentDataset(latents, "64x64", batch_size=1, shuffle=False)
    draws = torch.stack([dataset[3]["image_latents"] for _ in range(600)])
    raw = StreamingDataset.__getitem__(dataset, 3)["image_latents"]
    posterior = DiagonalGaussianDistribution(torch.tensor(raw.copy())[None].float())
    scale = dataset.encoding.image.scale[0]
    assert ((draws.mean(dim=0) / scale - posterior.mean[0]).abs() < 6 * posterior.std[0] / 600**0.5 + 1e-6).all()
    assert ((draws.std(dim=0) / scale / posterior.std[0] - 1).abs() < 0.15).all()


def test_a_loader_of_torch_reads_it(latents: Path) -> None:
    dataset = LatentDataset(f"file://{latents}", "64x64", batch_size=5, shuffle=True)
    loader: Any = torch.utils.data.DataLoader(dataset, batch_size=5, collate_fn=list)
    keys = [sample["key"] for batch in loader for sample in batch]
    assert len(keys) == len(set(keys)) == 30
    encoding = EncodingRecord.load(open_store(latents))
    (stored,) = [s for s in dataset if s["key"] == keys[0]]
    part = next(p for p in (latents / "64x64").glob("0*") if any(s["key"] == keys[0] for s in read_part(p)))
    (raw,) = [s for s in read_part(part) if s["key"] == keys[0]]
    np.testing.assert_array_equal(stored["text.text"][0], text_latents(raw, encoding)[0]["text"])
