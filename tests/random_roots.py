"""Latents roots with random outcomes: which bucket stores or rejects a sample, and how its captions were changed."""

import random
import time
from pathlib import Path

import numpy as np

from bench.kit.roots import encoding_record, make_sample, random_text
from shards.base.scratch import attempt_folder
from shards.format.buckets import COVERS, Bucket
from shards.format.receipts import MadeBy
from shards.format.tables import CAPTION_CHANGES, TOO_SMALL
from shards.open import open_store
from shards.root.commit import Attempt, commit
from shards.root.index import write_indexes
from shards.root.shared import create_root, write_uncond
from shards.root.writing import Caption, PartWriter, Sample

BUCKETS = ("64x64", "64x96", "128x128")
HOSTS = (("gpu-1", "H100", "GPU-a"), ("gpu-1", "H100", "GPU-b"), ("gpu-2", "A100", "GPU-c"))
REASONS = (TOO_SMALL, "corrupt", "non_finite")


def random_root(root: Path, seed: int) -> Path:
    """Make a valid root in which any bucket may store or reject any sample, each for its own reason.

    Each tar is committed by one or two attempts, which have different buckets, machines and settings.
    """
    rng, encoding, store = random.Random(seed), encoding_record(4, 4), open_store(root)
    create_root(store, encoding)
    empty = {name: random_text(np.random.default_rng(0), tower, 2) for name, tower in encoding.texts.items()}
    write_uncond(store, empty)
    for tar in rng.sample(["a", "a-b", "a.b", "00000", "00001", "x" * 30, "zz", "a0"], 6):
        keys = [f"{tar}/{number:02d}" for number in range(rng.randint(1, 12))]
        changes = {key: frozenset(rng.sample(CAPTION_CHANGES, rng.randint(0, 3))) for key in keys}
        buckets = rng.sample(BUCKETS, rng.randint(1, len(BUCKETS)))
        first = rng.randint(0, len(buckets))
        for number, some in enumerate((buckets[:first], buckets[first:])):
            if some:
                _commit(root, rng, tar, keys, changes, some, number)
    write_indexes(store)
    return root


def _commit(
    root: Path,
    rng: random.Random,
    tar: str,
    keys: list[str],
    changes: dict[str, frozenset[str]],
    buckets: list[str],
    number: int,
) -> None:
    encoding, store, parts = encoding_record(4, 4), open_store(root), {}
    settings: dict[str, str | int | float | bool] = {"batch_size": rng.choice((8, 16, 32))}
    if rng.random() < 0.3:
        settings["salvage"] = True
    host, gpu, uuid = rng.choice(HOSTS)
    with attempt_folder(store, tar) as folder:
        for bucket in buckets:
            writer = PartWriter(folder / bucket, encoding, Bucket.parse(bucket))
            for key in rng.sample(keys, len(keys)):  # a part's rows have no order
                if rng.random() < 0.6:
                    made = make_sample(np.random.default_rng(0), key, bucket, encoding, 0, 0, None)
                    (caption,) = made.present
                    texts = [Caption(caption.text, caption.latents, changes[key])]
                    writer.write(Sample(key, [*texts], made.image_latents, made.size, made.scores))
                else:
                    writer.refuse(key, "", rng.choice(REASONS), "")
            parts[bucket] = writer.finish()
        attempt = Attempt(
            tar=tar,
            folder=folder,
            encoding=encoding,
            places={key: place for place, key in enumerate(sorted(keys))},
            samples_in=len(keys),
            parts=parts,
            rules=dict.fromkeys(parts, COVERS),
            source={"address": f"none/{tar}", "bytes": 0, "sha256": "0" * 64},
            software={"torch": rng.choice(("2.13", "2.14"))},
            settings=settings,
            made_by=MadeBy(host=host, gpu=gpu, gpu_uuid=uuid, version="1", source_sha256=uuid * 12),
            number=1,
            started=f"2026-11-0{rng.randint(1, 9)}T00:00:00+00:00",
            seconds={"encode": 0.5 + number, "fetch": 0.25},
            clock=time.monotonic(),
        )
        commit(store, attempt)
