"""Rate of a stage 1 worker for each kind of input, relative to tars: the same images, with free encoders."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from streaming import MDSWriter

from bench.kit.common import table, timed_in_turn
from bench.worker.alone import Options, encode, free_image_encoder, in_new_process, worker_config
from bench.worker.inputs import Captioned, make_tars
from precompute.config import PrecomputeConfig
from precompute.encode.worker import prepare_process
from precompute.input.find import find_input
from precompute.input.unit import Unit
from shards.open import open_store
from shards.tools.stats import root_totals

ROWS_PER_GROUP = 100
"""Rows per row group, as in Hugging Face's image datasets."""


def as_files(folder: Path, pictures: list[Captioned]) -> None:
    """Write image files with text files beside them."""
    for number, (data, suffix, caption) in enumerate(pictures):
        (folder / f"{number:05d}.{suffix}").write_bytes(data)
        (folder / f"{number:05d}.txt").write_text(caption or "")


def as_table(folder: Path, pictures: list[Captioned]) -> None:
    """Write image files, and a table of captions."""
    rows = []
    for number, (data, suffix, caption) in enumerate(pictures):
        (folder / f"{number:05d}.{suffix}").write_bytes(data)
        rows.append(json.dumps({"file_name": f"{number:05d}.{suffix}", "text": caption}))
    (folder / "metadata.jsonl").write_text("\n".join(rows))


def as_parquet(folder: Path, pictures: list[Captioned]) -> None:
    """Write a parquet file with the images' bytes."""
    images = [{"bytes": data, "path": f"{number:05d}.{suffix}"} for number, (data, suffix, _) in enumerate(pictures)]
    columns = pa.table({"image": images, "text": [caption for *_, caption in pictures]})
    pq.write_table(columns, folder / "train-00000-of-00001.parquet", row_group_size=ROWS_PER_GROUP)


def as_mds(folder: Path, pictures: list[Captioned]) -> None:
    """Write an MDS dataset with the images' bytes."""
    with MDSWriter(out=str(folder / "mds"), columns={"image": "bytes", "text": "str"}) as writer:
        for data, _, caption in pictures:
            writer.write({"image": data, "text": caption or ""})


KINDS: dict[str, tuple[Callable[[Path, list[Captioned]], None], str]] = {
    "files with text files": (as_files, "txt"),
    "files with a table": (as_table, "json:text"),
    "parquet with images": (as_parquet, "json:text"),
    "MDS with images": (as_mds, "json:text"),
}
"""Kind → (function that writes it, source of the captions)."""


def make_inputs(folder: Path, pictures: list[Captioned]) -> None:
    """Write the images as a tar, and as every other kind."""
    make_tars(folder / "tars", pictures, len(pictures))
    for name, (make, _) in KINDS.items():
        (folder / name).mkdir(parents=True)
        make(folder / name, pictures)


def encode_afresh(units: list[Unit], config: PrecomputeConfig, captions: str) -> None:
    """Encode units into an empty root."""
    shutil.rmtree(config.output, ignore_errors=True)
    encode(units, config, free_image_encoder(), captions=(captions,))


def rates(options: Options, number: int) -> list[float]:
    """Return the rate of kind `number` relative to the tar, by wall-clock time in each round."""
    torch.set_num_threads(1)
    name, (_, captions) = list(KINDS.items())[number]
    calls = []
    for place, source in (("tars", "txt"), (name, captions)):
        units = find_input(str(options.folder / place)).units()
        config = worker_config(options.folder / place, options.folder / f"root-{place}", options.threads)
        calls.append(partial(encode_afresh, units, config, source))
    prepare_process()
    pair = timed_in_turn(calls[0], calls[1], options.rounds)
    for place in ("tars", name):
        assert root_totals(open_store(options.folder / f"root-{place}")).encoded == options.images, place
    return [first / second for first, second in zip(pair.first_seconds, pair.second_seconds, strict=True)]


def report(options: Options) -> str:
    """Measure every kind, and return a table."""
    rows = []
    for number, name in enumerate(KINDS):
        found = np.array(in_new_process(rates, options, number))
        rows.append((name, f"{np.median(found):.3f} ({min(found):.3f} to {max(found):.3f})"))
    return (
        f"{table(('kind', 'rate relative to a tar'), rows)}\n\n{options.images} images in each, free encoders, "
        f"{options.rounds} rounds in turn."
    )
