"""`python -m shards card ROOT`: fill the template card.md from encoding.json and the receipts."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from shards.base.config import flatten
from shards.base.store import Store
from shards.base.table import counted
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.tables import CAPTION_CHANGES
from shards.format.towers import TextTower
from shards.root.committed import TarReceipts, iter_committed_tars
from shards.root.exclusions import exclusion_ids, load_exclusion
from shards.tools.stats import RootTotals, caption_counts, counts_once

CARD = Path(__file__).with_name("card.md")
ABOUT_POSTERIOR = {
    "moments": "mean and log-variance of the VAE's posterior",
    "mean": "the VAE's mean",
    "deterministic": "the autoencoder's latents",
}
POWERS = ("", "1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T")
VALUES_SHOWN = 10
"""Maximum number of values listed per setting, because a derived root has one `derived_from` value per part."""
ABOUT_COLUMNS = {
    "key": ": key of the input sample",
    "image_latents": ": channels, height, width",
    "size": ": original width, height, crop top, left, in pixels",
}


def dataset_card(store: Store) -> str:
    """Return the dataset card of a latents root as Markdown. Raises RequestError if `store` is not a latents root or
    nothing has been committed to it."""
    encoding, totals, captions = EncodingRecord.load(store), RootTotals(), caption_counts()
    settings, days, licenses = SettingCounts(), set[str](), Counter[str]()
    for tar_receipts in iter_committed_tars(store):
        totals.add(tar_receipts)
        settings.add(tar_receipts)
        days |= {part.started[:10] for part in tar_receipts.parts.values()}
        for counts, by_license in counts_once(store, tar_receipts):
            captions.update(counts)
            licenses.update(by_license)
    sizes = totals.buckets
    # empty buckets have no files to read
    filled = [name for name, size in sizes.items() if size["samples"]] or list(sizes)
    bucket = filled[0]
    record = flatten(encoding.model_dump(mode="json"))
    hidden = (".name", ".sha256", ".matrix", ".energy_shares")
    fixed = [(path, value) for path, value in record.items() if not path.endswith(hidden)]
    columns = encoding.columns(Bucket.parse(bucket))
    about = ABOUT_COLUMNS | {"scores": f": {', '.join(encoding.scores)}; NaN where absent"}
    return CARD.read_text().format(
        size_category=size_category(totals.encoded),
        configs="\n".join(f"- config_name: {bucket}\n  data_files: {bucket}/*/*.mds" for bucket in filled),
        encoding=encoding,
        encoded=counted(totals.encoded, "picture"),
        image=ABOUT_POSTERIOR[encoding.image.posterior],
        texts="; ".join(_about_text(name, tower) for name, tower in encoding.texts.items()),
        weights=_rows((name, weights.name, f"`{weights.sha256}`") for name, weights in encoding.weights.items()),
        num_tars=counted(totals.shards, "tar"),
        first_day=min(days),
        last_day=max(days),
        sizes=_rows((bucket, f"{s['samples']:,}", f"{s['bytes_per_sample']:,}") for bucket, s in sizes.items()),
        samples_in=totals.samples_in,
        rejected=_rows((why, f"{n:,}") for why, n in (totals.rejected.most_common() or [("none", 0)])),
        exclusions=_exclusions(store),
        licenses=_licenses(licenses, totals.encoded),
        settings=_rows([*fixed, *settings.described()]),
        columns=_rows((f"`{name}`", f"`{kind}`{about.get(name, '')}") for name, kind in columns.items()),
        name=store.where().rstrip("/").rpartition("/")[2],
        bucket=bucket,
        decoding="\n".join(_decoding(encoding)),
        captions=captions["stored"],
        changes=", ".join(f"{name} {captions[name]:,}" for name in CAPTION_CHANGES),
    )


def _licenses(counts: Counter[str], samples: int) -> str:
    """Return a table of samples by licence, or a sentence if the input states none."""
    if not counts:
        return "The input does not state licences of pictures."
    unknown = [("not stated", samples - counts.total())] if samples > counts.total() else []
    rows = _rows((name, f"{count:,}") for name, count in [*counts.most_common(), *unknown])
    return f"Licences of the pictures, as the input states them:\n\n| licence | samples |\n| --- | --- |\n{rows}"


def _exclusions(store: Store) -> str:
    """Return a sentence about the samples that are stored but excluded from training."""
    ids = exclusion_ids(store)
    if not ids:
        return "No samples are excluded from training."
    lists = ", ".join(f"`exclusions/{id}.txt` ({counted(len(load_exclusion(store, id).values), 'line')})" for id in ids)
    return (
        f"Samples matched by these lists are stored, but latentmill's trainer skips them: {lists}. Other readers must "
        f"skip them themselves."
    )


def size_category(samples: int) -> str:
    """Return the Hugging Face Hub's `size_categories` tag for a number of samples."""
    power = min(max(len(str(samples)) - 3, 0), len(POWERS) - 2)
    return f"{POWERS[power]}<n<{POWERS[power + 1]}" if power else "n<1K"


