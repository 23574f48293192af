"""`python -m shards stats ROOT`: summarise a latents root as a table, JSON or a plot."""

import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from shards.base.durable import write_output
from shards.base.store import Store
from shards.base.table import counted, format_table
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.tables import CAPTION_CHANGES, read_tables
from shards.root.committed import TarReceipts, iter_committed_tars
from shards.root.reading import captions, image_latents, read_parts
from shards.root.writing import license_counts

MIN_REPORTED_REPEATS = 0.05
"""Fraction of repeated captions above which the table reports them."""


def root_stats(store: Store, max_samples: int) -> dict[str, Any]:
    """Compute counts from receipts, and latent and caption statistics from each bucket's first `max_samples` samples.
    Raises RequestError if `store` is not a latents root or nothing has been committed to it."""
    encoding, totals, captions = EncodingRecord.load(store), RootTotals(), caption_counts()
    licenses: Counter[str] = Counter()
    first_parts: dict[str, list[str]] = {}
    for tar_receipts in iter_committed_tars(store):
        for bucket, part in tar_receipts.parts.items():
            if part.samples and totals.samples[bucket] < max_samples:
                first_parts.setdefault(bucket, []).append(part.part)
        totals.add(tar_receipts)
        for counts, by_license in counts_once(store, tar_receipts):
            captions.update(counts)
            licenses.update(by_license)
    return {
        "encoding": encoding.id,
        "shards": totals.shards,
        "samples_in": totals.samples_in,
        "encoded": totals.encoded,
        "rejected": dict(totals.rejected.most_common()),
        "captions": dict(captions),
        "licenses": dict(licenses.most_common()),
        "buckets": {
            bucket: size
            | sample_stats(islice(read_parts(store, bucket, first_parts.get(bucket, [])), max_samples), encoding)
            for bucket, size in totals.buckets.items()
        },
    }


@dataclass
class RootTotals:
    """Totals for a root, accumulated tar by tar."""

    shards: int = 0
    samples_in: int = 0
    encoded: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    """Reason → number of samples that no bucket stores."""
    samples: Counter[str] = field(default_factory=Counter)
    """Bucket → number of samples, including empty buckets."""
    bytes: Counter[str] = field(default_factory=Counter)
    """Bucket → total bytes of its MDS files."""

    def add(self, tar_receipts: TarReceipts) -> None:
        """Add a tar's counts."""
        self.shards += 1
        self.samples_in += tar_receipts.samples_in
        self.encoded += tar_receipts.encoded
        self.rejected.update(tar_receipts.rejected)
        for bucket, part in tar_receipts.parts.items():
            self.samples[bucket] += part.samples
            self.bytes[bucket] += sum(file.bytes for file in part.mds)

    @property
    def buckets(self) -> dict[str, dict[str, Any]]:
        """Bucket → number of samples and bytes per sample (in MDS files, including their headers), smallest bucket
        first."""
        return {
            bucket: {"samples": samples, "bytes_per_sample": round(self.bytes[bucket] / max(samples, 1))}
            for bucket, samples in sorted(self.samples.items(), key=lambda item: Bucket.parse(item[0]))
        }


def root_totals(store: Store) -> RootTotals:
    """Compute a root's totals. Raises RequestError if nothing has been committed to it."""
    totals = RootTotals()
    for tar_receipts in iter_committed_tars(store):
        totals.add(tar_receipts)
    return totals


def caption_counts() -> Counter[str]:
    """Return zero counts for `stored` captions and each of CAPTION_CHANGES, to be updated from `counts_once`."""
    return Counter(dict.fromkeys(("stored", *CAPTION_CHANGES), 0))


