"""`python -m shards stats ROOT`: what a latents root holds, as a table, JSON and a plot."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from shards.buckets import Bucket
from shards.encoding import EncodingRecord
from shards.errors import RequestError
from shards.reading import captions, read_part
from shards.receipts import Receipt, load_receipts
from shards.store import Store, open_store
from shards.tables import MENDED


def root_stats(root: Path | str | Store, max_samples: int) -> dict[str, Any]:
    """Counts from receipts; moments of latents and caption lengths from the first `max_samples` of each bucket.

    Raises:
        RequestError: not a latents root, or nothing is committed to it.
    """
    store = open_store(root)
    encoding, receipts = EncodingRecord.load(store), load_receipts(store)
    if not receipts:
        raise RequestError(f"{store.where()} holds no committed shard yet: run `make precompute` first.")
    rejected = sum((Counter(receipt.rejected) for receipt in receipts), Counter())
    return {
        "encoding": encoding.id,
        "shards": len(receipts),
        "samples_in": sum(receipt.samples_in for receipt in receipts),
        "encoded": sum(receipt.encoded for receipt in receipts),
        "rejected": dict(rejected.most_common()),
        "captions": {name: sum(receipt.captions[name] for receipt in receipts) for name in ("stored", *MENDED)},
        "buckets": {
            bucket: bucket_stats(store, bucket, receipts, encoding, max_samples)
            for bucket in sorted({b for receipt in receipts for b in receipt.parts}, key=Bucket.parse)
        },
    }


def bucket_stats(
    store: Store, bucket: str, receipts: list[Receipt], encoding: EncodingRecord, max_samples: int
) -> dict[str, Any]:
    """Samples, bytes per sample on disk, and latent statistics of one bucket."""
    shards = [receipt.shard for receipt in receipts if bucket in receipt.parts]
    rows = chain.from_iterable(read_committed(store, f"{bucket}/{shard}") for shard in shards)
    sums, squares = np.zeros(encoding.image.latent_channels), np.zeros(encoding.image.latent_channels)
    lengths: list[int] = []
    count = 0
    for sample in islice(rows, max_samples):
        # moments => the posterior's mean, scaled as the trainer scales it
        latents = sample["image_latents"][: encoding.image.latent_channels] * np.float64(encoding.image.scaling_factor)
        sums += latents.mean(axis=(1, 2))
        squares += (latents**2).mean(axis=(1, 2))
        count += 1
        lengths += [len(caption) for caption in captions(sample, encoding)]
    stats: dict[str, Any] = dict(bucket_sizes(receipts)[bucket])
    if count:
        means = sums / count
        stats |= {
            "measured_on": count,
            "latent_mean": means.round(4).tolist(),
            "latent_std": np.sqrt(squares / count - means**2).round(4).tolist(),
            "caption_characters": dict(
                zip(("p5", "p50", "p95"), np.percentile(lengths, [5, 50, 95]).tolist(), strict=True)
            ),
        }
    return stats


def read_committed(store: Store, part: str) -> Iterator[dict[str, Any]]:
    """The samples of a part, which is copied here first where it is remote."""
    with store.local(part) as folder:
        yield from read_part(folder)


def bucket_sizes(receipts: list[Receipt]) -> dict[str, dict[str, int]]:
    """Bucket → samples, and bytes per sample on disk (MDS files with their headers), smallest bucket first."""
    sizes = {}
    for bucket in sorted({name for receipt in receipts for name in receipt.parts}, key=Bucket.parse):
        parts = [receipt.parts[bucket] for receipt in receipts if bucket in receipt.parts]
        samples = sum(part.samples for part in parts)
        size = sum(f.bytes for part in parts for name, f in part.files.items() if name.endswith(".mds"))
        sizes[bucket] = {"samples": samples, "bytes_per_sample": round(size / samples) if samples else 0}
    return sizes


def stats_table(stats: dict[str, Any]) -> str:
    """The same for a person."""
    lines = [
        f"encoding {stats['encoding']}, {stats['shards']} shards: {stats['samples_in']:,} samples in, "
        f"{stats['encoded']:,} encoded",
        caption_line(stats["captions"]),
        "rejected: " + (", ".join(f"{reason} {count:,}" for reason, count in stats["rejected"].items()) or "none"),
        "",
        f"{'bucket':>12} {'samples':>12} {'B/sample':>9}  latent mean and std per channel (scaled; std 1 is ideal)",
    ]
    for bucket, b in stats["buckets"].items():
        moments = f"{b['latent_mean']} {b['latent_std']}" if "latent_mean" in b else ""
        lines.append(f"{bucket:>12} {b['samples']:>12,} {b['bytes_per_sample']:>9,}  {moments}")
    return "\n".join(lines)


def caption_line(counts: dict[str, int]) -> str:
    """How many captions are stored, and how many of them were mended or cut."""
    mended = ", ".join(f"{name.replace('_', ' ')} {counts[name]:,}" for name in MENDED)
    return f"captions: {counts['stored']:,} stored, of which mended or cut: {mended}"


def plot_stats(stats: dict[str, Any], path: Path) -> None:
    """Samples per bucket, rejects by reason, and latent deviations, as a PNG."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(14, 4), dpi=110)
    buckets = stats["buckets"]
    axes[0].barh(list(buckets), [b["samples"] for b in buckets.values()], color="#08519c")
    axes[0].set_title("samples per bucket")
    reasons = stats["rejected"] or {"none": 0}
    axes[1].barh(list(reasons), list(reasons.values()), color="#b45309")
    axes[1].set_title(f"rejected, of {stats['samples_in']:,} samples in")
    for bucket, b in buckets.items():
        if "latent_std" in b:
            axes[2].plot(b["latent_std"], marker="o", label=bucket)
    axes[2].axhline(1, color="grey", linewidth=0.8)
    axes[2].set_title("standard deviation of scaled latents")
    axes[2].set_xlabel("channel")
    axes[2].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
