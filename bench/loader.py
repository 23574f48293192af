"""Compare the loader with a training run, which may wait for it, and with streaming, for the samples of all families.

python -m bench.loader [--samples 2048] [--only families]
"""

import argparse
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
from torch.utils.data import DataLoader

from bench.kit.common import section, table, timed, timed_in_turn
from bench.kit.families import FAMILIES, GPUS_OF_A_NODE, Family, read_family
from bench.kit.roots import make_root
from train.data.loader import Loader
from train.data.spec import DataConfig, DataSpec
from train.data.streams import open_data
from train.run.reporting.json_lines import read_json_lines

UNET = Path("bench/kit/unet.json")
DEMO_BUCKET, DEMO_TEXT = "64x64", (16, 64)
SD2_BUCKET, SD2_TEXT = "256x256", (77, 1024)
BATCH = 64
PARTS = 8
ROUNDS = 5
COPIED = 1 << 28
FAMILY_SAMPLES = 128


def main() -> None:
    """Measure, and print a Markdown section."""
    parser = argparse.ArgumentParser(prog="bench.loader", description=__doc__)
    parser.add_argument(
        "--samples", type=int, default=2048, help="samples per root; those of SD2's size take 174 kB each"
    )
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        parts: dict[str, Callable[[], str]] = {
            "unet": lambda: beside_a_run(demo(), folder / "run", cores),
            "streaming": lambda: against_streaming(sd2(), cores),
            "first": lambda: first_batch(sd2()),
            "families": lambda: of_families(folder),
        }
        parser.add_argument("--only", nargs="*", choices=parts, default=list(parts))
        options = parser.parse_args()
        per_part = [options.samples // PARTS] * PARTS
        demo = cache(lambda: make_root(folder / "demo", {DEMO_BUCKET: per_part}, DEMO_TEXT))
        sd2 = cache(lambda: make_root(folder / "sd2", {SD2_BUCKET: per_part}, SD2_TEXT))
        print(section("The loader", "bench.loader", "\n\n".join(parts[name]() for name in options.only)))


def open_stream(root: Path, bucket: str, num_workers: int) -> tuple[DataConfig, DataSpec]:
    """Open a root like a training run does, with few enough canonical nodes to use all files of a small root."""
    config = DataConfig.model_validate(
        {"streams": [{"root": str(root), "bucket": bucket}], "num_workers": num_workers, "num_canonical_nodes": 8}
    )
    return config, open_data(config, BATCH)


class Reading:
    """A callable that reads one epoch. The first call also hashes files and starts loader processes."""

    def __init__(self, root: Path, bucket: str, num_workers: int):
        config, self.spec = open_stream(root, bucket, num_workers)
        self.batches = iter(Loader(config, self.spec, BATCH, 0, 0, torch.arange(BATCH)))

    def __call__(self) -> None:
        for _ in range(self.spec.steps_per_epoch):
            next(self.batches)


def against_streaming(root: Path, cores: int) -> str:
    """Compare an epoch of the loader with one of StreamingDataset in a DataLoader, for samples of SD2's size."""
    from streaming import StreamingDataset  # not installed on every machine that runs the GPU check
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
        "**Compared with streaming's reader**: the same root, shuffled, in batches of tensors. StreamingDataset "
        "(shuffle, 8 canonical nodes) runs in torch's DataLoader with a simple collate function.\n\n"
        + table(header, rows)
    )


def stacked(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate samples as a simple training loop would."""
    arrays = {name: [sample[name] for sample in samples] for name in ("image_latents", "text_latents.text")}
    return {name: torch.from_numpy(np.stack(values)) for name, values in arrays.items()}


def exhaust(batches: Iterable[object]) -> None:
    """Consume all batches."""
    for _ in batches:
        pass


def first_batch(root: Path) -> str:
    """Measure the time from building the loader to its first batch, at the start and at 90 % of an epoch."""
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
    header = ["loader processes", "at the start, s", "at 90 %, s", "ratio", "lowest to highest"]
    return "**Time to the first batch**, including hashing its files:\n\n" + table(header, rows)


def run_fields(root: Path, run_dir: Path) -> dict[str, Any]:
    """Return the config of a short run that trains the demo's U-Net on the latents in `root`."""
    config = yaml.safe_load(Path("examples/shapes/configs/phase1.yaml").read_text())
    return config | {
        "run_dir": str(run_dir),
        "backbone": {"config": str(UNET)},
        "max_steps": 100,
        "global_batch_size": BATCH,
        "microbatch_size": 32,
        "data": {
            "streams": [{"root": str(root), "bucket": DEMO_BUCKET}],
            "num_workers": 1,
            "num_canonical_nodes": 8,
        },
        "ema": {"start_step": None},
        "log": {"every": 10, "tracker": "none"},
    }


def beside_a_run(root: Path, run_dir: Path, cores: int) -> str:
    """Measure the share of time that a real run of a small U-Net waits for data, and compare its rate with that of the
    loader alone on the same cores."""
    path = run_dir.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(run_fields(root, run_dir)))
    subprocess.run([sys.executable, "-m", "train", "--config", str(path)], check=True, stdout=sys.stderr)
    lines = read_json_lines(run_dir / "metrics.jsonl")[1:]  # the first line waits for the loader to start
    shutil.rmtree(run_dir)
    waits = [line["data_wait"] for line in lines]
    rate = np.median([line["images_per_second"] for line in lines])
    rows = []
    for num_workers in (0, 1, cores):
        reading = Reading(root, DEMO_BUCKET, num_workers)
        reading()
        images = reading.spec.steps_per_epoch * BATCH / np.median([timed(reading)[0] for _ in range(ROUNDS)])
        reading.batches.close()
        rows.append([num_workers, f"{images:,.0f}", f"{images / rate:.0f} ×"])
    return (
        f"**Compared with a run** that trains {UNET} at {rate:,.0f} images/s on {cores} cores with 1 loader process. "
        f"It waits for data {np.mean(waits):.2%} of the time from step 10 on, and at most {max(waits):.2%} over 10 "
        f"steps.\n\n" + table(["loader processes", "loader alone, images/s", "relative to the run"], rows)
    )


def of_families(folder: Path) -> str:
    """Compare the loader's rate for each family's samples with the planner's rate of a node and with a memory copy."""
    rows = [family_row(read_family(name), folder / name) for name in FAMILIES]
    header = ["family", "bytes stored", "in a batch", "samples/s", "GB/s", "copy GB/s", "node's images/s"]
    return (
        f"**Samples of each family** in batches of {BATCH}, from the page cache, without loader processes, and a plain "
        f"copy. Rates are per second of CPU time, so other work on the machine matters little. The last columns are "
        f"the images/s that the planner expects from {GPUS_OF_A_NODE} H200s, and the cores that loading 3 × as many "
        f"would keep busy.\n\n" + table([*header, "cores for 3 ×"], rows)
    )


def family_row(family: Family, root: Path) -> list[object]:
    """Measure one family, and return its row of the table."""
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


if __name__ == "__main__":
    main()
