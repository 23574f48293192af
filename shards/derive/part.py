"""Derive one tar's parts: read them from the source root, convert them, and commit them as stage 1 does."""

import functools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from shards.base.durable import DamagedFile
from shards.base.errors import RequestError, UnfitNode
from shards.base.scratch import attempt_folder
from shards.base.store import LocalStore, Store
from shards.derive.conversion import Conversion
from shards.format import image, text
from shards.format.buckets import Bucket
from shards.format.models import recorded_folder
from shards.format.projection import matrix_of, project
from shards.format.receipts import ORIGIN, Receipt
from shards.format.tables import CAPTION_CHANGES, OTHER_BUCKET, REFUSED_NAME, SAMPLES_NAME
from shards.format.text import TextLatents, unpack_stored
from shards.format.towers import TextTower, Weights
from shards.root.commit import Attempt, commit, current_generation, record_file
from shards.root.committed import TarReceipts, read_receipts
from shards.root.exclusions import Exclusion, exclusion_ids, load_exclusion
from shards.root.provenance import Stopwatch, made_by, versions
from shards.root.reading import caption_of_each_source, decoded, image_latents, read_part
from shards.root.writing import PartWriter, caption_text

EXCLUDED, NON_FINITE, NO_CAPTION = "excluded", "non_finite", "no_caption"
CPU = torch.device("cpu")
AT_ONCE = 256
"""Number of samples whose captions are encoded together."""
SOFTWARE = ("numpy", "torch", "transformers")
Settings = dict[str, str | int | float | bool]
Captions = Generator[tuple[dict[str, TextLatents], bool], None, None]
Encode = Callable[[list[str], Stopwatch], Captions]
"""Function that encodes captions with the text towers in `Conversion.reencoded`. It yields, for each caption, the
latents per tower and whether any tower truncated the caption. The stopwatch counts its time under `encode` and per
tower."""


NewCaption = tuple[str, frozenset[str]]
"""A caption's text, and the changes that cleaning made to it (of CAPTION_CHANGES)."""
Renew = Callable[
    [list[str], list[dict[str, str]], list[dict[str, float]]], Iterator[tuple[list[NewCaption | None], np.ndarray]]
]
"""Function that chooses the captions and scores of samples, given their keys, their stored captions by source and their
stored scores by name. For each sample, it yields one caption (or None) for each of the target's caption sources, and
the target's scores, as (scores,) float32."""


def encode_nothing(captions: list[str], stopwatch: Stopwatch) -> Captions:
    """Implement `Encode` for conversions that re-encode no text tower."""
    yield from (({}, False) for _ in captions)


@dataclass(frozen=True)
class SourceTar:
    """A source tar to derive."""

    name: str
    receipts: tuple[str, ...]
    """Names of the tar's receipts in the source root, for the buckets to derive."""
    buckets: tuple[str, ...]
    """Buckets to derive."""


@dataclass(frozen=True)
class Derivation:
    """Everything that one process needs to derive tars: roots, conversion, encoder and device."""

    source: Store
    target: Store
    conversion: Conversion
    encode: Encode = encode_nothing
    device: torch.device = CPU
    settings: Settings = field(default_factory=dict)
    renew: Renew | None = None
    """Chooses new captions or scores, or both; None: the stored ones are kept."""
    counts: Callable[[], Settings] = dict
    """Returns settings to record with a part, such as the number of samples found in tables since the last call."""


