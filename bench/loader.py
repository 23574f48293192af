"""The loader against a training step and against plain reading; a real run's wait; the first batch after a resume.

python -m bench.loader [--samples 2048] [--only families]
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from diffusers import UNet2DConditionModel
from torch.utils.data import DataLoader

from bench.kit.common import section, table, timed_in_turn
from bench.kit.families import FAMILIES, GPUS_OF_A_NODE, Family, read_family
from bench.kit.roots import make_root
from shards.base.store import LocalStore
from train.data.loader import Loader
from train.data.selection import FilterConfig, select
from train.data.spec import DataConfig, DataSpec
from train.data.streams import open_data
from train.run.telling.json_lines import read_json_lines

UNET = Path("examples/shapes/unet.json")
DEMO_BUCKET, DEMO_TEXT = "64x64", (16, 64)
SD2_BUCKET, SD2_TEXT = "256x256", (77, 1024)
BATCH = 64
PARTS = 8
ROUNDS = 5
BLOCK = 1 << 22
COPIED = 1 << 28
FAMILY_SAMPLES = 128


def main() -> None:
    """Measure, and print a section of docs/evidence/benchmarks.md."""
    parser = argparse.ArgumentParser(prog="bench.loader", description=__doc__)
    parser.add_argument("--samples", type=int, default=2048, help="of each root; 174 kB each of the one of SD2's size")
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        parts: dict[str, Callable[[], str]] = {
            "unet": lambda: against_the_unet(demo(), cores),
            "plain": lambda: against_plain_reading(sd2(), cores),
            "streaming": lambda: against_streaming(sd2(), cores),
            "first": lambda: first_batch(sd2()),
            "filter": lambda: table_reading(demo()),
            "wait": lambda: wait_of_a_run(demo(), folder / "run", cores),
            "families": lambda: of_families(folder),
        }
        parser.add_argument("--only", nargs="*", choices=parts, default=list(parts))
        options = parser.parse_args()
        per_part = [options.samples // PARTS] * PARTS
        demo = cache(lambda: make_root(folder / "demo", {DEMO_BUCKET: per_part}, DEMO_TEXT))
        sd2 = cache(lambda: make_root(folder / "sd2", {SD2_BUCKET: per_part}, SD2_TEXT))
        print(section("The loader", "bench.loader", "\n\n".join(parts[name]() for name in options.only)))


def open_stream(root: Path, bucket: str, num_workers: int) -> tuple[DataConfig, DataSpec]:
    """A run's data, with all of a small root's files in play."""
    config = DataConfig.model_validate(
        {"streams": [{"root": str(root), "bucket": bucket}], "num_workers": num_workers, "num_canonical_nodes": 8}
    )
    return config, open_data(config, BATCH)


class Reading:
    """Reads an epoch each time it is called; files are hashed and loader processes started in the first."""

    def __init__(self, root: Path, bucket: str, num_workers: int):
        config, self.spec = open_stream(root, bucket, num_workers)
        self.batches = iter(Loader(config, self.spec, BATCH, 0, 0, torch.arange(BATCH)))

    def __call__(self) -> None:
        for _ in range(self.spec.steps_per_epoch):
            next(self.batches)


def unet_rate() -> float:
    """Training steps of the demo's U-Net on all cores, in images per second."""
    torch.manual_seed(0)
    torch.backends.cuda.enable_flash_sdp(False)
    unet = UNet2DConditionModel.from_config(json.loads(UNET.read_text()))
    optimizer = torch.optim.AdamW(unet.parameters(), fused=True)
    latents, text = torch.randn(BATCH, 4, 8, 8), torch.randn(BATCH, *DEMO_TEXT)
    timesteps = torch.arange(BATCH)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            prediction = unet(latents, timesteps, text).sample
        prediction.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return BATCH / float(np.median([seconds(step) for _ in range(2 * ROUNDS)][ROUNDS:]))


def against_the_unet(root: Path, cores: int) -> str:
    """The demo's shapes: how much faster the loader is than the U-Net that it feeds, on the same cores."""
    rate = unet_rate()
    rows = []
    for num_workers in (0, 1, cores):
        reading = Reading(root, DEMO_BUCKET, num_workers)
        reading()
        images = reading.spec.steps_per_epoch * BATCH / np.median([seconds(reading) for _ in range(ROUNDS)])
        reading.batches.close()
        rows.append([num_workers, f"{images:,.0f}", f"{images / rate:.0f} ×"])
    return (
        f"**Against the demo's U-Net** ({UNET}, batches of {BATCH}, bfloat16, {cores} threads): it trains on "
        f"{rate:,.0f} img/s.\n\n"
        + table(["loader processes", "img/s of the loader alone", "of the U-Net's rate"], rows)
    )


