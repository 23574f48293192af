"""Measure how projecting text affects quality: `python -m bench.text_width ROOT VALIDATION`.

Networks are trained from scratch on ROOT with text in float16, in float8, and projected onto each number of dimensions,
for several seeds. The table reports the validation loss and the squared maximum mean discrepancy (MMD) between
generated and real latents, as paired differences from float16. Running the command again resumes. Changing
the roots, the config, --steps or --samples starts new runs.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from bench.kit.common import in_new_process, machine, mean_and_interval, table
from shards.base.config import load_config
from shards.base.store import LocalStore
from shards.format.encoding import EncodingRecord
from train.config import TrainConfig

SAMPLING_STEPS, GUIDANCE = 20, 3.0


@dataclass(frozen=True)
class Setting:
    """Storage of text latents."""

    storage: str
    width: int | None

    @property
    def name(self) -> str:
        """Name in the table."""
        return f"{self.storage}, {'full width' if self.width is None else f'width {self.width}'}"


@dataclass(frozen=True)
class Comparison:
    """A root and a validation root with full-width float16 text, a training config and the settings to compare."""

    name: str
    """Unique name of its runs and results."""
    root: Path
    validation: Path
    config: Path
    widths: Sequence[int]
    folder: Path

    @property
    def settings(self) -> list[Setting]:
        """All settings, float16 first."""
        return [Setting("float16", None), Setting("float8", None), *(Setting("float8", width) for width in self.widths)]

    def roots(self, setting: Setting) -> tuple[Path, Path]:
        """Derive the root and the validation root with a setting, and return their folders."""
        if setting == Setting("float16", None):
            return self.root, self.validation
        roots = hashlib.sha256(f"{self.root}\n{self.validation}".encode()).hexdigest()[:8]
        made = self.folder / "roots" / f"{self.root.name}-{roots}-{setting.storage}-{setting.width}"
        train, validation = made / "train", made / "validation"
        options = ["--text.storage", setting.storage]
        own = [] if setting.width is None else ["--text.width", str(setting.width)]
        derive(self.root, train, *options, *own)
        derive(self.validation, validation, *options, *(["--text.projection", str(train)] if own else []))
        return train, validation


def derive(source: Path, target: Path, *options: str) -> None:
    """Run `shards derive`, which does nothing if the target is complete."""
    python("shards", "derive", str(source), str(target), *options)


def python(module: str, *arguments: str) -> None:
    """Run a command of this project."""
    subprocess.run([sys.executable, "-m", module, *arguments], check=True, stdout=subprocess.DEVNULL)


def run_trial(comparison: Comparison, setting: Setting, seed: int, steps: int, samples: int) -> dict[str, Any]:
    """Train one network, and return its validation loss and, if `samples` is not 0, the MMD of its samples."""
    root, validation = comparison.roots(setting)
    run = comparison.folder / "runs" / f"{comparison.name}-{setting.storage}-{setting.width}-{seed}"
    fields = {
        "run_dir": run,
        "data.root": root,
        "validation.root": validation,
        "seed": seed,
        "max_steps": steps,
        "validation.every": steps,
        "checkpoint.every": steps,
    }
    words = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
    python("train", "--config", str(comparison.config), *words)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, Any] = {"loss": next(line["val_loss"] for line in reversed(lines) if "val_loss" in line)}
    if samples:
        found["distance"] = in_new_process(sample_run, run, validation, samples)
    return found


def sample_run(run: Path, validation: Path, count: int) -> float:
    """Sample a run's exported pipeline on the captions of a root, and return the MMD between the generated latents and
    the root's."""
    import torch

    from evaluation.metrics.kernels import cubic, mmd
    from evaluation.sampling.pipeline import load_pipeline
    from shards.root.committed import load_receipts
    from shards.root.reading import captions, image_latents, read_parts
    from train.export.pipeline import ExportConfig, write_pipeline

    store, encoding = LocalStore(validation), EncodingRecord.load(LocalStore(validation))
    receipts = load_receipts(store)
    bucket = receipts[0].bucket
    parts = read_parts(store, bucket, [receipt.part for receipt in receipts if receipt.bucket == bucket])
    stored = list(islice(parts, count))
    prompts = [captions(sample, encoding)[0] for sample in stored]
    scale, shift = (np.array(of)[:, None, None] for of in (encoding.image.scale, encoding.image.shift))
    reference = np.stack([(image_latents(s)[: encoding.image.channels] - shift) * scale for s in stored])
    pipeline = load_pipeline(write_pipeline(run, ExportConfig()), "cpu", "float32")
    width, height = map(int, bucket.split("x"))
    drawn = []
    for first in range(0, count, 32):
        texts = prompts[first : first + 32]
        generators = [torch.Generator().manual_seed(first + i) for i in range(len(texts))]
        options = {"height": height, "width": width, "guidance_scale": GUIDANCE, "output_type": "latent"}
        drawn.append(pipeline(texts, num_inference_steps=SAMPLING_STEPS, generator=generators, **options).images)
    features = torch.cat(drawn).flatten(1).numpy()
    return float(mmd(features, np.arange(count), reference.reshape(count, -1), cubic).value)