def derive_tar(
    tar: SourceTar, how: Derivation, attempt: int = 1, report: Callable[[int], None] = lambda samples: None
) -> TarReceipts:
    """Derive and commit the parts of one tar that the target lacks, and return the target's active receipts afterwards.
    Raises DamagedFile if source parts do not match their receipts; the tar's other parts are committed before.

    Receipts record the attempt number, `attempt`. `report` is called with the number of samples processed so far, and
    may raise an exception to stop the derivation.
    """
    receipts = list(read_receipts(how.source, tar.receipts))
    in_force = {receipt.bucket: current_generation(how.target, receipt.bucket, tar.name)[1] for receipt in receipts}
    committed = {bucket: receipt for bucket, receipt in in_force.items() if receipt}
    excluded = [load_exclusion(how.source, id) for id in exclusion_ids(how.source)]
    done, damaged = 0, list[str]()
    with attempt_folder(how.target, tar.name) as folder:
        for receipt in receipts:
            if receipt.bucket in committed:
                continue
            report(done)  # raises an exception if the worker is stopping, before another part is downloaded
            stopwatch, started = Stopwatch(), datetime.now(UTC)
            with ExitStack() as stack:
                with stopwatch("fetch"):
                    part = stack.enter_context(how.source.local(receipt.folder))
                    try:
                        check_part(part, receipt)
                    except DamagedFile as error:
                        damaged.append(str(error))
                        continue
                places = _places(part, receipt)
                writer = PartWriter(folder / receipt.bucket, how.conversion.target, Bucket.parse(receipt.bucket))
                for count in convert_part(part, receipt, writer, how, excluded, stopwatch):
                    report(done := done + count)
                with stopwatch("write"):
                    written = writer.finish()
            committed |= commit(
                how.target,
                Attempt(
                    tar=tar.name,
                    folder=folder,
                    encoding=how.conversion.target,
                    places=places,
                    samples_in=receipt.samples_in,
                    parts={receipt.bucket: written},
                    rules={receipt.bucket: receipt.rule},
                    source=receipt.input,
                    software=receipt.software | versions(SOFTWARE),
                    settings=_kept(receipt.settings, how) | how.settings | how.counts() | _origin(receipt),
                    made_by=made_by(how.device),
                    number=attempt,
                    started=started.isoformat(timespec="seconds"),
                    seconds=stopwatch.seconds,
                    clock=stopwatch.began,
                ),
            )
    if damaged:
        raise DamagedFile(" ".join(damaged))
    return TarReceipts(tar.name, committed)


def _kept(settings: Settings, how: Derivation) -> Settings:
    """Return the settings of a source part without those of tables that the target replaces."""
    stored, wanted = how.conversion.source.tables, how.conversion.target.tables
    replaced = {f"tables.{column}" for column in stored if stored[column] != wanted.get(column)}
    names = {name: name.removeprefix("derived.").removesuffix(".found") for name in settings}
    return {name: value for name, value in settings.items() if names[name] not in replaced}


def _origin(receipt: Receipt) -> Settings:
    """Return the settings that record which part a part is derived from, and which machine encoded the first part in a
    chain of derivations."""
    origin: Settings = {ORIGIN: f"{receipt.encoding_id}/{receipt.folder}"}
    if not any(name.startswith(f"{ORIGIN}.") for name in receipt.settings):
        made = {"host": receipt.made_by.host, "gpu": receipt.made_by.gpu, "gpu_uuid": receipt.made_by.gpu_uuid}
        origin |= {f"{ORIGIN}.{name}": value for name, value in made.items() if value}
    return origin


def check_part(folder: Path, receipt: Receipt) -> None:
    """Check every file of a part against its receipt, so that damaged data does not get a new, valid receipt. Raises
    DamagedFile if a file is missing or does not match."""
    here = LocalStore(folder)
    for name, record in receipt.files.items():
        if here.size(name) is None or record_file(here, name) != record:
            raise DamagedFile(
                f"{receipt.folder}/{name} is missing or damaged: it does not match its receipt, {receipt.name}. "
                f"Nothing was derived from this part. Restore the file from a backup, or recall the part."
            )


def convert_part(
    part: Path, receipt: Receipt, writer: PartWriter, how: Derivation, excluded: list[Exclusion], stopwatch: Stopwatch
) -> Iterator[int]:
    """Convert a part's samples, in groups, from the source's encoding to the writer's. Yield the number of samples in
    each group."""
    table = pq.read_table(part / SAMPLES_NAME)
    is_excluded = np.logical_or.reduce([np.zeros(len(table), bool), *(exclusion.hits(table) for exclusion in excluded)])
    for row in pq.read_table(part / REFUSED_NAME).to_pylist():
        writer.refuse(**row)
    writer.skip(receipt.refused.get(OTHER_BUCKET, 0))
    stored = zip(read_part(part), table.to_pylist(), is_excluded, strict=True)
    while group := list(islice(stored, AT_ONCE)):
        kept = []
        for sample, row, is_left_out in group:
            if is_left_out:
                writer.refuse(row["key"], row.get("url", ""), EXCLUDED, "excluded by a list from `shards exclude`")
            else:
                kept.append((sample, row))
        captioned = list(_renewed(kept, how, writer))
        with closing(how.encode([text for *_, texts in captioned for text in present(texts)], stopwatch)) as encoded:
            for sample, row, texts in captioned:
                latents = [next(encoded) for _ in present(texts)]
                with stopwatch("write"):
                    _append(writer, sample, row, texts, latents, how.conversion)
        yield len(group)


