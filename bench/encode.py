"""Measure how close the two encoders come to the device's own speed: `python -m bench.encode`.

On a GPU, this runs Stable Diffusion 2's VAE and text encoder with random weights, at 256 px, at 512 px, and in a
mixture of 790 images of 256 px to 300 of 512 px, as in SD2's training set. On a CPU, it runs small networks at 64 and
128 px as a smoke test. Both use the worker's own encoders with two batches in flight, from pixels in memory to latents
in memory. `--json` writes a file for `make plan ARGS="--measured FILE"`.
"""

import argparse
import json
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoTokenizer, CLIPTextConfig, CLIPTextModel

from bench.kit.common import bench_file, device_name, encoder_rates, matmul_tflops, section, table, write_bench_file
from examples.shapes.models import MODELS
from precompute.describe import TextConfig, TextTowerConfig, describe_image, describe_text
from precompute.encode.encoders import ImageEncoder, TextEncoder
from precompute.encode.networks import DeviceSettings
from precompute.encode.towers import batch_size_of
from shards.base.device import Precision
from shards.format.buckets import Bucket

CONFIGS = Path(__file__).parents[1] / "configs"
MIX = (790, 300)
"""Images of the smaller bucket to images of the larger one in the mixture."""
IN_FLIGHT = 2


@dataclass(frozen=True)
class RepeatableBatch:
    """A batch that can be started repeatedly."""

    start: Callable[[], Callable[[], Any]]
    count: int
    """Number of images or captions."""
    flops: int
    """FLOPs of the whole batch."""


@dataclass(frozen=True)
class EncoderSizes:
    """Buckets and configs of the networks to measure."""

    buckets: tuple[Bucket, Bucket]
    vae: dict[str, Any]
    text_encoder: dict[str, Any]


def sizes_for(device: torch.device) -> EncoderSizes:
    """Return Stable Diffusion 2's sizes for a GPU, and small ones for a CPU."""
    vae = json.loads((CONFIGS / "vae" / "sd2.json").read_text())
    text_encoder = json.loads((CONFIGS / "text_encoder" / "sd2.json").read_text())
    if device.type == "cuda":
        return EncoderSizes((Bucket(256, 256), Bucket(512, 512)), vae, text_encoder)
    vae |= {"block_out_channels": [32, 32, 64, 64]}
    text_encoder |= {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4}
    return EncoderSizes((Bucket(64, 64), Bucket(128, 128)), vae, text_encoder)


def save_models(sizes: EncoderSizes, folder: Path) -> None:
    """Save both networks with random weights, and the demo's tokenizer padded to the text encoder's length."""
    torch.manual_seed(0)
    AutoencoderKL.from_config(sizes.vae).save_pretrained(folder / "vae")
    config = CLIPTextConfig(**sizes.text_encoder)
    CLIPTextModel(config).save_pretrained(folder / "text_encoder")
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "tokenizer", model_max_length=config.max_position_embeddings)
    tokenizer.save_pretrained(folder / "tokenizer")


def load_encoders(
    folder: Path, device: torch.device, precision: Precision, compiled: bool
) -> tuple[ImageEncoder, TextEncoder]:
    """Load the models of `save_models` as a worker does."""
    vae, text, tokenizer = (folder / name for name in ("vae", "text_encoder", "tokenizer"))
    pixels = dict.fromkeys(("crop", "resampling", "decoder", "resampler", "color"), "")
    tower = describe_text("text", TextTowerConfig(model=str(text), tokenizer=str(tokenizer)), TextConfig())
    site = DeviceSettings(device, precision, compiled)
    return (
        ImageEncoder(vae, describe_image(str(vae), None, **pixels), site),
        TextEncoder(text, tokenizer, tower, site),
    )


def count_flops(sizes: EncoderSizes) -> dict[str, int]:
    """Count the FLOPs of one image per bucket, and of one caption under `text`. A multiply-add counts as 2."""
    with torch.device("meta"), torch.no_grad():
        vae = AutoencoderKL.from_config(sizes.vae)
        text_config = CLIPTextConfig(**sizes.text_encoder)
        tokens = torch.empty(1, text_config.max_position_embeddings, dtype=torch.long)
        work: dict[str, Callable[[], Any]] = {"text": lambda: CLIPTextModel(text_config)(tokens)}
        for bucket in sizes.buckets:
            work[str(bucket)] = partial(vae.encode, torch.empty(1, 3, bucket.height, bucket.width))
        counts = {}
        for name, run in work.items():
            with FlopCounterMode(display=False) as counter:
                run()
            counts[name] = counter.get_total_flops()
    return counts