def against_plain_reading(root: Path, cores: int) -> str:
    """Samples of SD2's size: bytes per second against one sequential read and copy of the same files."""
    paths = sorted((root / SD2_BUCKET).glob("*/*.mds"))
    total = sum(path.stat().st_size for path in paths)
    block, target = bytearray(BLOCK), np.empty(BLOCK, np.uint8)

    def plain() -> None:
        for path in paths:
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(block):
                    target[:count] = np.frombuffer(block, np.uint8, count)

    rows = []
    for num_workers in (0, 1, cores):
        reading = Reading(root, SD2_BUCKET, num_workers)
        share = reading.spec.steps_per_epoch * BATCH / reading.spec.streams[0].num_samples
        pair = timed_in_turn(reading, plain, ROUNDS)
        reading.batches.close()
        loaded = share * total / np.median(pair.first_seconds)
        plainly = total / np.median(pair.second_seconds)
        rows.append(
            [num_workers, f"{loaded / 1e9:.2f}", f"{plainly / 1e9:.2f}", f"{share * pair.ratio:.0%}", pair.spread]
        )
    return (
        f"**Against plain reading**: samples of {total / sum_samples(root):,.0f} bytes, {total / 1e6:.0f} MB in all, "
        f"in the page cache for both; the plain one reads the files from end to end in blocks of 4 MiB, and copies "
        f"each block once, in one thread.\n\n"
        + table(["loader processes", "loader GB/s", "plain GB/s", "share", "time ratios, lowest to highest"], rows)
    )


def against_streaming(root: Path, cores: int) -> str:
    """Samples of SD2's size: an epoch of the loader's batches against one of StreamingDataset's under a DataLoader."""
    from streaming import StreamingDataset  # which a machine that checks its GPU need not have
    from streaming.base.util import clean_stale_shared_memory

    rows = []
    for num_workers in (0, 1, cores):
        reading = Reading(root, SD2_BUCKET, num_workers)
        clean_stale_shared_memory()
        dataset = StreamingDataset(local=str(root / SD2_BUCKET), batch_size=BATCH, shuffle=True, num_canonical_nodes=8)
        theirs = DataLoader(
            dataset, BATCH, num_workers=num_workers, collate_fn=stacked, persistent_workers=num_workers > 0
        )
        share = reading.spec.steps_per_epoch * BATCH / len(dataset)
        pair = timed_in_turn(reading, partial(exhaust, theirs), ROUNDS)
        reading.batches.close()
        ours = reading.spec.steps_per_epoch * BATCH / np.median(pair.first_seconds)
        rate = len(dataset) / np.median(pair.second_seconds)
        rows.append([num_workers, f"{ours:,.0f}", f"{rate:,.0f}", f"{share * pair.ratio:.1f} ×", pair.spread])
    header = ["processes", "our loader, samples/s", "StreamingDataset", "ratio", "time ratios, lowest to highest"]
    return (
        "**Against streaming's reader**: the same root, shuffled, in batches of tensors; StreamingDataset (shuffle, 8 "
        "canonical nodes) under torch's DataLoader with a collate function of five lines.\n\n" + table(header, rows)
    )


