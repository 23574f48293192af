"""`python -m shards card ROOT`: a dataset card, Markdown under YAML front matter, from encoding.json and receipts."""

from collections import Counter
from typing import Any

import yaml

from shards.base.store import Store
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.format.receipts import Receipt, load_committed
from shards.format.tables import MENDED
from shards.tools.stats import bucket_sizes

SIZES = {10**3: "n<1K", 10**4: "1K<n<10K", 10**5: "10K<n<100K", 10**6: "100K<n<1M", 10**7: "1M<n<10M"}
SIZES |= {10**8: "10M<n<100M", 10**9: "100M<n<1B", 10**10: "1B<n<10B", 10**11: "10B<n<100B"}
LARGEST_SIZE = "100B<n<1T"


def dataset_card(store: Store) -> str:
    """The card of a latents root.

    Raises:
        RequestError: not a latents root, or nothing is committed to it.
    """
    encoding, receipts = EncodingRecord.load(store), load_committed(store)
    sizes = bucket_sizes(receipts)
    front = yaml.safe_dump(_front_matter(sizes, receipts), sort_keys=False)
    sections = (
        _summary(encoding, receipts),
        _contents(sizes, receipts),
        _encoders(encoding),
        _settings(encoding, receipts),
        _reading(store.where().rstrip("/").rpartition("/")[2], encoding, sizes),
        _limits(encoding, receipts),
    )
    return f"---\nlicense: # fill in: the pictures' and captions' owners' terms, and the encoders'\n{front}---\n\n" + (
        "\n\n".join(sections) + "\n"
    )


def size_category(samples: int) -> str:
    """The Hugging Face hub's name for a number of samples."""
    return next((name for limit, name in SIZES.items() if samples < limit), LARGEST_SIZE)


def _front_matter(sizes: dict[str, dict[str, int]], receipts: list[Receipt]) -> dict[str, Any]:
    return {
        "task_categories": ["text-to-image"],
        "size_categories": [size_category(sum(receipt.encoded for receipt in receipts))],
        "tags": ["latents", "mds", "latent-diffusion"],
        "configs": [{"config_name": bucket, "data_files": f"{bucket}/*/*.mds"} for bucket in sizes],
    }


def _summary(encoding: EncodingRecord, receipts: list[Receipt]) -> str:
    image = (
        "mean and log-variance of the VAE's posterior" if encoding.image.posterior == "moments" else "the VAE's mean"
    )
    return (
        f"# Latents, encoding {encoding.id}\n\n"
        f"{sum(r.encoded for r in receipts):,} pictures with captions, encoded once to train a latent diffusion model: "
        f"{image}, unscaled, in float16, and the text encoder's last hidden states ({_text(encoding)}). No pixels. "
        f"Encoded from {len(receipts):,} tars between {min(r.started for r in receipts)[:10]} and "
        f"{max(r.started for r in receipts)[:10]}."
    )


def _text(encoding: EncodingRecord) -> str:
    text = encoding.text
    length = f"the real ones of {text.length}" if text.trim else str(text.length)
    return f"{length} tokens of {text.width} in {text.storage}"


def _contents(sizes: dict[str, dict[str, int]], receipts: list[Receipt]) -> str:
    rejected = sum((Counter(receipt.rejected) for receipt in receipts), Counter())
    lines = [
        "## What is in it",
        "",
        "| bucket (width × height, px) | samples | bytes per sample |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {bucket} | {size['samples']:,} | {size['bytes_per_sample']:,} |" for bucket, size in sizes.items()]
    lines += ["", f"Of {sum(r.samples_in for r in receipts):,} samples in the tars, these are in no bucket:", ""]
    lines += ["| reason | samples |", "| --- | --- |"]
    lines += [f"| {reason} | {count:,} |" for reason, count in rejected.most_common()] or ["| none | 0 |"]
    return "\n".join(lines)


def _encoders(encoding: EncodingRecord) -> str:
    lines = ["## Encoders", "", "| | name | SHA-256 of its content |", "| --- | --- | --- |"]
    for what in ("vae", "text_encoder", "tokenizer"):
        weights = getattr(encoding, what)
        lines.append(f"| {what.replace('_', ' ')} | {weights.name} | `{weights.sha256}` |")
    return "\n".join(lines)


