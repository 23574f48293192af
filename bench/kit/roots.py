"""Latents roots filled with random numbers, made quickly and without a model, for benchmarks and tests of reading."""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch

from shards.base.scratch import attempt_folder
from shards.format.buckets import COVERS, Bucket
from shards.format.encoding import EncodingRecord
from shards.format.receipts import MadeBy
from shards.format.text import TextLatents
from shards.format.towers import ONLY_TEXT, FeatureTower, ImageTower, TextTower, Weights
from shards.open import open_store
from shards.root.commit import Attempt, commit
from shards.root.index import write_indexes
from shards.root.shared import create_root, write_uncond
from shards.root.writing import Caption, PartWriter, Sample


def feature_tower(width: int, storage: Literal["float16", "float8"] = "float16") -> FeatureTower:
    """Describe a DINOv2-like feature tower without weights, with `width` numbers per patch."""
    return FeatureTower(
        class_name="Dinov2Model",
        weights=Weights(name="none", sha256="0" * 64),
        resize=0.875,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        patch=14,
        width=width,
        storage=storage,
    )


def encoding_record(text_length: int, text_width: int, **text: Any) -> EncodingRecord:
    """Make an encoding record of models without weights.

    Args:
        text: fields of the text tower to override.
    """
    model = Weights(name="none", sha256="0" * 64)
    image = ImageTower(
        class_name="AutoencoderKL",
        weights=model,
        posterior="moments",
        channels=4,
        downsampling=8,
        scale=(0.5,) * 4,
        shift=(0.0,) * 4,
        crop="",
        resampling="",
        decoder="",
    )
    fields = {"length": text_length, "width": text_width, "max_tokens": text_length, "storage": "float16"} | text
    tower = TextTower(**{"class_name": "CLIPTextModel", "weights": model, "tokenizer": model, "trim": False} | fields)
    return EncodingRecord(
        image=image, texts={ONLY_TEXT: tower}, captions=("txt",), max_characters=4096, compute_dtype="float32"
    )


def make_root(
    root: Path,
    buckets: dict[str, list[int]],
    text: tuple[int, int] = (16, 16),
    missing_every: int = 0,
    features: Mapping[str, FeatureTower] = MappingProxyType({}),
    encoding: EncodingRecord | None = None,
    num_tokens: int | None = None,
) -> Path:
    """Write a root of random latents.

    Args:
        buckets: bucket → number of samples of each part.
        text: shape (tokens, width) of the text latents.
        missing_every: leave out the scores of every n-th sample; 0: of none.
        encoding: replaces `text` and `features`.
        num_tokens: number of real tokens per caption; None: all.
    """
    encoding = encoding or encoding_record(*text).model_copy(update={"features": dict(features)})
    create_root(open_store(root), encoding)
    empty = {name: random_text(np.random.default_rng(0), tower, 2) for name, tower in encoding.texts.items()}
    write_uncond(open_store(root), empty)
    rng = np.random.default_rng(0)
    for part in range(max(map(len, buckets.values()))):
        shard = f"{part:05d}"
        sizes = {name: samples[part] for name, samples in buckets.items() if part < len(samples)}
        most = max(sizes.values())
        with attempt_folder(open_store(root), shard) as folder:
            keys, parts = [f"{shard}{number:04d}" for number in range(most)], {}
            for name, num_samples in sizes.items():
                writer = PartWriter(folder / name, encoding, Bucket.parse(name))
                for number, key in enumerate(keys):
                    if number < num_samples:
                        writer.write(make_sample(rng, key, name, encoding, number, missing_every, num_tokens))
                    else:
                        writer.refuse(key, "", "too_small", "")
                parts[name] = writer.finish()
            attempt = Attempt(
                tar=shard,
                folder=folder,
                encoding=encoding,
                places={key: place for place, key in enumerate(keys)},
                samples_in=len(keys),
                parts=parts,
                rules=dict.fromkeys(parts, COVERS),
                source={"address": "none", "bytes": 0, "sha256": "0" * 64},
                software={},
                settings={},
                made_by=MadeBy(host="none", gpu="none", gpu_uuid=None, version="", source_sha256=""),
                number=1,
                started="",
                seconds={},
                clock=time.monotonic(),
            )
            commit(open_store(root), attempt)
    write_indexes(open_store(root))
    return root


def random_text(rng: np.random.Generator, tower: TextTower, num_tokens: int | None = None) -> TextLatents:
    """Draw the text latents of a caption with `num_tokens` real tokens; None: all."""
    states = torch.from_numpy(rng.standard_normal((tower.length, tower.width), np.float32)) if tower.states else None
    pooled = torch.from_numpy(rng.standard_normal(tower.pooled, np.float32)) if tower.pooled else None
    return TextLatents(states, num_tokens or tower.length, pooled)


def make_sample(
    rng: np.random.Generator,
    key: str,
    bucket: str,
    encoding: EncodingRecord,
    number: int,
    missing_every: int,
    num_tokens: int | None,
) -> Sample:
    """Make a sample with random latents, sizes and scores."""
    height, width = Bucket.parse(bucket).latent_hw(encoding.image.downsampling)
    scale = np.where(np.array(encoding.scores) == "aesthetic", 10, 1)
    scores = rng.random(len(scale)).astype(np.float32) * scale.astype(np.float32)
    if missing_every and number % missing_every == 0:
        scores[:] = np.nan
    captions = {name: random_text(rng, tower, num_tokens) for name, tower in encoding.texts.items()}
    return Sample(
        key=key,
        captions=[Caption("random", captions, frozenset())],
        image_latents=torch.from_numpy(rng.standard_normal((encoding.image.num_planes, height, width), np.float32)),
        size=(int(rng.integers(64, 300)), int(rng.integers(64, 300)), 0, 0),
        scores=scores,
        features={
            name: torch.from_numpy(
                rng.standard_normal((math.prod(feature.grid(Bucket.parse(bucket))), feature.width), np.float32)
            )
            for name, feature in encoding.features.items()
        },
    )