Texts = list[str | None]
"""A sample's caption of each source, or None."""


def present(texts: Texts) -> list[str]:
    """Return a sample's captions, without the missing ones."""
    return [text for text in texts if text is not None]


def _renewed(
    samples: list[tuple[dict[str, Any], dict[str, Any]]], how: Derivation, writer: PartWriter
) -> Iterator[tuple[dict[str, Any], dict[str, Any], Texts]]:
    """Yield samples with their rows and their captions, with the captions and scores of the target. Refuse samples
    without a caption."""
    source, target = how.conversion.source, how.conversion.target
    stored = [caption_of_each_source(sample, source) for sample, _ in samples]
    if how.renew is None:
        yield from ((sample, row, texts) for (sample, row), texts in zip(samples, stored, strict=True))
        return
    by_source = [
        {name: text for name, text in zip(source.captions, texts, strict=True) if text is not None} for texts in stored
    ]
    scores = [{name: row[name] for name in source.scores} for _, row in samples]
    renewed = how.renew([row["key"] for _, row in samples], by_source, scores)
    for (sample, row), texts, old, (new, numbers) in zip(samples, stored, by_source, renewed, strict=True):
        if how.conversion.has_new_scores:
            sample, row = sample | {"scores": numbers}, row | dict(zip(target.scores, numbers.tolist(), strict=True))
        if how.conversion.has_new_captions:
            found = [caption for caption in new if caption is not None]
            if not found:
                why = f"absent in {', '.join(target.captions)}; stored: {', '.join(old)}"
                writer.refuse(row["key"], row.get("url", ""), NO_CAPTION, why)
                continue
            counts = {name: sum(name in changes for _, changes in found) for name in CAPTION_CHANGES}
            texts = [None if caption is None else caption[0] for caption in new]
            sample = sample | {"caption": caption_text(texts, target)}
            row = row | counts | {"captions": len(found)}
        yield sample, row, texts


def _append(
    writer: PartWriter,
    sample: dict[str, Any],
    row: dict[str, Any],
    captions: Texts,
    encoded: list[tuple[dict[str, TextLatents], bool]],
    conversion: Conversion,
) -> None:
    """Write a stored sample, with its row of samples.parquet, in the target's encoding."""
    texts = present(captions)
    if not all(_is_finite(latents) for by_tower, _ in encoded for latents in by_tower.values()):
        writer.refuse(row["key"], row.get("url", ""), NON_FINITE, "not finite in float16")
        return
    try:
        columns = converted(sample, texts, [by_tower for by_tower, _ in encoded], conversion)
    except OverflowError as error:
        writer.refuse(row["key"], row.get("url", ""), NON_FINITE, str(error))
        return
    truncated = max(row["truncated"], sum(was_truncated for _, was_truncated in encoded))
    columns |= {name: sample[name] for name in ("key", "caption", "size", "scores")}
    columns |= conversion.target.weights_of(captions)
    # tables of older parts lack `license`
    writer.append(columns, {"license": "", **row, "truncated": truncated})


def _is_finite(latents: TextLatents) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in latents.tensors)


def _places(part: Path, receipt: Receipt) -> dict[str, int]:
    """Recover the bit position of each key in a receipt's bitmaps.

    Bits are assigned to keys in sorted order, so the n-th set bit of a bitmap belongs to the n-th key in sorted order
    among the keys in that bitmap.
    """
    stored = pq.read_table(part / SAMPLES_NAME, columns=["key"])["key"].to_pylist()
    refused = pq.read_table(part / REFUSED_NAME).to_pylist()
    places = dict(zip(sorted(stored), np.flatnonzero(receipt.stored_samples).tolist(), strict=True))
    for reason in receipt.rejects:
        keys = sorted(row["key"] for row in refused if row["reason"] == reason)
        places |= zip(keys, np.flatnonzero(receipt.rejected_samples(reason)).tolist(), strict=True)
    return places


def converted(
    sample: dict[str, Any], texts: list[str], encoded: Sequence[dict[str, TextLatents]], how: Conversion
) -> dict[str, Any]:
    """Convert a stored sample's tower columns to the target's encoding. Raises OverflowError if projected states are
    too large for float16. `texts` holds the sample's captions, and
    `encoded` holds, for each caption, the latents of the re-encoded text towers."""
    columns, rows = image_columns(sample, how), unpack_stored(sample)
    for name, wanted in how.target.texts.items():
        if name in how.reencoded:
            latents = [by_tower[name] for by_tower in encoded]
        else:
            latents = text_latents(name, how, texts, rows)
        columns |= next(text.pack(name, wanted, [latents], how.target.several))
    for name, feature_tower in how.target.features.items():
        features = decoded(sample, f"features.{name}", f"feature_scales.{name}")
        columns |= next(image.pack_features(name, feature_tower, [torch.from_numpy(features)]))
    return columns


