"""Latents roots of random numbers, made in a moment without a model: for benchmarks and tests of reading."""

from pathlib import Path

import numpy as np
import torch

from shards.format.buckets import COVERS, Bucket
from shards.format.encoding import EncodingRecord, ImageEncoding, TextEncoding, Weights
from shards.open import open_store
from shards.root.commit import Attempt, attempt_folder, commit
from shards.root.index import write_indexes
from shards.root.shared import create_root, write_uncond
from shards.root.writing import Caption, PartWriter, Sample


def encoding_record(text_length: int, text_width: int) -> EncodingRecord:
    """That of models which nobody has."""
    model = Weights(name="none", sha256="0" * 64)
    image = ImageEncoding(
        posterior="moments", latent_channels=4, downsampling=8, scaling_factor=0.5, crop="", resampling="", decoder=""
    )
    text = TextEncoding(
        storage="float16", trim=False, length=text_length, width=text_width, captions=("txt",), max_characters=4096
    )
    return EncodingRecord(
        vae=model, text_encoder=model, tokenizer=model, image=image, text=text, compute_dtype="float32"
    )


def make_root(
    root: Path, buckets: dict[str, list[int]], text: tuple[int, int] = (16, 16), missing_every: int = 0
) -> Path:
    """A root of `buckets`, each with as many samples per part as listed, and text latents of `text` (tokens, width)."""
    encoding = encoding_record(*text)
    create_root(open_store(root), encoding)
    write_uncond(open_store(root), torch.zeros(text), 2)
    rng = np.random.default_rng(0)
    for part in range(max(map(len, buckets.values()))):
        shard = f"{part:05d}"
        sizes = {name: samples[part] for name, samples in buckets.items() if part < len(samples)}
        most = max(sizes.values())
        with attempt_folder(open_store(root), shard) as folder:
            counts, records = {}, {}
            for name, num_samples in sizes.items():
                writer = PartWriter(folder / name, encoding, Bucket.parse(name))
                for number in range(most):
                    key = f"{shard}{number:04d}"
                    if number < num_samples:
                        writer.write(make_sample(rng, key, name, encoding, number, missing_every))
                    else:
                        writer.refuse(key, "", "too_small", "")
                counts[name] = writer.finish()
                records[name] = writer.records
            attempt = Attempt(
                shard=shard,
                folder=folder,
                encoding=encoding,
                samples_in=most,
                counts=counts,
                records=records,
                rules=dict.fromkeys(counts, COVERS),
                source={"address": "none", "bytes": 0, "sha256": "0" * 64},
                software={},
                settings={},
                number=1,
                started="",
                seconds=0.0,
            )
            commit(open_store(root), attempt)
    write_indexes(open_store(root))
    return root


def make_sample(
    rng: np.random.Generator, key: str, bucket: str, encoding: EncodingRecord, number: int, missing_every: int
) -> Sample:
    """One sample of random latents, sizes and scores."""
    height, width = Bucket.parse(bucket).latent_hw(8)
    scores = rng.random(4).astype(np.float32) * np.array([10, 1, 1, 1], np.float32)
    if missing_every and number % missing_every == 0:
        scores[:] = np.nan
    text = torch.from_numpy(rng.standard_normal((encoding.text.length, encoding.text.width), np.float32))
    return Sample(
        key=key,
        captions=[Caption("random", text, encoding.text.length, frozenset())],
        image_latents=torch.from_numpy(rng.standard_normal((encoding.num_planes, height, width), np.float32)),
        size=(int(rng.integers(64, 300)), int(rng.integers(64, 300)), 0, 0),
        scores=scores,
    )
