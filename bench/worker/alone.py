"""Functions to run a worker or bare decoding, and to do so in a new process."""

import multiprocessing
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.worker.fakes import FreeImageEncoder, free_encoders, sd2_record, stored_as
from precompute.config import PrecomputeConfig, make_recipe
from precompute.encode.tar import encode_tar
from precompute.encode.towers import Towers
from precompute.input.tars import Tar
from precompute.input.unit import Unit
from precompute.pixels.decode import decode
from shards.open import open_store
from shards.root.shared import create_root

BUCKETS = ("256x256", "512x512")


def worker_config(tars: Path, output: Path, threads: int) -> PrecomputeConfig:
    """Make a config with the product's defaults, `threads` decoding threads and no models."""
    return PrecomputeConfig.model_validate(
        {
            **{"input": str(tars), "output": output, "buckets": list(BUCKETS), "captions": ["txt"]},
            "vae": "stand-in",
            "texts": {"text": {"model": "stand-in", "tokenizer": "stand-in"}},
            "workers": {"num_gpus": 0, "num_cpus": threads, "decode_threads": threads},
        }
    )


def free_image_encoder() -> FreeImageEncoder:
    """Make a free encoder with Stable Diffusion 2's shapes."""
    return free_encoders(sd2_record())[0]


def encode(
    shards: Iterable[Unit],
    config: PrecomputeConfig,
    image_encoder: FreeImageEncoder,
    exact: bool = False,
    captions: tuple[str, ...] = ("txt",),
) -> None:
    """Encode units like a worker, one after another, into a new root: as float16 if `exact`, else as int8 and
    float8."""
    encoding = stored_as(sd2_record(), exact).model_copy(update={"captions": captions})
    store, recipe = open_store(config.output), make_recipe(config, encoding)
    create_root(store, recipe.encoding)
    _, texts = free_encoders(recipe.encoding)
    towers = Towers(image_encoder, texts, {}, config.workers.batch_size)  # type: ignore[arg-type]
    for shard in shards:
        encode_tar(shard, recipe, store, towers)


def bare_pixels(members: list[bytes], config: PrecomputeConfig) -> int:
    """Decode images with a worker's number of threads, and return the number of results."""
    with ThreadPoolExecutor(config.workers.decode_threads) as pool:
        pictures = pool.map(lambda data: decode(data, config.to_fill.all, config.pixels, config.limits), members)
        return sum(len(picture.pixels) for picture in pictures)


@dataclass(frozen=True)
class Options:
    """Options of the command line."""

    folder: Path
    images: int
    shards: int
    threads: int
    rounds: int
    seconds_per_picture: float


def in_new_process(function: Callable[[Options, int], list[float]], options: Options, number: int = 0) -> list[float]:
    """Call a function in a new process, so that memory and torch's threads are not shared."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, (options, number))


def fresh_config(options: Options, name: str) -> PrecomputeConfig:
    """Make a config with an empty latents root of this name."""
    root = options.folder / name
    shutil.rmtree(root, ignore_errors=True)
    return worker_config(options.folder / "tars", root, options.threads)


def pictures_of(shard: Unit, options: Options) -> list[bytes]:
    """Read the encoded images of a tar."""
    config = worker_config(options.folder / "tars", options.folder, options.threads)
    path = options.folder / "tars" / f"{shard.name}.tar"
    return [sample.image for sample in Tar(path, config.limits.max_bytes).samples() if sample.image]
