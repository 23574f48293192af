"""One tar's parts, made of another root's: read, converted, written, committed as stage 1 commits them."""

import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
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
from shards.base.errors import UnfitNode
from shards.base.scratch import attempt_folder
from shards.base.store import LocalStore, Store
from shards.derive.conversion import Conversion
from shards.derive.source import ORIGIN, SourceTar
from shards.format import image, text
from shards.format.buckets import Bucket
from shards.format.models import hash_weights, model_folder
from shards.format.receipts import Receipt
from shards.format.tables import OTHER_BUCKET, REFUSED_NAME, SAMPLES_NAME, SAMPLES_SCHEMA
from shards.format.text import TextLatents, unpack
from shards.format.towers import TextTower
from shards.root.commit import Attempt, commit, current_generation, record_file
from shards.root.committed import TarReceipts, load_commits
from shards.root.exclusions import Exclusion, exclusion_ids, load_exclusion
from shards.root.provenance import Stopwatch, made_by, versions
from shards.root.reading import captions, decoded, image_latents, read_part
from shards.root.writing import PartWriter

EXCLUDED, NON_FINITE = "excluded", "non_finite"
CPU = torch.device("cpu")
AT_ONCE = 256
"""Samples whose captions are encoded together."""
SOFTWARE = ("numpy", "torch", "transformers")
Settings = dict[str, str | int | float | bool]
Captions = Generator[tuple[dict[str, TextLatents], bool], None, None]
Encode = Callable[[list[str], Stopwatch], Captions]
"""Captions → of each, what the fresh towers make of it, and whether one cut it; the time counts as `encode`, and as
each tower's."""


def encode_nothing(captions: list[str], stopwatch: Stopwatch) -> Captions:
    """An `Encode` without towers."""
    yield from (({}, False) for _ in captions)


@dataclass(frozen=True)
class Derivation:
    """All that deriving a tar needs, besides the tar; of one process."""

    source: Store
    target: Store
    conversion: Conversion
    encode: Encode = encode_nothing
    device: torch.device = CPU
    settings: Settings = field(default_factory=dict)


def derive_tar(
    tar: SourceTar, how: Derivation, attempt: int = 1, report: Callable[[int], None] = lambda samples: None
) -> TarReceipts:
    """Make what the target lacks of one tar, and commit it.

    Returns:
        The receipts in force afterwards.

    Raises:
        DamagedFile: the source's part is not what its receipt says.
    """
    receipts = [r for _, _, r in load_commits(how.source, dict.fromkeys(tar.receipts, "")) if r.bucket in tar.buckets]
    in_force = {receipt.bucket: current_generation(how.target, receipt.bucket, tar.name)[1] for receipt in receipts}
    committed = {bucket: receipt for bucket, receipt in in_force.items() if receipt}
    excluded = [load_exclusion(how.source, id) for id in exclusion_ids(how.source)]
    done = 0
    with attempt_folder(how.target, tar.name) as folder:
        for receipt in receipts:
            if receipt.bucket in committed:
                continue
            report(done)  # who was told to leave copies no further part
            stopwatch, started = Stopwatch(), datetime.now(UTC)
            with ExitStack() as held:
                with stopwatch("fetch"):
                    part = held.enter_context(how.source.local(receipt.folder))
                    check_part(part, receipt)
                writing = _PartConverter(part, receipt, folder / receipt.bucket, how, excluded, stopwatch)
                for count in writing.write():
                    report(done := done + count)
                with stopwatch("write"):
                    written = writing.writer.finish()
            committed |= commit(
                how.target,
                Attempt(
                    tar=tar.name,
                    folder=folder,
                    encoding=how.conversion.target,
                    places=writing.places,
                    samples_in=receipt.samples_in,
                    parts={receipt.bucket: written},
                    rules={receipt.bucket: receipt.rule},
                    source=receipt.input,
                    software=receipt.software | versions(SOFTWARE),
                    settings=receipt.settings | how.settings | _origin(receipt),
                    made_by=made_by(how.device),
                    number=attempt,
                    started=started.isoformat(timespec="seconds"),
                    seconds=stopwatch.seconds,
                    clock=stopwatch.began,
                ),
            )
    return TarReceipts(tar.name, committed)