def rates_of(
    work: Sequence[RepeatableBatch], num_batches: int, quiet: Callable[[], AbstractContextManager[object]] = nullcontext
) -> tuple[float, float]:
    """Measure images or captions per second, and TFLOP/s, over `num_batches` that cycle through `work`.

    Up to `IN_FLIGHT` batches run at a time. A cycle and a few more batches precede the measurement, to choose kernels
    and fill the allocators' pools.

    Args:
        quiet: returns a context in which nothing else uses the device.
    """
    for batch in islice(cycle(work), len(work) + 3):
        batch.start()()
    timed = list(islice(cycle(work), num_batches))
    waiting: deque[Callable[[], Any]] = deque()
    with quiet():
        begun = time.perf_counter()
        for batch in timed:
            waiting.append(batch.start())
            if len(waiting) > IN_FLIGHT:
                waiting.popleft()()
        for wait in waiting:
            wait()
        seconds = time.perf_counter() - begun
    return sum(batch.count for batch in timed) / seconds, sum(batch.flops for batch in timed) / seconds / 1e12


def picture_work(encoder: ImageEncoder, bucket: Bucket, batch_size: int, flops: int) -> RepeatableBatch:
    """Make a batch of noise images."""
    count = batch_size_of(bucket, batch_size)
    random = np.random.default_rng(0)
    pictures = list(random.integers(0, 256, (count, bucket.height, bucket.width, 3), np.uint8))
    return RepeatableBatch(lambda: encoder.start_batch(encoder.stack(pictures, count), count), count, count * flops)


def mixture(small: RepeatableBatch, large: RepeatableBatch) -> list[RepeatableBatch]:
    """Alternate batches of both sizes so that their images are in about the ratio `MIX`, with three large batches."""
    batches, owed = [], 0.0
    for _ in range(3):
        owed += MIX[0] / MIX[1] * large.count / small.count
        batches += [*[small] * round(owed), large]
        owed -= round(owed)
    return batches


def measure(
    options: argparse.Namespace,
    sizes: EncoderSizes,
    device: torch.device,
    quiet: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> dict[str, tuple[float, float]]:
    """Measure the rate per second and TFLOP/s of each bucket, `mixed`, `text`, and tokenizing on one core (`ids`).

    Args:
        quiet: returns a context in which nothing else uses the device.
    """
    flops = count_flops(sizes)
    with tempfile.TemporaryDirectory() as folder:
        save_models(sizes, Path(folder))
        image, text = load_encoders(Path(folder), device, options.precision, options.compile)
    small, large = (picture_work(image, b, options.batch_size, flops[str(b)]) for b in sizes.buckets)
    captions = [f"picture {i} of nothing in particular, in many colours" for i in range(options.batch_size)]
    caption_work = RepeatableBatch(
        lambda: text.start_batch(captions, len(captions)), len(captions), len(captions) * flops["text"]
    )
    mixed = mixture(small, large)
    ids = RepeatableBatch(lambda: partial(text.tokenize, captions, len(captions)), len(captions), 0)
    return {
        "ids": rates_of([ids], 10 * options.batches, quiet),
        str(sizes.buckets[0]): rates_of([small], options.batches, quiet),
        str(sizes.buckets[1]): rates_of([large], options.batches, quiet),
        "mixed": rates_of(mixed, len(mixed) * max(1, options.batches // len(mixed)), quiet),
        "text": rates_of([caption_work], options.batches, quiet),
    }


def main() -> None:
    """Measure, print a section, and write the JSON file."""
    parser = argparse.ArgumentParser(prog="bench.encode", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=("float32", "float16", "bfloat16"), default="bfloat16")
    parser.add_argument("--batch-size", type=int, help="default: 64 on a GPU, 8 on a CPU")
    parser.add_argument("--batches", type=int, help="number of timed batches; default: 33 on a GPU, 6 on a CPU")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    parser.add_argument("--json", type=Path, help="write a benchmark file for `make plan` here")
    options = parser.parse_args()
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    options.batch_size = options.batch_size or (64 if on_gpu else 8)
    options.batches = options.batches or (33 if on_gpu else 6)
    sizes = sizes_for(device)
    rates = measure(options, sizes, device)
    # measured last, on the warm device
    matrix = matmul_tflops(device, torch.bfloat16)
    titles = {"mixed": f"VAE, {sizes.buckets[0]} and {sizes.buckets[1]} as {MIX[0]} to {MIX[1]}", "text": "captions"}
    titles["ids"] = "tokenizing captions, on the host"
    rows = [
        (titles.get(name, f"VAE at {name}"), f"{items:,.1f}", f"{tflops:,.3g}", f"{tflops / matrix:.0%}")
        for name, (items, tflops) in rates.items()
    ]
    body = table(("what", "per second", "TFLOP/s", "share of the bf16 matrix rate"), rows)
    networks = "Stable Diffusion 2's networks" if on_gpu else "small networks, as a smoke test"
    how = f"{options.precision}, batches of {options.batch_size}, {'compiled' if options.compile else 'not compiled'}"
    body += f"\n\n{networks}, {how}. A large bf16 matrix product in the same run: {matrix:,.3g} TFLOP/s."
    print(section("The encoders", "bench.encode", body))
    if options.json:
        found = encoder_rates((name, per_second) for name, (per_second, _) in rates.items())
        write_bench_file(options.json, bench_file("bench.encode", device_name(device), found))


if __name__ == "__main__":
    main()
