"""Reading committed parts sample by sample, without a dataset, a cache or shared memory."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from streaming.base.format import reader_from_json

from shards.encoding import EncodingRecord
from shards.text import dequantise


def read_part(folder: Path) -> Iterator[dict[str, Any]]:
    """The samples of ROOT/BUCKET/SHARD in order, one dict of columns each."""
    for entry in json.loads((folder / "index.json").read_bytes())["shards"]:
        reader = reader_from_json(str(folder), "", entry)
        for i in range(len(reader)):
            yield reader[i]


def text_latents(sample: dict[str, Any], encoding: EncodingRecord) -> np.ndarray:
    """(tokens, width) float32 of a sample, whatever its storage."""
    stored = torch.tensor(sample["text_latents"])
    if encoding.text.storage == "float16":
        return stored.float().numpy()
    return dequantise(stored, torch.tensor(sample["text_scales"])).numpy()