def _origin(receipt: Receipt) -> Settings:
    origin: Settings = {ORIGIN: f"{receipt.encoding_id}/{receipt.folder}"}
    if not any(name.startswith(f"{ORIGIN}.") for name in receipt.settings):
        made = {"host": receipt.made_by.host, "gpu": receipt.made_by.gpu, "gpu_uuid": receipt.made_by.gpu_uuid}
        origin |= {f"{ORIGIN}.{name}": value for name, value in made.items() if value}
    return origin


def check_part(folder: Path, receipt: Receipt) -> None:
    """Hold every file of a part against its receipt: what is damaged must not get a new receipt.

    Raises:
        DamagedFile: one is missing, or not what was committed.
    """
    here = LocalStore(folder)
    for name, record in receipt.files.items():
        if here.size(name) is None or record_file(here, name) != record:
            raise DamagedFile(
                f"{receipt.folder}/{name} is missing or damaged: it is not what {receipt.name} recorded. Recall it, or "
                f"restore it from a copy; nothing was derived of it."
            )


class _PartConverter:
    """A part on its way from one encoding to another."""

    def __init__(
        self,
        part: Path,
        receipt: Receipt,
        folder: Path,
        how: Derivation,
        excluded: list[Exclusion],
        stopwatch: Stopwatch,
    ):
        self.part, self.how, self.conversion, self.stopwatch = part, how, how.conversion, stopwatch
        self.writer = PartWriter(folder, self.conversion.target, Bucket.parse(receipt.bucket))
        table = pq.read_table(part / SAMPLES_NAME)
        self.rows = table.to_pylist()
        self.excluded = np.zeros(len(table), bool)
        for exclusion in excluded:
            self.excluded |= exclusion.hits(table)
        refused = pq.read_table(part / REFUSED_NAME).to_pylist()
        self.places = _places(receipt, [row["key"] for row in self.rows], refused)
        for row in refused:
            self.writer.refuse(**row)
        self.writer.skip(receipt.refused.get(OTHER_BUCKET, 0))

    def write(self) -> Iterator[int]:
        """Convert every sample; yields how many, now and then."""
        stored = zip(read_part(self.part), self.rows, self.excluded, strict=True)
        while group := list(islice(stored, AT_ONCE)):
            kept = [(sample, row) for sample, row, gone in group if not gone]
            for _, row, gone in group:
                if gone:
                    self.writer.refuse(row["key"], row.get("url", ""), EXCLUDED, "by a list of `shards exclude`")
            self._append(kept)
            yield len(group)

    def _append(self, group: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        samples = [sample for sample, _ in group]
        texts = [captions(sample, self.conversion.source) for sample in samples]
        every = [caption for of_sample in texts for caption in of_sample]
        with closing(self.how.encode(every, self.stopwatch)) as fresh:
            for sample, of_sample, (_, row) in zip(samples, texts, group, strict=True):
                self._append_one(sample, of_sample, row, [next(fresh) for _ in of_sample])

    def _append_one(
        self,
        sample: dict[str, Any],
        texts: list[str],
        row: dict[str, Any],
        made: list[tuple[dict[str, TextLatents], bool]],
    ) -> None:
        with self.stopwatch("write"):
            if not all(map(_is_finite, (latents for of_caption, _ in made for latents in of_caption.values()))):
                self.writer.refuse(row["key"], row.get("url", ""), NON_FINITE, "encoded in float32 too")
                return
            cut = sum(was_cut for _, was_cut in made)
            values = row | {"truncated": max(row["truncated"], cut)}
            columns = {name: sample[name] for name in ("key", "caption", "size", "scores")}
            columns |= converted(sample, texts, [latents for latents, _ in made], self.conversion)
            self.writer.append(columns, tuple(values.get(name, "") for name in SAMPLES_SCHEMA.names))


def _is_finite(latents: TextLatents) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in latents.tensors)


def _places(receipt: Receipt, stored: list[str], refused: list[dict[str, str]]) -> dict[str, int]:
    """Key → its bit, of the samples that a receipt tells apart: a set's keys, sorted, have its bits in order."""
    places = dict(zip(sorted(stored), np.flatnonzero(receipt.stored_samples).tolist(), strict=True))
    for reason in receipt.rejects:
        keys = sorted(row["key"] for row in refused if row["reason"] == reason)
        places |= zip(keys, np.flatnonzero(receipt.rejected_samples(reason)).tolist(), strict=True)
    return places