def counts_once(store: Store, tar_receipts: TarReceipts) -> Iterator[tuple[dict[str, int], dict[str, int]]]:
    """Yield caption counts, and numbers of samples by licence, for each bucket, excluding samples that were already
    counted in a smaller bucket."""
    counted = np.zeros(tar_receipts.samples_in, bool)
    areas = {name: (size.width * size.height, name) for name in tar_receipts.parts if (size := Bucket.parse(name))}
    for bucket in sorted(areas, key=areas.__getitem__):
        part, stored = tar_receipts.parts[bucket], tar_receipts.parts[bucket].stored_samples
        # usually a bucket's samples are all new (aspect buckets) or were all counted in a smaller bucket
        if not (stored & counted).any():
            yield part.captions, part.licenses
        elif (stored & ~counted).any():  # the receipt has only totals, so read the table
            table, _ = read_tables(store, part.folder, part.files)
            licenses = table.get("license") or [""] * len(table["key"])
            names = ("captions", *CAPTION_CHANGES)
            rows = sorted(zip(table["key"], licenses, *(table[name] for name in names), strict=True))
            is_new = ~counted[stored]  # ordered by key, like `rows`
            _, names_of_licenses, *counts = zip(
                *(row for row, keep in zip(rows, is_new, strict=True) if keep), strict=True
            )
            yield (
                dict(zip(("stored", *CAPTION_CHANGES), map(sum, counts), strict=True)),
                license_counts(names_of_licenses),
            )
        counted |= stored


def sample_stats(samples: Iterable[dict[str, Any]], encoding: EncodingRecord) -> dict[str, Any]:
    """Compute the scaled latents' mean and standard deviation per channel, and percentiles of caption lengths. Return
    an empty dict if there are no samples."""
    moments, lengths, scores, image = [], [], [], encoding.image
    texts = Counter[str]()
    scale, shift = (np.array(values)[:, None, None] for values in (image.scale, image.shift))
    for sample in samples:
        # for stored moments, this is the posterior's mean
        latents = image_latents(sample)[: image.channels].astype(np.float64)
        latents = (latents - shift) * scale
        moments.append((latents.mean(axis=(1, 2)), (latents**2).mean(axis=(1, 2))))
        lengths += [len(caption) for caption in captions(sample, encoding)]
        scores.append(sample["scores"])
        texts[sample["caption"]] += 1
    if not moments:
        return {}
    means, squares = np.mean(moments, axis=0)
    return {
        "measured_on": len(moments),
        "latent_mean": means.round(4).tolist(),
        "latent_std": np.sqrt(np.maximum(squares - means**2, 0)).round(4).tolist(),  # below 0 only by rounding
        "caption_characters": percentiles(lengths),
        "repeated_captions": round(1 - len(texts) / len(moments), 4),
        "scores": {
            name: {"samples": len(known), **percentiles(known)}
            for name, column in zip(encoding.scores, np.transpose(scores), strict=True)
            if len(known := column[~np.isnan(column)])
        },
    }