def _settings(encoding: EncodingRecord, receipts: list[Receipt]) -> str:
    """Of encoding.json, the same for every sample; of the receipts, every value that occurs."""
    lines = ["## Settings", "", "| setting | value |", "| --- | --- |"]
    for name, value in encoding.model_dump(mode="json").items():
        if name in ("vae", "text_encoder", "tokenizer"):
            continue
        entries = value.items() if isinstance(value, dict) else [("", value)]
        lines += [f"| {f'{name}.{key}' if key else name} | {entry} |" for key, entry in entries]
    for section in ("settings", "software"):
        made = [[receipt.made_by(bucket)[section] for bucket in receipt.parts] for receipt in receipts]
        for key in sorted({key for parts in made for part in parts for key in part}):
            values = Counter(value for parts in made for value in {str(part.get(key)) for part in parts})
            lines.append(f"| {key} | {', '.join(_counted(values))} |")
    lines += ["", "Of one sample: `python -m shards where ROOT KEY` names its tar, part, weights and settings."]
    return "\n".join(lines)


def _counted(values: Counter[str]) -> list[str]:
    if len(values) == 1:
        return list(values)
    return [f"{value} ({count} shards)" for value, count in values.most_common()]


def _reading(name: str, encoding: EncodingRecord, sizes: dict[str, dict[str, int]]) -> str:
    bucket = next(iter(sizes))
    return f"""## How to read it

Each bucket is a [mosaicml-streaming](https://github.com/mosaicml/streaming) dataset with these columns:

| column | type |
| --- | --- |
{_columns(encoding, bucket)}

```python
from streaming import StreamingDataset

dataset = StreamingDataset(local="{name}/{bucket}", batch_size=1, shuffle=False)
print(dataset[0]["caption"], dataset[0]["image_latents"].shape)
```

{_decoding(encoding)}
latentmill's trainer does this, with a config such as

```yaml
data:
  streams:
    - {{root: {name}, bucket: {bucket}}}
```

`uncond.safetensors` holds the empty caption's text latents. `python -m shards verify {name}` checks every byte."""


def _decoding(encoding: EncodingRecord) -> str:
    """What a reader does with the columns, in this root's case."""
    text, factor = encoding.text, encoding.image.scaling_factor
    if encoding.image.posterior == "moments":
        lines = ["`image_latents` holds the posterior's means and then its log-variances, a half of the channels each."]
        lines.append("A sample is `mean + exp(0.5 × log-variance) × noise`;")
    else:
        lines = ["`image_latents` is the posterior's mean, without its variance: it is used as it is;"]
    lines.append(f"what the U-Net sees is that times the VAE's scaling factor, {factor}.")
    if text.storage == "float8":
        lines.append(
            "`text_latents` are e4m3 codes: a token's vector is its codes, viewed as `torch.float8_e4m3fn`, times"
        )
        lines.append("its entry in `text_scales`.")
    if text.several:
        lines.append(f"A sample may have several captions ({', '.join(text.captions)}): `caption` is a JSON list with")
        lines.append(
            "an entry for each, null where it has none; the text columns have a leading axis over those it has."
        )
    return "\n".join(lines)


def _columns(encoding: EncodingRecord, bucket: str) -> str:
    about = {
        "key": "of the input sample",
        "image_latents": "channels, height, width",
        "size": "original width, height, crop top, left, in pixels",
        "scores": "aesthetic, similarity, punsafe, pwatermark; NaN where absent",
    }
    columns = encoding.columns(Bucket.parse(bucket))
    return "\n".join(
        f"| `{name}` | `{kind}`{f': {about[name]}' if name in about else ''} |" for name, kind in columns.items()
    )


def _limits(encoding: EncodingRecord, receipts: list[Receipt]) -> str:
    image = encoding.image
    counts = sum((Counter(receipt.captions) for receipt in receipts), Counter())
    mended = ", ".join(f"{name} {counts[name]:,}" for name in MENDED)
    return f"""## Limits

- Latents mean something to the VAE and text encoder above only, by content; training on them fixes both.
- Pictures were cut to their bucket's shape (crop: {image.crop}) and scaled down ({image.resampling}), never up.
- Pictures can be decoded back from the latents, closely: rights and privacy in them are those of the pictures.
- Captions were mended where they were no clean text, and cut. Of {counts["stored"]:,} captions: {mended}.
- Nothing here judges what pictures show; `scores` are what the source said.
- Stored as float16, computed in {encoding.compute_dtype}: other hardware gives the same numbers up to rounding."""
