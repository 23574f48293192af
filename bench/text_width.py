"""Measure how projecting text affects quality: `python -m bench.text_width ROOT VALIDATION`.

Networks are trained from scratch on ROOT with text in float16, in float8, and projected onto each number of dimensions,
for several seeds. The table reports the validation loss and the squared maximum mean discrepancy (MMD) between
generated and real latents, as paired differences from float16. Running the command again resumes.

Without ROOT, it uses the demo's images, with the demo's text encoder and with one trained on English
(`bench/kit/english.py`). For the latter, the projection is computed from sentences unrelated to the demo: a worst case,
because it may drop dimensions that the demo's captions use.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from bench.kit.common import machine, mean_and_interval, table
from shards.base.device import Precision
from shards.base.store import LocalStore
from shards.format.encoding import EncodingRecord

MODELS = Path("examples/shapes/models")
NUM_IMAGES, NUM_VALIDATION, NUM_SENTENCES = 4000, 512, 4096
SAMPLING_STEPS, GUIDANCE = 20, 3.0
TRANSFORMER = {
    "_class_name": "PixArtTransformer2DModel",
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "patch_size": 1,
    "num_layers": 6,
    "num_attention_heads": 4,
    "attention_head_dim": 24,
    "cross_attention_dim": 96,
    "norm_type": "ada_norm_single",
    "use_additional_conditions": False,
    "interpolation_scale": 1.0,
}


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
    root: Path
    validation: Path
    config: Path
    widths: Sequence[int]
    folder: Path
    projection: Path | None = None
    """Root whose projection to use; None: a projection computed from `root`."""
    can_sample: bool = True
    """Whether a diffusers pipeline exists for this network and text encoder."""

    @property
    def settings(self) -> list[Setting]:
        """All settings, float16 first."""
        return [Setting("float16", None), Setting("float8", None), *(Setting("float8", width) for width in self.widths)]

    def roots(self, setting: Setting) -> tuple[Path, Path]:
        """Derive the root and the validation root with a setting, and return their folders."""
        if setting == Setting("float16", None):
            return self.root, self.validation
        made = self.folder / "roots" / f"{self.root.name}-{setting.storage}-{setting.width}"
        train, validation = made / "train", made / "validation"
        options = ["--text.storage", setting.storage]
        own = [] if setting.width is None else ["--text.width", str(setting.width)]
        like = ["--text.projection", str(self.projection)] if self.projection and own else []
        derive(self.root, train, *options, *own, *like)
        derive(self.validation, validation, *options, *(["--text.projection", str(train)] if own else []))
        return train, validation


def derive(source: Path, target: Path, *options: str) -> None:
    """Run `shards derive`, which does nothing if the target is complete."""
    python("shards", "derive", str(source), str(target), *options)


def python(module: str, *arguments: str) -> None:
    """Run a command of this project with one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    subprocess.run([sys.executable, "-m", module, *arguments], env=environment, check=True, stdout=subprocess.DEVNULL)


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
    if samples and comparison.can_sample:
        python("bench.text_width", "--sample", str(run), str(validation), str(samples))
        found |= json.loads((run / "samples.json").read_text())
    return found


def sample_run(run: Path, validation: Path, count: int) -> None:
    """Sample a run's exported pipeline on the captions of a root, and write the MMD between the generated latents and
    the root's to RUN/samples.json."""
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
    distance = mmd(features, np.arange(count), reference.reshape(count, -1), cubic).value
    (run / "samples.json").write_text(json.dumps({"distance": distance}))


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