def percentiles(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Return the percentiles 5, 50 and 95."""
    return {f"p{percent}": float(np.percentile(values, percent)) for percent in (5, 50, 95)}


def stats_table(stats: dict[str, Any]) -> str:
    """Format the result of `root_stats` as a table."""
    counts = stats["captions"]
    changes = ", ".join(f"{name.replace('_', ' ')} {counts[name]:,}" for name in CAPTION_CHANGES)
    num_shards, samples_in = counted(stats["shards"], "shard"), counted(stats["samples_in"], "sample")
    lines = [
        f"encoding {stats['encoding']}, {num_shards}: {samples_in} in, {stats['encoded']:,} encoded",
        f"captions: {counts['stored']:,} stored; changed: {changes}",
        "rejected: " + (", ".join(f"{reason} {count:,}" for reason, count in stats["rejected"].items()) or "none"),
        "",
    ]
    if stats["licenses"]:
        lines.insert(-1, f"licences: {', '.join(f'{name} {count:,}' for name, count in stats['licenses'].items())}")
    rows = [
        ["bucket", "samples", "B/sample", "caption characters", "scaled latents per channel"],
        ["", "", "", "5 / 50 / 95 %", "(std 1 is ideal)"],
    ]
    for bucket, b in stats["buckets"].items():
        rows.append([bucket, f"{b['samples']:,}", f"{b['bytes_per_sample']:,}", "", ""])
        if "latent_mean" in b:
            lengths = " / ".join(f"{length:.0f}" for length in b["caption_characters"].values())
            means = ", ".join(f"{value:+z.3f}" for value in b["latent_mean"])
            deviations = ", ".join(f"{value:.3f}" for value in b["latent_std"])
            rows[-1][3:] = [lengths, f"mean {means}; std {deviations}; {counted(b['measured_on'], 'sample')}"]
    repeated = [
        f"repeated captions in {bucket}: {b['repeated_captions']:.1%} of {counted(b['measured_on'], 'sample')} "
        f"(`text.deduplicate` stores each once per MDS file)"
        for bucket, b in stats["buckets"].items()
        if b.get("repeated_captions", 0) > MIN_REPORTED_REPEATS
    ]
    scores = [
        f"{name} in {bucket}: {' / '.join(f'{found[p]:.3g}' for p in ('p5', 'p50', 'p95'))} (5 / 50 / 95 % of "
        f"{counted(found['samples'], 'sample')})"
        for bucket, b in stats["buckets"].items()
        for name, found in b.get("scores", {}).items()
    ]
    notes = [*repeated, *scores]
    return "\n".join([*lines, format_table(rows, ">>>><"), *(["", *notes] if notes else [])])


def plot_stats(stats: dict[str, Any], path: Path) -> None:
    """Plot samples and bytes per bucket, rejects by reason, latent statistics and caption lengths to a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 7.5), dpi=110, layout="tight")
    axes = figure.subplots(2, 3).flatten()
    buckets = stats["buckets"]
    measured = {bucket: b for bucket, b in buckets.items() if "latent_std" in b}
    for axis, title, color, values in (
        (axes[0], "samples per bucket", "#08519c", {bucket: b["samples"] for bucket, b in buckets.items()}),
        (axes[1], "bytes per sample", "#08519c", {bucket: b["bytes_per_sample"] for bucket, b in buckets.items()}),
        (axes[2], f"rejected, of {stats['samples_in']:,} samples in", "#b45309", stats["rejected"] or {"none": 0}),
    ):
        axis.bar_label(axis.barh(list(values), list(values.values()), color=color), fmt="{:,.0f}", padding=3)
        axis.margins(x=0.2)
        axis.invert_yaxis()
        axis.set_title(title)
    for axis, name, title, ideal in (
        (axes[3], "latent_mean", "mean of scaled latents", 0),
        (axes[4], "latent_std", "standard deviation of scaled latents", 1),
    ):
        for bucket, b in measured.items():
            axis.plot(b[name], marker="o", label=bucket)
        axis.axhline(ideal, color="grey", linewidth=0.8)
        channels = range(max((len(b[name]) for b in measured.values()), default=0))
        axis.set(xticks=channels, xlabel="channel", title=title)
        if measured:
            axis.legend(frameon=False)
    for place, b in enumerate(measured.values()):
        low, middle, high = b["caption_characters"].values()
        axes[5].plot([low, high], [place, place], color="#08519c", linewidth=6, solid_capstyle="butt", alpha=0.4)
        axes[5].plot([middle], [place], "o", color="#08519c")
        text = f"{low:.0f} / {middle:.0f} / {high:.0f}"
        axes[5].annotate(text, (middle, place), (0, 8), textcoords="offset points", ha="center")
    axes[5].set_yticks(range(len(measured)), list(measured))
    axes[5].set(ylim=(len(measured) - 0.4, -0.6), title="caption characters: 5, 50 and 95 %")
    figure.suptitle(f"encoding {stats['encoding']}: {stats['encoded']:,} of {stats['samples_in']:,} samples encoded")
    file = io.BytesIO()
    figure.savefig(file, format="png")
    write_output(path, file.getvalue())
