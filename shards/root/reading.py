"""Read committed parts sample by sample, without a StreamingDataset, a cache or shared memory.

torch is imported inside the functions that need it, so that commands about a root do not need this slow import.
"""

import json
import struct
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from shards.base.durable import DamagedFile
from shards.base.store import Store
from shards.format import image
from shards.format.encoding import EncodingRecord
from shards.format.mds import Decoder, ReadRange, parse_index, read_offsets, read_sample, reader
from shards.format.text import dequantise, unpack_stored, with_duplicate_text


def read_parts(store: Store, bucket: str, shards: Iterable[str], each: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the samples of a bucket's parts in order, at most `each` per part. Each remote part is downloaded when its
    first sample is read."""
    for shard in shards:
        with store.local(f"{bucket}/{shard}") as folder:
            yield from islice(read_part(folder, store.where(f"{bucket}/{shard}")), each)


def read_part(folder: Path, where: str = "") -> Iterator[dict[str, Any]]:
    """Yield the samples in a part's folder in order, each as a dict of columns.

    Args:
        folder: a local folder with the part's files.
        where: path or URL of the part in its root, for messages; empty: `folder`.

    Raises:
        RequestError: the part's index was not written by stage 1.
        DamagedFile: a file is missing or does not match the part's index.
    """
    where = where or str(folder)
    with _open(folder, where, "index.json") as index:
        files = parse_index(index.read(), f"{where}/index.json")
    for name, num_samples, columns in files:
        path = f"{where}/{name}"
        with _open(folder, where, name) as file:
            offsets = read_offsets(reader(file.fileno()), num_samples, path)
            read = partial(_read_row, Decoder(columns), reader(file.fileno()), offsets, path)
            for row in range(num_samples):
                yield with_duplicate_text(read(row), row, read)


def _open(folder: Path, where: str, name: str) -> BinaryIO:
    try:
        return open(folder / name, "rb", buffering=0)
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedFile(f"{where}/{name} is missing. Restore it from a backup, or recall its part.") from None


def _read_row(decode: Decoder, read: ReadRange, offsets: NDArray[np.uint32], path: str, row: int) -> dict[str, Any]:
    try:
        return decode(read_sample(read, offsets, row, path))
    except (ValueError, TypeError, struct.error) as error:
        raise DamagedFile(
            f"{path} is damaged: its sample {row} cannot be decoded ({error}). Restore the file from a backup, or "
            f"recall its part."
        ) from error


def captions(sample: dict[str, Any], encoding: EncodingRecord) -> list[str]:
    """Return a sample's captions, in the order of its text latents."""
    return [caption for caption in caption_of_each_source(sample, encoding) if caption is not None]


def caption_of_each_source(sample: dict[str, Any], encoding: EncodingRecord) -> list[str | None]:
    """Return a sample's caption of each of the encoding's sources, or None where it has none."""
    found: list[str | None] = json.loads(sample["caption"]) if encoding.several else [sample["caption"]]
    return found


def image_latents(sample: dict[str, Any]) -> np.ndarray:
    """Return a sample's image latents, (planes, h, w) float32, before the VAE's shift and scale."""
    import torch

    scales = torch.tensor(sample["image_scales"]) if "image_scales" in sample else None
    return image.unpack(torch.tensor(sample["image_latents"]), scales).numpy()


def text_latents(sample: dict[str, Any], encoding: EncodingRecord) -> list[dict[str, np.ndarray]]:
    """Return, for each of a sample's captions, a dict from text tower to hidden states, (tokens, width) float32;
    trimmed states have no padding tokens."""
    found: list[dict[str, np.ndarray]] = []
    for row in unpack_stored(sample):
        found.append({})
        for name, tower in encoding.texts.items():
            if tower.states:
                kept = slice(int(row[f"num_tokens.{name}"]) if tower.trim else None)
                found[-1][name] = decoded(row, f"text_latents.{name}", f"text_scales.{name}", kept)
    return found


def features(sample: dict[str, Any], encoding: EncodingRecord) -> dict[str, np.ndarray]:
    """Return a dict from feature tower to the sample's features, (tokens, width) float32."""
    return {name: decoded(sample, f"features.{name}", f"feature_scales.{name}") for name in encoding.features}


def decoded(columns: dict[str, Any], latents: str, scales: str, rows: slice = slice(None)) -> np.ndarray:
    """Convert the stored (tokens, width) column `latents` to float32, using the column `scales` if it holds e4m3
    codes."""
    import torch

    stored = torch.tensor(columns[latents][rows])
    if scales not in columns:
        return stored.float().numpy()
    return dequantise(stored, torch.tensor(columns[scales][rows])).numpy()
