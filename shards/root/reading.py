"""Reading committed parts sample by sample, without a dataset, a cache or shared memory."""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shards.base.store import Store
from shards.format import image
from shards.format.encoding import EncodingRecord
from shards.format.mds import Decoder, parse_index, read_offsets, read_sample
from shards.format.text import dequantise, unpack
from shards.format.towers import TextTower


def read_parts(store: Store, bucket: str, shards: Iterable[str], each: int | None = None) -> Iterator[dict[str, Any]]:
    """The samples of a bucket's parts, one part after the other; the first `each` of a part.

    Where the root is not local, a part is copied when its turn comes.
    """
    for shard in shards:
        with store.local(f"{bucket}/{shard}") as folder:
            yield from islice(read_part(folder), each)


def read_part(folder: Path) -> Iterator[dict[str, Any]]:
    """The samples of ROOT/BUCKET/SHARD in order, one dict of columns each.

    Raises:
        DamagedFile: a file holds other samples than the part's index says.
    """
    index = folder / "index.json"
    files = parse_index(index.read_bytes(), str(index))
    decode = Decoder(files.columns)
    for number in range(len(files)):
        path = str(folder / files.name(number))
        with open(path, "rb", buffering=0) as file:
            offsets = read_offsets(file.fileno(), int(files.samples[number]), path)
            for row in range(len(offsets) - 1):
                yield decode(read_sample(file.fileno(), offsets, row, path))


def captions(sample: dict[str, Any], encoding: EncodingRecord) -> list[str]:
    """The captions that a sample has, in the order of its text latents."""
    if not encoding.several:
        return [sample["caption"]]
    return [caption for caption in json.loads(sample["caption"]) if caption is not None]


def image_latents(sample: dict[str, Any]) -> np.ndarray:
    """(planes, h, w) float32 of a sample, neither shifted nor scaled."""
    scales = torch.tensor(sample["image_scales"]) if "image_scales" in sample else None
    return image.unpack(torch.tensor(sample["image_latents"]), scales).numpy()


def text_latents(sample: dict[str, Any], encoding: EncodingRecord) -> list[dict[str, np.ndarray]]:
    """Each of a sample's captions: text tower → its states, (tokens, width) float32; those of real tokens alone where
    captions were trimmed."""
    states = {name: tower for name, tower in encoding.texts.items() if tower.states}
    return [{name: _states(row, name, tower) for name, tower in states.items()} for row in unpack(sample)]


def _states(row: dict[str, np.ndarray], name: str, tower: TextTower) -> np.ndarray:
    num_tokens = int(row[f"num_tokens.{name}"]) if tower.trim else None
    return decoded(row, f"text_latents.{name}", f"text_scales.{name}", slice(num_tokens))


def features(sample: dict[str, Any], encoding: EncodingRecord) -> dict[str, np.ndarray]:
    """Feature tower → (tokens, width) float32 of a sample."""
    return {name: decoded(sample, f"features.{name}", f"feature_scales.{name}") for name in encoding.features}


def decoded(columns: dict[str, Any], latents: str, scales: str, rows: slice = slice(None)) -> np.ndarray:
    """Stored (tokens, width) → float32: of float16, or of codes and their `scales`."""
    stored = torch.tensor(columns[latents][rows])
    if scales not in columns:
        return stored.float().numpy()
    return dequantise(stored, torch.tensor(columns[scales][rows])).numpy()