def demo_comparisons(folder: Path, language_steps: int) -> list[Comparison]:
    """Make the demo's world and both text encoders, and encode them into roots."""
    from bench.kit.english import make_encoder
    from examples.shapes.world import write_world

    english = folder / "english"
    if not (english / "text_encoder").exists():
        make_encoder(english, language_steps)
    encoders = {"demo's encoder": MODELS, "English encoder": english}
    for name, count, seed in (("train", NUM_IMAGES, 1), ("validation", NUM_VALIDATION, 2)):
        if not (folder / "images" / name).exists():
            pictures = write_world(folder / "images" / f".{name}", count, seed)
            for picture in pictures:
                if picture.caption is not None:
                    path = folder / "images" / f".{name}" / picture.path
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.with_suffix(".txt").write_text(picture.caption)
            (folder / "images" / f".{name}").rename(folder / "images" / name)
    write_sentences(folder / "images" / "sentences")
    comparisons = []
    for encoder, models in encoders.items():
        tag = encoder.partition(" ")[0].removesuffix("'s").lower()
        roots = {name: folder / "roots" / f"{tag}-{name}" for name in ("train", "validation", "sentences")}
        for name, root in roots.items():
            if name == "sentences" and models is MODELS:
                continue
            more = ["--text.width", "512"] if name == "sentences" else []
            encode(folder / "images" / name, root, models, *more)
        width = next(iter(EncodingRecord.load(LocalStore(roots["train"])).texts.values())).width
        widths = [width // 16, width // 8, width // 4, width // 2] if models is MODELS else [64, 128, 256, 512]
        for network, fields in networks(width).items():
            config = folder / f"{tag}-{network}.yaml"
            write_config(config, folder / f"{tag}-{network}.json", fields, roots["train"], roots["validation"])
            comparisons.append(
                Comparison(
                    f"{network}, {encoder}",
                    roots["train"],
                    roots["validation"],
                    config,
                    widths,
                    folder,
                    None if models is MODELS else roots["sentences"],
                    can_sample=network == "U-Net",
                )
            )
    return comparisons


def write_sentences(folder: Path) -> None:
    """Write English sentences as captions of blank images."""
    from bench.kit.english import definitions

    if folder.exists():
        return
    texts = definitions()
    order = np.random.default_rng(0).permutation(len(texts))[:NUM_SENTENCES]
    partial = folder.with_name(f".{folder.name}")
    partial.mkdir(parents=True, exist_ok=True)
    for number, place in enumerate(order):
        Image.new("RGB", (64, 64), "white").save(partial / f"{number:05d}.png")
        (partial / f"{number:05d}.txt").write_text(texts[place])
    partial.rename(folder)


def encode(images: Path, root: Path, models: Path, *more: str) -> None:
    """Encode a folder of images at 64 px with float16 text, full-width by default."""
    fields = {
        "input": images,
        "output": root,
        "texts.text.model": models / "text_encoder",
        "texts.text.tokenizer": models / "tokenizer",
        "buckets": '["64x64"]',
        "captions": "txt",
        "precision": "float32",
        "text.storage": "float16",
        "workers.num_cpus": 1,
    }
    words = [word for name, value in fields.items() for word in (f"--{name}", str(value))]
    python("precompute", "--config", "examples/shapes/configs/precompute.yaml", *words, *more)


def networks(width: int) -> dict[str, dict[str, Any]]:
    """Return the configs of a U-Net and a transformer that read states of this width."""
    unet = json.loads(Path("examples/shapes/unet.json").read_text())
    return {
        "U-Net": unet | {"sample_size": 8, "cross_attention_dim": width},
        "transformer": TRANSFORMER | {"caption_channels": width},
    }


def write_config(path: Path, network: Path, fields: dict[str, Any], root: Path, validation: Path) -> None:
    """Write the training config of a network: the demo's first phase, with validation."""
    network.write_text(json.dumps(fields))
    config = yaml.safe_load(Path("examples/shapes/configs/phase1.yaml").read_text())
    config["backbone"] = {"config": str(network.absolute())}
    samples = NUM_VALIDATION * 3 // 4  # stage 1 rejects some of the demo's images
    config["validation"] = {"root": str(validation), "bucket": "64x64", "batch_size": 32, "samples": samples}
    config["data"]["streams"] = [{"root": str(root), "bucket": "64x64"}]
    config |= {"ema": {"start_step": None}, "global_batch_size": 32, "microbatch_size": 32}
    path.write_text(yaml.safe_dump(config))


def encoding_speed(width: int, rounds: int = 15) -> str:
    """Compare the CPU time to encode captions with and without a projection, for a text encoder of SD2's shape with
    random weights."""
    import torch

    from bench.encode import CONFIGS, load_encoders, save_models, sizes_for
    from bench.kit.common import timed_in_turn
    from precompute.encode.encoders import TextEncoder
    from precompute.encode.networks import DeviceSettings
    from shards.base.device import choose_device
    from shards.format.towers import Projection, encode_matrix

    device = torch.device(choose_device())
    fields = json.loads((CONFIGS / "text_encoder" / "sd2.json").read_text())
    count = 64 if device.type == "cuda" else 8
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_models(replace(sizes_for(device), text_encoder=fields), folder)
        precision: Precision = "bfloat16" if device.type == "cuda" else "float32"
        _, full = load_encoders(folder, device, precision, False)
        matrix = np.linalg.qr(np.random.default_rng(0).standard_normal((full.tower.width, width)))[0]
        made = Projection(
            matrix=encode_matrix(matrix),
            input_width=full.tower.width,
            energy_shares=(1 / width,) * width,
            calibration_captions=0,
            calibration_sha256="",
        )
        settings = DeviceSettings(device, precision)
        tower = full.tower.with_projection(made)
        narrow = TextEncoder(folder / "text_encoder", folder / "tokenizer", tower, settings)
        captions = ["a red square in front of a blue wall"] * count
        clock = time.perf_counter if device.type == "cuda" else time.process_time
        pair = timed_in_turn(lambda: narrow(captions, count), lambda: full(captions, count), rounds, clock)
    return f"captions encoded per second, relative to full width: {pair.ratio:.3f} ({pair.spread})"


def reading_speed(width: int, rounds: int = 15) -> str:
    """Compare the time to read samples of SD2's size at 256 px from the page cache with projected and full-width
    text."""
    from bench.kit.common import timed_in_turn
    from bench.kit.roots import make_root
    from bench.loader import BATCH, SD2_BUCKET, SD2_TEXT, Reading

    samples = {SD2_BUCKET: [8 * BATCH] * 2}
    with tempfile.TemporaryDirectory() as temporary:
        narrow, full = (
            Reading(make_root(Path(temporary) / str(size), samples, (SD2_TEXT[0], size)), SD2_BUCKET, 0)
            for size in (width, SD2_TEXT[1])
        )
        pair = timed_in_turn(narrow, full, rounds)
    return f"samples read per second, relative to full width: {pair.ratio:.3f} ({pair.spread})"


def main() -> None:
    """Run all trials that have no result yet, and print the tables."""
    parser = argparse.ArgumentParser(prog="bench.text_width", description=__doc__)
    parser.add_argument("root", type=Path, nargs="?", help="latents root with full-width text in float16")
    parser.add_argument("validation", type=Path, nargs="?", help="root of held-out samples, encoded in the same way")
    parser.add_argument("--config", type=Path, default=Path("configs/phase1.yaml"), help="training config")
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--language-steps", type=int, default=1200, help="training steps of the English encoder")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--samples", type=int, default=0, help="latents to sample per network; 0: none")
    parser.add_argument("--processes", type=int, default=1, help="trials to run in parallel")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/text_width"), help="folder for roots, runs and results"
    )
    parser.add_argument("--speed", type=int, metavar="WIDTH", help="only compare the time to encode and to read")
    parser.add_argument("--sample", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sample:
        sample_run(Path(options.sample[0]), Path(options.sample[1]), int(options.sample[2]))
        return
    if options.speed:
        print(f"{machine()}\n\n{encoding_speed(options.speed)}\n{reading_speed(options.speed)}")
        return
    folder: Path = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if options.root is None:
        comparisons = demo_comparisons(folder, options.language_steps)
    else:
        roots = (options.root.absolute(), options.validation.absolute())
        comparisons = [Comparison(options.root.name, *roots, options.config, options.widths, folder)]
    results = folder / "trials.jsonl"
    results.touch()
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    done = {(row["comparison"], row["storage"], row["width"], row["seed"], row["steps"]) for row in rows}

    def trial(comparison: Comparison, setting: Setting, seed: int) -> None:
        found = run_trial(comparison, setting, seed, options.steps, options.samples)
        row = {"comparison": comparison.name, **asdict(setting), "seed": seed, "steps": options.steps, **found}
        rows.append(row)
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)

    for comparison in comparisons:
        for setting in comparison.settings:
            comparison.roots(setting)
    with ThreadPoolExecutor(options.processes) as pool:
        running = [
            pool.submit(trial, comparison, setting, seed)
            for seed in options.seeds
            for comparison in comparisons
            for setting in comparison.settings
            if (comparison.name, setting.storage, setting.width, seed, options.steps) not in done
        ]
        for future in running:
            future.result()
    print(machine())
    for comparison in comparisons:
        chosen = [row for row in rows if row["steps"] == options.steps]
        print(f"\n{comparison.name}, {options.steps} steps\n\n{results_table(comparison, chosen)}")


if __name__ == "__main__":
    main()
