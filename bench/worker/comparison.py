"""Compare the worker with the simple script, in turn, on the demo's small images and on photographs.

Each runs in a persistent process, so that models are loaded and threads started before anything is timed.
"""

import multiprocessing
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from diffusers import AutoencoderKL
from transformers import AutoTokenizer, CLIPTextConfig, CLIPTextModel

from bench.kit.common import table
from bench.pixels import make_corpus
from bench.worker.fakes import free_encoders, stored_as
from bench.worker.inputs import Captioned, demo_pictures, jpegs, make_tars
from bench.worker.plain import Encoders, encode_tars, load_encoders
from examples.shapes.models import MODELS
from precompute.config import PrecomputeConfig, describe_encoding, make_recipe
from precompute.encode.overlap import Turns
from precompute.encode.tar import encode_tar
from precompute.encode.towers import Towers
from precompute.encode.worker import load_towers, prepare_process
from precompute.input.find import find_input
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.open import open_store
from shards.root.shared import create_root

Way = Literal["plain", "exact", "default"]
"""The simple script; the worker with the same float16 storage; the worker with int8 and float8 storage."""
WAYS: tuple[Way, ...] = ("plain", "exact", "default")
PHOTOGRAPHS = (512, 1024)
"""Range of their longer sides, in pixels."""
DISTINCT = 40
FREE_OVER_SMALL = 3
"""Factor by which free encoders get more images than small encoders, which take most of the time."""
TINY_VAE = {
    "block_out_channels": [4, 4, 8, 8],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "latent_channels": 4,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "mid_block_add_attention": False,
}
"""VAE without attention in its middle block, which at 512 px would cost more than everything else."""
TINY_TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass(frozen=True)
class Case:
    """A set of tars, and how to encode them."""

    name: str
    folder: Path
    """Folder with `tars/` and `models/`."""
    buckets: tuple[str, str]
    free: bool
    """Whether the encoders take no time."""
    threads: int
    batch_size: int = 64

    @property
    def config(self) -> PrecomputeConfig:
        """A user's config for a CPU, with defaults for everything else."""
        models = self.folder / "models"
        text = {"model": str(models / "text_encoder"), "tokenizer": str(models / "tokenizer")}
        workers = {"num_gpus": 0, "num_cpus": self.threads, "decode_threads": self.threads}
        workers["batch_size"] = self.batch_size
        return PrecomputeConfig.model_validate(
            {
                "input": str(self.folder / "tars"),
                "output": self.folder / "root",
                "buckets": list(self.buckets),
                "precision": "float32",
                "captions": ["txt"],
                "workers": workers,
                "vae": str(models / "vae"),
                "texts": {"text": text | {"class_name": "CLIPTextModel"}},
            }
        )


def demo_case(folder: Path, pictures: int) -> Path:
    """Prepare the demo's images, 500 per tar as in the demo, and its models."""
    make_tars(folder / "tars", demo_pictures(pictures), 500)
    shutil.copytree(MODELS, folder / "models")
    return folder