def _rows(rows: Iterable[Iterable[Any]]) -> str:
    """Format the rows of a Markdown table."""
    return "\n".join(f"| {' | '.join(map(_cell, cells))} |" for cells in rows)


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|")


class SettingCounts:
    """Number of tars per value, for each setting and software version that the receipts record."""

    def __init__(self) -> None:
        self.num_tars = 0
        self.tars: dict[str, dict[str, Counter[str]]] = {"settings": {}, "software": {}}
        """Section → setting → value → number of tars with that value."""
        self.having: Counter[tuple[str, str]] = Counter()
        """(section, setting) → number of tars that record the setting."""

    def add(self, tar_receipts: TarReceipts) -> None:
        """Count a tar's settings. A tar counts for several values of a setting if its buckets were encoded with
        different ones."""
        self.num_tars += 1
        for section, counts in self.tars.items():
            made = [getattr(part, section) for part in tar_receipts.parts.values()]
            for key in {key for part in made for key in part}:
                counts.setdefault(key, Counter()).update({str(part.get(key)) for part in made})
                self.having[section, key] += 1

    def described(self) -> Iterator[tuple[str, str]]:
        """Yield each setting with its values, most frequent first. The value "None" stands for tars that do not record
        the setting."""
        for section, counts in self.tars.items():
            for key in sorted(counts):
                values = counts[key] + Counter({"None": self.num_tars - self.having[section, key]})
                ordered = sorted(values.items(), key=lambda item: (-item[1], item[0]))
                listed = [
                    value if len(ordered) == 1 else f"{value} ({counted(tars, 'shard')})" for value, tars in ordered
                ]
                more = [f"and {len(listed) - VALUES_SHOWN:,} more values"] if len(listed) > VALUES_SHOWN else []
                yield key, ", ".join(listed[:VALUES_SHOWN] + more)


def _decoding(encoding: EncodingRecord) -> Iterator[str]:
    """Yield lines that explain how to decode this root's columns."""
    if encoding.image.posterior == "moments":
        yield "`image_latents` holds the posterior's means in the first half of its channels, and the log-variances in"
        yield "the second half. A latent is sampled as `mean + exp(0.5 × log-variance) × noise`."
    else:
        yield "`image_latents` contains no variances and is used directly."
    if encoding.image.storage == "int8":
        yield "The values are stored as int8 codes: a mean is its code times its channel's entry in `image_scales`, and"
        yield "a log-variance is `(code + 128) × 50 / 255 - 30`."
    yield f"The model's input is `(latent - shift) × scale`, with the VAE's shift {_values(encoding.image.shift)} and"
    yield f"scale {_values(encoding.image.scale)}."
    stored = [tower.storage for tower in encoding.texts.values()]
    if "float8" in stored + [tower.storage for tower in encoding.features.values()]:
        yield "Columns of type uint8 hold e4m3 codes: a token's vector is its codes, viewed as `torch.float8_e4m3fn`,"
        yield "times its entry in the matching scales column."
    if encoding.several:
        yield f"A sample can have several captions ({', '.join(encoding.captions)}): `caption` is a JSON list with one"
        yield "entry per caption field, null for a missing caption. The text columns have a leading axis over the"
        yield "captions that exist."
    if encoding.caption_weights:
        weights = ", ".join(map(str, encoding.caption_weights))
        yield f"`caption_weights` says how often training draws each of a sample's captions (in all: {weights})."


def _values(values: tuple[float, ...]) -> str:
    """Format per-channel values, or the single value if all channels share it."""
    return ", ".join(map(str, values)) if len(set(values)) > 1 else str(values[0])


def _about_text(name: str, tower: TextTower) -> str:
    kept = "up to " if tower.trim else ""
    states = f"hidden states ({tower.layer}) of {kept}{tower.length} tokens × {tower.width} in {tower.storage}"
    if tower.projection:
        share = f"{tower.projection.energy_kept:.2%} of their energy"
        states += f", projected from {tower.input_width} dimensions ({share})"
    return f"{name}, {' and '.join([states] * tower.states + ['a pooled output'] * bool(tower.pooled))}"