def results_table(comparison: Comparison, rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the changes from float16, with 95 % intervals over seeds."""
    by = {(row["storage"], row["width"], row["seed"]): row for row in rows if row["comparison"] == comparison.name}
    lines = []
    for setting in comparison.settings:
        seeds = [seed for storage, width, seed in by if (storage, width) == (setting.storage, setting.width)]
        pairs = [(by["float16", None, s], by[setting.storage, setting.width, s]) for s in sorted(seeds)]
        if not pairs:
            continue
        losses = [100 * (other["loss"] / whole["loss"] - 1) for whole, other in pairs]
        distances = [o["distance"] - w["distance"] for w, o in pairs if "distance" in o]
        lines.append(
            [
                setting.name,
                f"{comparison_energy(comparison, setting):.2%}",
                len(pairs),
                f"{np.mean([other['loss'] for _, other in pairs]):.5f}",
                "" if setting.width is None and setting.storage == "float16" else mean_and_interval(losses, "+.2f"),
                mean_and_interval(distances, "+.4f") if distances else "",
            ]
        )
    header = ["text", "energy kept", "seeds", "validation loss", "change in %", "change in MMD"]
    return table(header, lines)


def comparison_energy(comparison: Comparison, setting: Setting) -> float:
    """Return the fraction of energy that a setting keeps on its calibration captions."""
    texts = EncodingRecord.load(LocalStore(comparison.roots(setting)[0])).texts.values()
    return min([tower.projection.energy_kept for tower in texts if tower.projection], default=1.0)


def main() -> None:
    """Run all trials that have no result yet, and print the table."""
    parser = argparse.ArgumentParser(prog="bench.text_width", description=__doc__)
    parser.add_argument("root", type=Path, help="latents root with full-width text in float16")
    parser.add_argument("validation", type=Path, help="root of held-out samples, encoded in the same way")
    parser.add_argument("--config", type=Path, default=Path("configs/phase1.yaml"), help="training config")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--samples", type=int, default=0, help="latents to sample per network; 0: none")
    parser.add_argument("--processes", type=int, default=1, help="trials to run in parallel")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/text_width"), help="folder for roots, runs and results"
    )
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder: Path = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    roots = options.root.absolute(), options.validation.absolute()
    config = load_config(TrainConfig, options.config, [], "train").model_dump_json()
    key = hashlib.sha256(json.dumps([*map(str, roots), config, options.steps, options.samples]).encode()).hexdigest()
    comparison = Comparison(f"{options.root.name}-{key[:8]}", *roots, options.config, options.widths, folder)
    results = folder / "trials.jsonl"
    results.touch()
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    done = {(row["comparison"], row["storage"], row["width"], row["seed"]) for row in rows}

    def trial(setting: Setting, seed: int) -> None:
        found = run_trial(comparison, setting, seed, options.steps, options.samples)
        row = {"comparison": comparison.name, **asdict(setting), "seed": seed, "steps": options.steps, **found}
        rows.append(row)
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)

    for setting in comparison.settings:
        comparison.roots(setting)
    with ThreadPoolExecutor(options.processes) as pool:
        running = [
            pool.submit(trial, setting, seed)
            for seed in options.seeds
            for setting in comparison.settings
            if (comparison.name, setting.storage, setting.width, seed) not in done
        ]
        for future in running:
            future.result()
    print(f"{machine()}\n\n{options.root.name}, {options.steps} steps\n\n{results_table(comparison, rows)}")


if __name__ == "__main__":
    main()