def converted(
    sample: dict[str, Any], texts: list[str], fresh: Sequence[dict[str, TextLatents]], how: Conversion
) -> dict[str, Any]:
    """The columns of a stored sample's towers, by the names of version 2 → those of the target.

    Args:
        texts: its captions.
        fresh: of each, what the fresh towers made of it.
    """
    columns, rows = image_columns(sample, how), unpack(sample)
    for name, wanted in how.target.texts.items():
        if name in how.reencoded:
            latents = [of_caption[name] for of_caption in fresh]
        else:
            here = how.source.texts[name]
            counts = num_tokens(name, here, wanted, texts, rows)
            latents = [_text_latents(name, wanted, row, count) for row, count in zip(rows, counts, strict=True)]
        columns |= next(text.pack(name, wanted, [latents], how.target.several))
    for name, feature_tower in how.target.features.items():
        features = decoded(sample, f"features.{name}", f"feature_scales.{name}")
        columns |= next(image.pack_features(name, feature_tower, [torch.from_numpy(features)]))
    return columns


def image_columns(sample: dict[str, Any], how: Conversion) -> dict[str, np.ndarray]:
    """The image latents as the target stores them."""
    here, wanted = how.source.image, how.target.image
    if here.storage == wanted.storage:  # rounded a second time, their scales would differ in the last bit
        planes = {"image_latents": sample["image_latents"][: wanted.num_planes]}
        return planes | {name: sample[name] for name in ("image_scales",) if name in sample}
    return next(image.pack(wanted, [torch.from_numpy(image_latents(sample)[: wanted.num_planes])]))


def _text_latents(name: str, wanted: TextTower, row: dict[str, np.ndarray], count: int) -> TextLatents:
    """One caption's, as stage 1 had them before they were stored."""
    # what was float16 is float16 again, and codes of float8 are found again: `quantise` gives them their own scale
    states = torch.from_numpy(decoded(row, f"text_latents.{name}", f"text_scales.{name}")) if wanted.states else None
    pooled = torch.from_numpy(row[f"pooled.{name}"].astype(np.float32)) if wanted.pooled else None
    return TextLatents(states, count, pooled)


def num_tokens(
    name: str, here: TextTower, wanted: TextTower, texts: list[str], rows: list[dict[str, np.ndarray]]
) -> list[int]:
    """Real tokens of each of a sample's captions; by the tokenizer, where they are needed and were not stored."""
    if not counts_tokens(here, wanted):
        return [int(row.get(f"num_tokens.{name}", 1)) for row in rows]
    tokens = load_tokenizer(here.tokenizer.name, here.tokenizer.sha256)(
        [here.prompt(caption) for caption in texts], verbose=False
    ).input_ids
    return [max(1, sum(place < len(row) for place in here.kept)) for row in tokens]


def counts_tokens(here: TextTower, wanted: TextTower) -> bool:
    """Whether a tower's real tokens are needed, and are not stored."""
    return here.states and wanted.states and wanted.hides_padding and not here.hides_padding


@functools.lru_cache
def load_tokenizer(name: str, sha256: str) -> Any:
    """That of a text tower.

    Raises:
        RequestError: it is not here.
        UnfitNode: another one is.
    """
    import transformers  # where captions are tokenised alone

    folder = model_folder(name)
    if hash_weights(name, folder).sha256 != sha256:
        raise UnfitNode(f"The tokenizer in {folder} has other content than encoding.json recorded of {name}.")
    return transformers.AutoTokenizer.from_pretrained(folder)


def kept_uncond(empty: Iterable[tuple[str, TextLatents]], how: Conversion) -> dict[str, TextLatents]:
    """Of the source's empty captions those that the target takes over, as far as it stores them."""
    kept = {}
    for name, latents in empty:
        if name in how.target.texts and name not in how.reencoded:
            wanted = how.target.texts[name]
            kept[name] = TextLatents(
                latents.states if wanted.states else None,
                latents.num_tokens,
                latents.pooled if wanted.pooled else None,
            )
    return kept