def image_columns(sample: dict[str, Any], how: Conversion) -> dict[str, np.ndarray]:
    """Convert a sample's image columns to the target's storage."""
    stored, wanted = how.source.image, how.target.image
    if stored.storage == wanted.storage:  # copied, because quantising again would change the last bit of the scales
        planes = {"image_latents": sample["image_latents"][: wanted.num_planes]}
        return planes | {name: sample[name] for name in ("image_scales",) if name in sample}
    return next(image.pack(wanted, [torch.from_numpy(image_latents(sample)[: wanted.num_planes])]))


def text_latents(name: str, how: Conversion, texts: list[str], rows: list[dict[str, np.ndarray]]) -> list[TextLatents]:
    """Return one tower's latents for every caption of a sample, as stage 1 would have computed them for the target.
    `rows`: the sample's text columns, by caption."""
    stored, wanted = how.source.texts[name], how.target.texts[name]
    found = []
    for row, count in zip(rows, num_tokens(name, stored, wanted, texts, rows), strict=True):
        states = None
        if wanted.states:
            # lossless: float16 values survive, and quantising dequantised float8 codes gives the same codes
            states = torch.from_numpy(decoded(row, f"text_latents.{name}", f"text_scales.{name}"))
            states = to_target_projection(states, stored, wanted)
        pooled = torch.from_numpy(row[f"pooled.{name}"].astype(np.float32)) if wanted.pooled else None
        found.append(TextLatents(states, count, pooled))
    return found


def to_target_projection(states: torch.Tensor, stored: TextTower, wanted: TextTower) -> torch.Tensor:
    """Convert stored (tokens, width) states to the target's projection. Raises OverflowError if they become too large
    for float16."""
    if wanted.projection is None:
        return states
    if stored.projection is None:
        projected = project(states, matrix_of(wanted.projection))
        if not projected.isfinite().all():
            raise OverflowError("not finite in float16 once projected")
        return projected
    return states[:, : wanted.width]  # columns are in decreasing order of energy


def num_tokens(
    name: str, stored: TextTower, wanted: TextTower, texts: list[str], rows: list[dict[str, np.ndarray]]
) -> list[int]:
    """Return the number of real (non-padding) tokens in each of a sample's captions.

    The captions are tokenised again only if the target needs counts that the source does not store.
    """
    if not counts_tokens(stored, wanted):
        return [int(row.get(f"num_tokens.{name}", 1)) for row in rows]
    try:
        tokenizer = load_tokenizer(stored.tokenizer.name, stored.tokenizer.sha256)
    except RequestError as error:
        raise UnfitNode(f"On node {os.uname().nodename}: {error}") from error
    tokens = tokenizer([stored.prompt(caption) for caption in texts], verbose=False).input_ids
    return [max(1, sum(position < len(row) for position in stored.kept)) for row in tokens]


def counts_tokens(stored: TextTower, wanted: TextTower) -> bool:
    """Return whether the target needs a tower's token counts but the source does not store them."""
    return stored.states and wanted.states and wanted.hides_padding and not stored.hides_padding


@functools.lru_cache
def load_tokenizer(name: str, sha256: str) -> Any:
    """Load a text tower's tokenizer. Raises RequestError if this machine does not have the one in encoding.json."""
    import transformers  # imported late: only needed when captions are tokenised again

    return transformers.AutoTokenizer.from_pretrained(recorded_folder(Weights(name=name, sha256=sha256)))


def kept_uncond(empty: Mapping[str, TextLatents], how: Conversion) -> dict[str, TextLatents]:
    """Select the source's empty-caption latents that the target keeps, keyed by text tower."""
    kept = {}
    for name, wanted in how.target.texts.items():
        if name in empty and name not in how.reencoded:
            states, number, pooled = empty[name].states, empty[name].num_tokens, empty[name].pooled
            if states is not None:
                states = to_target_projection(states, how.source.texts[name], wanted) if wanted.states else None
            kept[name] = TextLatents(states, number, pooled if wanted.pooled else None)
    return kept
