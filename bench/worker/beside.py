"""The worker beside the plain script, in turn, on the demo's small pictures and on photographs: each in a process of
its own that is kept, so that models are loaded and threads started before anything is timed."""

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
from bench.worker.inputs import Captioned, demo_pictures, jpegs, make_tars
from bench.worker.plain import Encoders, encode_tars, load_encoders
from bench.worker.standins import free_encoders, stored_as
from examples.shapes.models import MODELS
from precompute.config import PrecomputeConfig, describe_encoding, make_recipe
from precompute.encode.overlap import Turns
from precompute.encode.tar import encode_tar
from precompute.encode.towers import Towers
from precompute.encode.worker import load_towers, prepare_process
from precompute.input.tars import list_tars
from shards.format.buckets import Bucket
from shards.format.encoding import EncodingRecord
from shards.open import open_store
from shards.root.shared import create_root

Way = Literal["plain", "exact", "default"]
"""The plain script; the worker, storing the same float16; the worker, storing int8 and float8."""
WAYS: tuple[Way, ...] = ("plain", "exact", "default")
PHOTOGRAPHS = (512, 1024)
"""Their longer sides, in pixels."""
DISTINCT = 40
FREE_OVER_SMALL = 3
"""As many pictures go through encoders that cost nothing as through small ones, which take most of the time."""
TINY_VAE = {
    "block_out_channels": [4, 4, 8, 8],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "latent_channels": 4,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "mid_block_add_attention": False,
}
"""Without attention in the middle, which at 512 px would cost more than all of the rest."""
TINY_TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass(frozen=True)
class Case:
    """Tars, and what is made of them."""

    name: str
    folder: Path
    """Of `tars/` and `models/`."""
    buckets: tuple[str, str]
    free: bool
    """Whether the encoders cost nothing."""
    threads: int
    batch_size: int = 64

    @property
    def config(self) -> PrecomputeConfig:
        """As a user would have it for a CPU; the defaults for the rest."""
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
                "workers": workers,
                "vae": str(models / "vae"),
                "texts": {"text": text | {"class_name": "CLIPTextModel"}},
            }
        )


def demo_case(folder: Path, pictures: int) -> Path:
    """The demo's pictures, 500 to a tar as there, and its models."""
    make_tars(folder / "tars", demo_pictures(pictures), 500)
    shutil.copytree(MODELS, folder / "models")
    return folder


def photograph_case(folder: Path, pictures: int) -> Path:
    """JPEGs of LAION's sizes, and random models so small that they cost no more than the rest."""
    made: list[Captioned] = jpegs(make_corpus(min(DISTINCT, pictures), 0, *PHOTOGRAPHS), pictures)
    make_tars(folder / "tars", made, max(1, pictures // 3))
    torch.manual_seed(0)
    AutoencoderKL(**TINY_VAE).save_pretrained(folder / "models" / "vae")
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "tokenizer", model_max_length=77)
    tokenizer.save_pretrained(folder / "models" / "tokenizer")
    config = CLIPTextConfig(**TINY_TEXT, vocab_size=len(tokenizer), max_position_embeddings=77)
    CLIPTextModel(config).save_pretrained(folder / "models" / "text_encoder")
    return folder


class Running:
    """One of the ways, in this process."""

    def __init__(self, case: Case, way: Way):
        torch.set_num_threads(case.threads)  # as a worker sets it, and as it is where nobody does
        self.case, self.way = case, way
        self.config = config = case.config
        self.record = stored_as(describe_encoding(config), exact=way != "default")
        self.tars = list_tars(config.input)
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
        """Encode all tars into a fresh folder; seconds, processor seconds, bytes written."""
        output = self.case.folder / self.way
        shutil.rmtree(output, ignore_errors=True)
        began, processor = time.perf_counter(), time.process_time()
        self.encode(output)
        seconds, processor = time.perf_counter() - began, time.process_time() - processor
        written = sum(path.stat().st_size for path in output.rglob("*.mds"))
        shutil.rmtree(output)  # before the kernel writes it to the disk, in another's time
        return seconds, processor, written

    def encode(self, output: Path) -> None:
        """All tars into a folder that is not there yet."""
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
    """The plain script's, at once: zeros."""
    tower = record.texts["text"]
    sides = {bucket.width: bucket.latent_hw(record.image.downsampling) for bucket in buckets}

    def pictures(batch: list[np.ndarray]) -> np.ndarray:
        return np.zeros((len(batch), record.image.num_planes, *sides[len(batch[0])]), np.float16)

    return Encoders(pictures, lambda batch: np.zeros((len(batch), tower.length, tower.width), np.float16))


def free_towers(record: EncodingRecord, config: PrecomputeConfig) -> Towers:
    """The worker's, at once."""
    image, texts = free_encoders(record)
    return Towers(image, texts, {}, config.workers.batch_size)  # type: ignore[arg-type]


_running: Running


def _begin(case: Case, way: Way) -> None:
    global _running
    _running = Running(case, way)


def _again() -> tuple[float, float, int]:
    return _running()


@contextmanager
def kept(case: Case, way: Way) -> Iterator[Any]:
    """A process that runs one of the ways, each time that it is asked to."""
    with multiprocessing.get_context("spawn").Pool(1, _begin, (case, way)) as pool:
        yield lambda: pool.apply(_again)


def compare(case: Case, rounds: int) -> dict[Way, np.ndarray]:
    """Way → (rounds, 3): seconds, processor seconds, bytes; all ways in turn, after one round that does not count."""
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
    """Rates, and the worker's over the plain script's, round by round."""
    plain = found["plain"]
    cells = [case.name, f"{pictures / statistics.median(plain[:, 0]):,.0f}"]
    for way in WAYS[1:]:
        ratios, processor = plain[:, 0] / found[way][:, 0], plain[:, 1] / found[way][:, 1]
        cells.append(f"**{np.median(ratios):.2f} ×** ({min(ratios):.2f} to {max(ratios):.2f})")
        cells.append(f"{np.median(processor):.2f} ×")
    return cells


def report(folder: Path, pictures: dict[str, int], threads: int, rounds: int) -> str:
    """Both corpora, each with encoders and with ones that cost nothing; a table."""
    rows = []
    # of the photographs' tars, a hundredth of LAION's, the worker would fill up a third of batches of 64
    for name, make, buckets, batch_size in (
        ("demo", demo_case, ("64x64", "128x128"), 64),
        ("photographs", photograph_case, ("256x256", "512x512"), 8),
    ):
        for kind, number in ("small", max(1, pictures[name] // FREE_OVER_SMALL)), ("free", pictures[name]):
            made = make(folder / f"{name}-{kind}", number)
            case = Case(f"{name}, {kind} encoders", made, buckets, kind == "free", threads, batch_size)
            rows.append(row(case, number, compare(case, rounds)))
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    head = ["pictures", "plain, per second", "worker, float16", "by CPU time", "worker, int8 and float8", "by CPU time"]
    return table(head, rows)