def photograph_case(folder: Path, pictures: int) -> Path:
    """Prepare JPEGs of LAION's sizes, and random models that are small enough not to dominate."""
    made: list[Captioned] = jpegs(make_corpus(min(DISTINCT, pictures), 0, *PHOTOGRAPHS), pictures)
    make_tars(folder / "tars", made, max(1, pictures // 3))
    torch.manual_seed(0)
    AutoencoderKL(**TINY_VAE).save_pretrained(folder / "models" / "vae")
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "tokenizer", model_max_length=77)
    tokenizer.save_pretrained(folder / "models" / "tokenizer")
    config = CLIPTextConfig(**TINY_TEXT, vocab_size=len(tokenizer), max_position_embeddings=77)
    CLIPTextModel(config).save_pretrained(folder / "models" / "text_encoder")
    return folder


class Runner:
    """One of the compared ways, ready to run in this process."""

    def __init__(self, case: Case, way: Way):
        torch.set_num_threads(case.threads)  # as in a worker, and torch's default
        self.case, self.way = case, way
        self.config = config = case.config
        self.record = stored_as(describe_encoding(config), exact=way != "default")
        self.tars = find_input(config.input).units()
        self.buckets = [Bucket.parse(name) for name in case.buckets]
        if way == "plain":
            text = config.texts["text"]
            folders = (Path(folder) for folder in (config.vae, text.model, text.tokenizer))
            self.encoders = free_of(self.record, self.buckets) if case.free else load_encoders(*folders)
        else:
            prepare_process()
            self.recipe = make_recipe(config, self.record)
            self.towers = load_towers(self.recipe, "cpu") if not case.free else free_towers(self.record, config)

    def __call__(self) -> tuple[float, float, int]:
        """Encode all tars into a new folder, and return seconds, CPU seconds and bytes written."""
        output = self.case.folder / self.way
        shutil.rmtree(output, ignore_errors=True)
        began, processor = time.perf_counter(), time.process_time()
        self.encode(output)
        seconds, processor = time.perf_counter() - began, time.process_time() - processor
        written = sum(path.stat().st_size for path in output.rglob("*.mds"))
        shutil.rmtree(output)  # before the kernel flushes it to disk while another way is timed
        return seconds, processor, written

    def encode(self, output: Path) -> None:
        """Encode all tars into a folder that does not exist yet."""
        if self.way != "plain":
            self._as_a_worker(output)
            return
        columns = {bucket.width: self.record.columns(bucket) for bucket in self.buckets}
        paths = [Path(tar.address.removeprefix("file://")) for tar in self.tars]
        encode_tars(paths, output, self.encoders, columns, self.config.workers.batch_size)

    def _as_a_worker(self, output: Path) -> None:
        store, turns = open_store(output), Turns()
        create_root(store, self.record)
        with ThreadPoolExecutor(self.config.workers.tars_at_once) as hands:
            encode = partial(encode_tar, recipe=self.recipe, store=store, towers=self.towers, turns=turns)
            list(hands.map(encode, self.tars))


def free_of(record: EncodingRecord, buckets: list[Bucket]) -> Encoders:
    """Make free encoders for the simple script, which return zeros."""
    tower = record.texts["text"]
    sides = {bucket.width: bucket.latent_hw(record.image.downsampling) for bucket in buckets}

    def pictures(batch: list[np.ndarray]) -> np.ndarray:
        return np.zeros((len(batch), record.image.num_planes, *sides[len(batch[0])]), np.float16)

    return Encoders(pictures, lambda batch: np.zeros((len(batch), tower.length, tower.width), np.float16))


def free_towers(record: EncodingRecord, config: PrecomputeConfig) -> Towers:
    """Make free encoders for the worker."""
    image, texts = free_encoders(record)
    return Towers(texts, config.workers.batch_size, image=image, features={})  # type: ignore[arg-type]


_runner: Runner


def _begin(case: Case, way: Way) -> None:
    global _runner
    _runner = Runner(case, way)


def _again() -> tuple[float, float, int]:
    return _runner()


@contextmanager
def kept(case: Case, way: Way) -> Iterator[Any]:
    """Start a process for one of the ways, and yield a function that runs it there."""
    with multiprocessing.get_context("spawn").Pool(1, _begin, (case, way)) as pool:
        yield lambda: pool.apply(_again)


def compare(case: Case, rounds: int) -> dict[Way, np.ndarray]:
    """Run all ways in turn, after a warm-up round, and return way → (rounds, 3): seconds, CPU seconds, bytes."""
    found: dict[Way, list[tuple[float, float, int]]] = {way: [] for way in WAYS}
    with kept(case, "plain") as plain, kept(case, "exact") as exact, kept(case, "default") as default:
        ways = dict(zip(WAYS, (plain, exact, default), strict=True))
        for number in range(rounds + 1):
            for way, run in ways.items():
                measured = run()
                if number:
                    found[way].append(measured)
    return {way: np.array(rows) for way, rows in found.items()}


def row(case: Case, pictures: int, found: dict[Way, np.ndarray]) -> list[str]:
    """Format a row: the simple script's rate, and the worker's speed relative to it over all rounds."""
    plain = found["plain"]
    cells = [case.name, f"{pictures / statistics.median(plain[:, 0]):,.0f}"]
    for way in WAYS[1:]:
        ratios, processor = plain[:, 0] / found[way][:, 0], plain[:, 1] / found[way][:, 1]
        cells.append(f"**{np.median(ratios):.2f} ×** ({min(ratios):.2f} to {max(ratios):.2f})")
        cells.append(f"{np.median(processor):.2f} ×")
    return cells


def report(folder: Path, pictures: dict[str, int], threads: int, rounds: int) -> str:
    """Compare both corpora with small and with free encoders, and return a table."""
    rows = []
    # these tars have a hundredth of LAION's samples, so a third of each batch of 64 would be padding
    for name, make, buckets, batch_size in (
        ("demo", demo_case, ("64x64", "128x128"), 64),
        ("photographs", photograph_case, ("256x256", "512x512"), 8),
    ):
        for kind, number in ("small", max(1, pictures[name] // FREE_OVER_SMALL)), ("free", pictures[name]):
            made = make(folder / f"{name}-{kind}", number)
            case = Case(f"{name}, {kind} encoders", made, buckets, kind == "free", threads, batch_size)
            rows.append(row(case, number, compare(case, rounds)))
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    head = ["images", "script, per second", "worker, float16", "by CPU time", "worker, int8 and float8", "by CPU time"]
    return table(head, rows)
