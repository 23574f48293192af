"""`python -m shards card ROOT`: a dataset card, from encoding.json and receipts. Its Markdown is card.md."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from shards.base.config import flatten
from shards.base.store import Store
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.tables import CAPTION_CHANGES
from shards.format.towers import TextTower
from shards.root.committed import TarBooks, load_committed
from shards.root.exclusions import exclusion_ids, load_exclusion
from shards.tools.stats import bucket_sizes, rejected_samples, stored_captions

CARD = Path(__file__).with_name("card.md")
ABOUT_POSTERIOR = {
    "moments": "mean and log-variance of the VAE's posterior",
    "mean": "the VAE's mean",
    "deterministic": "the autoencoder's latents",
}
POWERS = ("", "1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T")
ABOUT_COLUMNS = {
    "key": ": of the input sample",
    "image_latents": ": channels, height, width",
    "size": ": original width, height, crop top, left, in pixels",
    "scores": ": aesthetic, similarity, punsafe, pwatermark; NaN where absent",
}


def dataset_card(store: Store) -> str:
    """The card of a latents root.

    Raises:
        RequestError: not a latents root, or nothing is committed to it.
    """
    encoding, books = EncodingRecord.load(store), load_committed(store)
    sizes, started = bucket_sizes(books), [part.started[:10] for tar in books for part in tar.parts.values()]
    encoded, bucket, captions = sum(tar.encoded for tar in books), next(iter(sizes)), stored_captions(store, books)
    columns = encoding.stored_columns(Bucket.parse(bucket))
    return CARD.read_text().format(
        size_category=size_category(encoded),
        configs="\n".join(f"- config_name: {bucket}\n  data_files: {bucket}/*/*.mds" for bucket in sizes),
        encoding=encoding,
        encoded=encoded,
        image=ABOUT_POSTERIOR[encoding.image.posterior],
        texts="; ".join(_about_text(name, tower) for name, tower in encoding.texts.items()),
        weights=_rows((name, weights.name, f"`{weights.sha256}`") for name, weights in encoding.weights.items()),
        num_tars=len(books),
        first_day=min(started),
        last_day=max(started),
        sizes=_rows((bucket, f"{s['samples']:,}", f"{s['bytes_per_sample']:,}") for bucket, s in sizes.items()),
        samples_in=sum(tar.samples_in for tar in books),
        rejected=_rows((why, f"{n:,}") for why, n in (rejected_samples(books) or {"none": 0}).items()),
        exclusions=_exclusions(store),
        settings=_rows(_settings(encoding, books)),
        columns=_rows((f"`{name}`", f"`{kind}`{ABOUT_COLUMNS.get(name, '')}") for name, kind in columns.items()),
        name=store.where().rstrip("/").rpartition("/")[2],
        bucket=bucket,
        decoding="\n".join(_decoding(encoding)),
        captions=captions["stored"],
        changes=", ".join(f"{name} {captions[name]:,}" for name in CAPTION_CHANGES),
    )


def _exclusions(store: Store) -> str:
    """What is stored, and not to be trained on."""
    ids = exclusion_ids(store)
    if not ids:
        return "Nothing of it is excluded from training."
    lists = ", ".join(f"`exclusions/{id}.txt` ({len(load_exclusion(store, id).values):,} lines)" for id in ids)
    return f"Stored, but excluded from training: what {lists} name."


def size_category(samples: int) -> str:
    """The Hugging Face hub's name for a number of samples."""
    power = min(max(len(str(samples)) - 3, 0), len(POWERS) - 2)
    return f"{POWERS[power]}<n<{POWERS[power + 1]}" if power else "n<1K"


def _rows(rows: Iterable[Iterable[Any]]) -> str:
    """Of a Markdown table."""
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in rows)


def _settings(encoding: EncodingRecord, books: list[TarBooks]) -> Iterator[tuple[str, Any]]:
    """Of encoding.json, the same for every sample; of the receipts, every value that occurs."""
    record = flatten(encoding.model_dump(mode="json"))
    yield from ((path, value) for path, value in record.items() if not path.endswith((".name", ".sha256")))
    for section in ("settings", "software"):
        made = [[getattr(part, section) for part in tar.parts.values()] for tar in books]
        for key in sorted({key for parts in made for part in parts for key in part}):
            values = Counter(value for parts in made for value in {str(part.get(key)) for part in parts}).most_common()
            counted = [value if len(values) == 1 else f"{value} ({count} shards)" for value, count in values]
            yield key, ", ".join(counted)


def _decoding(encoding: EncodingRecord) -> Iterator[str]:
    """What a reader does with the columns, in this root's case."""
    if encoding.image.posterior == "moments":
        yield "`image_latents` holds the posterior's means and then its log-variances, a half of the channels each."
        yield "A sample is `mean + exp(0.5 × log-variance) × noise`;"
    else:
        yield "`image_latents` has no variance: it is used as it is;"
    if encoding.image.storage == "int8":
        yield "Both are int8 codes: a mean is its code times its channel's entry in `image_scales`, a log-variance"
        yield "`(code + 128) × 50 / 255 - 30`."
    yield f"What a model sees is that less the VAE's shift, {_values(encoding.image.shift)}, times its scale,"
    yield f"{_values(encoding.image.scale)}."
    stored = [tower.storage for tower in encoding.texts.values()]
    if "float8" in stored + [tower.storage for tower in encoding.features.values()]:
        yield "What is uint8 are e4m3 codes: a token's vector is its codes, viewed as `torch.float8_e4m3fn`, times its"
        yield "entry in the scales beside them."
    if encoding.several:
        yield f"A sample may have several captions ({', '.join(encoding.captions)}): `caption` is a JSON list with"
        yield "an entry for each, null where it has none; the text columns have a leading axis over those it has."


def _values(values: tuple[float, ...]) -> str:
    """Per channel, or the one of all."""
    return ", ".join(map(str, values)) if len(set(values)) > 1 else str(values[0])


def _about_text(name: str, tower: TextTower) -> str:
    kept = "the real ones of " if tower.trim else ""
    states = f"hidden states ({tower.layer}) of {kept}{tower.length} tokens of {tower.width} in {tower.storage}"
    return f"{name}, {' and '.join([states] * tower.states + ['a pooled output'] * bool(tower.pooled))}"