def stacked(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch as a loop of one's own would make it."""
    arrays = {name: [sample[name] for sample in samples] for name in ("image_latents", "text_latents.text")}
    return {name: torch.from_numpy(np.stack(values)) for name, values in arrays.items()}


def exhaust(batches: Iterable[object]) -> None:
    """Take all of them."""
    for _ in batches:
        pass


def sum_samples(root: Path) -> int:
    """Samples of SD2's bucket."""
    return open_stream(root, SD2_BUCKET, 0)[1].streams[0].files.num_samples


def first_batch(root: Path) -> str:
    """From building the loader to its first batch, at an epoch's start and at 90 % of it."""
    rows = []
    for num_workers in (0, 2):
        config, spec = open_stream(root, SD2_BUCKET, num_workers)

        def begin(step: int, config: DataConfig = config, spec: DataSpec = spec) -> None:
            batches = iter(Loader(config, spec, BATCH, 0, step, torch.arange(BATCH)))
            next(batches)
            batches.close()

        late = int(0.9 * spec.steps_per_epoch)
        pair = timed_in_turn(partial(begin, 0), partial(begin, late), ROUNDS)
        start, resumed = np.median(pair.first_seconds), np.median(pair.second_seconds)
        rows.append([num_workers, f"{start:.3f}", f"{resumed:.3f}", f"{pair.ratio:.2f}", pair.spread])
    header = ["loader processes", "at the start s", "at 90 % s", "ratio", "lowest to highest"]
    return "**Time to the first batch**, files hashed included:\n\n" + table(header, rows)


def table_reading(root: Path) -> str:
    """What a filter costs when a run begins, per part."""
    _, spec = open_stream(root, DEMO_BUCKET, 0)
    config = FilterConfig.model_validate({"aesthetic": {"min": 5.0}, "punsafe": {"max": 0.1}})
    store, files = LocalStore(root), spec.streams[0].files
    taken = np.median([seconds(lambda: select(store, DEMO_BUCKET, files, config)) for _ in range(ROUNDS)])
    rows = spec.streams[0].files.num_samples // PARTS
    return f"**Planning a filter** takes {1000 * taken / PARTS:.1f} ms per part of {rows} samples."


def wait_of_a_run(root: Path, run_dir: Path, cores: int) -> str:
    """The share of its time that a real run of the demo's U-Net waits for data."""
    config = yaml.safe_load(Path("examples/shapes/configs/phase1.yaml").read_text())
    config["data"] = {
        "streams": [{"root": str(root), "bucket": DEMO_BUCKET}],
        "num_workers": 1,
        "num_canonical_nodes": 8,
    }
    config |= {"run_dir": str(run_dir), "max_steps": 100, "log": {"every": 10, "tracker": "none"}}
    path = run_dir.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(config))
    subprocess.run([sys.executable, "-m", "train", "--config", str(path)], check=True, stdout=sys.stderr)
    lines = read_json_lines(run_dir / "metrics.jsonl")[1:]  # the first line waits for the loader to start
    shutil.rmtree(run_dir)
    waits = [line["data_wait"] for line in lines]
    rate = np.median([line["images_per_second"] for line in lines])
    return (
        f"**Data wait** of a run (the demo's U-Net at {rate:,.0f} img/s on {cores} cores, 1 loader process): "
        f"{np.mean(waits):.2%} of the time from step 10 on, {max(waits):.2%} at most over 10 steps."
    )


def of_families(folder: Path) -> str:
    """Samples of each family's size in its first phase, beside what a node would take and what memory would give."""
    rows = [family_row(read_family(name), folder / name) for name in FAMILIES]
    header = ["family", "bytes stored", "in a batch", "samples/s", "GB/s", "copy GB/s", "a node's img/s"]
    return (
        f"**Samples of each family** in batches of {BATCH}, from the page cache, in the process itself, and a plain "
        f"copy: for each second of processor time, so other work on the machine counts for little. Beside it the img/s "
        f"that the planner expects of {GPUS_OF_A_NODE} H200s, and how many cores 3 × those are work for.\n\n"
        + table([*header, "cores for 3 ×"], rows)
    )


def family_row(family: Family, root: Path) -> list[object]:
    """One family's line."""
    print(f"{family.name} …", file=sys.stderr, flush=True)
    make_root(root, {family.bucket: [FAMILY_SAMPLES]}, encoding=family.encoding, num_tokens=family.num_tokens)
    stored = sum(file.stat().st_size for file in root.glob("*/*/*.mds")) / FAMILY_SAMPLES
    reading = Reading(root, family.bucket, 0)
    block, target = np.ones(COPIED, np.uint8), np.empty(COPIED, np.uint8)
    pair = timed_in_turn(reading, lambda: np.copyto(target, block), ROUNDS, time.process_time)
    shutil.rmtree(root)
    rate = reading.spec.steps_per_epoch * BATCH / float(np.median(pair.first_seconds))
    size, copied = reading.spec.sample_bytes(family.bucket), COPIED / float(np.median(pair.second_seconds))
    return [
        f"{family.name} ({family.bucket})",
        f"{stored:,.0f}",
        f"{size:,}",
        f"{rate:,.0f}",
        f"{rate * size / 1e9:.2f}",
        f"{copied / 1e9:.1f}",
        f"{family.node_rate:,.0f}",
        f"{3 * family.node_rate / rate:.1f}",
    ]


def seconds(function: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
