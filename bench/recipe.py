"""Compare training recipes for the demo: `python -m bench.recipe`.

Each trial trains both phases of the demo from scratch with one change to the demo's configs, and judges images of
combinations that are in no training image. A choice and the demo's recipe are compared seed by seed: in quality, in the
loss in the last quarter of phase 2, and in the CPU time of training. FLOPs say little about the time, because a step of
such a small network mostly consists of small operations. The results are kept in a file, so the same command continues
an interrupted sweep.
"""

import argparse
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench.kit.common import mean_and_interval, table

CONFIGS = Path("examples/shapes/configs")
UNET = Path("examples/shapes/unet.json")
PICTURES = {"held_out": 192, "seen": 96}
"""Number of images judged for each list of combinations."""
PROMPT_SEED, SAMPLING_BATCH = 11, 32
"""Seed of the prompts, which differ from the demo's, and number of images sampled at once."""
PHASES = (1, 2)

Recipe = Mapping[str, Any]
"""Name → value. `unet.NAME` is a field of the network's config, `phase1.NAME` and `phase2.NAME` are fields of that
phase's config, and other names with a dot are fields of both. `warmup` and `ema_start` are fractions of a phase's
steps, and `guidance` and `steps` are settings of the sampler. All other settings are the demo's."""

BASE: Recipe = {"warmup": 0.05, "ema_start": 0.5, "guidance": 3.0, "steps": 6}
V_PREDICTION: Recipe = {
    "objective.prediction": "v_prediction",
    "objective.timestep_sampling": "uniform",
    "objective.shift.factor": 1.0,
}
CHOICES: dict[str, Recipe] = {
    "v-prediction": V_PREDICTION,
    "v-prediction, min-SNR": {**V_PREDICTION, "objective.min_snr_gamma": 5.0},
    "uniform timesteps": {"objective.timestep_sampling": "uniform"},
    "timesteps not shifted": {"objective.shift.factor": 1.0},
    "timesteps shifted by 4": {"objective.shift.factor": 4.0},
    "batches of 64 and 32": {"phase1.global_batch_size": 64, "phase2.global_batch_size": 32},
    "batches of 32 and 16": {"phase1.global_batch_size": 32, "phase2.global_batch_size": 16},
    "a quarter fewer steps": {"phase1.max_steps": 1350, "phase2.max_steps": 750},
    "a constant learning rate in phase 1": {"phase1.schedule.kind": "constant"},
    "attention only at full resolution": {
        "unet.down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "unet.up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    },
    "attention only at half the resolution": {
        "unet.down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
        "unet.up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    },
    "attention in the middle block, too": {"unet.mid_block_type": "UNetMidBlock2DCrossAttn"},
    "four heads": {"unet.attention_head_dim": 4},
    "one level": {
        "unet.block_out_channels": [64],
        "unet.down_block_types": ["CrossAttnDownBlock2D"],
        "unet.up_block_types": ["CrossAttnUpBlock2D"],
    },
    "three levels of 32, 64 and 96 channels": {
        "unet.block_out_channels": [32, 64, 96],
        "unet.down_block_types": ["CrossAttnDownBlock2D"] * 3,
        "unet.mid_block_type": "UNetMidBlock2DCrossAttn",
        "unet.up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    },
    "two thirds of the width": {"unet.block_out_channels": [32, 48]},
    "twice the width": {"unet.block_out_channels": [96, 128]},
    "two layers per block": {"unet.layers_per_block": 2},
    "captions pooled into the timestep embedding": {
        "unet.addition_embed_type": "text",
        "unet.addition_embed_type_num_heads": 4,
    },
    "scale and shift from the timestep": {"unet.resnet_time_scale_shift": "scale_shift"},
    "twice the caption dropout": {"objective.caption_dropout": 0.1},
    "ten times as wide an EMA": {"ema.decay": 0.999},
    "twice the learning rate": {"phase1.optimizer.lr": 4e-3, "phase2.optimizer.lr": 2e-3},
    "half the learning rate": {"phase1.optimizer.lr": 1e-3, "phase2.optimizer.lr": 5e-4},
}


def network_of(recipe: Recipe) -> dict[str, Any]:
    """Return the network's config for a recipe."""
    changes = {name.removeprefix("unet."): value for name, value in recipe.items() if name.startswith("unet.")}
    return json.loads(UNET.read_text()) | changes


def phase_settings(recipe: Recipe, phase: int, seed: int, share: float) -> dict[str, Any]:
    """Return the fields of a phase's config that differ from the file's, with a share of the steps."""
    from shards.base.config import load_config
    from train.config import TrainConfig

    own = f"phase{phase}."
    fields = {name: value for name, value in recipe.items() if "." in name and not name.startswith(("unet.", "phase"))}
    fields |= {name.removeprefix(own): value for name, value in recipe.items() if name.startswith(own)}
    config = load_config(TrainConfig, CONFIGS / f"phase{phase}.yaml", [], "bench.recipe")
    steps = round(share * fields.get("max_steps", config.max_steps))
    return fields | {
        "max_steps": steps,
        "seed": 2 * seed + phase - 1,
        "schedule.warmup_steps": round(recipe["warmup"] * steps),
        "ema.start_step": round(recipe["ema_start"] * steps),
        "checkpoint.every": steps,
        "checkpoint.keep_every": None,
        "evaluate.every": None,
    }


def run_trial(recipe: Recipe, seed: int, share: float, root: Path, folder: Path) -> dict[str, Any]:
    """Train both phases in `folder`, sample, and return the shares of images that follow their prompt."""
    network = folder / "unet.json"
    network.write_text(json.dumps(network_of(recipe)))
    seconds, losses = {}, {}
    for phase in PHASES:
        run = folder / f"phase{phase}"
        settings = phase_settings(recipe, phase, seed, share)
        command = [sys.executable, "-m", "train", "--config", str(CONFIGS / f"phase{phase}.yaml")]
        settings |= {"run_dir": run, "data.root": root, "backbone.config": network}
        if phase == 2:
            settings["init_from"] = folder / "phase1"
        for name, value in settings.items():
            command += [f"--{name}", value if isinstance(value, str) else json.dumps(value, default=str).strip('"')]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds[f"phase{phase}"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses[f"phase{phase}"] = float(np.mean([line["loss"] for line in lines[-len(lines) // 4 :]]))
    return {"seconds": seconds, "loss": losses} | judge_run(folder / "phase2", recipe)


def judge_run(run: Path, recipe: Recipe) -> dict[str, dict[str, float]]:
    """Sample captions of both lists of combinations, and return the shares with the right colour, shape and both."""
    import torch

    from evaluation.sampling.pipeline import load_pipeline, sampler_of
    from examples.shapes.adherence import draw_prompts, score
    from train.export.pipeline import ExportConfig, write_pipeline

    pipeline = load_pipeline(write_pipeline(run, ExportConfig()), "cpu", "float32")
    is_flow = pipeline.scheduler.config.get("prediction_type") == "flow_prediction"
    pipeline.scheduler = sampler_of(pipeline.scheduler, "own" if is_flow else "dpm_solver")
    found = {}
    for name, prompts in draw_prompts(PICTURES, PROMPT_SEED).items():
        pictures: list[np.ndarray] = []
        for start in range(0, len(prompts), SAMPLING_BATCH):
            texts = [prompt.text for prompt in prompts[start : start + SAMPLING_BATCH]]
            images = pipeline(
                texts,
                height=128,
                width=128,
                num_inference_steps=recipe["steps"],
                guidance_scale=recipe["guidance"],
                generator=[torch.Generator().manual_seed(start + i) for i in range(len(texts))],
                output_type="np",
            ).images
            pictures += list((images * 255).round().astype(np.uint8))
        found[name] = score(np.stack(pictures), prompts)
    return found


def demo_id() -> str:
    """Return a hash of the demo's files, on which all trials depend."""
    files = [UNET, *(CONFIGS / f"phase{phase}.yaml" for phase in PHASES)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def results_table(rows: list[dict[str, Any]], share: float) -> str:
    """Return a Markdown table of all choices that have results with the demo's present files."""
    by = {_key(row["recipe"], row["seed"]): row for row in rows if (row["share"], row["demo"]) == (share, demo_id())}
    seeds = sorted({row["seed"] for row in by.values()})
    lines = []
    for name, changes in {"the demo": {}, **CHOICES}.items():
        trials = {seed: by[key] for seed in seeds if (key := _key({**BASE, **changes}, seed)) in by}
        if not trials:
            continue
        base = {seed: by[key] for seed in trials if changes and (key := _key(BASE, seed)) in by}
        points = [100 * (trials[seed]["held_out"]["both"] - row["held_out"]["both"]) for seed, row in base.items()]
        # with another objective, a loss means something else
        comparable = not any(field.startswith("objective.") for field in changes)
        times = [sum(trials[seed]["seconds"].values()) / sum(row["seconds"].values()) for seed, row in base.items()]
        losses = [trials[seed]["loss"]["phase2"] - row["loss"]["phase2"] for seed, row in base.items() if comparable]
        shares = (np.mean([row["held_out"][what] for row in trials.values()]) for what in ("colour", "shape"))
        lines.append(
            [
                *(name, len(trials), *(f"{share:.1%}" for share in shares)),
                mean_and_interval(points, "+.1f") if points else "",
                mean_and_interval(losses, "+.3f") if losses else "",
                mean_and_interval(times, ".2f") if times else "",
            ]
        )
    columns = ["choice", "seeds", "colour", "shape", "both, change in points", "change in loss", "CPU time, ratio"]
    return table(columns, lines)


def _key(recipe: Recipe, seed: int) -> tuple[str, int]:
    return json.dumps(dict(recipe), sort_keys=True), seed


def main() -> None:
    """Run all trials that have no result yet, and print the table."""
    parser = argparse.ArgumentParser(prog="bench.recipe", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="CHOICE", help="default: all choices")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--share", type=float, default=0.7, help="steps of a trial, as a fraction of the config's")
    parser.add_argument("--processes", type=int, default=2, help="trials at once, each on one core")
    parser.add_argument("--root", type=Path, default=Path("runs/demo/latents"), help="latents root of a `make demo`")
    parser.add_argument("--folder", type=Path, default=Path("runs/recipe"), help="for results and running trials")
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trial:
        request = json.loads(options.trial)
        folder = Path(request.pop("folder"))
        (folder / "result.json").write_text(json.dumps(run_trial(folder=folder, **request)))
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    results = options.folder / "trials.jsonl"
    results.touch()
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    chosen = {name: CHOICES[name] for name in options.names} if options.names else CHOICES
    done = [row for row in rows if (row["share"], row["demo"]) == (options.share, demo_id())]
    known = {_key(row["recipe"], row["seed"]) for row in done}

    def trial(name: str, recipe: Recipe, seed: int) -> None:
        folder = options.folder / f"{name.replace(' ', '-')}.{seed}.{os.getpid()}"
        folder.mkdir()
        request = {"recipe": recipe, "seed": seed, "share": options.share}
        request |= {"root": str(options.root.absolute()), "folder": str(folder)}
        command = [sys.executable, "-m", "bench.recipe", "--trial", json.dumps(request)]
        with (folder / "errors").open("w") as errors:
            code = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=errors).returncode
        if code:
            print(f"{name}, seed {seed}, failed: see {folder}/errors", flush=True)
            return
        row = {"choice": name, "recipe": recipe, "seed": seed, "share": options.share, "demo": demo_id()}
        row |= json.loads((folder / "result.json").read_text())
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        rows.append(row)
        shutil.rmtree(folder)
        print(f"{name}, seed {seed}: {row['held_out']} {row['loss']}", flush=True)

    with ThreadPoolExecutor(options.processes) as pool:
        for seed in options.seeds:
            for name, changes in {"the demo": {}, **chosen}.items():
                recipe = {**BASE, **changes}
                if _key(recipe, seed) not in known:
                    pool.submit(trial, name, recipe, seed)
    print(results_table(rows, options.share))


if __name__ == "__main__":
    main()
